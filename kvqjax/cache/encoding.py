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

from kvqjax.cache.run_layout import RunLayout
from kvqjax.methods.layer_cache import Clock
from kvqjax.ops.layout import Field
from kvqjax.ops.packing import Stored
from kvqjax.ops.packing.words import FEW, PLANE
from kvqjax.ops.xla_workarounds import cut_along, cut_at, floor_divide, given_to_gpus, modulo, row_major

__all__ = [
    "Pages",
    "Schedule",
    "at_layer",
    "cut_tile",
    "each_layer",
    "encode_due",
    "encode_tile",
    "gather_tile",
    "in_order",
    "store_fields",
    "units_at_once",
]

Sources = dict  # source name -> array
Pages = Int[Array, "B N"] | None  # the page of each row's first, second, ... `RunLayout.page` slots; -1: none
MOST_AT_ONCE = 2048  # tokens of a tile
IN_PAGES = 128  # tokens of a tile, at most, where it must end with a page: chunks of prompts begin at such multiples


class Schedule(NamedTuple):
    """List the units of one clock that a call encodes: of row b numbers `start[b]` to `stop[b] - 1`, in this order.
    `place(row, number)` gives the body token that a unit begins with and the body slot that it is written to. Up to
    `at_once` consecutive units are encoded as one tile. `aligned`: these begin at a multiple of as many, because pages
    end there."""

    clock: Clock
    start: Int[Array, " B"]
    stop: Int[Array, " B"]
    place: Callable
    at_once: int = 1
    aligned: bool = False

    @property
    def anything(self) -> Bool[Array, ""]:
        """Say whether any row has a unit that is due."""
        return (self.stop > self.start).any()


def in_order(
    clock: Clock, start: Int[Array, " B"], stop: Int[Array, " B"], runs: Sequence[RunLayout], length: int
) -> Schedule:
    """Schedule the units of bodies that keep all tokens in their order: token t goes to slot t. `length` new tokens may
    complete units of these `runs`."""
    place = lambda row, number: (number * clock.unit, number * clock.unit)  # noqa: E731
    aligned = any(run.page for run in runs)
    return Schedule(clock, start, stop, place, units_at_once(runs, clock, length), aligned)


def units_at_once(runs: Sequence[RunLayout], clock: Clock, length: int) -> int:
    """Return how many units of a clock these runs may encode as one tile. At most as many as `length` new tokens
    complete, a body holds and memory allows. Only 1 where units encoded together would get other bits, or do not lie
    side by side in the body."""
    codecs = [codec for run in runs for codec in run.wiring.storage.codecs.values()]
    alone = not any(run.wiring.chain.carry or run.wiring.maps.frame for run in runs)
    beside = not any(run.wraps or run.deal.parts > 1 for run in runs)
    fine = alone and beside and all(codec.apart for codec in codecs)
    most = min(length, MOST_AT_ONCE, *(run.slots for run in runs))
    if not fine:
        return 1
    page = max(run.page for run in runs)
    if page:  # all pages of a pool are as long; tiles of single tokens are planes then, which end with pages anyway
        count = min(most, IN_PAGES) // clock.unit if clock.unit > 1 else 1
        return next(n for n in range(max(1, count), 0, -1) if page % (n * clock.unit) == 0)
    # From a plane's edge on: of so many single tokens as many whole planes less one always follow it.
    count = most // clock.unit if clock.unit > 1 else most // PLANE * PLANE - PLANE
    return count if count * clock.unit > FEW else 1


def at_layer(tree, index):
    """Return entry `index` of every array's first axis."""
    return jax.tree.map(lambda a: row_major(cut_along(a, index, 1, 0).squeeze(0)), tree)


def each_layer(count: int, step: Callable, state):
    """Call `state = step(layer, state)` for every layer of a run, and return the last state. One layer is straight
    code: of many runs of one layer, loops that each pass the state of all make compile time grow with the square of
    the depth."""
    return step(0, state) if count == 1 else jax.lax.fori_loop(0, count, step, state)


def cut_tile(x, at, row, start, size: int):
    """Return `size` consecutive tokens of one row of `x`, [size, W], by a slice: a gather is slow on TPUs."""
    begin, whole = (*at, row, start, 0), (1,) * (len(at) + 1)
    return row_major(cut_at(x, begin, (*whole, size, x.shape[-1]))).reshape(size, -1)


def gather_tile(window, new, at, row, token, size: int, held, unit: int):
    """Return the body tokens `token` to `token + size - 1` of one row, [size, W]. Those before `held` come from the
    window's ring, the others from `new`, which begins with token `held`. `token` is a multiple of `unit`, and of `size`
    where a tile is one unit. `at` are the indices of the axes before the row."""
    tokens, slots, length = token + jnp.arange(size), window.shape[-2], new.shape[-2]
    if slots % size == 0 and size <= max(unit, PLANE):  # a tile never wraps
        ring = cut_tile(window, at, row, modulo(token, slots), size)
    else:
        ring = window[(*at, row, modulo(tokens, slots))]
    if length == 1:
        fresh = jnp.broadcast_to(cut_tile(new, at, row, 0, 1), ring.shape)
    else:
        fresh = new[(*at, row, jnp.clip(tokens - held, 0, length - 1))]
    return jnp.where((tokens < held)[:, None], ring, fresh)


def encode_tile(run: RunLayout, body, at, clock, slot, tile: Sources, constants, carry, pages: Pages = None):
    """Encode one tile of the clock's sources and store it at (layer, row) = `at`, from body slot `slot` on. In a ring
    the slot is taken modulo its length. `pages` say where the slots of every row are, unless they are the row's own.
    Returns (body, reconstruction, carry)."""
    payload, recon, carry = run.wiring.maps.encode(constants, tile, carry)
    here, slot = given_to_gpus(run.deal.place(modulo(slot, run.slots)))
    if run.page:
        assert pages is not None
        page, slot = pages[at[1], floor_divide(slot, run.page)], modulo(slot, run.page)
        at, here = (at[0], jnp.maximum(page, 0)), page >= 0
    put = lambda field, stored, tile: field.packing.write(stored, at, slot, tile, here)  # noqa: E731
    return store_fields(run, body, clock, payload, put), recon, carry


def store_fields(run: RunLayout, body, clock, payload, put: Callable[[Field, Stored, Array], Stored]):
    """Return the body with every field of the clock's sources as `put(field, stored, tile)` returns it."""
    for source in clock.sources:
        fields = run.wiring.storage.codecs[source].fields
        stored = {name: put(field, body[source][name], payload[source][name]) for name, field in fields.items()}
        body = {**body, source: stored}
    return body


def encode_due(schedules: tuple[Schedule, ...], rows, most: int, step: Callable, state):
    """Call `state = step(clock, row, token, slot, size, state)` for every tile that is due, and return the last state.
    Rows come one after the other, within a row its clocks, within a clock the oldest tokens first. `clock` is a number,
    `size` the tokens of the tile. `most` bounds the tokens of a row that can be due: the number of new ones."""

    def row_step(row, state):
        for number, schedule in enumerate(schedules):

            def tile_step(unit, size, state, number=number, schedule=schedule):
                return step(number, row, *schedule.place(row, unit), size, state)

            state = _for_tiles(schedule, row, most, tile_step, state)
        return state

    return jax.lax.fori_loop(0, rows, row_step, state)


def _for_tiles(schedule: Schedule, row, most: int, body_fn: Callable, state):
    """Call `body_fn(unit, size, state)` for every tile of a row, first tiles of `at_once` units, then single units.
    Where a unit is one token and 32 may be due, tiles are single tokens up to the next multiple of 32, then `at_once`
    tokens or 32, then single tokens again."""
    unit, at_once, start, stop = schedule.clock.unit, schedule.at_once, schedule.start[row], schedule.stop[row]
    if unit > 1 or most < PLANE:
        if at_once > 1:
            edge = start
            if schedule.aligned:  # single units come first, up to where a tile may begin
                edge = jnp.minimum(stop, -(-start // at_once) * at_once)
                state = jax.lax.fori_loop(start, edge, lambda j, s: body_fn(j, unit, s), state)
            many = (stop - edge) // at_once
            step = lambda j, s: body_fn(edge + j * at_once, at_once * unit, s)  # noqa: E731
            state = jax.lax.fori_loop(0, many, step, state)
            first = edge + many * at_once
        else:
            first = start
        return jax.lax.fori_loop(first, stop, lambda j, s: body_fn(j, unit, s), state)

    def phase(number, loop):
        """Encode single tokens up to a multiple of 32, then whole planes. Called again, single tokens to the end. One
        loop that chooses the size inside would make XLA copy the words."""
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
