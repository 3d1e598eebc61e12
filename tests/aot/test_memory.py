"""No cache array is copied: Llama-3.1-8B and Llama-2-7B in bfloat16, compiled ahead of time for
TPUs and for a GPU."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import kvqjax as kvq
from kvqjax import ledger
from kvqjax.cache import allocate_cache
from kvqjax.cache.layout import Pool
from kvqjax.cache.runs import page_for
from kvqjax.generation.loop import decode_steps
from kvqjax.hardware.aot import decode_arguments, lower_prompt
from kvqjax.hardware.chips import chip_devices
from kvqjax.hardware.devices import GIB
from kvqjax.hardware.planner import ALONE
from kvqjax.model.loading import config_of
from kvqjax.parallel.sharding import rules_for

pytestmark = pytest.mark.slow


def case(chip: str, spec: str, batch: int, capacity: int, model: str = "llama-3.1-8b", **changed):
    """Where everything lies, and what a decode loop takes, as shapes there."""
    config, method = dataclasses.replace(config_of(model), **changed), kvq.parse(spec)
    try:
        rules = rules_for(config, method, ALONE, chip_devices(chip))
    except kvq.UserError as error:
        pytest.skip(str(error))
    return rules.everywhere, decode_arguments(config, method, capacity, batch, rules, chip)


def check(compiled, cache, limit: float) -> None:
    """All of the cache aliased in place, and temporaries below `limit` GiB."""
    memory, size = compiled.memory_analysis(), ledger(cache).bytes
    figures = f"cache {size / GIB:.3f}, temporaries {memory.temp_size_in_bytes / GIB:.3f} GiB"
    assert memory.alias_size_in_bytes >= 0.99 * size, figures
    assert memory.temp_size_in_bytes < limit * GIB, figures


@pytest.mark.parametrize(
    ("chip", "spec", "batch", "capacity", "limit", "kernel"),
    [
        ("v5p", "kivi:bits=2", 4, 65536, 0.25, "packed_attention_k2v2"),
        ("v5p", "kivi:bits=2,group=64", 4, 65536, 0.25, None),
        ("v5p", "exact", 4, 32768, 0.25, None),
        # A run of one layer: its weights stay in the stack.
        ("v5p", "kivi:bits=2;0=exact", 4, 65536, 0.25, "packed_attention_k2v2"),
        ("v6e", "kivi:bits=4,group=128", 2, 65536, 0.25, "packed_attention_k4v4"),
        (
            "v6e",
            "kivi_star:bits=2,protected=0",
            2,
            65536,
            0.25,
            "packed_attention_uniform_pre_k2v2",
        ),
        ("v6e", "kvquant:bits=3,outliers=0", 2, 65536, 0.25, "packed_attention_nuq_pre_k3v3"),
        ("v6e", "kvquant:bits=3", 2, 65536, 0.25, "packed_attention_nuq_pre_k3v3"),
        ("v5p", "kvquant:bits=3", 2, 65536, 0.25, "packed_attention_nuq_pre_k3v3"),
        ("v5p", "commvq:bits=1", 2, 65536, 0.25, None),
        ("v6e", "higgs:bits=2", 2, 65536, 0.25, "packed_attention_higgs_k4v4"),
        ("v6e", "xquant:bits=2", 2, 65536, 0.25, None),
        # Matrices lie as they are multiplied (kvqjax/model/weight_trees.py): laid out anew at a
        # call they took 14 GiB.
        ("v7x", "exact", 1, 32768, 0.02, None),
        ("v7x", "kivi:bits=2,group=128", 8, 32768, 0.02, "packed_attention_k2v2"),
        # The carry: one layer's keys and values, 0.25 GiB
        (
            "v6e",
            "aqua:bits=2",
            1,
            65536,
            0.3,
            None,
        ),
        # One layer at once: queries times each group's steps, and softmax weights times those of 4
        # groups of channels, in float32 and bfloat16 (0.06 and 0.03 GiB each, for keys and for
        # values), their planes side by side, scores.
        ("h100", "kivi:bits=2", 1, 131072, 0.6, None),
        ("h100", "kivi:bits=4,group=128", 1, 131072, 0.1, None),
        ("h100", "exact", 1, 65536, 0.1, None),
    ],
)
def test_decode_loop(chip, spec, batch, capacity, limit, kernel):
    """0.09 GiB were seen for KIVI on a v5p, in a cache of 6.1 GiB: a block of scores, logits, and
    one window. `kernel` names those that bodies are read by."""
    _, (model, state, *rest) = case(chip, spec, batch, capacity)
    compiled = decode_steps.lower(model, state, *rest).compile()
    check(compiled, state.cache, limit)
    found = set(re.findall(r"packed_attention_\w*k\dv\d", compiled.as_text()))
    assert found == set((kernel or "").split())


@pytest.mark.parametrize("spec", ["kivi:bits=2", "exact", "higgs:bits=2"])
def test_a_tpus_kernel_reads_pages_where_they_lie(spec):
    """The codes of one layer, which a gather would copy, take 0.13 GiB or more; 0.004 to 0.02 GiB
    were seen."""
    rules, (model, state, *rest) = case("v6e", spec, 8, 32768, num_layers=2)
    layout = state.cache.layout
    page = page_for(layout)
    layout = dataclasses.replace(layout, pool=Pool(8 * 32768 // page, page))
    cache = jax.eval_shape(lambda: allocate_cache(layout, 8))
    cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rules), cache)
    compiled = decode_steps.lower(model, state.replace(cache=cache), *rest).compile()
    check(compiled, cache, 0.03)
    assert "packed_attention" in compiled.as_text()


@pytest.mark.parametrize(("chip", "limit"), [("h100", 0.1), ("v6e", 0.02)])
def test_states_of_recurrent_layers_stay_in_place(chip, limit):
    """Qwen3.6-35B-A3B with 8 of its 40 layers, of which two attend, at 128K tokens: cache and
    states are aliased. Of temporaries 0.035 and 0.003 GiB were seen; a second copy of the states is
    0.012, of the rest 0.13."""
    model = "qwen3.6-35b-a3b"
    shape = dataclasses.replace(config_of(model).recurrent, layers=(0, 1, 2, 4, 5, 6))
    _, (params, state, *rest) = case(
        chip, "kivi:bits=4,group=128", 1, 131072, model, num_layers=2, recurrent=shape
    )
    check(decode_steps.lower(params, state, *rest).compile(), state.cache, limit)


@pytest.mark.parametrize(
    ("spec", "limit"),
    [("kvquant:bits=3", 0.1), ("xquant:bits=2", 0.1), ("higgs:bits=2", 0.1), ("aqua:bits=2", 0.25)],
)
def test_a_gpu_decodes_short_bodies_layer_by_layer(spec, limit):
    """Bodies that are read in one piece. XLA would make one kernel that decodes those of several
    layers: all 8 layers' keys and values are 0.25 GiB, in float32 0.5; one layer's are 0.03."""
    _, (model, state, *rest) = case("h100", spec, 1, 8192, num_layers=8)
    check(decode_steps.lower(model, state, *rest).compile(), state.cache, limit)


def prompt(chip: str, layers: int):
    """An exact prefill of 32K tokens, lowered."""
    config = dataclasses.replace(config_of("llama-3.1-8b"), num_layers=layers)
    try:
        return lower_prompt(config, kvq.parse("exact"), 32768, 1, chip)
    except kvq.UserError as error:
        pytest.skip(str(error))


def test_a_prompt_on_a_v7x_lays_out_no_weights():
    """Hidden states, one layer's keys and values and 0.3 GiB; one layer's matrices, laid out anew,
    would take 0.4 GiB more."""
    memory = prompt("v7x", 1).compile().memory_analysis()
    beside = memory.peak_memory_in_bytes - memory.argument_size_in_bytes
    assert beside <= 2 * 32768 * (4096 + 2 * 1024) + 0.3 * GIB


def test_a_prompt_on_a_tpu_needs_its_peak():
    """libtpu says what a v6e has when it refuses 70 layers. It compiles 54, which fit by the peak
    of memory, but not by the sum of temporaries."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="Ran out of memory on HBM") as refused:
        prompt("v6e", 70).compile()
    has = re.search(r"available HBM \(([\d.]+)G\)", str(refused.value))
    assert has is not None
    memory = prompt("v6e", 54).compile().memory_analysis()
    assert memory.peak_memory_in_bytes < float(has[1]) * GIB
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes > float(has[1]) * GIB


def test_projections_stay_as_they_are():
    """XQuant reads a layer's input times W_k and W_v; turned for that, those of all layers would
    take 2 GiB."""
    _, (model, state, *rest) = case("v6e", "xquant:bits=2", 1, 65536, "llama-2-7b")
    check(decode_steps.lower(model, state, *rest).compile(), state.cache, 0.25)


def test_chunk():
    """A chunk of 128 tokens: its pending sources (64 MiB), one layer's activations and the scores
    of one block."""
    here, (model, state, *_) = case("v5p", "kivi:bits=2", 4, 65536)
    tokens, counts = (
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=here) for shape in ((4, 128), (4,))
    )
    step = jax.jit(kvq.forward, static_argnames="last", donate_argnames="cache")
    check(step.lower(model, tokens, counts, state.cache, last=True).compile(), state.cache, 0.6)
