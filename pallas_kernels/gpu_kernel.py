"""The body of the Hopper decode-attention kernel: one warpgroup reads a stretch of one row's tokens for one KV head.

A tile is two blocks of words, and each product takes one plane of it, 32 tokens of either block, to 64 rows
(`gpu_unpack`). The two blocks' key groups differ: the scaled queries of both stand side by side in the right operand,
and each half of the rows keeps its own half of the columns.

Words are read into registers at once, so that the next tile is on its way while a tile is worked off.

Shapes in comments: R query rows (a multiple of 8), D channels, P planes of a block, N key groups of a block.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvqjax.pallas_kernels import gpu_parts, gpu_unpack
from kvqjax.pallas_kernels.gpu_parts import COLUMNS, NEVER, ROWS, State, along, load, product, put_transposed, tiled
from kvqjax.pallas_kernels.gpu_unpack import HALF, MAGIC

__all__ = ["PART", "kernel", "scratch"]

PART = 8  # planes whose scores are held at a time; with more the registers do not suffice


class Refs(NamedTuple):
    ends: Any  # [3, B] i32: a row's first tile and the one after its last; the layer
    bounds: Any  # [B, 2, R] i32: first and last + 1 visible token of a query row
    queries: Any  # [B, K, D, R] f32, holding bfloat16 numbers
    key_codes: Any  # [L, B, rows, K*D] u32
    key_scale: Any  # [L, B, S/group, K*D] u16
    key_low: Any
    value_codes: Any
    value_scale: Any  # [L, B, K, S/(32P), P, 32] u16
    value_low: Any
    out: Any  # [B, K, splits, D, R] f32
    lse: Any  # [B, K, splits, R] f32
    key_words: Any  # [1, 64, D] u32
    key_factors: Any  # [1, 2, 2N, D] u16: scales and minima
    value_words: Any  # [1, 64, D] u32
    value_factors: Any  # [1, 2, 2, P, 32] u16: scales and minima; block, plane, token
    raw: Any  # [1, R, D] bf16: the queries
    scaled: Any  # [1, N, 2R, D] bf16: the queries times the scales of a group, both blocks side by side
    weights: Any  # [1, PART, R, 64] bf16
    keys_here: Any
    values_here: Any


def scratch(plan) -> list:
    """Shared memory and barriers, in the order of `Refs`."""
    dim, rows = plan.spec.head_dim, plan.rows
    return [
        tiled((1, 2 * HALF, dim), jnp.uint32),
        plgpu.SMEM((1, 2, 2 * plan.groups, dim), jnp.uint16),
        tiled((1, 2 * HALF, dim), jnp.uint32),
        plgpu.SMEM((1, 2, 2, plan.planes, HALF), jnp.uint16),
        tiled((1, rows, dim), jnp.bfloat16),
        tiled((1, plan.groups, 2 * rows, dim), jnp.bfloat16),
        tiled((1, PART, rows, 2 * HALF), jnp.bfloat16),
        plgpu.Barrier(num_arrivals=3),
        plgpu.Barrier(num_arrivals=3),
    ]


def kernel(*refs, plan):
    """Grid (row, head, split)."""
    refs = Refs(*refs)
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    begin, end = gpu_parts.share(refs.ends, row, split, plan.splits)
    where = (refs.ends[2, row], row, head)

    @pl.when(begin < end)
    def _():
        _fetch_keys(refs, plan, where, begin)
        _fetch_values(refs, plan, where, begin)

    queries = load(refs.queries.at[row, head], plgpu.Layout.WGMMA, optimized=False)
    put_transposed(refs.raw.at[0], queries.astype(jnp.bfloat16))
    limits = gpu_parts.load_limits(refs.bounds, row, (2 * HALF, plan.rows))

    def step(number, state):
        return _fold(refs, plan, where, number, end, queries, limits, state)

    state = gpu_parts.begin_state(2 * HALF, plan.spec.head_dim, plan.rows)
    state = lax.fori_loop(begin * plan.parts, end * plan.parts, step, state)
    gpu_parts.finish(state, refs.out.at[row, head, split], refs.lse.at[row, head, split])


def _words(plan, where, tile):
    """The rows and lanes of a tile's words."""
    lanes = pl.ds(where[2] * plan.spec.head_dim, plan.spec.head_dim)
    return pl.ds(lax.div(plan.first_token(tile), plan.planes), 2 * HALF), lanes


def _fetch_keys(refs: Refs, plan, where, tile):
    """Start copying the key words, scales and minima of a tile."""
    rows, lanes = _words(plan, where, tile)
    plgpu.copy_gmem_to_smem(refs.key_codes.at[*where[:2], rows, lanes], refs.key_words.at[0], refs.keys_here)
    groups = pl.ds(lax.div(plan.first_token(tile), plan.spec.key_group), 2 * plan.groups)
    for i, source in enumerate((refs.key_scale, refs.key_low)):
        plgpu.copy_gmem_to_smem(source.at[*where[:2], groups, lanes], refs.key_factors.at[0, i], refs.keys_here)


def _fetch_values(refs: Refs, plan, where, tile):
    """Likewise for values."""
    rows, lanes = _words(plan, where, tile)
    plgpu.copy_gmem_to_smem(refs.value_codes.at[*where[:2], rows, lanes], refs.value_words.at[0], refs.values_here)
    blocks = pl.ds(lax.div(plan.first_token(tile), plan.block), 2)
    for i, source in enumerate((refs.value_scale, refs.value_low)):
        plgpu.copy_gmem_to_smem(source.at[*where, blocks], refs.value_factors.at[0, i], refs.values_here)


def _numbers(bits16):
    """float32 numbers of stored bfloat16 bits."""
    return lax.bitcast_convert_type(bits16, jnp.bfloat16).astype(jnp.float32)


def _hidden(refs: Refs, natural):
    """The references with their leading 1 taken away by an index that is always 0, which the compiler does not know: it
    would compute the addresses of all operands before the loop, and keep them in more registers than there are."""
    nought = lax.shift_right_logical(natural, 31)
    names = ("raw", "scaled", "weights", "key_words", "key_factors", "value_words", "value_factors")
    return refs._replace(**{name: getattr(refs, name).at[nought] for name in names})


def _fold(refs: Refs, plan, where, step, end, queries, limits, state: State) -> State:
    """Fold one part of a tile into the running softmax."""
    tile, part = lax.div(step, plan.parts), lax.rem(step, plan.parts)
    whole, refs = refs, _hidden(refs, step)

    @pl.when(part == 0)
    def _():
        plgpu.barrier_wait(refs.keys_here)
        _scale_queries(refs, plan, queries)
        plgpu.barrier_wait(refs.values_here)

    more_to_come = (part == plan.parts - 1) & (tile + 1 < end)
    scores = _scores(refs, plan, part, tile, limits)
    plgpu.commit_smem()  # all threads have read the key words
    pl.when(more_to_come)(lambda: _fetch_keys(whole, plan, where, tile + 1))
    peak = jnp.maximum(state.peak, functools.reduce(jnp.maximum, scores).max(0))
    decay = jnp.exp2(state.peak - peak)
    total, low = _write_weights(refs, plan, part, scores, peak)
    halves = _value_halves(refs, plan, part)
    plgpu.commit_smem()  # the weights are written and the value words read
    pl.when(more_to_come)(lambda: _fetch_values(whole, plan, where, tile + 1))
    sums = _weighted(refs, plan, halves)
    old = [x * along(decay, x) for x in state[1:]]
    return State(peak, *(x + new for x, new in zip(old, (total, low, sums), strict=True)))


def _scale_queries(refs: Refs, plan, queries):
    """Write the queries times each group's scales."""
    for group in range(plan.groups):
        for half in range(2):
            scale = load(refs.key_factors.at[0, half * plan.groups + group], ROWS, optimized=False)
            scaled = queries * lax.broadcast_in_dim(_numbers(scale), queries.shape, [0])
            target = refs.scaled.at[group, pl.ds(half * plan.rows, plan.rows)]
            put_transposed(target, scaled.astype(jnp.bfloat16))
    plgpu.commit_smem()


def _row(shape):
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 0), plgpu.Layout.WGMMA)


def _own(both, rows: int):
    """Of [64, 2R], on every row the columns of its own block: [64, R]."""
    first, second = both[:, :rows], both[:, rows:]
    return jnp.where(_row(first.shape) < HALF, first, second)


def _constants(refs: Refs, plan, group):
    """For either block's group: minus MAGIC times the sum of the scaled query, and q . m; both [64, R]."""
    shape = (2 * HALF, plan.spec.head_dim)
    lows = []
    for half in range(2):
        low = load(refs.key_factors.at[1, half * plan.groups + group], COLUMNS, optimized=False)
        lows.append(lax.broadcast_in_dim(lax.bitcast_convert_type(low, jnp.bfloat16), shape, [1]))
    minus = plgpu.layout_cast(jnp.full(shape, -MAGIC, jnp.bfloat16), plgpu.Layout.WGMMA)
    offset = _own(product(minus, refs.scaled.at[group], 2 * plan.rows), plan.rows)
    return offset, product(jnp.where(_row(shape) < HALF, *lows), refs.raw, plan.rows)


def _scores(refs: Refs, plan, part, tile, limits):
    """Scores in powers of two, PART times [64, R]; NEVER where a query must not look."""
    factor, each = plan.spec.head_dim**-0.5 * math.log2(math.e), plan.spec.key_group // HALF
    halves = gpu_unpack.halves(load(refs.key_words, plgpu.Layout.WGMMA), plan.parts, part)
    scores = []
    for begin in range(0, PART, each):
        group = part * (PART // each) + begin // each
        offset, zero = _constants(refs, plan, group)
        for plane in range(begin, begin + each):
            codes = gpu_unpack.codes(halves, plane, plan.spec.key_bits)
            score = _own(product(codes, refs.scaled.at[group], 2 * plan.rows), plan.rows) + offset
            score = (score * (1 / gpu_unpack.lift(plane, plan.spec.key_bits)) + zero) * factor
            row = _row(score.shape)
            first = plan.first_token(tile) + HALF * (part * PART + plane)
            slot = jnp.where(row < HALF, row, row + (plan.block - HALF)) + first
            scores.append(jnp.where(gpu_parts.visible(slot, limits, tile * plan.tile), score, NEVER))
    return scores


def _write_weights(refs: Refs, plan, part, scores, peak):
    """Write the weights times the values' scales; return the sum over planes of the weights, and of what all channels
    get: weight times minimum, less what MAGIC adds. Both [64, R]."""
    total = low = jnp.zeros_like(scores[0])
    for plane, score in enumerate(scores):
        weight = jnp.exp2(score - along(peak, score))
        both = (gpu_unpack.interleaved(refs.value_factors.at[i, :, part * PART + plane]) for i in range(2))
        scale, zero = (lax.broadcast_in_dim(_numbers(x), weight.shape, [0]) for x in both)
        rounded = (weight * scale * (1 / gpu_unpack.lift(plane, plan.spec.value_bits))).astype(jnp.bfloat16)
        put_transposed(refs.weights.at[plane], rounded)
        total, low = total + weight, low + weight * zero - MAGIC * rounded.astype(jnp.float32)
    return total, low


def _value_halves(refs: Refs, plan, part):
    """16-bit halves of the value words, channels on the rows: [D, 64]."""
    words = load(refs.value_words.transpose((1, 0)), plgpu.Layout.WGMMA_TRANSPOSED)
    return [plgpu.layout_cast(x, plgpu.Layout.WGMMA) for x in gpu_unpack.halves(words, plan.parts, part)]


def _weighted(refs: Refs, plan, halves):
    """The sum of the part's value codes under its weights, [D, R]."""

    def run(acc):
        for plane in range(PART):
            codes = gpu_unpack.codes(halves, plane, plan.spec.value_bits)
            plgpu.wgmma(acc, codes, refs.weights.at[plane].transpose((1, 0)))
            plgpu.wgmma_wait(0)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((plan.spec.head_dim, plan.rows), jnp.float32))
