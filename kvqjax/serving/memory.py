"""How much memory an engine's cache takes: rows, the pages that they share, and kept prefixes of
prompts.

pages          of the rows, of the prompt that is being fed, and of kept prefixes
private bytes  windows, sinks, rings and states: of each row, of the prompt and of every kept prefix
"""

import functools
from typing import NamedTuple

import jax

from kvqjax._errors import UserError
from kvqjax._tables import size
from kvqjax._timing import memory
from kvqjax.cache.accounting import array_bytes, ledger
from kvqjax.cache.pages import without_bodies
from kvqjax.methods import MethodLike
from kvqjax.model.loading import Model
from kvqjax.step.new_cache import init_cache

ROWS = 8  # requests at a time where nobody says
# A kept prefix needs a snapshot of a row's private bytes. In the memory of one row there are at
# most SNAPSHOTS snapshots, which take at most 1 / SHARE of its bytes: the rest is for pages, which
# make up most of a prefix.
SNAPSHOTS = 8
SHARE = 4


class Memory(NamedTuple):
    """How the memory of an engine is shared out.

    Rows cannot have pages where their body is a ring or loses tokens, or is dealt over devices.
    `pages` is then 0, and a prefix is kept as a row."""

    rows: int
    pages: int
    snapshots: int  # kept prefixes
    row_pages: int  # that a full row takes
    bytes: int
    bits: float  # of a full row, per number of a key or value


class _Sizes(NamedTuple):
    """Bytes of a row beside its pages and of a page, and the pages of a full row."""

    private: int
    page: int
    row_pages: int
    bits: float

    @property
    def row(self) -> int:
        return self.private + self.page * self.row_pages


def _sizes(model: Model, method: MethodLike, capacity: int, kernels: str, paged: bool) -> _Sizes:
    """Measure a row of a cache, without allocating it."""

    def described(**options):
        make = functools.partial(init_cache, model, method, 1, capacity, kernels=kernels)
        return jax.eval_shape(functools.partial(make, **options))

    plain = described()
    bits = ledger(plain).bits_stored
    if plain.layout.dealt == 1 and paged:
        cache = described(pages=1)
        if cache.pages is not None:
            # Tables, of 4 bytes a page, are left out.
            private = array_bytes(without_bodies(cache).replace(pages=None))
            page = array_bytes(cache.replace(pages=None)) - private
            return _Sizes(private, page, cache.pages.shape[1], bits)
    return _Sizes(array_bytes(plain), 0, 0, bits)


def memory_for(
    model: Model,
    method: MethodLike,
    capacity: int,
    rows: int | None,
    pool_bytes: int | None,
    prefixes: int,
    kernels: str,
    paged: bool = True,
) -> Memory:
    """Share out an engine's memory.

    Args:
        model: that is served.
        method: of its cache.
        capacity: tokens of a row.
        rows: requests that make tokens at a time; None: as many full rows as `pool_bytes` holds, or
            8.
        pool_bytes: memory of all, in bytes; None: as much as `rows` full rows take, with the
            prompt's and `prefixes` more.
        prefixes: how many rows' memory kept prefixes take.
        kernels: as in `kvqjax.init_cache`.
        paged: whether bodies lie in pages where they can.

    Raises:
        UserError: the memory is too little for so many rows, or for one row beside the prompt's and
            the kept ones; or the devices do not hold it.
    """
    sizes = _sizes(model, method, capacity, kernels, paged)
    extra_rows = 1 + prefixes  # the prompt's, and the kept ones
    if pool_bytes is None:
        if rows is None:
            rows = ROWS
        pool_bytes = (rows + extra_rows) * sizes.row
    # There may be more rows than fit when all are full, because they share pages. Private bytes are
    # needed for each.
    if rows is None or not sizes.row_pages:
        least_bytes = ((rows or 1) + extra_rows) * sizes.row
    else:
        least_bytes = (rows + extra_rows) * sizes.private + sizes.row_pages * sizes.page
    if pool_bytes < least_bytes:
        raise _too_little(rows or 1, prefixes, capacity, pool_bytes, least_bytes)
    if rows is None:
        rows = pool_bytes // sizes.row - extra_rows
    _require_room(model, pool_bytes, f"rows={rows} of capacity={capacity} with prefixes={prefixes}")
    if not sizes.row_pages:
        return Memory(rows, 0, prefixes, 0, (rows + extra_rows) * sizes.row, sizes.bits)
    snapshots = prefixes * max(1, min(SNAPSHOTS, sizes.row // sizes.private // SHARE))
    # One row must be able to fill its capacity, however little memory there is.
    snapshots = min(snapshots, prefixes + (pool_bytes - least_bytes) // sizes.private)
    pages = (pool_bytes - (rows + 1 + snapshots) * sizes.private) // sizes.page
    used = (rows + 1 + snapshots) * sizes.private + pages * sizes.page
    return Memory(rows, pages, snapshots, sizes.row_pages, used, sizes.bits)


def _require_room(model: Model, pool_bytes: int, request: str) -> None:
    """Raise UserError for a cache that the devices cannot hold: a CPU's system would kill the
    process instead."""
    devices = 1 if model.rules is None else model.rules.mesh.size
    limit = memory()  # of each
    if limit is not None and pool_bytes > limit * devices:
        raise UserError(
            f"{request}: a cache takes {size(pool_bytes)}; there are {size(limit * devices)}"
        )


def _too_little(
    rows: int, prefixes: int, capacity: int, pool_bytes: int, least_bytes: int
) -> UserError:
    """Make the error for memory that does not suffice."""
    beginnings = ""
    hint = "give {pool_bytes}"
    options: dict[str, int] = {"pool_bytes": least_bytes}
    if prefixes:
        beginnings = f", and what {prefixes} more hold of prompts' beginnings,"
        hint += ", or keep no beginnings by {prefixes}"
        options["prefixes"] = 0
    cause = (
        f"{rows} row{'s' * (rows > 1)} of {capacity} tokens, one more for prompts{beginnings} need {least_bytes} "
        f"bytes at least; {pool_bytes} are given"
    )
    return UserError(cause, hint, parameter="pool_bytes", **options)
