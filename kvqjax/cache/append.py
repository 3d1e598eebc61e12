"""Appending: new tokens go to sinks and window; what leaves the window is encoded once, tile by tile (docs/design.md,
ideas 2, 6, 8).

One tile is one clock unit of one row of one layer. Every path (a decode step, a chunk, an exact prefill) encodes
through `encode_tile`, so equal sources give equal words. Rows are looped over, never vmapped: under vmap a conditional
flush becomes a select that encodes at every step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvqjax.cache.admission import admitted, finite_tokens
from kvqjax.cache.eviction import Moves, enter
from kvqjax.cache.runs import RunPlan, chains, plan
from kvqjax.cache.state import Cache, Run, due
from kvqjax.ops.finite import found_finite, leading, saturated, zeroed
from kvqjax.ops.layout import PLANE, row_major, write

__all__ = ["commit", "encode_tile", "flush_layer", "gather_tile", "remember", "ring_tokens", "window_tokens"]

Sources = dict  # source name -> array


def pick(tree, index):
    """Entry `index` of every leaf's first axis."""
    return jax.tree.map(lambda a: row_major(jax.lax.dynamic_index_in_dim(a, index, keepdims=False)), tree)


def ring_tokens(ring: int, first: Int[Array, " B"]) -> Int[Array, "B C"]:
    """The body token each window slot stands for, when `first` is the oldest one held."""
    first = first[:, None]
    return first + (jnp.arange(ring)[None] - first) % ring


def window_tokens(ring: int, end: Int[Array, " B"]) -> Int[Array, "B C"]:
    """The body token each window slot stands for once a row has held `end` of them."""
    return ring_tokens(ring, jnp.maximum(end - ring, 0))


def _cut(x, at, row, start, size: int):
    """`size` consecutive rows of one row of `x`, [size, W]; a slice, because a gather is slow on TPUs."""
    begin, whole = (*at, row, start, 0), (1,) * (len(at) + 1)
    return row_major(jax.lax.dynamic_slice(x, begin, (*whole, size, x.shape[-1]))).reshape(size, -1)


def gather_tile(window, new, at, row, token, size: int, held):
    """Tokens `token .. token + size - 1` of one row, `token` a multiple of `size`: [size, W] from the ring where they
    are older than body token `held`, else from `new` whose first token is `held`. `at` indexes the arrays' leading
    axes before the row."""
    tokens, slots, length = token + jnp.arange(size), window.shape[-2], new.shape[-2]
    if slots % size == 0:  # a tile never wraps
        ring = _cut(window, at, row, token % slots, size)
    else:
        ring = window[(*at, row, tokens % slots)]
    if length == 1:
        fresh = jnp.broadcast_to(_cut(new, at, row, 0, 1), ring.shape)
    else:
        fresh = new[(*at, row, jnp.clip(tokens - held, 0, length - 1))]
    return jnp.where((tokens < held)[:, None], ring, fresh)


def encode_tile(run: RunPlan, body, at, clock, slot, tile: Sources, constants, carry):
    """Encode one tile of the clock's sources and store it at (layer, row) = `at` from body slot `slot`."""
    payload, recon, carry = run.wiring.maps.encode(constants, tile, carry)
    here, slot = run.deal.place(slot)
    for source in clock.sources:
        fields = run.wiring.storage.codecs[source].fields
        stored = {
            name: write(field, body[source][name], at, slot, payload[source][name], here)
            for name, field in fields.items()
        }
        body = {**body, source: stored}
    return body, recon, carry


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


def remember(run: RunPlan, state: Run, new: Sources, lengths, counts, sinks: int) -> Run:
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


def for_tiles(clock, start, stop, most: int, body_fn, state):
    """Call `body_fn(token, size, state)` for every tile of a row from unit `start` to `stop`, at most `most` tokens
    apart. Codecs that see one token at a time are fed whole planes of 32 where they fit."""
    if clock.unit > 1 or most < PLANE:
        return jax.lax.fori_loop(start, stop, lambda j, s: body_fn(j * clock.unit, clock.unit, s), state)

    def phase(number, loop):
        """Single tokens up to a plane's edge, then whole planes; the second time single tokens to the end. A choice
        inside one loop would make XLA copy the words."""
        token, state = loop
        edge = jnp.where(number == 0, jnp.minimum(stop, -(-token // PLANE) * PLANE), stop)
        state = jax.lax.fori_loop(token, edge, lambda j, s: body_fn(j, 1, s), state)
        planes = (stop - edge) // PLANE
        state = jax.lax.fori_loop(0, planes, lambda j, s: body_fn(edge + j * PLANE, PLANE, s), state)
        return edge + planes * PLANE, state

    return jax.lax.fori_loop(0, 2, phase, (start, state))[1]


def empty_carry(runs, size: int, dtype) -> dict:
    """What enters the first layer: zeros, [size, W] for every name any layer carries."""
    return {name: jnp.zeros((size, width), dtype) for run in runs for name, width in run.wiring.chain.carry.items()}


def flush_layer(run: RunPlan, body, layer, new, held, targets, constants, carry):
    """Encode one layer of a fresh prompt, [B, T, W] per source, row by row; nothing comes from the window. `carry`
    holds every prompt token's, [B, T, W]. Returns (body, new, carry); `new` changes only where a source is encoded
    before its partner and stays in the window as reconstructed."""
    clocks, length = run.wiring.storage.clocks, next(iter(new.values())).shape[1]

    def tile_step(clock, row, token, size, state):
        if size > length:
            return state  # no tile of a prompt this short is ever due
        body, new, carry = state
        start = jnp.clip(token - held[row], 0, length - size)
        tile = {s: _cut(new[s], (), row, start, size) for s in clock.sources}
        part = {n: jax.lax.dynamic_slice(c, (row, start, 0), (1, size, c.shape[2]))[0] for n, c in carry.items()}
        body, recon, part = encode_tile(run, body, (layer, row), clock, token % run.slots, tile, constants, part)
        carry = {
            n: jax.lax.dynamic_update_slice(c, saturated(part[n][None], c.dtype), (row, start, 0))
            for n, c in carry.items()
        }
        if len(clocks) > 1:
            new = new | {
                s: new[s].at[row, start + jnp.arange(size)].set(saturated(x, new[s].dtype)) for s, x in recon.items()
            }
        return body, new, carry

    def row_step(row, state):
        for clock, target in zip(clocks, targets, strict=True):
            step = functools.partial(tile_step, clock, row)
            state = for_tiles(clock, jnp.int32(0), target[row], length, step, state)
        return state

    return jax.lax.fori_loop(0, held.shape[0], row_step, (body, new, carry))


def _flush_chain(runs, states, news, held, targets, constants, dtype, moves: Moves | None):
    """Encode what is due in a chain of runs: row by row, tile by tile, all layers in order. `states` are (body, window)
    pairs; a source encoded before its partner leaves the window is replaced there by its reconstruction. Where
    tokens are evicted, `moves` says which units go where."""
    replace, length = len(runs[0].wiring.storage.clocks) > 1, next(iter(news[0].values())).shape[2]

    def layer_step(number, index, row, token, slot, size, layer, state):
        run, (body, window, new), carry = runs[number], state[0][number], state[1]
        clock = run.wiring.storage.clocks[index]  # layers of a chain may name their sources differently
        tile = {s: gather_tile(window[s], new[s], (layer,), row, token, size, held[row]) for s in clock.sources}
        body, recon, carry = encode_tile(
            run, body, (layer, row), clock, slot % run.slots, tile, pick(constants[number], layer), carry
        )
        if replace:
            window, new = _put_back(run, window, new, recon, layer, row, token, size, held[row])
        entries = list(state[0])
        entries[number] = (body, window, new)
        return tuple(entries), carry

    def tile_step(index, row, token, size, entries, slot=None):
        state = (entries, empty_carry(runs, size, dtype))
        for number, run in enumerate(runs):
            slot = token if slot is None else slot
            step = functools.partial(layer_step, number, index, row, token, slot, size)
            state = jax.lax.fori_loop(0, run.count, step, state)
        return state[0]

    def moved(moves: Moves, row, i, entries):
        unit = runs[0].wiring.storage.clocks[0].unit
        return tile_step(0, row, moves.unit[row, i] * unit, unit, entries, moves.slot[row, i])

    def row_step(row, entries):
        if moves is not None:
            return jax.lax.fori_loop(0, moves.count[row], functools.partial(moved, moves, row), entries)
        for index, clock in enumerate(runs[0].wiring.storage.clocks):
            start, stop = states[0].flushed[index][row], targets[index][row]
            # What was due before was encoded then: a unit of one token falls due with each new token, no more.
            entries = for_tiles(clock, start, stop, length, functools.partial(tile_step, index, row), entries)
        return entries

    entries = tuple((state.body, state.window, new) for state, new in zip(states, news, strict=True))
    anything = functools.reduce(
        jnp.logical_or, [(t > f).any() for t, f in zip(targets, states[0].flushed, strict=True)]
    )
    # No rows instead of a `cond`: XLA for GPUs copies whatever passes through the branch that leaves it as it is.
    return jax.lax.fori_loop(0, jnp.where(anything, held.shape[0], 0), row_step, entries)


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


def commit(cache: Cache, pending: tuple[Any, ...], counts: Int[Array, " B"], constants: tuple[dict, ...] = ()) -> Cache:
    """Append the first `counts[b]` tokens of row b of `pending` and encode what is due, all layers in order.

    `pending` holds one dict of [L_run, B, T, W] arrays per run, as `attend` returns them, and after them the attention
    mass of the call where tokens are kept by it. Tokens beyond the capacity are dropped and raise the row's overflow
    flag; a number that is not finite is stored as 0 and counted in `finite`."""
    layout, runs = cache.layout, plan(cache.layout)
    constants = constants or tuple({} for _ in runs)
    counts, overflow = admitted(cache, counts)
    finite = finite_tokens(cache, leading(found_finite(layout.dtype, *pending[: len(runs)])), counts)
    held = cache.lengths - layout.method.sinks
    states, sources = list(cache.runs), [zeroed(layout.dtype, new) for new in pending[: len(runs)]]
    moves, kept = _moves(cache, pending, held, counts)
    for chain in chains(layout):
        members = [runs[i] for i in chain]
        clocks = members[0].wiring.storage.clocks
        flushed = states[chain[0]].flushed
        targets = tuple(due(c, held + counts, f) for c, f in zip(clocks, flushed, strict=True))
        if any(run.slots for run in members):
            flush = _flush_chain(
                members,
                [states[i] for i in chain],
                [sources[i] for i in chain],
                held,
                targets,
                [constants[i] for i in chain],
                layout.dtype,
                moves,
            )
            for i, (body, window, new) in zip(chain, flush, strict=True):
                flushed = tuple(due(c, held + counts, f) for c, f in zip(clocks, states[i].flushed, strict=True))
                states[i], sources[i] = states[i].replace(body=body, window=window, flushed=flushed), new
    done = tuple(
        remember(run, state, new, cache.lengths, counts, layout.method.sinks)
        for run, state, new in zip(runs, states, sources, strict=True)
    )
    return cache.replace(runs=done, lengths=cache.lengths + counts, overflow=overflow, finite=finite, kept=kept)


def _moves(cache: Cache, pending: tuple, held, counts) -> tuple[Moves | None, dict]:
    """Which units go where, and the bookkeeping after it, where tokens are evicted."""
    keep, run = cache.layout.method.keep, plan(cache.layout)[0]
    if keep is None or not cache.kept:
        return None, cache.kept
    clock, flushed = run.wiring.storage.clocks[0], cache.runs[0].flushed[0]
    most = (next(iter(pending[0].values())).shape[2] + clock.unit - 1) // clock.unit
    call = pending[-1] if len(pending) > len(cache.runs) else None
    end, sinks = held + counts, cache.layout.method.sinks
    window, target = window_tokens(run.ring, end), due(clock, end, flushed)
    return enter(keep.rule, cache.kept, call, held, window, flushed, target, most, clock.unit, sinks)
