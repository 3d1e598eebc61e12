"""What a user can spend: average bits of all that is stored, bytes, or a KL divergence that may not be exceeded."""

import re
from typing import NamedTuple

from kvqjax._errors import UserError

__all__ = ["Budget", "bytes_of_bits", "read_budget"]

UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}


class Budget(NamedTuple):
    """`kind` is "bits", "bytes" or "kld"."""

    kind: str
    amount: float


def read_budget(text: str | float | int) -> Budget:
    """`2.5` or `2.5 bits`, `8GiB`, `kld=0.01` or `kld<0.01`."""
    found = re.fullmatch(r"\s*(?:(kld)\s*[<=]=?)?\s*([\d.]+(?:e-?\d+)?)\s*([a-z]*)\s*", str(text).lower())
    try:
        amount = float(found[2]) if found else 0.0
    except ValueError:
        amount = 0.0
    unit = found[3] if found else ""
    if found is None or not amount > 0 or (found[1] and unit) or unit not in ("", "bit", "bits", *UNITS):
        raise UserError(f"budget {text!r}; wanted bits (2.5), bytes (8GiB) or a divergence (kld=0.01)")
    if found[1]:
        return Budget("kld", amount)
    return Budget("bytes", amount * UNITS[unit]) if unit in UNITS else Budget("bits", amount)


def bytes_of_bits(bits: float, values: int, context: int) -> float:
    """Bytes of a row of `context` tokens with `values` numbers each."""
    return bits * values * context / 8
