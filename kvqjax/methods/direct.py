"""Attention to a whole body at once, from fields stored head by head (kvqjax/head_major.py): no loop over blocks, so
that XLA for GPUs reads every array once, in a handful of products.

    scores_s = q . k_s      k_s[d] = (n_s[d] + offset) scale[d] + low[d]    per channel, groups of tokens (KIVI's keys)
    out = sum_s p_s v_s     v_s[d] = (n_s[d] + offset) scale_s + low_s      per token, groups of channels (its values)

Keys may be per token too (OSCAR), and keys or values of either kind times a factor of their token (OScaR and KVarN's
keys) or of their channel and group of tokens (KVarN's values).

Scales fold into the queries and the softmax weights, offsets and minima become one product a group. X = T * G query
rows of a KV head, N groups of g tokens, M groups of channels a head.

Where a stored number holds two tokens' codes, scores and weights stay apart by plane, [.., S / planes] each:
putting them in order would write and read them once more.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvqjax.attention import Partial
from kvqjax.codecs import CodecSpec, Exact, Uniform
from kvqjax.codecs.balanced import Balanced
from kvqjax.codecs.clipped import Clipped
from kvqjax.codecs.scaled import Scaled
from kvqjax.config import KVShape
from kvqjax.head_major import HALF, offset, tokens_per_row
from kvqjax.layout import from_bits

__all__ = ["MOST_QUERIES", "Direct", "attend_whole", "direct_form"]

MOST_QUERIES = 16  # new tokens; more would make the scores of a whole body too large
PRODUCTS = 512  # that a sum over tokens is cut into, over rows and heads, so that a GPU has work for all its cores

Stored = dict  # field name -> arrays of one layer, [1, B, ...]


class Direct(NamedTuple):
    """How a whole body is read, both from one layer's stored fields:

    scores(q [B, K, X, D], fields) -> planes of [B, K, X, S] float32
    values(planes of weights [B, K, X, S] float32, fields, dtype) -> [B, K, X, D] float32"""

    scores: Callable
    values: Callable


def direct_form(key: CodecSpec, value: CodecSpec, rope: str, shape: KVShape) -> Direct | None:
    """How the bodies of these codecs are read at once; None for what cannot be."""
    if rope != "post" and shape.rope is not None:
        return None
    scores, values = _key_form(key, shape), _value_form(value, shape)
    return None if scores is None or values is None else Direct(scores, values)


def _key_form(spec: CodecSpec, shape: KVShape) -> Callable | None:
    if isinstance(spec, Clipped):
        return _key_form(spec.inner, shape)
    if isinstance(spec, Scaled | Balanced):
        inner = _key_form(spec.inner if isinstance(spec, Scaled) else spec.inner(shape.kv_width), shape)
        return None if inner is None else lambda q, fields: _token_factors(spec.dtype, inner(q, fields), fields)
    if isinstance(spec, Exact):
        return lambda q, fields: [
            jnp.einsum("bkxd,bksd->bkxs", q, fields["x"][0][0], preferred_element_type=jnp.float32)
        ]
    if isinstance(spec, Uniform) and spec.along == "tokens":
        return lambda q, fields: _channel_scores(spec, q, fields)
    if isinstance(spec, Uniform) and spec.group % shape.head_dim == 0:
        return lambda q, fields: _token_scores(spec, q, fields)
    return None


def _value_form(spec: CodecSpec, shape: KVShape) -> Callable | None:
    if isinstance(spec, Exact):
        return lambda weights, fields, dtype: _summed(_in_planes(weights, 1)[0].astype(dtype), fields["x"][0][0])
    if isinstance(spec, Clipped):
        return _value_form(spec.inner, shape)
    if isinstance(spec, Balanced) and spec.along == "channels":
        return lambda weights, fields, dtype, *_: _balanced_values(spec, weights, fields, dtype)
    if not isinstance(spec, Uniform) or spec.along != "channels":
        return None
    group = min(spec.group, shape.kv_width)
    if group % shape.head_dim and shape.head_dim % group:
        return None
    return lambda weights, fields, dtype: _token_values(spec, weights, fields, dtype)


def _by_plane(x: Array, planes: int) -> list[Array]:
    """[.., S] as `planes` arrays [.., S / planes], tokens as kvqjax/head_major.py shares them out."""
    if planes == 1:
        return [x]
    x = x.reshape(*x.shape[:-1], -1, planes, HALF)
    return [x[..., plane, :].reshape(*x.shape[:-3], -1) for plane in range(planes)]


def _in_planes(pieces: list[Array], planes: int) -> list[Array]:
    """The same tokens in another number of planes."""
    if len(pieces) == planes:
        return pieces
    if planes > 1:
        return _by_plane(pieces[0], planes)
    split = [x.reshape(*x.shape[:-1], -1, HALF) for x in pieces]
    return [jnp.stack(split, -2).reshape(*pieces[0].shape[:-1], -1)]


def _summed(weights: Float[Array, "B K X S"], v: Array) -> Float[Array, "B K X D"]:
    """sum_s weights_s v_s, cut into pieces where they divide S."""
    size, dtype = weights.shape[3], weights.dtype
    parts = max(1, PRODUCTS // (weights.shape[0] * weights.shape[1]))
    if size % parts:
        return jnp.einsum("bkxs,bksd->bkxd", weights, v.astype(dtype), preferred_element_type=jnp.float32)
    weights = weights.reshape(*weights.shape[:3], parts, -1)
    v = v.reshape(*v.shape[:2], parts, -1, v.shape[3]).astype(dtype)
    return jnp.einsum("bkxps,bkpsd->bkpxd", weights, v, preferred_element_type=jnp.float32).sum(2)


def _readings(bits: int, stored: Array, dtype) -> list[tuple[Array, dict[int, float]]]:
    """(numbers in `dtype` [B, K, rows, D], {plane: factor}): a plane's codes are the numbers times its factors, summed,
    plus its entry in `_lifts`. Each number is one operation on what is stored, which XLA fuses into the product that
    reads it; a difference of two it would write out first."""
    n = stored.astype(dtype)
    if tokens_per_row(bits) == 1:
        return [(n, {0: 1.0})]
    return [(n, {0: 1.0}), (jnp.floor(n * jnp.asarray(0.25, dtype)), {0: -4.0, 1: 1.0})]


def _lifts(bits: int) -> list[float]:
    """What each plane's sum of readings lacks to be its code."""
    return [float(offset(bits))] if tokens_per_row(bits) == 1 else [0.0, 2.0]


def _channel_scores(spec: Uniform, q: Float[Array, "B K X D"], fields: Stored) -> list[Array]:
    """Scores of keys that are uniform per channel in groups of tokens."""
    (codes,), (scale,), (low,) = fields["codes"], fields["scale"], fields["low"]
    scale, low = (_by_head(from_bits(x[0], spec.dtype), q.shape[1]) for x in (scale, low))  # [B, K, N, D]
    wide, lifts = q.astype(jnp.float32), _lifts(spec.bits)
    scaled = (wide[:, :, :, None] * scale[:, :, None].astype(jnp.float32)).astype(q.dtype)  # [B, K, X, N, D]
    added = jnp.einsum("bkxd,bknd->bkxn", wide, low.astype(jnp.float32))
    here = HALF // spec.group if len(lifts) == 2 else scale.shape[2]  # groups of one plane side by side

    def groups(x):
        x = x.reshape(*x.shape[:3], -1, len(lifts), here, *x.shape[4:])
        return [x[:, :, :, :, plane] for plane in range(len(lifts))]

    rows, constants = groups(scaled), groups(added)
    out = [
        (constant + lift * row.astype(jnp.float32).sum(-1))[..., None]
        for row, constant, lift in zip(rows, constants, lifts, strict=True)
    ]
    for n, factors in _readings(spec.bits, codes[0], q.dtype):
        n = n.reshape(*n.shape[:2], -1, here, spec.group, n.shape[3])
        wanted = jnp.concatenate([rows[plane] for plane in factors], axis=2)
        part = jnp.einsum("bkxjnd,bkjngd->bkxjng", wanted, n, preferred_element_type=jnp.float32)
        for piece, (plane, factor) in zip(jnp.split(part, len(factors), axis=2), factors.items(), strict=True):
            out[plane] = out[plane] + factor * piece
    return [x.reshape(*q.shape[:3], -1) for x in out]


def _token_scores(spec: Uniform, q: Float[Array, "B K X D"], fields: Stored) -> list[Array]:
    """Scores of keys that are uniform per token, all channels of a head sharing a scale."""
    (codes,), lifts, wide = fields["codes"], _lifts(spec.bits), q.astype(jnp.float32)
    out = [lift * wide.sum(-1, keepdims=True) for lift in lifts]
    for n, factors in _readings(spec.bits, codes[0], q.dtype):
        part = jnp.einsum("bkxd,bksd->bkxs", q, n, preferred_element_type=jnp.float32)
        for plane, factor in factors.items():
            out[plane] = out[plane] + factor * part
    stored = (_of_tokens(fields[name], spec.dtype, codes.shape[2], len(lifts)) for name in ("scale", "low"))
    total = wide.sum(-1, keepdims=True)
    return [x * scale + total * low for x, scale, low in zip(out, *stored, strict=True)]


def _token_factors(dtype: str, scores: list[Array], fields: Stored) -> list[Array]:
    """Scores of keys that were divided by a factor of their token."""
    factors = _of_tokens(fields["factor"], dtype, scores[0].shape[1], len(scores))
    return [x * factor for x, factor in zip(scores, factors, strict=True)]


def _of_tokens(stored: tuple[Array, ...], dtype: str, heads: int, planes: int) -> list[Float[Array, "B K 1 S"]]:
    """A number per token and KV head, in planes; one of several heads is each one's."""
    found = _groups_of_heads(from_bits(stored[0][0], dtype).astype(jnp.float32), heads)
    return _by_plane(found, planes)


def _by_head(x: Array, heads: int) -> Array:
    """[B, N, K*D] as [B, K, N, D]."""
    return jnp.swapaxes(x.reshape(*x.shape[:2], heads, -1), 1, 2)


def _token_values(spec: Uniform, weights, fields: Stored, dtype) -> Float[Array, "B K X D"]:
    """Weighted sums of values that are uniform per token in groups of channels."""
    (codes,), (scale,), (low,) = fields["codes"], fields["scale"], fields["low"]
    heads, dim, lifts = codes.shape[2], codes.shape[4], _lifts(spec.bits)
    scale, low = (_groups_of_heads(from_bits(x[0], spec.dtype), heads) for x in (scale, low))
    lead, each = weights[0].shape[:3], scale.shape[2]  # M groups of channels a head
    weights, scales, lows = (
        _in_planes(weights, len(lifts)),
        *(_by_plane(x.astype(jnp.float32), len(lifts)) for x in (scale, low)),
    )
    rows, out = [], jnp.float32(0)
    for weight, scale, low, lift in zip(weights, scales, lows, lifts, strict=True):
        row = (weight[:, :, :, None] * scale[:, :, None]).astype(dtype)  # [B, K, X, M, S / planes]
        added = jnp.einsum("bkxs,bkms->bkxm", weight, low) + lift * row.astype(jnp.float32).sum(-1)
        rows.append(row.reshape(*lead[:2], lead[2] * each, -1))
        out = out + added[..., None]
    for n, factors in _readings(spec.bits, codes[0], dtype):
        part = _summed(jnp.concatenate([rows[plane] for plane in factors], axis=2), n)
        for piece, factor in zip(jnp.split(part, len(factors), axis=2), factors.values(), strict=True):
            # Every group's weights were summed with all channels: one product reads the codes once, and M is small.
            found = piece.reshape(*lead, each, each, dim // each)
            out = out + factor * jnp.diagonal(found, axis1=3, axis2=4).swapaxes(-1, -2)
    return out.reshape(*lead, dim)


def _balanced_values(spec: Balanced, weights, fields: Stored, dtype) -> Float[Array, "B K X D"]:
    """Weighted sums of values that are uniform per token and head, times a factor per channel of each group of tokens:
    groups are summed apart."""
    (codes,), lifts = fields["codes"], _lifts(spec.bits)
    heads, dim = codes.shape[2], codes.shape[4]
    planes, rows = len(lifts), codes.shape[3]
    here = min(spec.group, HALF)
    factor = _by_head(from_bits(fields["factor"][0][0], spec.dtype), heads).astype(jnp.float32)  # [B, K, N, D]
    factor = factor.reshape(*factor.shape[:2], -1, planes, HALF // here, dim) if planes > 1 else factor
    factors = (
        [factor[:, :, :, p].reshape(*factor.shape[:2], -1, dim) for p in range(planes)] if planes > 1 else [factor]
    )
    scales, lows = (_of_tokens(fields[name], spec.dtype, heads, planes) for name in ("scale", "low"))
    weights = [
        jnp.pad(weight, ((0, 0), (0, 0), (0, 0), (0, rows - weight.shape[3]))) for weight in _in_planes(weights, planes)
    ]

    def apart(x):  # [.., rows] by groups
        return x.reshape(*x.shape[:-1], -1, here)

    scaled = [(weight * scale).astype(dtype) for weight, scale in zip(weights, scales, strict=True)]
    sums = [
        apart(weight * low + lift * row.astype(jnp.float32)).sum(-1)
        for weight, low, row, lift in zip(weights, lows, scaled, lifts, strict=True)
    ]
    out = sum(jnp.einsum("bkxj,bkjd->bkxd", x, factor) for x, factor in zip(sums, factors, strict=True))
    for n, shares in _readings(spec.bits, codes[0], dtype):
        n = n.reshape(*n.shape[:2], -1, here, dim)
        for plane, share in shares.items():
            part = jnp.einsum("bkxjg,bkjgd->bkxjd", apart(scaled[plane]), n, preferred_element_type=jnp.float32)
            out = out + share * (part * factors[plane][:, :, None]).sum(3)
    return out


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
    seen = _by_plane(jnp.repeat(mask, heads // kv_heads, axis=1)[:, None], len(scores))
    scores = [jnp.where(m, x, -jnp.inf) for x, m in zip(scores, seen, strict=True)]
    peak = functools.reduce(jnp.maximum, [x.max(-1) for x in scores])
    safe = jnp.where(jnp.isneginf(peak), 0.0, peak)
    weights = [jnp.exp(x - safe[..., None]) for x in scores]
    total = functools.reduce(jnp.add, [x.sum(-1) for x in weights])
    least = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    out = direct.values(weights, body["v"], q.dtype) / least[..., None]
    lse = jnp.where(total > 0, jnp.log(least) + peak, -jnp.inf)

    def by_token(x):
        x = x.reshape(batch, kv_heads, length, heads // kv_heads, *x.shape[3:])
        return jnp.moveaxis(x, 2, 1).reshape(batch, length, heads, *x.shape[4:])

    return Partial(by_token(out), by_token(lse))
