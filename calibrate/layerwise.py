"""The data of calibrations that take one layer after the other, all sequences at a time: keys
before RoPE, values, queries and output projections. They come from a model that reads a text, or
from tensors that any model computed."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvqjax._errors import UserError
from kvqjax.cache.runs import runs_of
from kvqjax.calibrate.activations import Captured, positions_of
from kvqjax.methods import Method
from kvqjax.methods.keys_values import cached_keys
from kvqjax.model import decoder
from kvqjax.model.config import KVShape, ModelConfig
from kvqjax.model.loading import Model
from kvqjax.model.rope import positions_of_layer, rotate
from kvqjax.step.layers import ready_queries


class Activations(NamedTuple):
    """One layer on N sequences of T tokens.

    Attributes:
        v: values.
        q: queries after RoPE.
        k: keys after RoPE.
        o: the output projection, F = H*D.
        sinks: the logits of the score sinks; None where the model has none.
    """

    v: Float[Array, "N T W"]
    q: Float[Array, "N T H D"]
    k: Float[Array, "N T K D"]
    o: Float[Array, "F E"]
    sinks: Float[Array, " H"] | None = None


class Layers(NamedTuple):
    """N sequences of T tokens for a calibration that reads one layer after the other:

        read(index, h [N, T, E]) -> (keys as cached [N, T, W], its `Activations`, the h of the layer
        above)

    `h` are hidden states, the input of layer `index`."""

    shape: KVShape
    h: Float[np.ndarray, "N T E"]  # the input of the first layer
    read: Callable[[int, Any], tuple[Any, Activations, Any]]
    fingerprint: str  # of the model
    parts: tuple[Any, ...]  # text and arrays that identify the data (`resume.identity`)


@functools.partial(jax.jit, static_argnames=("config", "unbiased"))
def _layer_pass(params, index, h: Float[Array, "N T E"], config: ModelConfig, unbiased: bool):
    """Run one exact layer on N sequences, one at a time. Returns its keys as they are cached [N, T,
    W], its (v, q, k) as in `Activations`, and the input of the layer above [N, T, E]."""
    weights = decoder.layer(params, index)
    positions = jnp.arange(h.shape[1])[None]
    turns = positions_of_layer(positions, config, index)

    def row_pass(row):
        row = decoder.up_to(params, index, row[None], config)[0]
        projected = decoder.project(weights, row[None], positions, config, index)
        rotated = rotate(projected.k, turns, config)
        attended = decoder.attend_plainly(projected.q, rotated, projected.v, index, weights, config)
        out = decoder.finish(weights, row[None], attended, config)[0]
        k = cached_keys(projected, positions, config, "pre", unbiased)
        flat_k, flat_v = (x[0].reshape(row.shape[0], -1) for x in (k, projected.v))  # [T, W]
        return flat_k, flat_v, projected.q[0], rotated[0], out

    k, v, q, rotated, out = jax.lax.map(row_pass, h)
    return k, (v, q, rotated), out


def of_model(model: Model, method: Method, tokens: np.ndarray) -> Layers:
    """Read what the model computes for N sequences of T tokens. Raises UserError for tokens of
    another shape."""
    if tokens.ndim != 2:
        raise UserError(f"calibration tokens are {tokens.shape}; wanted [N, T]")
    params, config = model.params, model.config

    def read(index: int, h):
        hidden, layer = jnp.asarray(h, params["embed"].dtype), method.layers(config)[index]
        unbiased = getattr(layer, "unbiased", False)
        k, (v, q, rotated), above = _layer_pass(params, jnp.int32(index), hidden, config, unbiased)
        weights = decoder.layer(params, index)
        return k, Activations(v, q, rotated, weights["o"], weights.get("score_sinks")), above

    h = np.asarray(decoder.embed(params, jnp.asarray(tokens, jnp.int32), config), np.float32)
    return Layers(config.kv_shape, h, read, model.fingerprint, (repr(config), tokens))


def of_captured(data: Captured, method: Method) -> Layers:
    """Read what any model's attention layers computed for N sequences of T tokens."""

    def read(index: int, h):
        k, v = (jnp.asarray(x[index]).reshape(*data.size, -1) for x in (data.keys, data.values))
        if data.queries is None or data.outputs is None:
            # Arrays without heads tell a calibration that it only knows errors of keys and values
            # themselves.
            blank = jnp.zeros((*data.size, 0, 1))
            return k, Activations(v, blank, blank, jnp.zeros((0, 1))), h
        shape, positions = data.shape.layer(index), positions_of(*data.size)
        q = ready_queries(jnp.asarray(data.queries[index]), positions, shape)
        rotated = rotate(jnp.asarray(data.keys[index]), positions, shape)
        return k, Activations(v, q, rotated, jnp.asarray(data.outputs[index])), h

    runs_of(data.layout(method))  # refuses shapes that the method does not fit
    return Layers(data.shape, np.zeros((*data.size, 0), np.float32), read, "", data.parts)
