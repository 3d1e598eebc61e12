"""The paper's memory cells (arXiv 2508.10395, Tables 1, 4, B.1), lengths (section 3.4) and
operation counts, from the methods as they are stored. Cells are printed with two digits."""

import dataclasses

import jax
import pytest

from kvqjax import ledger, parse
from kvqjax.cache import CacheLayout, allocate_cache, runs_of
from kvqjax.codecs import bits_per_value
from kvqjax.methods.roofline import (
    flops_per_token,
    layer_cost,
    longest_memory_bound,
    step_cost,
)
from kvqjax.model.config import ModelConfig

LLAMA2_7B = ModelConfig(
    vocab_size=32000,
    width=4096,
    mlp_width=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
)
LLAMA2_13B = dataclasses.replace(
    LLAMA2_7B, width=5120, mlp_width=13824, num_layers=40, num_heads=40, num_kv_heads=40
)
LLAMA31_8B = dataclasses.replace(LLAMA2_7B, mlp_width=14336, num_kv_heads=8)
H100_RIDGE = 378


def operations(spec, config):
    """Of one layer, for one cached token per read."""
    return spec.build(config.layer(0)).cost.operations


def normalised(spec, config):
    """Stored bits of all layers over those of a 16-bit KV cache: codes, scales, minima,
    outliers."""
    layout = CacheLayout(shape=config.kv_shape, method=parse(spec), capacity=1, dtype="bfloat16")
    bits = sum(
        run.count * field.packing.token_bits
        for run in runs_of(layout)
        for codec in run.wiring.storage.codecs.values()
        for field in codec.fields.values()
    )
    return bits / (config.num_layers * 2 * config.kv_width * 16)


MHA_CELLS = [  # Table 1 left, Table 4 left
    ("kivi_star:bits=4,protected=0", 0.27), ("kivi_star:bits=3,protected=0", 0.20), ("kivi_star:protected=0", 0.14),
    ("xquant:bits=8", 0.26), ("xquant:bits=4", 0.13), ("xquant:bits=3", 0.10),
    ("kivi_star:bits=4", 0.27), ("kivi_star:bits=3", 0.21), ("kivi_star:bits=2", 0.15),
    ("xquant:bits=4,protected=3", 0.13), ("xquant:bits=3,protected=3", 0.10), ("xquant:bits=2,protected=3", 0.08),
    ("xquant_cl:bits=4", 0.13), ("xquant_cl:bits=3", 0.10), ("xquant_cl:bits=2", 0.08),
]  # fmt: skip
GQA_CELLS = [  # Table 1 right, Table 4 right, Table B.1
    ("kivi_star:bits=4,protected=0", 0.27), ("kivi_star:bits=3,protected=0", 0.20), ("kivi_star:protected=0", 0.14),
    ("xquant:bits=4", 0.27), ("xquant:bits=3", 0.20), ("xquant:bits=2", 0.14),
    ("kivi_star:bits=4", 0.27), ("kivi_star:bits=3", 0.21), ("kivi_star:bits=2", 0.15),
    ("xquant:bits=4,protected=3", 0.27), ("xquant:bits=3,protected=3", 0.21), ("xquant:bits=2,protected=3", 0.15),
    ("xquant:bits=4,outliers=1", 0.27), ("xquant:bits=3,outliers=1", 0.20), ("xquant:bits=2,outliers=1", 0.14),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "cell"), MHA_CELLS)
def test_mha_memory(spec, cell):
    assert round(normalised(spec, LLAMA2_7B), 2) == cell
    # 40 layers dilute the three protected ones; the table prints one column for both models.
    assert abs(normalised(spec, LLAMA2_13B) - cell) < 0.0075


@pytest.mark.parametrize(("spec", "cell"), GQA_CELLS)
def test_gqa_memory(spec, cell):
    assert round(normalised(spec, LLAMA31_8B), 2) == cell


@pytest.mark.parametrize(("bits", "cell"), [(4, 0.27), (3, 0.21), (2, 0.15)])
def test_gqa_cross_layer_memory_prints_without_the_wide_base(bits, cell):
    """The paper counts the base layer like a latent one; stored at full width, as section 3.2 needs
    it, it is twice as large."""
    config = LLAMA31_8B
    stored = normalised(f"xquant_cl:bits={bits}", config)
    extra = 4.25 / 16 / config.num_layers  # a second KV width at 4.25 bits in one of the layers
    assert round(stored - extra, 2) == cell
    assert stored == pytest.approx(normalised(f"xquant:bits={bits},protected=3", config) + extra)
    if bits == 2:
        assert stored == pytest.approx(0.1606, abs=1e-4)


@pytest.mark.parametrize(("bits", "cell"), [(4.33, 0.27), (3.33, 0.21), (2.33, 0.15)])
def test_kvquant_cells_of_table_4(bits, cell):
    assert round(bits / 16, 2) == cell


@pytest.mark.parametrize(
    ("spec", "config", "headline", "true"),
    [
        ("xquant:bits=4", LLAMA2_7B, 7.7, 7.53),
        ("xquant_cl:bits=3", LLAMA2_7B, 10.0, 9.57),
        ("xquant_cl:bits=2", LLAMA2_7B, 12.5, 13.13),
        ("xquant:bits=2,protected=3", LLAMA31_8B, 6.7, 6.56),
    ],
)
def test_headline_factors_are_inverses_of_rounded_cells(spec, config, headline, true):
    share = normalised(spec, config)
    assert round(1 / round(share, 2), 1) == headline
    assert 1 / share == pytest.approx(true, abs=0.01)


def test_bits_per_value():
    assert bits_per_value(parse("xquant:bits=4").layer.build(LLAMA2_7B).storage.codecs["x"]) == 4.25
    key = parse("xquant:bits=2,outliers=1").layer.build(LLAMA31_8B).storage.codecs["k"]
    assert bits_per_value(key) == 2.25 + 16 / 1024


def paper_cost(spec, config, cached):
    """A layer's cost with the bytes per cached token that the paper's equation counts: codes
    alone."""
    return layer_cost(parse(spec).layer, config)._replace(cache_bytes=cached)


def test_longest_length_mha():
    width, bits = 4096, 2
    cost = paper_cost("xquant:bits=2", LLAMA2_7B, bits / 8 * width)
    assert cost.flops == 4 * width**2
    assert cost.weight_bytes == pytest.approx(24 * width**2, rel=0.01)
    rounded = cost._replace(weight_bytes=24 * width**2)
    assert longest_memory_bound(rounded, H100_RIDGE) == pytest.approx(2281, abs=1)


def test_longest_length_gqa():
    """Equation 4 counts the bytes of one latent (40.6K); the text above it those of both, which
    gives 41.6K."""
    width, kv_width, bits = 4096, 1024, 2
    one, two = (paper_cost("xquant:bits=2", LLAMA31_8B, n * bits / 8 * kv_width) for n in (1, 2))
    assert (one.flops, one.weight_bytes) == (4 * kv_width**2, 26 * width**2 + 4 * kv_width**2)
    assert longest_memory_bound(one, H100_RIDGE) == pytest.approx(40627, abs=1)
    assert longest_memory_bound(two, H100_RIDGE) == pytest.approx(41610, abs=1)
    assert longest_memory_bound(one._replace(cache_bytes=one.flops), H100_RIDGE) == float("inf")


def test_stored_bytes_count_scales_and_the_accumulator():
    plain, loop = (
        layer_cost(parse(spec).layer, LLAMA31_8B) for spec in ("xquant:bits=2", "xquant_cl:bits=2")
    )
    assert plain.cache_bytes == 2 * 1024 * 2.25 / 8
    assert loop.cache_bytes == 2048 * 2.25 / 8 + 2 * 4096
    quarter = layer_cost(parse("xquant_cl:bits=2,accumulator=4").layer, LLAMA31_8B)
    assert loop.cache_bytes - quarter.cache_bytes == 1.5 * 4096
    assert (
        loop.weight_bytes
        == layer_cost(parse("kivi").layer, LLAMA31_8B).weight_bytes + 2 * 4096 * 2048
    )


def test_a_steps_two_times_meet_at_the_longest_length():
    cost = step_cost(parse("xquant_cl:bits=2"), LLAMA31_8B)
    assert cost.flops == flops_per_token(parse("xquant_cl:bits=2"), LLAMA31_8B)
    peak, bandwidth = 989e12, 3.35e12
    context = longest_memory_bound(cost, peak / bandwidth)
    assert cost.flops * context / peak == pytest.approx(
        (cost.weight_bytes + cost.cache_bytes * context) / bandwidth
    )
    assert longest_memory_bound(step_cost(parse("kivi"), LLAMA31_8B), 300.0) == float("inf")


def test_operations_per_token():
    context = 131072
    assert flops_per_token(parse("xquant:bits=2"), LLAMA31_8B) * context / 1e12 == pytest.approx(
        17.6, abs=0.05
    )
    cl = parse("xquant_cl:bits=2")
    assert operations(cl.layer, LLAMA31_8B) * 32 * context / 1e12 == pytest.approx(141, abs=0.5)
    # Two layers of latents and one base layer are cheaper than the 32 differences of that figure.
    assert flops_per_token(cl, LLAMA31_8B) * context / 1e12 == pytest.approx(130.8, abs=0.1)
    assert operations(parse("xquant_cl").layer, LLAMA2_7B) == 4 * 4096**2 + 2 * 4096
    assert flops_per_token(parse("kivi"), LLAMA31_8B) == 0


def test_the_ledger_shows_operations_beside_bytes():
    layout = CacheLayout(
        shape=LLAMA31_8B.kv_shape, method=parse("xquant_cl:bits=2"), capacity=4096, dtype="bfloat16"
    )
    book = ledger(jax.eval_shape(lambda: allocate_cache(layout, 1)))
    latent, base, difference = 4 * 1024**2, 4 * 4096 * 1024, 8 * 4096 * 1024
    assert book.layer_flops == (latent, latent, base, *[difference] * 29)
    assert book.to_json()["flops_per_cached_token"] == sum(book.layer_flops)


def test_operations_are_those_of_the_compiled_read():
    """XLA's own count for reading one block, against the formula (matmuls only; the rest is linear
    in the width)."""
    config = dataclasses.replace(LLAMA31_8B, width=256, num_heads=8, num_kv_heads=2, head_dim=32)
    weights = {name: jax.ShapeDtypeStruct((256, 64), "float32") for name in ("k", "v")}
    maps = {
        "down": jax.ShapeDtypeStruct((256, 64), "float32"),
        "up": jax.ShapeDtypeStruct((64, 64), "float32"),
    }
    tokens = jax.ShapeDtypeStruct((1, 512), "int32")
    for spec, fixed, sources in (
        ("xquant:bits=2", {"k": maps, "v": maps}, {"k": 64, "v": 64}),
        ("xquant:bits=2,latent=false", {}, {"x": 256}),
    ):
        layer = parse(spec).layer
        shapes = {
            name: jax.ShapeDtypeStruct((1, 512, width), "float32")
            for name, width in sources.items()
        }
        compiled = (
            jax.jit(layer.build(config).maps.expand).lower(weights, fixed, shapes, tokens).compile()
        )
        counted = compiled.cost_analysis()["flops"]
        assert operations(layer, config) * 512 == pytest.approx(counted, rel=0.1)
