"""Keep verdicts on kernels as files: one JSON file each, written whole or not at all, even if
several processes write.

A file's name is a digest of its verdict's key, so another chip, version or kernel form has another
file. While a check runs, a marker lies beside it. A marker whose process is gone says that the
check killed it."""

import dataclasses
import hashlib
import json
import os
import re
import socket
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from kvqjax._errors import UserError

FORMAT = 1
OUTCOMES = ("faster", "slower", "wrong", "failed", "crashed")
# Seconds after which a check is not under way any more, even if another process has its number now.
LONGEST = 3600


class Key(NamedTuple):
    """The key of a verdict: the chip's name, versions, and the printed name of a candidate."""

    chip: str
    jax: str
    jaxlib: str
    kvqjax: str
    form: str

    @property
    def name(self) -> str:
        """Name of its file, without the ending."""
        digest = hashlib.sha256(json.dumps(self).encode()).hexdigest()[:16]
        return (
            re.sub(r"[^a-z0-9]+", "-", f"{self.chip} {self.form}".lower()).strip("-")[:80]
            + f"-{digest}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a check. `outcome` is one of OUTCOMES; `error` the worst query's relative
    error; `kernel_ms` and `plain_ms` the milliseconds of a call; `seconds` the time the check took;
    `note` says more in one line. None: not known."""

    outcome: str
    error: float | None = None
    kernel_ms: float | None = None
    plain_ms: float | None = None
    seconds: float | None = None
    note: str = ""

    @property
    def usable(self) -> bool:
        """Say whether the kernel gave what the plain path gives, and sooner."""
        return self.outcome == "faster"

    @property
    def sound(self) -> bool:
        """Say whether nothing is wrong with the kernel; it may be slow."""
        return self.outcome in ("faster", "slower")


def _number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _read(text: str, key: Key) -> Verdict | None:
    """Read a verdict from a file's text; None for garbage and for a verdict on something else."""
    try:
        data = json.loads(text)
        numbers = {name: data[name] for name in ("error", "kernel_ms", "plain_ms", "seconds")}
        matches = (data["format"], data["about"]) == (FORMAT, key._asdict()) and all(
            map(_number, numbers.values())
        )
        if not (matches and data["outcome"] in OUTCOMES and isinstance(data["note"], str)):
            return None
        numbers = {
            name: None if number is None else float(number) for name, number in numbers.items()
        }
        return Verdict(outcome=data["outcome"], note=data["note"], **numbers)
    except (ValueError, KeyError, TypeError):
        return None


def _is_ours(path: Path) -> bool:
    """Say whether a file belongs to this user."""
    return not hasattr(os, "getuid") or path.stat().st_uid == os.getuid()


def find(folder: Path, key: Key) -> Verdict | None:
    """Return the verdict kept for `key`; None where there is none, or one that cannot be
    understood. Raise UserError for a file of another user, which is not believed, and for a folder
    that cannot be read."""
    path = folder / f"{key.name}.json"
    try:
        if path.exists():
            if not _is_ours(path):
                raise UserError(f"{path}: belongs to another user")
            return _read(path.read_text(encoding="utf-8", errors="replace"), key)
    except OSError as error:
        raise UserError(f"{folder}: verdicts cannot be read: {error.strerror}") from error
    return None


def died(folder: Path, key: Key) -> bool:
    """Say whether a check of `key` ended with its process."""
    return any(map(_is_dead, folder.glob(f"{key.name}.begun-*")))


def _is_dead(marker: Path) -> bool:
    """Say whether the process that left a marker is gone, as far as this host can know."""
    try:
        begun = json.loads(marker.read_text(encoding="utf-8"))
        host, process, since = begun["host"], int(begun["process"]), float(begun["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return False  # removed meanwhile, or without an owner
    if time.time() - since > LONGEST:
        return True
    if host != socket.gethostname():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _write(path: Path, data: dict) -> None:
    """Write a JSON file whole or not at all. Raise UserError where it cannot be written."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent}: verdicts cannot be kept: {error.strerror}") from error


def begin(folder: Path, key: Key) -> Path:
    """Mark that a check runs, and return the marker, to be deleted when it ends. Raise UserError
    where nothing can be written. Then no check may run either, because a crash would go unnoticed
    and come back every time."""
    process = os.getpid()
    marker = folder / f"{key.name}.begun-{socket.gethostname()}-{process}"
    _write(marker, {"host": socket.gethostname(), "process": process, "time": time.time()})
    return marker


def keep(folder: Path, key: Key, verdict: Verdict) -> None:
    """Write a verdict in place of the one before, and delete the markers of dead checks."""
    data = {"format": FORMAT, "about": key._asdict()} | dataclasses.asdict(verdict)
    _write(folder / f"{key.name}.json", data)
    for marker in filter(_is_dead, list(folder.glob(f"{key.name}.begun-*"))):
        marker.unlink(missing_ok=True)


def reset(folder: Path) -> int:
    """Delete every verdict and marker of this user's folder, and return how many files there were.
    Raise UserError where one cannot be deleted."""
    files = [*folder.glob("*.json"), *folder.glob("*.begun-*")]
    try:
        for path in files:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: verdicts cannot be deleted: {error.strerror}") from error
    return len(files)
