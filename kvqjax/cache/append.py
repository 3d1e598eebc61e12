"""Appending: new tokens go to sinks and window, what leaves the window is encoded (kvqjax/cache/flush.py)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvqjax.cache.flush import flush_chain
from kvqjax.cache.keeping import schedules_of
from kvqjax.cache.runs import RunLayout, chains, runs_of
from kvqjax.cache.state import Cache, Run, admitted, finite_tokens, ring_tokens, units_due
from kvqjax.ops.finite import found_finite, leading, zeroed
from kvqjax.ops.xla import row_major

__all__ = ["commit", "remember"]

Sources = dict  # source name -> array


def _put(old, new, first, wanted, held):
    """Put new tokens, [L, B, T, W], into slots [L, B, C, W], body token t into slot t % C, where `wanted` [B, C]; no
    slot stands for a token before `first` [B]. Slices row by row: a gather or scatter over rows makes XLA re-order the
    whole ring."""
    count, length = old.shape[2], new.shape[2]
    size = min(count, length)

    def row_step(row, old):
        start = jnp.clip(first[row] - held[row], 0, length - size)
        fresh = jax.lax.dynamic_slice(new, (0, row, start, 0), (new.shape[0], 1, size, new.shape[3]))
        fresh = jnp.pad(row_major(fresh).astype(old.dtype), ((0, 0), (0, 0), (0, count - size), (0, 0)))
        fresh = jnp.roll(fresh, held[row] + start, axis=2)
        line = jnp.where(wanted[row][None, None, :, None], fresh, jax.lax.dynamic_slice_in_dim(old, row, 1, 1))
        return jax.lax.dynamic_update_slice(old, row_major(line), (0, row, 0, 0))

    return jax.lax.fori_loop(0, old.shape[1], row_step, old)


def _put_one(old, new, slots, wanted):
    """`_put` for a decode step: each wanted row's one new token, [L, B, 1, W], into its slot, not touching the
    others."""

    def row_step(row, old):
        start = (0, row, slots[row], 0)
        kept = jax.lax.dynamic_slice(old, start, (old.shape[0], 1, 1, old.shape[3]))
        fresh = jax.lax.dynamic_slice_in_dim(new, row, 1, 1).astype(old.dtype)
        return jax.lax.dynamic_update_slice(old, row_major(jnp.where(wanted[row], fresh, kept)), start)

    return jax.lax.fori_loop(0, old.shape[1], row_step, old)


def remember(run: RunLayout, state: Run, new: Sources, lengths, counts, sinks: int) -> Run:
    """Put new tokens, [L, B, T, W] per source, into sinks and window. `run.flushed` must already be up to date."""
    held = lengths - sinks  # body tokens before the call; negative while the sinks fill
    end = held + counts
    oldest = jnp.maximum(end - run.ring, 0)
    slots = ring_tokens(run.ring, oldest)
    sink_tokens = jnp.broadcast_to(jnp.arange(sinks)[None] - sinks, (lengths.shape[0], sinks))

    def wanted(tokens):
        return (tokens >= held[:, None]) & (tokens < end[:, None])

    def into_window(name, old):
        if new[name].shape[2] == 1:
            return _put_one(old, new[name], held % run.ring, (counts > 0) & (held >= 0))
        return _put(old, new[name], oldest, wanted(slots), held)

    window = {name: into_window(name, old) for name, old in state.window.items()}
    if not sinks:
        return state.replace(window=window)
    kept = {name: _put(old, new[name], held, wanted(sink_tokens), held) for name, old in state.sinks.items()}
    return state.replace(sinks=kept, window=window)


def commit(cache: Cache, pending: tuple[Any, ...], counts: Int[Array, " B"], constants: tuple[dict, ...] = ()) -> Cache:
    """Append the first `counts[b]` tokens of row b of `pending` and encode what is due, all layers in order.

    `pending` holds one dict of [L_run, B, T, W] arrays per run, as `attend` returns them, and after them the attention
    mass of the call where tokens are kept by it. Tokens beyond the capacity are dropped and raise the row's overflow
    flag; a number that is not finite is stored as 0 and counted in `finite`."""
    layout, runs = cache.layout, runs_of(cache.layout)
    constants = constants or tuple({} for _ in runs)
    counts, overflow = admitted(cache, counts)
    finite = finite_tokens(cache, leading(found_finite(layout.dtype, *pending[: len(runs)])), counts)
    held = cache.lengths - layout.method.sinks
    states, sources = list(cache.runs), [zeroed(layout.dtype, new) for new in pending[: len(runs)]]
    schedule, kept = schedules_of(cache, pending, counts)
    for chain in chains(layout):
        members, fixed = [runs[i] for i in chain], [constants[i] for i in chain]
        if any(run.slots for run in members):
            schedules = schedule(members, states[chain[0]])
            own = [states[i] for i in chain], [sources[i] for i in chain]
            flush = flush_chain(members, *own, held, schedules, fixed, layout.dtype)
            for i, (body, window, new) in zip(chain, flush, strict=True):
                flushed = units_due(runs[i], states[i], held + counts)
                states[i], sources[i] = states[i].replace(body=body, window=window, flushed=flushed), new
    done = tuple(
        remember(run, state, new, cache.lengths, counts, layout.method.sinks)
        for run, state, new in zip(runs, states, sources, strict=True)
    )
    return cache.replace(runs=done, lengths=cache.lengths + counts, overflow=overflow, finite=finite, kept=kept)
