"""Tokens leave the middle of a cache's rows, and those behind them move up.

    cache       sinks | body ...... | leave | ...... body | window
    drop        sinks | body ...... | ...... body | window

Keys that are stored before RoPE have no position: reading turns them to where their tokens are by
then, so that nothing about them changes. Keys that are stored after RoPE are turned by the distance
where they are exact, which costs a rounding. Codes of turned keys cannot be turned without decoding
them: such caches are refused.

Nothing is decoded or encoded. Words move by whole units of all sources, so that `drop` takes out as
much of a stretch as lies between places where units end (`leaving`). Among tokens that are not
encoded yet, every place is such a place.

A body in pages does not move. Whole pages leave its row's table, so that other rows go on reading
them. Exact keys that would have to be turned there are refused, since the pages may be others' too.

A row with numbers that cannot be is an error where these are known. Inside jit they are clipped,
and the row's overflow flag is raised."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvqjax._arguments import MOST, check_integers, check_within, clipped, is_known
from kvqjax._errors import UserError
from kvqjax.cache.layout import CacheLayout, RunLayout
from kvqjax.cache.pages import with_bodies_of, without_bodies
from kvqjax.cache.reshape import moved_body, moved_window, stored_tile
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import NO_PAGE, Cache, Run, check_cache, ring_tokens
from kvqjax.model.config import KVShape
from kvqjax.model.latents import key_parts, latent_key
from kvqjax.model.rope import unrotated
from kvqjax.ops.xla_workarounds import floor_divide

MOVABLE = "kivi_star, kvquant, higgs, klt, aqua, commvq, xquant and exact"

Turn = Callable[[Array, Array], Array]


def check_movable(layout: CacheLayout, operation: str = "drop") -> None:
    """Raise UserError for caches whose tokens cannot move. `operation` is what would move them."""
    if layout.shape.recurrent is not None:
        raise UserError(
            f"{operation}: recurrent layers remember all tokens at once and cannot forget some; "
            "feed the others anew"
        )
    if layout.method.keep is not None:
        raise UserError(
            f"{operation}: {layout.method} has evicted tokens that would be in the body if others "
            "had not come"
        )
    if any(run.wraps for run in runs_of(layout)):
        raise UserError(
            f"{operation}: layers with a sliding window have overwritten tokens that would come "
            "into sight again"
        )
    if layout.dealt > 1:
        raise UserError(
            f"{operation}: a body that is dealt over {layout.dealt} devices stays as it is; "
            "one device's can move"
        )
    for run in runs_of(layout):
        turned = run.wiring.maps.turned
        if turned is None:
            raise UserError(
                f"{operation}: {layout.method} does not say if its keys depend on positions "
                "(Maps.turned)"
            )
        if turned:
            _check_turned(layout, run, turned, operation)


def turns_keys(layout: CacheLayout) -> bool:
    """Say whether a cache whose tokens move has keys that are turned for it."""
    return any(run.wiring.maps.turned for run in runs_of(layout))


def _check_turned(
    layout: CacheLayout, run: RunLayout, turned: Collection[str], operation: str
) -> None:
    """Raise UserError where keys that are stored after RoPE, as the sources `turned`, cannot be
    turned further."""
    if layout.shape.rope is None:
        raise UserError(
            f"{operation}: the shape has no rope, so that nobody knows how its keys were turned"
        )
    # A rotated body's vectors are not in the frame in which RoPE turns keys.
    framed = run.wiring.maps.frame is not None
    if framed or not all(run.wiring.storage.codecs[source].lossless for source in turned):
        raise UserError(
            f"{operation}: {layout.method} stores codes of keys after RoPE, which cannot move; "
            f"these can: {MOVABLE}"
        )
    if run.page:
        raise UserError(
            f"{operation}: {layout.method} stores keys after RoPE, and pages that rows share "
            "cannot be turned; kvqjax.without_pages(cache) has bodies that can"
        )


def _row_numbers(name: str, value: Any, batch: int) -> Array | np.ndarray:
    """Give one number for every row, of one for all or of an array."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        value = np.full((batch,), int(np.clip(value, -MOST, MOST)), np.int32)
    check_integers(name, value, (batch,), "a token of each row")
    check_within(name, value, 0, MOST, "at 0 or above")
    return value


def drop(cache: Cache, start: Int[Array, " B"] | int, stop: Int[Array, " B"] | int) -> Cache:
    """Take tokens out of the middle of rows. Those behind them move up to their places.

    - No more than `start` to `stop - 1` leaves, and less where a part of an encoded unit would
      leave: `start` goes up and `stop` down to where units of all sources of all layers end (every
      1 to 128 tokens behind the sinks). Sinks stay. Tokens that are not encoded yet leave to the
      token. What left is `cache.lengths` less the result's.
    - Of a body in pages whole pages leave: `start` and `stop` go to where pages end. They are taken
      out of the row's table, and others that have them go on. The caller takes those that the
      result's `pages` no longer name back to its `PagePool`.
    - No code changes, and nothing is encoded twice. Keys that are stored before RoPE are as exact
      as before. Exact keys that are stored after it (`exact`, layers of a policy) are turned by the
      distance, in float32, which rounds them once in the cache's dtype.
    - Behind the first layer, the keys and values of tokens that stay were computed when the others
      were there. In a model of one layer the result is a cache that never had those.

    The result shares arrays with `cache`: `fork` first where both must live on.

    Args:
        cache: A cache whose keys are stored before RoPE, or exactly.
        start: The first token that leaves: one number, or one for each row.
        stop: The token behind the last one that leaves. More than a row holds is its end.

    Returns:
        The cache with shorter rows and the same capacity.

    Raises:
        UserError: Codes of keys after RoPE, recurrent layers, evicted tokens, rings of sliding
            windows, keys after RoPE in pages, bodies dealt over devices; a negative number, or a
            stop before its start (inside jit nothing leaves then, and the row's flag `overflow[b]`
            is raised).
    """
    check_cache(cache)
    check_movable(cache.layout)
    given_start = _row_numbers("start", start, cache.batch)
    given_stop = _row_numbers("stop", stop, cache.batch)
    if is_known(given_start, given_stop):
        firsts, lasts = np.asarray(given_start), np.asarray(given_stop)
        if (firsts > lasts).any():
            row = int((firsts > lasts).argmax())
            raise UserError(f"row {row}: stop={lasts[row]} lies before start={firsts[row]}")
    first, low = clipped(jnp.asarray(given_start), 0, MOST)
    last, high = clipped(jnp.asarray(given_stop), first, MOST)
    # Bodies in pages stay as they are, so that no program copies them.
    result = with_bodies_of(without_tokens(without_bodies(cache), first, last), cache)
    return result.replace(overflow=cache.overflow | low | high)


@jax.jit
@jax.enable_x64(False)
def leaving(
    cache: Cache, start: Int[Array, " B"], stop: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Say what `drop` takes out.

    Args:
        cache: As for `drop`. Its body may be left out.
        start: The first token that leaves, at least 0.
        stop: The token behind the last one that leaves, at least `start`.

    Returns:
        The first token that leaves and the one behind the last: equal where none does.
    """
    first, last = _places(cache, start, stop)
    return first + cache.layout.method.sinks, last + cache.layout.method.sinks


def _edge(
    place: Int[Array, " B"], clocks: list[tuple[int, Int[Array, " B"]]], up: bool
) -> Int[Array, " B"]:
    """Find the place nearest to `place`, at or above it (`up`) or at or below it, at which rows can
    be taken apart.

    Args:
        place: In body tokens, at least 0.
        clocks: (unit, body tokens that are encoded) of every clock.
        up: The direction.

    Returns:
        The places: for every clock a multiple of its unit, or not before what it has encoded."""

    def moved(place):
        for unit, encoded in clocks:
            edge = floor_divide(place + (unit - 1 if up else 0), unit) * unit
            # The last page may end behind what is encoded.
            edge = jnp.minimum(edge, encoded)
            place = jnp.where(place < encoded, edge, place)
        return place

    def changed(pair):
        return (pair[0] != pair[1]).any()

    # Moving for one clock may put the place inside a unit of another.
    return jax.lax.while_loop(
        changed, lambda pair: (pair[1], moved(pair[1])), (place, moved(place))
    )[1]


def _places(
    cache: Cache, start: Int[Array, " B"], stop: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Do `leaving` in body tokens."""
    sinks = cache.layout.method.sinks
    body_lengths = jnp.maximum(cache.lengths - sinks, 0)
    clocks = [
        (run.page or clock.unit, count * clock.unit)
        for run, state in zip(runs_of(cache.layout), cache.runs, strict=True)
        for clock, count in zip(run.wiring.storage.clocks, state.flushed, strict=True)
    ]
    first = _edge(jnp.clip(start - sinks, 0, body_lengths), clocks, up=True)
    last = jnp.maximum(first, _edge(jnp.clip(stop - sinks, 0, body_lengths), clocks, up=False))
    return first, last


@jax.jit
@jax.enable_x64(False)
def without_tokens(cache: Cache, start: Int[Array, " B"], stop: Int[Array, " B"]) -> Cache:
    """Do `drop` after its checks, of a cache whose bodies in pages were left out."""
    sinks, runs = cache.layout.method.sinks, runs_of(cache.layout)
    first, last = _places(cache, start, stop)
    distance = last - first
    lengths = cache.lengths - distance
    states = tuple(
        _shortened(run, state, first, last, lengths - sinks)
        for run, state in zip(runs, cache.runs, strict=True)
    )
    # Tokens behind one that is not finite were computed from it, also where it leaves.
    finite = jnp.where(
        cache.finite >= last + sinks,
        cache.finite - distance,
        jnp.minimum(cache.finite, first + sinks),
    )
    finite = jnp.where(distance > 0, finite, cache.finite)
    finite = jnp.minimum(finite, lengths)
    pages = None if cache.pages is None else _shortened_table(cache, first, last)
    return cache.replace(runs=states, lengths=lengths, finite=finite, pages=pages)


def _shortened_table(
    cache: Cache, first: Int[Array, " B"], last: Int[Array, " B"]
) -> Int[Array, "B N"]:
    """Take the pages of the body tokens from `first` to `last - 1` out of every row's table."""
    assert cache.layout.pool is not None
    assert cache.pages is not None
    page, table = cache.layout.pool.tokens, jnp.asarray(cache.pages)
    counts = [
        count * clock.unit
        for run, state in zip(runs_of(cache.layout), cache.runs, strict=True)
        for clock, count in zip(run.wiring.storage.clocks, state.flushed, strict=True)
        if run.page
    ]
    encoded = functools.reduce(jnp.maximum, counts)

    def pages_of(tokens: Int[Array, " B"]) -> Int[Array, " B"]:
        return jnp.asarray(floor_divide(tokens + page - 1, page))

    # Behind the encoded tokens no page has tokens that leave.
    before, end = pages_of(first), pages_of(jnp.minimum(last, encoded))
    places = jnp.arange(table.shape[1])[None]
    shift = jnp.maximum(end - before, 0)[:, None]
    source = jnp.where(places < before[:, None], places, places + shift)
    most = table.shape[1] - 1
    moved = jnp.take_along_axis(table, jnp.minimum(source, most), axis=1)
    return jnp.where(source <= most, moved, NO_PAGE)


def _shortened(
    run: RunLayout,
    state: Run,
    first: Int[Array, " B"],
    last: Int[Array, " B"],
    body_lengths: Int[Array, " B"],
) -> Run:
    """Take the body tokens from `first` to `last - 1` out of a run whose rows then hold
    `body_lengths` body tokens."""
    distance, clocks = last - first, run.wiring.storage.clocks
    turns = {source: turn_of(run.shape, source) for source in run.wiring.maps.turned or ()}
    encoded = []
    for clock, count in zip(clocks, state.flushed, strict=True):
        tokens = count * clock.unit
        encoded.append(tokens - jnp.maximum(jnp.minimum(tokens, last) - first, 0))

    def tile(source, name, field, layer, row, token, size):
        before = stored_tile(run, state, source, name, layer, row, token, size)
        after = stored_tile(run, state, source, name, layer, row, token + distance[row], size)
        if source in turns:
            distances = jnp.broadcast_to(distance[row], (1, size))
            numbers = jax.lax.bitcast_convert_type(after, field.dtype)
            turned = turns[source](numbers[None], distances)[0]
            after = jax.lax.bitcast_convert_type(turned, after.dtype)
        return field.choose(token + jnp.arange(size) < first[row], before, after)

    tokens = ring_tokens(run.ring, jnp.maximum(body_lengths - run.ring, 0))
    shift = jnp.where(tokens >= first[:, None], distance[:, None], 0)
    window = {
        source: moved_window(run.ring, run.ring, body_lengths, shift, x)
        for source, x in state.window.items()
    }
    for source, turn in turns.items():
        window[source] = jax.vmap(turn, (0, None))(window[source], shift)
    flushed = tuple(
        floor_divide(count, clock.unit) for count, clock in zip(encoded, clocks, strict=True)
    )
    moves = run.slots and not run.page
    body = moved_body(run, tuple(encoded), tile) if moves else state.body
    return state.replace(body=body, window=window, flushed=flushed)


def turn_of(shape: KVShape, source: str) -> Turn:
    """Make the function that turns vectors [B, n, W] of a source of keys back by distances
    [B, n]."""
    count, channels = shape.cached_heads[source]

    def turned(vectors, distances):
        keys = vectors.reshape(*vectors.shape[:2], count, channels)
        if shape.latent is not None:  # only a part of a key turns, which is the source
            rest = jnp.zeros((*keys.shape[:-1], shape.latent), keys.dtype)
            keys = unrotated(latent_key(keys, rest), distances, shape)
            return key_parts(keys, shape.latent)[0].reshape(vectors.shape)
        return unrotated(keys, distances, shape).reshape(vectors.shape)

    return turned
