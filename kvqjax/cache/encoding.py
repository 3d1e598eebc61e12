"""Encoding what leaves the window, tile by tile (docs/design.md, ideas 2, 6, 8).

    Schedule        which units of each row are due, and in which slots of the body they go
    encode_due      goes over rows, over clocks and over tiles, and calls a step for every tile:
      gather_tile     the tile's tokens, [size, W] per source, from the window and the new tokens
      encode_tile     their codes, which are stored in the body

A clock says when its sources leave the window: its unit is how many tokens leave together. A tile is one unit of one
row of one layer, or several consecutive ones where these give the same bits (`units_at_once`). The paths that encode (a
decode step, a chunk, a draft, an exact prefill, eviction) share `encode_due`, so equal sources give equal words. One
shortcut for GPUs does not: `_flush_newest` in kvqjax/cache/append.py.
Rows are looped over, never vmapped: under vmap a conditional flush becomes a select that encodes at every step."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvqjax.cache.eviction import Moves
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

    Attributes:
        clock: The clock.
        start: The number of each row's first unit that is due.
        stop: One past the number of each row's last unit that is due.
        place: `place(row, number)` gives the body token that a unit begins with, and the body slot that it is written
            to.
        at_once: So many consecutive units are encoded as one tile, where as many are due.
        aligned: Such a tile begins at a multiple of `at_once` units, because pages end there."""

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
    runs: Sequence[RunLayout],
    start: Sequence[Int[Array, " B"]],
    stop: Sequence[Int[Array, " B"]],
    length: int,
) -> tuple[Schedule, ...]:
    """Schedule the units of bodies that keep all tokens in their order: token t goes to slot t.

    Args:
        runs: The runs that are encoded together.
        start: How many units of each row are encoded, clock by clock.
        stop: How many units of each row are to be encoded, clock by clock.
        length: How many new tokens a row takes at most.

    Returns:
        A schedule for each clock."""
    aligned = any(run.page for run in runs)

    def schedule(clock: Clock, first: Int[Array, " B"], last: Int[Array, " B"]) -> Schedule:
        def place(row, number):
            return number * clock.unit, number * clock.unit

        return Schedule(clock, first, last, place, units_at_once(runs, clock, length), aligned)

    return tuple(map(schedule, runs[0].wiring.storage.clocks, start, stop))


def moved(run: RunLayout, moves: Moves) -> Schedule:
    """Schedule the units of a body that evicts tokens, which go where `moves` says.

    The schedule numbers the moves, not the units."""
    clock = run.wiring.storage.clocks[0]

    def place(row, move):
        return moves.unit[row, move] * clock.unit, moves.slot[row, move]

    return Schedule(clock, jnp.zeros_like(moves.count), moves.count, place)


def units_at_once(runs: Sequence[RunLayout], clock: Clock, length: int) -> int:
    """Choose how many units of a clock these runs may encode as one tile.

    Args:
        runs: The runs that are encoded together.
        clock: The clock whose units are due.
        length: How many new tokens a row takes at most.

    Returns:
        A number of units: at most as many as `length` new tokens complete, a body holds and memory allows. Only 1 where
        units encoded together would get other bits, or do not lie side by side in the body."""
    codecs = [codec for run in runs for codec in run.wiring.storage.codecs.values()]
    # A matrix product rounds differently for another number of rows. A frame has such products, and codecs that are not
    # `apart` may have. What flows between layers is reconstructed in tiles of one unit.
    unchained = not any(run.wiring.chain.carry or run.wiring.maps.frame for run in runs)
    contiguous = not any(run.wraps or run.deal.parts > 1 for run in runs)
    allowed = unchained and contiguous and all(codec.apart for codec in codecs)
    most = min(length, MOST_AT_ONCE, *(run.slots for run in runs))
    if not allowed:
        return 1
    page = max(run.page for run in runs)
    if page:  # all pages of a pool are as long; tiles of single tokens are planes then, which end with pages anyway
        count = min(most, IN_PAGES) // clock.unit if clock.unit > 1 else 1
        # The most units whose tokens divide a page, so that no tile spans two pages.
        return next(units for units in range(max(1, count), 0, -1) if page % (units * clock.unit) == 0)
    # From a plane's edge on: of so many single tokens as many whole planes less one always follow it.
    count = most // clock.unit if clock.unit > 1 else most // PLANE * PLANE - PLANE
    # A packing wants a tile of up to FEW tokens to begin at a multiple of its size. Single units and planes do, several
    # units need not. Longer tiles may begin at any unit.
    return count if count * clock.unit > FEW else 1


def at_layer(tree, index):
    """Return entry `index` of every array's first axis, which is that of layers."""
    return jax.tree.map(lambda array: row_major(cut_along(array, index, 1, 0).squeeze(0)), tree)


def each_layer(count: int, step: Callable, state):
    """Call `state = step(layer, state)` for every layer of a run, and return the last state."""
    # One layer is straight code. A cache may have as many runs of one layer as the model has layers. Each of their
    # loops would pass the state of all runs, and compile time would grow with the square of the depth.
    return step(0, state) if count == 1 else jax.lax.fori_loop(0, count, step, state)


def cut_tile(x, at, row, start, size: int):
    """Cut `size` consecutive tokens of one row out of `x`, by a slice: a gather is slow on TPUs.

    Args:
        x: An array [..., B, S, W].
        at: The indices of the axes before the rows.
        row: The row.
        start: The first token's place among the S.
        size: How many tokens. Static.

    Returns:
        The tokens, [size, W]."""
    begin, ones = (*at, row, start, 0), (1,) * (len(at) + 1)
    return row_major(cut_at(x, begin, (*ones, size, x.shape[-1]))).reshape(size, -1)


def gather_tile(window, new, at, row, token, size: int, body_length, unit: int):
    """Collect the body tokens `token` to `token + size - 1` of one row. Those before `body_length` come from the
    window, the others from the new tokens.

    Args:
        window: One source's window, [..., B, C, W]: a ring in which body token t is in slot t % C.
        new: Its new tokens, [..., B, T, W]. The first of them is body token `body_length`.
        at: The indices of the axes before the rows.
        row: The row.
        token: The first body token, a multiple of `unit`, and of `size` where the tile is one unit.
        size: How many tokens. Static.
        body_length: How many body tokens the row held before the call.
        unit: The clock's unit.

    Returns:
        The tokens, [size, W]."""
    tokens, slots, length = token + jnp.arange(size), window.shape[-2], new.shape[-2]
    # A tile of one unit or one plane begins at a multiple of its size. One of more units may begin at any unit.
    if slots % size == 0 and size <= max(unit, PLANE):  # a tile never wraps
        ring = cut_tile(window, at, row, modulo(token, slots), size)
    else:
        ring = window[(*at, row, modulo(tokens, slots))]
    # One new token can only be the last of a tile that is due. It is broadcast, so that nothing is indexed.
    if length == 1:
        fresh = jnp.broadcast_to(cut_tile(new, at, row, 0, 1), ring.shape)
    else:
        # The clip keeps indices valid for tokens of the window, whose numbers the next line leaves out.
        fresh = new[(*at, row, jnp.clip(tokens - body_length, 0, length - 1))]
    return jnp.where((tokens < body_length)[:, None], ring, fresh)


def encode_tile(run: RunLayout, body, at, clock, slot, tile: Sources, constants, carry, pages: Pages = None):
    """Encode one tile of the clock's sources and store it in the body.

    Args:
        run: The run's plan.
        body: The run's body, {source: {field: arrays}}.
        at: (layer, row).
        clock: The clock whose sources the tile holds.
        slot: The first body slot. In a ring it is taken modulo the ring's length.
        tile: [size, W] per source.
        constants: The layer's calibrated constants.
        carry: What the layer below passed on for these tokens, [size, W] by name.
        pages: Where the slots of every row are, unless they are the row's own.

    Returns:
        (body, reconstruction of the tile, the layer's carry)."""
    payload, recon, carry = run.wiring.maps.encode(constants, tile, carry)
    # `local` says whether this device stores the slot. None stands for always.
    local, slot = given_to_gpus(run.deal.place(modulo(slot, run.slots)))
    if run.page:
        assert pages is not None
        # A row that has no page there stores nothing. Page 0 then stands for the missing one, to be a valid index.
        page, slot = pages[at[1], floor_divide(slot, run.page)], modulo(slot, run.page)
        at, local = (at[0], jnp.maximum(page, 0)), page >= 0
    put = lambda field, stored, tile: field.packing.write(stored, at, slot, tile, local)  # noqa: E731
    return store_fields(run, body, clock, payload, put), recon, carry


def store_fields(run: RunLayout, body, clock, payload, put: Callable[[Field, Stored, Array], Stored]):
    """Store every field of the clock's sources as `put(field, stored, tile)` does.

    Args:
        run: The run's plan.
        body: {source: {field: arrays}}.
        clock: The clock whose sources are stored. Other sources stay as they are.
        payload: What to store, {source: {field: tile}}.
        put: Stores a tile in the arrays of its field.

    Returns:
        The body."""
    for source in clock.sources:
        fields = run.wiring.storage.codecs[source].fields
        stored = {name: put(field, body[source][name], payload[source][name]) for name, field in fields.items()}
        body = {**body, source: stored}
    return body


def encode_due(schedules: tuple[Schedule, ...], rows, most: int, step: Callable, state):
    """Call `state = step(clock, row, token, slot, size, state)` for every tile that is due. Rows come one after the
    other, within a row its clocks, within a clock the oldest tokens first.

    Args:
        schedules: One for each clock.
        rows: How many rows to go over, static or not.
        most: A bound of how many tokens of a row can be due: the number of new ones. Static.
        step: Encodes one tile. `clock` is the schedule's number, `token` the tile's first body token, `slot` where it
            goes in the body, `size` how many tokens the tile has (static).
        state: What the first step is given. Steps must return a tree of the same shapes.

    Returns:
        The last state."""

    def row_step(row, state):
        for number, schedule in enumerate(schedules):

            def tile_step(unit, size, state, number=number, schedule=schedule):
                return step(number, row, *schedule.place(row, unit), size, state)

            state = _for_tiles(schedule, row, most, tile_step, state)
        return state

    return jax.lax.fori_loop(0, rows, row_step, state)


def _for_tiles(schedule: Schedule, row, most: int, body_fn: Callable, state):
    """Call `body_fn(unit, size, state)` for every tile of a row, and return the last state.

    Units of several tokens come in this order:

        single units (only if tiles are aligned) | tiles of `at_once` units | single units
                                                 ^ a multiple of `at_once`

    Units of one token, where 32 of them (a plane) may be due, come in another order, because packings of codes take
    single tokens, or multiples of 32 tokens from a multiple of 32 on:

        single tokens | tiles of `at_once` tokens | planes | single tokens
                      ^ a multiple of 32

    Args:
        schedule: The schedule of the tiles.
        row: The row.
        most: As in `encode_due`.
        body_fn: Encodes the tile that begins with unit number `unit` and has `size` tokens.
        state: What the first call is given."""
    unit, at_once, start, stop = schedule.clock.unit, schedule.at_once, schedule.start[row], schedule.stop[row]
    if unit > 1 or most < PLANE:

        def single_units(first, last, state):
            return jax.lax.fori_loop(first, last, lambda j, s: body_fn(j, unit, s), state)

        if at_once == 1:
            return single_units(start, stop, state)
        edge = start
        if schedule.aligned:  # single units come first, up to where a tile may begin
            edge = jnp.minimum(stop, -(-start // at_once) * at_once)
            state = single_units(start, edge, state)
        tiles = (stop - edge) // at_once
        tile = lambda j, s: body_fn(edge + j * at_once, at_once * unit, s)  # noqa: E731
        state = jax.lax.fori_loop(0, tiles, tile, state)
        return single_units(edge + tiles * at_once, stop, state)

    def phase(number, loop):
        """Phase 0: encode single tokens up to a multiple of 32, then as many whole tiles and planes as are due.
        Phase 1: encode single tokens to the end.

        Both phases have the same loops, of which some have no turn. One loop that chose the size of each tile would
        make XLA copy the words.

        `loop` is (the first token that is not encoded yet, state)."""
        token, state = loop
        edge = jnp.where(number == 0, jnp.minimum(stop, -(-token // PLANE) * PLANE), stop)
        state = jax.lax.fori_loop(token, edge, lambda j, s: body_fn(j, 1, s), state)
        # In phase 1 `edge` is `stop`, so that every count below is 0.
        for size in (at_once, PLANE) if at_once > PLANE else (PLANE,):
            count = (stop - edge) // size
            step = functools.partial(lambda edge, size, j, s: body_fn(edge + j * size, size, s), edge, size)
            state = jax.lax.fori_loop(0, count, step, state)
            edge = edge + count * size
        return edge, state

    return jax.lax.fori_loop(0, 2, phase, (start, state))[1]
