"""Prepare what all lane groups of a tile share: which tokens each query row sees, and scales and
minima laid out for the products.

Shapes as declared in `packed`: P lane groups, M query rows of a lane group, W its lanes, S tokens
of the tile, N key groups of the tile, C value scales of a token. Lane order is the order in which
unpacked tokens come (`unpack`).

Codes are unpacked to numbers that are too large by an offset (`unpack.offset`). A decoded number is
s (c + offset) + (m - offset s), so that the offset is taken off every minimum m once, in
advance."""

import functools
import math

import jax.numpy as jnp

from kvqjax.ops.packing.base import from_bits
from kvqjax.pallas_kernels.tpu import keys as tpu_keys
from kvqjax.pallas_kernels.tpu import outliers as tpu_outliers
from kvqjax.pallas_kernels.tpu.call import Refs
from kvqjax.pallas_kernels.tpu.columns import aligned, dot, loop, zero_beyond
from kvqjax.pallas_kernels.tpu.plan import LANES
from kvqjax.pallas_kernels.tpu.unpack import offset

# How much is prepared at once, so that it fits the registers.
TOKENS = 2048  # of whose values scales are brought into lane order
NUMBERS = 16 * 1024  # scales of keys
NEVER = -1e30  # a masked score: finite, so that the difference of two of them is a number


def prepare(refs: Refs, plan, tile) -> None:
    """Write limits, scales and minima of tile number `tile`, its outliers, and what those of keys
    add to scores."""
    write_limits(refs, plan, tile)
    order_scales(refs, plan, tile)
    if not plan.spec.key_channels:
        _fold_constants(refs, plan, tile)
    tpu_outliers.prepare(refs, plan, tile)
    if plan.spec.key_slots:
        tpu_outliers.add_keys(refs, plan)


def write_limits(refs, plan, tile):
    """Write `limits` [M, S]: infinite where a row sees the token, NEVER elsewhere. Scores are cut
    to them."""
    start = refs.bounds[0, :, 0:1]  # [M, 1]
    stop = refs.bounds[0, :, 1:2]
    for first in range(0, plan.tile, plan.block):
        token = refs.order[...] + (tile * plan.tile + first)  # [1, block]
        is_seen = (token >= start) & (token < stop)
        refs.limits[:, first : first + plan.block] = jnp.where(is_seen, jnp.inf, NEVER)


def order_scales(refs, plan, tile):
    """Bring into lane order what this tile stores by token.

    This is every value's scale and minimum, [C, S] to [S/128 * C, 128]. Where keys have numbers per
    token, it is also their scales and minima, or their factors."""
    spec = plan.spec
    count = plan.value_rows
    # What a token's keys have: a scale and a minimum for each head, or factors, or nothing.
    key_count = 2 * spec.kv_heads if spec.key_channels else spec.key_factors
    # `width` tokens are ordered in one step of the loop, as stretches of `period` tokens, after
    # which the order repeats itself. All stretches stand one below the other in one product with
    # the one-hot matrix of the order.
    most = TOKENS // 2 if key_count and plan.wide else TOKENS
    width = math.gcd(plan.tile, most)
    # With keys' numbers beside the values' the results of all lanes would fill the registers. So
    # lanes come in parts.
    parts = 1
    if key_count:
        parts = max(plan.period // (plan.chip.scale_columns * LANES), 1)
    part_lanes = plan.period // parts

    def stretches_of(number, tokens, *stored):
        """Load what is stored by token, in stretches of `period` tokens: [rows of all `stored`,
        period] each."""
        words = jnp.concatenate([ref[0, 0, :, tokens] for ref in stored])
        rows = from_bits(words, plan.spec.scales)
        if plan.slots % plan.tile:  # the last tile reads beyond the body
            rows = zero_beyond(rows, tile * plan.tile + number * width, plan.slots, 1)
        return [rows[:, first : first + plan.period] for first in range(0, width, plan.period)]

    def write(number, stretches: int, rows, part):
        """Order one part of the lanes of all stretches, and write it. `rows` has the 2C rows of
        values of every stretch, then the rows of keys of every stretch."""
        product = dot(rows, refs.onehot[:, aligned(part, part_lanes)], 0)
        for i in range(stretches):
            # Columns of 128 lanes before this step's tokens, and before this part of them.
            of_earlier_steps = number * (width // LANES)
            of_earlier_parts = i * (plan.period // LANES) + part * (part_lanes // LANES)
            column = of_earlier_steps + of_earlier_parts
            values = product[2 * i * count : 2 * (i + 1) * count]
            first_key = 2 * count * stretches + i * key_count
            keys = product[first_key : first_key + key_count]
            lift = _offset(spec.value_bits, plan)
            _write_pair(refs.scales, refs.lows, values, column, lift)
            if spec.key_channels:
                # The scores, and so what keys multiply, are in units of `spread`.
                scaled = keys * plan.spread
                lift = _offset(spec.key_bits, plan)
                _write_pair(refs.key_scales, refs.key_lows, scaled, column, lift)
            elif spec.key_factors:
                _write_columns(refs.token_factors, keys, column)

    def step(number):
        """Order the numbers of `width` tokens."""
        tokens = aligned(number, width)
        body = refs.body
        by_token = stretches_of(number, tokens, body.value_scale, body.value_low)  # [2C, period]
        stretches = len(by_token)
        if spec.key_channels:
            by_token += stretches_of(number, tokens, body.key_scale, body.key_low)
        elif spec.key_factors:
            by_token += stretches_of(number, tokens, body.key_factor)
        write_part = functools.partial(write, number, stretches, jnp.concatenate(by_token))
        if parts == 1:
            write_part(0)
        else:
            loop(parts, write_part)

    loop(plan.tile // width, step)


def _offset(bits: int, plan) -> int:
    """Return the offset of an unpacked code; codes that index signposts have none."""
    if plan.spec.datatype == "nuq":
        return 0
    return offset(bits, plan.ways)


def _write_columns(ref, x, first):
    """Write [rows, lanes] as columns of 128 lanes, one below the other, from column `first` on."""
    rows = x.shape[0]
    for i in range(x.shape[1] // LANES):
        ref[aligned(first + i, rows)] = x[:, i * LANES : (i + 1) * LANES]


def _write_pair(scales, lows, pair, first, lift: int):
    """Write scales and minima [2C, lanes] as `_write_columns` does. The offset `lift` of their
    codes is taken off the minima."""
    scale, low = jnp.split(pair, 2)
    _write_columns(scales, scale, first)
    _write_columns(lows, low - lift * scale, first)


def _fold_constants(refs: Refs, plan, tile):
    """Write this tile's key scales and minima, and the channel factors of its values: [N, P*W] to
    [P*W/128 * N, 128].

    Scales and minima of keys multiply the queries, or the codes (`Plan.multiplied`)."""
    spec = plan.spec
    rows = plan.key_rows
    # Lane groups that are written in one step of the loop: a power of two that divides their
    # number, and so few that their scales fit the registers. A register has 8 rows, filled or not.
    most = max(NUMBERS // (max(rows, 8) * plan.lanes), 1)
    groups = math.gcd(plan.lane_groups, 1 << most.bit_length() - 1)
    width = groups * plan.lanes
    columns = width // LANES  # of 128 lanes, that one step writes

    def inside(x):
        """Set to 0 what the last tile reads beyond the body's key groups."""
        return zero_beyond(x, tile * rows, plan.slots // spec.key_group, 0)

    def stored(ref, lanes):
        """Load scales, minima or factors of key groups as float32, [N, lanes]."""
        words = ref[0, 0, :, lanes]
        return from_bits(words, spec.scales).astype(jnp.float32)

    def of_keys(ref, lanes):
        """Load the keys' scales or minima, multiplied by what queries or codes need."""
        if spec.key_group:
            numbers = stored(ref, lanes)
        else:  # constants of the layer, stored as float32
            numbers = ref[:, lanes]
        # Queries are multiplied by scale and `spread` at once. Where scales multiply the codes
        # instead, the scores themselves, or the rotations of the queries, are multiplied by
        # `spread`.
        return numbers * (1.0 if plan.multiplied else plan.spread)

    def step(number):
        """Write the scales and minima of the keys of some lane groups."""
        lanes = aligned(number, width)
        scale = of_keys(refs.body.key_scale, lanes)
        low = of_keys(refs.body.key_low, lanes)
        if spec.key_group and plan.slots % plan.tile:
            scale = inside(scale)
            low = inside(low)
        zero = low - _offset(spec.key_bits, plan) * scale
        if plan.slabs:
            tpu_keys.store_patterns(refs, scale, zero, lanes)
        _write_columns(refs.factors, scale, number * columns)
        _write_columns(refs.zeros, zero, number * columns)

    def write_factors(number):
        """Write the channel factors of the values of some lane groups."""
        factor = stored(refs.body.value_factor, aligned(number, width))
        if plan.slots % plan.tile:
            factor = inside(factor)
        _write_columns(refs.channel_factors, factor, number * columns)

    loop(plan.lane_groups // groups, step)
    if refs.body.value_factor is not None:
        loop(plan.lane_groups // groups, write_factors)
