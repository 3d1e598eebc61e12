"""Decode attention on packed keys and values in plain jnp, one block at a time: oracle, fallback and the path on CPUs.

Scales and minima are applied in the loop that unpacks the codes: that loop is bound by what it writes, and folding them
into queries, scores and softmax weights would take operations of their own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from kvqjax.ops.attention import Partial
from kvqjax.ops.layout import from_bits, split_bits, stripe, unpack
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
        slot = (token + _numbers(block, spec))[None, None]
        low, high = (x[..., None, None] for x in (start, stop))
        seen = (slot >= low) & (slot < high) & (slot >= j * block)
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
    along = ("value_scale", "value_low", *(("key_codes",) if spec.striped else ()))

    def rows(array, first):
        batch, share, lanes = array.shape[1], slots // array.shape[2], array.shape[3]
        return keep(jax.lax.dynamic_slice(array, (layer, 0, first // share, 0), (1, batch, block // share, lanes)))[0]

    def tokens(array, first):
        share = slots // array.shape[3]
        starts, sizes = (layer, 0, 0, first // share), (1, *array.shape[1:3], block // share)
        return keep(jax.lax.dynamic_slice(array, starts, sizes))[0]

    def read(name: str, after: Array):
        cut = tokens if name in along else rows
        return jax.tree.map(lambda array: cut(array, known_after(after, token)), getattr(body, name))

    return read


def _unpacked(words: tuple[UInt[Array, "B _ W"], ...], bits: int, parts: int) -> Float[Array, "B parts S W/parts"]:
    """Unpack codes as float32, each of the `parts` lane slices by itself, so that words are transposed and not
    codes."""
    return _joined([unpack(_slices(x, parts), part) for x, part in zip(words, split_bits(bits), strict=True)], bits)


def _joined(codes: list[UInt[Array, "*S"]], bits: int) -> Float[Array, "*S"]:
    """Put the plane sets of codes together, as float32."""
    found, shift = jnp.uint32(0), 0
    for x, part in zip(codes, split_bits(bits), strict=True):
        found, shift = found | (x << shift), shift + part
    return found.astype(jnp.int32).astype(jnp.float32)  # converting unsigned integers is slow on x86


def _stripes(words: tuple[UInt[Array, "B W _"], ...], spec: PackedSpec, stretch: int) -> Float[Array, "B K n D r"]:
    """Unpack codes in stripes as float32, `stretch` tokens at a time: tokens stay on the last axis."""
    found = []
    for x, bits in zip(words, split_bits(spec.key_bits), strict=True):
        x = x.reshape(x.shape[0], spec.kv_heads, spec.head_dim, -1, 1, stripe(bits) // stretch, stretch)
        x = x.transpose(0, 1, 3, 4, 5, 2, 6)
        shifts = np.arange(0, 32, bits, dtype=np.uint32).reshape(1, 1, 1, -1, 1, 1, 1)
        codes = (x >> shifts) & jnp.uint32((1 << bits) - 1)
        found.append(codes.reshape(*codes.shape[:2], -1, *codes.shape[-2:]))
    return _joined(found, spec.key_bits)


def _slices(rows: Array, parts: int) -> Array:
    """Reshape [B, rows, W] to [B, parts, rows, W/parts]."""
    return rows.reshape(*rows.shape[:2], parts, -1).transpose(0, 2, 1, 3)


def _floats(x: Array, spec: PackedSpec) -> Float[Array, "*S"]:
    return from_bits(x, spec.scales).astype(jnp.float32)


def _stretch(spec: PackedSpec) -> int:
    """Count the tokens that share a key scale and lie side by side."""
    return min(spec.key_group, *map(stripe, split_bits(spec.key_bits))) if spec.striped else spec.key_group


def _numbers(block: int, spec: PackedSpec) -> Int[Array, "n r"]:
    """Number a block's tokens, stretch by stretch, by sums alone: loops that divide are not vectorised."""
    shape = block // _stretch(spec), _stretch(spec)
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0) * shape[1] + jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def _scores(grouped: Float[Array, "B K M D"], read, spec: PackedSpec) -> Float[Array, "B K M n r"]:
    """Decode keys and multiply queries by them. XLA for CPUs multiplies few queries fastest by keys whose tokens lie
    side by side; of others the tokens come first, which is faster than the queries first."""
    words, stretch = read("key_codes", grouped), _stretch(spec)
    stored = (_slices(read(name, grouped), spec.kv_heads) for name in ("key_scale", "key_low"))
    scale, low = (jnp.repeat(_floats(x, spec), spec.key_group // stretch, axis=2) for x in stored)
    if spec.striped:
        keys = _stripes(words, spec, stretch) * scale[..., None] + low[..., None]
        queries = jnp.broadcast_to(grouped[:, :, None], (*keys.shape[:3], *grouped.shape[2:]))
        return jnp.einsum("bknmd,bkndr->bknmr", queries, keys).swapaxes(2, 3)
    codes = _unpacked(words, spec.key_bits, spec.kv_heads)
    keys = codes.reshape(*scale.shape[:3], stretch, -1) * scale[..., None, :] + low[..., None, :]
    scores = jnp.einsum("bksd,bkmd->bksm", keys.reshape(codes.shape), grouped).swapaxes(2, 3)
    return scores.reshape(*scores.shape[:3], -1, stretch)


def _weighted(
    weights: Float[Array, "B K M S"], read, seen: Bool[Array, "B S"], spec: PackedSpec
) -> Float[Array, "B K M D"]:
    """Sum the values under their softmax weights. Nothing of them is decoded before the weights are there, when the
    decoded keys are no longer needed."""
    codes = _unpacked(read("value_codes", weights), spec.value_bits, spec.kv_heads)

    def own(name):  # what is stored of every group of channels, for each channel of a head
        by_slice = jnp.repeat(_floats(read(name, weights), spec), spec.value_group // spec.value_slice, axis=1)
        by_slice = by_slice.reshape(*codes.shape[:2], -1, codes.shape[2])
        return jnp.repeat(by_slice.swapaxes(-1, -2), spec.value_slice, axis=-1)

    values = codes * own("value_scale") + own("value_low")
    return jnp.einsum("bkms,bksd->bkmd", weights, jnp.where(seen[:, None, :, None], values, 0.0))


def _attend_block(state, grouped, read, seen, spec: PackedSpec):
    """Fold one block into the online softmax (running maximum, running sum of the weights, running sum of the values).
    `seen` is [B, T, n, r]."""
    peak, total, acc = state
    scores = _scores(grouped, read, spec)
    mask = jnp.repeat(seen, scores.shape[2] // seen.shape[1], axis=1)[:, None]
    scores = jnp.where(mask, scores, -jnp.inf)
    raised = jnp.maximum(peak, scores.max((-1, -2)))
    # A finite stand-in for the peak of a row that has seen nothing keeps exp(-inf - -inf) from becoming NaN.
    safe = jnp.where(jnp.isneginf(raised), 0.0, raised)
    weights, decay = jnp.exp(scores - safe[..., None, None]), jnp.exp(peak - safe)
    flat = weights.reshape(*weights.shape[:3], -1)
    acc = acc * decay[..., None] + _weighted(flat, read, seen.any(1).reshape(len(flat), -1), spec)
    return raised, total * decay + weights.sum((-1, -2)), acc


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
