"""The online softmax of TPU kernels that score all query rows of a tile before they sum its values. Scores are base-2
logarithms.

Shapes: M query rows, S tokens of the tile, W lanes of the output. `refs` holds out [1, M, W] (the running sum of
weighted values; it may have all rows several times, one set below the other), lse [1, M, 1], scores [M, S], and per row
[M, 1]: peak (running maximum), total (running sum of the weights) and top (this tile's maximum)."""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvqjax.pallas_kernels.tpu.plan import LANES, LOG2E
from kvqjax.pallas_kernels.tpu.tile import NEVER

__all__ = ["over_tiles", "to_weights"]


def over_tiles(refs, ends, work) -> None:
    """Call `work(tile)` for every tile that a row sees, on a grid (row, tile). The running sums are emptied before the
    first tile and normalised after the last. `ends` is from `rows.tile_ends`."""
    row, tile = pl.program_id(0), pl.program_id(1)

    @pl.when(tile == 0)
    def _():
        refs.peak[...] = jnp.full(refs.peak.shape, NEVER)
        refs.total[...] = jnp.zeros(refs.total.shape)
        refs.out[...] = jnp.zeros(refs.out.shape)

    @pl.when((tile >= ends[0, row]) & (tile < ends[1, row]))
    def _():
        work(tile)

    @pl.when(tile == pl.num_programs(1) - 1)
    def _():
        seen, sets = refs.peak[...] > NEVER / 2, refs.out.shape[1] // refs.total.shape[0]
        every_seen, every_total = (jnp.concatenate([x] * sets) for x in (seen, refs.total[...]))
        refs.out[0] = jnp.where(every_seen, refs.out[0] / every_total, 0.0)
        refs.lse[0] = jnp.where(seen, jnp.log(refs.total[...]) + refs.peak[...] / LOG2E, NEVER)


def to_weights(refs) -> None:
    """Turn this tile's scores into softmax weights in place. On entry `top` is the tile's row maximum; on exit it is
    the factor that rescales the running sums."""
    rows, tokens = refs.scores.shape
    peak = jnp.maximum(refs.peak[...], refs.top[...])
    rescale = jnp.exp2(refs.peak[...] - peak)
    total = jnp.zeros((rows, LANES))
    for lane in range(0, tokens, LANES):
        weights = jnp.exp2(refs.scores[:, lane : lane + LANES] - peak)
        refs.scores[:, lane : lane + LANES] = weights
        total = total + weights
    refs.peak[...] = peak
    refs.top[...] = rescale
    refs.total[...] = refs.total[...] * rescale + total.sum(-1, keepdims=True)
