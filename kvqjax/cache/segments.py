"""One layer's attention over a compressed cache, segment by segment: exact tokens (sinks, window, new) and encoded
body."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvqjax.cache.append import gather_tile, pick, ring_tokens
from kvqjax.cache.chunk_paths import MANY_QUERIES, attend_blocks, attend_segment, large_block
from kvqjax.cache.eviction import Received, received
from kvqjax.cache.state import AT_ONCE, Run, RunPlan, body_tokens, due
from kvqjax.methods.direct import MOST_QUERIES, PIECE, Direct, attend_whole, slots_read, summed
from kvqjax.methods.wiring import Packed, SharedValues
from kvqjax.ops.attention import Partial, segment_attention
from kvqjax.ops.finite import saturated
from kvqjax.ops.layout import leading_slots, read
from kvqjax.pallas_kernels.dispatch import packed_attention

__all__ = ["LayerView", "NewTokens", "attend_body", "attend_exact", "recoded_units", "visible", "weigh"]

MOST_PARTS = 16  # of a body that are decoded in straight code: more would take long to compile


class NewTokens(NamedTuple):
    """What every layer knows of the T new tokens: absolute positions, how many of each row are valid, and how many body
    tokens (tokens after the sinks) each row held before; negative while the sinks fill. Where tokens are evicted,
    `stored` are the body's positions (-1: none) and `oldest` the first one each query may see, if not all of them."""

    positions: Int[Array, "B T"]
    counts: Int[Array, " B"]
    held: Int[Array, " B"]
    stored: Int[Array, "B N"] | None = None
    oldest: Int[Array, "B T"] | None = None


class LayerView(NamedTuple):
    """One layer of a run: its arrays by number, its weights and constants, and the new tokens' sources [B, T, W].
    `below` are (run, state, constants, layers) of the runs up to this layer; `chunks` says how many
    queries attend (kvqjax/cache/chunk_paths.py). No row holds more
    than `reach` tokens (None: than the capacity)."""

    run: RunPlan
    state: Run
    layer: Int[Array, ""]
    weights: dict
    constants: dict
    new: dict
    sinks: int
    below: tuple[tuple[RunPlan, Run, dict, Int[Array, ""] | int], ...] = ()
    chunks: str = "off"
    reach: int | None = None


def visible(queries, keys, valid, sliding: int | None) -> Bool[Array, "B T S"]:
    """Causal and sliding-window mask by absolute position: queries [B,T], keys [B,S], valid [B,S]."""
    query, key = queries[:, :, None], keys[:, None, :]
    seen = (key <= query) & valid[:, None, :]
    return seen if sliding is None else seen & (key > query - sliding)


def _seen(view: LayerView, tokens: NewTokens, positions, valid) -> Bool[Array, "B T S"]:
    """Which of the tokens at `positions` each query sees."""
    mask = visible(tokens.positions, positions, valid, view.run.sliding)
    if tokens.oldest is None:
        return mask
    return mask & ((positions[:, None] >= tokens.oldest[:, :, None]) | (positions < view.sinks)[:, None])


def _side_by_side(view: LayerView, tokens: NewTokens):
    """Sinks, window slots and new tokens on one axis: (sources {name: [B,N,W]}, positions [B,N], valid [B,N])."""
    batch, length = tokens.positions.shape
    ring = ring_tokens(view.run.ring, body_tokens(view.run, view.state))
    sink = jnp.broadcast_to(jnp.arange(view.sinks)[None], (batch, view.sinks))
    fresh = jnp.arange(length)[None] < tokens.counts[:, None]
    total = (tokens.held + view.sinks)[:, None]
    valid = jnp.concatenate([sink < total, ring < tokens.held[:, None], fresh], axis=1)
    positions = jnp.concatenate([sink, ring + view.sinks, tokens.positions], axis=1)
    kept = pick(view.state.sinks, view.layer), pick(view.state.window, view.layer), view.new
    sources = {name: jnp.concatenate([part[name].astype(x.dtype) for part in kept], 1) for name, x in view.new.items()}
    return sources, positions, valid


def _expanded(view: LayerView, sources: dict, positions):
    """Keys and values of exact or decoded sources, [B, N, K, D]; what overflows on the way saturates."""
    k, v = view.run.wiring.expand(view.weights, view.constants, sources, positions)
    return saturated(k, k.dtype), saturated(v, v.dtype)


def recoded_units(unit: int, length: int) -> int:
    """How many units of a clock can fall due while `length` new tokens are appended, before the last of them
    attends."""
    return -(-(length - 1) // unit)


def _recode(view: LayerView, tokens: NewTokens, sources, clock, flushed, carry):
    """`sources` with every unit of the clock that may fall due inside the new tokens replaced by what a reader will
    see. Tiles are encoded one row and unit at a time, exactly as `commit` will. `carry` is [B, units, u, W] per
    name."""
    run, length = view.run, tokens.positions.shape[1]
    units = recoded_units(clock.unit, length)
    window = pick(view.state.window, view.layer)

    def one(index, loop):
        sources, carry = loop
        row, unit = index // units, index % units
        token = (flushed[row] + unit) * clock.unit
        held = tokens.held[row]
        tile = {s: gather_tile(window[s], view.new[s], (), row, token, clock.unit, held) for s in clock.sources}
        part = {n: c[row, unit] for n, c in carry.items()}
        _, recon, part = run.wiring.encode(view.constants, tile, part)
        index = token + jnp.arange(clock.unit)
        place = jnp.where(index < held, view.sinks + index % run.ring, view.sinks + run.ring + index - held)
        for s, x in recon.items():
            sources = {**sources, s: sources[s].at[row, place].set(saturated(x, sources[s].dtype), mode="drop")}
        return sources, {n: c.at[row, unit].set(saturated(part[n], c.dtype)) for n, c in carry.items()}

    return jax.lax.fori_loop(0, tokens.counts.shape[0] * units, one, (sources, carry))


def attend_exact(q, view: LayerView, tokens: NewTokens, recode: bool, carry: dict) -> tuple[list[Partial], dict]:
    """Attention to the tokens that are held exactly. With `recode`, a token that decoding one by one would have
    encoded before query t is shown to query t as encoded (docs/design.md, idea 2); `carry` then flows from layer to
    layer for those."""
    run = view.run
    sources, positions, valid = _side_by_side(view, tokens)
    mask = _seen(view, tokens, positions, valid)

    def part(sources, mask):
        k, v = _expanded(view, sources, positions)
        return segment_attention(q, k, v, mask)

    if not recode and view.chunks in ("splash", "interpret") and q.shape[1] >= MANY_QUERIES:
        k, v = _expanded(view, sources, positions)
        kept = k.shape[1] - q.shape[1]
        new = attend_segment(q, k[:, kept:], v[:, kept:], mask[:, :, kept:], view.chunks)
        return [segment_attention(q, k[:, :kept], v[:, :kept], mask[:, :, :kept]), new], carry
    if not recode:
        return [part(sources, mask)], carry
    parts, index = [], (positions - view.sinks)[:, None, :]
    for clock, flushed in zip(run.wiring.clocks, view.state.flushed, strict=True):
        encoded = due(clock, tokens.positions - view.sinks, flushed[:, None]) * clock.unit
        left = (index >= 0) & (index < encoded[:, :, None])
        parts.append(part(sources, mask & ~left))
        sources, carry = _recode(view, tokens, sources, clock, flushed, carry)
        mask = mask & left
    return [*parts, part(sources, mask)], carry


def _payload(run: RunPlan, state: Run, layer, at, size: int) -> dict:
    """`size` tokens of every row of one layer, whole blocks, unpacked."""
    return {
        source: {name: read(f, state.body[source][name], layer, at, size) for name, f in codec.fields.items()}
        for source, codec in run.wiring.codecs.items()
    }


def _passed(run: RunPlan, state: Run, constants, at, size: int, layer, carry: dict) -> dict:
    """The carry of one block after one more layer."""
    return run.wiring.decode(pick(constants, layer), _payload(run, state, layer, at, size), carry)[1]


def _rebuilt(view: LayerView, at, size: int) -> dict:
    """The carry of one block where none is held: zeros, and with `copy="none"` what the layers below make of them."""
    batch, dtype = next(iter(view.new.values())).shape[0], next(iter(view.new.values())).dtype
    carry = {name: jnp.zeros((batch, size, width), dtype) for name, width in view.run.wiring.carry.items()}
    for run, state, constants, count in view.below if view.run.wiring.copy == "none" else ():
        carry = jax.lax.fori_loop(0, count, functools.partial(_passed, run, state, constants, at, size), carry)
    return carry


def _body_blocks(view: LayerView, tokens: NewTokens, size: int, shared: SharedValues | None = None):
    """(read, first, last) as `blockwise_attention` wants them, for the encoded tokens of every row, `size` of them at a
    time; with `shared`, values as stored, to be decoded after the sum."""
    run, sinks = view.run, view.sinks
    ends, constants = body_tokens(run, view.state), run.wiring.prepare(view.constants)
    stored = tokens.stored
    if stored is not None:
        stored = jnp.pad(stored, ((0, 0), (0, run.slots - stored.shape[1])), constant_values=-1)

    def block(j, carry):
        at = j * size % run.slots_here if run.wraps else jnp.minimum(j * size, run.slots_here - size)
        payload = _payload(run, view.state, view.layer, at, size)
        part = {n: jax.lax.dynamic_slice_in_dim(c, at, size, 1) for n, c in carry.items()}
        part = part or _rebuilt(view, at, size)
        decoded, part = run.wiring.decode(constants, payload, part)
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
        k, v = _expanded(view, decoded, positions)
        if shared is not None:  # the decoded values then have no user and are never computed
            v = saturated(shared.read(view.weights, view.constants, payload, decoded)[:, :, None], v.dtype)
        return k, v, _seen(view, tokens, positions, valid), carry

    if stored is not None:
        filled = jnp.where(stored >= 0, jnp.arange(1, run.slots + 1)[None], 0).max()
        return block, jnp.int32(0), -(-filled // size)
    length = tokens.positions.shape[1]
    tiled = view.chunks == "tiles" and length >= MANY_QUERIES and _alike(view, tokens)
    if not run.wraps and (tiled or (run.static and length <= MOST_QUERIES)):
        return block, 0, -(-min(_reached(view), run.slots_here) // size)
    last = -(-run.deal.share(ends.max()) // size)
    first = jnp.int32(0)
    if run.sliding is not None:  # blocks that no query reaches any more are skipped
        oldest = jnp.maximum((tokens.positions[:, 0] - run.sliding + 1 - sinks).min(), 0)
        first = jnp.minimum(run.deal.share(oldest) // size, last)
    return block, first, last


def _attend_packed(q, view: LayerView, tokens: NewTokens, packed: Packed, general: Callable[[], Partial]) -> Partial:
    """Attention to the body straight from its packed words, where there is a kernel or a plain form for them."""
    run = view.run
    first = run.deal.tokens(jnp.arange(0, run.slots_here, run.block)) + view.sinks
    body = packed.body(view.weights, view.constants, view.state.body, first)
    stop = jnp.broadcast_to(body_tokens(run, view.state)[:, None], tokens.positions.shape)
    if run.sliding is None:
        start = jnp.zeros_like(stop)
    else:
        start = run.deal.share(jnp.maximum(tokens.positions - run.sliding + 1 - view.sinks, 0))
    stop = run.deal.share(stop)
    return packed_attention(q, body, view.layer, start, stop, packed.spec, general, packed.trusted)


def _reached(view: LayerView) -> int:
    """The most body tokens that any row may have here, by what is static."""
    run = view.run
    return run.slots_here if view.reach is None else run.deal.most(min(view.reach, run.slots))


def _alike(view: LayerView, tokens: NewTokens) -> bool:
    """Whether all new tokens of a row see the same of the body, which is all of it."""
    return view.run.sliding is None and tokens.oldest is None


def _first_seen(view: LayerView, tokens: NewTokens, count: int):
    """(positions [B, count], which of them each query sees) of the body's first `count` slots here."""
    index = view.run.deal.tokens(jnp.arange(count))[None]
    valid = index < body_tokens(view.run, view.state)[:, None]
    positions = jnp.broadcast_to(index + view.sinks, valid.shape)
    return positions, _seen(view, tokens, positions, valid)


def _attend_decoded(q, kv_heads: int, view: LayerView, tokens: NewTokens, shared: SharedValues | None) -> Partial:
    """Attention to the body in straight code, AT_ONCE tokens of every row decoded at a time (of a single row twice as
    many): first all scores, then all sums of values. Each part waits for the one before it, or XLA would decode all at
    once."""
    run, body = view.run, view.state.body
    count = min(-(-_reached(view) // run.block) * run.block, run.slots_here)
    positions, mask = _first_seen(view, tokens, count)
    constants = run.wiring.prepare(view.constants)
    size = max(1, max(AT_ONCE, 2 * AT_ONCE // q.shape[0]) // run.block) * run.block
    parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def decoded(part: slice, after):
        stored = view.state.replace(body=jax.lax.optimization_barrier((body, after))[0])
        payload = _payload(run, stored, view.layer, part.start, part.stop - part.start)
        found, _ = run.wiring.decode(constants, payload, {})
        found = {name: saturated(x, view.new[name].dtype) for name, x in found.items()}
        return payload, found, _expanded(view, found, positions[:, part])

    def scores(rows, _):
        made = []
        for part in parts:
            k = decoded(part, made[-1] if made else rows)[2][0]
            made.append(jnp.einsum("bkxd,bskd->bkxs", rows, k, preferred_element_type=jnp.float32))
        return [jnp.concatenate(made, -1)]

    def values(weights, _, dtype, piece):
        weights, total = weights[0].astype(dtype), weights[0][:, :, :, :1]
        for number, part in enumerate(parts):
            payload, found, (_, v) = decoded(part, total)
            if shared is not None:
                v = saturated(shared.read(view.weights, view.constants, payload, found)[:, :, None], dtype)
            v = jnp.where(mask[:, :, part].any(1)[:, :, None, None], v, 0)
            rows = weights[..., part].reshape(v.shape[0], v.shape[2], -1, v.shape[1])  # shared values are one head's
            own = summed(rows, jnp.swapaxes(v, 1, 2), piece).reshape(*weights.shape[:3], -1)
            total = total + own if number else own
        return total

    piece = math.gcd(PIECE, run.slots_here // 2)
    return attend_whole(q, {"k": {}, "v": {}}, mask, Direct(scores, values), kv_heads, piece)


def _attend_whole(q, kv_heads: int, view: LayerView, tokens: NewTokens, direct: Direct) -> Partial:
    """Attention to the body without a loop over its blocks; of a body whose rows are short, to a first part of it."""
    run, slots = view.run, view.run.slots_here
    count, cut = slots_read(_reached(view), run.block, slots)
    body = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, view.layer, keepdims=True), view.state.body)

    def first(source, stored):
        fields = run.wiring.codecs[source].fields
        return {name: leading_slots(field, stored[name], slots, count) for name, field in fields.items()}

    body = body | {"k": first("k", body["k"])}
    mask = _first_seen(view, tokens, count)[1]
    piece = math.gcd(PIECE, slots // 2)
    return attend_whole(q, body, mask, direct, kv_heads, piece, functools.partial(first, "v") if cut else None)


def attend_body(q, kv_heads: int, view: LayerView, tokens: NewTokens, carry: dict) -> tuple[Partial, dict]:
    """Attention to the encoded tokens that lie here, one block of every row at a time. `carry` is [B, slots_here, W]
    per name: what the layer below reconstructed for each body token, replaced block by block by this layer's."""
    frame = view.run.wiring.frame
    if frame is not None:  # once for all of the body, here and at the end
        q = frame.queries(view.constants, q)
    found, carry = _attend_in_frame(q, kv_heads, view, tokens, carry)
    if frame is not None:
        found = found._replace(out=frame.outputs(view.constants, found.out))
    return found, carry


def _attend_in_frame(q, kv_heads: int, view: LayerView, tokens: NewTokens, carry: dict) -> tuple[Partial, dict]:
    """`attend_body` with queries and outputs in the body's frame."""
    run, wiring = view.run, view.run.wiring
    shared = wiring.shared if wiring.shared is not None and q.shape[1] <= wiring.shared.most else None
    # Where tokens lie in a ring, are evicted or dealt, those that a query sees are not next to each other.
    in_order = not run.wraps and tokens.stored is None and run.deal.parts == 1
    kernels = view.chunks if in_order else "off"

    few = q.shape[1] <= MOST_QUERIES and not run.wraps and tokens.stored is None

    def by_blocks():
        if run.static and few and not wiring.carry and _reached(view) <= MOST_PARTS * AT_ONCE:
            return _attend_decoded(q, kv_heads, view, tokens, shared), carry
        width = None if shared is None else shared.width
        apart = bool(wiring.carry) or kernels in ("splash", "interpret")
        size = large_block(q, run.reading, run.slots_here, kernels, apart)
        blocks = _body_blocks(view, tokens, size, shared)
        alike = _alike(view, tokens)
        return attend_blocks(q, kv_heads, *blocks, carry, width, kernels, alike, run.slots_here)

    if wiring.direct is not None and few:
        return _attend_whole(q, kv_heads, view, tokens, wiring.direct), carry
    # Kernels give what attention over blocks gives: means of shared values where a method has such.
    short = kernels == "off" or q.shape[1] < MANY_QUERIES
    if wiring.packed is not None and short and shared is wiring.shared and not run.wraps and tokens.stored is None:
        found = _attend_packed(q, view, tokens, wiring.packed, lambda: by_blocks()[0])
    else:
        found, carry = by_blocks()
    if shared is not None:
        found = found._replace(out=shared.finish(view.weights, view.constants, found.out))
    return found, carry


def weigh(q, view: LayerView, tokens: NewTokens, lse, carry: dict) -> Received:
    """What the valid queries gave each token, once `lse` is known: a second pass over the scores. `carry` is what
    `attend_body` was given."""
    valid = (jnp.arange(q.shape[1])[None] < tokens.counts[:, None])[:, :, None]
    sources, positions, real = _side_by_side(view, tokens)
    k, _ = _expanded(view, sources, positions)
    exact = received(q, k, _seen(view, tokens, positions, real) & valid, lse)
    read_block, first, last = _body_blocks(view, tokens, view.run.reading)
    frame = view.run.wiring.frame
    turned = q if frame is None else frame.queries(view.constants, q)

    def step(j, loop):
        body, carry = loop
        k, _, mask, carry = read_block(j, carry)
        part = received(turned, k, mask & valid, lse)
        return jax.lax.dynamic_update_slice_in_dim(body, part, j * view.run.reading, 1), carry

    body = jnp.zeros((q.shape[0], view.run.slots))
    body, _ = jax.lax.fori_loop(first, last, step, (body, carry))
    return Received(exact, body[:, : tokens.stored.shape[1]])
