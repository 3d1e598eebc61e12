"""How much memory an engine's cache takes: rows, the pages that they share, and what is kept for prompts that begin
alike.

    pages                 of the rows, of the prompt that is being fed, and of what is kept
    what is a row's own   windows, sinks, rings and states: of each row, of the prompt and of every kept prefix
"""

from typing import NamedTuple

import jax

from kvqjax._errors import UserError
from kvqjax.cache.accounting import array_bytes, ledger
from kvqjax.cache.pages import without_bodies
from kvqjax.methods import MethodLike
from kvqjax.model.loading import Model
from kvqjax.step.new_cache import init_cache

__all__ = ["ROWS", "Memory", "memory_for"]

ROWS = 8  # requests at a time where nobody says
# A kept prefix takes a snapshot of what is a row's own. So many take the place of one row at most, and no more than a
# quarter of its bytes: the pages that they share are most of what is kept.
SNAPSHOTS, SHARE = 8, 4


class Memory(NamedTuple):
    """How the memory of an engine is shared out. Where rows cannot have pages (`pages` 0), a prefix is kept as a row.

    Rows cannot have pages where their body is a ring or loses tokens, or is dealt over devices."""

    rows: int
    pages: int
    snapshots: int  # kept prefixes
    row_pages: int  # that a full row takes
    bytes: int
    bits: float  # of a full row, per number of a key or value


class _Sizes(NamedTuple):
    """Bytes of what is a row's own and of a page, and the pages of a full row."""

    private: int
    page: int
    row_pages: int
    bits: float

    @property
    def row(self) -> int:
        return self.private + self.page * self.row_pages


def _sizes(model: Model, method: MethodLike, capacity: int, kernels: str) -> _Sizes:
    plain = jax.eval_shape(lambda: init_cache(model, method, 1, capacity, kernels=kernels))
    if plain.layout.dealt == 1:
        cache = jax.eval_shape(lambda: init_cache(model, method, 1, capacity, kernels=kernels, pages=1))
        if cache.pages is not None:
            # Tables, of 4 bytes a page, are left out.
            private = array_bytes(without_bodies(cache).replace(pages=None))
            page = array_bytes(cache.replace(pages=None)) - private
            return _Sizes(private, page, cache.pages.shape[1], ledger(plain).bits_stored)
    return _Sizes(array_bytes(plain), 0, 0, ledger(plain).bits_stored)


def memory_for(
    model: Model,
    method: MethodLike,
    capacity: int,
    rows: int | None,
    pool_bytes: int | None,
    prefixes: int,
    kernels: str,
) -> Memory:
    """Share out an engine's memory.

    Args:
        model: that is served.
        method: of its cache.
        capacity: tokens of a row.
        rows: requests that make tokens at a time; None: as many full rows as `pool_bytes` holds, or 8.
        pool_bytes: memory of all, in bytes; None: as much as `rows` full rows take, with the prompt's and `prefixes`
            more.
        prefixes: what is kept for prompts that begin alike takes as much as so many rows.
        kernels: as in `kvqjax.init_cache`.

    Returns:
        The plan.

    Raises:
        UserError: the memory does not hold one full row beside the prompt's and the kept ones.
    """
    sizes, beside = _sizes(model, method, capacity, kernels), 1 + prefixes
    if pool_bytes is None:
        rows = ROWS if rows is None else rows
        pool_bytes = (rows + beside) * sizes.row
    elif rows is None:
        rows = pool_bytes // sizes.row - beside
    # Rows may be more than fit when all are full: what they share of the memory are pages.
    fewest = (rows + beside) * sizes.private + sizes.row_pages * sizes.page
    if rows < 1 or pool_bytes < fewest:
        raise UserError(
            f"pool_bytes={pool_bytes} hold {pool_bytes // sizes.row} rows of {capacity} tokens ({sizes.row} bytes "
            f"each); wanted {beside + 1} at least, of which {beside} take prompts and what several begin with "
            "(prefixes=0: 1)"
        )
    if not sizes.row_pages:
        if pool_bytes < (rows + beside) * sizes.row:
            raise UserError(
                f"rows of {method} have no pages, so that rows={rows} need {(rows + beside) * sizes.row} bytes; "
                f"pool_bytes is {pool_bytes}"
            )
        return Memory(rows, 0, prefixes, 0, (rows + beside) * sizes.row, sizes.bits)
    snapshots = prefixes * max(1, min(SNAPSHOTS, sizes.row // sizes.private // SHARE))
    # One row must be able to fill its capacity, however little memory there is.
    snapshots = min(snapshots, prefixes + (pool_bytes - fewest) // sizes.private)
    pages = (pool_bytes - (rows + 1 + snapshots) * sizes.private) // sizes.page
    used = (rows + 1 + snapshots) * sizes.private + pages * sizes.page
    return Memory(rows, pages, snapshots, sizes.row_pages, used, sizes.bits)
