"""The body of the TPU decode-attention kernel: one tile of tokens, all lane groups (see `tpu` for the mathematics).

The scores of a lane group are computed while the values of the one before are summed up, block by block: one needs the
matrix unit most, the other the vector unit, and neither waits for the other's results.

Shapes in comments: P lane groups, M query rows of a lane group (a multiple of 8), W its lanes, S tokens of the tile, N
key groups of the tile, C rows of value scales. Scores are base-2 logarithms.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvqjax.layout import split_bits
from kvqjax.pallas_kernels.tpu_tile import LANES, LOG2E, NEVER, Refs, dot, load_row, named, prepare, quotient
from kvqjax.pallas_kernels.tpu_unpack import chunks

__all__ = ["kernel"]


def kernel(_, ends, *refs, plan, per_split: int):
    """Grid (row, split, tile). `ends` holds the first tile of every row and the one after its last."""
    refs = named(refs, plan)
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
        _attend(refs, plan)

    @pl.when(step == per_split - 1)
    def _():
        seen = refs.peak[...] > NEVER / 2
        refs.out[0, 0] = jnp.where(seen, refs.out[0, 0] / refs.total[...], 0.0)
        refs.lse[0, 0] = jnp.where(seen, jnp.log(refs.total[...]) + refs.peak[...] / LOG2E, NEVER)


class Place(NamedTuple):
    """A lane group, its lanes, and the first of its columns of 128 lanes."""

    group: Any
    lanes: Any
    column: Any


def _place(group, plan) -> Place:
    lanes = pl.ds(pl.multiple_of(group * plan.lanes, LANES), plan.lanes)
    return Place(group, lanes, group * (plan.lanes // LANES))


def _attend(refs: Refs, plan):
    """Fold the tile into the running softmax of every lane group."""
    blocks = list(range(plan.tile // plan.block))
    nothing = jnp.full((plan.rows, LANES), NEVER)
    first, last = _place(jnp.int32(0), plan), _place(jnp.int32(plan.lane_groups - 1), plan)

    def step(group, peak):
        """Scores of a lane group, values of the one before, whose maxima are `peak`."""
        before, place = _place(group - 1, plan), _place(group, plan)
        sums, top = _no_sums(plan), nothing
        for unit in _units(blocks, plan):
            for index in unit:
                sums = _sum_block(refs, plan, before, index, peak, sums)
            for index in unit:
                top = _score_block(refs, plan, place, index, top)
        _fold(refs, plan, before, peak, sums)
        return _raised(refs, place, top)

    top = nothing
    for index in blocks:
        top = _score_block(refs, plan, first, index, top)
    peak = jax.lax.fori_loop(1, plan.lane_groups, step, _raised(refs, first, top))
    sums = _no_sums(plan)
    for index in blocks:
        sums = _sum_block(refs, plan, last, index, peak, sums)
    _fold(refs, plan, last, peak, sums)


def _units(blocks: list[int], plan) -> list[list[int]]:
    """Blocks of 512 tokens at a time, so that every matrix unit gets products of keys and of values."""
    size = max(1, 512 // plan.block)
    return [blocks[first : first + size] for first in range(0, len(blocks), size)]


def _columns(words, bits: int, place: Place, index: int, plan):
    """Codes of block `index` of the tile, [column, W] at a time."""
    stored = []
    for ref, part in zip(words, split_bits(bits), strict=True):
        rows = plan.block * part // 32
        stored.append(ref[0, 0, index * rows : (index + 1) * rows, place.lanes])
    waiting = []
    for chunk in chunks(stored, bits, plan.base, plan.ways):
        waiting.append(chunk if plan.mixed else chunk.astype(jnp.bfloat16))
        if len(waiting) * chunk.shape[0] == plan.column:
            yield jnp.concatenate(waiting) if len(waiting) > 1 else waiting[0]
            waiting = []


def _scaled_queries(refs: Refs, plan, place: Place, index: int):
    """For each key group of a block: the queries scaled [M, W] bf16, and what the group's minima add [M, 1] f32."""
    each = plan.block // plan.spec.key_group
    q = refs.queries[0, place.group].astype(jnp.float32)
    for group in range(index * each, (index + 1) * each):
        rows = (load_row(ref, group, plan.key_rows, place.column, plan.lanes) for ref in (refs.factors, refs.zeros))
        factor, zero = (_filled(row, plan) for row in rows)
        yield (q * factor).astype(jnp.bfloat16), (q * zero).sum(-1, keepdims=True)


def _score_block(refs: Refs, plan, place: Place, index: int, top):
    """Write a block's scores [M, block] in lane order; raise the maxima `top` [M, 128] to them."""
    spec = plan.spec
    scaled, zeros = zip(*_scaled_queries(refs, plan, place, index), strict=True)
    for i, codes in enumerate(_columns(refs.key_codes, spec.key_bits, place, index, plan)):
        column = slice(i * plan.column, (i + 1) * plan.column)
        met = sorted({int(token) // spec.key_group for token in plan.order[column]})
        stacked = dot(jnp.concatenate([scaled[group] for group in met]), codes, 1)
        owner = quotient(refs.order[:, column], spec.key_group)
        tokens = slice(index * plan.block + column.start, index * plan.block + column.stop)
        scores = jnp.minimum(_select(stacked, [zeros[group] for group in met], owner, met), refs.limits[:, tokens])
        refs.scores[:, tokens] = scores
        for lane in range(0, plan.column, LANES):
            top = jnp.maximum(top, scores[:, lane : lane + LANES])
    return top


def _select(stacked, added, owner, names):
    """From products stacked by group, [n*M, S], take for every lane those of its own group, plus what is added."""
    rows = stacked.shape[0] // len(names)
    chosen, zero = stacked[:rows], added[0]
    for i in range(1, len(names)):
        own = owner == names[i]
        chosen = jnp.where(own, stacked[i * rows : (i + 1) * rows], chosen)
        zero = jnp.where(own, added[i], zero)
    return chosen + zero


def _raised(refs: Refs, place: Place, top):
    """The running maximum of a lane group after this step, [M, 1]."""
    return jnp.maximum(refs.peak[place.group], top.max(-1, keepdims=True))


def _no_sums(plan):
    """Sums of weights [M, 128], of weights times minima for each value slice, and of values [slices*M, W]."""
    zeros = jnp.zeros((plan.rows, LANES))
    return zeros, [zeros] * plan.value_slices, jnp.zeros((plan.value_slices * plan.rows, plan.lanes))


def _own_rows(ref, plan, place: Place, part: int, begin: int):
    """Value scales or minima of slice `part` of every head of the lane group, on the rows of its queries: [M, S]."""
    spec, heads = plan.spec, []
    first = jax.lax.div(place.group * plan.lanes, jnp.int32(spec.value_group))
    for head in range(plan.shared):
        within = (head * spec.head_dim + part * spec.value_slice) // spec.value_group
        heads.append(load_row(ref, first + within, plan.value_rows, begin // LANES, plan.column))
    row = jax.lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0)
    chosen = _filled(heads[0], plan)
    for head in range(1, plan.shared):
        chosen = jnp.where(row >= head * plan.rows_per_head, _filled(heads[head], plan), chosen)
    return chosen


def _filled(rows, plan):
    """[8, S] as often as it takes to fill the query rows [M, S]."""
    return jnp.concatenate([rows] * (plan.rows // 8))


def _lane_sums(x):
    """[M, S] to [M, 128]: columns of lanes added up."""
    return sum(x[:, lane : lane + LANES] for lane in range(LANES, x.shape[1], LANES)) + x[:, :LANES]


def _sum_block(refs: Refs, plan, place: Place, index: int, peak, sums):
    """Add a block's weights, minima and values to `sums`."""
    total, lows, product = sums
    parts = range(plan.value_slices)
    for i, codes in enumerate(_columns(refs.value_codes, plan.spec.value_bits, place, index, plan)):
        begin = index * plan.block + i * plan.column
        tokens = slice(begin, begin + plan.column)
        weights = jnp.exp2(refs.scores[:, tokens] - peak)
        total = total + _lane_sums(weights)
        scaled = [weights * _own_rows(refs.scales, plan, place, part, begin) for part in parts]
        minima = [weights * _own_rows(refs.lows, plan, place, part, begin) for part in parts]
        lows = [low + _lane_sums(x) for low, x in zip(lows, minima, strict=True)]
        product = product + dot(jnp.concatenate(scaled).astype(jnp.bfloat16), codes, 0)
    return total, lows, product


def _fold(refs: Refs, plan, place: Place, peak, sums):
    """Add a step's sums to the running ones of its lane group, rescaled to the maximum `peak`."""
    total, lows, product = sums
    group = place.group
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, plan.lanes), 1)
    part = jax.lax.rem(quotient(lane, plan.spec.value_slice), jnp.full_like(lane, plan.value_slices))
    update = _select(product, [low.sum(-1, keepdims=True) for low in lows], part, list(range(plan.value_slices)))
    # A row that has seen nothing yet adds rubbish here; its decay is 0 once it sees a token.
    decay = jnp.exp2(refs.peak[group] - peak)
    refs.peak[group] = peak
    refs.total[group] = refs.total[group] * decay + total.sum(-1, keepdims=True)
    refs.out[0, 0, group] = refs.out[0, 0, group] * decay + update
