"""Weighted one-dimensional k-means on histograms: KVQuant's signposts (arXiv 2401.18079, section
3.2, equation 3).

    minimise over v_1 < ... < v_m:   sum_i w_i min_j (u_i - v_j)^2,   u_i in [-1, 1]

Points arrive in a stream and only their histogram is kept. A bin has the points' weight and
weighted sum, so that means are exact; only borders of clusters are rounded, to a bin of 2.4e-4. In
an optimum all clusters are intervals, so dynamic programming finds the globally best partition of
1024 merged bins. Lloyd's iterations on the full histogram then refine the borders. The error of a
single k-means++ start, as the released code has it, may be 10 % larger and more.

    points u, weights w -> `histogram` (8192 bins, summed over sequences) -> 1024 bins ->
    `_best_borders` -> means of the clusters -> 100 Lloyd's iterations on 8192 bins -> sorted
    signposts (`weighted_kmeans`)

A point is one number of a key or value, normalised to [-1, 1]. A signpost is the number that a code
stands for. N bins have N + 1 borders, numbered from 0: border i lies before bin i. M is the number
of signposts, and L that of layers.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BINS = 8192  # of a histogram; a multiple of COARSE
# Bins of the dynamic programme: COARSE^2 interval costs are evaluated for each signpost.
COARSE = 1024
LLOYD_STEPS = 100


class Histogram(NamedTuple):
    """Sums over points in each of BINS equal bins of [-1, 1]; any leading axes, layers for
    instance. Histograms add."""

    weight: Float[Array, "*L N"]  # w
    moment: Float[Array, "*L N"]  # w u
    energy: Float[Array, "*L"]  # w u^2 over all bins
    count: Float[Array, "*L N"]  # points
    total: Float[Array, "*L N"]  # u


def histogram(
    u: Float[Array, " P"], weight: Float[Array, " P"], keep: Bool[Array, " P"]
) -> Histogram:
    """Make the histogram of P points.

    Args:
        u: the points; those beyond [-1, 1] count at its ends.
        weight: of each point, not negative.
        keep: the points that count. Outliers do not.

    Returns:
        The sums over the points that count. `weight`, `moment` and `energy` are weighted, `count`
        and `total` are not.
    """
    keep = keep.astype(jnp.float32)
    # A point that is not kept may be anything, and 0 x inf is NaN: it becomes 0.
    u = jnp.clip(jnp.where(keep > 0, u, 0.0), -1.0, 1.0)
    weight = jnp.where(keep > 0, weight, 0.0)
    # u = 1 lies on the upper border of the last bin, and belongs to it.
    bins = jnp.clip(((u + 1) * (BINS / 2)).astype(jnp.int32), 0, BINS - 1)
    columns = jnp.stack([weight, weight * u, keep, keep * u], axis=-1)
    sums = jnp.zeros((BINS, 4), jnp.float32).at[bins].add(columns)
    return Histogram(sums[:, 0], sums[:, 1], (weight * u * u).sum(), sums[:, 2], sums[:, 3])


def _interval_gains(
    weight: Float[Array, " N"], moment: Float[Array, " N"]
) -> Float[Array, "N1 N1"]:
    """Compute by how much one signpost lowers sum w u^2, for every interval of bins.

    Args:
        weight: the sum of w of each bin.
        moment: the sum of w u of each bin.

    Returns:
        gain[i, j] = (sum w u)^2 / sum w over bins i to j - 1, of a signpost at their mean; 0 for
        bins without weight, -inf for i > j.
    """
    # Differences of running sums are the sums over every interval.
    weight, moment = (jnp.concatenate([jnp.zeros(1), jnp.cumsum(a)]) for a in (weight, moment))
    mass = weight[None, :] - weight[:, None]
    gain = (moment[None, :] - moment[:, None]) ** 2 / jnp.where(mass > 0, mass, 1.0)
    order = jnp.arange(weight.size)
    return jnp.where(order[:, None] <= order[None, :], jnp.where(mass > 0, gain, 0.0), -jnp.inf)


def _best_borders(
    weight: Float[Array, " N"], moment: Float[Array, " N"], count: int
) -> Int[Array, " M1"]:
    """Find the partition of the bins into intervals with the least cost, by dynamic programming.

    Args:
        weight: the sum of w of each bin.
        moment: the sum of w u of each bin.
        count: M, how many intervals are wanted.

    Returns:
        Borders b_0 = 0 <= ... <= b_M = N. An interval may be empty.
    """
    # sum w u^2 is the same for all partitions, so that the least cost is the largest sum of gains.
    gains = _interval_gains(weight, moment)

    def extend(best, _):
        """Add one interval. `best` [N+1] is the largest gain of the intervals so far, by the border
        where they end."""
        # [border where the new interval begins, border where it ends]
        totals = best[:, None] + gains
        return totals.max(0), totals.argmax(0)

    _, came_from = jax.lax.scan(extend, gains[0], length=count - 1)  # [count-1, N+1]

    def back(border, choices):
        """Go from the border where an interval ends to the border where it begins."""
        return choices[border], border

    first, borders = jax.lax.scan(
        back, jnp.int32(weight.size), came_from.astype(jnp.int32), reverse=True
    )
    return jnp.concatenate([jnp.zeros(1, jnp.int32), first[None], borders])


def _means(
    cluster: Int[Array, " N"], weight, moment, previous: Float[Array, " M"]
) -> Float[Array, " M"]:
    """Compute the weighted mean of each cluster.

    Args:
        cluster: the number of each bin's cluster.
        weight: the sum of w of each bin, [N].
        moment: the sum of w u of each bin, [N].
        previous: the signposts before; a cluster without weight keeps its own.

    Returns:
        The new signposts, in the order of the clusters.
    """
    member = (cluster[None, :] == jnp.arange(previous.size)[:, None]).astype(jnp.float32)
    mass, cluster_moment = (jnp.where(member > 0, a[None], 0.0).sum(1) for a in (weight, moment))
    return jnp.where(mass > 0, cluster_moment / jnp.where(mass > 0, mass, 1.0), previous)


def _centres(hist: Histogram) -> Float[Array, " N"]:
    """Give one place for all points of a bin: their weighted mean. An empty bin has its middle."""
    middle = (jnp.arange(BINS, dtype=jnp.float32) + 0.5) * (2 / BINS) - 1
    return jnp.where(
        hist.weight > 0, hist.moment / jnp.where(hist.weight > 0, hist.weight, 1.0), middle
    )


def _nearest(centres, signposts):
    """Find the nearest of sorted signposts, by the middles between neighbours."""
    return jnp.searchsorted((signposts[1:] + signposts[:-1]) / 2, centres)


def _signposts_of(hist: Histogram, count: int) -> Float[Array, " M"]:
    """Find the `count` signposts of one histogram."""
    coarse = [a.reshape(COARSE, -1).sum(1) for a in (hist.weight, hist.moment)]
    # Gains hold squares of moments, so the largest weight is brought to 1: squares of numbers of
    # any size would leave the range of float32. A histogram without weight is not divided by 0.
    peak = jnp.maximum(coarse[0].max(), jnp.finfo(jnp.float32).tiny)
    borders = _best_borders(coarse[0] / peak, coarse[1] / peak, count)
    # Each bin of the full histogram begins in the cluster of its merged bin.
    cluster = jnp.searchsorted(borders[1:-1], jnp.arange(BINS) * COARSE // BINS, side="right")
    edges = borders.astype(jnp.float32) * (2 / COARSE) - 1
    weight, moment = hist.weight / peak, hist.moment / peak
    start = _means(cluster, weight, moment, (edges[1:] + edges[:-1]) / 2)
    centres = _centres(hist)

    def step(_, signposts):
        # `_nearest` wants sorted signposts.
        return jnp.sort(_means(_nearest(centres, signposts), weight, moment, signposts))

    return jax.lax.fori_loop(0, LLOYD_STEPS, step, jnp.sort(start))


@functools.partial(jax.jit, static_argnames="count")
def weighted_kmeans(hist: Histogram, count: int) -> Float[Array, "L M"]:
    """Find the signposts that minimise the weighted squared error.

    Args:
        hist: L histograms, with the layers in front.
        count: M, how many signposts are wanted.

    Returns:
        Sorted signposts of each histogram.
    """
    return jax.lax.map(lambda h: _signposts_of(h, count), hist)


@jax.jit
def objective(hist: Histogram, signposts: Float[Array, "L M"]) -> Float[Array, " L"]:
    """Compute the weighted squared error that the signposts leave.

    Args:
        hist: L histograms.
        signposts: sorted, of each histogram.

    Returns:
        sum w (u - v)^2 of each histogram, where v is the signpost nearest to the point's bin.
    """

    def of_layer(h, points):
        value = points[_nearest(_centres(h), points)]
        # sum w (u - v)^2 = sum w u^2 + sum w v^2 - 2 sum w u v, and v is the same for all points of
        # a bin.
        return h.energy + (h.weight * value * value - 2 * h.moment * value).sum()

    return jax.vmap(of_layer)(hist, signposts)


@jax.jit
def q_norm(hist: Histogram, signposts: Float[Array, "L M"]) -> Float[Array, "L 2"]:
    """Find the scale and offset that give quantised points the mean and standard deviation of the
    points (Q-Norm).

    As in the released code, all points that are no outliers count alike.

    Args:
        hist: L histograms.
        signposts: sorted, of each histogram.

    Returns:
        Scale and offset of each histogram: a signpost v becomes v * scale + offset.
    """

    def of_layer(h, points):
        """Give the scale and offset of one histogram; `points` are its signposts."""
        # A bin's points count as if all were at their plain mean. An empty bin counts nothing.
        middle = jnp.where(h.count > 0, h.total / jnp.maximum(h.count, 1.0), 0.0)
        value = points[_nearest(middle, points)]
        number = jnp.maximum(h.count.sum(), 1.0)

        def mean_and_deviation(x: Float[Array, " N"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
            mean = (h.count * x).sum() / number
            return mean, jnp.sqrt((h.count * (x - mean) ** 2).sum() / number)

        mean, deviation = mean_and_deviation(middle)
        quantised_mean, quantised_deviation = mean_and_deviation(value)
        scale = deviation / jnp.where(quantised_deviation > 0, quantised_deviation, 1.0)
        return jnp.stack([scale, mean - quantised_mean * scale])

    return jax.vmap(of_layer)(hist, signposts)
