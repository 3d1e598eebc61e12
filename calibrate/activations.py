"""What calibrations read: keys and values as a cache is given them, of a model that reads a text (`of_model`) or of
tensors that any model's attention layers computed (`Captured`, `of_captured`). Where a calibration weighs by it, their
diagonal Fisher information comes with them (KVQuant, arXiv 2401.18079, section 3.2, equation 2).

F_ii = g_i^2, g the gradient of a sequence's mean next-token loss. Keys and values are no parameters, so zeros are
added to them and the loss is differentiated with respect to these: one backward pass gives every layer's gradient.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvqjax._errors import UserError
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.methods import Method
from kvqjax.model import decoder, weight_trees
from kvqjax.model.config import KVShape, ModelConfig
from kvqjax.model.decoder import Projected
from kvqjax.model.loading import Model
from kvqjax.model.rope import positions_of_layer, rotate

__all__ = [
    "Activations",
    "Captured",
    "Sequences",
    "activations",
    "as_it_is",
    "cached",
    "loss",
    "of_captured",
    "of_model",
    "positions_of",
    "with_fisher",
]

FIELDS = ("keys", "values", "queries", "outputs", "key_gradients", "value_gradients")  # tensors of `Captured`
# One array a layer, or one array with layers in front.
Layers = Sequence[Array | np.ndarray] | Array | np.ndarray


class Activations(NamedTuple):
    """What a cache would hold of some sequences, float32, W = K*D.

    Attributes:
        k: keys.
        v: values.
        k_fisher: F of the keys, the squared gradients of the loss; None where nothing weighs by it.
        v_fisher: F of the values.
    """

    k: Float[Array, "L B T W"]
    v: Float[Array, "L B T W"]
    k_fisher: Float[Array, "L B T W"] | None = None
    v_fisher: Float[Array, "L B T W"] | None = None


class Sequences(NamedTuple):
    """`count` sequences of `length` tokens for a calibration that reads one sequence of all layers at a time:

        read(number, rope, gradients, turn) -> Activations of one sequence (B = 1), with F if `gradients`

    `turn(source, x [L, B, T, W])` brings keys ("k") and values ("v"), and their gradients likewise, into the frame that
    they are encoded in. `fingerprint` names the model that they come from, `parts` are what `resume.identity` takes of
    them."""

    shape: KVShape
    count: int
    length: int
    read: Callable[..., Activations]
    fingerprint: str
    parts: tuple[Any, ...]


def as_it_is(source: str, x: Float[Array, "L B T W"]) -> Float[Array, "L B T W"]:
    """Give keys or values that are encoded in their own frame: a `turn` of `Sequences` that turns nothing."""
    return x


def with_fisher(cached, slopes, turn: Callable) -> Activations:
    """Bring keys and values to the frame of `turn`, and make F of their gradients there.

    Args:
        cached: keys and values, [L, B, T, W] each.
        slopes: their gradients likewise; empty where there are none.
        turn: as in `Sequences`.

    Returns:
        Keys and values, with F where there are gradients.
    """
    k, v = (turn(source, x) for source, x in zip("kv", cached, strict=True))
    return Activations(k, v, *(turn(source, x) ** 2 for source, x in zip("kv", slopes, strict=False)))


# --- A model that reads a text


def _perturbed_loss(zeros, params: weight_trees.Params, tokens: Int[Array, "B T"], config: ModelConfig, rope: str):
    """Compute the mean next-token cross entropy, float32, and keys and values as they are cached. `zeros` are added to
    keys and values, [L, B, T, K, D] each: what the loss is differentiated by."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)

    def step(h, xs):
        index, extra_k, extra_v = xs
        h = decoder.up_to(params, index, h, config)
        weights, turns = decoder.layer(params, index), positions_of_layer(positions, config, index)
        projected = decoder.project(weights, h, positions, config, index)
        k = rotate(projected.k, turns, config) if rope == "post" else projected.k
        k, v = k + extra_k.astype(k.dtype), projected.v + extra_v.astype(k.dtype)
        attended_k = k if rope == "post" else rotate(k, turns, config)
        attended = decoder.attend_plainly(projected.q, attended_k, v, index, weights, config)
        return decoder.finish(weights, h, attended, config), (k, v)

    # Without the checkpoint the backward pass would keep every layer's T x T attention weights.
    xs = (jnp.arange(config.num_layers), *zeros)
    h, cached = jax.lax.scan(jax.checkpoint(step), decoder.embed(params, tokens, config), xs)
    h = decoder.up_to(params, config.num_layers, h, config)
    logits = decoder.unembed(params, h[:, :-1], config)
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean(), cached


def _zeros(tokens, config: ModelConfig):
    shape = (config.num_layers, *tokens.shape, config.num_kv_heads, config.head_dim)
    return jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)


def loss(params: weight_trees.Params, tokens: Int[Array, "B T"], config: ModelConfig) -> Float[Array, ""]:
    """Compute the model's mean next-token cross entropy."""
    return _perturbed_loss(_zeros(tokens, config), params, tokens, config, "pre")[0]


def activations(
    params: weight_trees.Params,
    tokens: Int[Array, "B T"],
    config: ModelConfig,
    *,
    rope: str = "pre",
    gradients: bool = True,
    turn: Callable = as_it_is,
) -> Activations:
    """Compute keys and values of every layer. Sequences that are compared must have one length, because the mean loss
    divides by it.

    Args:
        params: the model's weights.
        tokens: the sequences.
        config: the model's config.
        rope: "pre" for keys before RoPE, "post" for keys after it.
        gradients: whether F is wanted, which takes a backward pass.
        turn: as in `Sequences`.

    Returns:
        Keys and values, with F if `gradients`.
    """
    arrays = _cached_and_slopes(params, tokens, config, rope=rope, gradients=gradients)
    return with_fisher(arrays[:2], arrays[2:], turn)


@functools.partial(jax.jit, static_argnames=("config", "rope", "gradients"))
def _cached_and_slopes(params, tokens, config: ModelConfig, *, rope: str, gradients: bool) -> tuple[Array, ...]:
    """Compute keys and values [L, B, T, W], and their gradients if `gradients`."""

    def flat(x):
        return x.reshape(*x.shape[:3], -1).astype(jnp.float32)

    zeros = _zeros(tokens, config)
    if not gradients:
        return tuple(map(flat, _perturbed_loss(zeros, params, tokens, config, rope)[1]))
    slopes, cached = jax.grad(_perturbed_loss, has_aux=True)(zeros, params, tokens, config, rope)
    return (*map(flat, cached), *map(flat, slopes))


def of_model(model: Model, tokens: Int[np.ndarray, "N T"]) -> Sequences:
    """Read what the model computes for N sequences of T tokens. Raises UserError for tokens of another shape."""
    if tokens.ndim != 2:
        raise UserError(f"calibration tokens are {tokens.shape}; wanted [sequences, tokens]")

    def read(number: int, rope: str, gradients: bool, turn: Callable = as_it_is) -> Activations:
        row = jnp.asarray(tokens[number : number + 1], jnp.int32)
        return activations(model.params, row, model.config, rope=rope, gradients=gradients, turn=turn)

    count, length = tokens.shape
    return Sequences(model.config.kv_shape, count, length, read, model.fingerprint, (repr(model.config), tokens))


# --- Tensors of any model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Captured:
    """Tensors that any model's attention layers computed for N sequences of T tokens. Every field of tensors is one
    array with the layers in front, or a list of one array a layer, on the host or not.

    Attributes:
        shape: the model's.
        keys: [L, N, T, K, D], as `kvq.attend_layer` takes them.
        values: likewise.
        queries: [L, N, T, H, D], as `kvq.attend_layer` takes them.
        outputs: the output projections, [L, H*D, E]; they go with the queries.
        key_gradients: those of each sequence's mean loss, like the keys.
        value_gradients: likewise; they go with those of the keys.
        dtype: the cache's.

    Raises:
        UserError: a field without its partner, or of another shape.
    """

    shape: KVShape
    keys: Layers
    values: Layers
    queries: Layers | None = None
    outputs: Layers | None = None
    key_gradients: Layers | None = None
    value_gradients: Layers | None = None
    dtype: str = "float32"

    def __post_init__(self):
        for name, partner in (("queries", "outputs"), ("key_gradients", "value_gradients")):
            if (getattr(self, name) is None) != (getattr(self, partner) is None):
                raise UserError(f"{name} and {partner} go together; give both or neither")
        for name in FIELDS:
            if getattr(self, name) is not None and len(getattr(self, name)) != self.shape.num_layers:
                raise UserError(
                    f"{name} of {len(getattr(self, name))} layers given, the shape has {self.shape.num_layers}"
                )
        if np.ndim(self.keys[0]) != 4:
            raise UserError("keys: wanted an array [sequences, tokens, heads, head_dim] for every layer")
        shape = self.shape
        kv, head = (*self.size, shape.num_kv_heads, shape.head_dim), (*self.size, shape.num_heads, shape.head_dim)
        shapes = {"keys": kv, "values": kv, "key_gradients": kv, "value_gradients": kv, "queries": head}
        if self.outputs is not None:
            # Any width of the model will do, as long as all layers have it.
            shapes |= {"outputs": (shape.num_heads * shape.head_dim, *np.shape(self.outputs[0])[-1:])}
        for name, expected in shapes.items():
            self._check_shapes(name, expected)

    def _check_shapes(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise UserError unless every layer's array has this shape; a field may be left out."""
        arrays = getattr(self, name)
        for layer, array in enumerate(() if arrays is None else arrays):
            if np.shape(array) != shape:
                raise UserError(f"{name} of layer {layer} have shape {np.shape(array)}, wanted {shape}")

    @property
    def size(self) -> tuple[int, int]:
        """Count the sequences, and the tokens of each."""
        return tuple(np.shape(self.keys[0])[:2])

    @property
    def parts(self) -> tuple[Any, ...]:
        """List what `resume.identity` takes of the data."""
        arrays = (getattr(self, name) for name in FIELDS)
        return repr(self.shape), self.dtype, *(np.asarray(x) for layers in arrays if layers is not None for x in layers)

    def layout(self, method: Method) -> CacheLayout:
        return CacheLayout(shape=self.shape, method=method, capacity=1, dtype=self.dtype)


def positions_of(rows: int, length: int) -> Int[Array, "N T"]:
    """Number the tokens of N sequences of T tokens."""
    return jnp.broadcast_to(jnp.arange(length)[None], (rows, length))


def cached(run: RunLayout, k, v) -> tuple[Float[Array, "n T W"], Float[Array, "n T W"]]:
    """Give keys and values of a run's layers, [n, T, K, D] each, as a cache stores them, in float32."""
    nothing: Any = None  # of what the capture of keys and values does not look at
    projected = Projected(nothing, jnp.asarray(k), jnp.asarray(v), nothing, nothing)
    new = run.wiring.maps.capture({}, {}, projected, positions_of(*projected.k.shape[:2]))
    return new["k"].astype(jnp.float32), new["v"].astype(jnp.float32)


def of_captured(data: Captured, method: Method) -> Sequences:
    """Read tensors of any model, for a calibration that reads one sequence of all layers at a time."""
    runs = runs_of(data.layout(method))

    def all_layers(number: int, keys, values) -> list:
        """Keys and values [L, 1, T, W] of one sequence. Gradients turn with the keys, since a rotation is linear."""
        pairs = []
        for run in runs:
            layers = range(run.first, run.first + run.count)
            pairs.append(cached(run, *(np.stack([x[i][number] for i in layers]) for x in (keys, values))))
        return [jnp.concatenate(parts)[:, None] for parts in zip(*pairs, strict=True)]

    def read(number: int, rope: str, gradients: bool, turn=as_it_is) -> Activations:
        pair = all_layers(number, data.keys, data.values)
        slopes = all_layers(number, data.key_gradients, data.value_gradients) if gradients else ()
        return with_fisher(pair, slopes, turn)

    return Sequences(data.shape, *data.size, read, "", data.parts)
