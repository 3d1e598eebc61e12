"""Shared parts of the Hopper decode-attention kernels: layouts of registers, products, the online
softmax and its end.

WGMMA, the matrix instruction, has 64 rows and a multiple of 8 columns. So products run with
operands swapped. The rows are 64 tokens (scores) or 64 channels (sums of values). The columns are
the R query rows of a KV head, which are padded to a multiple of 8, and not to 64."""

import functools
import inspect
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvqjax.pallas_kernels.gpu.words import HALF

# Shared memory of a multiprocessor, and what a program takes of it beside its buffers: the runtime
# keeps 1 KiB, and the compiler adds 2072 bytes for barriers and reductions.
SHARED, ADDED = 228 * 1024, 1024 + 2072
CHANNELS = 64  # channels of one product with values: the rows of WGMMA
NEVER = -1e30  # a masked score: finite, so that the difference of two of them is a number
ROWS = plgpu.Layout.WGMMA.reduce(1)  # the layout of a number for each row of a product
COLUMNS = plgpu.Layout.WGMMA.reduce(0)  # the layout of a number for each column


class State(NamedTuple):
    """The online softmax of R columns. Sums over tokens are kept apart for the M rows of a product
    until the end."""

    peak: Any  # [R] running maximum of the scores, as base-2 logarithms
    total: Any  # [M, R] sum of the weights
    low: tuple  # of [M, R]: sum of weight times what channels share, for every slice of channels
    acc: tuple  # of [64, R]: sum of weight times value, transposed, 64 channels each


def tiled(shape: tuple[int, ...], dtype, swizzle: int = 128):
    """Declare shared memory that is swizzled, as products and transposed accesses want it.

    Args:
        swizzle: Bytes of a tile along the lanes."""
    tile = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tile, plgpu.SwizzleTransform(swizzle)))


def shared_bytes(memory) -> int:
    """Count the bytes of a program's buffers in shared memory.

    Args:
        memory: A tree of declarations."""
    buffers = (x for x in jax.tree.leaves(memory) if hasattr(x, "dtype"))
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in buffers)


def fitting(memory) -> int:
    """Count the programs whose shared memory fits a multiprocessor.

    Args:
        memory: A tree of declarations."""
    return SHARED // (shared_bytes(memory) + ADDED)


def share(ends, row, split, splits: int):
    """Find the tiles of one of the programs that share a row.

    Args:
        ends: A reference [3, B]: first tile, last tile + 1 and layer of every row.
        split: The number of the program.
        splits: How many programs share the row.

    Returns:
        (the program's first tile, one past its last)."""
    first, last = ends[0, row], ends[1, row]
    count = lax.div(last - first + splits - 1, splits)
    begin = first + split * count
    return begin, jnp.minimum(begin + count, last)


def load(ref, layout, *, optimized: bool = True):
    """Load a reference into registers.

    Args:
        ref: A reference to device or shared memory, all of which is loaded.
        layout: The layout in registers.
        optimized: As in `plgpu.load`: False where the layout has no optimised load from this
            memory.

    Returns:
        The array."""
    # `plgpu.load` demands an index in JAX 0.10, deprecates it in 0.11 and refuses it in 0.12.
    parameter = inspect.signature(plgpu.load).parameters.get("idx")
    needs_index = parameter is not None and parameter.default is parameter.empty
    index = ((),) if needs_index else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


def _store(ref, x):
    """Store to device memory."""
    # JAX 0.12 must be told that it may write less than whole cache lines. Earlier releases have no
    # `store`.
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def load_limits(bounds, row, shape: tuple[int, int]):
    """Load which tokens the columns see.

    Args:
        bounds: A reference [B, 2, R]: first and last + 1 visible token of every column.
        shape: The shape [M, R] of a product.

    Returns:
        The first token, and one past the last, on all rows of a product, [M, R] each."""
    limits = [load(bounds.at[row, i], COLUMNS, optimized=False) for i in range(2)]
    return [lax.broadcast_in_dim(x, shape, [1]) for x in limits]


def visible(slot, limits):
    """Say which tokens the columns see.

    Args:
        slot: The token of every row, on all columns, [M, R].
        limits: From `load_limits`.

    Returns:
        A mask [M, R]."""
    return (slot >= limits[0]) & (slot < limits[1])


def base2_scores(scores, dim: int, first, limits) -> list:
    """Turn scores into base-2 logarithms, NEVER where a query does not see the token.

    Args:
        scores: q . k of consecutive steps of tokens, [M, R] each.
        dim: Channels of a head.
        first: The first token.
        limits: From `load_limits`."""
    seen = []
    for step, score in enumerate(scores):
        slot = row_index(score.shape) + (first + step * score.shape[0])
        seen.append(visible(slot, limits))
    return masked(scores, dim, seen)


def masked(scores, dim: int, seen) -> list:
    """Turn scores into base-2 logarithms, NEVER where a query does not see the token.

    Args:
        scores: q . k, [M, R] each.
        dim: Channels of a head.
        seen: A mask for each of `scores`."""
    factor = dim**-0.5 * math.log2(math.e)
    return [jnp.where(x, score * factor, NEVER) for x, score in zip(seen, scores, strict=True)]


def begin_state(tokens: int, dim: int, rows: int, slices: int = 1) -> State:
    """Make the online softmax of no tokens.

    Args:
        tokens: The rows M of a product of scores.
        dim: Channels of a head.
        rows: Query rows R of a KV head.
        slices: Parts of a head's channels that share something; 0 where nothing is shared."""
    spread = plgpu.layout_cast(jnp.zeros((tokens, rows), jnp.float32), plgpu.Layout.WGMMA)
    acc = plgpu.layout_cast(jnp.zeros((CHANNELS, rows), jnp.float32), plgpu.Layout.WGMMA)
    peak = plgpu.layout_cast(jnp.full((rows,), NEVER, jnp.float32), COLUMNS)
    return State(peak, spread, (spread,) * slices, (acc,) * (dim // CHANNELS))


def along(vector, like):
    """Repeat a number for each column on all rows.

    Args:
        vector: The numbers, [R].
        like: An array of the shape that is wanted, [M, R].

    Returns:
        The numbers, [M, R]."""
    return lax.broadcast_in_dim(vector, like.shape, [1])


def put_transposed(ref, x):
    """Store the transpose of a matrix.

    Args:
        ref: A reference to shared memory, [N, M].
        x: The matrix in WGMMA's layout, [M, N]."""
    ref.transpose((1, 0))[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def product(*pairs):
    """Sum left @ right.T over pairs of matrices.

    Args:
        pairs: (left [M, N], right [R, N]) each. `right` lies in shared memory, `left` there or in
            registers.

    Returns:
        The sum, [M, R] float32."""
    return products(pairs)[0]


def products(*sums) -> tuple:
    """Compute several sums of products, and wait for all of them together.

    Args:
        sums: The pairs of each sum, as `product` takes them.

    Returns:
        The sums."""

    def run(*accs):
        for acc, pairs in zip(accs, sums, strict=True):
            for left, right in pairs:
                plgpu.wgmma(acc, left, right.transpose((1, 0)))
        return tuple(acc[...] for acc in accs)

    shapes = ((pairs[0][0].shape[0], pairs[0][1].shape[0]) for pairs in sums)
    return pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def numbers(bits16):
    """Turn bits of bfloat16 numbers into float32.

    Args:
        bits16: The bits, uint16."""
    return lax.bitcast_convert_type(bits16, jnp.bfloat16).astype(jnp.float32)


def numbers_of_rows(ref, like):
    """Load a number for each row of a product, and repeat it on all columns.

    Args:
        ref: A reference to bits of bfloat16 numbers, [M] uint16.
        like: An array of the shape that is wanted, [M, R].

    Returns:
        The numbers, [M, R] float32."""
    vector = numbers(load(ref, ROWS, optimized=False))
    return lax.broadcast_in_dim(vector, like.shape, [0])


def row_index(shape: tuple[int, int]):
    """Number the rows of a product.

    Args:
        shape: The shape [M, R] of the product.

    Returns:
        The number of every row, on all its columns, int32."""
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 0), plgpu.Layout.WGMMA)


def by_half(upper, lower):
    """Take the rows 0 to 31 of one product's result [64, R], and the rows 32 to 63 of another's."""
    return jnp.where(row_index(upper.shape) < HALF, upper, lower)


def row_halves(pair, rows: int):
    """Take the upper rows of the first of two results that stand side by side, [64, 2R], and the
    lower rows of the second. A single result [64, R] stays as it is."""
    return pair if pair.shape[1] == rows else by_half(pair[:, :rows], pair[:, rows:])


def hidden(memory, natural):
    """Index the first axis of references, whose length is 1, by a 0 that the compiler cannot know.

    With a known index the compiler would compute the addresses of all operands before the loop, and
    keep them in more registers than there are.

    Args:
        memory: A tree of references [1, ...].
        natural: An int32 number that is not negative.

    Returns:
        The tree of references [...]."""
    # The sign bit of a number that is not negative.
    zero = lax.shift_right_logical(natural, 31)
    return jax.tree.map(lambda ref: ref.at[zero], memory, is_leaf=lambda x: hasattr(x, "at"))


def fold(state: State, scores, write_weights, weigh) -> State:
    """Fold the scores of further tokens into the online softmax.

    Args:
        scores: A list of scores as base-2 logarithms, [M, R] each.
        write_weights: `write_weights(peak)` puts the tokens' softmax weights into shared memory. It
            returns what they add to `total` and `low`.
        weigh: `weigh()` returns the sums of the tokens' values under these weights, as `acc`.

    Returns:
        The online softmax with these tokens."""
    peak = jnp.maximum(state.peak, functools.reduce(jnp.maximum, scores).max(0))
    decay = jnp.exp2(state.peak - peak)
    total, low = write_weights(peak)
    sums = weigh()
    total = state.total * along(decay, total) + total
    low = tuple(x * along(decay, x) + y for x, y in zip(state.low, low, strict=True))
    return State(
        peak,
        total,
        low,
        tuple(x * along(decay, x) + y for x, y in zip(state.acc, sums, strict=True)),
    )


def finish(state: State, out, lse):
    """Write the results of an online softmax. They are 0 and NEVER in columns that have seen no
    token.

    Args:
        out: A reference to the normalised output, transposed, [D, R].
        lse: A reference to the log-sum-exp, a natural logarithm, [R]."""
    total, low = state.total.sum(0), [x.sum(0) for x in state.low]
    # Slices of one product's channels; less than 1 where several products share one.
    slices = len(low) / len(state.acc)
    seen = state.peak > NEVER / 2
    divisor = jnp.where(seen, total, jnp.ones_like(total))
    for i, acc in enumerate(state.acc):
        total_acc = acc
        if low:
            shared = along(low[int(i * slices)], acc)
            if slices == 2:
                shared = by_half(shared, along(low[2 * i + 1], acc))
            total_acc = acc + shared
        mean = total_acc / along(divisor, acc)
        part = out.at[pl.ds(i * CHANNELS, CHANNELS)]
        _store(part, jnp.where(along(seen, acc), mean, jnp.zeros_like(acc)))
    _store(
        lse,
        jnp.where(seen, jnp.log(divisor) + state.peak * math.log(2), jnp.full_like(total, NEVER)),
    )
