"""Attention to a whole body at once, from fields stored head by head (kvqjax/head_major.py): no loop over blocks, so
that XLA for GPUs reads every array once, in a handful of products.

    scores_s = q . k_s      k_s[d] = (n_s[d] + offset) scale[d] + low[d]    per channel, groups of tokens (KIVI's keys)
    out = sum_s p_s v_s     v_s[d] = (n_s[d] + offset) scale_s + low_s      per token, groups of channels (its values)

Scales fold into the queries and the softmax weights, offsets and minima become one product a group. X = T * G query
rows of a KV head, N groups of g tokens, M groups of channels a head.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvqjax.attention import Partial
from kvqjax.codecs import CodecSpec, Exact, Uniform
from kvqjax.config import KVShape
from kvqjax.head_major import HALF, offset, tokens_per_row
from kvqjax.layout import from_bits

__all__ = ["MOST_QUERIES", "Direct", "attend_whole", "direct_form"]

MOST_QUERIES = 16  # new tokens; more would make the scores of a whole body too large
PARTS = 64  # pieces in which a sum over tokens is made, so that a GPU has work for all its cores

Stored = dict  # field name -> arrays of one layer, [1, B, ...]


class Direct(NamedTuple):
    """How a whole body is read, both from one layer's stored fields:

    scores(q [B, K, X, D], fields) -> [B, K, X, S] float32
    values(weights [B, K, X, S] float32, fields, dtype) -> [B, K, X, D] float32"""

    scores: Callable
    values: Callable


def direct_form(key: CodecSpec, value: CodecSpec, rope: str, shape: KVShape) -> Direct | None:
    """How the bodies of these codecs are read at once; None for what cannot be."""
    if rope != "post" and shape.rope is not None:
        return None
    scores, values = _key_form(key), _value_form(value, shape)
    return None if scores is None or values is None else Direct(scores, values)


def _key_form(spec: CodecSpec) -> Callable | None:
    if isinstance(spec, Exact):
        return lambda q, fields: jnp.einsum("bkxd,bksd->bkxs", q, fields["x"][0][0], preferred_element_type=jnp.float32)
    if isinstance(spec, Uniform) and spec.along == "tokens":
        return lambda q, fields: _channel_scores(spec, q, fields)
    return None


def _value_form(spec: CodecSpec, shape: KVShape) -> Callable | None:
    if isinstance(spec, Exact):
        return lambda weights, fields, dtype: _summed(weights.astype(dtype), fields["x"][0][0])
    if not isinstance(spec, Uniform) or spec.along != "channels":
        return None
    group = min(spec.group, shape.kv_width)
    if group % shape.head_dim and shape.head_dim % group:
        return None
    return lambda weights, fields, dtype: _token_values(spec, weights, fields, dtype)


def _summed(weights: Float[Array, "B K X S"], v: Array) -> Float[Array, "B K X D"]:
    """sum_s weights_s v_s, in PARTS pieces where they divide S."""
    size, dtype = weights.shape[3], weights.dtype
    if size % PARTS:
        return jnp.einsum("bkxs,bksd->bkxd", weights, v.astype(dtype), preferred_element_type=jnp.float32)
    weights = weights.reshape(*weights.shape[:3], PARTS, -1)
    v = v.reshape(*v.shape[:2], PARTS, -1, v.shape[3]).astype(dtype)
    return jnp.einsum("bkxps,bkpsd->bkpxd", weights, v, preferred_element_type=jnp.float32).sum(2)


def _planes(bits: int, stored: Array, dtype) -> list[Array]:
    """Signed codes in `dtype`, [B, K, rows, D], of each plane of the stored numbers, less half a code's range each."""
    n = stored.astype(dtype)
    if tokens_per_row(bits) == 1:
        return [n]
    upper = jnp.floor(n * jnp.asarray(0.25, dtype))  # c1 - 2
    return [n - upper * jnp.asarray(4, dtype), upper]


def _lift(bits: int) -> list[float]:
    """What must be added to the numbers of `_planes` to get codes."""
    return [float(offset(bits))] if tokens_per_row(bits) == 1 else [0.0, 2.0]


def _channel_scores(spec: Uniform, q: Float[Array, "B K X D"], fields: Stored) -> Float[Array, "B K X S"]:
    """Scores of keys that are uniform per channel in groups of tokens."""
    (codes,), (scale,), (low,) = fields["codes"], fields["scale"], fields["low"]
    scale, low = (_by_head(from_bits(x[0], spec.dtype), q.shape[1]) for x in (scale, low))  # [B, K, N, D]
    wide = q.astype(jnp.float32)
    scaled = (wide[:, :, :, None] * scale[:, :, None].astype(jnp.float32)).astype(q.dtype)  # [B, K, X, N, D]
    added = jnp.einsum("bkxd,bknd->bkxn", wide, low.astype(jnp.float32))
    total = scaled.astype(jnp.float32).sum(-1)
    planes = len(_lift(spec.bits))
    here = HALF // spec.group if planes == 2 else scale.shape[2]  # groups of one plane side by side
    scaled, added, total = (x.reshape(*x.shape[:3], -1, planes, here, *x.shape[4:]) for x in (scaled, added, total))
    out = []
    for number, (n, lift) in enumerate(zip(_planes(spec.bits, codes[0], q.dtype), _lift(spec.bits), strict=True)):
        n = n.reshape(*n.shape[:2], -1, here, spec.group, n.shape[3])
        part = jnp.einsum("bkxjnd,bkjngd->bkxjng", scaled[:, :, :, :, number], n, preferred_element_type=jnp.float32)
        constant = added[:, :, :, :, number] + lift * total[:, :, :, :, number]
        out.append(part + constant[..., None])
    return jnp.stack(out, axis=4).reshape(*q.shape[:3], -1)


def _by_head(x: Array, heads: int) -> Array:
    """[B, N, K*D] as [B, K, N, D]."""
    return jnp.swapaxes(x.reshape(*x.shape[:2], heads, -1), 1, 2)


def _token_values(spec: Uniform, weights, fields: Stored, dtype) -> Float[Array, "B K X D"]:
    """Weighted sums of values that are uniform per token in groups of channels."""
    (codes,), (scale,), (low,) = fields["codes"], fields["scale"], fields["low"]
    heads, dim = codes.shape[2], codes.shape[4]
    scale, low = (_groups_of_heads(from_bits(x[0], spec.dtype), heads) for x in (scale, low))
    each = scale.shape[2]  # M, groups of channels a head
    scaled = weights[:, :, :, None] * scale[:, :, None].astype(jnp.float32)  # [B, K, X, M, S]
    added = jnp.einsum("bkxs,bkms->bkxm", weights, low.astype(jnp.float32))
    planes, out = len(_lift(spec.bits)), 0.0
    scaled = scaled.reshape(*scaled.shape[:4], -1, planes, HALF) if planes == 2 else scaled[..., None, None, :]
    for number, (n, lift) in enumerate(zip(_planes(spec.bits, codes[0], dtype), _lift(spec.bits), strict=True)):
        part = scaled[..., number, :].reshape(*scaled.shape[:4], -1)  # [B, K, X, M, rows]
        added = added + lift * part.astype(dtype).astype(jnp.float32).sum(-1)
        rows = part.reshape(*part.shape[:2], -1, part.shape[4]).astype(dtype)
        found = _summed(rows, n).reshape(*part.shape[:4], each, dim // each)
        # Every group's weights were summed with all channels: one product reads the codes once, and M is small.
        out = out + jnp.diagonal(found, axis1=3, axis2=4).swapaxes(-1, -2)
    return (out + added[..., None]).reshape(*weights.shape[:3], dim)


def _groups_of_heads(x: Float[Array, "B N S"], heads: int) -> Float[Array, "B K M S"]:
    """Numbers of groups of channels by KV head; a group of several heads is each one's."""
    if x.shape[1] < heads:
        x = jnp.repeat(x, heads // x.shape[1], axis=1)
    return x.reshape(x.shape[0], heads, -1, x.shape[2])


def attend_whole(
    q: Float[Array, "B T H D"], body: dict[str, Stored], mask: Bool[Array, "B T S"], direct: Direct, kv_heads: int
) -> Partial:
    """Attention of few new tokens to all S slots of one layer's body, of which query t of row b sees `mask[b, t]`."""
    batch, length, heads, dim = q.shape
    rows = q.reshape(batch, length, kv_heads, -1, dim).transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, dim)
    scores = direct.scores(rows * jnp.asarray(dim**-0.5, q.dtype), body["k"])
    seen = jnp.repeat(mask, heads // kv_heads, axis=1)[:, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    peak = scores.max(-1)
    safe = jnp.where(jnp.isneginf(peak), 0.0, peak)
    weights = jnp.exp(scores - safe[..., None])
    total = weights.sum(-1)
    out = direct.values(weights, body["v"], q.dtype) / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    lse = jnp.where(total > 0, jnp.log(jnp.maximum(total, jnp.finfo(jnp.float32).tiny)) + peak, -jnp.inf)

    def by_token(x):
        x = x.reshape(batch, kv_heads, length, heads // kv_heads, *x.shape[3:])
        return jnp.moveaxis(x, 2, 1).reshape(batch, length, heads, *x.shape[4:])

    return Partial(by_token(out), by_token(lse))
