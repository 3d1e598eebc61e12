"""Decode attention on packed keys and values in plain jnp, one block at a time: oracle, fallback and the path on CPUs.

With key codes c, scale s and minimum m per channel of a group, and value codes e, scale r and minimum n per token:

    q . k_t  = q . (c_t * s) + q . m                       the second term is one product per group of tokens
    sum_t p_t v_t = sum_t p_t (e_t * r_t) + sum_t p_t n_t   the second one number per group of channels

Scales are multiplied onto the codes in the loop that unpacks them. On a CPU that is free, while folding them into
queries and softmax weights would make the matrix products as small as a group."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from kvqjax.ops.attention import Partial
from kvqjax.ops.layout import from_bits, split_bits, unpack
from kvqjax.ops.xla import row_major
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec, check

__all__ = ["packed_attention"]


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
    block = min(spec.block, slots)
    grouped = _grouped(q, spec)
    first, last = start.min() // block, jnp.minimum(-(-stop.max() // block), -(-slots // block))

    def step(j, state):
        token = jnp.minimum(j * block, slots - block)
        slot = (token + jnp.arange(block))[None, None]
        seen = (slot >= start[..., None]) & (slot < stop[..., None]) & (slot >= j * block)
        return _attend_block(state, grouped, _read(body, layer, token, block), seen, spec)

    shape = grouped.shape[:-1]
    state = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(grouped.shape, jnp.float32))
    return _finish(jax.lax.fori_loop(first, last, step, state), q.shape)


def _grouped(q: Float[Array, "B T H D"], spec: PackedSpec) -> Float[Array, "B K M D"]:
    """Scale the queries, in float32, and put the M = T*G rows of one KV head together."""
    batch, length, heads, dim = q.shape
    q = q.astype(jnp.float32).reshape(batch, length, spec.kv_heads, heads // spec.kv_heads, dim) * dim**-0.5
    return q.transpose(0, 2, 1, 3, 4).reshape(batch, spec.kv_heads, -1, dim)


def _read(body: PackedBody, layer, token, block: int) -> PackedBody:
    """Slice the stored arrays of `block` tokens from `token` on, of one layer, still packed."""
    slots = body.value_scale.shape[-1]

    def rows(array):
        batch, share, lanes = array.shape[1], slots // array.shape[2], array.shape[3]
        return row_major(
            jax.lax.dynamic_slice(array, (layer, 0, token // share, 0), (1, batch, block // share, lanes))
        )[0]

    def tokens(array):
        return row_major(jax.lax.dynamic_slice(array, (layer, 0, 0, token), (1, *array.shape[1:3], block)))[0]

    key_codes, key_scale, key_low = jax.tree.map(rows, (body.key_codes, body.key_scale, body.key_low))
    value_codes = jax.tree.map(rows, body.value_codes)
    return PackedBody(key_codes, key_scale, key_low, value_codes, tokens(body.value_scale), tokens(body.value_low))


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


def _scores(grouped, block: PackedBody, spec: PackedSpec) -> Float[Array, "B K M S"]:
    codes = _unpacked(block.key_codes, spec.key_bits, spec.kv_heads)
    scale, low = (_floats(_slices(x, spec.kv_heads), spec) for x in (block.key_scale, block.key_low))
    groups = codes.reshape(*scale.shape[:3], spec.key_group, spec.head_dim)
    scaled = (groups * scale[..., None, :]).reshape(codes.shape)
    # Tokens first: contracting the minor axes of codes and queries in this order is 3 x faster on XLA:CPU.
    scores = jnp.einsum("bksd,bkmd->bksm", scaled, grouped)
    zero = jnp.einsum("bknd,bkmd->bknm", low, grouped)
    groups = scores.reshape(*scale.shape[:3], spec.key_group, -1) + zero[..., None, :]
    return groups.reshape(scores.shape).swapaxes(-1, -2)


def _weighted(
    weights: Float[Array, "B K M S"], block: PackedBody, seen: Bool[Array, "B T S"], spec: PackedSpec
) -> Float[Array, "B K M D"]:
    """Sum the values under their softmax weights: one product a head with the codes times their scales, and one with
    the minima."""
    stored = (_floats(x, spec) for x in (block.value_scale, block.value_low))
    scale, low = (_by_head(jnp.where(seen.any(1)[:, None], x, 0.0), spec) for x in stored)
    spread = jnp.repeat(scale.swapaxes(-1, -2), spec.value_slice, axis=-1)  # [B, K, S, D]
    codes = _unpacked(block.value_codes, spec.value_bits, spec.kv_heads) * spread
    minima = jnp.einsum("bkms,bkns->bkmn", weights, low)
    return jnp.einsum("bkms,bksd->bkmd", weights, codes) + jnp.repeat(minima, spec.value_slice, axis=-1)


def _by_head(x: Float[Array, "B N S"], spec: PackedSpec) -> Float[Array, "B K n S"]:
    """Give every slice of a head's channels the numbers of its value group."""
    parts = spec.width // spec.value_slice
    owner = jnp.arange(parts) * spec.value_slice // spec.value_group
    return x[:, owner].reshape(x.shape[0], spec.kv_heads, -1, x.shape[-1])


def _attend_block(state, grouped, block: PackedBody, seen, spec: PackedSpec):
    """Fold one block into the online softmax (running maximum, running sum of the weights, running sum of the values).
    `seen` is [B, T, S]."""
    peak, total, acc = state
    scores = _scores(grouped, block, spec)
    mask = jnp.repeat(seen, scores.shape[2] // seen.shape[1], axis=1)[:, None]
    scores = jnp.where(mask, scores, -jnp.inf)
    raised = jnp.maximum(peak, scores.max(-1))
    # A finite stand-in for the peak of a row that has seen nothing keeps exp(-inf - -inf) from becoming NaN.
    safe = jnp.where(jnp.isneginf(raised), 0.0, raised)
    weights, decay = jnp.exp(scores - safe[..., None]), jnp.exp(peak - safe)
    acc = acc * decay[..., None] + _weighted(weights, block, seen, spec)
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
