"""Bodies in pages: encoded tokens of all rows lie in one pool, and rows may share them.

    cache = kvq.init_cache(model, method, 8, 4096, pages=24)      # instead of the 32 that 8 full rows need
    pool = kvq.PagePool(24)
    table = np.full(cache.pages.shape, -1, np.int32)              # a row's pages in the order of its tokens
    table[0, :2] = pool.take(2)
    cache = kvq.with_pages(cache, table)

A page holds all fields of some consecutive body tokens of one row, in all layers. Its size is a
multiple of the blocks in which bodies are read, so that no group and no word spans two pages.
Sinks, windows, rings of sliding windows and states of recurrent layers stay a row's own. Which row
has which page is data: programs do not depend on it.

The host gives pages out (`PagePool`), because it knows how long rows are before it starts a
program. A row needs `pages_needed(layout, tokens)` of them. Where it lacks one, it takes no more
tokens: outside jit that is an error, inside jit the row's overflow flag is raised. Rows may share
pages whose tokens are all encoded. A row writes behind its last encoded token alone, so that
`copy_page` of a row's last page is all that two rows need to go on differently. `crop` and `evict`
move that token back: a row that shares pages is given others first, or copies.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvqjax._arguments import check_integer, check_integers, check_within, clipped, is_known
from kvqjax._errors import UserError
from kvqjax.cache.layout import CacheLayout, RunLayout
from kvqjax.cache.runs import pages_needed, runs_of
from kvqjax.cache.state import NO_PAGE, Cache, check_cache
from kvqjax.ops.packing import Packing, Stored
from kvqjax.ops.xla_workarounds import floor_divide, modulo

MOST_PAGES = 2**24  # of a pool; its table takes 16 bytes a page on the host


class PoolExhausted(UserError):
    """Not enough pages are free. No page was given out or taken back."""


class PagePool:
    """The pages of a pool that are in use, and how many users each has: host code, for one thread.

    Args:
        pages: in the pool.

    Raises:
        UserError: no whole number from 1 to 2**24.
    """

    def __init__(self, pages: int):
        self._users = [0] * check_integer("pages", pages, 1, MOST_PAGES)
        # Pages are given out from the end: the lowest numbers first.
        self._free = list(range(pages - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._users)

    @property
    def free(self) -> int:
        """The number of pages without a user."""
        return len(self._free)

    @property
    def shared(self) -> int:
        """The number of pages with more than one user."""
        return sum(users > 1 for users in self._users)

    def users(self, page: int) -> int:
        """Count those who use a page. Raises UserError for one that is not there."""
        return self._users[check_integer("page", page, 0, len(self) - 1)]

    def take(self, count: int) -> list[int]:
        """Take `count` free pages for one user.

        Raises:
            UserError: `count` is no whole number of at least 0.
            PoolExhausted: fewer are free. None is given then.
        """
        count = check_integer("count", count, 0)
        if count > len(self._free):
            raise PoolExhausted(
                f"{count} pages are wanted and {len(self._free)} of {len(self._users)} are free"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> list[int]:
        """Count one more user of pages that are in use.

        Raises:
            UserError: a page that nobody uses. None is shared then.
        """
        pages = list(pages)
        self._require_used(pages)
        for page in pages:
            self._users[page] += 1
        return pages

    def drop(self, pages: Iterable[int]) -> None:
        """Count one user fewer of pages. Those without a user are free.

        Raises:
            UserError: a page that nobody uses. None is taken back then.
        """
        pages = list(pages)
        self._require_used(pages)
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def _require_used(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not (0 <= page < len(self._users) and self._users[page] > 0):
                raise UserError(f"page {page} is in use by nobody")
            if pages.count(page) > 1:
                raise UserError(f"page {page} stands twice in one list")


def _require_pool(cache: Cache) -> int:
    """Return the last page of a cache's pool. Raise UserError where it has none."""
    check_cache(cache)
    if cache.pages is None or cache.layout.pool is None:
        raise UserError(
            "the rows of this cache have no pages; init_cache(..., pages=) makes one whose rows do"
        )
    return cache.layout.pool.pages - 1


def with_pages(cache: Cache, table: Int[np.ndarray, "B N"] | Int[Array, "B N"]) -> Cache:
    """Say which pages every row of a cache has.

    Args:
        cache: made with `pages=`.
        table: the pages of each row in the order of its tokens, at first those that are encoded,
            and -1 where it has none. A page may stand in several rows as long as its tokens are all
            encoded.

    Returns:
        The cache, which shares its other arrays with `cache`.

    Raises:
        UserError: a cache without pages; a table of another shape; a page that is not there, or
            twice in one row. Of a page that a trace hides and that is not there the row's overflow
            flag is raised.
    """
    most = _require_pool(cache)
    assert cache.pages is not None
    check_integers("table", table, cache.pages.shape, "the pages of every row")
    check_within("table", table, NO_PAGE, most, f"from {NO_PAGE} to {most}, the pool's pages")
    known_rows = np.asarray(table).tolist() if is_known(table) else []
    for row, row_pages in enumerate(known_rows):
        numbers = [page for page in row_pages if page >= 0]
        # A row that had a page twice would overwrite its own tokens.
        if len(set(numbers)) < len(numbers):
            raise UserError(f"a page stands twice in row {row} of the table: {numbers}")
    pages, missing = clipped(jnp.asarray(table, jnp.int32), NO_PAGE, most)
    return cache.replace(pages=pages, overflow=cache.overflow | missing.any(1))


def check_pages(
    layout: CacheLayout, table: Int[np.ndarray, "B N"], tokens: Int[np.ndarray, " B"]
) -> None:
    """Raise UserError where a row lacks pages for its tokens."""
    # Pages up to the first that is missing: those behind it hold none of the row's tokens.
    counts = np.cumprod(table >= 0, axis=1).sum(1).tolist()
    lengths = tokens.tolist()
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        need = pages_needed(layout, length)
        if count < need:
            raise UserError(
                f"row {row} would hold {length} tokens, which take {need} pages, and it has {count}; "
                "kvqjax.with_pages gives it more"
            )


def require_own_bodies(cache: Cache, operation: str) -> None:
    """Raise UserError for a cache whose bodies lie in pages, which have no axis of rows."""
    if cache.pages is not None:
        raise UserError(
            f"{operation}: the rows of this cache take pages of a pool, and {operation} wants rows with bodies of "
            "their own: kvqjax.without_pages(cache) has such"
        )


# ---- Reading ----


def _joined(
    packing: Packing, page: int, stored: Stored, layer, rows: Int[Array, "B n"], first, size: int
) -> Stored:
    """Put `size` slots from slot `first` on of each of a row's n pages side by side: arrays [1, B,
    ...]."""
    batch, count = rows.shape
    flat = jnp.maximum(rows, 0).reshape(-1)  # what stands for a page that is not there is not read
    spans = packing.spans(stored, page, layer, flat, jnp.broadcast_to(first, flat.shape), size)
    axis = packing.token_axis

    def join(x: Array) -> Array:
        # Blocks follow one another along the axis of tokens in every packing, so that pages need
        # only stand in their order.
        by_page = jnp.moveaxis(x.reshape(1, batch, count, *x.shape[2:]), 2, axis)
        return by_page.reshape(*by_page.shape[:axis], -1, *by_page.shape[axis + 2 :])

    if count == 1:
        return spans
    return tuple(join(x) for x in spans)


def joined_pages(
    run: RunLayout, body: dict, layer, pages: Int[Array, "B N"], at, size: int
) -> dict:
    """Cut `size` body tokens of every row, from slot `at` on, out of one layer's pages.

    Args:
        run: the layer's plan.
        body: of the run, in pages.
        layer: its number in the run.
        pages: of every row.
        at: the first slot: of a page, or where `size` is a part of a page, of a part.
        size: tokens, a part of a page or whole pages (`RunLayout.within_pages`).

    Returns:
        A body of this layer alone, in which every row has `size` slots of its own.
    """
    count = max(1, size // run.page)
    of_page = min(size, run.page)
    rows = jax.lax.dynamic_slice_in_dim(pages, floor_divide(at, run.page), count, 1)
    first = modulo(jnp.asarray(at, jnp.int32), run.page)
    joined: dict = {}
    for source, codec in run.wiring.storage.codecs.items():
        joined[source] = {}
        for name, field in codec.fields.items():
            stored = body[source][name]
            joined[source][name] = _joined(
                field.packing, run.page, stored, layer, rows, first, of_page
            )
    return joined


@jax.jit
@jax.enable_x64(False)
def without_pages(cache: Cache) -> Cache:
    """Copy pages into bodies of single rows, as `init_cache` makes them without `pages=`.

    Args:
        cache: any; one without pages is given back.

    Returns:
        A cache of the same tokens and words, which shares no body with `cache`: for `gather`,
        `save_cache` and whatever else wants rows.
    """
    if cache.pages is None:
        return cache
    pages = cache.pages
    layout = dataclasses.replace(cache.layout, pool=None)

    def moved(paged: RunLayout, run: RunLayout, body: dict) -> dict:
        layers = []
        for layer in range(run.count):
            layers.append(joined_pages(paged, body, layer, pages, 0, paged.slots))
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *layers)
        cut: dict = {}
        for source, codec in run.wiring.storage.codecs.items():
            cut[source] = {}
            for name, stored in joined[source].items():
                # Pages may reach beyond the last block of the capacity, where no token lies.
                packing = codec.fields[name].packing
                cut[source][name] = packing.resized(stored, paged.slots, run.slots)
        return cut

    bodies: list[dict] = []
    for old, new, state in zip(runs_of(cache.layout), runs_of(layout), cache.runs, strict=True):
        bodies.append(moved(old, new, state.body) if old.page else {})
    return _with_bodies(cache, bodies).replace(pages=None, layout=layout)


# ---- Moving pages, and rows without them ----


def _paged_bodies(cache: Cache) -> tuple[dict, ...]:
    """Return the bodies that lie in pages; an empty one for each run whose body does not."""
    runs = zip(runs_of(cache.layout), cache.runs, strict=True)
    return tuple(state.body if run.page else {} for run, state in runs)


def _with_bodies(cache: Cache, bodies: Iterable[dict]) -> Cache:
    """Put other bodies, one for each run, in the place of those that lie in pages."""
    states = []
    for run, state, body in zip(runs_of(cache.layout), cache.runs, bodies, strict=True):
        states.append(state.replace(body=body) if run.page else state)
    return cache.replace(runs=tuple(states))


def without_bodies(cache: Cache) -> Cache:
    """Take away the bodies that lie in pages. The result is no cache to attend to until
    `with_bodies_of`."""
    return _with_bodies(cache, ({} for _ in cache.runs))


def with_bodies_of(cache: Cache, other: Cache) -> Cache:
    """Take the pages of another cache of the same layout. The other one must not be
    used further where a program is given the result to change in place."""
    return _with_bodies(cache, (state.body for state in other.runs))


def read_page(cache: Cache, page: Int[Array, ""]) -> tuple[dict, ...]:
    """Copy one page of all layers: for `write_page`."""

    def cut(x: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, page, 1, 1)

    return jax.tree.map(cut, _paged_bodies(cache))


def write_page(cache: Cache, page: Int[Array, ""], content: tuple[dict, ...]) -> Cache:
    """Write a page that `read_page` copied, of this cache or one like it, into a page."""

    def put(x: Array, part: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, part, page, 1)

    return _with_bodies(cache, jax.tree.map(put, _paged_bodies(cache), content))


def copy_page(cache: Cache, source: Int[Array, ""] | int, target: Int[Array, ""] | int) -> Cache:
    """Copy page `source` to page `target`, so that a row can go on in it where another one does
    otherwise.

    Args:
        cache: donated.
        source: a page of the pool.
        target: another one.

    Returns:
        The cache, whose tables are as they were.

    Raises:
        UserError: a cache without pages; a page that is not there. One that a trace hides is
            clipped.
    """
    most = _require_pool(cache)
    for name, page in (("source", source), ("target", target)):
        number = np.asarray(page) if isinstance(page, int) else page
        check_integers(name, number, (), "the number of a page")
        check_within(name, page, 0, most, f"from 0 to {most}, the pool's pages")
    return copied_page(cache, jnp.asarray(source), jnp.asarray(target))


@functools.partial(jax.jit, donate_argnames="cache")
def copied_page(cache: Cache, source: Int[Array, ""], target: Int[Array, ""]) -> Cache:
    """Copy a page as `copy_page`, without its checks."""
    return write_page(cache, target, read_page(cache, source))
