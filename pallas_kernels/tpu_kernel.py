"""The body of the TPU decode-attention kernel: one tile of tokens, all lane groups (see `tpu` for the mathematics).

Shapes in comments: P lane groups, M query rows of a lane group (a multiple of 8), W its lanes, S tokens of the tile, N
key groups of the tile, C rows of value scales. Scores are base-2 logarithms.
"""

import itertools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvqjax.pallas_kernels.tpu_columns import (
    Place,
    columns,
    dot,
    each,
    filled,
    lane_wise,
    load_row,
    pick,
    place_of,
    quotient,
    some,
)
from kvqjax.pallas_kernels.tpu_outlier_values import add_values
from kvqjax.pallas_kernels.tpu_plan import LANES, LOG2E
from kvqjax.pallas_kernels.tpu_scores import rotated_scores, unrotated_scores
from kvqjax.pallas_kernels.tpu_tile import NEVER, Refs, prepare

__all__ = ["kernel"]

TURN = 512  # tokens of scores, and of values, in turn: so that every matrix unit gets products of both


def kernel(_, ends, inputs, body, out, lse, scratch, *, plan, per_split: int):
    """Grid (row, split, tile). `ends`: `tpu_rows.tile_ends`."""
    refs = Refs(**inputs._asdict(), body=body, out=out, lse=lse, **scratch)
    row, split, step = (pl.program_id(axis) for axis in range(3))
    tile = split * per_split + step

    @pl.when(step == 0)
    def _():
        refs.peak[...] = jnp.full(refs.peak.shape, NEVER)
        refs.total[...] = jnp.zeros(refs.total.shape)
        refs.out[...] = jnp.zeros(refs.out.shape)

    @pl.when((tile >= ends[0, row]) & (tile < ends[1, row]))
    def _():
        prepare(refs, plan, tile)
        (_attend if plan.ahead is None else _attend_interleaved)(refs, plan)
        if plan.spec.value_slots:
            add_values(refs, plan)

    @pl.when(step == per_split - 1)
    def _():
        seen = refs.peak[...] > NEVER / 2
        refs.out[0, 0] = jnp.where(seen, refs.out[0, 0] / refs.total[...], 0.0)
        refs.lse[0, 0] = jnp.where(seen, jnp.log(refs.total[...]) + refs.peak[...] / LOG2E, NEVER)


def _attend(refs: Refs, plan):
    """Fold the tile into the running softmax of every lane group: its scores, then its values."""

    def step(group):
        place = place_of(group, plan)
        peak = _raised(refs, place, _scored(refs, plan, place))
        _fold(refs, plan, place, peak, _summed(refs, plan, place, peak))

    each(plan.lane_groups, step)


def _attend_interleaved(refs: Refs, plan):
    """As `_attend`; the scores of a lane group are computed in turn with the values of the one before, so that no
    matrix unit waits for the last results of either."""
    first, last = place_of(jnp.int32(0), plan), place_of(jnp.int32(plan.lane_groups - 1), plan)
    count, ahead = TURN // plan.column, plan.ahead

    def step(number, peak):
        before, place = place_of(number, plan), place_of(number + 1, plan)

        def piece(blocks, carry):
            sums, top = carry
            weights = list(_weights(refs, plan, peak, blocks))  # before scores are written over theirs
            scoring = _score(refs, plan, place, blocks, top)
            summing = _sum(refs, plan, before, weights, blocks, sums)
            turns = -(-len(weights) // count)
            for turn in range(min(0, ahead), turns + max(0, ahead)):
                if 0 <= turn < turns:
                    top = _last(itertools.islice(scoring, count))
                if ahead <= turn < turns + ahead:
                    sums = _last(itertools.islice(summing, count))
            return sums, top

        sums, top = _pieces(plan, piece, (_no_sums(plan), _no_top(plan)))
        _fold(refs, plan, before, peak, sums)
        return _raised(refs, place, top)

    peak = _raised(refs, first, _scored(refs, plan, first))
    peak = jax.lax.fori_loop(0, plan.lane_groups - 1, step, peak)
    _fold(refs, plan, last, peak, _summed(refs, plan, last, peak))


def _pieces(plan, work, carry):
    """`work(blocks, carry)` for every piece of the tile in turn, `blocks` being the numbers of its blocks."""
    each = plan.blocks // plan.pieces
    if plan.pieces == 1:
        return work(range(each), carry)
    return jax.lax.fori_loop(0, plan.pieces, lambda n, carry: work([n * each + i for i in range(each)], carry), carry)


def _scored(refs: Refs, plan, place: Place):
    """Write the scores of the tile; their maxima, [M, 128]."""
    return _pieces(plan, lambda blocks, top: _last(_score(refs, plan, place, blocks, top)), _no_top(plan))


def _summed(refs: Refs, plan, place: Place, peak):
    """The sums of the tile, its scores being written."""

    def piece(blocks, sums):
        return _last(_sum(refs, plan, place, _weights(refs, plan, peak, blocks), blocks, sums))

    return _pieces(plan, piece, _no_sums(plan))


def _last(found):
    *_, last = found
    return last


def _score(refs: Refs, plan, place: Place, blocks, top):
    """Write scores [M, S] of these blocks in lane order, a column at a time; yields the maxima so far, [M, 128]."""
    score = rotated_scores if plan.spec.rope is None else unrotated_scores
    for index in blocks:
        for number, found in zip(_numbers(plan, index), score(refs, plan, place, index), strict=True):
            tokens = some(number, plan.column)
            scores = jnp.minimum(found, refs.limits[:, tokens])
            refs.scores[:, tokens] = scores
            for lane in range(0, plan.column, LANES):
                top = jnp.maximum(top, scores[:, lane : lane + LANES])
            yield top


def _raised(refs: Refs, place: Place, top):
    """The running maximum of a lane group after this step, [M, 1]."""
    return jnp.maximum(refs.peak[place.group], top.max(-1, keepdims=True))


def _no_top(plan):
    return jnp.full((plan.rows, LANES), NEVER)


def _no_sums(plan):
    """Sums of weights [M, 128], of weights times minima for each value slice, and of values [slices*M, W]."""
    zeros = jnp.zeros((plan.rows, LANES))
    return zeros, [zeros] * plan.value_slices, jnp.zeros((plan.value_slices * plan.rows, plan.lanes))


def _own_rows(ref, plan, place: Place, part: int, column):
    """Value scales or minima of slice `part` of every head of the lane group, on the rows of its queries: [M, S].
    `column` of 128 tokens is the first."""
    spec, heads = plan.spec, []
    first = jax.lax.div(place.group * plan.lanes, jnp.int32(spec.value_group))
    for head in range(plan.shared):
        within = (head * spec.head_dim + part * spec.value_slice) // spec.value_group
        heads.append(load_row(ref, first + within, plan.value_rows, column, plan.column))
    row = jax.lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0)
    chosen = filled(heads[0], plan)
    for head in range(1, plan.shared):
        chosen = jnp.where(row >= head * plan.rows_per_head, filled(heads[head], plan), chosen)
    return chosen


def _numbers(plan, index) -> list:
    """Numbers of the columns of block `index` of the tile."""
    each = plan.block // plan.column
    return [index * each + i for i in range(each)]


def _weights(refs: Refs, plan, peak, blocks):
    """Weights of these blocks, [M, column] at a time."""
    for index in blocks:
        for number in _numbers(plan, index):
            yield jnp.exp2(refs.scores[:, some(number, plan.column)] - peak)


def _sum(refs: Refs, plan, place: Place, weights, blocks, sums):
    """Add `weights`, minima and values of these blocks to `sums`, a column at a time; yields the sums so far."""
    waiting = iter(weights)
    total, lows, product = sums
    parts, bits = range(plan.value_slices), plan.spec.value_bits
    for index in blocks:
        found = columns(refs.body.value_codes, refs.value_signposts, bits, place, index, plan, plan.mixed)
        for number, codes in zip(_numbers(plan, index), found, strict=True):
            weights, first = next(waiting), number * (plan.column // LANES)
            if plan.spec.value_slots:
                refs.weights[place.group, :, some(number, plan.column)] = weights
            total = total + lane_wise(jnp.add, weights)
            scaled = [weights * _own_rows(refs.scales, plan, place, part, first) for part in parts]
            minima = [weights * _own_rows(refs.lows, plan, place, part, first) for part in parts]
            lows = [low + lane_wise(jnp.add, x) for low, x in zip(lows, minima, strict=True)]
            product = product + dot(jnp.concatenate(scaled).astype(jnp.bfloat16), codes, 0)
            yield total, lows, product


def _fold(refs: Refs, plan, place: Place, peak, sums):
    """Add a step's sums to the running ones of its lane group, rescaled to the maximum `peak`."""
    total, lows, product = sums
    group = place.group
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, plan.lanes), 1)
    part = jax.lax.rem(quotient(lane, plan.spec.value_slice), jnp.full_like(lane, plan.value_slices))
    parts, names = jnp.split(product, plan.value_slices), list(range(plan.value_slices))
    update = pick(parts, part, names) + pick([low.sum(-1, keepdims=True) for low in lows], part, names)
    # A row that has seen nothing yet adds rubbish here; its decay is 0 once it sees a token.
    decay = jnp.exp2(refs.peak[group] - peak)
    refs.peak[group] = peak
    refs.total[group] = refs.total[group] * decay + total.sum(-1, keepdims=True)
    refs.out[0, 0, group] = refs.out[0, 0, group] * decay + update
