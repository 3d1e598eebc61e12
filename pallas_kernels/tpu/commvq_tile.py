"""What the TPU kernel on CommVQ's codes prepares once per tile of tokens: limits, factors of tokens, and the levels of
the keys, tokens on the lanes in the order of `CommVQPlan`.

Shapes in comments as in `commvq_kernel`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvqjax.ops.layout import PLANE, from_bits, split_bits
from kvqjax.pallas_kernels.tpu.columns import each, quotient, some
from kvqjax.pallas_kernels.tpu.plan import LANES
from kvqjax.pallas_kernels.tpu.tile import write_limits

__all__ = ["ONES", "Refs", "prepare"]

ONES = 0x3F80, 0x3F800000  # a bfloat16 one in the lower and in the upper half of a word


class Refs(NamedTuple):
    queries: Any  # [1, 1, P, M, W] bf16, block-diagonal over the heads of a group, rotated back by the tile's position
    bounds: Any  # [1, M, 2] i32: first and last + 1 visible token of a row
    order: Any  # [1, S] i32: token of every lane
    places: Any  # [3, 8, 128] i32: plane (of a column's four), row of words and column of every lane of a tile
    cos: Any  # [D/2, S] f32 of every token's offset in the tile
    sin: Any
    matrix: Any  # [K*D, 2R*V] bf16
    key_codes: Any  # words of each plane set [1, 1, 2R*K, 128]
    prescale: Any  # [1, 1, 1, S] u16
    value_bits: Any  # words [1, 1, 32, N]
    gain: Any  # [1, 1, 1, S] u16
    out: Any  # [1, P*M, N] f32, the accumulator as well
    lse: Any  # [1, P*M, 1] f32
    peak: Any  # [P*M, 1] f32
    total: Any  # [P*M, 1] f32
    top: Any  # [P*M, 1] f32: maxima of this tile's scores
    limits: Any  # [M, S] f32: NEVER where a row must not look, else infinite
    sizes: Any  # [S/128, 128] f32: prescale of every token
    gains: Any  # [S/128, 128] f32
    words: Any  # [sets, 2R*K, 128] i32: words of the key codes, a column's planes in turn
    pairs: Any  # [S/128 * 2R*K, 128] i32: every level's half
    ones: Any  # [S/128 * 2R*K, 128] i32: which of `ONES` it puts there
    products: Any  # [2 or 1, W, S] f32: summands of the keys of a group before rotation
    scores: Any  # [P*M, S] f32: scores, then weights
    weights: Any  # [P*M, S] bf16: weights times gains


def prepare(refs: Refs, plan, tile) -> None:
    """Write limits, factors of tokens and levels of keys of tile number `tile`."""
    for number, part in enumerate(split_bits(plan.spec.bits)):
        _order_words(refs, number, part, tile)
    each(plan.tile // LANES, lambda column: _write_levels(refs, plan, column))
    write_limits(refs, plan, tile)
    each(4, lambda plane: _write_factors(refs, plane))


def _write_factors(refs: Refs, plane):
    """Prescale and gain of the tokens of plane number `plane` of all columns, in lane order."""
    shape, early, here = refs.sizes.shape, refs.places[2] < 4, refs.places[0] == plane
    lane = (refs.places[2] & 3) * PLANE + refs.places[1]
    for stored, ref in ((refs.prescale, refs.sizes), (refs.gain, refs.gains)):
        low, high = (stored[0, 0, :, some(2 * plane + i, LANES)] for i in range(2))
        low, high = (jnp.broadcast_to(from_bits(x, "bfloat16").astype(jnp.float32), shape) for x in (low, high))
        ref[...] = jnp.where(here, _lanes(jnp.where(early, low, high), lane), ref[...])


def _lanes(x, index):
    """x[i, index[i, j]]: a permutation of 128 lanes."""
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


def _order_words(refs: Refs, number: int, part: int, tile):
    """The words of plane set `number` in lane order, the planes of column 0 lowest. A block of 128 words holds those of
    one tile or of several."""
    words, planes = pltpu.bitcast(refs.key_codes[number][0, 0], jnp.int32), 32 // part
    if words.shape[1] < LANES:
        words = jnp.concatenate([words] * (LANES // words.shape[1]), axis=1)
    first = jax.lax.rem(tile, jnp.int32(planes // 8)) * (PLANE * part)
    plane, count = 8 * refs.places[0], words.shape[0]
    lane = first + quotient(plane, planes) * PLANE + refs.places[1]
    lane, shift = (jnp.concatenate([x] * -(-count // 8))[:count] for x in (lane, (plane & (planes - 1)) * part))
    refs.words[number] = jax.lax.shift_right_logical(_lanes(words, lane), shift)


def _write_levels(refs: Refs, plan, column):
    """The levels of 128 tokens as one-hot columns want them."""
    level, low = jnp.int32(0), 0
    for number, part in enumerate(split_bits(plan.spec.bits)):
        words = refs.words[number]
        moved = jax.lax.shift_right_logical(words, jnp.full_like(words, column * part))
        level = level | ((moved & ((1 << part) - 1)) << low)
        low += part
    here = pl.ds(pl.multiple_of(column * plan.key_rows, 8), plan.key_rows)
    refs.pairs[here] = level >> 1
    refs.ones[here] = jnp.where((level & 1) == 0, jnp.int32(ONES[0]), jnp.int32(ONES[1]))
