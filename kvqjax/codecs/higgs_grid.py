"""Grids of vectors that are optimal for a normal distribution, and groups that have a Hadamard
matrix."""

import functools
import importlib.resources

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt

from kvqjax._errors import UserError
from kvqjax.codecs.hadamard import has_hadamard
from kvqjax.codecs.nuq_table import look_up

LARGEST_GROUP = 1024
SMALLEST_GROUP = 64  # below this a divisor costs more in scales than zero padding costs in codes
BLOCK = 16  # grid points compared in one unrolled pass: the fastest on CPU among 8 to 64


@functools.cache
def _grids() -> dict[str, np.ndarray]:
    """Load all grids of the package, by their names."""
    with importlib.resources.files("kvqjax.codecs").joinpath("grids.npz").open("rb") as file:
        return {name: grid.astype(np.float32) for name, grid in np.load(file).items()}


def shipped_grid(bits: int, dim: int) -> np.ndarray:
    """Load the Gaussian-optimal grid float32 [2^(bits*dim), dim] (benchmarks/make_grids.py computed
    it)."""
    # A slip of billions of bits must not be written out.
    size = 2 ** (bits * dim) if 0 < bits * dim <= 64 else "..."
    name = f"p{dim}_n{size}"
    if name not in _grids():
        widths: dict[int, list[int]] = {}
        for grid in _grids().values():
            points, size = grid.shape
            widths.setdefault(size, []).append((points.bit_length() - 1) // size)
        known = "; ".join(
            f"dim={d} with bits={' or '.join(map(str, sorted(widths[d])))}" for d in sorted(widths)
        )
        raise UserError(f"no grid of {bits} bits in {dim} dimensions; known: {known}")
    return _grids()[name]


def group_size(width: int) -> int:
    """Choose how many channels one Hadamard transform takes: the largest divisor of `width` up to
    1024 that has a Hadamard matrix. For widths without a useful one it is the next power of two,
    and channels are padded with zeros."""
    divisors = [
        g for g in range(1, min(LARGEST_GROUP, width) + 1) if width % g == 0 and has_hadamard(g)
    ]
    if divisors[-1] >= min(SMALLEST_GROUP, width):
        return divisors[-1]
    return min(LARGEST_GROUP, 1 << (width - 1).bit_length())


def points_of(
    points: np.ndarray, codes: UInt[Array, "*lead vectors"]
) -> Float[Array, "*lead numbers"]:
    """Look up the grid points of codes, side by side. A CPU copies a point at a time."""
    if points.shape[1] == 1:
        return look_up(codes, jnp.asarray(points[:, 0]))
    # The number of values of a code is the number of points, so no code is out of bounds.
    return (
        jnp.asarray(points).at[codes].get(mode="promise_in_bounds").reshape(*codes.shape[:-1], -1)
    )


def nearest(grid: Float[Array, "n p"], y: Float[Array, "*B p"]) -> UInt[Array, "*B"]:
    """Find the index of the grid point g nearest to each vector y: the first maximum of 2 y.g -
    |g|^2, in float32."""
    # Products and sums are written out number by number: a matrix product of depth p <= 6 would
    # waste a matrix unit.
    return jax.lax.platform_dependent(grid, y, cuda=by_table, default=by_blocks)


def by_table(grid: Float[Array, "n p"], y: Float[Array, "*B p"]) -> UInt[Array, "*B"]:
    """Do as `nearest` by an argmax over the scores of all points. XLA for GPUs computes the scores
    within the kernel of the argmax."""
    lead = (1,) * (y.ndim - 1)
    scores = sum(
        y[..., i, None] * (2 * grid[:, i]).reshape(*lead, -1) for i in range(grid.shape[1])
    )
    return jax.lax.argmax(scores - (grid * grid).sum(1).reshape(*lead, -1), y.ndim - 1, jnp.uint32)


def by_blocks(grid: Float[Array, "n p"], y: Float[Array, "*B p"]) -> UInt[Array, "*B"]:
    """Do as `nearest` by a running maximum over unrolled blocks of points.

    With an argmax, XLA for CPUs writes the table of all scores to memory, which took 3 to 30 times
    longer (128 tokens of 1024 channels)."""
    count, dim = grid.shape
    block = min(BLOCK, count)
    bias = (grid * grid).sum(1)
    columns = [y[..., i] for i in range(dim)]

    def visit(index, state):
        best, code = state
        start = index * block
        points = jax.lax.dynamic_slice_in_dim(2 * grid, start, block)
        norms = jax.lax.dynamic_slice_in_dim(bias, start, block)
        for j in range(block):
            score = sum(columns[i] * points[j, i] for i in range(dim)) - norms[j]
            better = score > best
            code = jnp.where(better, (start + j).astype(jnp.uint32), code)
            best = jnp.where(better, score, best)
        return best, code

    start = jnp.full(y.shape[:-1], -jnp.inf, jnp.float32), jnp.zeros(y.shape[:-1], jnp.uint32)
    return jax.lax.fori_loop(0, count // block, visit, start)[1]
