"""The running softmax of TPU kernels that score all query rows of a tile before they sum its values. Scores are base-2
logarithms.

Shapes: M query rows, S tokens of the tile, W lanes of the output. `refs` holds out [1, M, W] (the accumulator as well;
it may have all rows several times, one set below the other), lse [1, M, 1], peak, total and top [M, 1], and scores
[M, S].
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvqjax.pallas_kernels.tpu.plan import LANES, LOG2E
from kvqjax.pallas_kernels.tpu.tile import NEVER

__all__ = ["over_tiles", "soften"]


def over_tiles(refs, ends, work) -> None:
    """On a grid (row, tile): `work(tile)` for every tile that a row sees, `ends` holding the first of them and the one
    after the last; before it what is summed up is empty, after it normalised."""
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


def soften(refs) -> None:
    """Scores to weights under the raised maxima, `top` being this tile's; it becomes what was summed up before must be
    multiplied by."""
    rows, tokens = refs.scores.shape
    peak = jnp.maximum(refs.peak[...], refs.top[...])
    decay = jnp.exp2(refs.peak[...] - peak)
    total = jnp.zeros((rows, LANES))
    for lane in range(0, tokens, LANES):
        weights = jnp.exp2(refs.scores[:, lane : lane + LANES] - peak)
        refs.scores[:, lane : lane + LANES] = weights
        total = total + weights
    refs.peak[...] = peak
    refs.top[...] = decay
    refs.total[...] = refs.total[...] * decay + total.sum(-1, keepdims=True)
