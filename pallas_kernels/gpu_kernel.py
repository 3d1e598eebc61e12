"""The body of the Hopper decode-attention kernel: one warpgroup reads a stretch of one row's tokens for one KV head.

Products run with operands swapped: a tile's codes are the left operand, in registers, with tokens (keys) or channels
(values) on the 64 rows of a WGMMA instruction, and the query rows are its 8 or 16 columns. A tile is two blocks of words
(`kvqjax.layout`), so that each plane of it, 32 tokens of either block, fills 64 rows. The two blocks' key groups differ;
the scaled queries of both stand side by side in the right operand, and each half of the rows keeps its own half of the
columns.

Codes come out of the words as bfloat16 128 + c, made by or-ing c into the mantissa of 128. The 128 is subtracted with
the same rounded factors, so it cancels.

Shapes in comments: R query rows (a multiple of 8), D channels, P planes of a block, N key groups of a block.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

__all__ = ["HALF", "NEVER", "PART", "Refs", "kernel", "scratch"]

HALF = 32  # rows of words in a block: half the rows of one product
PART = 8  # planes whose scores are held at a time
NEVER = -1e30  # a masked score: finite, so that the difference of two of them is a number
MAGIC = 128  # bfloat16 128 counts in ones: its seven mantissa bits hold a code
ROWS = plgpu.Layout.WGMMA.reduce(1)  # one number for each row of a product
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
# [2, 32] spread over the threads as ROWS spreads [64]
TWO_BLOCKS = plgpu.Layout.TILED(
    plgpu.Tiling(((2, HALF), (16,), (8,), (1,))), (-5, -4), (-2, plgpu.Replicated(4)), -1
)


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
    key_words: Any  # [64, D] u32
    key_factors: Any  # [2, 2N, D] u16: scales and minima
    value_words: Any  # [64, D] u32
    value_factors: Any  # [2, 2, P, 32] u16: scales and minima; block, plane, token
    raw: Any  # [R, D] bf16: the queries
    scaled: Any  # [N, 2R, D] bf16: the queries times the scales of a group, both blocks side by side
    weights: Any  # [PART, R, 64] bf16
    keys_here: Any
    values_here: Any


def scratch(plan) -> list:
    """Shared memory and barriers, in the order of `Refs`."""
    dim, rows, planes, groups = plan.spec.head_dim, plan.rows, plan.planes, plan.groups

    def tiled(shape, dtype):
        lanes = 128 // jnp.dtype(dtype).itemsize
        transforms = (plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    return [
        tiled((1, 2 * HALF, dim), jnp.uint32),
        plgpu.SMEM((1, 2, 2 * groups, dim), jnp.uint16),
        tiled((1, 2 * HALF, dim), jnp.uint32),
        plgpu.SMEM((1, 2, 2, planes, HALF), jnp.uint16),
        tiled((1, rows, dim), jnp.bfloat16),
        tiled((1, groups, 2 * rows, dim), jnp.bfloat16),
        tiled((1, PART, rows, 2 * HALF), jnp.bfloat16),
        plgpu.Barrier(num_arrivals=3),
        plgpu.Barrier(num_arrivals=3),
    ]


def kernel(*refs, plan):
    """Grid (row, head, split)."""
    refs = Refs(*refs)
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    first, last = refs.ends[0, row], refs.ends[1, row]
    share = lax.div(last - first + plan.splits - 1, plan.splits)
    begin = first + split * share
    end = jnp.minimum(begin + share, last)
    where = (refs.ends[2, row], row, head)

    @pl.when(begin < end)
    def _():
        _fetch_keys(refs, plan, where, begin)
        _fetch_values(refs, plan, where, begin)

    queries = plgpu.load(refs.queries, (row, head), layout=plgpu.Layout.WGMMA, optimized=False)
    _put_transposed(refs.raw.at[0], queries.astype(jnp.bfloat16))
    limits = [plgpu.load(refs.bounds, (row, i), layout=COLUMNS, optimized=False) for i in range(2)]
    limits = [lax.broadcast_in_dim(x, (2 * HALF, plan.rows), [1]) for x in limits]

    def step(number, state):
        return _fold(refs, plan, where, number, end, queries, limits, state)

    peak, total, low, acc = lax.fori_loop(begin * plan.parts, end * plan.parts, step, _start(plan))
    total, low = total.sum(0), low.sum(0)
    seen = peak > NEVER / 2
    out = (acc + _along(low, acc)) / _along(jnp.where(seen, total, jnp.ones_like(total)), acc)
    refs.out.at[row, head, split][...] = jnp.where(_along(seen, acc), out, jnp.zeros_like(out))
    refs.lse.at[row, head, split][...] = jnp.where(seen, jnp.log(total) + peak * math.log(2), jnp.full_like(peak, NEVER))


def _start(plan):
    """Running maximum [R] and, still spread over 64 rows, the sums of weights and of weighted minima; out^T [D, R]."""
    spread = plgpu.layout_cast(jnp.zeros((2 * HALF, plan.rows), jnp.float32), plgpu.Layout.WGMMA)
    acc = plgpu.layout_cast(jnp.zeros((plan.spec.head_dim, plan.rows), jnp.float32), plgpu.Layout.WGMMA)
    return plgpu.layout_cast(jnp.full((plan.rows,), NEVER, jnp.float32), COLUMNS), spread, spread, acc


def _along(vector, like):
    """A number for each column, over all rows of `like`."""
    return lax.broadcast_in_dim(vector, like.shape, [1])


def _put_transposed(ref, x):
    """ref[...] = x.T for a matrix in WGMMA's layout."""
    plgpu.transpose_ref(ref, (1, 0))[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def _fetch_keys(refs: Refs, plan, where, tile):
    """Start copying the key words, scales and minima of a tile."""
    layer, row, head = where
    token, lanes = plan.first_token(tile), pl.ds(head * plan.spec.head_dim, plan.spec.head_dim)
    words = pl.ds(lax.div(token, plan.per_word), 2 * HALF)
    plgpu.copy_gmem_to_smem(refs.key_codes.at[layer, row, words, lanes], refs.key_words.at[0], refs.keys_here)
    groups = pl.ds(lax.div(token, plan.spec.key_group), 2 * plan.groups)
    for i, source in enumerate((refs.key_scale, refs.key_low)):
        plgpu.copy_gmem_to_smem(source.at[layer, row, groups, lanes], refs.key_factors.at[0, i], refs.keys_here)


def _fetch_values(refs: Refs, plan, where, tile):
    """Likewise for values."""
    layer, row, head = where
    token, lanes = plan.first_token(tile), pl.ds(head * plan.spec.head_dim, plan.spec.head_dim)
    words = pl.ds(lax.div(token, plan.per_word), 2 * HALF)
    plgpu.copy_gmem_to_smem(refs.value_codes.at[layer, row, words, lanes], refs.value_words.at[0], refs.values_here)
    blocks = pl.ds(lax.div(token, plan.block), 2)
    for i, source in enumerate((refs.value_scale, refs.value_low)):
        plgpu.copy_gmem_to_smem(source.at[layer, row, head, blocks], refs.value_factors.at[0, i], refs.values_here)


def _numbers(bits16):
    """float32 numbers of stored bfloat16 bits."""
    return lax.bitcast_convert_type(bits16, jnp.bfloat16).astype(jnp.float32)


def _hidden(refs: Refs, natural):
    """The references with their leading 1 taken away by an index that is always 0, which the compiler does not know: it
    would compute the addresses of all operands before the loop, and keep words that are loaded again, in more registers
    than there are."""
    nought = lax.shift_right_logical(natural, 31)
    names = ("raw", "scaled", "weights", "key_words", "key_factors", "value_words", "value_factors")
    return refs._replace(**{name: getattr(refs, name).at[nought] for name in names})


def _fold(refs: Refs, plan, where, step, end, queries, limits, state):
    """Fold PART planes of a tile into the running softmax: more scores at a time do not fit into the registers."""
    tile, part = lax.div(step, plan.parts), lax.rem(step, plan.parts)
    whole, refs = refs, _hidden(refs, step)

    @pl.when(part == 0)
    def _():
        plgpu.barrier_wait(refs.keys_here)
        _scale_queries(refs, plan, queries)
        plgpu.barrier_wait(refs.values_here)

    peak, total, low, acc = state
    more_to_come = (part == plan.parts - 1) & (tile + 1 < end)
    scores = _scores(refs, plan, part, tile, limits)
    plgpu.commit_smem()
    pl.when(more_to_come)(lambda: _fetch_keys(whole, plan, where, tile + 1))
    raised = jnp.maximum(peak, functools.reduce(jnp.maximum, scores).max(0))
    decay = jnp.exp2(peak - raised)
    more, lower = _write_weights(refs, plan, part, scores, raised)
    halves = _value_halves(refs, plan, part)
    plgpu.commit_smem()
    pl.when(more_to_come)(lambda: _fetch_values(whole, plan, where, tile + 1))
    total, low = (old * _along(decay, old) + new for old, new in ((total, more), (low, lower)))
    return raised, total, low, acc * _along(decay, acc) + _weighted(refs, plan, halves)


def _value_halves(refs: Refs, plan, part):
    """As `_halves` of the value words, channels on the rows."""
    words = plgpu.load(plgpu.transpose_ref(refs.value_words, (1, 0)), (), layout=plgpu.Layout.WGMMA_TRANSPOSED)
    return [plgpu.layout_cast(half, plgpu.Layout.WGMMA) for half in _halves(words, plan, part)]


def _halves(words, plan, part):
    """The 16-bit halves of every word that hold a part; a register then holds those of two neighbours."""
    if plan.parts == 1:
        return [(words >> jnp.uint32(shift)).astype(jnp.uint16) for shift in (0, 16)]
    return [(words >> (16 * part).astype(jnp.uint32)).astype(jnp.uint16)]


def place(plane: int, bits: int) -> tuple[int, int, int]:
    """Where a plane's codes are: which half of the word, by how much to shift it, and the power of two they come out
    times. A bfloat16 has seven bits of mantissa, so several narrow codes of one word share a shift."""
    half, bit = divmod(plane * bits, 16)
    shift = bit - bit % (7 // bits * bits)
    return half, shift, 1 << (bit - shift)


def _codes(halves, plane: int, bits: int):
    """MAGIC + the codes of one plane of a part times `lift`, bfloat16; and `lift`."""
    half, shift, lift = place(plane, bits)
    return _magic(halves[half], shift, ((1 << bits) - 1) * lift), lift


def magic_bits(pair, shift: int, mask: int):
    """Two 16-bit halves in 32 bits to two bfloat16 numbers; what the shift moves from one into the other is masked."""
    return ((pair >> shift) & (mask * 0x10001)) | 0x43004300


def _magic(half, shift: int, mask: int):
    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(half.shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def apply(_, half):
        i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
        constant = functools.partial(mgpu.c, ty=i32)
        registers = np.empty_like(half.registers)
        for index, register in np.ndenumerate(half.registers):
            x = mgpu.utils.bitcast(register, i32)
            x = arith.shrui(x, constant(shift)) if shift else x
            x = arith.ori(arith.andi(x, constant(mask * 0x10001)), constant(0x43004300))
            registers[index] = mgpu.utils.bitcast(x, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=half.layout, _is_signed=None)

    return apply(half)


def _upper(shape):
    """Which entries of a product lie on the rows of the tile's first block."""
    row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 0), plgpu.Layout.WGMMA)
    return row < HALF


def _own(product, rows: int):
    """Of [64, 2R], on every row the columns of its own block: [64, R]."""
    first, second = product[:, :rows], product[:, rows:]
    return jnp.where(_upper(first.shape), first, second)


def _scale_queries(refs: Refs, plan, queries):
    """Write the queries times each group's scales."""
    rows = plan.rows
    for group in range(plan.groups):
        for half in range(2):
            scale = plgpu.load(refs.key_factors, (0, half * plan.groups + group), layout=ROWS, optimized=False)
            scaled = queries * lax.broadcast_in_dim(_numbers(scale), queries.shape, [0])
            _put_transposed(refs.scaled.at[group, pl.ds(half * rows, rows)], scaled.astype(jnp.bfloat16))
    plgpu.commit_smem()


def _added(refs: Refs, plan, group):
    """For either block's group: minus MAGIC times the sum of the scaled query, and q . m; both [64, R]."""
    shape = (2 * HALF, plan.spec.head_dim)
    lows = []
    for half in range(2):
        low = plgpu.load(refs.key_factors, (1, half * plan.groups + group), layout=COLUMNS, optimized=False)
        lows.append(lax.broadcast_in_dim(lax.bitcast_convert_type(low, jnp.bfloat16), shape, [1]))
    low = jnp.where(_upper(shape), *lows)
    minus = plgpu.layout_cast(jnp.full(shape, -MAGIC, jnp.bfloat16), plgpu.Layout.WGMMA)
    zero = _product(low, refs.raw, plan.rows)
    return _own(_product(minus, refs.scaled.at[group], 2 * plan.rows), plan.rows), zero


def _product(left, right, columns: int):
    """left @ right.T, `right` lying in shared memory; float32."""

    def run(acc):
        plgpu.wgmma(acc, left, plgpu.transpose_ref(right, (1, 0)))
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((left.shape[0], columns), jnp.float32))


def _scores(refs: Refs, plan, part, tile, limits):
    """Scores in powers of two, PART times [64, R]; NEVER where a query must not look."""
    factor = plan.spec.head_dim**-0.5 * math.log2(math.e)
    token, each = plan.first_token(tile), plan.spec.key_group // HALF
    halves = _halves(plgpu.load(refs.key_words, (), layout=plgpu.Layout.WGMMA), plan, part)
    scores = []
    for plane in range(PART):
        group = part * (PART // each) + plane // each
        if plane % each == 0:
            offset, zero = _added(refs, plan, group)
        codes, lift = _codes(halves, plane, plan.spec.key_bits)
        product = _own(_product(codes, refs.scaled.at[group], 2 * plan.rows), plan.rows)
        row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, product.shape, 0), plgpu.Layout.WGMMA)
        slot = jnp.where(row < HALF, row, row + (plan.block - HALF)) + (token + HALF * (part * PART + plane))
        seen = (slot >= limits[0]) & (slot < limits[1]) & (slot >= tile * plan.tile)
        scores.append(jnp.where(seen, ((product + offset) * (1 / lift) + zero) * factor, NEVER))
    return scores


def _plane(factors):
    """Of [2, 32], a number for each row of one plane's product: [64]."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((2 * HALF,), factors.dtype, layout=ROWS)
    )
    def load(_, ref):
        both = mgpu.FragmentedArray.load_untiled(ref, layout=TWO_BLOCKS.to_mgpu(), is_signed=False, optimized=False)
        layout = ROWS.to_mgpu()
        registers = both.registers.reshape(layout.registers_shape((2 * HALF,)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=False)

    return load(factors)


def _write_weights(refs: Refs, plan, part, scores, peak):
    """Write the weights times the values' scales; return the weights' sum over planes, and that of weight times minimum,
    both [64, R]."""
    total = low = jnp.zeros_like(scores[0])
    for plane, score in enumerate(scores):
        weight = jnp.exp2(score - _along(peak, score))
        both = (_plane(refs.value_factors.at[i, :, part * PART + plane]) for i in range(2))
        scale, zero = (lax.broadcast_in_dim(_numbers(x), weight.shape, [0]) for x in both)
        lift = place(plane, plan.spec.value_bits)[2]
        rounded = (weight * scale * (1 / lift)).astype(jnp.bfloat16)
        _put_transposed(refs.weights.at[plane], rounded)
        total, low = total + weight, low + weight * zero - MAGIC * rounded.astype(jnp.float32)
    plgpu.commit_smem()
    return total, low


def _weighted(refs: Refs, plan, halves):
    """The sum of the part's codes under its weights, [D, R]; `halves` are transposed, [D, 64]."""

    def run(acc):
        for plane in range(PART):
            codes, _ = _codes(halves, plane, plan.spec.value_bits)
            plgpu.wgmma(acc, codes, plgpu.transpose_ref(refs.weights.at[plane], (1, 0)))
            plgpu.wgmma_wait(0)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((plan.spec.head_dim, plan.rows), jnp.float32))
