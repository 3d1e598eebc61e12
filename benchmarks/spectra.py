"""Spectra that transform coding gives bits by: `python -m benchmarks.spectra --learn TEXT.txt`.

Of keys and values of the real model, one table: log2 of the coefficients' deviations at some ranks, mean over layers,
less that of the first rank. And by layer: the kurtosis of the first coefficient (3 for a normal distribution), its
furthest token in deviations, and the share of the error at 2 bits that a grid which ends at 4 deviations would make.
Last, the share of their energy that is left when the mean of each block of tokens is taken off, geometric mean over
layers (kvqjax/codecs/centring.py).
"""

import argparse

import jax.numpy as jnp
import numpy as np

import kvqjax
from benchmarks.tables import table
from kvqjax.calibrate import klt, sequences
from kvqjax.calibrate.layerwise import of_model
from kvqjax.codecs.klt import ERRORS, bits_of_ranks
from kvqjax.data.corpora import read
from kvqjax.model.weight_trees import stacked

CLIPPED = 4  # deviations: where the optimal grid of 64 points for a normal distribution ends
BLOCKS = (32, 128, 1020)  # tokens with one mean
RANKS = (0, 2, 4, 8, 16, 32, 64, 96, 128, 160, 191)


def tail(first: np.ndarray, grid_error: float) -> tuple[float, float, float]:
    """Kurtosis, furthest token and share of clipping, of the first coefficient (variance 1) of all tokens. `grid_error`
    is the squared error of all coefficients on their grids, over the first one's variance."""
    clipped = np.square(np.maximum(np.abs(first) - CLIPPED, 0)).mean()
    return (first**4).mean() / (first**2).mean() ** 2, np.abs(first).max(), clipped / (clipped + grid_error)


def energy_left(x: np.ndarray, block: int) -> float:
    """The share of the energy of sequences [N, T, W] that the mean of each block of tokens leaves."""
    x = x[:, : x.shape[1] // block * block].reshape(-1, block, x.shape[-1])
    return float(np.square(x - x.mean(1, keepdims=True)).sum() / np.square(x).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--learn", required=True, help="a text")
    options = parser.parse_args()
    model = kvqjax.load(options.model)
    model, shape = model.replace(params=stacked(model.params)), model.config.kv_shape
    width, method = shape.kv_width, kvqjax.parse("klt")
    layers = of_model(model, method, sequences(model, read(options.learn, tokens=1 << 14), 8, 1024))
    hidden, spectra, tails, energies = layers.h, {"k": [], "v": []}, [], {"k": [], "v": []}
    for number in range(shape.num_layers):
        keys, seen, hidden = layers.read(number, hidden)
        for source, x in (("k", keys), ("v", seen.v)):
            # The cache keeps sinks exact, and they are unlike all other tokens.
            x = jnp.asarray(x)[:, method.sinks :].reshape(x.shape[0], -1, width)
            energies[source].append([energy_left(np.asarray(x, np.float64), block) for block in BLOCKS])
            mean, covariance = klt.covariance_of(x)
            costs = klt.costs_of(source, klt.energy_of(seen.q), seen.o, shape)
            into, back = klt.transform_of(covariance, costs, width)
            # What an error of 1 in each coefficient costs: the coefficient's variance before it was scaled to 1.
            variance = np.einsum("ri,ij,rj->r", back, costs, back)
            spectra[source].append(np.log2(variance) / 2)
            if source == "k":
                # Errors of normally distributed coefficients on their grids, at 2 bits on average.
                errors = [ERRORS[bits] for bits in bits_of_ranks(width, 2.0, 1.0)]
                first = (np.asarray(x, np.float64).reshape(-1, width) - mean) @ into[:, 0]
                tails.append(tail(first, variance @ errors / variance[0]))
    ranks = [rank for rank in RANKS if rank < width]
    means = {source: np.mean([s - s[0] for s in rows], 0) for source, rows in spectra.items()}
    lines = [[source, *(f"{means[source][rank]:.2f}" for rank in ranks)] for source in means]
    print(table(["log2 deviation at rank", *map(str, ranks)], lines))
    head = ["layer", "kurtosis of keys", "furthest token", "share of clipping"]
    print(table(head, [[str(n), f"{a:.1f}", f"{b:.1f}", f"{c:.2f}"] for n, (a, b, c) in enumerate(tails)]))
    lines = [[source, *(f"{x:.3f}" for x in np.exp(np.log(rows).mean(0)))] for source, rows in energies.items()]
    print(table(["energy left by means of blocks of", *map(str, BLOCKS)], lines))


if __name__ == "__main__":
    main()
