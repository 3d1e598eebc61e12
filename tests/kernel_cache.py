"""Caches for the tests of kernels on a whole model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from kernel_cases import QUICK
from tiny import tiny, tokens

import kvqjax as kvq

LENGTH, CAPACITY = 500, 515  # a block of 512 body tokens beside the sinks


@functools.cache
def filled(method: str):
    """A model with heads of 128 channels, and a cache of two rows of which one is full. Both held
    requests before in which one token in fifty was not finite: kernels multiply what is left of
    them by weights of 0."""
    model = tiny(head_dim=128, num_layers=1)
    spec, rng = kvq.parse(method), np.random.default_rng(0)
    width = model.config.kv_width
    if method.startswith("kvquant"):
        side, points = rng.uniform(1, 2, (1, width)), np.sort(rng.uniform(-1, 1, (2, 1, 4)))
        keys = {"upper": side, "lower": -side, "signposts": points[0]}
        constants = jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float32), ({"k": keys, "v": {"signposts": points[1]}},)
        )
        model = model.replace(constants=constants)
    counts = jnp.asarray([LENGTH, LENGTH - 200])
    bad = model.replace(params=model.params | {"embed": model.params["embed"].at[7].set(jnp.nan)})
    prefill, text, whole = jax.jit(kvq.prefill), tokens(2, LENGTH), jnp.full(2, LENGTH)
    _, cache = prefill(bad, text, whole, kvq.init_cache(model, spec, 2, CAPACITY))
    assert cache.nonfinite.all()
    _, cache = prefill(model, text, counts, kvq.evict(cache, jnp.ones(2, bool)))
    return model, cache


def logits(model, cache):
    step = jax.jit(
        lambda m, c: kvq.forward(m, tokens(2, 1, 3), jnp.ones(2, jnp.int32), c)[0],
        compiler_options=QUICK,
    )
    return np.asarray(step(model, cache))


def for_chip(cache, target: str):
    return cache.replace(layout=dataclasses.replace(cache.layout, target=target))
