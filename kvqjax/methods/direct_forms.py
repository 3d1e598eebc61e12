"""Read whole bodies at once, from fields stored head by head (kvqjax/ops/packing/heads.py): functions that make scores
and sums of values for the `Direct` that kvqjax.methods.direct attends with.

    scores_s = q . k_s      k_s[d] = (n_s[d] + offset) scale[d] + low[d]    per channel, groups of tokens (KIVI's keys)
                            k_s[d] = (n_s[d] + offset) scale_s + low_s      per token, groups of channels (uniform's)
    out = sum_s p_s v_s     v_s[d] = (n_s[d] + offset) scale_s + low_s      per token, groups of channels (its values)

OSCAR's keys are per token too. Keys of OScaR and KVarN are also multiplied by a factor of their token, values of KVarN
by a factor of their channel and group of tokens.

Scales fold into the queries and the softmax weights; offsets and minima become one product a group. X is the number of
query rows of a KV head (T * G), N that of groups of g tokens, M that of groups of channels in a head.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvqjax.codecs import CodecSpec, Exact, Uniform
from kvqjax.codecs.balanced import Balanced
from kvqjax.codecs.clipped import Clipped
from kvqjax.codecs.kernel_form import ReadAtOnce
from kvqjax.codecs.scaled import Scaled
from kvqjax.methods.direct import Direct, Stored, by_plane, filled, in_planes, scored, scored_part, summed
from kvqjax.model.config import KVShape
from kvqjax.ops.packing.heads import HALF, offset, tokens_per_row
from kvqjax.ops.packing.words import from_bits
from kvqjax.ops.xla_workarounds import kept_apart

__all__ = ["direct_form", "key_form", "value_form"]


def direct_form(key: CodecSpec, value: CodecSpec, rope: str, shape: KVShape) -> Direct | None:
    """Make the functions that read bodies of these two codecs at once, or None where one must be decoded first."""
    if rope != "post" and shape.rope is not None:
        return None
    scores, values = key_form(key, shape), value_form(value, shape)
    part = (lambda q, fields: [scored_part(q, fields["x"][0][0])]) if isinstance(key, Exact) else None
    return None if scores is None or values is None else Direct(scores, values, part)


def _fits_heads(spec: Uniform, shape: KVShape) -> bool:
    """Say whether every group of channels is a part of one head, or several whole heads."""
    group = min(spec.group, shape.kv_width)
    return not (group % shape.head_dim and shape.head_dim % group)


def key_form(spec: CodecSpec, shape: KVShape) -> Callable | None:
    """Make the function from queries [B, K, X, D] and a body's fields to the scores of its keys, an array
    [B, K, X, rows] for every plane of codes; None where keys must be decoded first."""
    if isinstance(spec, ReadAtOnce):
        return spec.scores(shape)
    if isinstance(spec, Clipped):
        return key_form(spec.inner, shape)
    if isinstance(spec, Scaled | Balanced):
        inner = key_form(spec.inner if isinstance(spec, Scaled) else spec.inner(shape.kv_width), shape)
        return None if inner is None else lambda q, fields: _token_factors(spec.dtype, inner(q, fields), fields)
    if isinstance(spec, Exact):
        return lambda q, fields: [scored(q, fields["x"][0][0])]
    if isinstance(spec, Uniform) and spec.along == "tokens":
        return lambda q, fields: _channel_scores(spec, q, fields)
    if isinstance(spec, Uniform) and _fits_heads(spec, shape):
        return lambda q, fields: _token_scores(spec, q, fields)
    return None


def value_form(spec: CodecSpec, shape: KVShape) -> Callable | None:
    """Make the function from softmax weights of every plane, a body's fields, the dtype of products and the tokens of
    one partial sum to the weighted sums of its values [B, K, X, D]; None where values must be decoded first."""
    if isinstance(spec, ReadAtOnce):
        return spec.values(shape)
    if isinstance(spec, Exact):
        return lambda weights, fields, dtype, piece: _exact_values(weights, fields["x"][0][0], dtype, piece)
    if isinstance(spec, Clipped):
        return value_form(spec.inner, shape)
    if isinstance(spec, Balanced) and spec.along == "channels":
        return lambda weights, fields, dtype, piece: _balanced_values(spec, weights, fields, dtype)
    if not isinstance(spec, Uniform) or spec.along != "channels" or not _fits_heads(spec, shape):
        return None
    return lambda weights, fields, dtype, piece: _token_values(spec, weights, fields, dtype, piece)


def _exact_values(weights: list[Array], v: Float[Array, "B K S D"], dtype, piece: int) -> Float[Array, "B K X D"]:
    """Sum values that are stored as they are, weighted."""
    return summed(filled(in_planes(weights, 1)[0].astype(dtype), v.shape[2]), v, piece)


def _readings(bits: int, stored: Array, dtype) -> list[tuple[Array, float]]:
    """Read every plane as (numbers in `dtype` [B, K, rows, D], constant): its codes are the numbers plus the constant.
    The numbers are one chain of operations on the stored array, which XLA fuses into the product that reads them."""
    n = stored.astype(dtype)
    if tokens_per_row(bits) == 1:
        return [(n, float(offset(bits)))]
    number = functools.partial(jnp.asarray, dtype=dtype)
    lower = jnp.abs(jnp.abs(n + number(0.5)) - number(4.0))
    return [(lower, -0.5), (jnp.floor(n * number(0.25)), 2.0)]


def _channel_scores(spec: Uniform, q: Float[Array, "B K X D"], fields: Stored) -> list[Array]:
    """Multiply queries with keys whose codes are uniform per channel, in groups of tokens."""
    (codes,), (scale,), (low,) = fields["codes"], fields["scale"], fields["low"]
    scale, low = (_by_head(from_bits(x[0], spec.dtype), q.shape[1]) for x in (scale, low))  # [B, K, N, D]
    wide, planes = q.astype(jnp.float32), _readings(spec.bits, codes[0], q.dtype)
    scaled = (wide[:, :, :, None] * scale[:, :, None].astype(jnp.float32)).astype(q.dtype)  # [B, K, X, N, D]
    # A sum, not a product, for which XLA would lay the minima of all unrolled layers out anew at the start of a step.
    added = (wide[:, :, :, None] * low[:, :, None].astype(jnp.float32)).sum(-1)
    here = HALF // spec.group if len(planes) == 2 else scale.shape[2]  # groups of one plane side by side
    out = []
    for plane, (n, lift) in enumerate(planes):
        rows, constant = (
            x.reshape(*x.shape[:3], -1, len(planes), here, *x.shape[4:])[:, :, :, :, plane] for x in (scaled, added)
        )
        constant = constant + lift * rows.astype(jnp.float32).sum(-1)
        n = n.reshape(*n.shape[:2], -1, here, spec.group, n.shape[3])
        part = jnp.einsum("bkxjnd,bkjngd->bkxjng", rows, n, preferred_element_type=jnp.float32)
        out.append((part + constant[..., None]).reshape(*q.shape[:3], -1))
    return out


def _token_scores(spec: Uniform, q: Float[Array, "B K X D"], fields: Stored) -> list[Array]:
    """Multiply queries with keys whose codes are uniform per token, in groups of channels."""
    (codes,), (scale,), (low,) = fields["codes"], fields["scale"], fields["low"]
    planes = _readings(spec.bits, codes[0], q.dtype)
    scale, low = (_groups_of_heads(from_bits(x[0], spec.dtype), q.shape[1]) for x in (scale, low))  # [B, K, M, S]
    each, dim = scale.shape[2], q.shape[3]
    # A row for every group, zero outside it: one product reads the codes once, and M is small.
    own = jnp.repeat(jnp.eye(each, dtype=q.dtype), dim // each, axis=1)
    rows = (q[:, :, :, None] * own[None, None, None]).reshape(*q.shape[:2], -1, dim)
    sums = q.astype(jnp.float32).reshape(*q.shape[:3], each, -1).sum(-1)[..., None]
    out = []
    scales, lows = (by_plane(x.astype(jnp.float32), len(planes)) for x in (scale, low))
    for (n, lift), factor, least in zip(planes, scales, lows, strict=True):
        part = jnp.einsum("bkrd,bksd->bkrs", rows, n, preferred_element_type=jnp.float32)
        rows, _ = kept_apart((rows, part))  # XLA would merge both planes' products and write all keys for that
        part = part.reshape(*q.shape[:3], each, -1) + lift * sums
        out.append((part * factor[:, :, None] + sums * least[:, :, None]).sum(3))
    return out


def _token_factors(dtype: str, scores: list[Array], fields: Stored) -> list[Array]:
    """Multiply the scores of keys by the factor that every token's key was divided by."""
    factors = _of_tokens(fields["factor"], dtype, scores[0].shape[1], len(scores))
    return [x * factor for x, factor in zip(scores, factors, strict=True)]


def _of_tokens(stored: tuple[Array, ...], dtype: str, heads: int, planes: int) -> list[Float[Array, "B K 1 S"]]:
    """Read a number per token and KV head, plane by plane; a number of several heads is repeated for each."""
    found = _groups_of_heads(from_bits(stored[0][0], dtype).astype(jnp.float32), heads)
    return by_plane(found, planes)


def _by_head(x: Array, heads: int) -> Array:
    """Reshape [B, N, K*D] to [B, K, N, D]."""
    return jnp.swapaxes(x.reshape(*x.shape[:2], heads, -1), 1, 2)


def _token_values(spec: Uniform, weights, fields: Stored, dtype, piece: int) -> Float[Array, "B K X D"]:
    """Sum values whose codes are uniform per token, in groups of channels, weighted."""
    (codes,), (scale,), (low,) = fields["codes"], fields["scale"], fields["low"]
    heads, dim, planes = codes.shape[2], codes.shape[4], _readings(spec.bits, codes[0], dtype)
    scale, low = (_groups_of_heads(from_bits(x[0], spec.dtype), heads) for x in (scale, low))
    lead, each = weights[0].shape[:3], scale.shape[2]  # M groups of channels a head
    scales, lows = (by_plane(x.astype(jnp.float32), len(planes)) for x in (scale, low))
    weights, out = in_planes(weights, len(planes)), jnp.float32(0)
    for weight, scale, low, (n, lift) in zip(weights, scales, lows, planes, strict=True):
        weight = filled(weight, scale.shape[3])[:, :, :, None]
        row = (weight * scale[:, :, None]).astype(dtype)  # [B, K, X, M, S / planes]
        out = out + (weight * low[:, :, None] + lift * row.astype(jnp.float32)).sum(-1)[..., None]
        # Every group's weights are summed with all channels: one product reads the codes once, and M is small.
        found = summed(row.reshape(*lead[:2], lead[2] * each, -1), n, piece)
        found = found.reshape(*lead, each, each, dim // each)
        out = out + jnp.diagonal(found, axis1=3, axis2=4).swapaxes(-1, -2)
    return out.reshape(*lead, dim)


def _balanced_values(spec: Balanced, weights, fields: Stored, dtype) -> Float[Array, "B K X D"]:
    """Sum values whose codes are uniform per token and head, weighted. They carry a factor per channel and group of
    tokens as well, so every group is summed by itself and multiplied by its factor."""
    (codes,) = fields["codes"]
    heads, dim, readings = codes.shape[2], codes.shape[4], _readings(spec.bits, codes[0], dtype)
    planes, here = len(readings), min(spec.group, HALF)  # groups of one plane side by side
    factor = _by_head(from_bits(fields["factor"][0][0], spec.dtype), heads).astype(jnp.float32)  # [B, K, N, D]
    factor = factor.reshape(*factor.shape[:2], -1, planes, HALF // here if planes > 1 else 1, dim)
    factors = [factor[:, :, :, plane].reshape(*factor.shape[:2], -1, dim) for plane in range(planes)]
    scales, lows = (_of_tokens(fields[name], spec.dtype, heads, planes) for name in ("scale", "low"))

    def apart(x):  # [.., rows] by groups
        return x.reshape(*x.shape[:-1], -1, here)

    out = jnp.float32(0)
    for weight, scale, low, factor, (n, lift) in zip(
        in_planes(weights, planes), scales, lows, factors, readings, strict=True
    ):
        weight = filled(weight, scale.shape[3])
        row = (weight * scale).astype(dtype)
        added = apart(weight * low + lift * row.astype(jnp.float32)).sum(-1)
        n = n.reshape(*n.shape[:2], -1, here, dim)
        part = jnp.einsum("bkxjg,bkjgd->bkxjd", apart(row), n, preferred_element_type=jnp.float32)
        out = out + ((part + added[..., None]) * factor[:, :, None]).sum(3)
    return out


def _groups_of_heads(x: Float[Array, "B N S"], heads: int) -> Float[Array, "B K M S"]:
    """Sort numbers of groups of channels by KV head; that of a group of several heads is repeated for each."""
    if x.shape[1] < heads:
        x = jnp.repeat(x, heads // x.shape[1], axis=1)
    return x.reshape(x.shape[0], heads, -1, x.shape[2])
