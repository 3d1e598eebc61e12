"""Encoding what leaves the window, tile by tile (docs/design.md, ideas 2, 6, 8).

One tile is one clock unit of one row of one layer. Every path (a decode step, a chunk, a draft, an exact prefill,
eviction) goes over its tiles by `encode_due` and encodes them as `encode_tile` does, so equal sources give equal words.
Rows are looped over, never vmapped: under vmap a conditional flush becomes a select that encodes at every step."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvqjax.cache.runs import RunLayout
from kvqjax.methods.wiring import Clock
from kvqjax.ops.layout import FEW, PLANE, write
from kvqjax.ops.xla import row_major

__all__ = [
    "Schedule",
    "at_layer",
    "cut_tile",
    "encode_due",
    "encode_tile",
    "gather_tile",
    "in_order",
    "store_tile",
    "units_at_once",
]

Sources = dict  # source name -> array
MOST_AT_ONCE = 2048  # tokens of a tile


class Schedule(NamedTuple):
    """Which units of one clock are encoded in a call: of row b those numbered `start[b]` to `stop[b] - 1`, in this
    order. `place(row, number)` says which body token a unit begins with, and which slot of the body it goes to. A tile
    may be `at_once` consecutive units."""

    clock: Clock
    start: Int[Array, " B"]
    stop: Int[Array, " B"]
    place: Callable
    at_once: int = 1

    @property
    def anything(self) -> Bool[Array, ""]:
        """Say whether any row has a unit that is due."""
        return (self.stop > self.start).any()


def in_order(clock: Clock, start: Int[Array, " B"], stop: Int[Array, " B"], at_once: int = 1) -> Schedule:
    """Schedule units that lie in the body as they lie in the sequence."""
    return Schedule(clock, start, stop, lambda row, number: (number * clock.unit, number * clock.unit), at_once)


def units_at_once(runs: Sequence[RunLayout], clock: Clock, length: int) -> int:
    """Count the units of a clock that these runs may encode as one tile: as many as `length` new tokens complete,
    bounded by memory and by what a body holds. It is 1 unless that gives the same bits and the units lie side by side
    in the body."""
    codecs = [codec for run in runs for codec in run.wiring.storage.codecs.values()]
    alone = not any(run.wiring.chain.carry or run.wiring.maps.frame for run in runs)
    beside = not any(run.wraps or run.deal.parts > 1 for run in runs)
    fine = alone and beside and all(codec.apart for codec in codecs)
    most = min(length, MOST_AT_ONCE, *(run.slots for run in runs))
    # From a plane's edge on: of so many single tokens as many whole planes less one always follow it.
    count = most // clock.unit if clock.unit > 1 else most // PLANE * PLANE - PLANE
    return count if fine and count * clock.unit > FEW else 1


def at_layer(tree, index):
    """Cut entry `index` out of every leaf's first axis."""
    return jax.tree.map(lambda a: row_major(jax.lax.dynamic_index_in_dim(a, index, keepdims=False)), tree)


def cut_tile(x, at, row, start, size: int):
    """Cut `size` consecutive tokens out of one row of `x`, [size, W]; a slice, because a gather is slow on TPUs."""
    begin, whole = (*at, row, start, 0), (1,) * (len(at) + 1)
    return row_major(jax.lax.dynamic_slice(x, begin, (*whole, size, x.shape[-1]))).reshape(size, -1)


def gather_tile(window, new, at, row, token, size: int, held, unit: int):
    """Collect tokens `token .. token + size - 1` of one row, [size, W]: from the ring where they are older than body
    token `held`, else from `new` whose first token is `held`. `token` is a multiple of `size`, or of `unit` where a
    tile is several units. `at` indexes the arrays' leading axes before the row."""
    tokens, slots, length = token + jnp.arange(size), window.shape[-2], new.shape[-2]
    if slots % size == 0 and size <= max(unit, PLANE):  # a tile never wraps
        ring = cut_tile(window, at, row, token % slots, size)
    else:
        ring = window[(*at, row, tokens % slots)]
    if length == 1:
        fresh = jnp.broadcast_to(cut_tile(new, at, row, 0, 1), ring.shape)
    else:
        fresh = new[(*at, row, jnp.clip(tokens - held, 0, length - 1))]
    return jnp.where((tokens < held)[:, None], ring, fresh)


def encode_tile(run: RunLayout, body, at, clock, slot, tile: Sources, constants, carry):
    """Encode one tile of the clock's sources and store it at (layer, row) = `at` from body slot `slot` on, counted as
    if a ring had no end."""
    payload, recon, carry = run.wiring.maps.encode(constants, tile, carry)
    return store_tile(run, body, at, clock, slot, payload), recon, carry


def store_tile(run: RunLayout, body, at, clock, slot, payload, wanted: Bool[Array, ""] | None = None):
    """Store what a tile was encoded as; nothing where it is not `wanted`."""
    here, slot = run.deal.place(slot % run.slots)
    if wanted is not None:
        here = wanted if here is None else wanted & here
    for source in clock.sources:
        fields = run.wiring.storage.codecs[source].fields
        stored = {
            name: write(field, body[source][name], at, slot, payload[source][name], here)
            for name, field in fields.items()
        }
        body = {**body, source: stored}
    return body


def encode_due(schedules: tuple[Schedule, ...], rows, most: int, step: Callable, state):
    """Call `state = step(clock, row, token, slot, size, state)` for every tile that is due: row by row, a row's clocks
    one after the other, the oldest tokens first. `clock` is its number, `size` the tokens of a tile. At most `most`
    tokens of a row are due at once, as many as are new."""

    def row_step(row, state):
        for number, schedule in enumerate(schedules):

            def tile_step(unit, size, state, number=number, schedule=schedule):
                return step(number, row, *schedule.place(row, unit), size, state)

            state = _for_tiles(schedule, row, most, tile_step, state)
        return state

    return jax.lax.fori_loop(0, rows, row_step, state)


def _for_tiles(schedule: Schedule, row, most: int, body_fn: Callable, state):
    """Call `body_fn(unit, size, state)` for every tile of a row: as many units at once as the schedule allows while
    there are so many, then one by one. Codecs that see one token at a time are fed whole planes of 32 where they
    fit, and as many of them at once as the schedule allows."""
    unit, at_once, start, stop = schedule.clock.unit, schedule.at_once, schedule.start[row], schedule.stop[row]
    if unit > 1 or most < PLANE:
        if at_once > 1:
            many = (stop - start) // at_once
            step = lambda j, s: body_fn(start + j * at_once, at_once * unit, s)  # noqa: E731
            state = jax.lax.fori_loop(0, many, step, state)
            first = start + many * at_once
        else:
            first = start
        return jax.lax.fori_loop(first, stop, lambda j, s: body_fn(j, unit, s), state)

    def phase(number, loop):
        """Work off single tokens up to a plane's edge, then whole planes, many and one by one; the second time single
        tokens to the end. A choice inside one loop would make XLA copy the words."""
        token, state = loop
        edge = jnp.where(number == 0, jnp.minimum(stop, -(-token // PLANE) * PLANE), stop)
        state = jax.lax.fori_loop(token, edge, lambda j, s: body_fn(j, 1, s), state)
        for size in (at_once, PLANE) if at_once > PLANE else (PLANE,):
            count = (stop - edge) // size
            step = functools.partial(lambda edge, size, j, s: body_fn(edge + j * size, size, s), edge, size)
            state = jax.lax.fori_loop(0, count, step, state)
            edge = edge + count * size
        return edge, state

    return jax.lax.fori_loop(0, 2, phase, (start, state))[1]
