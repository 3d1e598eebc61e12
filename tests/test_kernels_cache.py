"""Caches whose bodies kernels read: what a model computes with the TPU kernel, interpreted, in the place of the general
path, and that a program for a TPU is the general path where there is none."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import QUICK, check_outputs
from kernel_forms import rope
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax import segments
from kvqjax.pallas_kernels import dispatch, tpu

METHODS = ["kivi_star:protected=0,sinks=3", "kvquant:bits=2,outliers=0.01,sinks=3"]
LENGTH, CAPACITY = 500, 515  # a block of 512 body tokens beside the sinks


@functools.cache
def filled(method: str):
    """A model with heads of 128 channels, and a cache of two rows of which one is full. Both held requests before in
    which one token in fifty was not finite: kernels multiply what is left of them by weights of 0."""
    model = tiny(head_dim=128, num_layers=1)
    spec, rng = kvq.parse(method), np.random.default_rng(0)
    width = model.config.kv_width
    if method.startswith("kvquant"):
        side, points = rng.uniform(1, 2, (1, width)), np.sort(rng.uniform(-1, 1, (2, 1, 4)))
        keys = {"upper": side, "lower": -side, "signposts": points[0]}
        constants = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), ({"k": keys, "v": {"signposts": points[1]}},))
        model = model.replace(constants=constants)
    counts = jnp.asarray([LENGTH, LENGTH - 200])
    bad = model.replace(params=model.params | {"embed": model.params["embed"].at[7].set(jnp.nan)})
    prefill, text, whole = jax.jit(kvq.prefill), tokens(2, LENGTH), jnp.full(2, LENGTH)
    _, cache = prefill(bad, text, whole, kvq.init_cache(model, spec, 2, CAPACITY))
    assert cache.nonfinite.all()
    _, cache = prefill(model, text, counts, kvq.evict(cache, jnp.ones(2, bool)))
    return model, cache


def logits(model, cache):
    step = jax.jit(lambda m, c: kvq.forward(m, tokens(2, 1, 3), jnp.ones(2, jnp.int32), c)[0], compiler_options=QUICK)
    return np.asarray(step(model, cache))


def for_chip(cache, target: str):
    return cache.replace(layout=dataclasses.replace(cache.layout, target=target))


@pytest.mark.parametrize("method", METHODS)
def test_the_kernel_reads_what_the_cache_stores(method, monkeypatch):
    model, cache = filled(method)
    plain, calls = logits(model, cache), []

    def kernel(q, body, layer, start, stop, spec, general, trusted):
        calls.append(spec.rope == rope(10000.0, 128))
        return tpu.packed_attention(q, body, layer, start, stop, spec, interpret=True)

    monkeypatch.setattr(segments, "packed_attention", kernel)
    found = logits(model, for_chip(cache, "v6e"))
    assert calls
    check_outputs(found, plain)


@pytest.mark.parametrize("method", [METHODS[0], "kvquant:bits=2,outliers=0,sinks=3"])
def test_elsewhere_the_general_path(method):
    """Traced for a TPU, run on a CPU."""
    model, cache = filled(method)
    for_tpu = for_chip(cache, "v6e")
    wiring = kvq.cache.plan(for_tpu.layout)[0].wiring
    assert dispatch.path(wiring.packed.spec, 2, 512) == "tpu"
    np.testing.assert_array_equal(logits(model, for_tpu), logits(model, cache))


@pytest.mark.parametrize("method", ["kivi:bits=2", "kivi:bits=4", "kivi:bits=2,group=128"])
def test_bodies_of_kivi_reach_the_kernel(method):
    """As users name them, with their default groups, on every TPU."""
    model = tiny(head_dim=128, num_layers=1)
    cache = kvq.init_cache(model, kvq.parse(method), 1, 1024)
    for target in ("v5e", "v5p", "v6e", "v7x"):
        form = kvq.cache.plan(for_chip(cache, target).layout)[0].wiring.packed
        assert dispatch.path(form.spec, 4, 1024) == "tpu", target
