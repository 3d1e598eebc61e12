"""What the TPU kernel on packed latents prepares once per tile of tokens: limits, value scales and the key latents.

Shapes in comments as in `latents_kernel`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from kvqjax.ops.layout import from_bits
from kvqjax.pallas_kernels.packed import PackedBody
from kvqjax.pallas_kernels.tpu.columns import dot, each, place_of, within, words_of
from kvqjax.pallas_kernels.tpu.plan import LANES
from kvqjax.pallas_kernels.tpu.tile import order_scales, write_limits
from kvqjax.pallas_kernels.tpu.unpack import chunks, offset

__all__ = ["Refs", "prepare"]


class Refs(NamedTuple):
    queries: Any  # [1, P, M, W] f32, block-diagonal over the heads of a group, times D^-1/2 log2(e)
    turns: Any  # [1, 2*n, W/2] f32: cosine and sine of the first positions of the tile's n stretches
    bounds: Any  # [1, M, 2] i32: first and last + 1 visible token of a row
    order: Any  # [1, block] i32: token of every lane
    onehot: Any  # [period, period] bf16: brings value scales into lane order
    spread: Any  # [8 * chunks, N] bf16: brings key scales to the rows of unpacked codes
    cos: Any  # [S, W/2] f32 of every token's offset in its stretch
    sin: Any
    own: Any  # [M, W] bf16: 1 in the lanes of a row's head
    up: Any  # [R, P*W] bf16
    maps: Any  # [2, P*W] f32: bias and gain
    body: PackedBody  # what of the latents the tile holds: words [1, 1, rows, R], scales [1, 1, N, R] and [1, 1, C, S]
    out: Any  # [1, P*M, R] f32, the accumulator as well
    lse: Any  # [1, P*M, 1] f32
    peak: Any  # [P*M, 1] f32
    total: Any  # [P*M, 1] f32
    top: Any  # [P*M, 1] f32: maxima of this tile's scores
    limits: Any  # [M, S] f32: NEVER where a row must not look, else infinite
    scales: Any  # [S/128 * C, 128] f32: value scales in lane order
    lows: Any  # likewise minima, less the offset of the codes
    factors: Any  # [8 * chunks, R] f32: key scales of the 8 rows that repeat in a chunk
    zeros: Any  # likewise minima, less the offset of the codes
    products: Any  # [S, W] f32: latents times up-projection
    scores: Any  # [P*M, S] f32: scores, then weights
    latents: Any  # [S, R] bf16: of the keys


def prepare(refs: Refs, plan, tile) -> None:
    """Write limits, value scales and key latents of tile number `tile`."""
    write_limits(refs, plan.parts, tile)
    order_scales(refs, plan.parts, tile)
    each(plan.parts.lane_groups, lambda part: _spread_scales(refs, plan, tile, part))
    each(plan.parts.lane_groups, lambda part: _unpack_latents(refs, plan, part))


def _spread_scales(refs: Refs, plan, tile, part):
    """Key scales and minima of 128 channels, on the rows that repeat themselves in every chunk of unpacked codes."""
    parts, place = plan.parts, place_of(part, plan.parts)
    scale, low = (
        from_bits(x[0, 0, :, place.lanes], parts.spec.scales) for x in (refs.body.key_scale, refs.body.key_low)
    )
    if parts.slots % parts.tile:
        limit = parts.slots // parts.spec.key_group
        scale, low = (within(x, tile * x.shape[0], limit, 0) for x in (scale, low))
    factor = dot(refs.spread[...], scale, 0)
    refs.factors[:, place.lanes] = factor
    zero = dot(refs.spread[...], low, 0) - offset(parts.spec.key_bits, parts.ways) * factor
    refs.zeros[:, place.lanes] = zero


def _unpack_latents(refs: Refs, plan, part):
    """128 channels of the tile's key latents as bfloat16 numbers, tokens in lane order."""
    parts, place = plan.parts, place_of(part, plan.parts)
    for index in range(parts.tile // parts.block):
        for i, codes in enumerate(_codes(refs, plan, place, index)):
            count = codes.shape[0]
            at = index * (parts.block // count) + i
            factor, zero = (ref[8 * at : 8 * at + 8, place.lanes] for ref in (refs.factors, refs.zeros))
            wide = codes.astype(jnp.float32).reshape(-1, 8, LANES)
            wide = (wide * factor[None] + zero[None]).reshape(codes.shape)
            refs.latents[at * count : (at + 1) * count, place.lanes] = wide.astype(jnp.bfloat16)


def _codes(refs: Refs, plan, place, index: int):
    """Key codes of block `index` of the tile, [32 * ways, 128] at a time."""
    parts, bits = plan.parts, plan.parts.spec.key_bits
    return chunks(words_of(refs.body.key_codes, bits, place, index, parts), bits, parts.base, parts.ways)
