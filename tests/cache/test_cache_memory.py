"""The ledger against the buffers, and no second cache in what XLA compiles for a CPU in float32."""

import os

import jax
import jax.numpy as jnp
import pytest
from cases import CASES, model_and_method, with_nightly
from tiny import tiny

import kvqjax as kvq
from kvqjax import ledger
from kvqjax.generation.loop import decode_steps, unbegun
from kvqjax.generation.sampling import make_sampling
from kvqjax.model.config import RecurrentConfig
from kvqjax.model.weight_trees import unrolled


def abstract(name: str, batch: int, capacity: int):
    model, method = model_and_method(name)
    return model, jax.eval_shape(lambda: kvq.init_cache(model, method, batch, capacity))


@pytest.mark.parametrize("name", with_nightly(CASES))
def test_ledger_is_the_live_buffers(name):
    model, method = model_and_method(name)
    cache = kvq.init_cache(model, method, 2, 512)
    live = sum(array.addressable_data(0).nbytes for array in jax.tree.leaves(cache))
    assert abs(ledger(cache).bytes - live) <= 0.02 * live


def test_padding_is_a_part_of_a_field():
    """A window as long as the capacity encodes nothing, and the other source's body has slots all
    the same."""
    method = "k=kivi:bits=2,window=0;v=kivi:bits=2,window=512"
    book = ledger(jax.eval_shape(lambda: kvq.init_cache(tiny(), method, 1, 256)))
    padding = {(entry.source, entry.field): entry.padding / entry.bytes for entry in book.entries}
    assert all(0 <= share <= 1 for share in padding.values())
    assert (padding["k", "codes"], padding["v", "codes"]) == (0.5, 1)


def test_ledger_is_the_compiled_argument():
    """Sub-byte types could take more room than their `.nbytes` say: what counts is what XLA
    allocates."""
    _, cache = abstract("kivi3-sinks", 2, 4096)
    compiled = jax.jit(
        lambda cache: jax.tree.map(lambda x: x + 1 if x.dtype == jnp.int32 else x, cache)
    ).lower(cache)
    size = compiled.compile(AS_USERS_DO).memory_analysis().argument_size_in_bytes
    assert abs(ledger(cache).bytes - size) <= 0.02 * size


AS_USERS_DO = {"xla_backend_optimization_level": 3}
if "xla_cpu_use_fusion_emitters" in os.environ["XLA_FLAGS"]:
    AS_USERS_DO["xla_cpu_use_fusion_emitters"] = True


def check(compiled, cache, more: int) -> None:
    """The cache is updated in place; temporaries are below a tenth of it beyond `more` stated
    bytes."""
    memory, size = compiled.memory_analysis(), ledger(cache).bytes
    assert memory.alias_size_in_bytes >= 0.99 * size
    assert memory.temp_size_in_bytes < 0.1 * size + more, (
        f"{memory.temp_size_in_bytes} bytes beside {size} of cache"
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [
        "exact",
        pytest.param("kivi2", marks=pytest.mark.nightly),
        pytest.param("kivi4-float32", marks=pytest.mark.nightly),
        pytest.param("kivi-published", marks=pytest.mark.nightly),
        pytest.param("mixed", marks=pytest.mark.nightly),
    ],
)
def test_no_second_cache_in_forward(name):
    model, cache = abstract(name, 2, 65536)
    length = 16
    numbers = jax.ShapeDtypeStruct((2,), jnp.int32)
    step = jax.jit(kvq.forward, static_argnames="last", donate_argnames="cache")
    compiled = step.lower(
        model, jax.ShapeDtypeStruct((2, length), jnp.int32), numbers, cache, last=True
    ).compile(AS_USERS_DO)
    # One block of decoded keys and values, its scores, and unpacked codes, in float32 and integers.
    block, config = 1024, tiny().config
    check(compiled, cache, 2 * block * (8 * config.kv_width + 4 * config.num_heads * length) * 4)


@pytest.mark.parametrize("name", ["kivi2", pytest.param("mixed", marks=pytest.mark.nightly)])
def test_no_second_cache_in_a_decode_loop(name):
    model, cache = abstract(name, 2, 65536)
    state = jax.eval_shape(unbegun, cache)
    eos, limit = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    compiled = decode_steps.lower(model, state, make_sampling(), eos, limit).compile(AS_USERS_DO)
    check(compiled, cache, 2 * 1024 * 16 * tiny().config.kv_width * 4)


@pytest.mark.parametrize("layers", ["scan", pytest.param("unroll", marks=pytest.mark.nightly)])
def test_states_of_recurrent_layers_are_updated_in_place(layers):
    """Eight layers of 8 MiB: a step holds no more than three of them besides, and a `commit` of
    stacks likewise."""
    shape = RecurrentConfig(
        layers=(*range(4), *range(5, 9)),
        key_heads=4,
        value_heads=8,
        key_dim=128,
        value_dim=128,
        kernel=4,
    )
    model, one = jax.eval_shape(lambda: tiny(recurrent=shape)), 2**23
    if layers == "unroll":
        model = model.replace(params=jax.eval_shape(unrolled, model.params))
    cache = jax.eval_shape(lambda: kvq.init_cache(model, "exact", 16, 64, layers=layers))
    assert kvq.ledger(cache).state_bytes > 8 * one
    tokens, counts = (jax.ShapeDtypeStruct(size, jnp.int32) for size in ((16, 1), (16,)))
    lowered = [jax.jit(kvq.forward, donate_argnames="cache").lower(model, tokens, counts, cache)]
    if (
        layers == "scan"
    ):  # of a list, XLA for CPUs holds all new states of a commit before it writes the first
        pending = jax.eval_shape(kvq.attend, model, tokens, counts, cache)[1]
        lowered.append(
            jax.jit(kvq.commit, donate_argnames="cache").lower(model, cache, pending, counts)
        )
    for program in lowered:
        memory = program.compile(AS_USERS_DO).memory_analysis()
        assert memory.alias_size_in_bytes >= 0.99 * ledger(cache).bytes
        assert memory.temp_size_in_bytes < 3.5 * one


def test_exact_prefill_holds_one_layer():
    """Beside a cache of six layers: hidden states in and out of one, its keys and values as
    projected and as captured (a prompt's worth for all six layers would be 17 MB more), and two
    blocks of scores."""
    model = tiny(num_layers=6)
    cache = jax.eval_shape(
        lambda: kvq.init_cache(model, kvq.parse("kivi:bits=2,window=32"), 2, 65536)
    )
    length, config = 8192, model.config
    numbers = jax.ShapeDtypeStruct((2,), jnp.int32)
    step = jax.jit(kvq.prefill, donate_argnames="cache")
    compiled = step.lower(
        model, jax.ShapeDtypeStruct((2, length), jnp.int32), numbers, cache
    ).compile(AS_USERS_DO)
    memory, size = compiled.memory_analysis(), ledger(cache).bytes
    prompt, scores = (
        2 * length * (2 * config.width + 4 * config.kv_width) * 4,
        2 * 2 * config.num_heads * 512 * 512 * 4,
    )
    windows = sum(a.size * a.dtype.itemsize for run in cache.runs for a in run.window.values())
    assert memory.alias_size_in_bytes >= 0.99 * (size - windows), "windows are made anew"
    assert memory.temp_size_in_bytes < 0.1 * size + prompt + scores
