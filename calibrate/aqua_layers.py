"""Sequences as the calibration of AQUA-KV reads them: keys and values of one layer after the other."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from kvqjax._errors import UserError
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.runs import runs_of
from kvqjax.methods import Method
from kvqjax.model import decoder
from kvqjax.model.loading import Model
from kvqjax.step.prompt import Path, exact_layer

__all__ = ["Layers", "layer_run", "layers_of"]

CHUNK = 256  # tokens of a sequence that attend at once: the fastest on CPUs, and no [T, T] scores exist


@functools.partial(jax.jit, static_argnames=("layout", "number", "last"))
def _layer_pass(model: Model, layout: CacheLayout, number: int, index, h, last: bool):
    """One clean layer, of run `number`, on one sequence [1, T, E]: what the cache is given of keys and values, [T, W],
    and the next h; no layer is above the last one, so its h is None."""
    length, run = h.shape[1], runs_of(layout)[number]
    padded = jnp.pad(h, ((0, 0), (0, -length % CHUNK), (0, 0)))
    counts, path = jnp.full((1,), length, jnp.int32), Path("off", CHUNK)
    found = exact_layer(model, run, index - run.first, {}, padded, counts, path, keep=lambda *found: found)
    (new, finite), above, _ = found
    seen = finite[0, :length, None]  # the cache would be given 0; constants made of it must not look sound
    k, v = (jnp.where(seen, new[name][0, :length].astype(jnp.float32), jnp.nan) for name in ("k", "v"))
    return k, v, None if last else above[:, :length]


class Layers(NamedTuple):
    """N sequences of T tokens for a calibration that reads one layer after the other. Layer `index` of sequence
    `number` is

        read(index, number, h [1, T, E]) -> (keys [T, W] and values [T, W] as cached, the layer above's h or None)

    `h` is the first layer's, of all sequences; `parts` are what `identity` takes of them."""

    layout: CacheLayout
    h: Float[np.ndarray, "N T E"]
    read: Callable[[int, int, Any], tuple[Any, Any, Any]]
    fingerprint: str
    parts: tuple[Any, ...]


def layer_run(layout: CacheLayout, index: int) -> int:
    """Find the number of the run that layer `index` is in."""
    return next(number for number, run in enumerate(runs_of(layout)) if index < run.first + run.count)


def layers_of(model: Model, method: Method, tokens: np.ndarray) -> Layers:
    """Read the layers of a model on N sequences of T tokens."""
    if tokens.ndim != 2:
        raise UserError(f"calibration tokens are {tokens.shape}; wanted [sequences, tokens]")
    config, dtype = model.config, model.params["embed"].dtype
    layout = CacheLayout(shape=config.kv_shape, method=method, capacity=1, dtype=str(dtype))
    h = np.zeros((*tokens.shape, config.width), np.float32)
    for i in range(len(tokens)):
        h[i] = decoder.embed(model.params, jnp.asarray(tokens[i : i + 1], jnp.int32))[0]

    def read(index: int, number: int, h):
        run, last = layer_run(layout, index), index == config.num_layers - 1
        return _layer_pass(model, layout, run, jnp.int32(index), jnp.asarray(h, dtype), last)

    return Layers(layout, h, read, model.fingerprint, (repr(config), tokens))
