"""A cache of another capacity. What rows hold stays as it is, to the bit, and goes on as in a cache that was made with
that capacity."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvqjax._errors import UserError
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.eviction import allocate_kept
from kvqjax.cache.moving import moved_body, moved_window, padded_body, stored_tile
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, Run, blank_body

__all__ = ["check_means", "excess", "with_layout"]


def check_means(old: CacheLayout, new: CacheLayout) -> None:
    """Raise UserError for what cannot be resized whatever it holds."""
    if old.dealt > 1 and not all(_is_padded(a, b) for a, b in zip(runs_of(old), runs_of(new), strict=True)):
        raise UserError(
            f"a body dealt over {old.dealt} devices cannot change from a capacity of {old.capacity} to {new.capacity}: "
            "its blocks or rings would have another length; make a cache with that capacity and fill it"
        )
    keep = old.method.keep
    if keep is not None and keep.rule == "h2o" and runs_of(new)[0].budget and not runs_of(old)[0].budget:
        raise UserError(
            f"{old.method}: a cache of capacity {old.capacity} encodes nothing and so counts no attention; make it "
            f"with a capacity of {new.capacity} from the beginning"
        )


def _is_padded(old: RunLayout, new: RunLayout) -> bool:
    """Say whether the arrays of a run's body only become longer or shorter."""
    same_fields = old.wiring.storage == new.wiring.storage or all(
        codec.fields == new.wiring.storage.codecs[source].fields for source, codec in old.wiring.storage.codecs.items()
    )
    linear = not (old.wraps or new.wraps or old.budget or new.budget)
    return same_fields and linear and old.deal == new.deal and (old.slots > 0) == (new.slots > 0)


def _groups(cache: Cache) -> Bool[Array, "B G"]:
    """Mark the groups of an evicting body that hold a token."""
    positions, unit = cache.kept["positions"], runs_of(cache.layout)[0].wiring.storage.clocks[0].unit
    return (positions.reshape(positions.shape[0], -1, unit) >= 0).any(-1)


def excess(cache: Cache, layout: CacheLayout) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Say how many tokens each row may hold in a smaller layout, and which rows do not fit."""
    most = jnp.full_like(cache.lengths, layout.capacity)
    misfits = cache.lengths > most
    if "positions" in cache.kept:
        too_many = _groups(cache).sum(1) * runs_of(cache.layout)[0].wiring.storage.clocks[0].unit
        crowded = too_many > runs_of(layout)[0].budget
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
    """Move a cache, whose rows fit, to a layout that differs from its own in the capacity alone."""
    body_lengths = cache.lengths - layout.method.sinks
    kept, order = _kept(cache, layout, body_lengths)
    runs = tuple(
        _run(old, new, state, body_lengths, order)
        for old, new, state in zip(runs_of(cache.layout), runs_of(layout), cache.runs, strict=True)
    )
    return cache.replace(runs=runs, kept=kept, layout=layout)


def _run(old: RunLayout, new: RunLayout, state: Run, body_lengths: Int[Array, " B"], order) -> Run:
    window = {name: moved_window(old.ring, new.ring, body_lengths, 0, x) for name, x in state.window.items()}
    return state.replace(body=_body(old, new, state, order), window=window)


def _body(old: RunLayout, new: RunLayout, state: Run, order: Int[Array, "B G"] | None) -> dict:
    if not new.slots:
        return {}
    if not old.slots:  # nothing is encoded yet
        return blank_body(new, state.flushed[0].shape[0], new.slots)
    if _is_padded(old, new):
        return padded_body(old, new, state.body)
    if order is not None:
        return _body_of_groups(old, new, state, order)
    encoded = tuple(c * clock.unit for c, clock in zip(state.flushed, old.wiring.storage.clocks, strict=True))

    def tile(source, name, field, layer, row, token, size):
        return stored_tile(old, state, source, name, layer, row, token, size)

    return moved_body(new, encoded, tile)


def _body_of_groups(old: RunLayout, new: RunLayout, state: Run, order: Int[Array, "B G"]) -> dict:
    """Move the groups of an evicting body to slots in `order`."""
    unit = old.wiring.storage.clocks[0].unit
    groups = new.slots // unit
    order = jnp.pad(order, ((0, 0), (0, max(0, groups - order.shape[1]))))[:, :groups]

    def tile(source, name, field, layer, row, token, size):
        def group(number):
            return stored_tile(old, state, source, name, layer, row, order[row, token // unit + number] * unit, unit)

        return field.join_tiles(jax.vmap(group)(jnp.arange(size // unit)))

    return moved_body(new, (jnp.full((order.shape[0],), new.slots, jnp.int32),), tile)


def _kept(cache: Cache, layout: CacheLayout, body_lengths: Int[Array, " B"]) -> tuple[dict, Int[Array, "B G"] | None]:
    """Give the bookkeeping of evicted tokens, and the old group that each new one is: those that hold tokens first."""
    old, new = runs_of(cache.layout)[0], runs_of(layout)[0]
    if not new.budget or not cache.kept:
        unit = new.wiring.storage.clocks[0].unit
        return allocate_kept(layout.method.keep, body_lengths.shape[0], new.budget, unit, new.ring), None
    unit = new.wiring.storage.clocks[0].unit
    groups, kept = new.budget // unit, cache.kept
    order = jnp.argsort(~_groups(cache), axis=1, stable=True).astype(jnp.int32)

    def sorted_groups(x, blank):
        x = x.reshape(x.shape[0], old.budget // unit, -1)
        x = jnp.take_along_axis(x, order[:, :, None], 1)[:, :groups]
        padding = ((0, 0), (0, groups - x.shape[1]), (0, 0))
        return jnp.pad(x, padding, constant_values=blank).reshape(x.shape[0], -1)

    moved = {"positions": sorted_groups(kept["positions"], -1)}
    if "mass" in kept:
        recent = moved_window(old.ring, new.ring, body_lengths, 0, kept["recent"], axis=1)
        moved |= {"mass": sorted_groups(kept["mass"], 0.0), "recent": recent}
    return moved, order
