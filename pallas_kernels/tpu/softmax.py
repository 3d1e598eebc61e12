"""The online softmax of TPU kernels that score all query rows of a tile before they sum its values.
Scores are base-2 logarithms.

Shapes: M query rows, S tokens of the tile, W lanes of the output. `refs` holds

    out     [1, n*M, W] the running sums of weighted values: n of them for every row, set below set (HIGGS has n = 2,
                        other kernels n = 1)
    lse     [1, M, 1]   the log-sum-exp, a natural logarithm
    scores  [M, S]
    peak    [M, 1]      the running maximum
    total   [M, 1]      the running sum of the weights
    top     [M, 1]      this tile's maximum, then the rescale factor"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvqjax.pallas_kernels.tpu.plan import LANES, LOG2E
from kvqjax.pallas_kernels.tpu.tile import NEVER


def over_tiles(refs, ends, work, begin=None, end=None) -> None:
    """Work off the tiles that a row sees, on a grid (row, tile).

    Args:
        ends: Which tiles the rows see, from `rows.tile_ends`.
        work: `work(tile)` is called for every tile that the row sees.
        begin: `begin()` is called before a row's first tile; None: `empty`.
        end: `end()` is called after a row's last tile; None: `normalise`."""
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
    """Divide the running sums by the sums of their weights, and write the log-sum-exps. `rows` are
    all rows, or some where each has one running sum."""
    peak, total = refs.peak[rows], refs.total[rows]
    sets = refs.out.shape[1] // refs.total.shape[0]
    seen = peak > NEVER / 2
    every_seen, every_total = (jnp.concatenate([x] * sets) for x in (seen, total))
    refs.out[0, rows] = jnp.where(every_seen, refs.out[0, rows] / every_total, 0.0)
    refs.lse[0, rows] = jnp.where(seen, jnp.log(total) + peak / LOG2E, NEVER)


def to_weights(refs, rows=slice(None)) -> None:
    """Turn this tile's scores into softmax weights in place, of all rows or some.

    On entry `top` is the maximum of the tile's scores. On exit it is the factor that rescales the
    running sums."""
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
