"""The constants of transform coding (kvqjax.codecs.klt), in closed form from second moments of keys
and values.

An error e of a vector costs e^T M e:

    keys     (q . e)^2, summed over the queries of a KV head. M is diagonal, because RoPE rotates q against e by every
             angle. Both channels of a rotary pair cost the same: the mean of the squares of q in
             the two channels.
    values   |W_o^T e|^2, summed over the query heads that read them. M = sum_h W_o,h W_o,h^T has a block per KV head.

The text is read once, all sequences of a layer at a time. Sums and eigenvectors are float64 on the
host. Attention sinks are left out, because the cache keeps them exact.
"""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvqjax._errors import UserError
from kvqjax.cache.artifacts import Artifact
from kvqjax.cache.layout import RunLayout
from kvqjax.cache.runs import runs_for
from kvqjax.calibrate.activations import Captured
from kvqjax.calibrate.layerwise import Layers, of_captured, of_model
from kvqjax.calibrate.resume import identity, stepped
from kvqjax.hardware.prompts import prompt_operations
from kvqjax.methods import Method
from kvqjax.model.config import KVShape
from kvqjax.model.loading import Model

# 16384 tokens: the covariance of 1024 channels has a million entries
DEFAULT_SEQUENCES, DEFAULT_LENGTH = (
    16,
    1024,
)
# The share of the largest eigenvalue below which an eigenvalue is only a rounding error.
FLOOR = 1e-6


def work(model: Model, method: Method, count: int, length: int) -> float:
    """Count the floating point operations of `calibrate` on `count` sequences of `length` tokens,
    covariances included."""
    covariances = 4 * model.config.kv_width**2 * model.config.num_layers
    return count * prompt_operations(model.config, 0, length) + float(count * length * covariances)


def calibrate(model: Model, method: Method, tokens: Int[np.ndarray, "N T"], **options) -> Artifact:
    """Find the transforms of `method` for `model` from N sequences of T tokens; `options` as in
    `fit`."""
    return fit(of_model(model, method, np.asarray(tokens)), method, **options)


def fit_captured(data: Captured, method: Method, recipe=None, **options) -> Artifact:
    """Find the transforms of `method` from tensors of any model; `options` as in `fit`. There is no
    recipe. Without queries and outputs all errors cost the same."""
    return fit(of_captured(data, method), method, **options)


@jax.jit
def _moments(x: Float[Array, "n W"]) -> tuple[Float[Array, " W"], Float[Array, "W W"]]:
    """Compute the sum and the second moments of one sequence, float32."""
    x = x.astype(jnp.float32)
    return x.sum(0), jnp.einsum("ni,nj->ij", x, x, precision="highest")


def covariance_of(
    x: Float[Array | np.ndarray, "N T W"],
) -> tuple[Float[np.ndarray, " W"], Float[np.ndarray, "W W"]]:
    """Compute mean and covariance over all tokens, float64."""
    sums, squares = zip(*(_moments(row) for row in x), strict=True)
    count = x.shape[0] * x.shape[1]
    mean = np.sum([np.asarray(a, np.float64) for a in sums], 0) / count
    square = np.sum([np.asarray(a, np.float64) for a in squares], 0) / count
    return mean, square - np.outer(mean, mean)


def key_costs(energy: Float[np.ndarray, "H D"], shape: KVShape) -> Float[np.ndarray, " W"]:
    """Compute the diagonal of the keys' M from the mean square of every query channel. Channels i
    and i + D/2 of a head are a rotary pair."""
    # [K, D], summed over query heads
    costs = energy.reshape(shape.num_kv_heads, -1, shape.head_dim).sum(1)
    pairs = costs.reshape(shape.num_kv_heads, 2, -1).mean(1)  # [K, D/2]
    return np.concatenate([pairs, pairs], 1).reshape(-1)


def value_costs(outputs: Float[np.ndarray, "HD E"], shape: KVShape) -> Float[np.ndarray, "W W"]:
    """Compute the values' M from the output projection."""
    width, dim = shape.kv_width, shape.head_dim
    heads = outputs.astype(np.float64).reshape(shape.num_kv_heads, -1, dim, outputs.shape[-1])
    costs = np.zeros((width, width))
    for number, group in enumerate(heads):
        channels = slice(number * dim, (number + 1) * dim)
        costs[channels, channels] = np.einsum("gde,gfe->df", group, group)
    return costs


def transform_of(
    covariance: Float[np.ndarray, "W W"], costs: Float[np.ndarray, "W W"], kept: int
) -> tuple[np.ndarray, np.ndarray]:
    """Find the transform of one layer's keys or values and its inverse (A and B of
    kvqjax.codecs.klt).

    Args:
        covariance: of the vectors.
        costs: M.
        kept: R, the number of coefficients that have bits.

    Returns:
        `into` [W, R] and `back` [R, W] of the R largest coefficients, float64.
    """
    # M^1/2 x is the vector whose plain squared error is the cost.
    eigenvalues, basis = np.linalg.eigh(costs)
    root = np.sqrt(np.maximum(eigenvalues, FLOOR * eigenvalues[-1]))
    half, inverse = (basis * root) @ basis.T, (basis / root) @ basis.T  # M^1/2 and M^-1/2
    # Its principal components are the coefficients, each divided by its standard deviation.
    variance, vectors = np.linalg.eigh(half @ covariance @ half)
    largest = np.argsort(-variance, kind="stable")[:kept]
    # Channels that are always 0 make coefficients without variance, which must not be divided by 0.
    deviation = np.sqrt(np.maximum(variance[largest], FLOOR * variance[-1]))
    into = half @ vectors[:, largest] / deviation
    back = (inverse @ vectors[:, largest] * deviation).T
    return into, back


def constants_of(
    x: Float[Array | np.ndarray, "N T W"], costs: Float[np.ndarray, "W W"], kept: int
) -> dict[str, np.ndarray]:
    """Find the constants of transform coding.

    Args:
        x: vectors to code.
        costs: M, the cost of their errors.
        kept: R, the number of coefficients that have bits.

    Returns:
        `mean` [W], `into` [W, R] and `back` [R, W], float32.
    """
    mean, covariance = covariance_of(x)
    into, back = transform_of(covariance, costs, kept)
    return {
        "mean": mean.astype(np.float32),
        "into": into.astype(np.float32),
        "back": back.astype(np.float32),
    }


def fit(
    data: Layers,
    method: Method,
    *,
    state: Path | None = None,
    advance: Callable[[int, int], None] = lambda steps, total: None,
) -> Artifact:
    """Find the transforms of `method` from sequences of any model.

    Args:
        data: the activations of the layers.
        method: says which layers' keys and values are transformed, and by how many coefficients.
        state: a file that keeps the progress after every layer. A run that was killed continues
            from it.
        advance: advance(steps, total) is called after every layer.

    Returns:
        The method with `mean`, `into` and `back` of every layer and source, float32.

    Raises:
        UserError: sequences that are no longer than the sinks.
    """
    shape, sinks = data.shape, method.sinks
    if data.h.shape[1] <= sinks:
        raise UserError(
            f"calibration tokens are {data.h.shape[:2]}; wanted [sequences, more than {sinks} tokens]"
        )
    runs = runs_for(method, shape)
    run_of = {number: run for run in runs for number in range(run.first, run.first + run.count)}
    owner = identity(data.fingerprint, repr(method), *data.parts)
    # The state between two layers: "h", the input of the next layer, and "LAYER.SOURCE.NAME", the
    # constants.
    start = {"done": np.int64(0), "h": data.h}
    for number, run in run_of.items():
        for source, needs in run.wiring.wanted().items():
            start |= {
                f"{number}.{source}.{name}": np.zeros(size, np.float32)
                for name, size in needs.items()
            }

    def step(progress):
        number = int(progress["done"])
        keys, seen, above = data.read(number, progress["h"])
        new = {"h": np.asarray(above, np.float32)}
        for source in run_of[number].wiring.wanted():
            x = keys if source == "k" else seen.v
            body = jnp.asarray(x)[:, sinks:].reshape(x.shape[0], -1, shape.kv_width)
            kept = progress[f"{number}.{source}.into"].shape[1]
            costs = costs_of(source, energy_of(seen.q), seen.o, shape)
            arrays = constants_of(body, costs, kept)
            new |= {f"{number}.{source}.{name}": array for name, array in arrays.items()}
        return progress | new

    progress = stepped(start, shape.num_layers, step, state, owner, advance)
    constants = tuple(_stacked(run, progress) for run in runs)
    about = {"sequences": data.h.shape[0], "tokens": data.h.shape[1]}
    return Artifact(method, constants, data.fingerprint, about)


def _stacked(run: RunLayout, progress: dict) -> dict:
    """Stack the constants of the layers of a run."""
    layers = range(run.first, run.first + run.count)

    def stacked(source: str, name: str) -> Array:
        return jnp.asarray(np.stack([progress[f"{number}.{source}.{name}"] for number in layers]))

    wanted = run.wiring.wanted()
    return {
        source: {name: stacked(source, name) for name in needs} for source, needs in wanted.items()
    }


def energy_of(queries: Float[Array, "N T H D"]) -> Float[np.ndarray, "H D"]:
    """Compute the mean square of every query channel, float64."""
    return np.asarray(jnp.square(queries.astype(jnp.float32)).mean((0, 1)), np.float64)


def costs_of(
    source: str,
    energy: Float[np.ndarray, "H D"],
    outputs: Float[Array | np.ndarray, "HD E"],
    shape: KVShape,
) -> Float[np.ndarray, "W W"]:
    """Compute M of one layer's keys or values.

    Args:
        source: "k" or "v".
        energy: the mean square of every query channel; empty where queries and outputs are not
            known.
        outputs: the output projection.
        shape: the model's.

    Returns:
        M; the identity where queries and outputs are not known.
    """
    if not len(energy):
        return np.eye(shape.kv_width)
    if source == "v":
        return value_costs(np.asarray(outputs), shape)
    return np.diag(key_costs(energy, shape))
