"""The two streamed passes of KVQuant's calibration, one sequence at a time, every layer of a run at once.

Pass 1 keeps the r largest and smallest entries of each key channel: enough to interpolate its percentiles exactly.
Pass 2 adds each layer's normalised keys and values to weighted histograms.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvqjax.calibrate import kmeans
from kvqjax.codecs.nuq_range import channel_range, excess, normalise_keys, stored_range, token_range

__all__ = ["Extremes", "Tally", "empty_extremes", "observe", "rank", "tally", "thresholds"]


class Extremes(NamedTuple):
    """The r largest and the r smallest entries of each of W channels in L layers, outermost first."""

    top: Float[Array, "L W r"]
    bottom: Float[Array, "L W r"]


class Tally(NamedTuple):
    """Pass 2's sums over the layers of one run; `outliers` and `clipped` count key entries beyond the thresholds and
    those of them for which no slot is left."""

    k: kmeans.Histogram
    v: kmeans.Histogram
    outliers: Float[Array, " L"]
    clipped: Float[Array, " L"]


def _position(count: int, fraction: float) -> float:
    """Where the upper threshold lies among `count` sorted entries (linear interpolation, as numpy.percentile)."""
    return (1 - fraction / 2) * (count - 1)


def rank(count: int, fraction: float) -> int:
    """How many extreme entries the percentiles of `count` need, `fraction` of them being outliers, half at each
    end."""
    return count - math.floor(_position(count, fraction))


def empty_extremes(layers: int, width: int, r: int) -> Extremes:
    return Extremes(jnp.full((layers, width, r), -jnp.inf), jnp.full((layers, width, r), jnp.inf))


@jax.jit
def observe(extremes: Extremes, x: Float[Array, "L T W"]) -> Extremes:
    """Extremes with T more tokens seen."""
    channels = jnp.swapaxes(x, 1, 2)

    def largest(old, new):
        rows = jnp.concatenate([old, new], -1).reshape(-1, old.shape[-1] + new.shape[-1])
        return jax.lax.top_k(rows, old.shape[-1])[0].reshape(old.shape)

    return Extremes(largest(extremes.top, channels), -largest(-extremes.bottom, -channels))


def thresholds(extremes: Extremes, count: int, fraction: float) -> tuple[Float[Array, "L W"], Float[Array, "L W"]]:
    """Upper and lower percentile of each channel, from the extremes of `count` entries."""
    position = _position(count, fraction)
    inner = count - 1 - math.floor(position)  # index, from the outside, of the entry below the percentile
    share = position - math.floor(position)

    def between(sorted_entries):
        below, above = sorted_entries[..., inner], sorted_entries[..., max(inner - 1, 0)]
        return below + share * (above - below)

    return between(extremes.top), between(extremes.bottom)


def _weigh(fisher: Float[Array, "T W"] | None, scale: Float[Array, "#T #W"], objective: str):
    """Weight of each normalised entry: F s^2, F or 1."""
    if fisher is None or objective == "none":
        return None
    return fisher * scale**2 if objective == "fisher_s2" else fisher


def _points(u, weight, keep: Bool[Array, "T W"]) -> kmeans.Histogram:
    weight = jnp.ones_like(u) if weight is None else jnp.broadcast_to(weight, u.shape)
    return kmeans.histogram(u.ravel(), weight.ravel(), keep.ravel())


def _keys(slots: int, objective: str, x: Float[Array, "T W"], fisher, bounds):
    """Histogram of one layer's keys inside their thresholds, and how many lie outside and find no slot."""
    u, outside = normalise_keys(bounds, x)
    scale = channel_range(bounds)[1][None]
    hist = _points(u, _weigh(fisher, scale, objective), ~outside & (scale > 0))
    return hist, outside.sum().astype(jnp.float32), excess(slots, bounds, x).sum().astype(jnp.float32)


def _values(slots: int, dtype: str, objective: str, x: Float[Array, "T W"], fisher) -> kmeans.Histogram:
    """Histogram of one layer's values inside their token's range, normalised as the codec will."""
    high, low, _ = token_range(x, slots // 2)
    centre, scale = (a.astype(jnp.float32) for a in stored_range(high, low, dtype))
    inside = (x <= high) & (x >= low) & (scale > 0)
    return _points((x - centre) / jnp.where(scale > 0, scale, 1.0), _weigh(fisher, scale, objective), inside)


@functools.partial(jax.jit, static_argnames=("key_slots", "value_slots", "dtype", "objective"))
def tally(
    x: tuple[Float[Array, "L T W"], ...],
    bounds: dict[str, Float[Array, "L W"]],
    *,
    key_slots: int,
    value_slots: int,
    dtype: str,
    objective: str,
) -> Tally:
    """The sums one sequence adds for a run of layers. `x` is (k, v) and, unless the objective is "none", their Fisher;
    `dtype` is that of the values' stored scales."""

    def layer(xs):
        (k, v, *fisher), bounds = xs
        k_fisher, v_fisher = fisher or (None, None)
        k_hist, outliers, clipped = _keys(key_slots, objective, k, k_fisher, bounds)
        return Tally(k_hist, _values(value_slots, dtype, objective, v, v_fisher), outliers, clipped)

    return jax.lax.map(layer, (x, bounds))
