"""Calibration artifacts: a method's constants for one model. And the folders in which artifacts,
caches, prefixes and sessions are stored:

    NAME/arrays              an Orbax checkpoint
    NAME/description.json    kind, format, version, the fields that its kind demands (`KINDS`), a mark of each file
"""

import dataclasses
import datetime
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from kvqjax._errors import UserError, unwritten
from kvqjax._files import path_of, read_json
from kvqjax._version import __version__
from kvqjax.cache.state import arrays_text
from kvqjax.methods import Method, parse, spelled_out

# The number of the format. It becomes greater when older folders can no longer be read as before.
# Every option of a method is stored, so that a later version with other defaults reads the method
# that was meant.
FORMAT = 2

# Each kind of folder, and the fields that its description must have, with their types.
KINDS: dict[str, dict[str, type]] = {
    "artifact": {"method": str, "fingerprint": str, "about": dict, "runs": int},
    "cache": {"method": str, "capacity": int, "dtype": str, "batch": int},
    "prefixes": {"method": str, "capacity": int, "chunk": int, "prefixes": list},
    "session": {
        "method": str,
        "history": list,
        "options": dict,
        "parts": list,
        "ids": list,
        "answers": int,
    },
}


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A method's calibrated constants for one model.

    Attributes:
        method: The method.
        constants: The constants of each run of layers, {group: {name: [L_run, ...]}}, as
            `Model.constants` takes them.
        fingerprint: That of the model.
        about: Whatever the calibration recorded: data, losses, explained variance."""

    method: Method
    constants: tuple[dict[str, dict[str, jax.Array | np.ndarray]], ...]
    fingerprint: str
    about: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        about = [f"{key}={value!r}" for key, value in self.about.items()]
        return f"Artifact({self.method}, {self.fingerprint}): " + ", ".join(
            [arrays_text(self.constants), *about]
        )

    def save(self, path: str | os.PathLike) -> None:
        """Write the artifact as a new folder. Raises UserError when `path` exists or cannot be
        written."""
        text = {
            "kind": "artifact",
            "method": spelled_out(self.method),
            "fingerprint": self.fingerprint,
            "about": self.about,
        }
        constants = {name: np.asarray(x) for name, x in flatten(self.constants).items()}
        write_folder(Path(path), text | {"runs": len(self.constants)}, constants)


def flatten(runs: Any) -> dict[str, Any]:
    """Give a tree's leaves by their paths, {"0/k/scale": array, ...}. With one level, empty runs
    are stored as nothing, and names stay readable."""
    leaves = jax.tree_util.tree_flatten_with_path(runs)[0]
    return {
        "/".join(str(getattr(p, "key", getattr(p, "idx", p))) for p in path): leaf
        for path, leaf in leaves
    }


def unflatten(flat: dict[str, Any], runs: int) -> tuple[dict, ...]:
    """Undo `flatten`, for nested dicts of `runs` runs. Raises UserError for a name that belongs to
    none of them."""
    out: tuple[dict, ...] = tuple({} for _ in range(runs))
    for name, leaf in flat.items():
        if not re.fullmatch(r"\d{1,9}(/\w+)+", name) or int(name.split("/")[0]) >= runs:
            raise UserError(f"array {name!r} belongs to none of the {runs} runs of layers")
        run, *groups, last = name.split("/")
        place = out[int(run)]
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = leaf
    return out


def write_folder(path: Path, description: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Write arrays and description.json into a new folder, which appears only when it is complete.

    Args:
        path: of the folder.
        description: what description.json says beside format, version, date and files.
        arrays: by name, as `flatten` gives them.

    Raises:
        UserError: the folder exists, or cannot be written.
    """
    if path_of(path).exists():
        raise UserError(f"{path} exists already; choose another folder")
    part = path.with_name(path.name + ".part")
    stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    description = {"format": FORMAT, "version": __version__, "date": stamp} | description
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        if arrays:
            ocp.save((part / "arrays").absolute(), arrays)
        description["files"] = _file_marks(part)
        (part / "description.json").write_text(
            json.dumps(description, indent=1) + "\n", encoding="utf-8"
        )
        part.rename(path)
    except OSError as error:
        raise unwritten(path, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read_description(path: Path, kind: str) -> dict[str, Any]:
    """Read description.json of a stored folder.

    Args:
        path: of the folder.
        kind: the kind that is wanted (`KINDS`).

    Raises:
        UserError: there is none, or it is of another kind or format, or lacks a field of its kind.
    """
    file = path_of(path / "description.json")
    if not file.exists():
        raise UserError(f"{path}: no description.json here; not a kvqjax {kind}")
    text = read_json(file)
    if not isinstance(text, dict) or text.get("kind") not in list(KINDS):
        raise UserError(f"{path}: description.json is not kvqjax's")
    if text["kind"] != kind:
        raise UserError(f"{path} holds a {text.get('kind')}, not a {kind}")
    if text.get("format") != FORMAT:
        raise UserError(f"{path} has format {text.get('format')}; this version reads {FORMAT}")
    for name, kinds in KINDS[kind].items():
        if not isinstance(text.get(name), kinds):
            raise UserError(f"{path}: description.json has no usable {name!r}")
    return text


def _file_marks(path: Path) -> dict[str, str]:
    """Give size and checksum of every file of a stored folder's arrays, by its name within the
    folder."""
    marks = {}
    for file in sorted((path / "arrays").rglob("*")):
        if not file.is_file():
            continue
        checksum = 0
        with file.open("rb") as content:
            while block := content.read(2**24):  # bytes held at a time
                checksum = zlib.crc32(block, checksum)
        marks[file.relative_to(path).as_posix()] = (
            f"{file.stat().st_size} bytes, crc32 {checksum:08x}"
        )
    return marks


def _require_files(path: Path, description: Mapping[str, Any]) -> None:
    """Raise UserError unless every file of the arrays is as the folder's description says.

    Orbax does not notice changed numbers. At a missing file it raises while its other readers still
    run, whose tracebacks would follow our one line.
    """
    written = description.get("files")
    if not isinstance(written, dict):
        raise UserError(f"{path}: description.json has no usable 'files'")
    try:
        marks = _file_marks(path) if written else {}
    except OSError as error:
        raise UserError(f"{path}: arrays cannot be read: {error.strerror or error}") from error
    for name, mark in written.items():
        if marks.get(name) != mark:
            fault = "is damaged" if name in marks else "is missing"
            raise UserError(f"{path}: arrays cannot be read: {name} {fault}")


def _read_shapes(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Read shape and dtype of every array of a stored folder, without its numbers."""
    if not (path / "arrays").exists():
        return {}
    try:
        stored = ocp.metadata((path / "arrays").absolute()).metadata
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: arrays cannot be read: {str(error).splitlines()[0]}") from error
    if stored is None:  # Orbax says so of files that are missing
        raise UserError(f"{path}: arrays cannot be read: a part of them is missing")
    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in stored.items()}


def read_arrays(
    path: Path,
    description: Mapping[str, Any],
    *,
    wanted: Mapping[str, Any] | None = None,
    places: Mapping[str, jax.sharding.Sharding] | None = None,
) -> dict[str, np.ndarray | jax.Array]:
    """Read the arrays of a stored folder.

    Args:
        path: of the folder.
        description: the folder's, of `read_description`.
        wanted: arrays or shapes that must be there, by name; others may be there too.
        places: where each array goes, every shard straight onto its devices; None: onto the host.

    Returns:
        Arrays by name.

    Raises:
        UserError: a file is missing or damaged, or an array is not as wanted.
    """
    _require_files(path, description)
    stored = _read_shapes(path)
    for name, leaf in (wanted or {}).items():
        array = stored.get(name)
        if array is None or array.shape != leaf.shape or array.dtype != leaf.dtype:
            form = "nothing" if array is None else f"{array.dtype}{array.shape}"
            raise UserError(
                f"{path}: array {name} should be {leaf.dtype}{leaf.shape}, found {form}"
            )
    # Orbax reads into the form of such examples. NumPy's arrays are made without their memory: one
    # number, broadcast.
    like: dict[str, Any] = {}
    for name, array in stored.items():
        if places is None:
            like[name] = np.broadcast_to(np.zeros((), array.dtype), array.shape)
        else:
            like[name] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=places[name])
    if not like:
        return {}
    try:
        return ocp.load((path / "arrays").absolute(), like)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: arrays cannot be read: {str(error).splitlines()[0]}") from error


def load_artifact(path: str | os.PathLike) -> Artifact:
    """Read an artifact folder. Raises UserError when it is missing, damaged, of another format, or
    of a method that this version does not have."""
    path = Path(path)
    text = read_description(path, "artifact")
    try:
        method = parse(text["method"])
    except UserError as error:
        raise UserError(
            f"{path} was calibrated by kvqjax {text.get('version')}, and its method is not of this version ({error}); "
            "calibrate again"
        ) from error
    constants = unflatten(
        {name: jnp.asarray(x) for name, x in read_arrays(path, text).items()}, text["runs"]
    )
    return Artifact(method, constants, text["fingerprint"], text["about"])
