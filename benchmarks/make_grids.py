"""Compute the Gaussian-optimal grids shipped in kvqjax/codecs/grids.npz:
`python benchmarks/make_grids.py OUT.npz [NAME ...]`.

A grid [n, p] minimises E min_j |y - g_j|^2 / p for y ~ N(0, I_p). In one dimension Lloyd and Max's
alternation is exact; in more dimensions competitive learning vector quantisation (CLVQ): each step
draws fresh samples, finds every cell's mean and moves the points towards it, with steps of 1 at
first and shrinking later, which averages the sampling noise.
"""

import functools
import math
import time
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer

from kvqjax.codecs.higgs_grid import nearest

# (p, n): (steps, random starts); small grids have poor local optima, so the best of several starts
# is kept.
GRIDS = {
    (1, 4): (0, 0),
    (1, 8): (0, 0),
    (1, 16): (0, 0),
    (2, 16): (400, 4),
    (2, 64): (400, 4),
    (2, 256): (500, 1),
    (4, 256): (250, 1),
    (6, 4096): (100, 1),
    (4, 4096): (100, 1),
}
CHUNK = 1 << 12


def lloyd_max(count: int, sweeps: int = 5000) -> np.ndarray:
    """The optimal scalar quantiser of N(0, 1): thresholds halfway, points at the cells' means."""
    erf = np.vectorize(math.erf)
    points = np.linspace(-2, 2, count)
    for _ in range(sweeps):
        edges = np.concatenate([[-40.0], (points[1:] + points[:-1]) / 2, [40.0]])
        density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
        mass = erf(edges / math.sqrt(2)) / 2
        points = (density[:-1] - density[1:]) / (mass[1:] - mass[:-1])
    return points[:, None].astype(np.float32)


@functools.partial(jax.jit, static_argnames="chunks")
def cell_sums(points, key, chunks: int):
    """Sum and number of fresh samples per cell, and their mean squared error per dimension."""
    count, dim = points.shape

    def add(total, key):
        samples = jax.random.normal(key, (CHUNK, dim))
        index = nearest(points, samples)
        error = ((samples - points[index]) ** 2).sum(1)
        sums = jnp.zeros((count, dim)).at[index].add(samples)
        return (
            total[0] + sums,
            total[1] + jnp.bincount(index, length=count),
            total[2] + error.mean() / dim,
        ), None

    zero = (jnp.zeros((count, dim)), jnp.zeros(count, jnp.int32), jnp.zeros(()))
    (sums, counts, error), _ = jax.lax.scan(add, zero, jax.random.split(key, chunks))
    return sums, counts, error / chunks


def clvq(dim: int, count: int, steps: int, seed: int = 0) -> np.ndarray:
    key = jax.random.key(seed)
    # The optimal points of a Gaussian are themselves nearly Gaussian, with variance (p + 2)/p
    # (Zador).
    points = jax.random.normal(key, (count, dim)) * math.sqrt((dim + 2) / dim)
    chunks = max(16, 64 * count // CHUNK)
    for step in range(steps):
        sums, counts, error = cell_sums(points, jax.random.fold_in(key, step), chunks)
        means = jnp.where(counts[:, None] > 0, sums / jnp.maximum(counts, 1)[:, None], points)
        points += (means - points) / (1 + max(0, step - steps // 2) / 3)
        if step % 20 == 0:
            print(f"p={dim} n={count} step {step}: {error:.5f}", flush=True)
    return np.asarray(points)


def error_of(grid: np.ndarray) -> float:
    """MSE per dimension on 2^20 samples no start was fitted to."""
    return float(cell_sums(jnp.asarray(grid, jnp.float32), jax.random.key(10**6), 256)[2])


def main(
    path: Annotated[Path, typer.Argument(help="the .npz to write")],
    names: Annotated[
        list[str], typer.Argument(help="p2_n16 ...: only these; the file's others are kept")
    ] = [],  # noqa: B006
) -> None:
    """Write float16 points: their rounding costs 1e-7 of MSE and halves the file."""
    grid_names = [f"p{dim}_n{count}" for dim, count in GRIDS]
    if unknown := sorted(set(names) - set(grid_names)):
        raise typer.BadParameter(f"{', '.join(unknown)}; known: {', '.join(grid_names)}")
    grids = dict(np.load(path)) if names else {}
    for (dim, count), (steps, starts) in GRIDS.items():
        if names and f"p{dim}_n{count}" not in names:
            continue
        start = time.time()
        fits = (
            [clvq(dim, count, steps, seed) for seed in range(starts)]
            if dim > 1
            else [lloyd_max(count)]
        )
        grid = min(fits, key=error_of)
        grid = grid[np.lexsort(grid.T[::-1])].astype(np.float16)
        grids[f"p{dim}_n{count}"] = grid
        error = error_of(grid)
        print(
            f"p={dim} n={count}: MSE {error:.5f} on fresh samples, {time.time() - start:.0f} s",
            flush=True,
        )
        np.savez_compressed(path, **grids)


if __name__ == "__main__":
    typer.run(main)
