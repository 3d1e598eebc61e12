"""Reading single fields of a Hugging Face config, each refused by name and value when it is not what we compute."""

import json
import sys
from typing import NoReturn

from kvqjax._errors import UserError

__all__ = ["integer", "number", "refuse"]


def refuse(field: str, value, wanted: str) -> NoReturn:
    """Raise the one-line UserError for a field of config.json."""
    said = "is missing" if value is None else f"= {json.dumps(value)} is not supported"
    raise UserError(" ".join(f"config.json: {field} {said}; {wanted}".split()))  # a field's name may hold a line break


def integer(raw: dict, field: str, prefix: str = "", most: int = 2**31 - 1) -> int:
    """A positive integer; `prefix` names the object that `raw` is inside config.json."""
    value = raw.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        refuse(prefix + field, value, f"wanted a positive integer of at most {most}")
    return value


def number(raw: dict, field: str, default: float | None = None, prefix: str = "") -> float:
    """A positive number; null means `default`."""
    value = default if raw.get(field) is None else raw[field]
    # Compared with the largest float because a JSON integer can be larger than any.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        refuse(prefix + field, value, "wanted a positive number")
    return float(value)
