"""A cache that holds many tokens at once: random codes, as a step's time does not depend on
them."""

import jax
import jax.numpy as jnp
import numpy as np

import kvqjax as kvq
from kvqjax.cache import Cache
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import units_due

ONE_TENTH = 0x3DCD  # in bfloat16: what is stored in 16 bits are scales and minima


def random(like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Random numbers or words; scales are all the same, so that nothing overflows."""
    rng = np.random.default_rng(0)
    if like.dtype == jnp.uint32:
        return jnp.asarray(rng.integers(0, 2**32, like.shape, dtype=np.uint32))
    if like.dtype == jnp.uint16:
        return jnp.full(like.shape, ONE_TENTH, jnp.uint16)
    if jnp.issubdtype(like.dtype, jnp.floating):
        return jnp.asarray(0.1 * rng.standard_normal(like.shape, dtype=np.float32)).astype(
            like.dtype
        )
    return jnp.zeros(like.shape, like.dtype)


def filled(model: kvq.Model, method: str, tokens: int, room: int) -> Cache:
    """A cache of one row that holds `tokens` tokens, with room for `room` more."""
    cache, lengths = (
        kvq.init_cache(model, method, 1, tokens + room),
        jnp.full((1,), tokens, jnp.int32),
    )
    states = []
    for run, state in zip(runs_of(cache.layout), cache.runs, strict=True):
        flushed = units_due(run, state, lengths - cache.layout.method.sinks)
        states.append(state.replace(body=jax.tree.map(random, state.body), flushed=flushed))
    return cache.replace(runs=tuple(states), lengths=lengths, finite=lengths + 0)
