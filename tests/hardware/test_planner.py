"""The planner: shipped configs are the published models, bytes are the cache's, limits are the
limits."""

import jax
import pytest
from cases import thinned, with_nightly

import kvqjax as kvq
from kvqjax.cache import CacheLayout, allocate_cache
from kvqjax.cache.layout import stored_form
from kvqjax.hardware.chips import slice_of
from kvqjax.hardware.devices import DEVICES, GIB, GPUS, Device, target_name
from kvqjax.hardware.planner import headroom, largest, parameter_shapes, plan_memory, step_bounds
from kvqjax.hardware.prompts import prompt_operations
from kvqjax.model.loading import KNOWN, config_of
from kvqjax.pallas_kernels.chips import TARGETS
from kvqjax.parallel.mesh_size import MeshSize

# Parameters as the models' publishers count them (tied heads once).
PUBLISHED = {
    "llama-7b": 6_738_415_616, "llama-13b": 13_015_864_320, "llama-30b": 32_528_943_616, "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096, "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "ministral-8b": 8_019_808_256, "mistral-small-3.1-24b": 23_572_403_200, "mixtral-8x7b": 46_702_792_704,
    "qwen1.5-moe-a2.7b": 14_315_784_192, "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2-9b": 9_241_705_984, "gpt-oss-20b": 20_914_757_184,
    "gemma-3-27b": 27_009_346_304, "qwen3-vl-8b": 8_190_735_360, "llama-4-scout": 107_769_861_120,  # language parts
    "qwen3.5-9b": 8_953_803_264, "qwen3.6-27b": 26_895_998_464, "qwen3.6-35b-a3b": 34_660_610_688,  # likewise
    "mistral-small-4-119b": 118_972_826_624,  # the language part; transformers' model of its config class has as many
    "qwen3-next-80b-a3b": 79_674_391_296,  # without the layers that draft tokens
}  # fmt: skip


def test_every_known_config_has_the_published_number_of_parameters():
    assert set(KNOWN) == set(PUBLISHED)
    counted = {
        name: sum(x.size for x in jax.tree.leaves(parameter_shapes(config_of(name))))
        for name in KNOWN
    }
    assert counted == PUBLISHED


def test_names_are_found_by_hub_id_and_misspelt_ones_get_a_hint():
    assert config_of("meta-llama/Llama-3.1-8B") == config_of("llama-3.1-8b")
    assert config_of("demo").vocab_size < 10_000
    with pytest.raises(kvq.UserError, match=r"did you mean 'qwen3-0.6b'"):
        config_of("qwen3-0.5b")


@pytest.mark.parametrize(
    "name",
    with_nightly(
        ["gemma-2-9b", "gemma-3-27b", "gpt-oss-20b", "qwen3-vl-8b", "llama-4-scout"],
        ["gemma-3-27b", "llama-4-scout"],
    ),
)
def test_plans_of_models_with_local_layers_and_parts_of_others(name):
    """From a config alone. Layers that see a window keep a ring of it, whatever the context."""
    config, context = config_of(name), 32768
    found = plan_memory(config, "kivi:bits=4", context, 1, weights="int4")
    exact = plan_memory(config, "exact", context, 1)
    far = sum(window is None for window in config.windows)
    every = 2 * 2 * config.num_layers * config.kv_width * context
    assert exact.cache < 1.1 * every * far / config.num_layers + 2e9
    assert found.cache < 0.35 * exact.cache
    assert found.weights < 0.35 * exact.weights + 4 * config.vocab_size * config.width


@pytest.mark.parametrize(
    ("name", "layers", "heads"),
    thinned(
        [
            ("qwen3.5-9b", (8, 24), 32),
            ("qwen3.6-27b", (16, 48), 48),
            ("qwen3.6-35b-a3b", (10, 30), 32),
            ("qwen3-next-80b-a3b", (12, 36), 32),
        ],
        2,
    ),
)
def test_plans_count_the_states_of_recurrent_layers(name, layers, heads):
    """Layers of attention grow with the context; a state is 128 x 128 numbers a head, and three
    tokens of channels."""
    config = config_of(name)
    assert (config.num_layers, config.depth - config.num_layers) == layers
    state = 4 * layers[1] * (heads * 128 * 128 + 3 * (2 * 16 + heads) * 128)
    short, long = (
        plan_memory(config, "kivi:bits=4", context, 2, weights="int4") for context in (8192, 131072)
    )
    assert short.book.state_bytes == long.book.state_bytes == 2 * state
    # Keys and values of two rows in bfloat16.
    keys = 2 * 2 * layers[0] * config.kv_width * 2 * 131072
    assert 0.25 * keys < long.cache - 2 * state < 0.35 * keys
    parts = plan_memory(config, "kivi:bits=4", 131072, 2, mesh=MeshSize(model=4))
    assert 0.24 * long.cache < parts.cache < 0.3 * long.cache


def test_bytes_are_those_of_the_cache_that_would_be_made():
    config, method = config_of("recall"), kvq.parse("kivi:bits=2,sinks=4")
    found = plan_memory(config, method, 1024, 2, dtype="float32")
    cache = allocate_cache(
        CacheLayout(shape=config.kv_shape, method=method, capacity=1024, dtype="float32"), 2
    )
    assert found.book.bytes == sum(x.nbytes for x in jax.tree.leaves(cache))
    assert found.weights == sum(4 * x.size for x in jax.tree.leaves(parameter_shapes(config)))
    assert found.total == found.weights + found.book.bytes + found.workspace
    assert found.constants == 0


@pytest.mark.parametrize(
    ("spec", "bits"), [("kivi:bits=2,group=128", 2), ("kivi:bits=3", 4), ("exact", 16)]
)
def test_bodies_of_gpus_are_counted_as_they_are_stored_there(spec, bits):
    """Two int4 numbers take a byte; 3 bits are stored as 4."""
    config, context = config_of("llama-3.1-8b"), 131072
    found = plan_memory(config, spec, context, 1, form="heads")
    codes = context * 2 * config.kv_width * config.num_layers * bits // 8
    assert found.cache == found.book.bytes
    # But for window and sinks.
    assert found.book.by_role()["payload"] == pytest.approx(codes, rel=2e-3)
    # A score of every token and head, and no block of keys and values.
    assert 0 < found.workspace < 0.1 * GIB


def test_constants_are_counted():
    """AQUA-KV's linear predictors: bfloat16 matrices for keys from W and values from 2 W, and a
    float32 bias each, in every layer but the first."""
    config = config_of("llama-3.1-8b")
    width, layers = config.kv_width, config.num_layers - 1
    found = plan_memory(config, kvq.parse("aqua"), 4096, 1)
    assert found.constants == layers * (2 * 3 * width * width + 4 * 2 * width)


def test_largest_is_the_edge():
    assert largest(lambda n: n <= 4999, step=10) == 4990
    assert largest(lambda n: False) == 0
    assert largest(lambda n: True, most=77) == 77
    config, method, memory = config_of("llama-3.1-8b"), kvq.parse("kivi:bits=2"), 24 * GIB

    def fits(n):
        return plan_memory(config, method, n, 1).total <= memory

    context = largest(fits, step=1024)
    assert fits(context)
    assert not fits(context + 1024)
    # KIVI-2 at 128K beside bfloat16 weights within 24 GB (DESIGN, section 8).
    assert context > 131072


def test_step_bounds_are_reading_once_and_computing_at_the_peak():
    config, method = config_of("llama-3.1-8b"), kvq.parse("exact")
    found = plan_memory(config, method, 8192, 4)
    reading, computing = step_bounds(found, config, 8192, 4, Device(80, 1000, 100))
    weights = 2 * (8_030_261_248 - 128256 * 4096)
    assert reading == pytest.approx((weights + found.book.bytes) / 1e12, rel=1e-12)
    assert computing == pytest.approx(4 * (weights + 4 * 32 * 4096 * 8192) / 1e14, rel=1e-12)
    more = step_bounds(
        plan_memory(config, kvq.parse("xquant:bits=2"), 8192, 4), config, 8192, 4, DEVICES["h100"]
    )[1]
    less = step_bounds(found, config, 8192, 4, DEVICES["h100"])[1]
    assert (more - less) * 989e12 == pytest.approx(4 * 8192 * 32 * 4 * 1024 * 1024, rel=1e-9)


def test_layers_with_a_window_attend_to_no_more_than_that():
    sliding, full = (config_of(name) for name in ("gemma-2-9b", "llama-3.1-8b"))
    for config, seen in ((sliding, 21 * 4096 + 21 * 65536), (full, 32 * 65536)):
        found = plan_memory(config, "exact", 65536, 1)
        computing = step_bounds(found, config, 65536, 1, Device(80, 1000, 1))[1] * 1e12
        assert computing == pytest.approx(
            2 * found.multiplied + 4 * config.query_width * seen, rel=1e-12
        )


def test_little_room_is_tight():
    """A gibibyte of eighty is what the compiler and gaps between arrays take."""
    found = {
        spare: headroom(int((80 - spare) * GIB), 80 * GIB)
        for spare in (8.0, 4.1, 3.9, 1.0, 0.0, -0.1)
    }
    assert list(found.values()) == ["yes", "yes", "tight", "tight", "tight", "no"]


def test_every_device_has_a_compiler_and_a_target():
    for name, device in DEVICES.items():
        assert target_name(name) in TARGETS
        assert bool(device.torus[0]) != (name in GPUS), name
        expected = (
            "heads" if name in GPUS else "stripes" if target_name(name) == "cpu" else "planes"
        )
        assert stored_form(target_name(name)) == expected, name
        assert slice_of(name, 8).startswith(device.torus[0] or "1x1x8")
    assert {"t4", "l4", "l40s", "a10g", "b200", "v4"} <= set(DEVICES)


@pytest.mark.parametrize(
    ("name", "active"),
    # As their publishers round them: 12.9, 2.7, 3.3 and 22 billion pass one token, the embedding
    # table among them.
    [
        ("mixtral-8x7b", 12.9e9),
        ("qwen1.5-moe-a2.7b", 2.7e9),
        ("qwen3-30b-a3b", 3.3e9),
        ("qwen3-235b-a22b", 22.2e9),
    ],
)
def test_a_step_reads_the_experts_that_a_token_passes_through(name, active):
    config = config_of(name)
    numbers = sum(x.size for x in jax.tree.leaves(parameter_shapes(config)))
    assert numbers - config.idle_numbers == pytest.approx(active, rel=0.02)
    found = plan_memory(config, "kivi:bits=2", 4096, 1)
    reading, _ = step_bounds(found, config, 4096, 1, Device(80, 1, 1))
    table = config.vocab_size * config.width
    wanted = 2 * (numbers - config.idle_numbers - table) + found.constants + found.cache
    assert reading == pytest.approx(wanted / 1e9)
    layers = sum(x.size for x in jax.tree.leaves(parameter_shapes(config)["layers"]))
    # A prompt of one token attends to that token.
    itself = 4 * config.query_width * config.num_layers
    assert prompt_operations(config, 0, 1) == 2 * (layers - config.idle_numbers + table) + itself
    per_layer = 2 * config.width * (config.query_width + config.kv_width) + config.mlp_numbers
    assert per_layer * config.num_layers == pytest.approx(
        numbers - config.idle_numbers - 2 * table, rel=1e-3
    )


def test_experts_on_a_mesh():
    """Qwen3-235B in bfloat16 is 438 GiB: each of 8 devices holds an eighth of all that is split."""
    config = config_of("qwen3-235b-a22b")
    alone, spread = (plan_memory(config, "kivi:bits=2", 4096, 1, MeshSize(model=n)) for n in (1, 8))
    assert alone.weights / GIB == pytest.approx(438, abs=1)
    assert spread.weights == pytest.approx(alone.weights / 8, rel=0.01)
    with pytest.raises(kvq.UserError, match="mesh model=3 must divide 64 heads and 128 experts"):
        plan_memory(config, "exact", 4096, 1, MeshSize(model=3))
