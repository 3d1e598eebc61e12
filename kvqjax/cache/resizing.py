"""A cache of another capacity. Rows keep their tokens, words and counts, and go on as in a cache that was made with
that capacity.

    check_means    what cannot be resized at all
    excess         which rows do not fit a smaller capacity
    with_layout    moves all arrays; of each run:
      window         slots move from one ring to the other
      body           one of three ways:
        padded_body      slots are added or cut off (linear bodies)
        _body_of_groups  groups that hold tokens come first (eviction)
        moved_body       tokens are moved tile by tile (rings, and fields whose packing changes)"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvqjax._errors import UserError
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.moving import moved_body, moved_window, padded_body, stored_tile
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, Run, blank_body, empty_kept

__all__ = ["check_means", "excess", "with_layout"]


def check_means(old: CacheLayout, new: CacheLayout) -> None:
    """Raise UserError for layouts between which no cache can be resized, whatever its rows hold."""
    if old.dealt > 1 and not all(_is_padded(a, b) for a, b in zip(runs_of(old), runs_of(new), strict=True)):
        raise UserError(
            f"a body dealt over {old.dealt} devices cannot change from a capacity of {old.capacity} to {new.capacity}: "
            "its blocks or rings would have another length; make a cache with that capacity and fill it"
        )


def _is_padded(old: RunLayout, new: RunLayout) -> bool:
    """Say whether the arrays of a run's body only become longer or shorter."""
    codecs = old.wiring.storage.codecs
    # Long bodies on CPUs are packed in another way than short ones (kvqjax/cache/fitted.py).
    same_fields = old.wiring.storage == new.wiring.storage or all(
        codec.fields == new.wiring.storage.codecs[source].fields for source, codec in codecs.items()
    )
    linear = not (old.wraps or new.wraps or old.budget or new.budget)
    both_or_neither = (old.slots > 0) == (new.slots > 0)
    return same_fields and linear and old.deal == new.deal and both_or_neither


def _groups(cache: Cache) -> Bool[Array, "B G"]:
    """Mark the groups of an evicting body that hold a token."""
    positions, unit = cache.kept["positions"], runs_of(cache.layout)[0].wiring.storage.clocks[0].unit
    return (positions.reshape(positions.shape[0], -1, unit) >= 0).any(-1)


def excess(cache: Cache, layout: CacheLayout) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Find the rows that do not fit a smaller layout.

    Args:
        cache: The cache.
        layout: The smaller layout.

    Returns:
        (how many tokens each row may be cropped to so that it fits, which rows do not fit as they are)."""
    most = jnp.full_like(cache.lengths, layout.capacity)
    misfits = cache.lengths > most
    if "positions" in cache.kept:
        body_tokens = _groups(cache).sum(1) * runs_of(cache.layout)[0].wiring.storage.clocks[0].unit
        crowded = body_tokens > runs_of(layout)[0].budget
        # Which groups a crop leaves depends on positions: only an empty row fits for sure.
        return jnp.where(crowded, 0, most), misfits | crowded
    for run, new, state in zip(runs_of(cache.layout), runs_of(layout), cache.runs, strict=True):
        for clock, count in zip(run.wiring.storage.clocks, state.flushed, strict=True):
            if not new.wraps:  # a crop may have left more encoded than rows of that capacity ever encode
                crowded = count * clock.unit > new.slots
                most = jnp.where(crowded, jnp.minimum(most, new.slots + layout.method.sinks), most)
                misfits = misfits | crowded
    return most, misfits


@functools.partial(jax.jit, static_argnames="layout")
@jax.enable_x64(False)
def with_layout(cache: Cache, layout: CacheLayout) -> Cache:
    """Move a cache to another layout.

    Args:
        cache: The cache. All its rows fit the layout (`excess`).
        layout: The cache's own, but for the capacity.

    Returns:
        The cache in that layout."""
    body_lengths = cache.lengths - layout.method.sinks
    kept, order = _kept(cache, layout)
    runs = tuple(
        _run(old, new, state, body_lengths, order)
        for old, new, state in zip(runs_of(cache.layout), runs_of(layout), cache.runs, strict=True)
    )
    return cache.replace(runs=runs, kept=kept, layout=layout)


def _run(old: RunLayout, new: RunLayout, state: Run, body_lengths: Int[Array, " B"], order) -> Run:
    """Move the arrays of a run from its plan `old` to its plan `new`. `order` is that of `_kept`."""
    window = {name: moved_window(old.ring, new.ring, body_lengths, 0, x) for name, x in state.window.items()}
    return state.replace(body=_body(old, new, state, order), window=window)


def _body(old: RunLayout, new: RunLayout, state: Run, order: Int[Array, "B G"] | None) -> dict:
    """Move the body of a run. `order` has the groups of an evicting body that go to slots 0, u, 2 u, ...; else None."""
    if not new.slots:
        return {}
    if not old.slots:  # nothing is encoded yet
        return blank_body(new, state.flushed[0].shape[0], new.slots)
    if _is_padded(old, new):
        return padded_body(old, new, state.body)
    if order is not None:
        return _body_of_groups(old, new, state, order)
    units = zip(state.flushed, old.wiring.storage.clocks, strict=True)
    encoded = tuple(count * clock.unit for count, clock in units)

    def tile(source, name, field, layer, row, token, size):
        return stored_tile(old, state, source, name, layer, row, token, size)

    return moved_body(new, encoded, tile)


def _body_of_groups(old: RunLayout, new: RunLayout, state: Run, order: Int[Array, "B G"]) -> dict:
    """Move the groups of an evicting body: group `order[b, i]` of row b goes to the slots of group i."""
    unit = old.wiring.storage.clocks[0].unit
    groups = new.slots // unit
    # Further groups of a longer body are copies of group 0, which `kept` calls empty.
    order = jnp.pad(order, ((0, 0), (0, max(0, groups - order.shape[1]))))[:, :groups]

    def tile(source, name, field, layer, row, token, size):
        def group(number):
            return stored_tile(old, state, source, name, layer, row, order[row, token // unit + number] * unit, unit)

        return field.join_tiles(jax.vmap(group)(jnp.arange(size // unit)))

    # All slots are written: with eviction `flushed` counts every unit that left the window, not those in the body.
    return moved_body(new, (jnp.full((order.shape[0],), new.slots, jnp.int32),), tile)


def _kept(cache: Cache, layout: CacheLayout) -> tuple[dict, Int[Array, "B G"] | None]:
    """Move the bookkeeping of evicted tokens.

    Args:
        cache: The cache.
        layout: The new layout.

    Returns:
        (`Cache.kept`; the groups of the old body in the order in which the new one has them, those that hold tokens
        first). None in place of the order where nothing is evicted, and where one of the two bodies has no slots."""
    old, new = runs_of(cache.layout)[0], runs_of(layout)[0]
    unit = new.wiring.storage.clocks[0].unit
    if not new.budget or not cache.kept:
        return empty_kept(new, cache.batch), None
    groups = new.budget // unit
    order = jnp.argsort(~_groups(cache), axis=1, stable=True).astype(jnp.int32)

    by_group = cache.kept["positions"].reshape(cache.batch, old.budget // unit, unit)
    by_group = jnp.take_along_axis(by_group, order[:, :, None], 1)[:, :groups]
    padding = ((0, 0), (0, groups - by_group.shape[1]), (0, 0))
    by_group = jnp.pad(by_group, padding, constant_values=-1)
    return {"positions": by_group.reshape(cache.batch, -1)}, order
