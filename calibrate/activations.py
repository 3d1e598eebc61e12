"""The data of calibrations: keys and values as a cache gets them. They come from a model that reads
a text (`of_model`), or from tensors that any model's attention layers computed (`Captured`,
`of_captured`).

Calibrations that need it also get the diagonal Fisher information of keys and values (KVQuant,
arXiv 2401.18079, section 3.2, equation 2): F_ii = g_i^2, where g is the gradient of a sequence's
mean next-token loss. Keys and values are no parameters of a model. So zeros are added to them, and
the loss is differentiated with respect to the zeros: one backward pass gives the gradients of all
layers.
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
from kvqjax.cache.layout import CacheLayout, RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.methods import Method
from kvqjax.model import decoder, weight_trees
from kvqjax.model.config import KVShape, ModelConfig
from kvqjax.model.decoder import Projected
from kvqjax.model.loading import Model
from kvqjax.model.rope import positions_of_layer, rotate

# Tensors of `Captured`.
FIELDS = (
    "keys",
    "values",
    "queries",
    "outputs",
    "key_gradients",
    "value_gradients",
)
# One array a layer, or one array with layers in front.
Layers = Sequence[Array | np.ndarray] | Array | np.ndarray


class Activations(NamedTuple):
    """Keys and values of B sequences as a cache would hold them, float32, W = K*D.

    Attributes:
        k: keys.
        v: values.
        k_fisher: F of the keys, the squared gradients of the loss; None where no calibration needs
            it.
        v_fisher: F of the values.
    """

    k: Float[Array, "L B T W"]
    v: Float[Array, "L B T W"]
    k_fisher: Float[Array, "L B T W"] | None = None
    v_fisher: Float[Array, "L B T W"] | None = None


class Sequences(NamedTuple):
    """`count` sequences of `length` tokens for a calibration that reads one sequence of all layers
    at a time:

        read(number, rope, gradients, turn) -> Activations of one sequence (B = 1), with F if
        `gradients`

    `turn(source, x [L, B, T, W])` rotates keys ("k") and values ("v"), and their gradients, into
    the frame in which they are encoded."""

    shape: KVShape
    count: int
    length: int
    read: Callable[..., Activations]
    fingerprint: str  # of the model
    parts: tuple[Any, ...]  # text and arrays that identify the data (`resume.identity`)


def as_it_is(source: str, x: Float[Array, "L B T W"]) -> Float[Array, "L B T W"]:
    """Give keys or values back: the `turn` of `Sequences` for codecs without a rotation."""
    return x


def with_fisher(cached, slopes, turn: Callable) -> Activations:
    """Rotate keys and values into the frame of `turn`, and compute F from their gradients in that
    frame.

    Args:
        cached: keys and values, [L, B, T, W] each.
        slopes: the gradients of keys and values, in the same shapes; empty where there are none.
        turn: as in `Sequences`.

    Returns:
        Keys and values, with F where there are gradients.
    """
    k, v = (turn(source, x) for source, x in zip("kv", cached, strict=True))
    # A gradient is rotated before it is squared: F of a rotated channel is no function of F of the
    # unrotated ones.
    fisher = [turn(source, x) ** 2 for source, x in zip("kv", slopes, strict=False)]
    return Activations(k, v, *fisher)


# --- A model that reads a text


def _perturbed_loss(
    zeros, params: weight_trees.Params, tokens: Int[Array, "B T"], config: ModelConfig, rope: str
):
    """Compute the mean next-token cross entropy, float32, and keys and values as they are cached.

    `zeros` are two arrays [L, B, T, K, D] that are added to keys and values. The loss is
    differentiated with respect to them."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)

    def step(h, xs):
        index, extra_k, extra_v = xs
        h = decoder.up_to(params, index, h, config)
        weights, turns = decoder.layer(params, index), positions_of_layer(positions, config, index)
        projected = decoder.project(weights, h, positions, config, index)
        k = rotate(projected.k, turns, config) if rope == "post" else projected.k
        k = k + extra_k.astype(k.dtype)
        v = projected.v + extra_v.astype(k.dtype)
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


def loss(
    params: weight_trees.Params, tokens: Int[Array, "B T"], config: ModelConfig
) -> Float[Array, ""]:
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
    """Compute keys and values of every layer.

    F of sequences of different lengths cannot be compared, because the mean loss divides by the
    length.

    Args:
        tokens: the sequences.
        rope: "pre" for keys before RoPE, "post" for keys after it.
        gradients: whether F is wanted, which takes a backward pass.
        turn: as in `Sequences`.

    Returns:
        Keys and values, with F if `gradients`.
    """
    arrays = _cached_and_slopes(params, tokens, config, rope=rope, gradients=gradients)
    return with_fisher(arrays[:2], arrays[2:], turn)


@functools.partial(jax.jit, static_argnames=("config", "rope", "gradients"))
def _cached_and_slopes(
    params, tokens, config: ModelConfig, *, rope: str, gradients: bool
) -> tuple[Array, ...]:
    """Compute keys and values [L, B, T, W], and their gradients if `gradients`."""

    def flat(x):
        return x.reshape(*x.shape[:3], -1).astype(jnp.float32)

    zeros = _zeros(tokens, config)
    if not gradients:
        return tuple(map(flat, _perturbed_loss(zeros, params, tokens, config, rope)[1]))
    slopes, cached = jax.grad(_perturbed_loss, has_aux=True)(zeros, params, tokens, config, rope)
    return (*map(flat, cached), *map(flat, slopes))


def of_model(model: Model, tokens: Int[np.ndarray, "N T"]) -> Sequences:
    """Read what the model computes for N sequences of T tokens. Raises UserError for tokens of
    another shape."""
    if tokens.ndim != 2:
        raise UserError(f"calibration tokens are {tokens.shape}; wanted [sequences, tokens]")

    def read(number: int, rope: str, gradients: bool, turn: Callable = as_it_is) -> Activations:
        row = jnp.asarray(tokens[number : number + 1], jnp.int32)
        return activations(
            model.params, row, model.config, rope=rope, gradients=gradients, turn=turn
        )

    count, length = tokens.shape
    return Sequences(
        model.config.kv_shape, count, length, read, model.fingerprint, (repr(model.config), tokens)
    )


# --- Tensors of any model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Captured:
    """Tensors that any model's attention layers computed for N sequences of T tokens. Every field
    of tensors is one array with the layers in front, or a list of one array a layer, on the host or
    not.

    Attributes:
        shape: the model's.
        keys: [L, N, T, K, D], as `kvq.attend_layer` takes them.
        values: [L, N, T, K, D], as `kvq.attend_layer` takes them.
        queries: [L, N, T, H, D], as `kvq.attend_layer` takes them.
        outputs: the output projections, [L, H*D, E]; given if and only if `queries` are.
        key_gradients: gradients of each sequence's mean loss with respect to `keys`, in the same
            shape.
        value_gradients: gradients with respect to `values`; given if and only if `key_gradients`
            are.
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
            if (
                getattr(self, name) is not None
                and len(getattr(self, name)) != self.shape.num_layers
            ):
                raise UserError(
                    f"{name} of {len(getattr(self, name))} layers given, the shape has {self.shape.num_layers}"
                )
        if np.ndim(self.keys[0]) != 4:
            raise UserError(
                "keys: wanted an array [sequences, tokens, heads, head_dim] for every layer"
            )
        shape = self.shape
        kv, head = (
            (*self.size, shape.num_kv_heads, shape.head_dim),
            (*self.size, shape.num_heads, shape.head_dim),
        )
        shapes = {
            "keys": kv,
            "values": kv,
            "key_gradients": kv,
            "value_gradients": kv,
            "queries": head,
        }
        if self.outputs is not None:
            # Any width of the model will do, as long as all layers have it.
            shapes |= {
                "outputs": (shape.num_heads * shape.head_dim, *np.shape(self.outputs[0])[-1:])
            }
        for name, expected in shapes.items():
            self._check_shapes(name, expected)

    def _check_shapes(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise UserError unless every layer's array has this shape; a field may be left out."""
        arrays = getattr(self, name)
        for layer, array in enumerate(() if arrays is None else arrays):
            if np.shape(array) != shape:
                raise UserError(
                    f"{name} of layer {layer} have shape {np.shape(array)}, wanted {shape}"
                )

    @property
    def size(self) -> tuple[int, int]:
        """Count the sequences, and the tokens of each."""
        return tuple(np.shape(self.keys[0])[:2])

    @property
    def parts(self) -> tuple[Any, ...]:
        """The text and arrays that identify the data (`resume.identity`)."""
        present = (getattr(self, name) for name in FIELDS if getattr(self, name) is not None)
        arrays = [np.asarray(array) for layers in present for array in layers]
        return repr(self.shape), self.dtype, *arrays

    def layout(self, method: Method) -> CacheLayout:
        return CacheLayout(shape=self.shape, method=method, capacity=1, dtype=self.dtype)


def positions_of(rows: int, length: int) -> Int[Array, "N T"]:
    """Number the tokens of N sequences of T tokens."""
    return jnp.broadcast_to(jnp.arange(length)[None], (rows, length))


def cached(run: RunLayout, k, v) -> tuple[Float[Array, "n T W"], Float[Array, "n T W"]]:
    """Give keys and values of a run's layers, [n, T, K, D] each, as a cache stores them, in
    float32."""
    nothing: Any = None  # for the fields of `Projected` that `capture` does not read here
    projected = Projected(nothing, jnp.asarray(k), jnp.asarray(v), nothing, nothing)
    new = run.wiring.maps.capture({}, {}, projected, positions_of(*projected.k.shape[:2]))
    return new["k"].astype(jnp.float32), new["v"].astype(jnp.float32)


def of_captured(data: Captured, method: Method) -> Sequences:
    """Read tensors of any model, for a calibration that reads one sequence of all layers at a
    time."""
    runs = runs_of(data.layout(method))

    def all_layers(number: int, keys, values) -> list:
        """Give keys and values [L, 1, T, W] of one sequence as they are cached, or their gradients.
        RoPE is a rotation: it turns gradients as it turns keys."""
        pairs = []
        for run in runs:
            layers = range(run.first, run.first + run.count)
            k = np.stack([keys[layer][number] for layer in layers])
            v = np.stack([values[layer][number] for layer in layers])
            pairs.append(cached(run, k, v))
        return [jnp.concatenate(parts)[:, None] for parts in zip(*pairs, strict=True)]

    def read(number: int, rope: str, gradients: bool, turn=as_it_is) -> Activations:
        pair = all_layers(number, data.keys, data.values)
        slopes = all_layers(number, data.key_gradients, data.value_gradients) if gradients else ()
        return with_fisher(pair, slopes, turn)

    return Sequences(data.shape, *data.size, read, "", data.parts)
