"""No cache array and no weights are copied: Llama-3.1-8B's geometry in bfloat16, compiled ahead of time for a TPU."""

import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kvqjax as kvq
from kvqjax import decoder
from kvqjax.config import ModelConfig, RopeConfig
from kvqjax.generate import LoopState, decode_steps
from kvqjax.ledger import ledger
from kvqjax.sampling import make_sampling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install libtpu"
    ),
]

GIB = 2**30
LLAMA = ModelConfig(
    vocab_size=128256,
    width=4096,
    mlp_width=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=RopeConfig(theta=5e5),
)


TOPOLOGIES = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


@functools.cache
def placed(chip: str):
    """A sharding on one chip that is not there."""
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    except (RuntimeError, ValueError, NotImplementedError) as error:
        pytest.skip(f"libtpu cannot describe a {chip} here: {str(error).splitlines()[0]}")
    return NamedSharding(Mesh(np.asarray(topology.devices[:1]), ("x",)), PartitionSpec())


def abstract(tree, chip: str):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placed(chip)), tree)


def integers(chip: str, *shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placed(chip))


def case(chip: str, spec: str, batch: int, capacity: int):
    params = jax.eval_shape(lambda: decoder.init_params(jax.random.key(0), LLAMA, jnp.bfloat16))
    model = kvq.Model(params=params, constants=(), config=LLAMA)
    cache = jax.eval_shape(lambda: kvq.init_cache(model, kvq.parse(spec), batch, capacity, target=chip))
    return abstract(model, chip), abstract(cache, chip)


def check(compiled, cache, limit: float) -> None:
    """All of the cache aliased in place, and temporaries below `limit` GiB."""
    memory, size = compiled.memory_analysis(), ledger(cache).bytes
    figures = f"cache {size / GIB:.3f}, temporaries {memory.temp_size_in_bytes / GIB:.3f} GiB"
    assert memory.alias_size_in_bytes >= 0.99 * size, figures
    assert memory.temp_size_in_bytes < limit * GIB, figures


@pytest.mark.parametrize(
    ("chip", "spec", "batch", "capacity"),
    [
        ("v5p", "kivi:bits=2", 4, 65536),
        ("v5p", "exact", 4, 32768),
        ("v6e", "kivi:bits=4,group=128", 2, 65536),  # through the kernel
    ],
)
def test_decode_loop(chip, spec, batch, capacity):
    """0.09 GiB were seen for KIVI, in a cache of 6.1 GiB: a block of scores, logits, and one window."""
    model, cache = case(chip, spec, batch, capacity)
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=placed(chip))
    state = LoopState(
        cache=cache,
        tokens=integers(chip, batch, 64),
        made=integers(chip, batch),
        done=integers(chip, batch, dtype=bool),
        seen=None,
        key=key,
    )
    sampling = abstract(jax.eval_shape(make_sampling), chip)
    compiled = decode_steps.lower(model, state, sampling, integers(chip, 1), integers(chip)).compile()
    check(compiled, cache, 0.25)
    assert ("packed_attention_k" in compiled.as_text()) == (chip == "v6e")


def test_chunk():
    """A chunk of 128 tokens: its pending sources (64 MiB), one layer's activations and the scores of one block."""
    model, cache = case("v5p", "kivi:bits=2", 4, 65536)
    step = jax.jit(kvq.forward, static_argnames="last", donate_argnames="cache")
    check(step.lower(model, integers("v5p", 4, 128), integers("v5p", 4), cache, last=True).compile(), cache, 0.6)
