"""Appending new tokens: units that are due leave the window for the body, then new tokens enter
sinks and window.

    a row before the call    sinks | body ......... | window |              new tokens
    a row after the call     sinks | body ................... | window |

    1. flush       Units that are due are encoded. Their tokens come from the window, or from the
                   new tokens.
    2. remember    New tokens are put into sinks and window. In the window they take the slots of
                   the oldest tokens.

The order matters: new tokens overwrite window slots whose tokens must be encoded first. A unit is
due as soon as the row holds `window + unit` tokens that its clock has not encoded.

`commit` appends to any cache. It goes over chains (runs that are encoded together) by
`flush_chain`, which takes each tile (one unit, or several) through all layers. An exact prefill
fills an empty cache layer by layer. `flush_layer` then encodes all tiles of one layer, because the
layer above has not run yet.

`body_lengths[b]` counts the body tokens (tokens after the sinks) that row b held before the call.
It is negative while the sinks fill. A source is a named vector of width W per token. New tokens are
[L, B, T, W] per source, L being the layers of a run. The window has C slots for each row. It is a
ring: body token t is in slot t % C.

What leaves the window is encoded tile by tile (docs/design.md, ideas 2, 6, 8):

    Schedule        which units of each row are due, and in which slots of the body they go
    encode_due      goes over rows, over clocks and over tiles, and calls a step for every tile:
      gather_tile     the tile's tokens, [size, W] per source, from the window and the new tokens
      encode_tile     their codes, which are stored in the body

A clock says when its sources leave the window: its unit is how many tokens leave together. A tile
is one unit of one row of one layer, or several consecutive ones where these give the same bits
(`units_at_once`). The paths that encode (a decode step, a chunk, a draft, an exact prefill,
eviction) share `encode_due`, so equal sources give equal words. One shortcut for GPUs does not:
`_flush_newest`. Rows are looped over, never vmapped: under vmap a conditional flush becomes a
select that encodes at every step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvqjax.cache.eviction import Moves, enter
from kvqjax.cache.layout import RunLayout
from kvqjax.cache.runs import chains, runs_of
from kvqjax.cache.state import Cache, Run, admitted, finite_tokens, ring_tokens, units_due
from kvqjax.methods.layer_cache import Clock
from kvqjax.ops.finite import found_finite, leading, saturated, zeroed
from kvqjax.ops.layout import Field
from kvqjax.ops.packing import Stored
from kvqjax.ops.packing.base import FEW, PLANE
from kvqjax.ops.xla_workarounds import (
    cut_along,
    cut_at,
    entering_after,
    floor_divide,
    given_to_gpus,
    modulo,
    row_major,
    rows_if,
)

Sources = dict  # source name -> array
# The page of each row's first, second, ... `RunLayout.page` slots; -1: none.
Pages = Int[Array, "B N"] | None
MOST_AT_ONCE = 2048  # tokens of a tile
# Tokens of a tile, at most, where it must end with a page: chunks of prompts begin at such
# multiples
IN_PAGES = 128


class Schedule(NamedTuple):
    """List the units of one clock that a call encodes: of row b numbers `start[b]` to
    `stop[b] - 1`, in this order.

    Attributes:
        clock: The clock.
        start: The number of each row's first unit that is due.
        stop: One past the number of each row's last unit that is due.
        place: `place(row, number)` gives the body token that a unit begins with, and the body slot
            that it is written to.
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
        A number of units: at most as many as `length` new tokens complete, a body holds and memory
        allows. Only 1 where units encoded together would get other bits, or do not lie side by side
        in the body."""
    if not all(_takes_several_units(run) for run in runs):
        return 1
    unit = clock.unit
    most = min(length, MOST_AT_ONCE, *(run.slots for run in runs))  # tokens
    page = max(run.page for run in runs)  # all pages of a pool are as long
    if page:
        # Tiles of single tokens are planes, which end with pages anyway.
        if unit == 1:
            return 1
        # The most units whose tokens divide a page, so that no tile spans two pages.
        count = max(1, min(most, IN_PAGES) // unit)
        while page % (count * unit):
            count -= 1
        return count
    if unit > 1:
        count = most // unit
    else:
        # Tokens are encoded one by one up to the next plane. n planes of tokens have at least n - 1
        # whole planes behind that.
        count = most // PLANE * PLANE - PLANE
    # A packing wants a tile of up to FEW tokens to begin at a multiple of its size. Single units
    # and planes do, several units need not. Longer tiles may begin at any unit.
    return count if count * unit > FEW else 1


def _takes_several_units(run: RunLayout) -> bool:
    """Say whether a tile of several units gets the bits that single units get, and lies in one
    piece of the run's body."""
    # What flows between layers is reconstructed in tiles of one unit. A matrix product rounds
    # differently for another number of rows: a frame has such products, and codecs that are not
    # `apart` may have.
    if run.wiring.chain.carry or run.wiring.maps.frame:
        return False
    if run.wraps or run.deal.parts > 1:
        return False
    return all(codec.apart for codec in run.wiring.storage.codecs.values())


def at_layer(tree, index):
    """Return entry `index` of every array's first axis, which is that of layers."""
    return jax.tree.map(lambda array: row_major(cut_along(array, index, 1, 0).squeeze(0)), tree)


def each_layer(count: int, step: Callable, state):
    """Call `state = step(layer, state)` for every layer of a run, and return the last state."""
    # One layer is straight code. A cache may have as many runs of one layer as the model has
    # layers. Each of their loops would pass the state of all runs, and compile time would grow with
    # the square of the depth.
    return step(0, state) if count == 1 else jax.lax.fori_loop(0, count, step, state)


def cut_tile(x, at, row, start, size: int):
    """Cut `size` consecutive tokens of one row out of `x`, by a slice: a gather is slow on TPUs.

    Args:
        x: An array [..., B, S, W].
        at: The indices of the axes before the rows.
        start: The first token's place among the S.
        size: How many tokens. Static.

    Returns:
        The tokens, [size, W]."""
    begin = (*at, row, start, 0)
    shape = (1,) * (len(at) + 1) + (size, x.shape[-1])
    return row_major(cut_at(x, begin, shape)).reshape(size, -1)


def gather_tile(window, new, at, row, token, size: int, body_length, unit: int):
    """Collect the body tokens `token` to `token + size - 1` of one row. Those before `body_length`
    come from the window, the others from the new tokens.

    Args:
        window: One source's window, [..., B, C, W]: a ring in which body token t is in slot t % C.
        new: Its new tokens, [..., B, T, W]. The first of them is body token `body_length`.
        at: The indices of the axes before the rows.
        token: The first body token, a multiple of `unit`, and of `size` where the tile is one unit.
        size: How many tokens. Static.
        body_length: How many body tokens the row held before the call.
        unit: The clock's unit.

    Returns:
        The tokens, [size, W]."""
    tokens = token + jnp.arange(size)
    slots = window.shape[-2]
    length = new.shape[-2]
    # A tile of one unit or one plane begins at a multiple of its size. One of more units may begin
    # at any unit.
    if slots % size == 0 and size <= max(unit, PLANE):  # a tile never wraps
        ring = cut_tile(window, at, row, modulo(token, slots), size)
    else:
        ring = window[(*at, row, modulo(tokens, slots))]
    # One new token can only be the last of a tile that is due. It is broadcast, so that nothing is
    # indexed.
    if length == 1:
        fresh = jnp.broadcast_to(cut_tile(new, at, row, 0, 1), ring.shape)
    else:
        # The clip keeps indices valid for tokens of the window, whose numbers the next line leaves
        # out.
        fresh = new[(*at, row, jnp.clip(tokens - body_length, 0, length - 1))]
    return jnp.where((tokens < body_length)[:, None], ring, fresh)


def encode_tile(
    run: RunLayout, body, at, clock, slot, tile: Sources, constants, carry, pages: Pages = None
):
    """Encode one tile of the clock's sources and store it in the body.

    Args:
        body: The run's body, {source: {field: arrays}}.
        at: (layer, row).
        clock: The clock whose sources the tile holds.
        slot: The first body slot. In a ring it is taken modulo the ring's length.
        tile: [size, W] per source.
        carry: What the layer below passed on for these tokens, [size, W] by name.
        pages: Where the slots of every row are, unless they are the row's own.

    Returns:
        (body, reconstruction of the tile, the layer's carry)."""
    payload, recon, carry = run.wiring.maps.encode(constants, tile, carry)
    # `local` says whether this device stores the slot. None stands for always.
    local, slot = given_to_gpus(run.deal.place(modulo(slot, run.slots)))
    if run.page:
        assert pages is not None
        layer, row = at
        page = pages[row, floor_divide(slot, run.page)]
        slot = modulo(slot, run.page)  # in the page
        # A row that has no page there stores nothing. Page 0 then stands for the missing one, to be
        # a valid index.
        at = (layer, jnp.maximum(page, 0))
        local = page >= 0

    def put(field, stored, tile):
        return field.packing.write(stored, at, slot, tile, local)

    return store_fields(run, body, clock, payload, put), recon, carry


def store_fields(
    run: RunLayout, body, clock, payload, put: Callable[[Field, Stored, Array], Stored]
):
    """Store every field of the clock's sources as `put(field, stored, tile)` does.

    Args:
        body: {source: {field: arrays}}.
        clock: The clock whose sources are stored. Other sources stay as they are.
        payload: What to store, {source: {field: tile}}.
        put: Stores a tile in the arrays of its field."""
    for source in clock.sources:
        stored = {}
        for name, field in run.wiring.storage.codecs[source].fields.items():
            stored[name] = put(field, body[source][name], payload[source][name])
        body = {**body, source: stored}
    return body


def encode_due(schedules: tuple[Schedule, ...], rows, most: int, step: Callable, state):
    """Call `state = step(clock, row, token, slot, size, state)` for every tile that is due. Rows
    come one after the other, within a row its clocks, within a clock the oldest tokens first.

    Args:
        schedules: One for each clock.
        rows: How many rows to go over, static or not.
        most: A bound of how many tokens of a row can be due: the number of new ones. Static.
        step: Encodes one tile. `clock` is the schedule's number, `token` the tile's first body
            token, `slot` where it goes in the body, `size` how many tokens the tile has (static).
        state: What the first step is given. Steps must return a tree of the same shapes.

    Returns:
        The last state."""

    def row_step(row, state):
        for number, schedule in enumerate(schedules):

            def tile_step(unit, size, state, number=number, schedule=schedule):
                token, slot = schedule.place(row, unit)
                return step(number, row, token, slot, size, state)

            state = _for_tiles(schedule, row, most, tile_step, state)
        return state

    return jax.lax.fori_loop(0, rows, row_step, state)


def _for_tiles(schedule: Schedule, row, most: int, body_fn: Callable, state):
    """Call `body_fn(unit, size, state)` for every tile of a row, and return the last state.

    Units of several tokens come in this order:

        single units (only if tiles are aligned) | tiles of `at_once` units | single units
                                                 ^ a multiple of `at_once`

    Units of one token, where 32 of them (a plane) may be due, come in another order, because
    packings of codes take single tokens, or multiples of 32 tokens from a multiple of 32 on:

        single tokens | tiles of `at_once` tokens | planes | single tokens
                      ^ a multiple of 32

    Args:
        schedule: The schedule of the tiles.
        most: As in `encode_due`.
        body_fn: Encodes the tile that begins with unit number `unit` and has `size` tokens.
        state: What the first call is given."""
    unit = schedule.clock.unit
    at_once = schedule.at_once
    start = schedule.start[row]
    stop = schedule.stop[row]
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

        def tile(j, s):
            return body_fn(edge + j * at_once, at_once * unit, s)

        state = jax.lax.fori_loop(0, tiles, tile, state)
        return single_units(edge + tiles * at_once, stop, state)

    def phase(number, loop):
        """Phase 0: encode single tokens up to a multiple of 32, then as many whole tiles and planes
        as are due. Phase 1: encode single tokens to the end.

        Both phases have the same loops, of which some have no turn. One loop that chose the size of
        each tile would make XLA copy the words.

        `loop` is (the first token that is not encoded yet, state)."""
        token, state = loop
        is_first = number == 0
        next_plane = jnp.minimum(stop, -(-token // PLANE) * PLANE)
        edge = jnp.where(is_first, next_plane, stop)
        state = jax.lax.fori_loop(token, edge, lambda j, s: body_fn(j, 1, s), state)
        # In phase 1 `edge` is `stop`, so that every count below is 0.
        for size in sizes:

            def tile(j, s, edge=edge, size=size):
                return body_fn(edge + j * size, size, s)

            count = (stop - edge) // size
            state = jax.lax.fori_loop(0, count, tile, state)
            edge = edge + count * size
        return edge, state

    sizes = (at_once, PLANE) if at_once > PLANE else (PLANE,)  # tokens of a tile
    _, state = jax.lax.fori_loop(0, 2, phase, (start, state))
    return state


def flush_layer(
    run: RunLayout,
    body,
    layer,
    new,
    first,
    schedules: tuple[Schedule, ...],
    constants,
    carry,
    pages: Pages = None,
):
    """Encode what is due of one layer of a fresh prompt, row by row.

    Args:
        body: The run's body, {source: {field: arrays}}.
        new: The prompt's tokens [B, T, W] per source.
        first: Which body token the first of them is, [B]: minus the sinks where `new` is the whole
            prompt, 0 where it is the tokens that the body keeps (kvqjax/cache/eviction.py).
        schedules: The units to encode, one schedule for each clock.
        carry: What the layer below passed on for each of these tokens, [B, T, W] by name.
        pages: The pages of every row, where the body lies in pages.

    Returns:
        (body, new, carry). The carry is this layer's. `new` changes only where keys leave the
        window before values. A token whose key alone is encoded then stays in the window with its
        reconstructed key."""
    length = next(iter(new.values())).shape[1]

    def tile_step(number, row, token, slot, size, state):
        """Encode the tile of `size` tokens from body token `token` on, by the clock of this
        `number`."""
        # The loop over tiles is traced even where it has no turn, and a slice longer than the
        # prompt is an error.
        if size > length:
            return state  # no tile of a prompt this short is ever due
        body, new, carry = state
        clock = schedules[number].clock
        # Where the tile begins among the prompt's tokens. A tile that is due lies within the
        # prompt, so that the clip changes no such start.
        start = jnp.clip(token - first[row], 0, length - size)
        tile = {source: cut_tile(new[source], (), row, start, size) for source in clock.sources}
        tile_carry = {}
        for name, array in carry.items():
            shape = (1, size, array.shape[2])
            tile_carry[name] = jax.lax.dynamic_slice(array, (row, start, 0), shape)[0]
        body, recon, tile_carry = encode_tile(
            run, body, (layer, row), clock, slot, tile, constants, tile_carry, pages
        )
        # This layer's carry takes the place of the carry of the layer below, which no later tile
        # reads.
        above = {}
        for name, array in carry.items():
            made = saturated(tile_carry[name][None], array.dtype)
            above[name] = jax.lax.dynamic_update_slice(array, made, (row, start, 0))
        # Two clocks: keys are due before values, and until the value is encoded too, the window has
        # the decoded key.
        if len(schedules) > 1:
            for source, x in recon.items():
                exact = new[source]
                places = exact.at[row, start + jnp.arange(size)]
                new = new | {source: places.set(saturated(x, exact.dtype))}
        return body, new, above

    return encode_due(schedules, first.shape[0], length, tile_step, (body, new, carry))


def _empty_carry(runs, size: int, dtype) -> dict:
    """Make the carry of a tile that enters the first layer: zeros [size, W] for every name that any
    run carries."""
    carry = {}
    for run in runs:
        for name, width in run.wiring.chain.carry.items():
            carry[name] = jnp.zeros((size, width), dtype)
    return carry


def _is_newest(runs, news, schedules: tuple[Schedule, ...]) -> bool:
    """Say whether only the one new token of each row can be due, and `_flush_newest` can encode it.

    Args:
        runs: The plans of the chain's runs.
        news: The new tokens of each run, [L, B, T, W] per source.
        schedules: The chain's schedules.

    Returns:
        Whether all of this holds: a token is due as soon as it comes, each row has one new token,
        bodies are in a form of GPUs and are the rows' own, nothing flows between layers, and every
        field can be written by a scatter."""
    # With two clocks, units of several tokens or a window, other tokens than the one that just came
    # may be due.
    if len(schedules) > 1 or schedules[0].clock.unit > 1 or schedules[0].clock.window:
        return False
    for run, new in zip(runs, news, strict=True):
        if any(x.shape[2] != 1 for x in new.values()):
            return False
        if not run.static_loops or run.page or run.wiring.chain.carry:
            return False
        for codec in run.wiring.storage.codecs.values():
            if not all(field.packing.scatters for field in codec.fields.values()):
                return False
    return True


def _flush_newest(runs, states, news, schedule: Schedule, constants):
    """Do what `flush_chain` does where only the one new token of each row can be due
    (`_is_newest`).

    The tokens of all rows are encoded as one tile. Each array takes them by one scatter, which a
    GPU runs in place as one kernel. There is no loop whose bound is data, because a GPU's host
    decides on every turn of such a loop. Arguments and result are those of `flush_chain`, which has
    one schedule here."""
    row_mask = schedule.stop > schedule.start

    def layer_step(run, new, run_constants, layer, body):
        """Encode the new token of every row of one layer: a tile [B, W] per source."""
        clock = run.wiring.storage.clocks[0]
        tile = {source: at_layer(new[source], layer)[:, 0] for source in clock.sources}
        payload, _, _ = run.wiring.maps.encode(at_layer(run_constants, layer), tile, {})
        # A unit is one token here, so that its number is the body token's. Modulo the slots it is a
        # slot, in rings too. `local` says which rows' slots this device stores; None: all.
        local, slots = run.deal.place(modulo(schedule.start, run.slots))
        stores = row_mask if local is None else row_mask & local
        stores, slots = given_to_gpus((stores, slots))

        def put(field, stored, tile):
            return field.packing.scatter(stored, layer, slots, tile, stores)

        return store_fields(run, body, clock, payload, put)

    out = []
    for run, state, new, run_constants in zip(runs, states, news, constants, strict=True):
        step = functools.partial(layer_step, run, new, run_constants)
        body = each_layer(run.count, step, state.body)
        out.append((body, state.window, new))
    return tuple(out)


def flush_chain(
    runs,
    states,
    news,
    body_lengths,
    schedules: tuple[Schedule, ...],
    constants,
    dtype,
    pages: Pages = None,
):
    """Encode what is due in a chain of runs, row by row and tile by tile.

    A tile goes through all layers, in order, before the next tile does. So the carry between layers
    is one tile long.

    Args:
        runs: The plans of the chain's runs, in layer order.
        states: What each run holds.
        news: The new tokens of each run, [L, B, T, W] per source.
        body_lengths: How many body tokens each row held before the call, [B].
        schedules: The units to encode, one schedule for each clock. They are the same for all runs
            of the chain.
        constants: The calibrated constants of each run, with an axis of layers.
        dtype: Of the carry.
        pages: The pages of every row, where bodies lie in pages.

    Returns:
        (body, window, new) of each run. Where keys are encoded before values, the reconstructed key
        replaces the exact one in the window and among the new tokens. Otherwise window and new
        tokens are as they were."""
    if _is_newest(runs, news, schedules):
        return _flush_newest(runs, states, news, schedules[0], constants)
    # With two clocks a token's key may be encoded and its value not yet. Attention then reads both
    # from the window, where the key must be the reconstructed one.
    replace = len(schedules) > 1
    length = next(iter(news[0].values())).shape[2]

    def layer_step(number, index, row, token, slot, size, layer, state):
        """Encode a tile in one layer of run `number`, by clock `index`; `state` is (entries of all
        runs, carry)."""
        entries, carry = state
        run = runs[number]
        body, window, new = entries[number]
        # Layers of a chain may name their sources differently.
        clock = run.wiring.storage.clocks[index]
        tile = {}
        for source in clock.sources:
            ring = window[source]
            arrivals = new[source]
            tile[source] = gather_tile(
                ring, arrivals, (layer,), row, token, size, body_lengths[row], clock.unit
            )
        layer_constants = at_layer(constants[number], layer)
        at = (layer, row)
        body, recon, carry = encode_tile(
            run, body, at, clock, slot, tile, layer_constants, carry, pages
        )
        if replace:
            window, new = _put_back(run, window, new, recon, at, token, size, body_lengths[row])
        entries = list(entries)
        entries[number] = (body, window, new)
        return tuple(entries), carry

    def tile_step(index, row, token, slot, size, entries):
        """Encode a tile in all layers of the chain, in order."""
        state = (entries, _empty_carry(runs, size, dtype))
        for number, run in enumerate(runs):
            step = functools.partial(layer_step, number, index, row, token, slot, size)
            state = each_layer(run.count, step, state)
        entries, _ = state
        return entries

    entries = []
    for state, new in zip(states, news, strict=True):
        entries.append((state.body, state.window, new))
    # At a step at which no row has a unit due, the loop over rows has no turns.
    any_due = functools.reduce(jnp.logical_or, [schedule.anything for schedule in schedules])
    rows = rows_if(any_due, body_lengths.shape[0])
    return encode_due(schedules, rows, length, tile_step, tuple(entries))


def _put_back(run, window, new, recon, at, token, size, body_length):
    """Replace encoded tokens by their reconstruction in the window and among the new tokens.

    Args:
        window: The run's window, [L, B, C, W] per source.
        new: The run's new tokens, [L, B, T, W] per source.
        recon: The reconstruction of a tile, [size, W] per source.
        at: (layer, row).
        token: The body token with which the tile begins.
        size: Tokens of the tile.
        body_length: How many body tokens the row held before the call. Later ones are among the new
            tokens.

    Returns:
        (window, new)."""
    tokens = token + jnp.arange(size)
    for source, x in recon.items():
        # Each token is either in the window or among the new tokens. In the other array its index
        # lies beyond the end, and mode="drop" writes nothing.
        slot = jnp.where(tokens < body_length, modulo(tokens, run.ring), run.ring)
        index = jnp.where(tokens >= body_length, tokens - body_length, new[source].shape[2])
        ring = window[source]
        ring = ring.at[*at, slot].set(saturated(x, ring.dtype), mode="drop")
        arrivals = new[source]
        arrivals = arrivals.at[*at, index].set(saturated(x, arrivals.dtype), mode="drop")
        window = {**window, source: ring}
        new = {**new, source: arrivals}
    return window, new


def _put(target, new, first, slot_mask, body_lengths):
    """Put new tokens into the marked slots of the window, or of the sinks. Body token t goes to
    slot t % C.

    Rows are written one by one as slices, because a gather or scatter over rows makes XLA re-order
    the whole ring.

    Args:
        target: The window or the sinks, [L, B, C, W].
        new: The new tokens, [L, B, T, W].
        first: A body token of each row, [B]. No marked slot takes a token before it.
        slot_mask: Which slots take a new token, [B, C].
        body_lengths: The body token that each row's first new token is, [B].

    Returns:
        `target` with the new tokens."""
    slots = target.shape[2]
    length = new.shape[2]
    size = min(slots, length)  # no more of the new tokens than slots can stay

    def row_step(row, target):
        # The slice begins with body token `first[row]`. The clip moves it back where it would reach
        # beyond the last new token. Tokens of the slice that no marked slot takes are put nowhere.
        start = jnp.clip(first[row] - body_lengths[row], 0, length - size)
        shape = (new.shape[0], 1, size, new.shape[3])
        arrivals = jax.lax.dynamic_slice(new, (0, row, start, 0), shape)
        arrivals = row_major(arrivals).astype(target.dtype)
        arrivals = jnp.pad(arrivals, ((0, 0), (0, 0), (0, slots - size), (0, 0)))
        # So that token t stands in slot t % C.
        arrivals = jnp.roll(arrivals, body_lengths[row] + start, axis=2)
        takes = slot_mask[row][None, None, :, None]
        occupants = jax.lax.dynamic_slice_in_dim(target, row, 1, 1)
        row_slots = jnp.where(takes, arrivals, occupants)
        return jax.lax.dynamic_update_slice(target, row_major(row_slots), (0, row, 0, 0))

    return jax.lax.fori_loop(0, target.shape[1], row_step, target)


def _put_one(target, new, slots, row_mask):
    """Put the one new token of a decode step into a slot of every marked row.

    Args:
        target: The window or the sinks, [L, B, C, W].
        new: The new tokens, [L, B, 1, W].
        slots: The slot of each row, [B].
        row_mask: Which rows take their token, [B].

    Returns:
        `target` with the new tokens."""

    def row_step(row, target):
        start = (0, row, slots[row], 0)
        occupant = jax.lax.dynamic_slice(target, start, (target.shape[0], 1, 1, target.shape[3]))
        arrival = jax.lax.dynamic_slice_in_dim(new, row, 1, 1).astype(target.dtype)
        token = jnp.where(row_mask[row], arrival, occupant)
        return jax.lax.dynamic_update_slice(target, row_major(token), start)

    return jax.lax.fori_loop(0, target.shape[1], row_step, target)


def _put_one_at_once(target, new, slots, row_mask):
    """Do as `_put_one` with one scatter, which a GPU runs in place as one kernel."""
    # A loop over rows takes two kernels for each row on a GPU, and the host decides on every turn.
    # For 8 rows of 32 layers that took 5 of the 16 ms of a step (H100, jax 0.11.2).
    # A row that takes no token gets an index beyond the end, and mode="drop" writes nothing.
    slot_index = jnp.where(row_mask, slots, target.shape[2])
    places = target.at[:, jnp.arange(target.shape[1]), slot_index]
    arrivals = new[:, :, 0].astype(target.dtype)
    return places.set(arrivals, mode="drop", wrap_negative_indices=False)


def remember(run: RunLayout, state: Run, new: Sources, lengths, counts, sinks: int) -> Run:
    """Put new tokens into sinks and window. Units that are due must have been encoded before.

    Args:
        state: What the run holds; `flushed` is already up to date.
        new: The new tokens, [L, B, T, W] per source.
        lengths: How many tokens each row held before the call, sinks included, [B].
        counts: How many of the new tokens each row takes, [B].
        sinks: How many first tokens of a row are sinks.

    Returns:
        The run with its sinks and window."""
    body_lengths = lengths - sinks  # body tokens before the call; negative while the sinks fill
    end = body_lengths + counts
    oldest_token = jnp.maximum(end - run.ring, 0)
    slot_tokens = ring_tokens(run.ring, oldest_token)
    # Body tokens begin behind the sinks, so that the sinks are body tokens -sinks to -1. Modulo
    # `sinks` that is a sink's slot.
    sink_tokens = jnp.broadcast_to(jnp.arange(sinks)[None] - sinks, (lengths.shape[0], sinks))

    def is_new(tokens):
        """Mark which of the body tokens [B, C] are among the new tokens of their row."""
        return (tokens >= body_lengths[:, None]) & (tokens < end[:, None])

    def into_window(name, target):
        """Put the new tokens of one source into its window."""
        arrivals = new[name]
        if arrivals.shape[2] > 1:
            return _put(target, arrivals, oldest_token, is_new(slot_tokens), body_lengths)
        put = _put_one_at_once if run.on_gpu else _put_one
        slots = modulo(body_lengths, run.ring)
        takes = (counts > 0) & (body_lengths >= 0)
        return put(target, arrivals, slots, takes)

    def into_sinks(name, target):
        """Put the new tokens of one source into its sinks."""
        arrivals = new[name]
        if run.on_gpu and arrivals.shape[2] == 1:
            takes = (counts > 0) & (body_lengths < 0)
            return _put_one_at_once(target, arrivals, lengths, takes)
        return _put(target, arrivals, body_lengths, is_new(sink_tokens), body_lengths)

    window = {name: into_window(name, target) for name, target in state.window.items()}
    if not sinks:
        return state.replace(window=window)
    sink_sources = {name: into_sinks(name, target) for name, target in state.sinks.items()}
    return state.replace(sinks=sink_sources, window=window)


def commit(
    cache: Cache,
    pending: tuple[Any, ...],
    counts: Int[Array, " B"],
    constants: tuple[dict, ...] = (),
) -> Cache:
    """Append pending tokens to every row and encode what is due, all layers in order.

    A number that is not finite is stored as 0. `Cache.finite` then tells where.

    Args:
        cache: The cache.
        pending: One dict of [L_run, B, T, W] arrays per run, as `attend` returns them.
        counts: How many of the T pending tokens each row takes, the first ones. Counts are clipped
            to 0 to T, and tokens beyond the capacity are dropped. Either raises the row's overflow
            flag.
        constants: The calibrated constants of each run; empty for methods without.

    Returns:
        The cache that holds the tokens."""
    layout = cache.layout
    runs = runs_of(layout)
    constants = constants or tuple({} for _ in runs)
    length = next(iter(pending[0].values())).shape[2]
    counts, overflow = admitted(cache, counts, length)
    finite = finite_tokens(cache, leading(found_finite(layout.dtype, *pending)), counts)
    body_lengths = cache.lengths - layout.method.sinks
    states = list(cache.runs)
    sources = [zeroed(layout.dtype, new) for new in pending]
    kept = cache.kept
    moves = None
    if kept:  # a row evicts the same tokens in all layers, so that one choice serves every chain
        moves, kept = enter(cache, counts, length)
    # Tokens that are due leave the window before new tokens take their slots, which overwrites
    # them.
    for chain in chains(layout):
        members = [runs[i] for i in chain]
        # A body without slots is never written: the window alone holds the capacity.
        if not any(run.slots for run in members):
            continue
        # All runs of a chain have encoded equally many units, so that the first run's counts stand
        # for all.
        first = states[chain[0]]
        due_units = units_due(members[0], first, body_lengths + counts)
        if moves is None:
            schedules = in_order(members, first.flushed, due_units, length)
        else:
            schedules = (moved(members[0], moves),)
        entries = flush_chain(
            members,
            [states[i] for i in chain],
            [sources[i] for i in chain],
            body_lengths,
            schedules,
            [constants[i] for i in chain],
            layout.dtype,
            cache.pages,
        )
        for i, (body, window, new) in zip(chain, entries, strict=True):
            flushed = units_due(runs[i], states[i], body_lengths + counts)
            states[i] = states[i].replace(body=body, window=window, flushed=flushed)
            sources[i] = entering_after(body, new) if runs[i].slots else new
    new_states = []
    for run, state, new in zip(runs, states, sources, strict=True):
        state = remember(run, state, new, cache.lengths, counts, layout.method.sinks)
        new_states.append(state)
    return cache.replace(
        runs=tuple(new_states),
        lengths=cache.lengths + counts,
        overflow=overflow,
        finite=finite,
        kept=kept,
    )
