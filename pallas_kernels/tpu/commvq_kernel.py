"""The body of the TPU kernel on CommVQ's codes: one tile of tokens (see `commvq` for the mathematics and for the shapes
of the operands).

Shapes in comments: P groups of heads, M query rows of a group (a multiple of 8), W its channels, S tokens of the tile,
K KV heads of D channels, R rounds of V levels, N bits of values. Scores are base-2 logarithms."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvqjax.ops.packing.words import PLANE, from_bits, split_bits
from kvqjax.pallas_kernels.tpu.call import Refs
from kvqjax.pallas_kernels.tpu.columns import aligned, dot, lane_wise, loop, quotient
from kvqjax.pallas_kernels.tpu.plan import LANES
from kvqjax.pallas_kernels.tpu.softmax import over_tiles, to_weights
from kvqjax.pallas_kernels.tpu.tile import NEVER, write_limits
from kvqjax.pallas_kernels.tpu.unpack import chunks, offset

__all__ = ["kernel"]

ONES = 0x3F80, 0x3F800000  # a bfloat16 one in the lower and in the upper half of a word


def kernel(refs: Refs, ends, plan):
    """Attend to one tile. Grid (row, tile); `refs` as declared in `commvq`, `ends` from `rows.tile_ends`."""

    def work(tile):
        _prepare(refs, plan, tile)
        loop(plan.groups, lambda group: _score_group(refs, plan, group))
        to_weights(refs)
        _weigh(refs)
        loop(plan.spec.value_width // LANES, lambda part: _sum_bits(refs, plan, part))

    over_tiles(refs, ends, work)


def _prepare(refs: Refs, plan, tile) -> None:
    """Write limits, prescale and gain of the tokens, and the levels of the keys of tile number `tile`."""
    for number, part in enumerate(split_bits(plan.spec.bits)):
        _order_words(refs, number, part, tile)
    loop(plan.tile // LANES, lambda column: _write_levels(refs, plan, column))
    write_limits(refs, plan, tile)
    loop(4, lambda plane: _write_factors(refs, plane))


def _write_factors(refs: Refs, plane):
    """Bring prescale and gain of the tokens of plane number `plane` of all columns into lane order."""
    shape, early, in_plane = refs.sizes.shape, refs.places[2] < 4, refs.places[0] == plane
    lane = (refs.places[2] & 3) * PLANE + refs.places[1]
    for stored, ref in ((refs.prescale, refs.sizes), (refs.gain, refs.gains)):
        low, high = (stored[0, 0, :, aligned(2 * plane + i, LANES)] for i in range(2))
        low, high = (jnp.broadcast_to(from_bits(x, "bfloat16").astype(jnp.float32), shape) for x in (low, high))
        ref[...] = jnp.where(in_plane, _lanes(jnp.where(early, low, high), lane), ref[...])


def _lanes(x, index):
    """Permute 128 lanes: x[i, index[i, j]]."""
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


def _order_words(refs: Refs, number: int, part: int, tile):
    """Bring the words of plane set `number` into lane order, the planes of column 0 lowest. A block of 128 words holds
    those of one tile or of several."""
    words, planes = pltpu.bitcast(refs.key_codes[number][0, 0], jnp.int32), 32 // part
    if words.shape[1] < LANES:
        words = jnp.concatenate([words] * (LANES // words.shape[1]), axis=1)
    first = jax.lax.rem(tile, jnp.int32(planes // 8)) * (PLANE * part)
    plane, count = 8 * refs.places[0], words.shape[0]
    lane = first + quotient(plane, planes) * PLANE + refs.places[1]
    lane, shift = (jnp.concatenate([x] * -(-count // 8))[:count] for x in (lane, (plane & (planes - 1)) * part))
    refs.words[number] = jax.lax.shift_right_logical(_lanes(words, lane), shift)


def _write_levels(refs: Refs, plan, column):
    """Write the levels of 128 tokens, column number `column`, as `_one_hot` wants them: which word of a one-hot column,
    and which half of it."""
    level, low = jnp.int32(0), 0
    for number, part in enumerate(split_bits(plan.spec.bits)):
        words = refs.words[number]
        shifted = jax.lax.shift_right_logical(words, jnp.full_like(words, column * part))
        level = level | ((shifted & ((1 << part) - 1)) << low)
        low += part
    rows = pl.ds(pl.multiple_of(column * plan.key_rows, 8), plan.key_rows)
    refs.pairs[rows] = level >> 1
    refs.ones[rows] = jnp.where((level & 1) == 0, jnp.int32(ONES[0]), jnp.int32(ONES[1]))


def _score_group(refs: Refs, plan, group):
    """Write the scores of one group of heads, and their maxima into `top`. The two steps are loops of their own: side
    by side they would need more registers than there are."""
    loop(plan.tile // plan.chunk, functools.partial(_multiply, refs, plan, group))
    step, empty = functools.partial(_score, refs, plan, group), jnp.full((plan.rows, LANES), NEVER)
    top = jax.lax.fori_loop(0, plan.tile // plan.slice, step, empty)
    refs.top[aligned(group, plan.rows)] = top.max(-1, keepdims=True)


def _multiply(refs: Refs, plan, group, number):
    """Make the keys of a group of heads for a chunk of tokens, before prescale and rotation, as two summands. So no
    product waits for the sum of those before it."""
    dim, levels = plan.spec.head_dim, plan.spec.levels
    for member in range(plan.shared):
        head, tokens = group * plan.shared + member, aligned(number, plan.chunk)
        for step, codes in enumerate(plan.steps):
            lanes = slice(codes[0] * levels, (codes[-1] + 1) * levels)
            columns = _one_hot(refs, plan, head, number, codes)
            product = dot(refs.matrix[aligned(head, dim), lanes], columns, 0)
            place = step % plan.summands, slice(member * dim, (member + 1) * dim), tokens
            refs.products[place] = product if step < plan.summands else product + refs.products[place]


def _score(refs: Refs, plan, group, number, top):
    """Rotate the keys of a slice of tokens by their offsets in the tile, multiply them by the queries and write the
    scores. Return the maxima so far, [M, 128]."""
    tokens, half = aligned(number, plan.slice), plan.spec.head_dim // 2
    cos, sin, scores = refs.cos[:, tokens], refs.sin[:, tokens], jnp.zeros((plan.rows, plan.slice))
    for head in range(plan.shared):
        parts = (slice((2 * head + i) * half, (2 * head + i + 1) * half) for i in range(2))
        first, second = (sum(refs.products[i, part, tokens] for i in range(plan.summands)) for part in parts)
        keys = jnp.concatenate([first * cos - second * sin, second * cos + first * sin]).astype(jnp.bfloat16)
        lanes = slice(2 * head * half, 2 * (head + 1) * half)
        scores = scores + dot(refs.queries[0, 0, group, :, lanes], keys, 0)
    columns = plan.slice // LANES
    sizes = [refs.sizes[pl.ds(number * columns + i, 1)] for i in range(columns)]
    scores = jnp.minimum(scores * jnp.concatenate(sizes, axis=1), refs.limits[:, tokens])
    refs.scores[aligned(group, plan.rows), tokens] = scores
    return jnp.maximum(top, lane_wise(jnp.maximum, scores))


def _one_hot(refs: Refs, plan, head, number, codes: range):
    """Return one-hot columns of some levels of a head, one below the other, for a chunk of tokens: [len(codes) V,
    chunk] bf16. Two neighbouring levels are the halves of one word."""
    words, shape = plan.spec.levels // 2, (8, LANES)
    row, columns = jax.lax.broadcasted_iota(jnp.int32, shape, 0), []
    for i in range(plan.chunk // LANES):
        pieces = []
        for code in codes:
            at = (number * (plan.chunk // LANES) + i) * plan.key_rows + code * plan.spec.kv_heads + head
            pair, value = (jnp.broadcast_to(ref[pl.ds(at, 1)], shape) for ref in (refs.pairs, refs.ones))
            pieces += [jnp.where(pair == row + first, value, 0) for first in range(0, words, 8)]
        columns.append(pltpu.bitcast(jnp.concatenate(pieces), jnp.bfloat16))
    return jnp.concatenate(columns, axis=1)


def _weigh(refs: Refs):
    """Write the softmax weights times the tokens' gains."""
    for column in range(refs.gains.shape[0]):
        lanes = slice(column * LANES, (column + 1) * LANES)
        refs.weights[:, lanes] = (refs.scores[:, lanes] * refs.gains[column : column + 1]).astype(jnp.bfloat16)


def _sum_bits(refs: Refs, plan, part):
    """Add 128 bits of the tile's values, weighted, to the running sums."""
    lanes = aligned(part, LANES)
    words = refs.value_bits[0, 0, :, lanes]
    pieces = [piece.astype(jnp.bfloat16) for piece in chunks([words], 1, 1, plan.ways)]
    columns = plan.tile // LANES
    bits = [jnp.concatenate(pieces[column::columns]) for column in range(columns)]
    product = dot(refs.weights[...], jnp.concatenate(bits), 0)
    product = product - offset(1, plan.ways) * refs.weights[...].astype(jnp.float32).sum(-1, keepdims=True)
    refs.out[0, :, lanes] = refs.out[0, :, lanes] * refs.top[...] + product
