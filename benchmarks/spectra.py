"""Spectra that transform coding gives bits by: `python -m benchmarks.spectra --learn TEXT.txt`.

Of keys and values of the real model: log2 of the coefficients' deviations at some ranks, mean over layers, less that
of the first rank; and by layer the kurtosis of the first coefficient (3 for a normal distribution).
"""

import argparse

import jax.numpy as jnp
import numpy as np

import kvqjax
from benchmarks.tables import table
from kvqjax.calibrate import klt, sequences
from kvqjax.calibrate.layerwise import of_model
from kvqjax.data.corpora import read
from kvqjax.model.weight_trees import stacked

RANKS = (0, 2, 4, 8, 16, 32, 64, 96, 128, 160, 191)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--learn", required=True, help="a text")
    options = parser.parse_args()
    model = kvqjax.load(options.model)
    model, shape = model.replace(params=stacked(model.params)), model.config.kv_shape
    layers = of_model(model, kvqjax.parse("klt"), sequences(model, read(options.learn, tokens=1 << 14), 8, 1024))
    h, spectra, tails = layers.h, {"k": [], "v": []}, {"k": [], "v": []}
    for number in range(shape.num_layers):
        keys, seen, h = layers.read(number, h)
        for source, x in (("k", keys), ("v", seen.v)):
            x = jnp.asarray(x)[:, 4:].reshape(x.shape[0], -1, shape.kv_width)
            mean, covariance = klt.covariance_of(x)
            costs = klt.costs_of(source, seen, shape)
            into, back = klt.transform_of(covariance, costs, shape.kv_width)
            spectra[source].append(np.log2(np.einsum("ri,ij,rj->r", back, costs, back)) / 2)
            first = (np.asarray(x, np.float64).reshape(-1, shape.kv_width) - mean) @ into[:, 0]
            tails[source].append((first**4).mean() / (first**2).mean() ** 2)
    ranks = [rank for rank in RANKS if rank < shape.kv_width]
    means = {source: np.mean([s - s[0] for s in rows], 0) for source, rows in spectra.items()}
    lines = [[source, *(f"{means[source][rank]:.2f}" for rank in ranks)] for source in means]
    print(table(["log2 deviation at rank", *map(str, ranks)], lines))
    print(
        table(["kurtosis", *map(str, range(shape.num_layers))], [[s, *(f"{x:.1f}" for x in tails[s])] for s in tails])
    )


if __name__ == "__main__":
    main()
