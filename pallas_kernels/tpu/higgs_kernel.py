"""The body of the TPU kernel on HIGGS bodies: one tile of tokens (see `higgs` for the mathematics
and for the shapes of the operands).

A code stands for a pair of channels, the first and the second one. Shapes in comments: N columns of
128 codes, M query rows (a multiple of 8), S tokens of the tile, C tokens of a chunk. Of 2M rows the
first M are for first channels, the others for second channels. Of 2S or 2C rows or lanes the even
ones are for a token's first channels, the odd ones for its second channels. Scores are base-2
logarithms."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvqjax.ops.packing.base import from_bits
from kvqjax.pallas_kernels.tpu.call import Refs
from kvqjax.pallas_kernels.tpu.columns import aligned, dot, loop, quotient, zero_beyond
from kvqjax.pallas_kernels.tpu.higgs_lookup import by_steps
from kvqjax.pallas_kernels.tpu.higgs_plan import SPREAD
from kvqjax.pallas_kernels.tpu.plan import LANES
from kvqjax.pallas_kernels.tpu.softmax import over_tiles
from kvqjax.pallas_kernels.tpu.tile import NEVER


def kernel(refs: Refs, ends, plan):
    """Attend to one tile. Grid (row, tile); `refs` as declared in `higgs`, `ends` from
    `rows.tile_ends`."""

    def work(tile):
        _spread_scales(refs, plan, tile)
        _score(refs, plan, tile)
        _raise_peak(refs, plan)
        _sum_values(refs, plan)

    over_tiles(refs, ends, work)


def _doubled(x):
    """Give the rows of first and of second channels the same numbers: [M, n] to [2M, n]."""
    return jnp.concatenate([x, x])


def _spread_scales(refs: Refs, plan, tile):
    """Write this tile's scales on both lanes of every token: [groups, S] to [groups, 2S]."""
    groups, body = plan.spec.groups, refs.body

    def spread(piece):
        """Write the scales of SPREAD tokens, those of keys and of values in one product."""
        stored = (x[0, 0, :, aligned(piece, SPREAD)] for x in (body.key_scale, body.value_scale))
        scales = from_bits(jnp.concatenate(list(stored)), plan.spec.scales)
        if plan.slots % plan.tile:
            scales = zero_beyond(scales, tile * plan.tile + piece * SPREAD, plan.slots, 1)
        for first in range(0, SPREAD, LANES):
            # [2 groups, 2*128]: a product with 0 and 1 moves numbers between lanes, and rounds
            # nothing.
            wide = dot(scales[:, first : first + LANES], refs.onehot[...], 0)
            lanes = aligned(piece * (SPREAD // LANES) + first // LANES, 2 * LANES)
            refs.key_scales[:, lanes] = wide[:groups]
            refs.value_scales[:, lanes] = wide[groups:]

    loop(plan.tile // SPREAD, spread)


def _own_rows(scales, plan):
    """Give every query row the scales of its own group: [groups, n] to [M, n]."""
    if plan.spec.groups == 1:
        return jnp.broadcast_to(scales, (plan.rows, scales.shape[1]))
    row = jax.lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0)
    chosen = jnp.broadcast_to(scales[:1], (plan.rows, scales.shape[1]))
    for group in range(1, plan.spec.groups):
        chosen = jnp.where(row >= group * plan.rows_per_group, scales[group : group + 1], chosen)
    return chosen


def _score(refs: Refs, plan, tile):
    """Write the scores of the tile, and their maxima into `top`."""

    # A score sums over all columns of 128 codes. The products of a chunk are summed until its last
    # column is done.
    def begin(_):
        refs.products[...] = jnp.zeros(refs.products.shape)

    refs.top[...] = jnp.full(refs.top.shape, NEVER)
    use, end = (
        functools.partial(_meet, refs, plan),
        functools.partial(_write_scores, refs, plan, tile),
    )
    by_steps(
        refs.words,
        plan,
        refs.body.key_codes,
        refs.key_words,
        plan.spec.key_bits,
        1,
        begin,
        use,
        end,
    )


def _turned(refs: Refs, plan, chunk, part):
    """Rotate the queries back by the chunk's first position and give them the signs of a column:
    [2M, 2*128] bf16."""

    def turn_rows(row: int):
        """Load row `row` of the chunk for first channels and the next one for second channels: [2M,
        128]."""
        shape = plan.rows, LANES
        rows = [
            jnp.broadcast_to(refs.turns[0, pl.ds(4 * chunk + i, 1)], shape) for i in (row, row + 1)
        ]
        return jnp.concatenate(rows)

    cos, sin = turn_rows(0), turn_rows(2)
    q, partner, signs = (
        refs.queries[0, :, :LANES],
        refs.queries[0, :, LANES:],
        _doubled(refs.signs[part]),
    )
    turned = (q * cos + partner * sin) * signs, (partner * cos - q * sin) * signs
    return jnp.concatenate(turned, axis=1).astype(jnp.bfloat16)


def _meet(refs: Refs, plan, chunk, part, words):
    """Add what a column of the chunk's keys gives to the products.

    The keys are transformed within heads, rotated by their offsets in the chunk, and multiplied by
    the queries.

    Args:
        part: Number of the column of 128 codes.
        words: Reference to the column's numbers, [C, 128] uint32: both numbers of a code as halves
        of a word."""
    queries = _turned(refs, plan, chunk, part)
    if (
        plan.staged
    ):  # all keys of the chunk go through memory, and not piece by piece through registers
        numbers = pltpu.bitcast(words[:, :LANES], jnp.bfloat16)
        refs.keys[...] = dot(numbers, refs.transform[...], 0).astype(refs.keys.dtype)
    for token in range(0, plan.chunk, plan.piece // 2):
        tokens, rows = (
            slice(token, token + plan.piece // 2),
            slice(2 * token, 2 * token + plan.piece),
        )
        # cos | sin of the tokens' offsets, [piece, 2*128]. In bfloat16 two rows are stored as the
        # halves of words.
        cells = refs.table[rows] if plan.wide else pltpu.bitcast(refs.table[tokens], jnp.bfloat16)
        if plan.staged:
            keys = refs.keys[rows]
        else:
            # [piece, 128]: words of [piece/2, 128] read as bfloat16 are rows of first and of second
            # numbers in turn
            keys = dot(
                pltpu.bitcast(words[tokens, :LANES], jnp.bfloat16), refs.transform[...], 0
            ).astype(cells.dtype)
        waves = jnp.concatenate([keys * cells[:, :LANES], keys * cells[:, LANES:]], axis=1)
        refs.products[:, rows] = refs.products[:, rows] + dot(
            queries, waves.astype(jnp.bfloat16), 1
        )


def _write_scores(refs: Refs, plan, tile, chunk):
    """Scale and mask the chunk's products and write them as scores."""

    def write(piece):
        """Write 128 lanes, which are the scores of 64 tokens."""
        lanes = pl.ds(pl.multiple_of(chunk * (2 * plan.chunk) + piece * LANES, LANES), LANES)
        scores = _paired(refs.products[:, aligned(piece, LANES)], plan) * _own_rows(
            refs.key_scales[:, lanes], plan
        )
        token = quotient(jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1), 2) + tile * plan.tile
        token = token + chunk * plan.chunk + piece * (LANES // 2)
        seen = (token >= refs.bounds[0, :, 0:1]) & (token < refs.bounds[0, :, 1:2])
        scores = jnp.where(seen, scores, NEVER)
        refs.scores[:, lanes] = scores
        refs.top[...] = jnp.maximum(refs.top[...], scores)

    if plan.staged:
        loop(2 * plan.chunk // LANES, write)
    else:
        for piece in range(2 * plan.chunk // LANES):
            write(piece)


def _paired(products, plan):
    """Add a token's product of first channels and that of second channels: [2M, 128] to [M, 128].
    Both lanes of the token get the sum."""
    odd = _odd(LANES)
    # Only products of queries and keys of the same channels count: first ones on even lanes, second
    # ones on odd lanes.
    sums = jnp.where(odd, products[plan.rows :], products[: plan.rows])
    # Each lane adds its neighbour's number: the lane before it if it is odd, the lane after it if
    # it is even.
    return sums + jnp.where(odd, pltpu.roll(sums, 1, 1), pltpu.roll(sums, LANES - 1, 1))


def _odd(lanes: int):
    """Say which lanes are odd, [1, lanes]."""
    return (jax.lax.broadcasted_iota(jnp.int32, (1, lanes), 1) & jnp.int32(1)) == 1


def _raise_peak(refs: Refs, plan):
    """Raise the running maximum to this tile's, and rescale the running sums to it."""
    peak = jnp.maximum(refs.peak[...], refs.top[...].max(-1, keepdims=True))
    rescale = jnp.exp2(refs.peak[...] - peak)
    refs.peak[...] = peak
    refs.total[...] = refs.total[...] * rescale
    refs.out[0] = refs.out[0] * _doubled(rescale)


def _weigh(refs: Refs, plan, chunk):
    """Write the softmax weights of a chunk, times the value scales; add the weights to their
    running sum."""
    total, odd = jnp.zeros((plan.rows, LANES)), _odd(LANES)
    for first in range(0, 2 * plan.chunk, LANES):
        lanes = pl.ds(pl.multiple_of(chunk * (2 * plan.chunk) + first, LANES), LANES)
        weights = jnp.exp2(refs.scores[:, lanes] - refs.peak[...])
        total = total + weights
        scaled = weights * _own_rows(refs.value_scales[:, lanes], plan)
        # Rows for first channels must meet first numbers alone, which stand on even lanes. Likewise
        # for second ones.
        rows = jnp.concatenate([jnp.where(odd, 0.0, scaled), jnp.where(odd, scaled, 0.0)])
        refs.weights[:, first : first + LANES] = rows.astype(jnp.bfloat16)
    # Every token was counted on two lanes.
    refs.total[...] = refs.total[...] + total.sum(-1, keepdims=True) / 2


def _sum_values(refs: Refs, plan):
    """Add the tile's weighted values to the running sums."""

    def use(_, first, words):
        """Add `value_columns` columns, from column `first` on."""
        for i in range(plan.value_columns):
            numbers = pltpu.bitcast(words[:, i * LANES : (i + 1) * LANES], jnp.bfloat16)
            lanes = aligned(first + i, LANES)
            refs.out[0, :, lanes] = refs.out[0, :, lanes] + dot(refs.weights[...], numbers, 0)

    begin, end = functools.partial(_weigh, refs, plan), lambda _: None
    bits, columns = plan.spec.value_bits, plan.value_columns
    by_steps(
        refs.words, plan, refs.body.value_codes, refs.value_words, bits, columns, begin, use, end
    )
