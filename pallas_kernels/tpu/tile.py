"""What the TPU decode-attention kernel prepares once per tile of tokens, for all lane groups, and how it is read back.

Shapes as in `kernel`: P lane groups, M query rows of a lane group, W its lanes, S tokens of the tile, N key groups
of the tile, C rows of value scales.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from kvqjax.ops.layout import from_bits
from kvqjax.pallas_kernels.packed import PackedBody
from kvqjax.pallas_kernels.tpu import keys as tpu_keys
from kvqjax.pallas_kernels.tpu import outliers as tpu_outliers
from kvqjax.pallas_kernels.tpu.columns import dot, each, some, within
from kvqjax.pallas_kernels.tpu.plan import LANES
from kvqjax.pallas_kernels.tpu.unpack import offset

__all__ = ["NEVER", "Refs", "order_scales", "prepare", "write_limits"]

# What is prepared at once, more of which would fill the registers: tokens of value scales, key scales
TOKENS, NUMBERS = 2048, 16 * 1024
NEVER = -1e30  # a masked score: finite, so that the difference of two of them is a number


class Refs(NamedTuple):
    queries: Any  # [1, P, M, W] bf16, block-diagonal over the heads of a lane group; with q~ beside it before RoPE
    bounds: Any  # [1, M, 2] i32: first and last + 1 visible token of a row
    order: Any  # [1, block] i32: token of every lane
    onehot: Any  # [period, period] bf16: brings scales into lane order
    table: Any  # [block, 2W] bf16 or f32: cos | sin of tokens counted from the block's first (keys before RoPE)
    patterns: Any  # [rows, N] bf16: groups of the tokens of a slab (tpu_keys)
    turns: Any  # [1, blocks * 2W/128, 128] f32: cos | sin of the blocks' first positions
    key_signposts: Any  # [1, 2^b] f32, or [8, 128 or 256] u32 (see tpu_signposts)
    value_signposts: Any
    ends: Any  # [2, 2] f32 scalars: outermost signposts of keys and of values
    rates: Any  # [1, W] f32: turns per position of every lane
    body: PackedBody  # what of it the tile holds: words [1, 1, rows, P*W], scales [1, 1, N, P*W] and [1, 1, C, S]
    out: Any  # [1, 1, P, M, W] f32, the accumulator as well
    lse: Any  # [1, 1, P, M, 1] f32
    peak: Any  # [P, M, 1] f32
    total: Any  # [P, M, 1] f32
    limits: Any  # [M, S] f32: NEVER where a row must not look, else infinite
    scales: Any  # [S/128 * C, 128] f32: value scales in lane order
    lows: Any  # [S/128 * C, 128] f32: value minima, less the offset of the codes
    factors: Any  # [P*W/128 * N, 128] f32: key scales, times D^-1/2 log2(e) where queries are multiplied
    zeros: Any  # [P*W/128 * N, 128] f32: key minima likewise, less the offset of the codes
    scores: Any  # [M, S] f32
    slab_scales: Any = None  # [rows, P*W] bf16: scales of the keys of a slab (tpu_keys)
    slab_zeros: Any = None
    token_factors: Any = None  # [S/128 * F, 128] f32: what a token's keys are multiplied by, in lane order
    channel_factors: Any = None  # [P*W/128 * N, 128] f32: what the values of a key group are multiplied by
    added: Any = None  # [P, M, S] f32: what outliers of keys add to the scores
    staged: Any = None  # [3R, period] bf16
    key_slots: Any = None  # [3R, S] f32: values, lanes and lane groups of R outlier slots in lane order (tpu_outliers)
    waves: Any = None  # [2R, S] f32: cos | sin of the slots' lanes and tokens
    changes: Any = None  # [2R, S] f32: what a lane group's outliers change, times cos | sin
    value_slots: Any = None  # [3R, S] f32
    weights: Any = None  # [P, M, S] f32: weights of all lane groups
    shares: Any = None  # [8, R, 128] f32: what the outliers of 128 tokens change in each lane group


def prepare(refs: Refs, plan, tile) -> None:
    """Write limits, scales and factors of tile number `tile`."""
    write_limits(refs, plan, tile)
    order_scales(refs, plan, tile)
    _fold_constants(refs, plan, tile)
    tpu_outliers.prepare(refs, plan, tile)
    if plan.spec.key_slots:
        tpu_outliers.add_keys(refs, plan)


def write_limits(refs, plan, tile):
    """What every row may see of this tile, once for all lane groups."""
    first, last = refs.bounds[0, :, 0:1], refs.bounds[0, :, 1:2]
    for base in range(0, plan.tile, plan.block):
        token = refs.order[...] + (tile * plan.tile + base)
        refs.limits[:, base : base + plan.block] = jnp.where((token >= first) & (token < last), jnp.inf, NEVER)


def order_scales(refs, plan, tile):
    """Bring this tile's value scales and minima, and factors of its keys, into lane order, once for all lane groups."""
    count, width = plan.value_rows, math.gcd(plan.tile, TOKENS)
    # With factors the results of all lanes would fill the registers: parts one after the other.
    most = LANES if plan.wide else 2 * LANES
    parts = max(plan.period // most, 1) if plan.spec.key_factors else 1

    def pieces(number, *stored):
        """What is stored by token, in stretches of `period` tokens."""
        rows = from_bits(jnp.concatenate([ref[0, 0, :, some(number, width)] for ref in stored]), plan.spec.scales)
        if plan.slots % plan.tile:
            rows = within(rows, tile * plan.tile + number * width, plan.slots, 1)
        return [rows[:, first : first + plan.period] for first in range(0, width, plan.period)]

    def write(number, many: int, rows, part):
        product = dot(rows, refs.onehot[:, some(part, plan.period // parts)], 0)
        for i in range(many):
            scale, low = (product[(2 * i + n) * count : (2 * i + n + 1) * count] for n in range(2))
            column = number * (width // LANES) + i * (plan.period // LANES) + part * (plan.period // parts // LANES)
            _write_columns(refs.scales, scale, column)
            _write_columns(refs.lows, low - _offset(plan.spec.value_bits, plan) * scale, column)
            if plan.spec.key_factors:
                first = 2 * count * many + i * plan.spec.key_factors
                _write_columns(refs.token_factors, product[first : first + plan.spec.key_factors], column)

    def step(number):
        values = pieces(number, refs.body.value_scale, refs.body.value_low)  # [2C, period] each
        factors = pieces(number, refs.body.key_factor) if plan.spec.key_factors else []
        each(parts, functools.partial(write, number, len(values), jnp.concatenate([*values, *factors])))

    each(plan.tile // width, step)


def _offset(bits: int, plan) -> int:
    """What must be subtracted from an unpacked code; signposts are themselves."""
    return 0 if plan.spec.datatype == "nuq" else offset(bits, plan.ways)


def _write_columns(ref, x, first):
    """Write [rows, lanes] as columns of 128 lanes, one below the other, from column `first` on."""
    rows = x.shape[0]
    for i in range(x.shape[1] // LANES):
        ref[some(first + i, rows)] = x[:, i * LANES : (i + 1) * LANES]


def _fold_constants(refs: Refs, plan, tile):
    """Key scales and minima of this tile as what queries are multiplied by, once for all lane groups."""
    spec, rows = plan.spec, plan.key_rows
    most = max(NUMBERS // (max(rows, 8) * plan.lanes), 1)
    groups = math.gcd(plan.lane_groups, 1 << most.bit_length() - 1)
    width = groups * plan.lanes

    def inside(x):
        return within(x, tile * rows, plan.slots // spec.key_group, 0)

    def step(number):
        lanes = some(number, width)
        if spec.key_group:
            stored = (ref[0, 0, :, lanes] for ref in (refs.body.key_scale, refs.body.key_low))
            key = (from_bits(x, spec.scales).astype(jnp.float32) for x in stored)
        else:
            key = (ref[:, lanes] for ref in (refs.body.key_scale, refs.body.key_low))
        scale, low = (x * (1.0 if plan.multiplied else plan.spread) for x in key)
        if spec.key_group and plan.slots % plan.tile:
            scale, low = (inside(x) for x in (scale, low))
        zero = low - _offset(spec.key_bits, plan) * scale
        if refs.patterns is not None:
            tpu_keys.store_patterns(refs, scale, zero, lanes)
        _write_columns(refs.factors, scale, number * (width // LANES))
        _write_columns(refs.zeros, zero, number * (width // LANES))

    def factors(stored, number):
        factor = from_bits(stored[0, 0, :, some(number, width)], spec.scales).astype(jnp.float32)
        if plan.slots % plan.tile:
            factor = inside(factor)
        _write_columns(refs.channel_factors, factor, number * (width // LANES))

    each(plan.lane_groups // groups, step)
    if refs.body.value_factor is not None:
        each(plan.lane_groups // groups, functools.partial(factors, refs.body.value_factor))
