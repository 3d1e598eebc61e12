"""The constants of transform coding (kvqjax.codecs.klt), in closed form from second moments of keys
and values.

An error e of a vector costs e^T M e:

    keys     (q . R e)^2, summed over the queries of a KV head, R being the rotation between both positions. M is the
             mean of R^T C R over distances, C the second moments of queries before RoPE. Pairs that turn fast lose
             what they have in common with others; slow ones keep it.
    values   |W_o^T e|^2, summed over the query heads that read them: M = sum_h W_o,h W_o,h^T.

Both have a block per KV head. Against a diagonal M, which has the energy of pairs alone, that of
keys takes a quarter to a half off attention's error by coded keys (SmolLM2-135M at 2 and 2.5 bits,
2026-11-29).

Where values are coded as what their keys do not say (kvqjax.methods.papers.klt), keys are coded
first. Values are fitted to the coded keys' coefficients by least squares, and the transform of
values is that of what is left.

The text is read once, all sequences of a layer at a time. Sums and eigenvectors are float64 on the
host. Attention sinks are left out, because the cache keeps them exact.
"""

import functools
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
from kvqjax.codecs.klt import times
from kvqjax.hardware.prompts import prompt_operations
from kvqjax.methods import Method
from kvqjax.model.config import KVShape
from kvqjax.model.loading import Model
from kvqjax.model.rope import rotate, unrotated

# 16384 tokens: the covariance of 1024 channels has a million entries.
DEFAULT_SEQUENCES = 16
DEFAULT_LENGTH = 1024
DISTANCES = 64  # between queries and keys, over which the cost of a key's error is averaged
DAMPING = 1e-3  # of the regression of values, relative to the mean of its diagonal
# The share of the largest eigenvalue below which an eigenvalue is only a rounding error.
FLOOR = 1e-6


def work(model: Model, method: Method, count: int, length: int) -> float:
    """Count the floating point operations of `calibrate` on `count` sequences of `length` tokens,
    covariances included."""
    # Keys and values, a multiplication and an addition for each entry of x x^T.
    per_token = 4 * model.config.kv_width**2 * model.config.num_layers
    exact_passes = count * prompt_operations(model.config, 0, length)
    return exact_passes + float(count * length * per_token)


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
    width = x.shape[2]
    total = np.zeros(width)
    squares = np.zeros((width, width))
    for sequence in x:
        sequence_sum, sequence_squares = _moments(sequence)
        total += np.asarray(sequence_sum, np.float64)
        squares += np.asarray(sequence_squares, np.float64)
    count = x.shape[0] * x.shape[1]
    mean = total / count
    return mean, squares / count - np.outer(mean, mean)


@functools.partial(jax.jit, static_argnames="shape")
def query_moments(q: Float[Array, "T H D"], shape: KVShape) -> Float[Array, "K D D"]:
    """Compute the second moments of one sequence's queries before RoPE.

    Args:
        q: queries after RoPE, at positions 0 to T - 1; none where they are not known.
        shape: of their layer.

    Returns:
        The moments, summed over the query heads of each KV head, float32. No heads where queries
        are not known.
    """
    if not q.shape[1]:
        return jnp.zeros((0, 1, 1))
    q = unrotated(q.astype(jnp.float32), jnp.arange(len(q)), shape)
    by_head = q.reshape(len(q), shape.num_kv_heads, -1, q.shape[2])
    return jnp.einsum("tkgd,tkge->kde", by_head, by_head, precision="highest") / len(q)


def key_costs(
    moments: Float[np.ndarray, "K D D"], shape: KVShape, length: int
) -> Float[np.ndarray, "W W"]:
    """Compute the keys' M.

    Args:
        moments: of the queries (`query_moments`).
        length: T, the tokens of a sequence.

    Returns:
        M: the mean of the rotated moments over distances that grow by equal factors, since a query
        attends to near tokens more than to far ones.
    """
    furthest = min(length, shape.window or length) - 1
    distances = np.unique(np.round(np.geomspace(1, max(1, furthest), DISTANCES)).astype(int))

    def turned(rows: np.ndarray) -> np.ndarray:
        """Rotate vectors [K, D, D] by every distance: [n, K, D, D]."""
        # `rotate` takes a token's heads: here K * D vectors at the place of each distance.
        flat = jnp.asarray(rows, jnp.float32).reshape(1, -1, rows.shape[-1])
        flat = jnp.broadcast_to(flat, (len(distances), *flat.shape[1:]))
        rotated = rotate(flat, jnp.asarray(distances), shape)
        return np.asarray(rotated, np.float64).reshape(-1, *rows.shape)

    rotations = turned(np.broadcast_to(np.eye(shape.head_dim), moments.shape))  # row i is R e_i
    rotated_moments = np.swapaxes(rotations, -1, -2) @ moments @ rotations
    means = rotated_moments.mean(0)
    costs = np.zeros((shape.kv_width, shape.kv_width))
    for head, block in enumerate(means):
        channels = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
        costs[channels, channels] = block
    return costs


def value_costs(outputs: Float[np.ndarray, "HD E"], shape: KVShape) -> Float[np.ndarray, "W W"]:
    """Compute the values' M from the output projection."""
    width = shape.kv_width
    dim = shape.head_dim
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
    half = (basis * root) @ basis.T  # M^1/2
    inverse = (basis / root) @ basis.T  # M^-1/2
    # Its principal components are the coefficients, each divided by its standard deviation.
    variance, vectors = np.linalg.eigh(half @ covariance @ half)
    largest = np.argsort(-variance, kind="stable")[:kept]
    # Channels that are always 0 make coefficients without variance, which must not be divided by 0.
    deviation = np.sqrt(np.maximum(variance[largest], FLOOR * variance[-1]))
    into = half @ vectors[:, largest] / deviation
    back = (inverse @ vectors[:, largest] * deviation).T
    return into, back


def constants_of(
    x: Float[Array | np.ndarray, "N T W"], costs: Float[np.ndarray, "W W"], needs: dict
) -> dict[str, np.ndarray]:
    """Find the constants of transform coding.

    Args:
        x: vectors to code.
        costs: M, the cost of their errors.
        needs: the shapes of the codec's constants.

    Returns:
        `mean` [W], `into` [G, w, R] and `back` [G, R, w], float32.
    """
    mean, covariance = covariance_of(x)
    groups, size, kept = needs["into"]
    into = []
    back = []
    for group in range(groups):
        channels = slice(group * size, (group + 1) * size)
        group_into, group_back = transform_of(
            covariance[channels, channels], costs[channels, channels], kept
        )
        into.append(group_into)
        back.append(group_back)
    arrays = {"mean": mean, "into": np.stack(into), "back": np.stack(back)}
    return {name: array.astype(np.float32) for name, array in arrays.items()}


@jax.jit
def _products(
    z: Float[Array, "T G R"], values: Float[Array, "T G w"]
) -> tuple[Float[Array, "G R R"], Float[Array, "G R w"]]:
    """Compute the second moments of one sequence, group by group, float32."""
    squares = jnp.einsum("tgr,tgs->grs", z, z, precision="highest")
    return squares, jnp.einsum("tgr,tgc->grc", z, values, precision="highest")


def fitted_values(
    z: Float[np.ndarray, "N T G R"], values: Float[np.ndarray, "N T W"]
) -> Float[np.ndarray, "G R w"]:
    """Fit values to the coefficients of coded keys, group by group, by ridge regression with an
    intercept.

    Args:
        z: the coefficients.
        values: of the same tokens.

    Returns:
        F, float64. Values are predicted as z F; the mean of what is left holds the intercept.
    """
    kept = z.shape[3]
    values = values.reshape(*z.shape[:3], -1)
    # Means are taken off first: the products of one sequence are float32 sums.
    z = z - z.mean((0, 1), dtype=np.float64).astype(np.float32)
    values = values - values.mean((0, 1), dtype=np.float64).astype(np.float32)
    groups, width = values.shape[2:]
    squares = np.zeros((groups, kept, kept))
    mixed = np.zeros((groups, kept, width))
    for sequence_z, sequence_values in zip(z, values, strict=True):
        sequence_squares, sequence_mixed = _products(sequence_z, sequence_values)
        squares += np.asarray(sequence_squares, np.float64)
        mixed += np.asarray(sequence_mixed, np.float64)
    damping = DAMPING * np.trace(squares, axis1=1, axis2=2) / kept
    return np.linalg.solve(squares + damping[:, None, None] * np.eye(kept), mixed)


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
        The method with the constants of every layer and source, float32.

    Raises:
        UserError: sequences that are no longer than the sinks.
    """
    shape = data.shape
    sinks = method.sinks
    if data.h.shape[1] <= sinks:
        raise UserError(
            f"calibration tokens are {data.h.shape[:2]}; wanted [sequences, more than {sinks} tokens]"
        )
    runs = runs_for(method, shape)
    run_of = {}
    coders = {}  # by the run's first layer
    for run in runs:
        for number in range(run.first, run.first + run.count):
            run_of[number] = run
        codec = run.wiring.storage.codecs.get("k")
        if codec is not None:
            coders[run.first] = _coder(codec.encode, codec.decode, codec.unit)
    owner = identity(data.fingerprint, repr(method), *data.parts)
    # The state between two layers: "h", the input of the next layer, and "LAYER.SOURCE.NAME", the
    # constants.
    start = {"done": np.int64(0), "h": data.h}
    for number, run in run_of.items():
        for source, needs in run.wiring.wanted().items():
            for name, size in needs.items():
                start[f"{number}.{source}.{name}"] = np.zeros(size, np.float32)

    def step(progress):
        number = int(progress["done"])
        run = run_of[number]
        layer_shape = shape.layer(number)
        keys, seen, above = data.read(number, progress["h"])
        body = {}
        for source, x in (("k", keys), ("v", seen.v)):
            tokens = np.asarray(x, np.float32)[:, sinks:]
            body[source] = tokens.reshape(*tokens.shape[:2], -1)  # heads side by side
        moments = [np.asarray(query_moments(q, layer_shape), np.float64) for q in seen.q]
        costs = costs_of(np.mean(moments, 0), seen.o, layer_shape, data.h.shape[1])
        constants = _fit_layer(run.wiring.wanted(), coders.get(run.first), body, costs)
        new = {"h": np.asarray(above, np.float32)}
        for source, arrays in constants.items():
            for name, array in arrays.items():
                new[f"{number}.{source}.{name}"] = array
        return progress | new

    progress = stepped(start, shape.num_layers, step, state, owner, advance)
    constants = tuple(_stacked(run, progress) for run in runs)
    about = {"sequences": data.h.shape[0], "tokens": data.h.shape[1]}
    return Artifact(method, constants, data.fingerprint, about)


def _fit_layer(
    needs: dict[str, dict], code: Callable | None, body: dict, costs: dict
) -> dict[str, dict[str, np.ndarray]]:
    """Find the constants of one layer.

    Args:
        needs: the shapes of the constants by source and name.
        code: gives the coefficients of coded keys (`_coder`); None where no keys are cached.
        body: keys and values [N, T, W] by source.
        costs: M by source.

    Returns:
        The constants of the sources that are transformed, in the shape of `needs`.
    """
    constants = {}
    # Keys come first in `needs`: values are fitted to their codes.
    for source in sorted(needs):
        x = body[source]
        from_keys = {}
        if "from_keys" in needs[source]:
            assert code is not None
            arrays = {name: jnp.asarray(array) for name, array in constants["k"].items()}
            z = np.stack([code(arrays, row) for row in body["k"]])
            matrix = fitted_values(z, x).astype(np.float32)
            predicted = np.asarray(times(jnp.asarray(z), jnp.asarray(matrix)))
            x = x - predicted.reshape(x.shape)
            from_keys["from_keys"] = matrix
        constants[source] = constants_of(x, costs[source], needs[source]) | from_keys
    return constants


@functools.lru_cache(maxsize=32)
def _coder(encode: Callable, decode: Callable, unit: int) -> Callable:
    """Make the program that encodes keys [T, W], and returns the coefficients [T, G, R] that the
    codes stand for. Constants are its argument, so that one program serves all layers and calls."""

    @jax.jit
    def coded(constants: dict[str, Array], keys: Float[Array, "T W"]) -> Float[Array, "T G R"]:
        # Tokens of zeros fill the last unit.
        padded = jnp.pad(keys, ((0, -len(keys) % unit), (0, 0)))
        decoded = decode(constants, encode(constants, padded))
        deviation = decoded - constants["mean"][None]
        by_group = deviation.reshape(len(deviation), len(constants["into"]), -1)
        return times(by_group, constants["into"])[: len(keys)]  # z B A = z

    return coded


def _stacked(run: RunLayout, progress: dict) -> dict:
    """Stack the constants of the layers of a run."""
    layers = range(run.first, run.first + run.count)
    constants: dict[str, dict[str, Array]] = {}
    for source, needs in run.wiring.wanted().items():
        constants[source] = {}
        for name in needs:
            arrays = [progress[f"{number}.{source}.{name}"] for number in layers]
            constants[source][name] = jnp.asarray(np.stack(arrays))
    return constants


def costs_of(
    moments: Float[Array | np.ndarray, "K D D"],
    outputs: Float[Array | np.ndarray, "F E"],
    shape: KVShape,
    length: int,
) -> dict[str, Float[np.ndarray, "W W"]]:
    """Compute M of one layer's keys and values.

    Args:
        moments: of the queries (`query_moments`); no heads where they are not known.
        outputs: the output projection.
        length: T, the tokens of a sequence.

    Returns:
        M by source; the identity where queries and outputs are not known.
    """
    if not len(moments):
        return {"k": np.eye(shape.kv_width), "v": np.eye(shape.kv_width)}
    keys = key_costs(np.asarray(moments, np.float64), shape, length)
    return {"k": keys, "v": value_costs(np.asarray(outputs), shape)}
