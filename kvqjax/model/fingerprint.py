"""The fingerprint of a checkpoint: what an artifact says it was calibrated on."""

import dataclasses
import hashlib
import json
from pathlib import Path

from kvqjax.model.checkpoint import header_digest, open_checkpoint, sample_digest
from kvqjax.model.config import ModelConfig

__all__ = ["fingerprint", "parts"]

UNCALIBRATED = ("eos_ids", "bos_id", "sliding_window")  # an edited generation config changes nothing that is calibrated


def parts(text: str) -> dict[str, str]:
    """Split a fingerprint "name=digest,..." into its digests by name."""
    return dict(part.split("=", 1) for part in text.split(",") if "=" in part)


def _non_default(record) -> dict:
    """Fields of a dataclass that differ from their defaults, so that a field added later changes no digest."""
    fields = {f.name: (getattr(record, f.name), f.default) for f in dataclasses.fields(record)}
    return {name: value for name, (value, default) in fields.items() if value != default}


def fingerprint(folder: str | Path, config: ModelConfig) -> str:
    """Digest a checkpoint as "config=...,headers=...,samples=...", so that a mismatch can be named by its part."""
    checkpoint = open_checkpoint(folder)
    fields = {name: value for name, value in _non_default(config).items() if name not in UNCALIBRATED}
    fields["windows"] = config.windows  # as fingerprints have named it from the start
    text = json.dumps(fields, sort_keys=True, default=_non_default)
    digests = {
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "headers": header_digest(checkpoint),
        "samples": sample_digest(checkpoint),
    }
    return ",".join(f"{name}={digest[:16]}" for name, digest in digests.items())
