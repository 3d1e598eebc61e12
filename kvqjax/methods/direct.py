"""Attention to a whole body at once, stored head by head (kvqjax/ops/packing/heads.py): no loop
over blocks. XLA for GPUs then reads every array once, in a handful of products.

    scores_s = q . k_s      k_s[d] = (n_s[d] + offset) scale[d] + low[d]    per channel, groups of tokens (KIVI's keys)
                            k_s[d] = (n_s[d] + offset) scale_s + low_s      per token, groups of channels (uniform's)
    out = sum_s p_s v_s     v_s[d] = (n_s[d] + offset) scale_s + low_s      per token, groups of channels (its values)

n is a stored number, n + offset its code. OSCAR's keys are per token too. A key of OScaR or KVarN
also has a factor per token; a value of KVarN also has a factor per channel and group of tokens.
Scales are multiplied into the queries and the softmax weights, and stored numbers enter the
products as they are. Offsets and minima add one term per group.

A stored number may hold the codes of two tokens. It then has two planes: the first codes of all
stored numbers, and the second ones. Scores and softmax weights are kept as one array [.., S /
planes] for each plane. To put the tokens in order would write and read them once more.

X is the number of query rows of a KV head (T * G), N of groups of tokens, M of groups of channels
in a head.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kvqjax.codecs import CodecSpec, Exact, Uniform
from kvqjax.codecs.balanced import Balanced
from kvqjax.codecs.clipped import Clipped
from kvqjax.codecs.scaled import Scaled
from kvqjax.model.config import KVShape
from kvqjax.ops.attention import Partial, capped
from kvqjax.ops.packing.base import from_bits
from kvqjax.ops.packing.heads import HALF, offset, tokens_per_row
from kvqjax.ops.xla_workarounds import kept_apart

# Most new tokens of a row. With more of them the scores of a whole body, [B, H, T, S] float32, are
# too large.
FEW_QUERIES = 16
# Stored rows that one product sums. A sum over tokens is cut into pieces, so that a GPU has work
# for all its cores. All pieces have this length, whatever the body's: tokens of weight 0 at its end
# then do not change a sum's rounding.
PIECE = 512

Stored = dict  # field name -> arrays of one layer, [1, B, ...]


class Direct(NamedTuple):
    """Functions that read a whole body, from one layer's stored fields:

        scores(q [B, K, X, D], fields) -> planes of [B, K, X, S] float32
        values(planes of weights [B, K, X, S] float32, fields, dtype, piece) -> [B, K, X, D] float32

    Sums over tokens are made of partial sums of at most `piece` stored rows. `part`, if given,
    replaces `scores` where only the first keys of a body are read."""

    scores: Callable
    values: Callable
    part: Callable | None = None


@runtime_checkable
class ReadAtOnce(Protocol):
    """A codec's spec, of another package, whose body is stored head by head and read as a whole by
    XLA."""

    def scores(self, shape: KVShape) -> Callable | None:
        """Give the function of keys, scores(q, fields); None for shapes without one."""
        ...

    def values(self, shape: KVShape) -> Callable | None:
        """Give the function of values, values(weights, fields, dtype, piece); None for shapes
        without one."""
        ...


# ---- Attending ----


def slots_read(tokens: int, block: int, slots: int) -> tuple[int, bool]:
    """Choose how much of a body is read.

    Args:
        tokens: the most that a row holds.
        block: slots of the body's block.
        slots: of the body.

    Returns:
        The number of slots whose keys are read, and whether values are cut to these slots too.
    """
    step = math.lcm(block, 4 * PIECE)
    count = min(-(-tokens // step) * step, slots)
    # XLA for GPUs reads the first keys in place, but copies the first values. A copy moves every
    # byte three times (read, write, read), so it pays for at most a third of the values.
    return count, 3 * count <= slots


def scaled(q: Float[Array, "B T H D"]) -> Float[Array, "B T H D"]:
    """Scale the queries by D^-1/2."""
    return q * jnp.asarray(q.shape[3] ** -0.5, q.dtype)


def attend_whole(
    q: Float[Array, "B T H D"],
    body: dict[str, Stored],
    mask: Bool[Array, "B T S"],
    direct: Direct,
    kv_heads: int,
    piece: int = PIECE,
    cut: Callable[[Stored], Stored] | None = None,
    softcap: float | None = None,
) -> Partial:
    """Attend with few new tokens to S slots of one layer's body.

    Args:
        q: queries, `scaled`.
        body: the stored fields of keys ("k") and values ("v").
        mask: the slots that query t of row b sees.
        direct: how the body is read.
        kv_heads: the number of KV heads.
        piece: stored rows of a partial sum, as in `Direct`.
        cut: returns the first S slots of values, where they have more slots than keys.
        softcap: bounds scores (kvqjax.ops.attention.capped).

    Returns:
        The output of attention to these slots, and the logarithm of its softmax's denominator.
    """
    batch, length, heads, dim = q.shape
    group = heads // kv_heads  # query heads of a KV head
    # [B, T, H, D] -> [B, K, X, D], where row t * G + g is query head g of token t
    rows = q.reshape(batch, length, kv_heads, -1, dim).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(batch, kv_heads, -1, dim)
    scores = [capped(x, softcap) for x in direct.scores(rows, body["k"])]
    # Of every plane: [B, 1, X, S / planes]
    seen = _by_plane(jnp.repeat(mask, group, axis=1)[:, None], len(scores))
    scores = [jnp.where(m, x, -jnp.inf) for x, m in zip(scores, seen, strict=True)]
    # The maximum starts from a finite number. For a query that sees no slot, exp(-inf - -inf) would
    # be NaN.
    least = np.finfo(np.float32).min
    peaks = [jax.lax.reduce(x, least, jax.lax.max, (3,)) for x in scores]
    peak = functools.reduce(jnp.maximum, peaks)
    weights = [jnp.exp(x - peak[..., None]) for x in scores]
    total = functools.reduce(jnp.add, [x.sum(-1) for x in weights])
    # No division by 0 where no slot is seen.
    denominator = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    stored = body["v"]
    if cut is not None:
        # The values depend on the weights here, so that XLA cuts them only now. Otherwise it would
        # copy the first values of all layers at once.
        weights, stored = kept_apart((weights, stored))
        stored = cut(stored)
    out = direct.values(weights, stored, q.dtype, piece)
    out = out / denominator[..., None]
    lse = jnp.where(total > 0, jnp.log(denominator) + peak, -jnp.inf)

    def by_token(x):
        """Reorder [B, K, X, ..] to [B, T, H, ..]."""
        x = x.reshape(batch, kv_heads, length, group, *x.shape[3:])
        return jnp.moveaxis(x, 2, 1).reshape(batch, length, heads, *x.shape[4:])

    return Partial(by_token(out), by_token(lse))


# ---- Which bodies can be read at once, and how ----


def direct_form(key: CodecSpec, value: CodecSpec, rope: str, shape: KVShape) -> Direct | None:
    """Make the functions that read bodies of these two codecs at once.

    Args:
        key: the codec of keys.
        value: the codec of values.
        rope: whether keys are stored before RoPE ("pre") or after it ("post").
        shape: the model's.

    Returns:
        The functions; None where one of the codecs must be decoded first.
    """
    if rope != "post" and shape.rope is not None:
        return None
    scores = key_form(key, shape)
    values = value_form(value, shape)
    if scores is None or values is None:
        return None
    if not isinstance(key, Exact):
        return Direct(scores, values)

    def part(q, fields):
        return [_scored_part(q, fields["x"][0][0])]

    return Direct(scores, values, part)


@functools.singledispatch
def key_form(spec: CodecSpec, shape: KVShape) -> Callable | None:
    """Make the function that computes the scores of a body's keys.

    Args:
        spec: the codec of keys.
        shape: the model's.

    Returns:
        scores(q [B, K, X, D], fields), which gives an array [B, K, X, rows] for every plane of
        codes. None where keys must be decoded first.
    """
    if isinstance(spec, ReadAtOnce):
        return spec.scores(shape)
    return None


@key_form.register(Exact)
def _exact_key_form(spec: Exact, shape: KVShape) -> Callable:
    def scores(q, fields):
        return [_scored(q, fields["x"][0][0])]

    return scores


@key_form.register(Uniform)
def _uniform_key_form(spec: Uniform, shape: KVShape) -> Callable | None:
    if spec.along == "tokens":
        return functools.partial(_channel_scores, spec)
    if _fits_heads(spec, shape):
        return functools.partial(_token_scores, spec)
    return None


@key_form.register(Clipped)
def _clipped_key_form(spec: Clipped, shape: KVShape) -> Callable | None:
    return key_form(spec.inner, shape)


@key_form.register(Scaled)
def _scaled_key_form(spec: Scaled, shape: KVShape) -> Callable | None:
    return _with_token_factors(spec.dtype, key_form(spec.inner, shape))


@key_form.register(Balanced)
def _balanced_key_form(spec: Balanced, shape: KVShape) -> Callable | None:
    codes = spec.inner(shape.kv_width)
    return _with_token_factors(spec.dtype, key_form(codes, shape))


def _with_token_factors(dtype: str, scores: Callable | None) -> Callable | None:
    """Multiply the scores of keys by factors of their tokens, which are of `dtype`."""
    if scores is None:
        return None

    def with_factors(q, fields):
        return _token_factors(dtype, scores(q, fields), fields)

    return with_factors


@functools.singledispatch
def value_form(spec: CodecSpec, shape: KVShape) -> Callable | None:
    """Make the function that computes weighted sums of a body's values.

    Args:
        spec: the codec of values.
        shape: the model's.

    Returns:
        values(weights of every plane, fields, dtype of products, stored rows of a partial sum),
        which gives [B, K, X, D]. None where values must be decoded first.
    """
    if isinstance(spec, ReadAtOnce):
        return spec.values(shape)
    return None


@value_form.register(Exact)
def _exact_value_form(spec: Exact, shape: KVShape) -> Callable:
    def values(weights, fields, dtype, piece):
        return _exact_values(weights, fields["x"][0][0], dtype, piece)

    return values


@value_form.register(Uniform)
def _uniform_value_form(spec: Uniform, shape: KVShape) -> Callable | None:
    if spec.along == "channels" and _fits_heads(spec, shape):
        return functools.partial(_token_values, spec)
    return None


@value_form.register(Clipped)
def _clipped_value_form(spec: Clipped, shape: KVShape) -> Callable | None:
    return value_form(spec.inner, shape)


@value_form.register(Balanced)
def _balanced_value_form(spec: Balanced, shape: KVShape) -> Callable | None:
    if spec.along != "channels":
        return None

    def values(weights, fields, dtype, piece):
        # The sums of a tile are not split into partial sums, so that `piece` has no use.
        return _balanced_values(spec, weights, fields, dtype)

    return values


def _fits_heads(spec: Uniform, shape: KVShape) -> bool:
    """Say whether every group of channels is a part of one head, or several whole heads."""
    group = min(spec.group, shape.kv_width)
    return group % shape.head_dim == 0 or shape.head_dim % group == 0


# ---- Scores of keys ----


def _scored(q: Float[Array, "B K X D"], k: Float[Array, "B K S D"]) -> Float[Array, "B K X S"]:
    """Multiply queries with keys, in pieces of tokens. XLA for GPUs then writes scores in the order
    in which values are summed, and makes the softmax weights and their total in one kernel instead
    of two."""
    size = math.gcd(4 * PIECE, k.shape[2])  # tokens of a piece
    # [B, K, pieces, tokens, D]
    k = k.reshape(*k.shape[:2], -1, size, k.shape[3])
    # [B, K, X, pieces, D]
    rows = jnp.broadcast_to(q[:, :, :, None], (*q.shape[:3], k.shape[2], q.shape[3]))
    scores = jnp.einsum("bkxpd,bkpsd->bkxps", rows, k, preferred_element_type=jnp.float32)
    return scores.reshape(*q.shape[:3], -1)


def _scored_part(q: Float[Array, "B K X D"], k: Float[Array, "B K s D"]) -> Float[Array, "B K X s"]:
    """Multiply queries with the first keys of a body. It is one product, so that XLA reads the keys
    in place."""
    return jnp.einsum("bkxd,bksd->bkxs", q, k, preferred_element_type=jnp.float32)


def _channel_scores(spec: Uniform, q: Float[Array, "B K X D"], fields: Stored) -> list[Array]:
    """Multiply queries with keys whose codes are uniform per channel, in groups of tokens."""
    (codes,) = fields["codes"]
    scale = _by_head(_numbers(fields["scale"], spec.dtype), q.shape[1])  # [B, K, N, D]
    low = _by_head(_numbers(fields["low"], spec.dtype), q.shape[1])
    wide = q.astype(jnp.float32)
    planes = _readings(spec.bits, codes[0], q.dtype)
    # [B, K, X, N, D]
    scaled = (wide[:, :, :, None] * scale[:, :, None].astype(jnp.float32)).astype(q.dtype)
    # q . low of every group, [B, K, X, N]. A matrix product would have XLA lay out the minima of
    # all unrolled layers anew at the start of a step; a sum does not.
    minima = (wide[:, :, :, None] * low[:, :, None].astype(jnp.float32)).sum(-1)
    # With two planes, HALF tokens of plane 0 are followed by HALF tokens of plane 1, and so on in
    # turn: groups of the token order are J runs of one plane's `groups`. With one plane all groups
    # are one run.
    groups = HALF // spec.group if len(planes) == 2 else scale.shape[2]

    def of_plane(x, plane: int):
        """Take one plane's groups [B, K, X, J, groups, ..] of those in token order, [B, K, X, N,
        ..]."""
        runs = x.reshape(*x.shape[:3], -1, len(planes), groups, *x.shape[4:])
        return runs[:, :, :, :, plane]

    out = []
    for plane, (n, lift) in enumerate(planes):
        rows = of_plane(scaled, plane)
        constant = of_plane(minima, plane) + lift * rows.astype(jnp.float32).sum(-1)
        # [B, K, J, groups, tokens, D]
        n = n.reshape(*n.shape[:2], -1, groups, spec.group, n.shape[3])
        part = jnp.einsum("bkxjnd,bkjngd->bkxjng", rows, n, preferred_element_type=jnp.float32)
        out.append((part + constant[..., None]).reshape(*q.shape[:3], -1))
    return out


def _token_scores(spec: Uniform, q: Float[Array, "B K X D"], fields: Stored) -> list[Array]:
    """Multiply queries with keys whose codes are uniform per token, in groups of channels."""
    (codes,) = fields["codes"]
    planes = _readings(spec.bits, codes[0], q.dtype)
    scale = _groups_of_heads(_numbers(fields["scale"], spec.dtype), q.shape[1])  # [B, K, M, S]
    low = _groups_of_heads(_numbers(fields["low"], spec.dtype), q.shape[1])
    groups = scale.shape[2]
    dim = q.shape[3]
    # A query becomes M rows, one for every group of channels, each zero outside its group. One
    # product then reads the codes once. It multiplies M times as often as needed, and M is small.
    members = jnp.repeat(jnp.eye(groups, dtype=q.dtype), dim // groups, axis=1)  # [M, D]
    # [B, K, X * M, D]
    rows = (q[:, :, :, None] * members[None, None, None]).reshape(*q.shape[:2], -1, dim)
    # [B, K, X, M, 1]
    sums = q.astype(jnp.float32).reshape(*q.shape[:3], groups, -1).sum(-1)[..., None]
    out = []
    scales = _by_plane(scale.astype(jnp.float32), len(planes))
    lows = _by_plane(low.astype(jnp.float32), len(planes))
    for (n, lift), factor, least in zip(planes, scales, lows, strict=True):
        part = jnp.einsum("bkrd,bksd->bkrs", rows, n, preferred_element_type=jnp.float32)
        # XLA would merge both planes' products into one, and would write all keys to memory for it.
        rows, _ = kept_apart((rows, part))
        part = part.reshape(*q.shape[:3], groups, -1) + lift * sums
        out.append((part * factor[:, :, None] + sums * least[:, :, None]).sum(3))
    return out


def _token_factors(dtype: str, scores: list[Array], fields: Stored) -> list[Array]:
    """Multiply the scores of keys by the factor that every token's key was divided by."""
    factors = _of_tokens(fields["factor"], dtype, scores[0].shape[1], len(scores))
    return [x * factor for x, factor in zip(scores, factors, strict=True)]


# ---- Weighted sums of values ----


def summed(weights: Float[Array, "B K X S"], v: Array, piece: int) -> Float[Array, "B K X D"]:
    """Compute sum_s weights_s v_s by partial sums of gcd(`piece`, S) tokens."""
    size = math.gcd(piece, weights.shape[3])
    # [B, K, X, pieces, tokens] and [B, K, pieces, tokens, D]
    weights = weights.reshape(*weights.shape[:3], -1, size)
    v = v.reshape(*v.shape[:2], -1, size, v.shape[3]).astype(weights.dtype)
    sums = jnp.einsum("bkxps,bkpsd->bkpxd", weights, v, preferred_element_type=jnp.float32)
    return sums.sum(2)


def _exact_values(
    weights: list[Array], v: Float[Array, "B K S D"], dtype, piece: int
) -> Float[Array, "B K X D"]:
    """Compute weighted sums of values that are stored without codes."""
    (in_order,) = _in_planes(weights, 1)
    return summed(_filled(in_order.astype(dtype), v.shape[2]), v, piece)


def _token_values(
    spec: Uniform, weights, fields: Stored, dtype, piece: int
) -> Float[Array, "B K X D"]:
    """Compute weighted sums of values whose codes are uniform per token, in groups of channels."""
    (codes,) = fields["codes"]
    _, _, heads, _, dim = codes.shape
    planes = _readings(spec.bits, codes[0], dtype)
    scale = _groups_of_heads(_numbers(fields["scale"], spec.dtype), heads)  # [B, K, M, S]
    low = _groups_of_heads(_numbers(fields["low"], spec.dtype), heads)
    lead = weights[0].shape[:3]  # [B, K, X]
    groups = scale.shape[2]  # M
    scales = _by_plane(scale.astype(jnp.float32), len(planes))
    lows = _by_plane(low.astype(jnp.float32), len(planes))
    weights = _in_planes(weights, len(planes))
    out = jnp.float32(0)  # becomes [B, K, X, M, D / M]
    for weight, scale, low, (n, lift) in zip(weights, scales, lows, planes, strict=True):
        weight = _filled(weight, scale.shape[3])[:, :, :, None]
        row = (weight * scale[:, :, None]).astype(dtype)  # [B, K, X, M, S / planes]
        out = out + (weight * low[:, :, None] + lift * row.astype(jnp.float32)).sum(-1)[..., None]
        # The weights of every group are multiplied with the channels of all groups, so that one
        # product reads the codes once; M is small. Only the products of a group's weights with its
        # own channels are kept.
        # [B, K, X * M, D]
        products = summed(row.reshape(*lead[:2], lead[2] * groups, -1), n, piece)
        products = products.reshape(*lead, groups, groups, dim // groups)
        out = out + jnp.diagonal(products, axis1=3, axis2=4).swapaxes(-1, -2)
    return out.reshape(*lead, dim)


def _balanced_values(spec: Balanced, weights, fields: Stored, dtype) -> Float[Array, "B K X D"]:
    """Compute weighted sums of values whose codes are uniform per token and head.

    These values also have a factor per channel and group of tokens. So every group of tokens is
    summed by itself, and the sum is multiplied by the group's factors."""
    (codes,) = fields["codes"]
    _, _, heads, _, dim = codes.shape
    readings = _readings(spec.bits, codes[0], dtype)
    planes = len(readings)
    size = min(spec.group, HALF)  # tokens of a group in one run of a plane
    # [B, K, N, D]
    factor = _by_head(_numbers(fields["factor"], spec.dtype), heads).astype(jnp.float32)
    # With two planes, groups of tokens lie in runs of HALF tokens, which belong to the planes in
    # turn.
    groups_of_run = HALF // size if planes > 1 else 1
    factor = factor.reshape(*factor.shape[:2], -1, planes, groups_of_run, dim)
    factors = []
    for plane in range(planes):
        factors.append(factor[:, :, :, plane].reshape(*factor.shape[:2], -1, dim))
    scales = _of_tokens(fields["scale"], spec.dtype, heads, planes)
    lows = _of_tokens(fields["low"], spec.dtype, heads, planes)

    def in_groups(x):
        """Reshape [.., rows] to [.., groups, size]."""
        return x.reshape(*x.shape[:-1], -1, size)

    out = jnp.float32(0)
    parts = zip(_in_planes(weights, planes), scales, lows, factors, readings, strict=True)
    for weight, scale, low, factor, (n, lift) in parts:
        weight = _filled(weight, scale.shape[3])
        row = (weight * scale).astype(dtype)
        # [B, K, X, groups]
        constant = in_groups(weight * low + lift * row.astype(jnp.float32)).sum(-1)
        n = n.reshape(*n.shape[:2], -1, size, dim)
        row = in_groups(row)
        part = jnp.einsum("bkxjg,bkjgd->bkxjd", row, n, preferred_element_type=jnp.float32)
        out = out + ((part + constant[..., None]) * factor[:, :, None]).sum(3)
    return out


# ---- Codes by plane, scales and minima by head ----


def _readings(bits: int, stored: Array, dtype) -> list[tuple[Array, float]]:
    """Read every plane of a stored array as numbers in `dtype` [B, K, rows, D] and a constant. A
    plane's codes are its numbers plus its constant. The numbers are one chain of operations on the
    stored array, which XLA fuses into the product that reads them."""
    n = stored.astype(dtype)
    if tokens_per_row(bits) == 1:
        return [(n, float(offset(bits)))]
    number = functools.partial(jnp.asarray, dtype=dtype)
    lower = jnp.abs(jnp.abs(n + number(0.5)) - number(4.0))
    upper = jnp.floor(n * number(0.25))
    return [(lower, -0.5), (upper, 2.0)]


def _by_plane(x: Array, planes: int) -> list[Array]:
    """Split [.., S] into `planes` arrays [.., S / planes], one for each plane of
    kvqjax/ops/packing/heads.py."""
    if planes == 1:
        return [x]
    x = x.reshape(*x.shape[:-1], -1, planes, HALF)
    return [x[..., plane, :].reshape(*x.shape[:-3], -1) for plane in range(planes)]


def _in_planes(pieces: list[Array], planes: int) -> list[Array]:
    """Rearrange numbers per token, given plane by plane, into `planes` planes."""
    if len(pieces) == planes:
        return pieces
    if planes > 1:
        return _by_plane(pieces[0], planes)
    runs = [x.reshape(*x.shape[:-1], -1, HALF) for x in pieces]
    in_order = jnp.stack(runs, -2)  # the planes' runs in turn
    return [in_order.reshape(*pieces[0].shape[:-1], -1)]


def _filled(weights: Float[Array, "B K X s"], slots: int) -> Float[Array, "B K X S"]:
    """Append zero weights until there are `slots`."""
    return jnp.pad(weights, ((0, 0), (0, 0), (0, 0), (0, slots - weights.shape[3])))


def _of_tokens(
    stored: tuple[Array, ...], dtype: str, heads: int, planes: int
) -> list[Float[Array, "B K 1 S"]]:
    """Read a number per token and KV head, plane by plane. A number of several heads is repeated
    for each."""
    numbers = _numbers(stored, dtype).astype(jnp.float32)
    return _by_plane(_groups_of_heads(numbers, heads), planes)


def _numbers(stored: tuple[Array, ...], dtype: str) -> Array:
    """Read the one array of a field that is stored without codes, for its one layer."""
    (array,) = stored
    return from_bits(array[0], dtype)


def _by_head(x: Array, heads: int) -> Array:
    """Reshape [B, N, K*D] to [B, K, N, D]."""
    by_head = x.reshape(*x.shape[:2], heads, -1)
    return jnp.swapaxes(by_head, 1, 2)


def _groups_of_heads(x: Float[Array, "B N S"], heads: int) -> Float[Array, "B K M S"]:
    """Sort numbers of groups of channels by KV head. The number of a group of several heads is
    repeated for each."""
    if x.shape[1] < heads:
        x = jnp.repeat(x, heads // x.shape[1], axis=1)
    return x.reshape(x.shape[0], heads, -1, x.shape[2])
