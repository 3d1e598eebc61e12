"""Encoding the one new token of every row at once, as a decode step on a GPU does for methods without a window."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Num

from kvqjax.cache.encoding import Schedule, at_layer, each_layer, store_fields
from kvqjax.cache.run_layout import RunLayout
from kvqjax.ops.finite import saturated
from kvqjax.ops.layout import PLANE, Field, Stored, split_bits, to_bits
from kvqjax.ops.xla import floor_divide, given_to_gpus, kept_apart, modulo

__all__ = ["are_written_at_once", "flush_newest"]


def are_written_at_once(run: RunLayout) -> bool:
    """Say whether `flush_newest` can write all fields of a body."""
    fields = [f for codec in run.wiring.storage.codecs.values() for f in codec.fields.values()]
    return all(not f.heads and f.kind in ("codes", "columns", "token") for f in fields)


def flush_newest(runs, states, news, schedule: Schedule, constants):
    """Do what `flush_chain` does where one new token of each row may be due: all rows' are encoded as one tile, and
    each array takes them by one scatter, which a GPU runs in place as one kernel. There is no loop whose bound is data,
    because a GPU's host decides on every turn of one."""
    due = schedule.stop > schedule.start

    def layer_step(run, new, fixed, layer, body):
        clock = run.wiring.storage.clocks[0]
        tile = {s: at_layer(new[s], layer)[:, 0] for s in clock.sources}
        payload, _, _ = run.wiring.maps.encode(at_layer(fixed, layer), tile, {})
        here, slots = run.deal.place(modulo(schedule.start, run.slots))
        here, slots = given_to_gpus((due if here is None else due & here, slots))
        put = lambda field, stored, tile: _written(field, stored, layer, slots, tile, here)  # noqa: E731
        return store_fields(run, body, clock, payload, put)

    out = []
    for run, state, new, fixed in zip(runs, states, news, constants, strict=True):
        step = functools.partial(layer_step, run, new, fixed)
        out.append((each_layer(run.count, step, state.body), state.window, new))
    return tuple(out)


def _written(
    field: Field,
    stored: Stored,
    layer: Int[Array, ""] | int,
    slots: Int[Array, " B"],
    tile: Num[Array, "_ _"],
    wanted: Bool[Array, " B"],
) -> Stored:
    """Store one token of every wanted row in its slot, as `kvqjax.ops.layout.write` does row by row. The tile is that
    of B tokens."""
    if not field.packed:
        return (_scattered(stored[0], layer, slots, to_bits(saturated(tile, field.dtype)).T, wanted, lanes=True),)
    shift, found, codes = 0, [], tile.astype(jnp.uint32)
    for words, bits in zip(stored, split_bits(field.bits), strict=True):
        per, part = 1024 // bits, (codes >> shift) & ((1 << bits) - 1)
        place = jnp.asarray(floor_divide(slots, per) * PLANE + modulo(slots, PLANE))
        at = jnp.asarray(floor_divide(modulo(slots, per), PLANE) * bits, jnp.uint32)[:, None]
        # Read in a kernel of its own, so that none reads the array that it writes in place.
        old = kept_apart(words[_index(words, layer, place, field.along_lanes)])
        new = (old & ~(jnp.uint32((1 << bits) - 1) << at)) | part << at
        found.append(_scattered(words, layer, place, new, wanted, field.along_lanes))
        shift += bits
    return tuple(found)


def _index(array: Array, layer, place: Int[Array, " B"], lanes: bool) -> tuple:
    """Index one entry of every row, [B, W]. With `lanes` entries are on the last axis: then every number is one of its
    own, because XLA would turn an array whose scattered axes are not the first."""
    rows = jnp.arange(array.shape[1])
    if not lanes:
        return layer, rows, place
    return layer, rows[:, None], jnp.arange(array.shape[2])[None], place[:, None]


def _scattered(array: Array, layer, place: Int[Array, " B"], new: Num[Array, "B W"], wanted: Bool[Array, " B"], lanes):
    """Return `array` with one new entry of every wanted row."""
    place = jnp.where(wanted, place, array.shape[-1 if lanes else -2])  # beyond the end: dropped
    return array.at[_index(array, layer, place, lanes)].set(
        new, mode="drop", unique_indices=True, wrap_negative_indices=False
    )
