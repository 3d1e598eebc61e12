"""Decode attention on packed keys and values in plain jnp, one block at a time: oracle, fallback and the path on CPUs.

With key codes c, scale s and minimum m per channel of a group, and value codes e, scale r and minimum n per token:

    q . k_t  = q . (c_t * s) + q . m                       the second term is one product per group of tokens
    sum_t p_t v_t = sum_t p_t (e_t * r_t) + sum_t p_t n_t   the second one number per group of channels

Scales are multiplied onto the codes in the loop that unpacks them, where folding them into queries and softmax weights
would make the matrix products as small as a group: those of keys, and of values where a head has several groups."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from kvqjax.ops.attention import Partial
from kvqjax.ops.layout import from_bits, split_bits, unpack
from kvqjax.ops.xla import known_after, row_major
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec, check, family

__all__ = ["at_once", "packed_attention"]

AT_ONCE = 4096  # tokens of all rows: they outweigh an operation's start
NUMBERS = 2**20  # of their keys or scores, which stay in a CPU's cache


def packed_attention(
    q: Float[Array, "B T H D"],
    body: PackedBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: PackedSpec,
) -> Partial:
    """Attend to the packed tokens of one layer. Query t of row b sees body tokens start[b, t] <= s < stop[b, t] (none
    where start >= stop). `start` is 0 without a sliding window, `stop` the row's valid tokens for a decoding step. `q`
    carries its rotation and not yet the D^-1/2.

    Only blocks that some query sees are read. Tokens in them that no query sees may hold anything (0 x inf would be
    NaN)."""
    if not spec.plain:
        raise ValueError(f"{spec}: this reads uniform codes of keys after RoPE only")
    check(q, body, spec)
    slots = body.value_scale.shape[-1]
    block = at_once(spec, q.shape, slots)
    grouped = _grouped(q, spec)
    first, last = start.min() // block, jnp.minimum(-(-stop.max() // block), -(-slots // block))

    def step(j, state):
        token = jnp.minimum(j * block, slots - block)
        slot = (token + jnp.arange(block))[None, None]
        seen = (slot >= start[..., None]) & (slot < stop[..., None]) & (slot >= j * block)
        return _attend_block(state, grouped, _reader(body, layer, token, block, spec), seen, spec)

    shape = grouped.shape[:-1]
    state = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(grouped.shape, jnp.float32))
    return _finish(jax.lax.fori_loop(first, last, step, state), q.shape)


def at_once(spec: PackedSpec, shape: tuple[int, ...], slots: int) -> int:
    """Choose how many of a row's `slots` tokens queries of this shape decode at a time: whole blocks, and at most half
    of them. What no turn of a loop changes, XLA would decode before the loop."""
    batch, length, heads, _ = shape
    most = min(AT_ONCE, NUMBERS // max(spec.width, length * heads)) // (batch * spec.block)
    half = -(-slots // (2 * spec.block))
    return min(max(1, min(most, half)) * spec.block, slots)


def _grouped(q: Float[Array, "B T H D"], spec: PackedSpec) -> Float[Array, "B K M D"]:
    """Scale the queries, in float32, and put the M = T*G rows of one KV head together."""
    batch, length, heads, dim = q.shape
    q = q.astype(jnp.float32).reshape(batch, length, spec.kv_heads, heads // spec.kv_heads, dim) * dim**-0.5
    return q.transpose(0, 2, 1, 3, 4).reshape(batch, spec.kv_heads, -1, dim)


def _reader(body: PackedBody, layer, token, block: int, spec: PackedSpec) -> Callable[[str, Array], Any]:
    """Make what slices a stored array, still packed, of `block` tokens from `token` on, of one layer: (the array's name
    in the body, what is ready before). A CPU slices in the loop that unpacks, which a layout would cut in two."""
    slots, keep = body.value_scale.shape[-1], (lambda x: x) if family(spec.target) == "cpu" else row_major

    def rows(array, first):
        batch, share, lanes = array.shape[1], slots // array.shape[2], array.shape[3]
        return keep(jax.lax.dynamic_slice(array, (layer, 0, first // share, 0), (1, batch, block // share, lanes)))[0]

    def tokens(array, first):
        return keep(jax.lax.dynamic_slice(array, (layer, 0, 0, first), (1, *array.shape[1:3], block)))[0]

    def read(name: str, after: Array):
        cut = tokens if name in ("value_scale", "value_low") else rows
        return jax.tree.map(lambda array: cut(array, known_after(after, token)), getattr(body, name))

    return read


def _unpacked(words: tuple[UInt[Array, "B _ W"], ...], bits: int, parts: int) -> Float[Array, "B parts S W/parts"]:
    """Unpack codes as float32, each of the `parts` lane slices by itself, so that words are transposed and not
    codes."""
    codes, shift = jnp.uint32(0), 0
    for plane_set, part in zip(words, split_bits(bits), strict=True):
        codes = codes | (unpack(_slices(plane_set, parts), part) << shift)
        shift += part
    return codes.astype(jnp.int32).astype(jnp.float32)  # converting unsigned integers is slow on x86


def _slices(rows: Array, parts: int) -> Array:
    """Reshape [B, rows, W] to [B, parts, rows, W/parts]."""
    return rows.reshape(*rows.shape[:2], parts, -1).transpose(0, 2, 1, 3)


def _floats(x: Array, spec: PackedSpec) -> Float[Array, "*S"]:
    return from_bits(x, spec.scales).astype(jnp.float32)


def _scores(grouped, read, spec: PackedSpec) -> Float[Array, "B K M S"]:
    codes = _unpacked(read("key_codes", grouped), spec.key_bits, spec.kv_heads)
    stored = (read(name, grouped) for name in ("key_scale", "key_low"))
    scale, low = (_floats(_slices(x, spec.kv_heads), spec) for x in stored)
    groups = codes.reshape(*scale.shape[:3], spec.key_group, spec.head_dim)
    scaled = (groups * scale[..., None, :]).reshape(codes.shape)
    # Tokens first: contracting the minor axes of codes and queries in this order is 3 x faster on XLA:CPU.
    scores = jnp.einsum("bksd,bkmd->bksm", scaled, grouped)
    zero = jnp.einsum("bknd,bkmd->bknm", low, grouped)
    groups = scores.reshape(*scale.shape[:3], spec.key_group, -1) + zero[..., None, :]
    return groups.reshape(scores.shape).swapaxes(-1, -2)


def _weighted(
    weights: Float[Array, "B K M S"], read, seen: Bool[Array, "B T S"], spec: PackedSpec
) -> Float[Array, "B K M D"]:
    """Sum the values under their softmax weights: one product a head with the codes, and one with the minima. Nothing
    of them is decoded before the weights are there, when the decoded keys are no longer needed."""
    stored = (_floats(read(name, weights), spec) for name in ("value_scale", "value_low"))
    scale, low = (_by_head(jnp.where(seen.any(1)[:, None], x, 0.0), spec) for x in stored)
    codes = _unpacked(read("value_codes", weights), spec.value_bits, spec.kv_heads)
    minima = jnp.einsum("bkms,bkns->bkmn", weights, low)
    if scale.shape[2] == 1:  # of all of a head's channels
        weights = weights * scale
    else:
        codes = codes * jnp.repeat(scale.swapaxes(-1, -2), spec.value_slice, axis=-1)  # [B, K, S, D]
    return jnp.einsum("bkms,bksd->bkmd", weights, codes) + jnp.repeat(minima, spec.value_slice, axis=-1)


def _by_head(x: Float[Array, "B N S"], spec: PackedSpec) -> Float[Array, "B K n S"]:
    """Give every slice of a head's channels the numbers of its value group."""
    parts = spec.width // spec.value_slice
    owner = jnp.arange(parts) * spec.value_slice // spec.value_group
    return x[:, owner].reshape(x.shape[0], spec.kv_heads, -1, x.shape[-1])


def _attend_block(state, grouped, read, seen, spec: PackedSpec):
    """Fold one block into the online softmax (running maximum, running sum of the weights, running sum of the values).
    `seen` is [B, T, S]."""
    peak, total, acc = state
    scores = _scores(grouped, read, spec)
    mask = jnp.repeat(seen, scores.shape[2] // seen.shape[1], axis=1)[:, None]
    scores = jnp.where(mask, scores, -jnp.inf)
    raised = jnp.maximum(peak, scores.max(-1))
    # A finite stand-in for the peak of a row that has seen nothing keeps exp(-inf - -inf) from becoming NaN.
    safe = jnp.where(jnp.isneginf(raised), 0.0, raised)
    weights, decay = jnp.exp(scores - safe[..., None]), jnp.exp(peak - safe)
    acc = acc * decay[..., None] + _weighted(weights, read, seen, spec)
    return raised, total * decay + weights.sum(-1), acc


def _finish(state, shape: tuple[int, ...]) -> Partial:
    """Normalise, and bring rows [B, K, T*G] back to [B, T, H]."""
    peak, total, acc = state
    batch, length, heads, dim = shape
    kv_heads = acc.shape[1]
    floor = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    lse = jnp.where(total > 0, jnp.log(floor) + peak, -jnp.inf)
    out = (acc / floor[..., None]).reshape(batch, kv_heads, length, heads // kv_heads, dim)
    lse = lse.reshape(batch, kv_heads, length, heads // kv_heads).transpose(0, 2, 1, 3)
    return Partial(out.transpose(0, 2, 1, 3, 4).reshape(shape), lse.reshape(batch, length, heads))
