"""The body of the TPU kernel on packed latents: one tile of tokens (see `latents` for the
mathematics and for the shapes of the operands).

`plan.parts` is the plan of the latents alone: it takes every 128 channels of the R for a lane
group, or part. The plan itself is that of the keys which are made from latents.

Shapes in comments: P groups of heads, M query rows of a group (a multiple of 8), W its lanes, S
tokens of the tile, N key groups of the tile, C value scales of a token, R the rank. Scores are
base-2 logarithms."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvqjax.ops.packing.base import from_bits
from kvqjax.pallas_kernels.tpu.call import Refs
from kvqjax.pallas_kernels.tpu.columns import (
    aligned,
    columns,
    dot,
    filled,
    lane_wise,
    load_row,
    loop,
    place_of,
    words_of,
    zero_beyond,
)
from kvqjax.pallas_kernels.tpu.plan import LANES
from kvqjax.pallas_kernels.tpu.softmax import over_tiles, to_weights
from kvqjax.pallas_kernels.tpu.tile import NEVER, order_scales, write_limits
from kvqjax.pallas_kernels.tpu.unpack import chunks, offset


def kernel(refs: Refs, ends, plan):
    """Attend to one tile. Grid (row, tile); `refs` as declared in `latents`, `ends` from
    `rows.tile_ends`."""

    def work(tile):
        _prepare(refs, plan, tile)
        loop(plan.groups, lambda group: _score_group(refs, plan, group))
        to_weights(refs)
        if plan.apart:
            loop(plan.parts.lane_groups, lambda part: _sum_minima(refs, plan, part))
        loop(plan.parts.lane_groups, lambda part: _sum_latents(refs, plan, part))

    over_tiles(refs, ends, work)


def _prepare(refs: Refs, plan, tile) -> None:
    """Write limits, value scales and key latents of tile number `tile`."""
    write_limits(refs, plan.parts, tile)
    order_scales(refs, plan.parts, tile)
    loop(plan.parts.lane_groups, lambda part: _spread_scales(refs, plan, tile, part))
    loop(plan.parts.lane_groups, lambda part: _unpack_latents(refs, plan, part))


def _spread_scales(refs: Refs, plan, tile, part):
    """Write key scales and minima of 128 channels in lane order.

    The key groups of the tokens in a chunk of unpacked codes repeat themselves after 8 rows. So
    each chunk has 8 rows of scales (`LatentPlan.pattern`), [chunks * 8, 128]."""
    parts, place = plan.parts, place_of(part, plan.parts)
    stored = (refs.body.key_scale, refs.body.key_low)
    scale, low = (from_bits(x[0, 0, :, place.lanes], parts.spec.scales) for x in stored)  # [N, 128]
    if parts.slots % parts.tile:
        limit = parts.slots // parts.spec.key_group
        scale, low = (zero_beyond(x, tile * x.shape[0], limit, 0) for x in (scale, low))
    # Each row of `spread` has a single 1: it picks the scales of one group.
    factor = dot(refs.spread[...], scale, 0)
    refs.factors[:, place.lanes] = factor
    # The offset of unpacked codes is taken off the minima.
    zero = dot(refs.spread[...], low, 0) - offset(parts.spec.key_bits, parts.ways) * factor
    refs.zeros[:, place.lanes] = zero


def _unpack_latents(refs: Refs, plan, part):
    """Write 128 channels of the tile's key latents as bfloat16 numbers, tokens in lane order."""
    parts, place = plan.parts, place_of(part, plan.parts)
    for index in range(parts.tile // parts.block):
        for i, codes in enumerate(_codes(refs, plan, place, index)):
            count = codes.shape[0]  # tokens of a chunk of unpacked codes
            at = index * (parts.block // count) + i  # number of the chunk in the tile
            factor, zero = (
                ref[8 * at : 8 * at + 8, place.lanes] for ref in (refs.factors, refs.zeros)
            )
            by_eights = codes.astype(jnp.float32).reshape(-1, 8, LANES)
            latents = (by_eights * factor[None] + zero[None]).reshape(codes.shape)
            refs.latents[at * count : (at + 1) * count, place.lanes] = latents.astype(jnp.bfloat16)


def _codes(refs: Refs, plan, place, index: int):
    """Yield the key codes of block `index` of the tile, [32 * ways, 128] at a time."""
    parts, bits = plan.parts, plan.parts.spec.key_bits
    return chunks(
        words_of(refs.body.key_codes, bits, place, index, parts), bits, parts.base, parts.ways
    )


def _score_group(refs: Refs, plan, group):
    """Write the scores of one group of heads, and their maxima into `top`."""
    # Products and scores have loops of their own: in one loop they would need more registers than
    # there are.
    for piece in range(plan.lanes // plan.columns):
        loop(plan.parts.tile // plan.chunk, functools.partial(_multiply, refs, plan, group, piece))
    step = functools.partial(_score, refs, plan, group)
    top = jax.lax.fori_loop(
        0, plan.parts.tile // plan.slice, step, jnp.full((plan.rows, LANES), NEVER)
    )
    refs.top[aligned(group, plan.rows)] = top.max(-1, keepdims=True)


def _turned_back(refs: Refs, plan, group, number):
    """Rotate the queries of a group back by the first position of slice `number`'s stretch: [M, W]
    bf16."""
    stretch = jax.lax.div(number, jnp.int32(plan.stretch // plan.slice))
    cos, sin = (refs.turns[0, pl.ds(2 * stretch + i, 1)] for i in range(2))
    first, second = refs.queries[0, group, :, : plan.half], refs.queries[0, group, :, plan.half :]
    turned = jnp.concatenate([first * cos + second * sin, second * cos - first * sin], axis=1)
    return turned.astype(jnp.bfloat16)


def _multiply(refs: Refs, plan, group, piece: int, chunk):
    """Make keys of a group of heads, before bias and rotation, for one chunk of tokens.

    `plan.columns` channels, those of number `piece`, are made from `plan.columns` latents at a
    time: as many as the matrix unit has."""
    tokens, lanes = aligned(chunk, plan.chunk), aligned(piece, plan.columns)
    group_lanes = aligned(group * (plan.lanes // plan.columns) + piece, plan.columns)
    for depth in range(0, plan.spec.rank, plan.columns):
        inner = slice(depth, depth + plan.columns)
        product = dot(refs.latents[tokens, inner], refs.up[inner, group_lanes], 0)
        refs.products[tokens, lanes] = product + refs.products[tokens, lanes] if depth else product


def _score(refs: Refs, plan, group, number, top):
    """Add the bias, rotate the keys of a slice of tokens by their offsets, multiply them by the
    queries and write the scores. Return the maxima so far, [M, 128]."""
    tokens, lanes = aligned(number, plan.slice), aligned(group, plan.lanes)
    cos, sin = refs.cos[tokens], refs.sin[tokens]
    keys = refs.products[tokens] + refs.maps[0:1, lanes]  # the bias
    inverse_norm = None
    # QK-norm divides a head's key by its root mean square and multiplies it by weights. The divisor
    # is one number per token and head, and so multiplies the scores.
    if plan.spec.epsilon:
        # `own` has ones in every query row on the channels of the row's head: sums of squares, [M,
        # slice].
        square = dot(refs.own[...], (keys * keys).astype(jnp.bfloat16), 1)
        inverse_norm = jax.lax.rsqrt(square / plan.spec.head_dim + plan.spec.epsilon)
        keys = keys * refs.maps[1:2, lanes]
    first, second = keys[:, : plan.half], keys[:, plan.half :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)
    scores = dot(_turned_back(refs, plan, group, number), rotated.astype(jnp.bfloat16), 1)
    if inverse_norm is not None:
        scores = scores * inverse_norm
    scores = jnp.minimum(scores, refs.limits[:, tokens])
    refs.scores[aligned(group, plan.rows), tokens] = scores
    return jnp.maximum(top, lane_wise(jnp.maximum, scores))


def _own_rows(ref, parts, part, begin: int):
    """Load value scales, or minima, of 128 channels for the column of tokens from `begin` on, on
    all query rows."""
    row = jax.lax.div(part * LANES, jnp.int32(parts.spec.value_group))
    return filled(load_row(ref, row, parts.value_rows, begin // LANES, parts.column), parts)


def _minima(refs: Refs, parts, part, begin: int):
    """Multiply the minima of 128 channels by the weights of a column of tokens: [P*M, 128], to be
    summed over lanes."""
    weights = refs.scores[:, begin : begin + parts.column]
    return lane_wise(jnp.add, weights * _own_rows(refs.lows, parts, part, begin))


def _sum_minima(refs: Refs, plan, part):
    """Rescale the running sums of 128 channels and add the tile's weighted minima."""
    parts, lanes = plan.parts, place_of(part, plan.parts).lanes
    lows = jnp.zeros((parts.rows, LANES))  # summed over lanes once, at the end
    for begin in range(0, parts.tile, parts.column):
        lows = lows + _minima(refs, parts, part, begin)
    refs.out[0, :, lanes] = refs.out[0, :, lanes] * refs.top[...] + lows.sum(-1, keepdims=True)


def _sum_latents(refs: Refs, plan, part):
    """Add 128 channels of the tile's weighted value latents to the running sums.

    Where `_sum_minima` has run (`LatentPlan.apart`), it has rescaled the running sums and added the
    minima."""
    parts, place = plan.parts, place_of(part, plan.parts)
    lows, product = jnp.zeros((parts.rows, LANES)), jnp.zeros((parts.rows, LANES))
    for index in range(parts.tile // parts.block):
        codes = columns(
            refs.body.value_codes, None, parts.spec.value_bits, place, index, parts, parts.mixed
        )
        for i, column in enumerate(codes):
            begin = index * parts.block + i * parts.column
            weights = refs.scores[:, begin : begin + parts.column] * _own_rows(
                refs.scales, parts, part, begin
            )
            lows = lows if plan.apart else lows + _minima(refs, parts, part, begin)
            product = product + dot(weights.astype(jnp.bfloat16), column, 0)
    sums = refs.out[0, :, place.lanes]
    if not plan.apart:
        sums = sums * refs.top[...] + lows.sum(-1, keepdims=True)
    refs.out[0, :, place.lanes] = sums + product
