"""Rematerialisation in blocks: a decode step holds one block of K and V at a time, never a layer;
XQuant-CL adds its accumulator, S*E numbers. Measured from the compiled step, cache donated, at two
capacities."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from cases import with_nightly

from kvqjax import forward, init_cache, parse
from kvqjax.cache import CacheLayout, runs_of
from kvqjax.hardware.aot import abstract_model
from kvqjax.model.config import ModelConfig

MHA = ModelConfig(
    vocab_size=32, width=128, mlp_width=64, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=32
)
GQA = dataclasses.replace(MHA, num_kv_heads=2)
SMALL, LARGE = 4096, 12288
CASES = [
    (MHA, "xquant:bits=4"),
    (MHA, "xquant_cl:bits=4,base=0,protected=1"),
    (GQA, "xquant:bits=2,latent=true"),
    (GQA, "xquant_cl:bits=2,base=0,protected=1,latent=true"),
]


def temporaries(config, method, capacity):
    """Bytes beside the arguments of a compiled step, and the widest sum of what flows from layer to
    layer."""
    layout = CacheLayout(shape=config.kv_shape, method=method, capacity=capacity, dtype="float32")
    model = abstract_model(config, layout)
    cache = jax.eval_shape(lambda: init_cache(model, method, 1, capacity))
    tokens, counts = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    step = jax.jit(forward, donate_argnames="cache").lower(model, tokens, counts, cache).compile()
    memory = step.memory_analysis()
    body = sum(a.size * a.dtype.itemsize for run in cache.runs for a in jax.tree.leaves(run.body))
    assert memory.alias_size_in_bytes >= body  # written in place: no second cache
    return memory.temp_size_in_bytes, max(
        sum(run.wiring.chain.carry.values()) for run in runs_of(cache.layout)
    )


@pytest.mark.parametrize(("config", "spec"), with_nightly(CASES, CASES[:1]))
def test_one_block_of_keys_and_values(config, spec):
    (small, carried), (large, _) = (
        temporaries(config, parse(spec), capacity) for capacity in (SMALL, LARGE)
    )
    assert (carried > 0) == spec.startswith("xquant_cl")
    accumulator, layer = 4 * carried * (LARGE - SMALL), 4 * 2 * config.kv_width * (LARGE - SMALL)
    growth = large - small
    assert accumulator <= growth <= 1.1 * accumulator + 0.05 * layer, (small, large)
    # Keys, values and what they are made from.
    block = 4 * (2 * config.kv_width + config.width) * 256
    assert small <= 8 * block + 4 * carried * SMALL
