"""The body of the TPU decode-attention kernel: one tile of tokens, all lane groups (see `packed`
for the mathematics and for the shapes of the operands).

Shapes in comments: P lane groups, M query rows of a lane group (a multiple of 8), W its lanes, S
tokens of the tile. Scores are base-2 logarithms.

A lane group has two steps: its scores (unpack keys, multiply with queries) and its values (unpack
values, multiply with softmax weights). The weights need the maximum over all scores of the tile, so
that the second step waits for the first one. Without interleaving:

    time ->   scores 0 | values 0 | scores 1 | values 1 | scores 2 | values 2

With interleaving (`Plan.ahead` is a number), the values of lane group n and the scores of lane
group n + 1 are worked off together, TURN tokens of each in turn. They do not wait for each other,
so that the matrix unit is never idle:

    time ->   scores 0 | values 0 | values 1 | values 2
                       | scores 1 | scores 2 |

    within one of these steps (s: TURN tokens of scores n + 1, v: of values n):

    ahead =  0         s0 v0 s1 v1 s2 v2 s3 v3
    ahead =  1         s0 s1 v0 s2 v1 s3 v2 v3
    ahead = -1         v0 s0 v1 s1 v2 s2 v3 s3

Scores n + 1 are written over scores n. So all weights n of a piece of the tile are computed before
the first turn of the piece.

Steps are generators that yield after each column, so that they can be advanced in turn while the
program is traced."""

import itertools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvqjax.pallas_kernels.tpu.balanced import add_balanced_sums
from kvqjax.pallas_kernels.tpu.call import Refs
from kvqjax.pallas_kernels.tpu.columns import Place, aligned, loop, place_of
from kvqjax.pallas_kernels.tpu.outlier_values import add_values
from kvqjax.pallas_kernels.tpu.plan import LANES, LOG2E, members
from kvqjax.pallas_kernels.tpu.scores import rotated_scores, token_factors, unrotated_scores
from kvqjax.pallas_kernels.tpu.sums import add_sums, fold, no_sums, weights_of
from kvqjax.pallas_kernels.tpu.tile import NEVER, prepare

# Tokens of scores, and of values, in turn: so that every matrix unit gets products of both.
TURN = 512


def kernel(refs: Refs, ends, plan, *, per_split: int):
    """Attend to one tile. Grid (row, split, tile); `refs` as declared in `packed`, `ends` from
    `rows.tile_ends`."""
    row, split, step = (pl.program_id(axis) for axis in range(3))
    tile = split * per_split + step

    @pl.when(step == 0)
    def _():
        refs.peak[...] = jnp.full(refs.peak.shape, NEVER)
        refs.total[...] = jnp.zeros(refs.total.shape)
        refs.out[...] = jnp.zeros(refs.out.shape)

    @pl.when((tile >= ends[row, 0]) & (tile < ends[row, 1]))
    def _():
        prepare(refs, plan, tile)
        if plan.ahead is None:
            _attend(refs, plan)
        else:
            _attend_interleaved(refs, plan)
        if plan.spec.value_slots:
            add_values(refs, plan)

    # After the last tile the sums are divided by the weights. Log-sum-exps are natural logarithms.
    @pl.when(step == per_split - 1)
    def _():
        seen = refs.peak[...] > NEVER / 2
        refs.out[0, 0] = jnp.where(seen, refs.out[0, 0] / refs.total[...], 0.0)
        refs.lse[0, 0] = jnp.where(seen, jnp.log(refs.total[...]) + refs.peak[...] / LOG2E, NEVER)


def _attend(refs: Refs, plan):
    """Fold the tile into the online softmax of every lane group: first its scores, then its
    values."""

    def step(group):
        place = place_of(group, plan)
        peak = _raised(refs, place, _scored(refs, plan, place))
        fold(refs, plan, place, peak, _summed(refs, plan, place, peak))

    loop(plan.lane_groups, step)


def _attend_interleaved(refs: Refs, plan):
    """Do the same with the scores of a lane group in turn with the values of the one before
    (diagram above)."""
    first, last = place_of(jnp.int32(0), plan), place_of(jnp.int32(plan.lane_groups - 1), plan)
    count, ahead = TURN // plan.column, plan.ahead  # columns of a turn

    def step(number, peak):
        """Sum the values of lane group `number`, whose maximum is `peak`, and score the next one.
        Return its maximum."""
        before, place = place_of(number, plan), place_of(number + 1, plan)

        def piece(blocks, carry):
            """Do this for one piece of the tile. `carry` is (sums of the one, maxima of the other
            lane group)."""
            sums, top = carry
            # Before scores are written over theirs.
            weights = list(weights_of(refs, plan, peak, blocks))
            scoring = _score(refs, plan, place, blocks, top)
            summing = _add_sums(refs, plan, before, weights, blocks, sums)
            turns = -(-len(weights) // count)
            # Turn t is that of scores number t and of values number t - ahead.
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
    """Call `work(blocks, carry)` for every piece of the tile, one after the other. `blocks` are the
    numbers of the piece's blocks. `work` returns the carry for the next piece; the last one is
    returned."""
    count = plan.blocks // plan.pieces
    if plan.pieces == 1:
        return work(members(0, count), carry)
    return jax.lax.fori_loop(
        0, plan.pieces, lambda number, carry: work(members(number, count), carry), carry
    )


def _scored(refs: Refs, plan, place: Place):
    """Write the scores of the tile and return the maxima of their lanes, [M, 128]."""
    return _pieces(
        plan, lambda blocks, top: _last(_score(refs, plan, place, blocks, top)), _no_top(plan)
    )


def _summed(refs: Refs, plan, place: Place, peak):
    """Return the tile's sums (`sums.no_sums`) once its scores are written."""

    def piece(blocks, sums):
        return _last(
            _add_sums(refs, plan, place, weights_of(refs, plan, peak, blocks), blocks, sums)
        )

    return _pieces(plan, piece, no_sums(plan))


def _add_sums(refs: Refs, plan, *arguments):
    """Add the tile's sums, for values with factors (`balanced`) or without (`sums`)."""
    return (add_balanced_sums if plan.spec.value_factors else add_sums)(refs, plan, *arguments)


def _last(generator):
    """Run a generator to its end and return the last thing it yields."""
    *_, last = generator
    return last


def _score(refs: Refs, plan, place: Place, blocks, top):
    """Write the scores [M, S] of these blocks in lane order, a column at a time. Yield the maxima
    so far, [M, 128]."""
    score = rotated_scores if plan.spec.rope is None else unrotated_scores
    for index in blocks:
        for number, products in zip(
            plan.columns(index), score(refs, plan, place, index), strict=True
        ):
            tokens = aligned(number, plan.column)
            if plan.spec.key_factors:
                products = products * token_factors(
                    refs.token_factors, plan, place, number, plan.spec.key_factors
                )
            scores = jnp.minimum(products, refs.limits[:, tokens])
            refs.scores[:, tokens] = scores
            # The maximum is taken over columns of 128 lanes. `_raised` reduces the lanes once, at
            # the end.
            for lane in range(0, plan.column, LANES):
                top = jnp.maximum(top, scores[:, lane : lane + LANES])
            yield top


def _raised(refs: Refs, place: Place, top):
    """Return the running maximum of a lane group after this tile, [M, 1]. `top` [M, 128] are the
    tile's maxima."""
    return jnp.maximum(refs.peak[place.group], top.max(-1, keepdims=True))


def _no_top(plan):
    """Return the maxima of no scores, [M, 128]."""
    return jnp.full((plan.rows, LANES), NEVER)
