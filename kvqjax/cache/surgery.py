"""Operations on whole rows of packed caches: crop, fork, gather, insert, evict. Pure, jit-compatible, for every method.

None of them decodes or encodes anything: they move arrays and change counts, and know nothing of what a field means.
What `crop` and `evict` return shares its arrays with the cache they were given, so donating one of the two ends the
other: `fork` first where both must live on.
Contract: what lies below a row's `lengths` equals a fresh encode of the same tokens with as many groups encoded; what
lies beyond is undefined and never read, because words are cleared before they are written."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvqjax._arguments import MOST, check_index, check_integers, check_within, clipped, named
from kvqjax._errors import UserError
from kvqjax.cache.eviction import crop_kept, forget
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, Run, check_alive, check_cache

__all__ = ["crop", "evict", "fork", "gather", "insert"]


def fork(cache: Cache) -> Cache:
    """Copy a cache so that no buffer is shared: either may be donated and the other lives on."""
    check_cache(cache)
    return jax.tree.map(jnp.copy, cache)


def _by_rows(function: Callable, cache: Cache, *others: Cache) -> Cache:
    """Apply `function(axis, array, *arrays)` to every array, `axis` being its row axis: 1 behind the layers, else 0."""
    check_alive(cache, *others)

    def stacked(*arrays):
        return function(1, *arrays)

    def flat(*arrays):
        return function(0, *arrays)

    def one(state: Run, *more: Run) -> Run:
        parts = {
            name: jax.tree.map(stacked, getattr(state, name), *(getattr(s, name) for s in more))
            for name in ("body", "sinks", "window")
        }
        return Run(flushed=jax.tree.map(flat, state.flushed, *(s.flushed for s in more)), **parts)

    runs = tuple(one(*states) for states in zip(cache.runs, *(other.runs for other in others), strict=True))
    lengths = flat(cache.lengths, *(other.lengths for other in others))
    overflow = flat(cache.overflow, *(other.overflow for other in others))
    finite = flat(cache.finite, *(other.finite for other in others))
    kept = jax.tree.map(flat, cache.kept, *(other.kept for other in others))
    return cache.replace(runs=runs, lengths=lengths, overflow=overflow, finite=finite, kept=kept)


def gather(cache: Cache, rows: Int[Array, " N"]) -> Cache:
    """Make a cache whose row i is row `rows[i]` of `cache`. Rows may repeat or be left out (beams); N may differ from
    B. Raises UserError for a row that does not exist; one that a trace hides is clipped, and the flag `overflow[i]` of
    the row that it becomes is raised."""
    check_cache(cache)
    check_integers("rows", rows, ("N",), "the rows to take")
    check_within("rows", rows, 0, cache.batch - 1, f"from 0 to {cache.batch - 1}, the cache's rows")
    rows, other = clipped(rows, 0, cache.batch - 1)
    taken = _by_rows(lambda axis, array: jnp.take(array, rows, axis=axis, mode="clip"), cache)
    return taken.replace(overflow=taken.overflow | other)


def _check_same(cache: Cache, other: Cache) -> None:
    for field in dataclasses.fields(cache.layout):
        wanted, got = getattr(cache.layout, field.name), getattr(other.layout, field.name)
        if wanted != got:
            raise UserError(f"the other cache has another {field.name}: {got}, wanted {wanted}")


def insert(cache: Cache, row: Int[Array, ""] | int, other: Cache, other_row: Int[Array, ""] | int) -> Cache:
    """Replace row `row` of a cache by row `other_row` of a cache of equal layout: a request that was prefilled apart
    joins a running batch. Raises UserError when the layouts differ, naming the field, and for a row that does not
    exist; one that a trace hides is clipped, and the flag `overflow` of the row that was replaced is raised."""
    check_cache(cache)
    check_cache(other)
    _check_same(cache, other)
    row, moved = check_index("row", row, cache.batch, "rows in the cache")
    other_row, missed = check_index("other_row", other_row, other.batch, "rows in the other cache")

    def put(axis, array, source):
        line = jax.lax.dynamic_slice_in_dim(source, other_row, 1, axis)
        return jax.lax.dynamic_update_slice_in_dim(array, line, row, axis)

    joined = _by_rows(put, cache, other)
    if moved is False and missed is False:  # both rows are known
        return joined
    return joined.replace(overflow=joined.overflow.at[row].max(jnp.logical_or(moved, missed)))


def evict(cache: Cache, rows: Bool[Array, " B"]) -> Cache:
    """Empty the marked rows: length 0, nothing encoded; overflow and what was not finite are forgotten. Their old words
    stay until overwritten, in arrays that the result shares with `cache`: `fork` first where both must live on. Raises
    UserError unless `rows` marks each of the B rows by True or False."""
    check_cache(cache)
    if getattr(rows, "dtype", None) != np.bool_ or rows.shape != (cache.batch,):
        given = f"{rows.dtype}{list(rows.shape)}" if isinstance(rows, jax.Array | np.ndarray) else named(rows)
        raise UserError(f"rows is {given}; wanted bool[{cache.batch}]: True for each row to empty")
    empty = lambda count: jnp.where(rows, 0, count)  # noqa: E731
    runs = tuple(state.replace(flushed=jax.tree.map(empty, state.flushed)) for state in cache.runs)
    kept = forget(cache.kept, rows)
    overflow = cache.overflow & ~rows
    return cache.replace(
        runs=runs, lengths=empty(cache.lengths), overflow=overflow, finite=empty(cache.finite), kept=kept
    )


@functools.partial(jax.jit, static_argnames="clocks")
def _floor(
    wanted: Int[Array, " B"], encoded: tuple[Int[Array, " B"], ...], clocks: tuple[tuple[int, bool], ...]
) -> Int[Array, " B"]:
    """Find the most body tokens, at most `wanted`, at which every clock (unit, whether its body is a ring) can stand:
    at or above what it has `encoded`, or on a boundary of its units below that."""

    def lower(length):
        for (unit, wraps), done in zip(clocks, encoded, strict=True):
            # A ring body has overwritten what a row cut back that far would need, so only the sinks are left.
            below = jnp.zeros_like(length) if wraps else length // unit * unit
            length = jnp.where((done > length) & (length > 0), below, length)
        return length

    def step(pair):
        return pair[1], lower(pair[1])

    return jax.lax.while_loop(lambda pair: (pair[0] != pair[1]).any(), step, (wanted, lower(wanted)))[1]


def crop(cache: Cache, lengths: Int[Array, " B"]) -> Cache:
    """Cut every row back to `lengths[b]` tokens (longer wishes change nothing); the result's `lengths` say what was
    kept.

    While no encoded token is cut the crop is exact, to the token: so it is for the newest `window` tokens at least. A
    deeper one goes down to where every source of every layer ends on a whole unit (32 to 128 tokens), its window being
    empty then: the newest tokens stay encoded, and nothing is encoded twice. In a layer with two clocks (KIVI as
    published) a token whose key was encoded while its value was exact keeps the reconstructed key. Layers whose body
    is a ring (sliding windows) have overwritten older tokens: a crop into their encoded part leaves the sinks only.
    Where tokens are evicted by policy (`keep`), those below the cut that the body still holds stay, and those that it
    gave up before do not come back: the row then holds less than a fresh encode of the same tokens.
    A row whose first token that was not finite is cut is an ordinary row again.
    Raises UserError for a negative length; one that a trace hides counts as 0, and the row's flag `overflow[b]` is
    raised.
    The result shares its arrays with `cache`: `fork` first where both must live on.
    """
    sinks, runs = cache.layout.method.sinks, runs_of(cache.layout)
    check_cache(cache)
    check_integers("lengths", lengths, (cache.batch,), "the tokens that each row keeps")
    check_within("lengths", lengths, 0, MOST, "at 0 or above")
    lengths, other = clipped(lengths, 0, MOST)
    clocks = tuple((clock.unit, run.wraps) for run in runs for clock in run.wiring.storage.clocks)
    counts = [count for state in cache.runs for count in state.flushed]
    encoded = tuple(count * unit for count, (unit, _) in zip(counts, clocks, strict=True))
    wanted = jnp.minimum(lengths, cache.lengths) - sinks
    left = _floor(wanted, encoded, clocks)
    whole = jnp.maximum(left, 0)
    states = tuple(
        state.replace(
            flushed=tuple(
                jnp.minimum(count, whole // clock.unit)
                for clock, count in zip(run.wiring.storage.clocks, state.flushed, strict=True)
            )
        )
        for run, state in zip(runs, cache.runs, strict=True)
    )
    lengths = left + sinks
    finite = jnp.minimum(cache.finite, lengths)
    return cache.replace(
        runs=states,
        lengths=lengths,
        finite=finite,
        overflow=cache.overflow | other,
        kept=crop_kept(cache.kept, lengths),
    )
