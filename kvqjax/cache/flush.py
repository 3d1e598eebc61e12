"""What is due is encoded: layer by layer of a fresh prompt, or tile by tile through all layers of a call."""

import functools

import jax
import jax.numpy as jnp

from kvqjax.cache.encoding import Schedule, at_layer, cut_tile, encode_due, encode_tile, gather_tile
from kvqjax.cache.runs import RunLayout
from kvqjax.ops.finite import saturated
from kvqjax.ops.xla import rows_if

__all__ = ["flush_chain", "flush_layer"]


def flush_layer(run: RunLayout, body, layer, new, held, schedules: tuple[Schedule, ...], constants, carry):
    """Encode one layer of a fresh prompt, [B, T, W] per source, row by row; nothing comes from the window. `carry`
    holds every prompt token's, [B, T, W]. Returns (body, new, carry); `new` changes only where a source is encoded
    before its partner and stays in the window as reconstructed."""
    length = next(iter(new.values())).shape[1]

    def tile_step(number, row, token, slot, size, state):
        if size > length:
            return state  # no tile of a prompt this short is ever due
        (body, new, carry), clock = state, schedules[number].clock
        start = jnp.clip(token - held[row], 0, length - size)
        tile = {s: cut_tile(new[s], (), row, start, size) for s in clock.sources}
        part = {n: jax.lax.dynamic_slice(c, (row, start, 0), (1, size, c.shape[2]))[0] for n, c in carry.items()}
        body, recon, part = encode_tile(run, body, (layer, row), clock, slot, tile, constants, part)
        carry = {
            n: jax.lax.dynamic_update_slice(c, saturated(part[n][None], c.dtype), (row, start, 0))
            for n, c in carry.items()
        }
        if len(schedules) > 1:
            new = new | {
                s: new[s].at[row, start + jnp.arange(size)].set(saturated(x, new[s].dtype)) for s, x in recon.items()
            }
        return body, new, carry

    return encode_due(schedules, held.shape[0], length, tile_step, (body, new, carry))


def _empty_carry(runs, size: int, dtype) -> dict:
    """What enters the first layer: zeros, [size, W] for every name any layer carries."""
    return {name: jnp.zeros((size, width), dtype) for run in runs for name, width in run.wiring.chain.carry.items()}


def flush_chain(runs, states, news, held, schedules: tuple[Schedule, ...], constants, dtype):
    """Encode what is due in a chain of runs: row by row, tile by tile, all layers in order. `states` are (body, window)
    pairs; a source encoded before its partner leaves the window is replaced there by its reconstruction. Returns
    (body, window, new) of every run."""
    replace, length = len(schedules) > 1, next(iter(news[0].values())).shape[2]

    def layer_step(number, index, row, token, slot, size, layer, state):
        run, (body, window, new), carry = runs[number], state[0][number], state[1]
        clock = run.wiring.storage.clocks[index]  # layers of a chain may name their sources differently
        tile = {
            s: gather_tile(window[s], new[s], (layer,), row, token, size, held[row], clock.unit) for s in clock.sources
        }
        body, recon, carry = encode_tile(
            run, body, (layer, row), clock, slot, tile, at_layer(constants[number], layer), carry
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
            state = jax.lax.fori_loop(0, run.count, step, state)
        return state[0]

    entries = tuple((state.body, state.window, new) for state, new in zip(states, news, strict=True))
    anything = functools.reduce(jnp.logical_or, [schedule.anything for schedule in schedules])
    return encode_due(schedules, rows_if(anything, held.shape[0]), length, tile_step, entries)


def _put_back(run, window, new, recon, layer, row, token, size, held):
    """Replace encoded tokens by their reconstruction wherever they still stand exactly."""
    tokens = token + jnp.arange(size)
    for source, x in recon.items():
        slot = jnp.where(tokens < held, tokens % run.ring, run.ring)
        fresh = jnp.where(tokens >= held, tokens - held, new[source].shape[2])
        old, late = window[source], new[source]
        window = {**window, source: old.at[layer, row, slot].set(saturated(x, old.dtype), mode="drop")}
        new = {**new, source: late.at[layer, row, fresh].set(saturated(x, late.dtype), mode="drop")}
    return window, new
