"""The online softmax of TPU kernels that score all query rows of a tile before they sum its values. Scores are base-2
logarithms.

Shapes: M query rows, S tokens of the tile, W lanes of the output. `refs` holds

    out     [1, M, W]   the running sum of weighted values; all rows may stand there several times, set below set
    lse     [1, M, 1]
    scores  [M, S]
    peak    [M, 1]      the running maximum
    total   [M, 1]      the running sum of the weights
    top     [M, 1]      this tile's maximum"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvqjax.pallas_kernels.tpu.plan import LANES, LOG2E
from kvqjax.pallas_kernels.tpu.tile import NEVER

__all__ = ["empty", "normalise", "over_tiles", "to_weights"]


def over_tiles(refs, ends, work, begin=None, end=None) -> None:
    """Call `work(tile)` for every tile that a row sees, on a grid (row, tile). Call `begin()` before a row's first tile
    (by default `empty`) and `end()` after its last one (by default `normalise`). `ends` is from `rows.tile_ends`."""
    row, tile = pl.program_id(0), pl.program_id(1)
    pl.when(tile == 0)(begin or (lambda: empty(refs)))

    @pl.when((tile >= ends[row, 0]) & (tile < ends[row, 1]))
    def _():
        work(tile)

    pl.when(tile == pl.num_programs(1) - 1)(end or (lambda: normalise(refs)))


def empty(refs) -> None:
    """Empty the running sums."""
    refs.peak[...] = jnp.full(refs.peak.shape, NEVER)
    refs.total[...] = jnp.zeros(refs.total.shape)
    refs.out[...] = jnp.zeros(refs.out.shape)


def normalise(refs, rows=slice(None)) -> None:
    """Divide the running sums by their weights, and write the log-sum-exps, of all rows or, of a single set, some."""
    peak, total, sets = refs.peak[rows], refs.total[rows], refs.out.shape[1] // refs.total.shape[0]
    seen = peak > NEVER / 2
    every_seen, every_total = (jnp.concatenate([x] * sets) for x in (seen, total))
    refs.out[0, rows] = jnp.where(every_seen, refs.out[0, rows] / every_total, 0.0)
    refs.lse[0, rows] = jnp.where(seen, jnp.log(total) + peak / LOG2E, NEVER)


def to_weights(refs, rows=slice(None)) -> None:
    """Turn this tile's scores into softmax weights in place, of all rows or some. On entry `top` is the tile's row
    maximum; on exit it is the factor that rescales the running sums."""
    peak = jnp.maximum(refs.peak[rows], refs.top[rows])
    rescale = jnp.exp2(refs.peak[rows] - peak)
    total = jnp.zeros((peak.shape[0], LANES))
    for lane in range(0, refs.scores.shape[1], LANES):
        weights = jnp.exp2(refs.scores[rows, lane : lane + LANES] - peak)
        refs.scores[rows, lane : lane + LANES] = weights
        total = total + weights
    refs.peak[rows] = peak
    refs.top[rows] = rescale
    refs.total[rows] = refs.total[rows] * rescale + total.sum(-1, keepdims=True)
