"""Attend in one layer, segment by segment: to the tokens that are held exactly (sinks, window, new ones), and to the
body, either block by block or by a path that reads all of it (kvqjax/cache/whole_body.py)."""

import functools

import jax
import jax.numpy as jnp

from kvqjax.cache.chunk_paths import MANY_QUERIES, attend_blocks, attend_segment, large_block
from kvqjax.cache.encoding import Schedule, at_layer, encode_due, gather_tile
from kvqjax.cache.eviction import Received, received
from kvqjax.cache.runs import AT_ONCE, MOST_ROWS, RunLayout, few_block
from kvqjax.cache.state import Run, due
from kvqjax.cache.view import (
    LayerView,
    NewTokens,
    alike,
    body_view,
    expanded,
    payload_of,
    reached,
    seen,
    side_by_side,
)
from kvqjax.cache.whole_body import attend_decoded, attend_packed, attend_stored
from kvqjax.methods.direct import MOST_QUERIES
from kvqjax.methods.wiring import SharedValues
from kvqjax.ops.attention import Partial, blockwise_attention, segment_attention
from kvqjax.ops.finite import saturated

__all__ = ["attend_body", "attend_exact", "recoded_units", "weigh"]

MOST_PARTS = 16  # of a body that are decoded in straight code: more would take long to compile


def _passed(run: RunLayout, state: Run, constants, at, size: int, layer, carry: dict) -> dict:
    """Pass the carry of one block through one more layer."""
    return run.wiring.maps.decode(at_layer(constants, layer), payload_of(run, state, layer, at, size), carry)[1]


def _rebuilt(view: LayerView, at, size: int) -> dict:
    """Rebuild the carry of one block where none is held: from zeros, through the layers `below`."""
    batch, dtype = next(iter(view.new.values())).shape[0], next(iter(view.new.values())).dtype
    carry = {name: jnp.zeros((batch, size, width), dtype) for name, width in view.run.wiring.chain.carry.items()}
    for run, state, constants, count in view.below:
        carry = jax.lax.fori_loop(0, count, functools.partial(_passed, run, state, constants, at, size), carry)
    return carry


def _body_blocks(view: LayerView, tokens: NewTokens, size: int, shared: SharedValues | None = None):
    """Make (read, first, last) for `blockwise_attention` over the body, `size` tokens of every row at a time. With
    `shared`, the values read are the stored ones, which the caller maps to heads after the sum."""
    run, body, constants = view.run, body_view(view, tokens), view.run.wiring.maps.prepare(view.constants)
    waves = run.wiring.fast.waves(size) if run.wiring.fast.waves and body.together else None

    def block(j, carry):
        at = body.at(j, size)
        payload = payload_of(run, view.state, view.layer, at, size)
        part = {n: jax.lax.dynamic_slice_in_dim(c, at, size, 1) for n, c in carry.items()}
        part = part or _rebuilt(view, at, size)
        decoded, part = run.wiring.maps.decode(constants, payload, part)
        decoded = {name: saturated(x, view.new[name].dtype) for name, x in decoded.items()}
        done = j * size if run.slots_here % size else at
        carry = {n: _replaced(c, part[n], at, done) for n, c in carry.items()}
        positions, valid = body.places(j, size)
        k, v = expanded(view, decoded, positions if waves is None else waves(positions))
        if shared is not None:  # the decoded values then have no user and are never computed
            v = saturated(shared.read(view.weights, view.constants, payload, decoded)[:, :, None], v.dtype)
        return k, v, seen(view, tokens, positions, valid), carry

    return block, *body.blocks(size)


def _replaced(carry, part, at, done):
    """Put `part` into the carry [B, S, W] from slot `at` on, but for slots below `done`, which hold theirs already."""
    part, size = saturated(part, carry.dtype), part.shape[1]
    if done is not at:
        old = jax.lax.dynamic_slice_in_dim(carry, at, size, 1)
        part = jnp.where((at + jnp.arange(size) < done)[None, :, None], old, part)
    return jax.lax.dynamic_update_slice_in_dim(carry, part, at, 1)


def attend_body(q, kv_heads: int, view: LayerView, tokens: NewTokens, carry: dict) -> tuple[Partial, dict]:
    """Attend to the encoded tokens that lie here. `carry` is [B, slots_here, W] per name: what the layer below
    reconstructed for each body token; this layer's takes its place."""
    frame = view.run.wiring.maps.frame
    if frame is not None:  # once for all of the body, here and at the end
        q = frame.queries(view.constants, q)
    found, carry = _attend_in_frame(q, kv_heads, view, tokens, carry)
    if frame is not None:
        found = found._replace(out=frame.outputs(view.constants, found.out))
    return found, carry


def _attend_in_frame(q, kv_heads: int, view: LayerView, tokens: NewTokens, carry: dict) -> tuple[Partial, dict]:
    """Attend as `attend_body` does, with queries and outputs in the body's frame."""
    run, wiring = view.run, view.run.wiring
    fast, body = wiring.fast, body_view(view, tokens)
    kernels = view.chunks if body.together else "off"
    few = body.linear and q.shape[1] <= MOST_QUERIES
    at_once = run.static and few and not wiring.chain.carry and reached(view) <= MOST_PARTS * AT_ONCE
    shared = (fast.summed if at_once or run.lanes > 1 else None) or fast.shared
    shared = shared if shared is not None and q.shape[1] <= shared.most else None

    def by_blocks():
        if at_once:
            return attend_decoded(q, kv_heads, view, tokens, shared), carry
        width = None if shared is None else shared.width
        rows = q.shape[1] * q.shape[2]
        if run.lanes and (width is None or run.lanes > 1) and rows <= MOST_ROWS:
            blocks = _body_blocks(view, tokens, few_block(run, q.shape[0], rows), shared)
            return blockwise_attention(q, kv_heads, *blocks, carry, width, lanes=True)
        if kernels == "off":
            size = few_block(run, q.shape[0], rows) if q.shape[1] < MANY_QUERIES else run.reading
            return blockwise_attention(q, kv_heads, *_body_blocks(view, tokens, size, shared), carry, width)
        apart = bool(wiring.chain.carry) or kernels in ("splash", "interpret")
        size = large_block(q, run.reading, run.slots_here, kernels, apart)
        blocks = _body_blocks(view, tokens, size, shared)
        return attend_blocks(q, kv_heads, *blocks, carry, width, kernels, alike(view, tokens), run.slots_here)

    if fast.direct is not None and few:
        return attend_stored(q, kv_heads, view, tokens, fast.direct), carry
    # Kernels give what attention over blocks gives: means of shared values where a method has such.
    packed = fast.packed if kernels == "off" and shared is fast.shared and body.linear else None
    if packed is not None and packed.straight:
        found = attend_packed(q, view, tokens, packed, lambda: by_blocks()[0])
    else:
        found, carry = by_blocks()
    if shared is not None:
        found = found._replace(out=shared.finish(view.weights, view.constants, found.out))
    return found, carry


def weigh(q, view: LayerView, tokens: NewTokens, lse, carry: dict) -> Received:
    """Sum the softmax weights that the valid queries gave each token, in a second pass over the scores with the known
    log-sum-exp `lse`. `carry` is what `attend_body` was given."""
    valid = (jnp.arange(q.shape[1])[None] < tokens.counts[:, None])[:, :, None]
    sources, positions, real = side_by_side(view, tokens)
    k, _ = expanded(view, sources, positions)
    exact = received(q, k, seen(view, tokens, positions, real) & valid, lse)
    read_block, first, last = _body_blocks(view, tokens, view.run.reading)
    frame = view.run.wiring.maps.frame
    turned = q if frame is None else frame.queries(view.constants, q)

    def step(j, loop):
        body, carry = loop
        k, _, mask, carry = read_block(j, carry)
        part = received(turned, k, mask & valid, lse)
        return jax.lax.dynamic_update_slice_in_dim(body, part, j * view.run.reading, 1), carry

    body = jnp.zeros((q.shape[0], view.run.slots))
    body, _ = jax.lax.fori_loop(first, last, step, (body, carry))
    return Received(exact, body[:, : tokens.stored.shape[1]])


def recoded_units(unit: int, length: int) -> int:
    """Count the units of a clock that can fall due while `length` new tokens are appended, before the last of them
    attends."""
    return -(-(length - 1) // unit)


def _recode(view: LayerView, tokens: NewTokens, sources, clock, flushed, carry):
    """Replace every unit of `sources` that may fall due among the new tokens by what its codes decode to. Units are
    encoded row by row and one by one, exactly as `commit` will encode them. `carry` is [B, units, u, W] per name."""
    run, units = view.run, recoded_units(clock.unit, tokens.positions.shape[1])
    window = at_layer(view.state.window, view.layer)

    def one(_, row, token, slot, size, loop):
        (sources, carry), held = loop, tokens.held[row]
        unit = token // clock.unit - flushed[row]
        tile = {s: gather_tile(window[s], view.new[s], (), row, token, size, held, size) for s in clock.sources}
        part = {n: c[row, unit] for n, c in carry.items()}
        _, recon, part = run.wiring.maps.encode(view.constants, tile, part)
        index = token + jnp.arange(size)
        place = jnp.where(index < held, view.sinks + index % run.ring, view.sinks + run.ring + index - held)
        for s, x in recon.items():
            sources = {**sources, s: sources[s].at[row, place].set(saturated(x, sources[s].dtype), mode="drop")}
        return sources, {n: c.at[row, unit].set(saturated(part[n], c.dtype)) for n, c in carry.items()}

    # Numbers that XLA knows, so that a GPU's host need not ask for them.
    first = jnp.zeros_like(flushed)
    place = lambda row, number: ((flushed[row] + number) * clock.unit, None)  # noqa: E731
    schedule = Schedule(clock, first, first + units, place)
    return encode_due((schedule,), len(flushed), clock.unit, one, (sources, carry))


def attend_exact(q, view: LayerView, tokens: NewTokens, recode: bool, carry: dict) -> tuple[list[Partial], dict]:
    """Attention to the tokens that are held exactly. With `recode`, a token that decoding one by one would have
    encoded before query t is shown to query t as encoded (docs/design.md, idea 2); `carry` then flows from layer to
    layer for those."""
    run = view.run
    sources, positions, valid = side_by_side(view, tokens)
    mask = seen(view, tokens, positions, valid)

    def part(sources, mask):
        k, v = expanded(view, sources, positions)
        return segment_attention(q, k, v, mask)

    if not recode and view.chunks in ("splash", "interpret"):
        k, v = expanded(view, sources, positions)
        old = k.shape[1] - q.shape[1]
        new = attend_segment(q, k[:, old:], v[:, old:], mask[:, :, old:], view.chunks)
        return [segment_attention(q, k[:, :old], v[:, :old], mask[:, :, :old]), new], carry
    if not recode:
        return [part(sources, mask)], carry
    parts, index = [], (positions - view.sinks)[:, None, :]
    for clock, flushed in zip(run.wiring.storage.clocks, view.state.flushed, strict=True):
        encoded = due(clock, tokens.positions - view.sinks, flushed[:, None]) * clock.unit
        left = (index >= 0) & (index < encoded[:, :, None])
        parts.append(part(sources, mask & ~left))
        sources, carry = _recode(view, tokens, sources, clock, flushed, carry)
        mask = mask & left
    return [*parts, part(sources, mask)], carry
