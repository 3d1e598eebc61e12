"""Folders that tests and benchmarks write: every family with every kind of rope is read back as it
was."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import with_nightly
from checkpoints import random_params
from hf_folders import config_to_hf, save_params

from kvqjax import UserError, load
from kvqjax.model.config import ModelConfig, RopeConfig
from kvqjax.model.decoder import logits
from kvqjax.model.hf_config import parse_config
from kvqjax.model.hf_families import FAMILIES

LENGTH, ORIGINAL = 72, 32  # tokens of a text, and of those before scaling
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 56,
    "intermediate_size_mlp": 56,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
    "sliding_window_pattern": 2,
}
LATENTS = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
SCALED = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": SCALED | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": SCALED | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
    "dynamic": {"factor": 3.0},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
}


def raw_of(architecture: str, kind: str, turned: int) -> dict:
    """A small config.json. `turned` channels of a head turn."""
    family = FAMILIES[architecture]
    rope = {"rope_type": kind, "rope_theta": 500.0} | KINDS[kind]
    if kind == "longrope":
        factors = np.linspace(1, 2, turned // 2)
        rope |= {"short_factor": factors.tolist(), "long_factor": (2 * factors).tolist()}
    if family.query_growth:
        before = SIZES["max_position_embeddings"] if kind == "dynamic" else ORIGINAL
        rope |= {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": before}
    if family.latent and kind == "yarn":
        rope |= {"mscale": 0.7, "mscale_all_dim": 0.7}
    if family.rope_by_type:
        rope = {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
        }
    sizes = SIZES | (LATENTS if family.latent else {})
    return sizes | {"architectures": [architecture], "rope_parameters": rope}


def config_of(architecture: str, kind: str) -> ModelConfig:
    turned = 4 if FAMILIES[architecture].recurrent else 16
    return parse_config(raw_of(architecture, kind, turned), rope_length=LENGTH)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    with_nightly(
        itertools.product(FAMILIES, KINDS),
        [(name, "yarn") for name in FAMILIES] + [("LlamaForCausalLM", kind) for kind in KINDS],
    ),
)
def test_every_family_with_every_rope_is_read_back(architecture, kind):
    if FAMILIES[architecture].latent and kind != "yarn":
        with pytest.raises(UserError, match="wanted yarn"):
            config_of(architecture, kind)
        return
    config = config_of(architecture, kind)
    assert {rope.kind for rope in config.ropes} >= {kind}
    raw = config_to_hf(config)
    for written in (raw, json.loads(json.dumps(raw))):
        assert parse_config(written, rope_length=LENGTH) == config


def test_factors_of_longrope_are_read_from_tuples():
    raw = raw_of("LlamaForCausalLM", "longrope", 16)
    rope = {
        name: tuple(x) if isinstance(x, list) else x for name, x in raw["rope_parameters"].items()
    }
    assert parse_config(raw | {"rope_parameters": rope}) == parse_config(raw)


@pytest.mark.parametrize(
    "change", [{"original_max_position_embeddings": None}, {"rope_type": "dynamic", "factor": 2.0}]
)
def test_queries_that_grow_want_the_length_from_which_they_do(change):
    """Where the rope is not scaled from a length, that of the queries is asked for all the same."""
    raw = raw_of("Ministral3ForCausalLM", "default", 16)
    with pytest.raises(UserError, match="original_max_position_embeddings"):
        parse_config(raw | {"rope_parameters": raw["rope_parameters"] | change})


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": (RopeConfig(), RopeConfig(theta=5.0), RopeConfig(), RopeConfig())},
        {"qk_norm": True},
        {"softcap": 2.0},
        {"sliding_window": (8, None, 8, None)},
    ],
)
def test_what_the_fields_of_a_family_cannot_say_is_one_line(changes):
    config = dataclasses.replace(config_of("LlamaForCausalLM", "default"), **changes)
    with pytest.raises(UserError, match=f"config.json.*{next(iter(changes))}") as caught:
        config_to_hf(config)
    assert "\n" not in str(caught.value)


# A kind of rope each, and the families whose config class has a rope of its own where config.json
# says nothing.
READ_BY_TRANSFORMERS = [("LlamaForCausalLM", kind) for kind in KINDS] + [
    ("GptOssForCausalLM", "default"),
    ("Ministral3ForCausalLM", "default"),
    ("Gemma3ForCausalLM", "default"),
    ("Qwen3NextForCausalLM", "default"),
]
READ_BY_DAY = [("LlamaForCausalLM", "longrope")]


@pytest.mark.parametrize(("architecture", "kind"), with_nightly(READ_BY_TRANSFORMERS, READ_BY_DAY))
def test_transformers_computes_the_same_of_a_folder(architecture, kind, tmp_path):
    torch = pytest.importorskip("torch", reason="the reference implementation: pip install torch")
    transformers = pytest.importorskip("transformers")
    config = config_of(architecture, kind)
    params = jax.tree.map(lambda leaf: 0.2 * leaf, random_params(config))
    save_params(Path(tmp_path), params, config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    text = np.random.default_rng(2).integers(0, config.vocab_size, (1, LENGTH), dtype=np.int32)
    with torch.no_grad():
        wanted = theirs(torch.tensor(text, dtype=torch.long)).logits.numpy()
    ours = load(tmp_path, dtype="f32", rope_length=LENGTH)
    assert ours.config == config
    computed = np.asarray(logits(ours.params, jnp.asarray(text), ours.config))
    np.testing.assert_allclose(computed, wanted, rtol=0, atol=2e-4 * np.abs(wanted).max())


def test_shapes_of_a_config_are_made_once():
    """To check one takes a tenth of a millisecond, and a step without jit asks for dozens."""
    config = config_of("Gemma3ForCausalLM", "default")
    assert config.kv_shape is config.kv_shape
    assert config.kv_shape.alone is config.kv_shape.alone
    assert config.layer(0) is config.layer(2)
    assert config.layer(0).window != config.layer(1).window
