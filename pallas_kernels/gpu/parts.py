"""Share what the Hopper decode-attention kernels have in common: layouts of registers, the online softmax and its end.

Products run with operands swapped: 64 tokens (scores) or channels (sums of values) lie on the rows of a WGMMA
instruction, and the R query rows of a KV head, padded to a multiple of 8, are its columns. Nothing is padded to 64."""

import functools
import inspect
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["CHANNELS", "COLUMNS", "NEVER", "ROWS", "State", "along", "begin_state", "finish", "fold", "hidden", "load"]
__all__ += ["load_limits", "numbers", "product", "put_transposed", "row_index", "share", "tiled", "visible"]

CHANNELS = 64  # of one product with values: the rows of WGMMA
NEVER = -1e30  # a masked score: finite, so that the difference of two of them is a number
ROWS = plgpu.Layout.WGMMA.reduce(1)  # one number for each row of a product
COLUMNS = plgpu.Layout.WGMMA.reduce(0)


class State(NamedTuple):
    """The online softmax of R columns. Sums over tokens stay spread over the rows of a product until the end."""

    peak: Any  # [R], in powers of two
    total: Any  # [M, R] sum of the weights
    low: Any  # [M, R] sum of weight times what all channels of a value share
    acc: tuple  # of [64, R]: sum of weight times value, transposed, 64 channels each


def tiled(shape: tuple[int, ...], dtype, swizzle: int = 128):
    """Declare shared memory swizzled as products and transposed accesses want it, cut along the lanes into tiles of
    `swizzle` bytes."""
    tile = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tile, plgpu.SwizzleTransform(swizzle)))


def share(ends, row, split, splits: int):
    """Return the first tile of program `split` of those that share a row, and one past its last."""
    first, last = ends[0, row], ends[1, row]
    count = lax.div(last - first + splits - 1, splits)
    begin = first + split * count
    return begin, jnp.minimum(begin + count, last)


def load(ref, layout, *, optimized: bool = True):
    """Load all of a reference. `plgpu.load` demands an index in JAX 0.10, deprecates it in 0.11, refuses it in 0.12."""
    parameter = inspect.signature(plgpu.load).parameters.get("idx")
    demanded = parameter is not None and parameter.default is parameter.empty
    index = ((),) if demanded else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


def _store(ref, x):
    """Store to device memory. (JAX 0.12 must be told that it may write less than whole cache lines.)"""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def load_limits(bounds, row, shape: tuple[int, int]):
    """Load first and last + 1 visible token of every column, on all rows of a product."""
    limits = [load(bounds.at[row, i], COLUMNS, optimized=False) for i in range(2)]
    return [lax.broadcast_in_dim(x, shape, [1]) for x in limits]


def visible(slot, limits):
    """Say which tokens `slot` a column sees."""
    return (slot >= limits[0]) & (slot < limits[1])


def begin_state(tokens: int, dim: int, rows: int) -> State:
    """Return the online softmax of no tokens."""
    spread = plgpu.layout_cast(jnp.zeros((tokens, rows), jnp.float32), plgpu.Layout.WGMMA)
    acc = plgpu.layout_cast(jnp.zeros((CHANNELS, rows), jnp.float32), plgpu.Layout.WGMMA)
    peak = plgpu.layout_cast(jnp.full((rows,), NEVER, jnp.float32), COLUMNS)
    return State(peak, spread, spread, (acc,) * (dim // CHANNELS))


def along(vector, like):
    """Repeat a number for each column over all rows of `like`."""
    return lax.broadcast_in_dim(vector, like.shape, [1])


def put_transposed(ref, x):
    """Store x.T into `ref` for a matrix in WGMMA's layout."""
    ref.transpose((1, 0))[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def product(*pairs):
    """Sum left @ right.T over pairs of them, in float32. `right` [R, K] lies in shared memory, `left` [M, K] there or
    in registers."""

    def run(acc):
        for left, right in pairs:
            plgpu.wgmma(acc, left, right.transpose((1, 0)))
        return acc[...]

    left, right = pairs[0]
    return pl.run_scoped(run, plgpu.ACC((left.shape[0], right.shape[0]), jnp.float32))


def numbers(bits16):
    """Turn stored bfloat16 bits into float32."""
    return lax.bitcast_convert_type(bits16, jnp.bfloat16).astype(jnp.float32)


def row_index(shape: tuple[int, int]):
    """Return the number of every row, on all its columns."""
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 0), plgpu.Layout.WGMMA)


def hidden(memory, natural):
    """Index away the leading 1 of references by a number that is always 0, but that the compiler cannot know. Otherwise
    it would compute the addresses of all operands before the loop and keep them in more registers than there are."""
    zero = lax.shift_right_logical(natural, 31)
    return jax.tree.map(lambda ref: ref.at[zero], memory, is_leaf=lambda x: hasattr(x, "at"))


def fold(state: State, scores, write_weights, weigh) -> State:
    """Fold the scores of more tokens, a list of [M, R], into the online softmax. `write_weights(peak)` puts their
    softmax weights into shared memory and returns what to add to `total` and `low`. `weigh()` returns the weighted sums
    of values."""
    peak = jnp.maximum(state.peak, functools.reduce(jnp.maximum, scores).max(0))
    decay = jnp.exp2(state.peak - peak)
    total, low = write_weights(peak)
    sums = weigh()
    total, low = state.total * along(decay, total) + total, state.low * along(decay, low) + low
    return State(peak, total, low, tuple(x * along(decay, x) + y for x, y in zip(state.acc, sums, strict=True)))


def finish(state: State, out, lse):
    """Write the normalised output, transposed, [D, R], and the log-sum-exp [R]; 0 and NEVER where nothing was seen."""
    total, low = state.total.sum(0), state.low.sum(0)
    seen = state.peak > NEVER / 2
    safe = jnp.where(seen, total, jnp.ones_like(total))
    for i, acc in enumerate(state.acc):
        mean = (acc + along(low, acc)) / along(safe, acc)
        part = out.at[pl.ds(i * CHANNELS, CHANNELS)]
        _store(part, jnp.where(along(seen, acc), mean, jnp.zeros_like(acc)))
    _store(lse, jnp.where(seen, jnp.log(safe) + state.peak * math.log(2), jnp.full_like(total, NEVER)))
