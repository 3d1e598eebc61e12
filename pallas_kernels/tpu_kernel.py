"""The body of the TPU decode-attention kernel: one tile of tokens of one lane group (see `tpu` for the mathematics).

Shapes in comments: P lane groups, M query rows of a lane group (a multiple of 8), W its lanes, S tokens of the tile, N
key groups of the tile, C rows of value scales.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvqjax.layout import split_bits
from kvqjax.pallas_kernels.tpu_unpack import block_size, offset, unpack_block

__all__ = ["COLUMN", "NEVER", "kernel"]

COLUMN = 128  # tokens of one product
NEVER = -1e30  # a masked score: finite, so that the difference of two of them is a number


class Refs(NamedTuple):
    queries: object  # [1, P, M, W] bf16, block-diagonal over the heads of a lane group
    bounds: object  # [1, M, 2] i32: first and last + 1 visible token of a row
    order: object  # [columns of a block, 128] i32: token of every lane
    onehot: object  # [block, block] bf16: brings scales into lane order; unused where that is token order
    key_codes: tuple  # [1, 1, rows, W] u32 for each plane set
    key_scale: object  # [1, 1, N, W]
    key_low: object
    value_codes: tuple
    value_scale: object  # [1, 1, C, S]
    value_low: object
    out: object  # [1, 1, P, M, W] f32, the accumulator as well
    lse: object  # [1, 1, P, M, 1] f32
    peak: object  # [P, M, 1] f32
    total: object  # [P, M, 1] f32
    scales: object  # [C, S] f32: value scales and minima in lane order
    lows: object


def _named(refs, plan) -> Refs:
    keys, values = len(split_bits(plan.spec.key_bits)), len(split_bits(plan.spec.value_bits))
    head, key, rest = refs[:4], refs[4 : 4 + keys], refs[4 + keys :]
    return Refs(*head, key, *rest[:2], rest[2 : 2 + values], *rest[2 + values :])


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
    both = jnp.concatenate([refs.value_scale[0, 0], refs.value_low[0, 0]])  # [2C, S]
    if plan.slots % plan.tile:  # what lies beyond the array must not reach a product: 0 * NaN
        token = tile * plan.tile + jax.lax.broadcasted_iota(jnp.int32, both.shape, 1)
        both = jnp.where(token < plan.slots, both, jnp.zeros_like(both))
    if plan.ways > 1:
        pieces = [both[:, first : first + plan.block] for first in range(0, plan.tile, plan.block)]
        product = _dot(jnp.concatenate(pieces), refs.onehot[...], 0)
        both = jnp.concatenate([product[i * 2 * count : (i + 1) * 2 * count] for i in range(len(pieces))], axis=1)
    both = both.astype(jnp.float32)
    refs.scales[...], refs.lows[...] = both[:count], both[count:]


def _accumulate(refs: Refs, plan, tile, lane_group):
    """Fold the tile into the running softmax of this lane group."""
    scores = _scores(refs, plan, tile, lane_group)  # [M, S]
    before = refs.peak[lane_group]
    peak = jnp.maximum(before, scores.max(-1, keepdims=True))
    weights, decay = jnp.exp(scores - peak), jnp.exp(before - peak)
    # A row that has seen nothing yet adds rubbish here; its decay is 0 once it sees a token.
    refs.peak[lane_group] = peak
    refs.total[lane_group] = refs.total[lane_group] * decay + weights.sum(-1, keepdims=True)
    refs.out[0, 0, lane_group] = refs.out[0, 0, lane_group] * decay + _weighted(refs, plan, weights, lane_group)


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


def _fold_scales(refs: Refs, plan, lane_group):
    """For every key group of the tile the scaled query [M, W] bf16 and what the minima add to its scores [M, 1]."""
    q = refs.queries[0, lane_group].astype(jnp.float32)
    spread = plan.spec.head_dim**-0.5
    scale, low = refs.key_scale[0, 0].astype(jnp.float32), refs.key_low[0, 0].astype(jnp.float32)
    shift = offset(plan.spec.key_bits, plan.ways)
    for group in range(plan.tile // plan.spec.key_group):
        scaled = (q * (spread * scale[group : group + 1])).astype(jnp.bfloat16)
        zero = q * (spread * low[group : group + 1])
        if shift:
            zero = zero - shift * scaled.astype(jnp.float32)
        yield scaled, zero.sum(-1, keepdims=True)


def _scores(refs: Refs, plan, tile, lane_group):
    """[M, S] scores in lane order, NEVER where a row must not look."""
    folded = list(_fold_scales(refs, plan, lane_group))
    first, last = refs.bounds[0, :, 0:1], refs.bounds[0, :, 1:2]
    columns, each = [], plan.block // plan.spec.key_group
    for index in range(plan.tile // plan.block):
        codes = _codes(refs.key_codes, plan.spec.key_bits, index, plan)
        for column, order in enumerate(plan.order.reshape(-1, COLUMN)):
            groups = sorted({int(token) // plan.spec.key_group for token in order})
            here = [folded[index * each + group] for group in groups]
            block = codes[column * COLUMN : (column + 1) * COLUMN]
            products = _dot(jnp.concatenate([scaled for scaled, _ in here]), block, 1)
            token = refs.order[column : column + 1]
            scores = _select(products, [zero for _, zero in here], _quotient(token, plan.spec.key_group), groups)
            token = token + (tile * plan.tile + index * plan.block)
            columns.append(jnp.where((token >= first) & (token < last), scores, NEVER))
    return jnp.concatenate(columns, axis=1)


def _select(stacked, added, owner, names):
    """From products stacked by group, [n*M, 128], take for every lane those of its own group, plus what is added."""
    rows = stacked.shape[0] // len(names)
    chosen = stacked[:rows] + added[0]
    for i in range(1, len(names)):
        chosen = jnp.where(owner == names[i], stacked[i * rows : (i + 1) * rows] + added[i], chosen)
    return chosen


def _weighted(refs: Refs, plan, weights, lane_group):
    """Sum of the tile's values under `weights` [M, S]: [M, W]."""
    spec, count = plan.spec, plan.value_rows
    first = _quotient(lane_group * plan.lanes, spec.value_group)
    shift = offset(spec.value_bits, plan.ways)
    factors, added = [], []
    for i in range(count):
        factor = (weights * refs.scales[pl.ds(first + i, 1)]).astype(jnp.bfloat16)
        low = weights * refs.lows[pl.ds(first + i, 1)]
        if shift:
            low = low - shift * factor.astype(jnp.float32)
        factors.append(factor)
        added.append(low.sum(-1, keepdims=True))
    stacked = jnp.concatenate(factors)  # [count*M, S]
    blocks = [_codes(refs.value_codes, spec.value_bits, index, plan) for index in range(plan.tile // plan.block)]
    total = _dot(stacked, jnp.concatenate(blocks), 0)
    owner = _quotient(jax.lax.broadcasted_iota(jnp.int32, (1, plan.lanes), 1), spec.value_group)
    return _select(total, added, owner, list(range(count)))
