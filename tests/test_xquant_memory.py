"""Rematerialisation in blocks: a decode step holds one block of K and V at a time, never a layer; XQuant-CL adds
its accumulator, S*E numbers. Measured from the compiled step, cache donated, at two capacities."""

import jax
import jax.numpy as jnp
import pytest

from kvqjax import decoder
from kvqjax.config import ModelConfig
from kvqjax.forward import forward, init_cache
from kvqjax.methods import parse
from kvqjax.model import Model

CONFIG = ModelConfig(vocab_size=32, width=128, mlp_width=64, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=32)
SMALL, LARGE = 4096, 12288


def temporaries(method, capacity):
    params = jax.eval_shape(lambda: decoder.init_params(jax.random.key(0), CONFIG))
    model = Model(params, config=CONFIG)
    cache = jax.eval_shape(lambda: init_cache(model, method, 1, capacity))
    tokens, counts = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    step = jax.jit(forward, donate_argnames="cache").lower(model, tokens, counts, cache).compile()
    memory = step.memory_analysis()
    body = sum(a.size * a.dtype.itemsize for run in cache.runs for a in jax.tree.leaves(run.body))
    assert memory.alias_size_in_bytes >= body  # written in place: no second cache
    return memory.temp_size_in_bytes


@pytest.mark.parametrize(("spec", "carried"), [("xquant:bits=4", 0), ("xquant_cl:bits=4,base=0,protected=1", 1)])
def test_one_block_of_keys_and_values(spec, carried):
    small, large = (temporaries(parse(spec), capacity) for capacity in (SMALL, LARGE))
    accumulator = 4 * CONFIG.width * (LARGE - SMALL)
    layer = 4 * 2 * CONFIG.kv_width * (LARGE - SMALL)
    growth = large - small
    assert growth <= 1.1 * carried * accumulator + 0.05 * layer, (small, large)
    assert growth >= carried * accumulator
    block = 4 * 2 * CONFIG.kv_width * 256
    assert small <= 12 * block + carried * 4 * CONFIG.width * SMALL
