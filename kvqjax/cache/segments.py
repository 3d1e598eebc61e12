"""One layer's attention to the encoded tokens of its body: block by block, or by what reads it as a whole."""

import jax
import jax.numpy as jnp

from kvqjax.cache.chunk_paths import MANY_QUERIES, attend_blocks, large_block
from kvqjax.cache.eviction import Received, received
from kvqjax.cache.runs import AT_ONCE
from kvqjax.cache.state import body_tokens
from kvqjax.cache.view import LayerView, NewTokens, expanded, payload_of, reached, rebuilt, seen, side_by_side
from kvqjax.cache.whole_body import attend_decoded, attend_packed, attend_stored
from kvqjax.methods.direct import MOST_QUERIES
from kvqjax.methods.wiring import SharedValues
from kvqjax.ops.attention import Partial
from kvqjax.ops.finite import saturated

__all__ = ["attend_body", "weigh"]

MOST_PARTS = 16  # of a body that are decoded in straight code: more would take long to compile


def _body_blocks(view: LayerView, tokens: NewTokens, size: int, shared: SharedValues | None = None):
    """(read, first, last) as `blockwise_attention` wants them, for the encoded tokens of every row, `size` of them at a
    time; with `shared`, values as stored, to be decoded after the sum."""
    run, sinks = view.run, view.sinks
    ends, constants = body_tokens(run, view.state), run.wiring.maps.prepare(view.constants)
    stored = tokens.stored
    if stored is not None:
        stored = jnp.pad(stored, ((0, 0), (0, run.slots - stored.shape[1])), constant_values=-1)

    def block(j, carry):
        at = j * size % run.slots_here if run.wraps else jnp.minimum(j * size, run.slots_here - size)
        payload = payload_of(run, view.state, view.layer, at, size)
        part = {n: jax.lax.dynamic_slice_in_dim(c, at, size, 1) for n, c in carry.items()}
        part = part or rebuilt(view, at, size)
        decoded, part = run.wiring.maps.decode(constants, payload, part)
        decoded = {name: saturated(x, view.new[name].dtype) for name, x in decoded.items()}
        carry = {
            n: jax.lax.dynamic_update_slice_in_dim(c, saturated(part[n], c.dtype), at, 1) for n, c in carry.items()
        }
        if stored is None:
            slots = (j * size if run.wraps else at) + jnp.arange(size)
            index = jnp.broadcast_to(run.deal.tokens(slots)[None], (ends.shape[0], size))
            # The last block may begin within the one before it.
            positions, valid = index + sinks, (index < ends[:, None]) & (slots >= j * size)[None]
        else:
            positions = jax.lax.dynamic_slice_in_dim(stored, at, size, 1)
            valid = positions >= 0
        k, v = expanded(view, decoded, positions)
        if shared is not None:  # the decoded values then have no user and are never computed
            v = saturated(shared.read(view.weights, view.constants, payload, decoded)[:, :, None], v.dtype)
        return k, v, seen(view, tokens, positions, valid), carry

    if stored is not None:
        filled = jnp.where(stored >= 0, jnp.arange(1, run.slots + 1)[None], 0).max()
        return block, jnp.int32(0), -(-filled // size)
    if run.static and tokens.positions.shape[1] <= MOST_QUERIES:
        return block, 0, -(-min(reached(view), run.slots_here) // size)
    last = -(-run.deal.share(ends.max()) // size)
    first = jnp.int32(0)
    if run.sliding is not None:  # blocks that no query reaches any more are skipped
        oldest = jnp.maximum((tokens.positions[:, 0] - run.sliding + 1 - sinks).min(), 0)
        first = jnp.minimum(run.deal.share(oldest) // size, last)
    return block, first, last


def attend_body(q, kv_heads: int, view: LayerView, tokens: NewTokens, carry: dict) -> tuple[Partial, dict]:
    """Attention to the encoded tokens that lie here, one block of every row at a time. `carry` is [B, slots_here, W]
    per name: what the layer below reconstructed for each body token, replaced block by block by this layer's."""
    frame = view.run.wiring.maps.frame
    if frame is not None:  # once for all of the body, here and at the end
        q = frame.queries(view.constants, q)
    found, carry = _attend_in_frame(q, kv_heads, view, tokens, carry)
    if frame is not None:
        found = found._replace(out=frame.outputs(view.constants, found.out))
    return found, carry


def _attend_in_frame(q, kv_heads: int, view: LayerView, tokens: NewTokens, carry: dict) -> tuple[Partial, dict]:
    """`attend_body` with queries and outputs in the body's frame."""
    run, wiring = view.run, view.run.wiring
    shared = wiring.fast.shared if wiring.fast.shared is not None and q.shape[1] <= wiring.fast.shared.most else None
    # Where tokens lie in a ring, are evicted or dealt, those that a query sees are not next to each other.
    in_order = not run.wraps and tokens.stored is None and run.deal.parts == 1
    kernels = view.chunks if in_order else "off"

    few = q.shape[1] <= MOST_QUERIES and not run.wraps and tokens.stored is None

    def by_blocks():
        if run.static and few and not wiring.chain.carry and reached(view) <= MOST_PARTS * AT_ONCE:
            return attend_decoded(q, kv_heads, view, tokens, shared), carry
        width = None if shared is None else shared.width
        size = large_block(q, run.reading, run.slots_here, kernels, bool(wiring.chain.carry))
        return attend_blocks(q, kv_heads, *_body_blocks(view, tokens, size, shared), carry, width, kernels)

    if wiring.fast.direct is not None and few:
        return attend_stored(q, kv_heads, view, tokens, wiring.fast.direct), carry
    # Kernels give what attention over blocks gives: means of shared values where a method has such.
    short = kernels == "off" or q.shape[1] < MANY_QUERIES
    if (
        wiring.fast.packed is not None
        and short
        and shared is wiring.fast.shared
        and not run.wraps
        and tokens.stored is None
    ):
        found = attend_packed(q, view, tokens, wiring.fast.packed, lambda: by_blocks()[0])
    else:
        found, carry = by_blocks()
    if shared is not None:
        found = found._replace(out=shared.finish(view.weights, view.constants, found.out))
    return found, carry


def weigh(q, view: LayerView, tokens: NewTokens, lse, carry: dict) -> Received:
    """What the valid queries gave each token, once `lse` is known: a second pass over the scores. `carry` is what
    `attend_body` was given."""
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
