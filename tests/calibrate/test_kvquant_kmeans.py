"""Weighted k-means against the optimum and the authors' released calibration (golden vectors)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvqjax.calibrate import kmeans

DATA = Path(__file__).parents[1] / "data" / "golden_kvquant_calibration.npz"
WEIGHTS = ("unw", "fisher", "paperFs2")


@pytest.fixture(scope="module")
def golden():
    with np.load(DATA) as data:
        return dict(data)


def points(data, source, mode):
    """Normalised calibration points that are no outliers, and their three weights, as the released
    code makes them."""
    x = data[f"{source}_x"]
    if source == "k":
        upper, lower = (data[f"k_{mode}_{name}"] for name in ("upper", "lower"))
    else:
        tail = 0.005 if mode == "sparse" else 0.0
        upper, lower = (
            np.percentile(x, 100 * q, axis=1, keepdims=True).astype(np.float32)
            for q in (1 - tail, tail)
        )
    scale = (upper - lower) / 2
    u = (x - (upper + lower) / 2) / scale
    keep = np.abs(u) <= 1
    fisher = data[f"{source}_fisher"]
    weights = (np.ones_like(fisher), fisher, fisher * scale**2)
    return u[keep], [w[keep] for w in weights]


def cost(u, weight, signposts):
    """The objective on the points themselves, in float64."""
    u, weight, signposts = (np.asarray(a, np.float64) for a in (u, weight, signposts))
    return (weight * ((u[:, None] - signposts[None]) ** 2).min(1)).sum()


def stacked(histograms):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *histograms)


@pytest.mark.parametrize("source", [pytest.param("k", marks=pytest.mark.nightly), "v"])
@pytest.mark.parametrize("mode", [pytest.param("sparse", marks=pytest.mark.nightly), "dense"])
def test_reaches_the_optimum_of_every_golden_case(golden, source, mode):
    u, weights = points(golden, source, mode)
    make = jax.jit(kmeans.histogram)
    hist = stacked([make(jnp.asarray(u), jnp.asarray(w), jnp.ones(u.shape, bool)) for w in weights])
    for row, bits in enumerate((2, 3, 4)):
        found = np.asarray(kmeans.weighted_kmeans(hist, 2**bits))
        reported = np.asarray(kmeans.objective(hist, jnp.asarray(found)))
        for column, name in enumerate(WEIGHTS):
            optimum = golden[f"{source}_{mode}_objective_optimum"][row, column]
            ours = cost(u, weights[column], found[column])
            assert (np.diff(found[column]) > 0).all()
            assert optimum * (1 - 1e-6) <= ours <= optimum * (1 + 1e-4), (
                bits,
                name,
                ours / optimum - 1,
            )
            assert ours <= 1.02 * golden[f"{source}_{mode}_objective"][row, column, column]
            assert reported[column] == pytest.approx(ours, rel=1e-4)
