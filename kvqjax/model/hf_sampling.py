"""generation_config.json -> the options of `generate` that draw tokens. Read on request only."""

from pathlib import Path
from typing import Any

from kvqjax._errors import UserError
from kvqjax._files import read_object

__all__ = ["read_sampling"]

_DRAWING = {"temperature": float, "top_k": int, "top_p": float, "min_p": float}  # without do_sample they do nothing


def read_sampling(folder: str | Path) -> dict[str, Any]:
    """What a checkpoint's generation_config.json states of temperature, top_k, top_p, min_p and repetition_penalty; the
    first four only where it says do_sample, and temperature 1 where it says only that. {} without the file. Raises
    UserError for what is no number."""
    file = Path(folder) / "generation_config.json"
    raw = read_object(file) if file.exists() else {}
    options: dict[str, Any] = {"temperature": 1.0} if raw.get("do_sample") else {}
    for name, kind in (_DRAWING | {"repetition_penalty": float}).items():
        value = raw.get(name)
        if value is not None and (name not in _DRAWING or raw.get("do_sample")):
            if isinstance(value, bool) or not isinstance(value, int | float) or kind(value) != value:
                raise UserError(f"{file}: {name}={value!r} is not of type {kind.__name__}")
            options[name] = kind(value)
    return options
