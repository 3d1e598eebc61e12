"""Kept prefixes in a folder: a server that starts again need not read its system prompts again.

    description.json   the owner (model, method, constants, form), and each prefix's trace, length and pages
    arrays             what a row has beside its pages, one row after the other, and the pages, each of them once

Words of codes can be read only with the model, the constants and the form that wrote them. All of
these are compared.
"""

import operator
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

FOLDER_PREFIX = "prefixes-"  # folders of `write_newest` have this name and a number


def owner_of_engine(model: Model, layout: CacheLayout, chunk: int) -> dict[str, Any]:
    """Describe what must be equal in two engines for one to use the other's prefixes."""
    return {
        "method": spelled_out(layout.method),
        "capacity": layout.capacity,
        "dtype": layout.dtype,
        "chunk": chunk,
        "layers": layout.layers,
        "form": layout.form,
        "dealt": layout.dealt,
        "page": 0 if layout.pool is None else layout.pool.tokens,
        **owner_of(model, None, layout.method),
    }


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
    # An engine's pages are numbers in its pool. In the folder they are counted from 0.
    places = {page: place for place, page in enumerate(contents)}
    entries = []
    for prefix in prefixes:
        pages = [places[page] for page in prefix.pages]
        entries.append({"trace": prefix.trace.hex(), "length": prefix.length, "pages": pages})
    arrays: dict[str, np.ndarray] = {}
    if prefixes:
        rows = [prefix.row for prefix in prefixes]
        stacked_rows = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
        joined_pages = ()
        if contents:
            # A page is one place of the second axis, behind the layers.
            joined_pages = jax.tree.map(
                lambda *leaves: np.concatenate(leaves, axis=1), *contents.values()
            )
        arrays = flatten((stacked_rows, joined_pages))
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
    numbers = [number for _, _, pages in entries for number in pages]
    count = 1 + max(numbers, default=-1)

    def of_all_prefixes(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(entries), *leaf.shape), leaf.dtype)

    def of_all_pages(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        layers, _, *sizes = leaf.shape
        return jax.ShapeDtypeStruct((layers, count, *sizes), leaf.dtype)

    # As `write_prefixes`: without pages there is no array of them.
    shapes = (
        jax.tree.map(of_all_prefixes, row),
        jax.tree.map(of_all_pages, page) if count else (),
    )
    shapes_by_name = flatten(shapes)
    arrays = read_arrays(path, text, wanted=shapes_by_name)
    rows, pages = jax.tree.unflatten(
        jax.tree.structure(shapes), [arrays[name] for name in shapes_by_name]
    )
    contents = {}
    for place in range(count):
        contents[place] = jax.tree.map(operator.itemgetter(np.s_[:, place : place + 1]), pages)
    prefixes = []
    for number, (trace, length, pages_of_prefix) in enumerate(entries):
        row_of_prefix = jax.tree.map(operator.itemgetter(number), rows)
        prefixes.append(SavedPrefix(trace, length, row_of_prefix, pages_of_prefix))
    return prefixes, contents


def _prefix_entry(path: Path, entry: Any) -> tuple[bytes, int, list[int]]:
    """Check what a description says of one prefix. Return its trace, length and pages."""
    try:
        trace = bytes.fromhex(entry["trace"])
        length = entry["length"]
        pages = entry["pages"]
        # Not `isinstance`: JSON's true is no number of tokens.
        are_counts = all(type(number) is int and number >= 0 for number in (length, *pages))
        if len(trace) == TRACE and are_counts:
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
    newest = max((_number(part) for part in older_parts), default=0)
    write(folder / f"{FOLDER_PREFIX}{newest + 1}")
    for part in older_parts:
        shutil.rmtree(part, ignore_errors=True)


def _parts(folder: Path) -> list[Path]:
    parts = []
    for path in folder.glob(f"{FOLDER_PREFIX}*"):
        # A folder that is not complete has a longer name.
        if path.name.removeprefix(FOLDER_PREFIX).isdecimal():
            parts.append(path)
    return parts


def _number(part: Path) -> int:
    return int(part.name.removeprefix(FOLDER_PREFIX))
