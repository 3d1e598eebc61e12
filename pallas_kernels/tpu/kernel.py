"""The body of the TPU decode-attention kernel: one tile of tokens, all lane groups (see `tpu` for the mathematics).

Shapes in comments: P lane groups, M query rows of a lane group (a multiple of 8), W its lanes, S tokens of the tile, N
key groups of the tile, C rows of value scales. Scores are base-2 logarithms.
"""

import itertools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvqjax.pallas_kernels.tpu.balanced import add_balanced_sums
from kvqjax.pallas_kernels.tpu.columns import Place, each, place_of, some
from kvqjax.pallas_kernels.tpu.outlier_values import add_values
from kvqjax.pallas_kernels.tpu.plan import LANES, LOG2E, members
from kvqjax.pallas_kernels.tpu.scores import rotated_scores, token_factors, unrotated_scores
from kvqjax.pallas_kernels.tpu.sums import add_sums, fold, no_sums, weights_of
from kvqjax.pallas_kernels.tpu.tile import NEVER, Refs, prepare

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
        fold(refs, plan, place, peak, _summed(refs, plan, place, peak))

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
            weights = list(weights_of(refs, plan, peak, blocks))  # before scores are written over theirs
            scoring = _score(refs, plan, place, blocks, top)
            summing = _add_sums(refs, plan, before, weights, blocks, sums)
            turns = -(-len(weights) // count)
            for turn in range(min(0, ahead), turns + max(0, ahead)):
                if 0 <= turn < turns:
                    top = _last(itertools.islice(scoring, count))
                if ahead <= turn < turns + ahead:
                    sums = _last(itertools.islice(summing, count))
            return sums, top

        sums, top = _pieces(plan, piece, (no_sums(plan), _no_top(plan)))
        fold(refs, plan, before, peak, sums)
        return _raised(refs, place, top)

    peak = _raised(refs, first, _scored(refs, plan, first))
    peak = jax.lax.fori_loop(0, plan.lane_groups - 1, step, peak)
    fold(refs, plan, last, peak, _summed(refs, plan, last, peak))


def _pieces(plan, work, carry):
    """`work(blocks, carry)` for every piece of the tile in turn, `blocks` being the numbers of its blocks."""
    count = plan.blocks // plan.pieces
    if plan.pieces == 1:
        return work(members(0, count), carry)
    return jax.lax.fori_loop(0, plan.pieces, lambda number, carry: work(members(number, count), carry), carry)


def _scored(refs: Refs, plan, place: Place):
    """Write the scores of the tile; their maxima, [M, 128]."""
    return _pieces(plan, lambda blocks, top: _last(_score(refs, plan, place, blocks, top)), _no_top(plan))


def _summed(refs: Refs, plan, place: Place, peak):
    """The sums of the tile, its scores being written."""

    def piece(blocks, sums):
        return _last(_add_sums(refs, plan, place, weights_of(refs, plan, peak, blocks), blocks, sums))

    return _pieces(plan, piece, no_sums(plan))


def _add_sums(refs: Refs, plan, *rest):
    return (add_balanced_sums if plan.spec.value_factors else add_sums)(refs, plan, *rest)


def _last(found):
    *_, last = found
    return last


def _score(refs: Refs, plan, place: Place, blocks, top):
    """Write scores [M, S] of these blocks in lane order, a column at a time; yields the maxima so far, [M, 128]."""
    score = rotated_scores if plan.spec.rope is None else unrotated_scores
    for index in blocks:
        for number, found in zip(plan.columns(index), score(refs, plan, place, index), strict=True):
            tokens = some(number, plan.column)
            if plan.spec.key_factors:
                found = found * token_factors(refs, plan, place, number)
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
