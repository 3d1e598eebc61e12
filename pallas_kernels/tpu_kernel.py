"""The body of the TPU decode-attention kernel: one tile of tokens of one lane group (see `tpu` for the mathematics).

Shapes in comments: P lane groups, M query rows of a lane group (a multiple of 8), W its lanes, S tokens of the tile, N
key groups of the tile, C rows of value scales.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvqjax.layout import from_bits, split_bits
from kvqjax.pallas_kernels.tpu_unpack import block_size, offset, unpack_block

__all__ = ["COLUMN", "NEVER", "kernel"]

COLUMN = 128  # tokens of one product
NEVER = -1e30  # a masked score: finite, so that the difference of two of them is a number


class Refs(NamedTuple):
    queries: Any  # [1, P, M, W] bf16, block-diagonal over the heads of a lane group
    bounds: Any  # [1, M, 2] i32: first and last + 1 visible token of a row
    order: Any  # [1, block] i32: token of every lane
    onehot: Any  # [block, block] bf16: brings scales into lane order; unused where that is token order
    key_codes: tuple  # [1, 1, rows, W] u32 for each plane set
    key_scale: Any  # [1, 1, N, W]
    key_low: Any
    value_codes: tuple
    value_scale: Any  # [1, 1, C, S]
    value_low: Any
    out: Any  # [1, 1, P, M, W] f32, the accumulator as well
    lse: Any  # [1, 1, P, M, 1] f32
    peak: Any  # [P, M, 1] f32
    total: Any  # [P, M, 1] f32
    scales: Any  # [C, S] f32: value scales in lane order
    lows: Any  # [C, S] f32: value minima, less what `_narrow_shift` takes
    factors: Any  # [N, W] f32: key scales times D^-1/2
    zeros: Any  # [N, W] f32: key minima times D^-1/2, less what `_narrow_shift` takes
    scores: Any  # [M, S] f32


def _named(refs, plan) -> Refs:
    keys, values = len(split_bits(plan.spec.key_bits)), len(split_bits(plan.spec.value_bits))
    head, key, rest = refs[:4], refs[4 : 4 + keys], refs[4 + keys :]
    return Refs._make((*head, key, *rest[:2], rest[2 : 2 + values], *rest[2 + values :]))


def kernel(_, ends, *refs, plan, per_split: int):
    """Grid (row, split, tile, lane group). `ends` holds the first tile of every row and the one after its last."""
    refs = _named(refs, plan)
    row, split, step, lane_group = (pl.program_id(axis) for axis in range(4))
    tile = split * per_split + step

    @pl.when((step == 0) & (lane_group == 0))
    def _():
        refs.peak[...] = jnp.full(refs.peak.shape, NEVER)
        refs.total[...] = jnp.zeros(refs.total.shape)
        refs.out[...] = jnp.zeros(refs.out.shape)

    @pl.when((tile >= ends[0, row]) & (tile < ends[1, row]))
    def _():
        pl.when(lane_group == 0)(lambda: _order_scales(refs, plan, tile))
        _accumulate(refs, plan, tile, lane_group)

    @pl.when(step == per_split - 1)
    def _():
        peak, total = refs.peak[lane_group], refs.total[lane_group]
        seen = peak > NEVER / 2
        refs.out[0, 0, lane_group] = jnp.where(seen, refs.out[0, 0, lane_group] / total, 0.0)
        refs.lse[0, 0, lane_group] = jnp.where(seen, jnp.log(total) + peak, NEVER)


def _order_scales(refs: Refs, plan, tile):
    """Bring this tile's value scales and minima into lane order, once for all lane groups."""
    count = refs.scales.shape[0]
    stored = jnp.concatenate([refs.value_scale[0, 0], refs.value_low[0, 0]])  # [2C, S]
    both = from_bits(stored, plan.spec.scales)
    if plan.slots % plan.tile:  # what lies beyond the array must not reach a product: 0 * NaN
        token = tile * plan.tile + jax.lax.broadcasted_iota(jnp.int32, both.shape, 1)
        both = jnp.where(token < plan.slots, both, jnp.zeros_like(both))
    if plan.ways > 1:
        pieces = [both[:, first : first + plan.block] for first in range(0, plan.tile, plan.block)]
        product = _dot(jnp.concatenate(pieces), refs.onehot[...], 0)
        both = jnp.concatenate([product[i * 2 * count : (i + 1) * 2 * count] for i in range(len(pieces))], axis=1)
    both = both.astype(jnp.float32)
    refs.scales[...] = both[:count]
    refs.lows[...] = both[count:] - _narrow_shift(plan.spec.value_bits, plan) * both[:count]


def _narrow_shift(bits: int, plan) -> int:
    """The offset of signed codes, at most half their range, is folded into the minima. That of the codes or-ed into
    128 is so large that it must be subtracted with the same rounded factors it was multiplied by."""
    return min(offset(bits, plan.ways), 0)


def _wide_shift(bits: int, plan) -> int:
    return max(offset(bits, plan.ways), 0)


def _accumulate(refs: Refs, plan, tile, lane_group):
    """Fold the tile into the running softmax of this lane group."""
    spread = plan.spec.head_dim**-0.5
    key = refs.key_scale[0, 0], refs.key_low[0, 0]
    scale, low = (from_bits(x, plan.spec.scales).astype(jnp.float32) for x in key)
    refs.factors[...] = spread * scale
    refs.zeros[...] = spread * (low - _narrow_shift(plan.spec.key_bits, plan) * scale)
    before = refs.peak[lane_group]
    peak = jnp.maximum(before, _write_scores(refs, plan, tile, lane_group))
    total, update = _weighted(refs, plan, peak, lane_group)
    # A row that has seen nothing yet adds rubbish here; its decay is 0 once it sees a token.
    decay = jnp.exp(before - peak)
    refs.peak[lane_group] = peak
    refs.total[lane_group] = refs.total[lane_group] * decay + total
    refs.out[0, 0, lane_group] = refs.out[0, 0, lane_group] * decay + update


def _dot(a, b, axis: int):
    """a @ b (axis 0) or a @ b.T (axis 1), float32 sums."""
    return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _quotient(x, divisor: int):
    """x // divisor of natural numbers; // itself asks for the sign, whose lowering asks for a TPU at hand."""
    return jax.lax.div(x, jnp.full_like(x, divisor))


def _codes(words, bits: int, index: int, plan):
    """Block `index` of the tile as [block, W] bf16."""
    size = block_size(bits)
    whole = []
    for first in range(index * plan.block, (index + 1) * plan.block, size):
        parts = [
            ref[0, 0, first * part // 32 : (first + size) * part // 32]
            for ref, part in zip(words, split_bits(bits), strict=True)
        ]
        whole.append(unpack_block(parts, bits, plan.ways))
    return jnp.concatenate(whole)


def _fold_scale(refs: Refs, plan, q, group: int):
    """The query `q` [M, W] scaled for one key group, and what the group's minima add to its scores [M, 1]; float32."""
    scaled = q * refs.factors[group : group + 1]
    zero = q * refs.zeros[group : group + 1]
    shift = _wide_shift(plan.spec.key_bits, plan)
    if shift:
        zero = zero - shift * scaled.astype(jnp.bfloat16).astype(jnp.float32)
    return scaled, zero.sum(-1, keepdims=True)


def _runs(plan):
    """Stretches of a block's columns that meet the same key groups: (first lane, last lane + 1, groups)."""
    met = [tuple(sorted({int(t) // plan.spec.key_group for t in column})) for column in plan.order.reshape(-1, COLUMN)]
    starts = [i for i in range(len(met)) if i == 0 or met[i] != met[i - 1]]
    return [(i * COLUMN, j * COLUMN, met[i]) for i, j in zip(starts, [*starts[1:], len(met)], strict=True)]


def _write_scores(refs: Refs, plan, tile, lane_group):
    """Write [M, S] scores in lane order, NEVER where a row must not look; return each row's maximum [M, 1]."""
    first, last = refs.bounds[0, :, 0:1], refs.bounds[0, :, 1:2]
    q = refs.queries[0, lane_group].astype(jnp.float32)
    peak, each = jnp.full((plan.rows, COLUMN), NEVER), plan.block // plan.spec.key_group
    for index in range(plan.tile // plan.block):
        folded = [_fold_scale(refs, plan, q, index * each + group) for group in range(each)]
        codes = _codes(refs.key_codes, plan.spec.key_bits, index, plan)
        for begin, end, groups in _runs(plan):
            stacked = jnp.concatenate([folded[group][0] for group in groups]).astype(jnp.bfloat16)
            token = refs.order[:, begin:end]
            owner = _quotient(token, plan.spec.key_group)
            scores = _select(_dot(stacked, codes[begin:end], 1), [folded[group][1] for group in groups], owner, groups)
            token = token + (tile * plan.tile + index * plan.block)
            scores = jnp.where((token >= first) & (token < last), scores, NEVER)
            refs.scores[:, index * plan.block + begin : index * plan.block + end] = scores
            for column in range(0, end - begin, COLUMN):
                peak = jnp.maximum(peak, scores[:, column : column + COLUMN])
    return peak.max(-1, keepdims=True)


def _select(stacked, added, owner, names):
    """From products stacked by group, [n*M, 128], take for every lane those of its own group, plus what is added."""
    rows = stacked.shape[0] // len(names)
    chosen = stacked[:rows] + added[0]
    for i in range(1, len(names)):
        chosen = jnp.where(owner == names[i], stacked[i * rows : (i + 1) * rows] + added[i], chosen)
    return chosen


def _weighted(refs: Refs, plan, peak, lane_group):
    """Sum of the tile's weights [M, 1] and of its values under them [M, W]."""
    spec, count = plan.spec, plan.value_rows
    first = _quotient(lane_group * plan.lanes, spec.value_group)
    scales, lows = refs.scales.at[pl.ds(first, count)], refs.lows.at[pl.ds(first, count)]
    total, product = jnp.zeros((plan.rows, plan.block)), jnp.zeros((count * plan.rows, plan.lanes))
    added = [total] * count
    for base in range(0, plan.tile, plan.block):
        weights = jnp.exp(refs.scores[:, base : base + plan.block] - peak)
        total = total + weights
        factors = []
        for i in range(count):
            factor = weights * scales[i : i + 1, base : base + plan.block]
            low = weights * lows[i : i + 1, base : base + plan.block]
            if shift := _wide_shift(spec.value_bits, plan):
                low = low - shift * factor.astype(jnp.bfloat16).astype(jnp.float32)
            factors.append(factor)
            added[i] = added[i] + low
        codes = _codes(refs.value_codes, spec.value_bits, base // plan.block, plan)
        product = product + _dot(jnp.concatenate(factors).astype(jnp.bfloat16), codes, 0)
    owner = _quotient(jax.lax.broadcasted_iota(jnp.int32, (1, plan.lanes), 1), spec.value_group)
    update = _select(product, [low.sum(-1, keepdims=True) for low in added], owner, list(range(count)))
    return total.sum(-1, keepdims=True), update
