"""Whatever is written in a spec string, a config.json or a safetensors header: accepted, or refused
in one line."""

import json
import struct

import jax
import pytest
from hf_folders import config_to_hf
from hypothesis import example, given
from hypothesis import strategies as st

import kvqjax as kvq
from kvqjax import METHODS
from kvqjax.cache import CacheLayout, allocate_cache
from kvqjax.model.checkpoint import header_digest, open_checkpoint, sample_digest
from kvqjax.model.config import ModelConfig
from kvqjax.model.hf_config import parse_config

CONFIG = ModelConfig(
    vocab_size=64, width=64, mlp_width=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)
FIELDS = [
    *config_to_hf(CONFIG),
    "architectures",
    "auto_map",
    "layer_types",
    "attention_bias",
    "rope_parameters",
]

numbers = st.integers(-3, 140) | st.sampled_from([10**9, 2**31, 10**30])
words = st.sampled_from(
    ["2", "4", "0.01", "nan", "inf", "none", "true", "exact", "pre", "float32", "published", ""]
)
options = st.sampled_from(
    ["bits", "group", "window", "sinks", "rope", "scales", "outliers", "buffer", "dim", "unit"]
)
pairs = st.builds("{}={}".format, options, numbers.map(str) | words)
methods = st.builds(
    lambda name, given: f"{name}:{','.join(given)}", st.sampled_from([*METHODS]), st.lists(pairs)
)
layers = st.builds(
    "{}={}".format, numbers.map(str) | st.sampled_from(["0-1", "1-0", "--", "0-x"]), methods
)
specs = st.builds(lambda head, rest: ";".join([head, *rest]), methods, st.lists(layers, max_size=2))

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(
    plain, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3)
)


def accepted(action) -> bool:
    """Whether `action` runs; what it refuses, it refuses in one line."""
    try:
        action()
    except kvq.UserError as error:
        refusal = str(error)
    else:
        return True
    assert "\n" not in refusal
    return False


def allocated(text: str) -> None:
    layout = CacheLayout(
        shape=CONFIG.kv_shape, method=kvq.parse(text), capacity=300, dtype="float32"
    )
    jax.eval_shape(lambda: allocate_cache(layout, 1))


@given(specs | st.text(max_size=12))
@example("kivi:bits=2;0-99999999999=exact")
@example("aqua:exact=99999999999")
def test_spec_strings(text):
    accepted(lambda: allocated(text))


@given(st.dictionaries(st.sampled_from(FIELDS), values, min_size=1, max_size=3))
@example({"architectures": [{}]})
@example({"num_hidden_layers": 10**12})
@example({"rope_theta": 10**400})
@example({"rope_scaling": {"rope_type": []}})
@example({"bos_token_id": [1]})
@example({"rope_scaling": {"a\nb": 1}})
def test_configs(change):
    accepted(lambda: hash(parse_config(config_to_hf(CONFIG) | change)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzzed")


def digests(folder) -> None:
    checkpoint = open_checkpoint(folder)
    header_digest(checkpoint), sample_digest(checkpoint)


entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "I8"]) | values,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | values,
        "data_offsets": st.lists(st.integers(-1, 70), min_size=2, max_size=2) | values,
    },
)
headers = st.dictionaries(st.text(max_size=4), entries | values, max_size=3) | values


@given(headers)
@example({"x": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}})
@example({"x": {"dtype": "F32", "shape": [None], "data_offsets": [0, 0]}})
@example({"x": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}})
@example({"\ud800": {"dtype": "I8", "shape": [], "data_offsets": [0, 8]}})
@example({"x": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}})
def test_safetensors_headers(folder, header):
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    accepted(lambda: digests(folder))


@given(st.binary(max_size=80))
@example(struct.pack("<Q", 40000) + b"[" * 40000)
def test_safetensors_bytes(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    accepted(lambda: digests(folder))


def test_the_generators_reach_what_is_accepted():
    assert accepted(lambda: allocated("kivi:bits=2,window=32;0=exact"))
    assert accepted(lambda: parse_config(config_to_hf(CONFIG)))
