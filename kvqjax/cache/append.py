"""Appending: what is due leaves the window and is encoded, layer by layer of a fresh prompt or tile by tile through all
layers of a call; then new tokens go to sinks and window."""

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
    store_fields,
)
from kvqjax.cache.keeping import schedules_of
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import chains, runs_of
from kvqjax.cache.state import Cache, Run, admitted, finite_tokens, ring_tokens, units_due
from kvqjax.ops.finite import found_finite, leading, saturated, zeroed
from kvqjax.ops.xla_workarounds import entering_after, given_to_gpus, modulo, row_major, rows_if

__all__ = ["commit", "flush_chain", "flush_layer", "remember"]


def flush_layer(
    run: RunLayout, body, layer, new, held, schedules: tuple[Schedule, ...], constants, carry, pages: Pages = None
):
    """Encode what is due of one layer of a fresh prompt, [B, T, W] per source, row by row. `carry` is what the layer
    below passed on for every prompt token, [B, T, W]. Returns (body, new, carry). `new` changes only where keys leave
    the window before values: such a token stays there with its reconstructed key."""
    length = next(iter(new.values())).shape[1]

    def tile_step(number, row, token, slot, size, state):
        if size > length:
            return state  # no tile of a prompt this short is ever due
        (body, new, carry), clock = state, schedules[number].clock
        start = jnp.clip(token - held[row], 0, length - size)
        tile = {s: cut_tile(new[s], (), row, start, size) for s in clock.sources}
        part = {n: jax.lax.dynamic_slice(c, (row, start, 0), (1, size, c.shape[2]))[0] for n, c in carry.items()}
        body, recon, part = encode_tile(run, body, (layer, row), clock, slot, tile, constants, part, pages)
        carry = {
            n: jax.lax.dynamic_update_slice(c, saturated(part[n][None], c.dtype), (row, start, 0))
            for n, c in carry.items()
        }
        if len(schedules) > 1:  # keys are due before values, and the key that stays in the window is the decoded one
            new = new | {
                s: new[s].at[row, start + jnp.arange(size)].set(saturated(x, new[s].dtype)) for s, x in recon.items()
            }
        return body, new, carry

    return encode_due(schedules, held.shape[0], length, tile_step, (body, new, carry))


def _empty_carry(runs, size: int, dtype) -> dict:
    """Return the carry that enters the first layer: zeros [size, W] for every name that any run carries."""
    return {name: jnp.zeros((size, width), dtype) for run in runs for name, width in run.wiring.chain.carry.items()}


def _is_newest(runs, news, schedules: tuple[Schedule, ...]) -> bool:
    """Say whether every row's one new token is encoded at once, in a form of GPUs, with nothing to carry."""
    if len(schedules) > 1 or schedules[0].clock.unit > 1 or schedules[0].clock.window:
        return False  # what is due is then more than the token that just came
    single = all(x.shape[2] == 1 for new in news for x in new.values())
    return single and all(
        run.static_loops
        and not run.page
        and not run.wiring.chain.carry
        and all(
            field.packing.scatters for codec in run.wiring.storage.codecs.values() for field in codec.fields.values()
        )
        for run in runs
    )


def _flush_newest(runs, states, news, schedule: Schedule, constants):
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
        put = lambda field, stored, tile: field.packing.scatter(stored, layer, slots, tile, here)  # noqa: E731
        return store_fields(run, body, clock, payload, put)

    out = []
    for run, state, new, fixed in zip(runs, states, news, constants, strict=True):
        step = functools.partial(layer_step, run, new, fixed)
        out.append((each_layer(run.count, step, state.body), state.window, new))
    return tuple(out)


def flush_chain(runs, states, news, held, schedules: tuple[Schedule, ...], constants, dtype, pages: Pages = None):
    """Encode what is due in a chain of runs: row by row, tile by tile, a tile through all layers in order. Takes every
    run's state and new tokens, [L, B, T, W] per source, and returns its (body, window, new). Where keys are encoded
    before values, their reconstruction replaces them in the window and among the new tokens."""
    if _is_newest(runs, news, schedules):
        return _flush_newest(runs, states, news, schedules[0], constants)
    replace, length = len(schedules) > 1, next(iter(news[0].values())).shape[2]

    def layer_step(number, index, row, token, slot, size, layer, state):
        run, (body, window, new), carry = runs[number], state[0][number], state[1]
        clock = run.wiring.storage.clocks[index]  # layers of a chain may name their sources differently
        tile = {
            s: gather_tile(window[s], new[s], (layer,), row, token, size, held[row], clock.unit) for s in clock.sources
        }
        body, recon, carry = encode_tile(
            run, body, (layer, row), clock, slot, tile, at_layer(constants[number], layer), carry, pages
        )
        if replace:
            window, new = _put_back(run, window, new, recon, layer, row, token, size, held[row])
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
    anything = functools.reduce(jnp.logical_or, [schedule.anything for schedule in schedules])
    return encode_due(schedules, rows_if(anything, held.shape[0]), length, tile_step, entries)


def _put_back(run, window, new, recon, layer, row, token, size, held):
    """Replace encoded tokens by their reconstruction in the window and among the new tokens."""
    tokens = token + jnp.arange(size)
    for source, x in recon.items():
        slot = jnp.where(tokens < held, modulo(tokens, run.ring), run.ring)
        fresh = jnp.where(tokens >= held, tokens - held, new[source].shape[2])
        old, late = window[source], new[source]
        window = {**window, source: old.at[layer, row, slot].set(saturated(x, old.dtype), mode="drop")}
        new = {**new, source: late.at[layer, row, fresh].set(saturated(x, late.dtype), mode="drop")}
    return window, new


Sources = dict  # source name -> array


def _put(old, new, first, wanted, held):
    """Put new tokens [L, B, T, W] into those of the slots [L, B, C, W] that are `wanted` [B, C]. Body token t goes to
    slot t % C, and no wanted slot takes a token before `first` [B]. Rows are written one by one as slices: a gather or
    scatter over rows makes XLA re-order the whole ring."""
    count, length = old.shape[2], new.shape[2]
    size = min(count, length)  # older ones among the new tokens have no slot left

    def row_step(row, old):
        start = jnp.clip(first[row] - held[row], 0, length - size)
        fresh = jax.lax.dynamic_slice(new, (0, row, start, 0), (new.shape[0], 1, size, new.shape[3]))
        fresh = jnp.pad(row_major(fresh).astype(old.dtype), ((0, 0), (0, 0), (0, count - size), (0, 0)))
        fresh = jnp.roll(fresh, held[row] + start, axis=2)  # so that token t stands in slot t % C
        line = jnp.where(wanted[row][None, None, :, None], fresh, jax.lax.dynamic_slice_in_dim(old, row, 1, 1))
        return jax.lax.dynamic_update_slice(old, row_major(line), (0, row, 0, 0))

    return jax.lax.fori_loop(0, old.shape[1], row_step, old)


def _put_one(old, new, slots, wanted):
    """Put the one new token [L, B, 1, W] of a decode step into slot `slots[b]` of every wanted row."""

    def row_step(row, old):
        start = (0, row, slots[row], 0)
        before = jax.lax.dynamic_slice(old, start, (old.shape[0], 1, 1, old.shape[3]))
        fresh = jax.lax.dynamic_slice_in_dim(new, row, 1, 1).astype(old.dtype)
        return jax.lax.dynamic_update_slice(old, row_major(jnp.where(wanted[row], fresh, before)), start)

    return jax.lax.fori_loop(0, old.shape[1], row_step, old)


def _put_one_at_once(old, new, slots, wanted):
    """Do as `_put_one` with one scatter, which a GPU runs in place as one kernel; a loop takes two kernels a row."""
    place = jnp.where(wanted, slots, old.shape[2])  # beyond the end: dropped
    return old.at[:, jnp.arange(old.shape[1]), place].set(
        new[:, :, 0].astype(old.dtype), mode="drop", wrap_negative_indices=False
    )


def remember(run: RunLayout, state: Run, new: Sources, lengths, counts, sinks: int) -> Run:
    """Put new tokens, [L, B, T, W] per source, into sinks and window. `state.flushed` must already be up to date."""
    held = lengths - sinks  # body tokens before the call; negative while the sinks fill
    end = held + counts
    oldest = jnp.maximum(end - run.ring, 0)
    slots = ring_tokens(run.ring, oldest)
    sink_tokens = jnp.broadcast_to(jnp.arange(sinks)[None] - sinks, (lengths.shape[0], sinks))

    def wanted(tokens):
        return (tokens >= held[:, None]) & (tokens < end[:, None])

    def into_window(name, old):
        if new[name].shape[2] == 1:
            put = _put_one_at_once if run.static_loops else _put_one
            return put(old, new[name], modulo(held, run.ring), (counts > 0) & (held >= 0))
        return _put(old, new[name], oldest, wanted(slots), held)

    def into_sinks(name, old):
        if run.static_loops and new[name].shape[2] == 1:
            return _put_one_at_once(old, new[name], lengths, (counts > 0) & (held < 0))
        return _put(old, new[name], held, wanted(sink_tokens), held)

    window = {name: into_window(name, old) for name, old in state.window.items()}
    if not sinks:
        return state.replace(window=window)
    exact = {name: into_sinks(name, old) for name, old in state.sinks.items()}
    return state.replace(sinks=exact, window=window)


def commit(cache: Cache, pending: tuple[Any, ...], counts: Int[Array, " B"], constants: tuple[dict, ...] = ()) -> Cache:
    """Append the first `counts[b]` tokens of row b of `pending` and encode what is due, all layers in order.

    `pending` holds one dict of [L_run, B, T, W] arrays per run, as `attend` returns them, and after them the attention
    mass of the call where tokens are kept by it. Counts are clipped to the tokens given, and tokens beyond the
    capacity are dropped; either raises the row's overflow flag. A number that is not finite is stored as 0 and counted
    in `finite`."""
    layout, runs = cache.layout, runs_of(cache.layout)
    constants = constants or tuple({} for _ in runs)
    length = next(iter(pending[0].values())).shape[2]
    counts, overflow = admitted(cache, counts, length)
    finite = finite_tokens(cache, leading(found_finite(layout.dtype, *pending[: len(runs)])), counts)
    held = cache.lengths - layout.method.sinks
    states, sources = list(cache.runs), [zeroed(layout.dtype, new) for new in pending[: len(runs)]]
    schedule, kept = schedules_of(cache, pending, counts)
    # First what is due leaves the window, then new tokens take the slots: the other way round they would overwrite it.
    for chain in chains(layout):
        members, fixed = [runs[i] for i in chain], [constants[i] for i in chain]
        if any(run.slots for run in members):
            schedules = schedule(members, states[chain[0]])
            own = [states[i] for i in chain], [sources[i] for i in chain]
            flush = flush_chain(members, *own, held, schedules, fixed, layout.dtype, cache.pages)
            for i, (body, window, new) in zip(chain, flush, strict=True):
                flushed = units_due(runs[i], states[i], held + counts)
                states[i] = states[i].replace(body=body, window=window, flushed=flushed)
                sources[i] = entering_after(body, new) if runs[i].slots else new
    done = tuple(
        remember(run, state, new, cache.lengths, counts, layout.method.sinks)
        for run, state, new in zip(runs, states, sources, strict=True)
    )
    return cache.replace(runs=done, lengths=cache.lengths + counts, overflow=overflow, finite=finite, kept=kept)
