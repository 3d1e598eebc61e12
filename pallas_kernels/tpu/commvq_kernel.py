"""The body of the TPU kernel on CommVQ's codes: one tile of tokens (see `commvq` for the
mathematics and for the shapes of the operands).

A tile has 32 planes of 32 tokens. In lane order it is 8 columns of 128 tokens. Column c has the
planes c, c + 8, c + 16 and c + 24 (`CommVQPlan.order`). `refs.places` [3, 8, 128] says of the token
on every lane of every column which of the column's four planes it is in, which row of the plane it
is, and the number of the column.

Shapes in comments: P groups of heads, M query rows of a group (a multiple of 8), W its channels, S
tokens of the tile, K KV heads of D channels, R rounds of V levels, N bits of values. Scores are
base-2 logarithms."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvqjax.ops.packing.base import PLANE, from_bits, split_bits
from kvqjax.pallas_kernels.tpu.call import Refs
from kvqjax.pallas_kernels.tpu.columns import aligned, dot, lane_wise, loop, quotient
from kvqjax.pallas_kernels.tpu.plan import LANES
from kvqjax.pallas_kernels.tpu.softmax import over_tiles, to_weights
from kvqjax.pallas_kernels.tpu.tile import NEVER, write_limits
from kvqjax.pallas_kernels.tpu.unpack import chunks, offset

ONES = 0x3F80, 0x3F800000  # a bfloat16 one in the lower and in the upper half of a word


def kernel(refs: Refs, ends, plan):
    """Attend to one tile. Grid (row, tile); `refs` as declared in `commvq`, `ends` from
    `rows.tile_ends`."""

    def work(tile):
        _prepare(refs, plan, tile)
        loop(plan.groups, lambda group: _score_group(refs, plan, group))
        to_weights(refs)
        _weigh(refs)
        loop(plan.spec.value_width // LANES, lambda part: _sum_bits(refs, plan, part))

    over_tiles(refs, ends, work)


def _prepare(refs: Refs, plan, tile) -> None:
    """Write limits, prescale and gain of the tokens, and the levels of the keys of tile number
    `tile`."""
    for number, part in enumerate(split_bits(plan.spec.bits)):
        _order_words(refs, number, part, tile)
    loop(plan.tile // LANES, lambda column: _write_levels(refs, plan, column))
    write_limits(refs, plan, tile)
    loop(4, lambda plane: _write_factors(refs, plane))


def _write_factors(refs: Refs, plane):
    """Bring prescale and gain of the tokens in the columns' plane number `plane`, of 0 to 3, into
    lane order: [1, S] to [8, 128]."""
    # These are 8 of the tile's planes, one for each column: 256 tokens in a row. The first 128 of
    # them belong to columns 0 to 3, the others to columns 4 to 7.
    shape, early, in_plane = refs.sizes.shape, refs.places[2] < 4, refs.places[0] == plane
    lane = (refs.places[2] & 3) * PLANE + refs.places[1]
    for stored, ref in ((refs.prescale, refs.sizes), (refs.gain, refs.gains)):
        low, high = (stored[0, 0, :, aligned(2 * plane + i, LANES)] for i in range(2))
        low, high = (
            jnp.broadcast_to(from_bits(x, "bfloat16").astype(jnp.float32), shape)
            for x in (low, high)
        )
        ref[...] = jnp.where(in_plane, _lanes(jnp.where(early, low, high), lane), ref[...])


def _lanes(x, index):
    """Permute 128 lanes: x[i, index[i, j]]."""
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


def _order_words(refs: Refs, number: int, part: int, tile):
    """Bring the words of plane set `number`, of `part` bits a code, into lane order.

    Words are shifted right so that the codes of column 0 are lowest. Those of column c then lie c *
    part bits up, in the same words. A block of 128 words holds the words of one tile or of several
    tiles."""
    # Planes of a word.
    words, planes = (
        pltpu.bitcast(refs.key_codes[number][0, 0], jnp.int32),
        32 // part,
    )
    if words.shape[1] < LANES:  # a permutation takes 128 lanes
        words = jnp.concatenate([words] * (LANES // words.shape[1]), axis=1)
    # The tile's first word in the block.
    first = jax.lax.rem(tile, jnp.int32(planes // 8)) * (PLANE * part)
    plane, count = 8 * refs.places[0], words.shape[0]  # planes of column 0
    lane = first + quotient(plane, planes) * PLANE + refs.places[1]
    shift = (plane & (planes - 1)) * part
    # All 8 rows are equal: what differs from column to column is left out. They are repeated for
    # every row of words.
    lane, shift = (jnp.concatenate([x] * -(-count // 8))[:count] for x in (lane, shift))
    refs.words[number] = jax.lax.shift_right_logical(_lanes(words, lane), shift)


def _write_levels(refs: Refs, plan, column):
    """Write the levels of 128 tokens, column number `column`, as `_one_hot` wants them.

    A one-hot column has a bfloat16 number for each level, two to a word. `pairs` says which word
    holds the one, `ones` is that word."""
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
    """Write the scores of one group of heads, and their maxima into `top`."""
    # Two loops, one after the other: in one loop both steps would need more registers than there
    # are.
    loop(plan.tile // plan.chunk, functools.partial(_multiply, refs, plan, group))
    no_top = jnp.full((plan.rows, LANES), NEVER)
    top = jax.lax.fori_loop(
        0, plan.tile // plan.slice, functools.partial(_score, refs, plan, group), no_top
    )
    refs.top[aligned(group, plan.rows)] = top.max(-1, keepdims=True)


def _multiply(refs: Refs, plan, group, number):
    """Make the keys of a group of heads for a chunk of tokens, before prescale and rotation.

    They are written as `plan.summands` sums, [summands, W, S], to which products are added in turn.
    So no product waits for the one before it."""
    dim, levels = plan.spec.head_dim, plan.spec.levels
    for member in range(plan.shared):
        head, tokens = group * plan.shared + member, aligned(number, plan.chunk)
        for step, codes in enumerate(plan.steps):
            lanes = slice(codes[0] * levels, (codes[-1] + 1) * levels)
            columns = _one_hot(refs, plan, head, number, codes)
            product = dot(refs.matrix[aligned(head, dim), lanes], columns, 0)  # [D, chunk]
            place = step % plan.summands, slice(member * dim, (member + 1) * dim), tokens
            refs.products[place] = (
                product if step < plan.summands else product + refs.products[place]
            )


def _score(refs: Refs, plan, group, number, top):
    """Rotate the keys of a slice of tokens by their offsets in the tile, multiply them by the
    queries and write the scores. Return the maxima so far, [M, 128]."""
    tokens, half = aligned(number, plan.slice), plan.spec.head_dim // 2
    cos, sin = refs.cos[:, tokens], refs.sin[:, tokens]
    scores = jnp.zeros((plan.rows, plan.slice))
    for head in range(plan.shared):
        # The two halves of a head's channels are the members of its rotation pairs, [D/2, slice]
        # each.
        parts = (slice((2 * head + i) * half, (2 * head + i + 1) * half) for i in range(2))
        first, second = (
            sum(refs.products[i, part, tokens] for i in range(plan.summands)) for part in parts
        )
        keys = jnp.concatenate([first * cos - second * sin, second * cos + first * sin]).astype(
            jnp.bfloat16
        )
        # Rows of other heads have zeros on this head's lanes.
        lanes = slice(2 * head * half, 2 * (head + 1) * half)
        scores = scores + dot(refs.queries[0, 0, group, :, lanes], keys, 0)
    # The prescale is the same for all channels of a token, and multiplies the scores.
    columns = plan.slice // LANES
    sizes = [refs.sizes[pl.ds(number * columns + i, 1)] for i in range(columns)]
    scores = jnp.minimum(scores * jnp.concatenate(sizes, axis=1), refs.limits[:, tokens])
    refs.scores[aligned(group, plan.rows), tokens] = scores
    return jnp.maximum(top, lane_wise(jnp.maximum, scores))


def _one_hot(refs: Refs, plan, head, number, codes: range):
    """Make one-hot columns for some of a head's codes, one below the other, for a chunk of tokens.

    Two neighbouring levels are the halves of one word.

    Args:
        refs: The kernel's references.
        plan: The call's plan.
        head: Number of the KV head.
        number: Number of the chunk in the tile.
        codes: Numbers of the codes, of those that a token has for each head.

    Returns:
        [len(codes) * V, chunk] bfloat16."""
    words, shape = plan.spec.levels // 2, (8, LANES)
    row, columns = jax.lax.broadcasted_iota(jnp.int32, shape, 0), []
    for i in range(plan.chunk // LANES):
        pieces = []  # 8 words of 128 tokens each
        for code in codes:
            at = (
                (number * (plan.chunk // LANES) + i) * plan.key_rows
                + code * plan.spec.kv_heads
                + head
            )
            pair, value = (
                jnp.broadcast_to(ref[pl.ds(at, 1)], shape) for ref in (refs.pairs, refs.ones)
            )
            pieces += [jnp.where(pair == row + first, value, 0) for first in range(0, words, 8)]
        columns.append(pltpu.bitcast(jnp.concatenate(pieces), jnp.bfloat16))
    return jnp.concatenate(columns, axis=1)


def _weigh(refs: Refs):
    """Write the softmax weights times the tokens' gains."""
    for column in range(refs.gains.shape[0]):
        lanes = slice(column * LANES, (column + 1) * LANES)
        refs.weights[:, lanes] = (refs.scores[:, lanes] * refs.gains[column : column + 1]).astype(
            jnp.bfloat16
        )


def _sum_bits(refs: Refs, plan, part):
    """Add 128 bits of the tile's values, weighted, to the running sums."""
    lanes = aligned(part, LANES)
    words = refs.value_bits[0, 0, :, lanes]
    pieces = [piece.astype(jnp.bfloat16) for piece in chunks([words], 1, 1, plan.ways)]
    columns = plan.tile // LANES
    # With 4 ways a piece is a column of 128 tokens. With 2 ways it is half a column, whose other
    # half comes 8 pieces later (`CommVQPlan.order`).
    bits = [jnp.concatenate(pieces[column::columns]) for column in range(columns)]
    product = dot(refs.weights[...], jnp.concatenate(bits), 0)
    # Unpacked bits are too large by an offset. What it adds is the same for all channels.
    product = product - offset(1, plan.ways) * refs.weights[...].astype(jnp.float32).sum(
        -1, keepdims=True
    )
    refs.out[0, :, lanes] = refs.out[0, :, lanes] * refs.top[...] + product
