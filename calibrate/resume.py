"""A calibration's state between two steps on disk, so that a run killed at any point continues and
gives the same bytes."""

import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvqjax._errors import UserError
from kvqjax._lock import held

_IDENTITY = "identity"


def identity(*parts: Any) -> str:
    """Compute the digest that ties a state to its inputs: text and arrays, in order."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(
            part.encode() if isinstance(part, str) else np.ascontiguousarray(part).tobytes()
        )
        digest.update(b"\0")
    return digest.hexdigest()


def save_state(path: Path, owner: str, state: Any) -> None:
    """Replace the file at `path` by this pytree of arrays, at once: a reader sees the old state or
    the new one."""
    leaves: dict[str, Any] = {
        str(index): np.asarray(leaf) for index, leaf in enumerate(jax.tree.leaves(state))
    }
    leaves[_IDENTITY] = np.asarray(owner)
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            np.savez(file, **leaves)
        os.replace(part, path)
    except OSError as error:
        raise UserError(
            f"{path}: the calibration's state cannot be written: {error.strerror or error}"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def load_state(path: Path, owner: str, like: Any) -> Any:
    """Read the state of a calibration.

    Args:
        path: of the file.
        owner: the `identity` of the calibration.
        like: the state before the first step, whose structure the saved one has.

    Returns:
        The saved state, or `like` itself where there is no file.

    Raises:
        UserError: a file that cannot be read, or that belongs to another model, method, recipe or
            text.
    """
    if not path.exists():
        return like
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            stored_owner = str(stored[_IDENTITY])
            leaves = [stored[str(index)] for index in range(len(stored.files) - 1)]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path}: the calibration's state cannot be read; delete it to start anew ({error})"
        ) from error
    if stored_owner != owner:
        raise UserError(
            f"{path} is the state of another model, method, recipe or text; delete it to start anew"
        )
    old, structure = jax.tree.flatten(like)
    # Device arrays come back as such, host numbers (a 64-bit count) as they were.
    new = [
        jnp.asarray(x) if isinstance(before, jax.Array) else x
        for x, before in zip(leaves, old, strict=True)
    ]
    return jax.tree.unflatten(structure, new)


def stepped(
    start: dict[str, Any],
    total: int,
    step: Callable[[dict[str, Any]], dict[str, Any]],
    path: Path | None,
    owner: str,
    advance: Callable[[int, int], None] = lambda steps, total: None,
) -> dict[str, Any]:
    """Take a state through all steps of a calibration. A run that was killed goes on where its file
    is.

    Args:
        start: the state before the first step. Its entry "done" counts the steps, and is kept here.
        total: how many steps there are.
        step: `step(state)` gives the state after one step more.
        path: of the file that holds the state after every step; None: no file.
        owner: the `identity` of the calibration.
        advance: `advance(steps, total)` is told each step.

    Returns:
        The state after the last step.

    Raises:
        UserError: another process is at the same file, or as `load_state` and `save_state`.
    """
    with held(path):
        progress = start if path is None else load_state(path, owner, start)
        while (steps := int(progress["done"])) < total:
            progress = step(progress) | {"done": np.int64(steps + 1)}
            if path is not None:
                save_state(path, owner, progress)
            advance(steps + 1, total)
        return progress


def part_state(state: Path, number: int) -> Path:
    """Name the file beside `state` that keeps the progress of one part of a method."""
    return state.with_name(f"{state.stem}.{number}{state.suffix}")


def forget(state: Path) -> None:
    """Delete the progress of a calibration, that of its parts included."""
    state.unlink(missing_ok=True)
    number = 0
    while (path := part_state(state, number)).exists():
        path.unlink()
        number += 1
