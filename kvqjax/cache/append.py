"""Appending new tokens: units that are due leave the window for the body, then new tokens enter sinks and window.

    a row before the call    sinks | body ......... | window |              new tokens
    a row after the call     sinks | body ................... | window |

    1. flush       Units that are due are encoded. Their tokens come from the window, or from the new tokens.
    2. remember    New tokens are put into sinks and window. In the window they take the slots of the oldest tokens.

The order matters: new tokens overwrite window slots whose tokens must be encoded first. A unit is due as soon as the
row holds `window + unit` tokens that its clock has not encoded.

`commit` appends to any cache. It goes over chains (runs that are encoded together) by `flush_chain`, which takes each
tile (one unit, or several) through all layers. An exact prefill fills an empty cache layer by layer. `flush_layer` then
encodes all tiles of one layer, because the layer above has not run yet.

`body_lengths[b]` counts the body tokens (tokens after the sinks) that row b held before the call. It is negative while
the sinks fill. A source is a named vector of width W per token. New tokens are [L, B, T, W] per source, L being the
layers of a run. The window has C slots for each row. It is a ring: body token t is in slot t % C."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvqjax.cache.encoding import (
    Pages,
    Schedule,
    at_layer,
    cut_tile,
    each_layer,
    encode_due,
    encode_tile,
    gather_tile,
    in_order,
    moved,
    store_fields,
)
from kvqjax.cache.eviction import enter
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import chains, runs_of
from kvqjax.cache.state import Cache, Run, admitted, finite_tokens, ring_tokens, units_due
from kvqjax.ops.finite import found_finite, leading, saturated, zeroed
from kvqjax.ops.xla_workarounds import entering_after, given_to_gpus, modulo, row_major, rows_if

__all__ = ["commit", "flush_chain", "flush_layer", "remember"]


def flush_layer(
    run: RunLayout, body, layer, new, first, schedules: tuple[Schedule, ...], constants, carry, pages: Pages = None
):
    """Encode what is due of one layer of a fresh prompt, row by row.

    Args:
        run: The plan of the layer's run.
        body: The run's body, {source: {field: arrays}}.
        layer: The layer's number in the run.
        new: The prompt's tokens [B, T, W] per source.
        first: Which body token the first of them is, [B]: minus the sinks where `new` is the whole prompt, 0 where it
            is the tokens that the body keeps (kvqjax/cache/eviction.py).
        schedules: The units to encode, one schedule for each clock.
        constants: The layer's calibrated constants.
        carry: What the layer below passed on for each of these tokens, [B, T, W] by name.
        pages: The pages of every row, where the body lies in pages.

    Returns:
        (body, new, carry). The carry is this layer's. `new` changes only where keys leave the window before values.
        A token whose key alone is encoded then stays in the window with its reconstructed key."""
    length = next(iter(new.values())).shape[1]

    def tile_step(number, row, token, slot, size, state):
        """Encode the tile of `size` tokens from body token `token` on, by the clock of this `number`."""
        # The loop over tiles is traced even where it has no turn, and a slice longer than the prompt is an error.
        if size > length:
            return state  # no tile of a prompt this short is ever due
        (body, new, carry), clock = state, schedules[number].clock
        # Where the tile begins among the prompt's tokens. A tile that is due lies within the prompt, so that the clip
        # changes no such start.
        start = jnp.clip(token - first[row], 0, length - size)
        tile = {source: cut_tile(new[source], (), row, start, size) for source in clock.sources}
        tile_carry = {
            name: jax.lax.dynamic_slice(array, (row, start, 0), (1, size, array.shape[2]))[0]
            for name, array in carry.items()
        }
        body, recon, tile_carry = encode_tile(run, body, (layer, row), clock, slot, tile, constants, tile_carry, pages)
        # This layer's carry takes the place of the carry of the layer below, which no later tile reads.
        carry = {
            name: jax.lax.dynamic_update_slice(array, saturated(tile_carry[name][None], array.dtype), (row, start, 0))
            for name, array in carry.items()
        }
        # Two clocks: keys are due before values, and until the value is encoded too, the window has the decoded key.
        if len(schedules) > 1:
            new = new | {
                source: new[source].at[row, start + jnp.arange(size)].set(saturated(x, new[source].dtype))
                for source, x in recon.items()
            }
        return body, new, carry

    return encode_due(schedules, first.shape[0], length, tile_step, (body, new, carry))


def _empty_carry(runs, size: int, dtype) -> dict:
    """Make the carry of a tile that enters the first layer: zeros [size, W] for every name that any run carries."""
    return {name: jnp.zeros((size, width), dtype) for run in runs for name, width in run.wiring.chain.carry.items()}


def _is_newest(runs, news, schedules: tuple[Schedule, ...]) -> bool:
    """Say whether only the one new token of each row can be due, and `_flush_newest` can encode it.

    Args:
        runs: The plans of the chain's runs.
        news: The new tokens of each run, [L, B, T, W] per source.
        schedules: The chain's schedules.

    Returns:
        Whether all of this holds: a token is due as soon as it comes, each row has one new token, bodies are in a form
        of GPUs and are the rows' own, nothing flows between layers, and every field can be written by a scatter."""
    # With two clocks, units of several tokens or a window, other tokens than the one that just came may be due.
    if len(schedules) > 1 or schedules[0].clock.unit > 1 or schedules[0].clock.window:
        return False
    single_token = all(x.shape[2] == 1 for new in news for x in new.values())

    def takes_scatter(run) -> bool:
        fields = [field for codec in run.wiring.storage.codecs.values() for field in codec.fields.values()]
        return all(field.packing.scatters for field in fields)

    def is_alone(run) -> bool:
        return run.static_loops and not run.page and not run.wiring.chain.carry

    return single_token and all(is_alone(run) and takes_scatter(run) for run in runs)


def _flush_newest(runs, states, news, schedule: Schedule, constants):
    """Do what `flush_chain` does where only the one new token of each row can be due (`_is_newest`).

    The tokens of all rows are encoded as one tile. Each array takes them by one scatter, which a GPU runs in place as
    one kernel. There is no loop whose bound is data, because a GPU's host decides on every turn of such a loop.
    Arguments and result are those of `flush_chain`, which has one schedule here."""
    row_mask = schedule.stop > schedule.start

    def layer_step(run, new, run_constants, layer, body):
        """Encode the new token of every row of one layer: a tile [B, W] per source."""
        clock = run.wiring.storage.clocks[0]
        tile = {source: at_layer(new[source], layer)[:, 0] for source in clock.sources}
        payload, _, _ = run.wiring.maps.encode(at_layer(run_constants, layer), tile, {})
        # A unit is one token here, so that its number is the body token's. Modulo the slots it is a slot, in rings too.
        # `local` says which rows' slots this device stores; None: all.
        local, slots = run.deal.place(modulo(schedule.start, run.slots))
        local, slots = given_to_gpus((row_mask if local is None else row_mask & local, slots))
        put = lambda field, stored, tile: field.packing.scatter(stored, layer, slots, tile, local)  # noqa: E731
        return store_fields(run, body, clock, payload, put)

    out = []
    for run, state, new, run_constants in zip(runs, states, news, constants, strict=True):
        step = functools.partial(layer_step, run, new, run_constants)
        out.append((each_layer(run.count, step, state.body), state.window, new))
    return tuple(out)


def flush_chain(
    runs, states, news, body_lengths, schedules: tuple[Schedule, ...], constants, dtype, pages: Pages = None
):
    """Encode what is due in a chain of runs, row by row and tile by tile.

    A tile goes through all layers, in order, before the next tile does. So the carry between layers is one tile long.

    Args:
        runs: The plans of the chain's runs, in layer order.
        states: What each run holds.
        news: The new tokens of each run, [L, B, T, W] per source.
        body_lengths: How many body tokens each row held before the call, [B].
        schedules: The units to encode, one schedule for each clock. They are the same for all runs of the chain.
        constants: The calibrated constants of each run, with an axis of layers.
        dtype: Of the carry.
        pages: The pages of every row, where bodies lie in pages.

    Returns:
        (body, window, new) of each run. Where keys are encoded before values, the reconstructed key replaces the exact
        one in the window and among the new tokens. Otherwise window and new tokens are as they were."""
    if _is_newest(runs, news, schedules):
        return _flush_newest(runs, states, news, schedules[0], constants)
    # With two clocks a token's key may be encoded and its value not yet. Attention then reads both from the window,
    # where the key must be the reconstructed one.
    replace = len(schedules) > 1
    length = next(iter(news[0].values())).shape[2]

    def layer_step(number, index, row, token, slot, size, layer, state):
        """Encode a tile in one layer of run `number`, by clock `index`; `state` is (entries of all runs, carry)."""
        run, (body, window, new), carry = runs[number], state[0][number], state[1]
        clock = run.wiring.storage.clocks[index]  # layers of a chain may name their sources differently
        tile = {
            source: gather_tile(window[source], new[source], (layer,), row, token, size, body_lengths[row], clock.unit)
            for source in clock.sources
        }
        body, recon, carry = encode_tile(
            run, body, (layer, row), clock, slot, tile, at_layer(constants[number], layer), carry, pages
        )
        if replace:
            window, new = _put_back(run, window, new, recon, layer, row, token, size, body_lengths[row])
        entries = list(state[0])
        entries[number] = (body, window, new)
        return tuple(entries), carry

    def tile_step(index, row, token, slot, size, entries):
        state = (entries, _empty_carry(runs, size, dtype))
        for number, run in enumerate(runs):
            step = functools.partial(layer_step, number, index, row, token, slot, size)
            state = each_layer(run.count, step, state)
        return state[0]

    entries = tuple((state.body, state.window, new) for state, new in zip(states, news, strict=True))
    # At a step at which no row has a unit due, the loop over rows has no turns.
    any_due = functools.reduce(jnp.logical_or, [schedule.anything for schedule in schedules])
    return encode_due(schedules, rows_if(any_due, body_lengths.shape[0]), length, tile_step, entries)


def _put_back(run, window, new, recon, layer, row, token, size, body_length):
    """Replace encoded tokens by their reconstruction in the window and among the new tokens.

    Args:
        run: The run's plan.
        window: The run's window, [L, B, C, W] per source.
        new: The run's new tokens, [L, B, T, W] per source.
        recon: The reconstruction of a tile, [size, W] per source.
        layer, row: Whose tile it is.
        token: The body token with which the tile begins.
        size: Tokens of the tile.
        body_length: How many body tokens the row held before the call. Later ones are among the new tokens.

    Returns:
        (window, new)."""
    tokens = token + jnp.arange(size)
    for source, x in recon.items():
        # Each token is either in the window or among the new tokens. In the other array its index lies beyond the end,
        # and mode="drop" writes nothing.
        slot = jnp.where(tokens < body_length, modulo(tokens, run.ring), run.ring)
        index = jnp.where(tokens >= body_length, tokens - body_length, new[source].shape[2])
        ring, arrivals = window[source], new[source]
        window = {**window, source: ring.at[layer, row, slot].set(saturated(x, ring.dtype), mode="drop")}
        new = {**new, source: arrivals.at[layer, row, index].set(saturated(x, arrivals.dtype), mode="drop")}
    return window, new


Sources = dict  # source name -> array


def _put(target, new, first, slot_mask, body_lengths):
    """Put new tokens into the marked slots of the window, or of the sinks. Body token t goes to slot t % C.

    Rows are written one by one as slices, because a gather or scatter over rows makes XLA re-order the whole ring.

    Args:
        target: The window or the sinks, [L, B, C, W].
        new: The new tokens, [L, B, T, W].
        first: A body token of each row, [B]. No marked slot takes a token before it.
        slot_mask: Which slots take a new token, [B, C].
        body_lengths: The body token that each row's first new token is, [B].

    Returns:
        `target` with the new tokens."""
    slots, length = target.shape[2], new.shape[2]
    size = min(slots, length)  # no more of the new tokens than slots can stay

    def row_step(row, target):
        # The slice begins with body token `first[row]`. The clip moves it back where it would reach beyond the last new
        # token. Tokens of the slice that no marked slot takes are put nowhere.
        start = jnp.clip(first[row] - body_lengths[row], 0, length - size)
        arrivals = jax.lax.dynamic_slice(new, (0, row, start, 0), (new.shape[0], 1, size, new.shape[3]))
        arrivals = jnp.pad(row_major(arrivals).astype(target.dtype), ((0, 0), (0, 0), (0, slots - size), (0, 0)))
        arrivals = jnp.roll(arrivals, body_lengths[row] + start, axis=2)  # so that token t stands in slot t % C
        row_slots = jnp.where(
            slot_mask[row][None, None, :, None], arrivals, jax.lax.dynamic_slice_in_dim(target, row, 1, 1)
        )
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
        return jax.lax.dynamic_update_slice(target, row_major(jnp.where(row_mask[row], arrival, occupant)), start)

    return jax.lax.fori_loop(0, target.shape[1], row_step, target)


def _put_one_at_once(target, new, slots, row_mask):
    """Do as `_put_one` with one scatter, which a GPU runs in place as one kernel."""
    # A loop over rows takes two kernels for each row on a GPU, and the host decides on every turn. For 8 rows of 32
    # layers that took 5 of the 16 ms of a step (H100, jax 0.11.2).
    slot_index = jnp.where(row_mask, slots, target.shape[2])  # rows that take no token: beyond the end, dropped
    return target.at[:, jnp.arange(target.shape[1]), slot_index].set(
        new[:, :, 0].astype(target.dtype), mode="drop", wrap_negative_indices=False
    )


def remember(run: RunLayout, state: Run, new: Sources, lengths, counts, sinks: int) -> Run:
    """Put new tokens into sinks and window. Units that are due must have been encoded before.

    Args:
        run: The run's plan.
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
    # Body tokens begin behind the sinks, so that the sinks are body tokens -sinks to -1. Modulo `sinks` that is a
    # sink's slot.
    sink_tokens = jnp.broadcast_to(jnp.arange(sinks)[None] - sinks, (lengths.shape[0], sinks))

    def is_new(tokens):
        """Mark which of the body tokens [B, C] are among the new tokens of their row."""
        return (tokens >= body_lengths[:, None]) & (tokens < end[:, None])

    def into_window(name, target):
        if new[name].shape[2] == 1:
            put = _put_one_at_once if run.on_gpu else _put_one
            return put(target, new[name], modulo(body_lengths, run.ring), (counts > 0) & (body_lengths >= 0))
        return _put(target, new[name], oldest_token, is_new(slot_tokens), body_lengths)

    def into_sinks(name, target):
        if run.on_gpu and new[name].shape[2] == 1:
            return _put_one_at_once(target, new[name], lengths, (counts > 0) & (body_lengths < 0))
        return _put(target, new[name], body_lengths, is_new(sink_tokens), body_lengths)

    window = {name: into_window(name, target) for name, target in state.window.items()}
    if not sinks:
        return state.replace(window=window)
    sink_sources = {name: into_sinks(name, target) for name, target in state.sinks.items()}
    return state.replace(sinks=sink_sources, window=window)


def commit(cache: Cache, pending: tuple[Any, ...], counts: Int[Array, " B"], constants: tuple[dict, ...] = ()) -> Cache:
    """Append pending tokens to every row and encode what is due, all layers in order.

    A number that is not finite is stored as 0. `Cache.finite` then tells where.

    Args:
        cache: The cache.
        pending: One dict of [L_run, B, T, W] arrays per run, as `attend` returns them.
        counts: How many of the T pending tokens each row takes, the first ones. Counts are clipped to 0 to T, and
            tokens beyond the capacity are dropped. Either raises the row's overflow flag.
        constants: The calibrated constants of each run; empty for methods without.

    Returns:
        The cache that holds the tokens."""
    layout, runs = cache.layout, runs_of(cache.layout)
    constants = constants or tuple({} for _ in runs)
    length = next(iter(pending[0].values())).shape[2]
    counts, overflow = admitted(cache, counts, length)
    finite = finite_tokens(cache, leading(found_finite(layout.dtype, *pending)), counts)
    body_lengths = cache.lengths - layout.method.sinks
    states, sources = list(cache.runs), [zeroed(layout.dtype, new) for new in pending]
    kept, moves = cache.kept, None
    if kept:  # a row evicts the same tokens in all layers, so that one choice serves every chain
        moves, kept = enter(cache, counts, length)
    # Tokens that are due leave the window before new tokens take their slots, which overwrites them.
    for chain in chains(layout):
        members, chain_constants = [runs[i] for i in chain], [constants[i] for i in chain]
        # A body without slots is never written: the window alone holds the capacity.
        if any(run.slots for run in members):
            # All runs of a chain have encoded equally many units, so that the first run's counts stand for all.
            due_units = units_due(members[0], states[chain[0]], body_lengths + counts)
            if moves is None:
                schedules = in_order(members, states[chain[0]].flushed, due_units, length)
            else:
                schedules = (moved(members[0], moves),)
            inputs = [states[i] for i in chain], [sources[i] for i in chain]
            flush = flush_chain(members, *inputs, body_lengths, schedules, chain_constants, layout.dtype, cache.pages)
            for i, (body, window, new) in zip(chain, flush, strict=True):
                flushed = units_due(runs[i], states[i], body_lengths + counts)
                states[i] = states[i].replace(body=body, window=window, flushed=flushed)
                sources[i] = entering_after(body, new) if runs[i].slots else new
    new_states = tuple(
        remember(run, state, new, cache.lengths, counts, layout.method.sinks)
        for run, state, new in zip(runs, states, sources, strict=True)
    )
    return cache.replace(runs=new_states, lengths=cache.lengths + counts, overflow=overflow, finite=finite, kept=kept)
