"""Models of random weights in a known geometry, for timings on a chip, and the memory that they took."""

import dataclasses
import functools
import resource

import jax
import jax.numpy as jnp

import kvqjax as kvq
from kvqjax.hardware.planner import parameter_shapes
from kvqjax.model.loading import config_of

__all__ = ["peak_bytes", "random_model"]


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _weight(key, shape: tuple[int, ...], dtype) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * shape[-2] ** -0.5


def random_model(name: str, layers: int, dtype: str) -> kvq.Model:
    """The first `layers` layers of a known geometry with random weights, made one array after the other: all at once
    would need room for several."""
    config = config_of(name)
    config = dataclasses.replace(config, num_layers=layers)
    keys = iter(jax.random.split(jax.random.key(0), 64))

    def array(path, shaped):
        norm = "norm" in jax.tree_util.keystr(path)
        made = jnp.ones(shaped.shape, shaped.dtype) if norm else _weight(next(keys), shaped.shape, shaped.dtype)
        return jax.block_until_ready(made)

    params = jax.tree_util.tree_map_with_path(array, parameter_shapes(config, dtype))
    return kvq.Model(params=params, constants=(), config=config)


def peak_bytes() -> tuple[int, str]:
    """The most bytes that were in use so far, and of what."""
    found = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in found:
        return found["peak_bytes_in_use"], "device"
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "process"
