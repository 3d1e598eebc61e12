"""What the Hopper decode-attention kernels share: layouts of registers, the online softmax's state, its end.

Products run with operands swapped: 64 tokens (scores) or channels (sums of values) lie on the rows of a WGMMA
instruction, and the R query rows of a KV head, padded to a multiple of 8, are its columns. Nothing is padded to 64.
"""

import inspect
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["COLUMNS", "NEVER", "ROWS", "State", "along", "begin_state", "finish", "load", "load_limits"]
__all__ += ["product", "put_transposed", "share", "tiled", "visible"]

NEVER = -1e30  # a masked score: finite, so that the difference of two of them is a number
ROWS = plgpu.Layout.WGMMA.reduce(1)  # one number for each row of a product
COLUMNS = plgpu.Layout.WGMMA.reduce(0)


class State(NamedTuple):
    """Running softmax of R columns. The sums over tokens stay spread over the rows of a product until the end."""

    peak: Any  # [R], in powers of two
    total: Any  # [M, R] sum of the weights
    low: Any  # [M, R] sum of weight times what all channels of a value share
    acc: Any  # [D, R] sum of weight times value, transposed


def tiled(shape: tuple[int, ...], dtype):
    """Shared memory swizzled as products and transposed accesses want it."""
    lanes = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(128)))


def share(ends, row, split, splits: int):
    """First tile of one of the programs that share a row, and the one after its last."""
    first, last = ends[0, row], ends[1, row]
    each = lax.div(last - first + splits - 1, splits)
    begin = first + split * each
    return begin, jnp.minimum(begin + each, last)


def load(ref, layout, *, optimized: bool = True):
    """`plgpu.load` of all of a reference: an index was demanded before JAX 0.12, and is refused since."""
    index = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


def _store(ref, x):
    """ref[...] = x in device memory; JAX 0.12 wants to be told that it may write less than whole cache lines."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def load_limits(bounds, row, shape: tuple[int, int]):
    """First and last + 1 visible token of every column, over all rows of a product."""
    limits = [load(bounds.at[row, i], COLUMNS, optimized=False) for i in range(2)]
    return [lax.broadcast_in_dim(x, shape, [1]) for x in limits]


def visible(slot, limits, first):
    """Which tokens `slot` a column may see; none before `first`, which an earlier tile has counted."""
    return (slot >= limits[0]) & (slot < limits[1]) & (slot >= first)


def begin_state(tokens: int, dim: int, rows: int) -> State:
    """Nothing seen yet."""
    spread = plgpu.layout_cast(jnp.zeros((tokens, rows), jnp.float32), plgpu.Layout.WGMMA)
    acc = plgpu.layout_cast(jnp.zeros((dim, rows), jnp.float32), plgpu.Layout.WGMMA)
    return State(plgpu.layout_cast(jnp.full((rows,), NEVER, jnp.float32), COLUMNS), spread, spread, acc)


def along(vector, like):
    """A number for each column, over all rows of `like`."""
    return lax.broadcast_in_dim(vector, like.shape, [1])


def put_transposed(ref, x):
    """ref[...] = x.T for a matrix in WGMMA's layout."""
    ref.transpose((1, 0))[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def product(left, right, columns: int):
    """left @ right.T in float32; `right` [columns, K] lies in shared memory, `left` there or in registers."""

    def run(acc):
        plgpu.wgmma(acc, left, right.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((left.shape[0], columns), jnp.float32))


def finish(state: State, out, lse):
    """Write the normalised output, transposed, [D, R], and the log-sum-exp [R]; 0 and NEVER where nothing was seen."""
    total, low, acc = state.total.sum(0), state.low.sum(0), state.acc
    seen = state.peak > NEVER / 2
    safe = jnp.where(seen, total, jnp.ones_like(total))
    _store(out, jnp.where(along(seen, acc), (acc + along(low, acc)) / along(safe, acc), jnp.zeros_like(acc)))
    _store(lse, jnp.where(seen, jnp.log(safe) + state.peak * math.log(2), jnp.full_like(total, NEVER)))
