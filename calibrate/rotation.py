"""Rotations fitted so that errors harm attention little (OSCAR, arXiv 2605.17757, sections 3.1 and
3.2), in closed form.

An error e of a key changes a score by q . e. So the rotation of keys is made of the covariance C of
the queries that read them. The rotation of values is made of the covariance C of the attention
outputs, V^T S^T S V with softmax weights S. U are the eigenvectors of C in ascending order of
eigenvalues, H is the Hadamard matrix, and P a permutation of columns by bit reversal
(`columns_by_energy`):

    R = U H P / sqrt(D)        diag(R^T C R) = trace(C) / D in every entry

So errors cost the same in every channel, and every group of channels has its share of the large
eigenvalues.

The text is read once, a sequence and layer at a time. Sums and eigenvectors are float64 on the
host. Attention sinks are left out, because the cache keeps them exact.
"""

import dataclasses
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
from kvqjax.calibrate.centre import in_frame
from kvqjax.calibrate.resume import identity, stepped
from kvqjax.codecs.hadamard import hadamard, has_hadamard
from kvqjax.hardware.prompts import prompt_operations
from kvqjax.methods import Method
from kvqjax.methods.keys_values import cached_keys
from kvqjax.methods.rotation import CONSTANTS
from kvqjax.model import decoder, weight_trees
from kvqjax.model.config import ModelConfig
from kvqjax.model.loading import Model
from kvqjax.model.rope import positions_of_layer, rotate

DEFAULT_SEQUENCES, DEFAULT_LENGTH = 16, 512  # 8192 tokens, which the paper found to be enough
OBJECTIVES = ("outputs", "energy")
NEEDS_MODEL = "rotations are fitted on a kvqjax model"  # what `from_tensors` says


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How rotations are fitted.

    Attributes:
        values: the vectors whose covariance is taken for values: attention outputs ("outputs", the
            paper), or the values ("energy", the released code), each weighed with the mean
            square score of its token's key.
        shared: whether all KV heads of a layer have one pair of matrices, from the mean over heads,
            as released; else each has its own.

    Raises:
        UserError: for other `values`.
    """

    values: str = "outputs"
    shared: bool = False

    def __post_init__(self):
        if self.values not in OBJECTIVES:
            raise UserError(f"values={self.values!r} is unknown; known: {', '.join(OBJECTIVES)}")


def work(model: Model, method: Method, count: int, length: int) -> float:
    """Count the floating point operations of `calibrate` on `count` sequences of `length` tokens,
    covariances included."""
    heads = model.config.num_heads + model.config.num_kv_heads
    covariances = 4 * heads * model.config.head_dim**2 * model.config.num_layers
    return count * prompt_operations(model.config, 0, length) + float(count * length * covariances)


def columns_by_energy(dim: int) -> np.ndarray:
    """Make the permutation P of the D columns of U H, which are in ascending order of eigenvalues.

    The column of the k-th largest eigenvalue goes to the place whose binary digits are those of k
    reversed.

    Args:
        dim: D. Where it is no power of two, columns stay in place.

    Returns:
        The number of the column at every place.
    """
    bits = dim.bit_length() - 1
    if dim != 1 << bits:
        return np.arange(dim)
    places = np.array([int(f"{k:0{bits}b}"[::-1], 2) if bits else 0 for k in range(dim)])
    order = np.empty(dim, np.int64)
    order[places] = dim - 1 - np.arange(dim)
    return order


def fitted(covariance: Float[np.ndarray, "D D"]) -> Float[np.ndarray, "D D"]:
    """Compute R of one covariance, float64."""
    dim = len(covariance)
    _, vectors = np.linalg.eigh(covariance)
    mixed = vectors @ hadamard(dim).astype(np.float64) / dim**0.5
    return mixed[:, columns_by_energy(dim)]


def covariances(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    out: Float[Array, "T H D"],
    values: str,
) -> tuple[Float[Array, "K D D"], Float[Array, "K D D"]]:
    """Compute the covariances C from which the rotations of keys and values are made, for one
    sequence.

    Args:
        q: queries after RoPE.
        k: keys after RoPE.
        v: values.
        out: attention outputs.
        values: as in `Recipe`.

    Returns:
        The covariances for keys and for values, of each KV head: means over T tokens and G query
        heads.
    """
    heads = k.shape[1]

    def of_rows(x, weight=None):
        """Compute the mean of the outer products of x with itself, for each KV head."""
        # [T, H, D] -> [K, T * G, D]
        rows = jnp.swapaxes(x.astype(jnp.float32).reshape(x.shape[0], heads, -1, x.shape[-1]), 0, 1)
        rows = rows.reshape(heads, -1, x.shape[-1])
        weighed = rows if weight is None else rows * weight[..., None]
        return (
            jnp.einsum("knd,kne->kde", weighed, rows, precision=jax.lax.Precision.HIGHEST)
            / rows.shape[1]
        )

    keys = of_rows(q)
    if values == "outputs":
        return keys, of_rows(out)
    # The mean square score of every key, k^T C k with the queries' covariance C.
    wide = k.astype(jnp.float32)
    energy = jnp.einsum("tkd,kde,tke->kt", wide, keys, wide, precision=jax.lax.Precision.HIGHEST)
    return keys, of_rows(v, energy / energy.mean(1, keepdims=True))


@functools.partial(jax.jit, static_argnames=("config", "values", "sinks", "unbiased"))
def _moments(
    params: weight_trees.Params,
    tokens: Int[Array, "1 T"],
    *,
    config: ModelConfig,
    values: str,
    sinks: int,
    unbiased: bool,
):
    """Compute what one sequence adds to the sums.

    Args:
        tokens: of the sequence.
        values: as in `Recipe`.
        sinks: first tokens that are left out.
        unbiased: whether the cache keeps keys without the model's bias.

    Returns:
        The covariances for keys and for values, [L, K, D, D], and the sum of keys after RoPE, [L,
        K*D].
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)

    def step(h, index):
        h = decoder.up_to(params, index, h, config)
        weights, turns = decoder.layer(params, index), positions_of_layer(positions, config, index)
        projected = decoder.project(weights, h, positions, config, index)
        k = rotate(projected.k, turns, config)
        out = decoder.attend_plainly(projected.q, k, projected.v, index, weights, config)
        cached = cached_keys(projected, turns, config, "post", unbiased)
        q, body_k, v, body_out = (x[0, sinks:] for x in (projected.q, cached, projected.v, out))
        of_keys, of_values = covariances(q, body_k, v, body_out, values)
        key_sum = body_k.astype(jnp.float32).sum(0).reshape(-1)
        return decoder.finish(weights, h, out, config), (of_keys, of_values, key_sum)

    _, moments = jax.lax.scan(
        step, decoder.embed(params, tokens, config), jnp.arange(config.num_layers)
    )
    return moments


def calibrate(
    model: Model,
    method: Method,
    tokens: Int[np.ndarray, "N T"],
    *,
    recipe: Recipe = Recipe(),
    state: Path | None = None,
    advance: Callable[[int, int], None] = lambda steps, total: None,
) -> Artifact:
    """Fit the rotations of `method` for `model`, and the means of keys if the method subtracts
    them.

    Args:
        model: the model.
        method: with layers that have fitted rotations.
        tokens: N sequences of T tokens.
        recipe: the settings.
        state: a file that keeps the progress after every sequence. A run that was killed continues
            from it.
        advance: advance(steps, total) is called after every sequence.

    Returns:
        The method with its matrices and means, float32.

    Raises:
        UserError: sequences that are hardly longer than the sinks, and a head_dim without a
            Hadamard matrix.
    """
    config, (count, length), sinks = model.config, np.shape(tokens), method.sinks
    if length <= sinks + 1:
        raise UserError(
            f"calibration tokens are {(count, length)}; wanted [sequences, more than {sinks + 1} tokens]"
        )
    if not has_hadamard(config.head_dim):
        raise UserError(
            f"{method}: no Hadamard matrix of order {config.head_dim}, the head_dim, is known here"
        )
    unbiased = any(getattr(layer, "unbiased", False) for layer in method.layers(config))
    owner = identity(
        model.fingerprint, repr(method), repr(recipe), repr(config), np.asarray(tokens)
    )
    square = np.zeros((config.num_layers, config.num_kv_heads, config.head_dim, config.head_dim))
    sums = {"keys": square, "values": square, "sum": np.zeros((config.num_layers, config.kv_width))}

    def step(progress):
        row = jnp.asarray(tokens[int(progress["done"])], jnp.int32)[None]
        new = _moments(
            model.params, row, config=config, values=recipe.values, sinks=sinks, unbiased=unbiased
        )
        return {
            name: progress[name] + np.asarray(x, np.float64)
            for name, x in zip(sums, new, strict=True)
        }

    progress = stepped({"done": np.int64(0)} | sums, count, step, state, owner, advance)
    constants = tuple(
        _constants(run, progress, recipe, count * (length - sinks))
        for run in runs_for(method, config)
    )
    about = {"sequences": count, "tokens": length, **dataclasses.asdict(recipe)}
    return Artifact(method, constants, model.fingerprint, about)


def _constants(run: RunLayout, progress: dict, recipe: Recipe, rows: int) -> dict:
    """Make the constants that a run of layers needs, of the sums over `rows` tokens."""
    layers = slice(run.first, run.first + run.count)
    groups = run.wiring.wanted()
    constants = {}
    if CONSTANTS in groups:
        constants[CONSTANTS] = {
            name: _matrices(progress[name][layers], recipe.shared) for name in groups[CONSTANTS]
        }
    if "k" in groups:
        mean = jnp.asarray(progress["sum"][layers] / rows, jnp.float32)

        def turned(mean, matrices):
            """Rotate one layer's mean into the frame of its body, by the layer's own matrices."""
            return in_frame(run, matrices, mean[None])[0]

        constants["k"] = {"mean": jax.vmap(turned)(mean, {CONSTANTS: constants.get(CONSTANTS, {})})}
    return constants


def _matrices(covariance: Float[np.ndarray, "n K D D"], shared: bool) -> Float[Array, "n K D D"]:
    if shared:
        covariance = np.broadcast_to(covariance.mean(1, keepdims=True), covariance.shape)
    return jnp.asarray([[fitted(head) for head in layer] for layer in covariance], jnp.float32)
