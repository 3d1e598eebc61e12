"""Kept prefixes in a folder: a server that starts again need not read its system prompts again.

    description.json   the owner (model, method, constants, form), and each prefix's trace, length and pages
    arrays             what a row has beside its pages, one row after the other, and the pages, each of them once

Words of codes can be read only with the model, the constants and the form that wrote them. All of
these are compared.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvqjax._errors import UserError
from kvqjax.cache import Cache, CacheLayout
from kvqjax.cache.artifacts import flatten, read_arrays, read_description, write_folder
from kvqjax.methods import spelled_out
from kvqjax.model.loading import Model
from kvqjax.serving.prefixes import TRACE, Contents, SavedPrefix
from kvqjax.step.persist import owner_of, require_owner

FOLDER_PREFIX = "prefixes-"  # what folders that `write_newest` makes begin with; a number follows


def owner_of_engine(model: Model, layout: CacheLayout, chunk: int) -> dict[str, Any]:
    """Describe what must be equal in two engines for one to use the other's prefixes."""
    page = 0 if layout.pool is None else layout.pool.tokens
    form = {"layers": layout.layers, "form": layout.form, "dealt": layout.dealt, "page": page}
    text = {
        "method": spelled_out(layout.method),
        "capacity": layout.capacity,
        "dtype": layout.dtype,
        "chunk": chunk,
    }
    return text | form | owner_of(model, None, layout.method)


def write_prefixes(
    path: Path, owner: dict[str, Any], prefixes: list[SavedPrefix], contents: Contents
) -> None:
    """Write prefixes as a new folder.

    Args:
        path: of the folder, which appears when it is complete.
        owner: of `owner_of_engine`.
        prefixes: in the order of use, the least recently used first.
        contents: what each of their pages holds, by its number.

    Raises:
        UserError: the folder exists, or cannot be written.
    """
    places = {page: place for place, page in enumerate(contents)}
    entries = [
        {
            "trace": prefix.trace.hex(),
            "length": prefix.length,
            "pages": [places[page] for page in prefix.pages],
        }
        for prefix in prefixes
    ]
    arrays: dict[str, np.ndarray] = {}
    if prefixes:
        rows = jax.tree.map(lambda *leaves: np.stack(leaves), *(prefix.row for prefix in prefixes))
        # A page is one place of the second axis, behind the layers.
        pages = (
            jax.tree.map(lambda *leaves: np.concatenate(leaves, 1), *contents.values())
            if contents
            else ()
        )
        arrays = flatten((rows, pages))
    write_folder(path, owner | {"kind": "prefixes", "prefixes": entries}, arrays)


def read_prefixes(
    path: Path, model: Model, owner: dict[str, Any], row: Cache, page: tuple[dict, ...]
) -> tuple[list[SavedPrefix], Contents]:
    """Read what `write_prefixes` wrote.

    Args:
        path: of the folder.
        model: that is served.
        owner: of the engine that reads.
        row: the shapes of what a row has beside its pages.
        page: the shapes of a page's contents.

    Returns:
        As `write_prefixes` took them: prefixes, and contents of pages.

    Raises:
        UserError: the folder is missing or damaged, or another model, method or form of engine
            wrote it.
    """
    text = read_description(path, "prefixes")
    require_owner(path, text, model, owner)
    entries = [_prefix_entry(path, entry) for entry in text["prefixes"]]
    if not entries:
        return [], {}
    count = 1 + max((place for _, _, pages in entries for place in pages), default=-1)
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(entries), *x.shape), x.dtype), row)
    pages = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0], count, *x.shape[2:]), x.dtype),
        page if count else (),
    )
    shapes = flatten((rows, pages))
    arrays = read_arrays(path, text, wanted=shapes)
    rows, pages = jax.tree.unflatten(
        jax.tree.structure((rows, pages)), [arrays[name] for name in shapes]
    )
    contents = {
        place: jax.tree.map(lambda x, at=place: x[:, at : at + 1], pages) for place in range(count)
    }
    prefixes = [
        SavedPrefix(trace, length, jax.tree.map(lambda x, at=number: x[at], rows), numbers)
        for number, (trace, length, numbers) in enumerate(entries)
    ]
    return prefixes, contents


def _prefix_entry(path: Path, entry: Any) -> tuple[bytes, int, list[int]]:
    """Check what a description says of one prefix."""
    try:
        trace, length, pages = bytes.fromhex(entry["trace"]), entry["length"], entry["pages"]
        if len(trace) == TRACE and all(
            type(number) is int and number >= 0 for number in (length, *pages)
        ):
            return trace, length, pages
    except (KeyError, TypeError, ValueError):
        pass
    raise UserError(f"{path}: description.json has a prefix that cannot be read: {str(entry)[:80]}")


# ---- A folder of parts, of which the newest counts ----


def newest_folder(folder: Path) -> Path | None:
    """Find the newest complete folder that `write_newest` left; None where there is none."""
    return max(_parts(folder), key=_number, default=None)


def write_newest(folder: Path, write: Callable[[Path], object]) -> None:
    """Write a new part of `folder`. The older parts are removed once it is complete.

    Args:
        folder: made where it is missing.
        write: writes a folder at the path that it is called with.

    Raises:
        UserError: of `write`.
    """
    older_parts = _parts(folder)
    write(folder / f"{FOLDER_PREFIX}{1 + max(map(_number, older_parts), default=0)}")
    for part in older_parts:
        shutil.rmtree(part, ignore_errors=True)


def _parts(folder: Path) -> list[Path]:
    return [
        part
        for part in folder.glob(f"{FOLDER_PREFIX}*")
        if part.name.removeprefix(FOLDER_PREFIX).isdecimal()
    ]


def _number(part: Path) -> int:
    return int(part.name.removeprefix(FOLDER_PREFIX))
