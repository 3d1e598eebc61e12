"""Keys, values and their diagonal Fisher information (KVQuant, arXiv 2401.18079, section 3.2, equation 2).

F_ii = g_i^2, g the gradient of a sequence's mean next-token loss. Keys and values are no parameters, so zeros are
added to them and the loss is differentiated with respect to these: one backward pass gives every layer's gradient.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvqjax._errors import UserError
from kvqjax.model import decoder, weight_trees
from kvqjax.model.config import KVShape, ModelConfig
from kvqjax.model.loading import Model
from kvqjax.model.rope import rotate

__all__ = ["Activations", "Sequences", "activations", "as_it_is", "loss", "of_model", "with_fisher"]


class Activations(NamedTuple):
    """What a cache would hold of some sequences, and the squared gradients of their loss, float32, W = K*D."""

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


def _perturbed_loss(zeros, params: weight_trees.Params, tokens: Int[Array, "B T"], config: ModelConfig, rope: str):
    """Mean next-token cross entropy, float32, with `zeros` = (for k, for v), [L,B,T,K,D] each, added; and k, v as
    cached."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)

    def step(h, xs):
        index, extra_k, extra_v = xs
        weights = decoder.layer(params, index)
        projected = decoder.project(weights, h, positions, config)
        k = rotate(projected.k, positions, config) if rope == "post" else projected.k
        k, v = k + extra_k.astype(k.dtype), projected.v + extra_v.astype(k.dtype)
        attended_k = k if rope == "post" else rotate(k, positions, config)
        attended = decoder.attend_plainly(projected.q, attended_k, v, index, config)
        return decoder.finish(weights, h, attended, config), (k, v)

    # Without the checkpoint the backward pass would keep every layer's T x T attention weights.
    xs = (jnp.arange(config.num_layers), *zeros)
    h, cached = jax.lax.scan(jax.checkpoint(step), decoder.embed(params, tokens), xs)
    logits = decoder.unembed(params, h[:, :-1], config)
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean(), cached


def _zeros(tokens, config: ModelConfig):
    shape = (config.num_layers, *tokens.shape, config.num_kv_heads, config.head_dim)
    return jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)


def loss(params: weight_trees.Params, tokens: Int[Array, "B T"], config: ModelConfig) -> Float[Array, ""]:
    """Mean next-token cross entropy of the model itself."""
    return _perturbed_loss(_zeros(tokens, config), params, tokens, config, "pre")[0]


def as_it_is(source: str, x: Float[Array, "L B T W"]) -> Float[Array, "L B T W"]:
    """What is encoded in its own frame."""
    return x


def with_fisher(cached, slopes, turn: Callable) -> Activations:
    """Keys and values [L, B, T, W] in the frame that `turn` brings them to, with F from their gradients there."""
    k, v = (turn(source, x) for source, x in zip("kv", cached, strict=True))
    return Activations(k, v, *(turn(source, x) ** 2 for source, x in zip("kv", slopes, strict=False)))


def activations(
    params: weight_trees.Params,
    tokens: Int[Array, "B T"],
    config: ModelConfig,
    *,
    rope: str = "pre",
    gradients: bool = True,
    turn: Callable = as_it_is,
) -> Activations:
    """Keys (before RoPE, or after it for `rope="post"`) and values of every layer, with F if `gradients`; `turn` as in
    `Sequences`.

    Sequences that are compared must have one length: the mean loss divides by it.
    """
    found = _cached_and_slopes(params, tokens, config, rope=rope, gradients=gradients)
    return with_fisher(found[:2], found[2:], turn)


@functools.partial(jax.jit, static_argnames=("config", "rope", "gradients"))
def _cached_and_slopes(params, tokens, config: ModelConfig, *, rope: str, gradients: bool) -> tuple[Array, ...]:
    """Keys and values [L, B, T, W], and their gradients if `gradients`."""

    def flat(x):
        return x.reshape(*x.shape[:3], -1).astype(jnp.float32)

    zeros = _zeros(tokens, config)
    if not gradients:
        return tuple(map(flat, _perturbed_loss(zeros, params, tokens, config, rope)[1]))
    slopes, cached = jax.grad(_perturbed_loss, has_aux=True)(zeros, params, tokens, config, rope)
    return (*map(flat, cached), *map(flat, slopes))


def of_model(model: Model, tokens: Int[np.ndarray, "N T"]) -> Sequences:
    """What the model computes for N sequences of T tokens."""
    if tokens.ndim != 2:
        raise UserError(f"calibration tokens are {tokens.shape}; wanted [sequences, tokens]")

    def read(number: int, rope: str, gradients: bool, turn: Callable = as_it_is) -> Activations:
        row = jnp.asarray(tokens[number : number + 1], jnp.int32)
        return activations(model.params, row, model.config, rope=rope, gradients=gradients, turn=turn)

    count, length = tokens.shape
    return Sequences(model.config.kv_shape, count, length, read, model.fingerprint, (repr(model.config), tokens))
