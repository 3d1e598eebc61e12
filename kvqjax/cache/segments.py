"""Attend in one layer, segment by segment: to the tokens that are held exactly (sinks, window, new ones), and to the
body, either block by block or by a path that reads all of it (kvqjax/cache/whole_body.py, decoded.py)."""

import functools

import jax
import jax.numpy as jnp

from kvqjax.cache.chunk_paths import MANY_QUERIES, attend_blocks, attend_segment, large_block
from kvqjax.cache.decoded import attend_decoded, passed, replaced
from kvqjax.cache.encoding import at_layer
from kvqjax.cache.eviction import Received, received
from kvqjax.cache.recoding import recoded
from kvqjax.cache.run_layout import MOST_ROWS, RunLayout, few_block
from kvqjax.cache.state import Run, due
from kvqjax.cache.view import (
    LayerView,
    NewTokens,
    alike,
    body_view,
    expanded,
    payload_of,
    seen,
    side_by_side,
)
from kvqjax.cache.whole_body import attend_packed, attend_stored
from kvqjax.methods.direct import MOST_QUERIES
from kvqjax.methods.wiring import MixedKeys, SharedValues
from kvqjax.ops.attention import Partial, blockwise_attention, merge_over, segment_attention
from kvqjax.ops.finite import saturated

__all__ = ["attend_body", "attend_exact", "attend_parts", "weigh"]


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


def _body_blocks(
    view: LayerView,
    tokens: NewTokens,
    size: int,
    shared: SharedValues | None = None,
    mixed: MixedKeys | None = None,
):
    """Make (read, first, last) for `blockwise_attention` over the body, `size` tokens of every row at a time. With
    `shared`, the values read are the stored ones, which the caller maps to heads after the sum; with `mixed`, the
    heads of the keys read are still to be mixed."""
    run, body, constants = view.run, body_view(view, tokens), view.run.wiring.maps.prepare(view.constants)
    waves = run.wiring.fast.waves(size) if run.wiring.fast.waves and body.together else None

    def block(j, carry):
        at = body.at(j, size)
        payload = payload_of(run, view.state, view.layer, at, size)
        part = {n: jax.lax.dynamic_slice_in_dim(c, at, size, 1) for n, c in carry.items()}
        part = part or _rebuilt(view, at, size)
        decoded, part = run.wiring.maps.decode(constants, payload, part)
        if mixed is not None:  # keys as decoded then have no user
            decoded = decoded | {"k": mixed.read(payload["k"])}
        decoded = {name: saturated(x, view.new[name].dtype) for name, x in decoded.items()}
        done = j * size if run.slots_here % size else at
        carry = {n: replaced(c, part[n], at, done) for n, c in carry.items()}
        positions, valid = body.places(j, size)
        k, v = expanded(view, decoded, positions if waves is None else waves(positions))
        if shared is not None:  # the decoded values then have no user and are never computed
            v = saturated(shared.read(view.weights, view.constants, payload, decoded)[:, :, None], v.dtype)
        return k, v, seen(view, tokens, positions, valid), carry

    return block, *body.blocks(size)


def _is_read(view: LayerView, carry: dict) -> bool:
    """Say whether this layer's carry is what its keys and values are made of, and all of it."""
    same = view.run.wiring.chain.read_in
    return carry.keys() == view.new.keys() and all(
        carry[name].dtype == x.dtype and (same is None or x.dtype.name in same) for name, x in view.new.items()
    )


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
    at_once = run.static and few and not wiring.chain.carry
    shared = (fast.summed if at_once or run.lanes > 1 else None) or fast.shared
    shared = shared if shared is not None and q.shape[1] <= shared.most else None

    def by_blocks():
        rows = q.shape[1] * q.shape[2]
        if at_once:
            return attend_decoded(q, kv_heads, view, tokens, shared, {}), carry
        if run.static and few and _is_read(view, carry):
            found = passed(view, tokens, few_block(run, q.shape[0], rows), carry, q)
            return attend_decoded(q, kv_heads, view, tokens, shared, found), found
        width = None if shared is None else shared.width
        if run.lanes and (width is None or run.lanes > 1) and rows <= MOST_ROWS:
            mixed = fast.mixed if run.lanes > 1 else None
            blocks = _body_blocks(view, tokens, few_block(run, q.shape[0], rows), shared, mixed)
            return blockwise_attention(q, kv_heads, *blocks, carry, width, True, None if mixed is None else mixed.mix)
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
    if packed is not None and packed.straight and wiring.chain.carry:
        found, carry = attend_packed(q, view, tokens, packed, by_blocks, carry=carry)
    elif packed is not None and packed.straight:
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
        sources, carry = recoded(view, tokens, sources, clock, flushed, carry)
        mask = mask & left
    return [*parts, part(sources, mask)], carry


def attend_parts(
    q, view: LayerView, tokens: NewTokens, recode: bool, tile: dict, body: dict
) -> tuple[list[Partial], dict, dict]:
    """Attend to all tokens of a layer, in parts to be merged, and give what flows on to the next layer: `tile` and
    `body` are the carries of `attend_exact` and `attend_body`."""
    parts, tile = attend_exact(q, view, tokens, recode and view.run.slots > 0, tile)
    if view.run.slots:
        part, body = attend_body(q, view.run.shape.num_kv_heads, view, tokens, body)
        parts.append(merge_over(part, view.run.deal.axes))
    return parts, tile, body
