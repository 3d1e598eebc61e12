"""A tiny model with key biases of dozens of times the keys' spread, as Qwen2 has; the same on every
JAX version."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from tiny import tiny

import kvqjax as kvq
from kvqjax.cache import Cache

TOKENS = np.random.default_rng(2).integers(2, 50, (1, 100)).astype(np.int32)


@functools.cache
def biased(size: float = 20.0, **changes) -> kvq.Model:
    """`tiny` with NumPy's random weights: variance 1/fan_in, biases 1, those of keys `size` times
    as large."""
    base, rng = tiny(qkv_bias=True, **changes), np.random.default_rng(0)

    def draw(path, x):
        scale = size if "k_bias" in str(path) else 1.0 if x.ndim < 3 else x.shape[-2] ** -0.5
        return jnp.asarray(rng.normal(size=x.shape) * scale, jnp.float32)

    return base.replace(params=jax.tree_util.tree_map_with_path(draw, base.params))


def filled(model: kvq.Model, method: kvq.Method) -> Cache:
    """A cache of 128 tokens at most that holds TOKENS, one row."""
    cache = kvq.init_cache(model, method, 1, 128)
    return kvq.forward(model, jnp.asarray(TOKENS), jnp.asarray([TOKENS.size], jnp.int32), cache)[1]


def logits(model: kvq.Model, cache: Cache) -> np.ndarray:
    """What two more tokens get from it."""
    return np.asarray(
        kvq.forward(model, jnp.asarray([[3, 14]], jnp.int32), jnp.asarray([2], jnp.int32), cache)[0]
    )
