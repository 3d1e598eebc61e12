"""What every report says about itself, and the text it was made from."""

import datetime
import hashlib
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from kvqjax.errors import UserError
from kvqjax.eval.synthetic import filler
from kvqjax.model import Model

__all__ = ["read_text", "stamp"]


def read_text(data: str, tokens: int, seed: int) -> tuple[str, dict[str, Any]]:
    """The text of a UTF-8 file, or at least `tokens` words of our own when `data` is "synthetic"; and its
    description."""
    if data == "synthetic":
        text = filler(np.random.default_rng(seed), tokens)
    else:
        try:
            text = Path(data).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{data}: not UTF-8 text (byte {error.start})") from error
        except OSError as error:
            raise UserError(f"{data}: {error.strerror}") from error
    if not text.strip():
        raise UserError(f"{data}: no text")
    return text, {"name": data, "sha256": hashlib.sha256(text.encode()).hexdigest(), "characters": len(text)}


def stamp(model: Model, name: str, seed: int) -> dict[str, Any]:
    """Model, its fingerprint, how its weights are kept, versions, seed and date."""
    versions = {package: metadata.version(package) for package in ("kvqjax", "jax", "jaxlib")}
    about = {"model": name, "fingerprint": model.fingerprint, "weights": model.weights}
    about |= {"versions": versions, "seed": seed}
    return about | {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
