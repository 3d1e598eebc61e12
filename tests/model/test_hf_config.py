"""config.json of published models is read to the right ModelConfig; what is not computed is refused
by name."""

import dataclasses
import json
import math

import pytest
from hf_folders import config_to_hf

from kvqjax import UserError
from kvqjax.model.config import LatentHeads, ModelConfig, RecurrentConfig, RopeConfig
from kvqjax.model.hf_config import parse_config, read_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MISTRAL = {
    **LLAMA,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "num_key_value_heads": 2,
}
QWEN2 = {
    **LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_key_value_heads": 2,
}
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 1024,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0, 3] * 4,
}


def test_llama_without_optional_fields():
    wanted = ModelConfig(
        vocab_size=256,
        width=64,
        mlp_width=160,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        norm_eps=1e-5,
        max_position=4096,
        eos_ids=(2,),
        bos_id=1,
    )
    assert parse_config(LLAMA) == wanted


def test_harmless_fields_are_ignored():
    harmless = {
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0",
        "use_cache": True,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "mlp_bias": False,
        "attention_bias": False,
        "rope_scaling": None,
        "quantization_config": None,
        "auto_map": {"AutoTokenizer": "tok.Tok"},
        "unsloth_fixed": True,
    }
    assert parse_config({**LLAMA, **harmless}) == parse_config(LLAMA)


def test_architecture_follows_from_model_type():
    config = parse_config({**QWEN3, "architectures": None})
    assert (config.architecture, config.qk_norm, config.qkv_bias) == (
        "Qwen3ForCausalLM",
        True,
        False,
    )


def test_families_differ_by_fields():
    assert parse_config(
        {**QWEN2, "attention_bias": True}
    ).qkv_bias  # Qwen2 has these biases whatever the flag says
    assert parse_config(QWEN3).head_dim == 128  # the default of its config class, not 64 / 4
    assert parse_config({**QWEN3, "head_dim": 32}).query_width == 128
    assert parse_config({**LLAMA, "tie_word_embeddings": True}).tied_embeddings


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        (MISTRAL, (4096,) * 4),
        ({**MISTRAL, "sliding_window": None}, (None,) * 4),
        ({**MISTRAL, "sliding_window": 128}, (128,) * 4),
        ({**QWEN2, "sliding_window": 128}, (None,) * 4),
        (
            {**QWEN2, "use_sliding_window": True, "sliding_window": 128, "max_window_layers": 3},
            (None,) * 3 + (128,),
        ),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        (
            {**QWEN3, "use_sliding_window": True, "sliding_window": 8}
            | {"layer_types": ["sliding_attention", "full_attention"] * 2},
            (8, None, 8, None),
        ),
    ],
)
def test_windows(raw, windows):
    assert parse_config(raw).windows == windows


@pytest.mark.parametrize("wrap", ["v4", "v5"])
@pytest.mark.parametrize(
    ("scaling", "wanted"),
    [
        ({"rope_type": "default"}, RopeConfig(theta=5e5)),
        ({"rope_type": "linear", "factor": 2}, RopeConfig(theta=5e5, kind="linear", factor=2.0)),
        (
            LLAMA3,
            RopeConfig(
                theta=5e5,
                kind="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position=1024,
            ),
        ),
        (
            YARN,
            RopeConfig(
                theta=5e5,
                kind="yarn",
                factor=4.0,
                original_max_position=1024,
                attention_factor=0.1 * math.log(4.0) + 1,
            ),
        ),
        (
            {
                "rope_type": "yarn",
                "factor": None,
                "original_max_position_embeddings": 512,
                "attention_factor": 1.25,
            }
            | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
            RopeConfig(
                theta=5e5,
                kind="yarn",
                factor=8.0,
                original_max_position=512,
                attention_factor=1.25,
                beta_fast=16.0,
                beta_slow=2.0,
                truncate=False,
            ),
        ),
    ],
)
def test_rope(wrap, scaling, wanted):
    fields = {"rope_theta": 5e5, "rope_scaling": scaling}
    if wrap == "v5":
        fields = {"rope_parameters": {"rope_theta": 5e5, **scaling}}
    assert parse_config({**LLAMA, **fields}).rope == wanted


def test_rope_of_old_spellings():
    assert (
        parse_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}}).rope.kind
        == "linear"
    )
    beside = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    assert parse_config({**LLAMA, "rope_scaling": beside}).rope.original_max_position == 4096
    outside = {"original_max_position_embeddings": 256, "rope_scaling": YARN}
    assert parse_config({**LLAMA, **outside}).rope.original_max_position == 256


REFUSED = [
    (
        {"architectures": ["GPT2LMHeadModel"]},
        'architectures = ["GPT2LMHeadModel"].*LlamaForCausalLM, Mistral',
    ),
    ({"architectures": ["LlamaModel"]}, 'architectures = ["LlamaModel"]'),
    ({"architectures": None, "model_type": "phi3"}, 'model_type = "phi3"'),
    ({"model_type": "mistral"}, 'model_type = "mistral"'),
    ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
    ({"attention_bias": True}, "attention_bias = true"),
    ({"mlp_bias": True}, "mlp_bias = true"),
    ({"pretraining_tp": 2}, "pretraining_tp = 2"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ({"quantization_config": {"bits": 4}}, 'quantization_config = {"bits": 4}'),
    ({"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "auto_map = "),
    ({"sliding_window": 128}, "sliding_window = 128"),
    ({"layer_types": ["full_attention", "chunked_attention"] * 2}, "layer_types = "),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": 66}, "hidden_size = 66"),
    ({"num_attention_heads": "4"}, 'num_attention_heads = "4"'),
    ({"num_key_value_heads": 3}, "num_kv_heads=3"),
    ({"head_dim": 15}, "head_dim=15"),
    ({"eos_token_id": "x"}, "eos_token_id = "),
    ({"rope_theta": -1.0}, "rope_theta = -1.0"),
    ({"rope_scaling": {"rope_type": "proportional"}}, 'rope_scaling.rope_type = "proportional"'),
    ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.factor is missing"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 0.5}}, "rope_scaling.factor = 0.5"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.short_factor is missing"),
    (
        {"rope_scaling": {**LONGROPE, "long_factor": [1.0]}},
        "rope_scaling.long_factor = [1.0].*a list of 8",
    ),
    (
        {"rope_scaling": {**LONGROPE, "short_factor": [1.0] * 7 + [0]}},
        "rope_scaling.short_factor = 0",
    ),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    (
        {"rope_scaling": {"type": "linear", "mrope_section": [1, 2]}},
        "rope_scaling.mrope_section = [1, 2]",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters.full_attention = ",
    ),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor = 1.0"),
    (
        {"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}},
        "rope_scaling.partial_rotary_factor = 0.5",
    ),
]


@pytest.mark.parametrize(("change", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_refused_by_name_in_one_line(change, text):
    with pytest.raises(UserError) as caught:
        parse_config({**LLAMA, **change})
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert "\n" not in message
    for part in text.split(".*"):
        assert part in message


@pytest.mark.parametrize("raw", [QWEN3, MISTRAL], ids=["qwen3", "mistral"])
def test_output_bias_is_refused_where_it_would_exist(raw):
    with pytest.raises(UserError, match="attention_bias = true"):
        parse_config({**raw, "attention_bias": True})


def test_layer_types_without_a_window_are_refused():
    with pytest.raises(UserError, match="sliding_attention without a sliding window"):
        parse_config({**QWEN2, "layer_types": ["sliding_attention"] * 4})


def test_eos_ids_are_merged_from_generation_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": [2, 5]}))
    assert read_config(tmp_path).eos_ids == (2, 5)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [5, 9], "temperature": 0.6})
    )
    assert read_config(tmp_path).eos_ids == (2, 5, 9)
    assert parse_config({**LLAMA, "eos_token_id": None}).eos_ids == ()


@pytest.mark.parametrize(
    "raw",
    [
        LLAMA,
        {**LLAMA, "rope_scaling": LLAMA3, "rope_theta": 5e5},
        {**LLAMA, "rope_scaling": {**YARN, "truncate": False}},
        {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {**LLAMA, "rope_scaling": LONGROPE},
        {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 3.0}},
        {**MISTRAL, "sliding_window": None},
        {**MISTRAL, "sliding_window": 64},
        {**QWEN2, "use_sliding_window": True, "max_window_layers": 2, "tie_word_embeddings": True},
        QWEN3,
    ],
)
def test_round_trip(raw):
    for length in (None, 1_000_000):
        config = parse_config(raw, rope_length=length)
        assert (
            parse_config(json.loads(json.dumps(config_to_hf(config))), rope_length=length) == config
        )


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (lambda folder: folder / "absent", "no such folder"),
        (lambda folder: folder, "no config.json"),
        (
            lambda folder: (folder / "config.json").write_text("{") and folder,
            "not readable as JSON",
        ),
        (
            lambda folder: (folder / "config.json").write_text("[]") and folder,
            "wanted a JSON object, got list",
        ),
    ],
)
def test_unreadable_folders(prepare, text, tmp_path):
    with pytest.raises(UserError, match=text) as caught:
        read_config(prepare(tmp_path))
    assert "\n" not in str(caught.value)


REACHES = [
    ({}, 2048),
    ({"max_position_embeddings": 512}, 512),
    # The stated length is that before scaling in some configs and the one after it in others.
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
    (
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 2048,
            }
        },
        8192,
    ),
    (
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
        2048,
    ),
    ({"rope_scaling": LLAMA3, "max_position_embeddings": 131072}, 131072),
    ({"rope_scaling": LONGROPE, "max_position_embeddings": 131072}, 131072),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 2048),
]


@pytest.mark.parametrize(("change", "length"), REACHES)
def test_the_length_that_a_model_was_trained_for(change, length):
    assert (
        parse_config({**LLAMA, "max_position_embeddings": 2048, **change}).trained_length == length
    )


def test_a_length_that_was_said_counts_and_a_window_in_every_layer_has_none():
    raw = {
        **LLAMA,
        "max_position_embeddings": 2048,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    }
    assert parse_config(raw, rope_length=5000).trained_length == 5000
    config = parse_config(MISTRAL)
    every, some = (
        dataclasses.replace(config, sliding_window=w)
        for w in (64, (64, *[None] * (config.num_layers - 1)))
    )
    assert every.trained_length is None
    assert some.trained_length == config.max_position
    assert dataclasses.replace(every, query_growth=0.1).trained_length == config.max_position


# --- Families whose config is more than Llama's ---

GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "hidden_size": 64,
    "query_pre_attn_scalar": 24,
    "hidden_act": "gelu_pytorch_tanh",
}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 8,
    "sliding_window": 512,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_hidden_layers": 4, "num_local_experts": 8}


def test_gemma2():
    config = parse_config(GEMMA2)
    assert config.windows == (4096, None, 4096)
    assert (config.scale, config.softcap, config.logit_softcap) == (24**-0.5, 50.0, 30.0)
    assert (config.embedding_scale, config.norm_offset, config.post_norms) == (8.0, 1.0, True)
    assert (config.activation, config.tied_embeddings, config.eos_ids) == ("gelu_tanh", True, (1,))
    # A divisor that is the width of a head is what every other family has.
    assert (
        parse_config(GEMMA2 | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": None}).softcap
        is None
    )
    assert parse_config(GEMMA2 | {"query_pre_attn_scalar": 16}).scale is None


def test_gemma3_in_both_spellings():
    """Version 4 of transformers has one rope and a base beside it, version 5 a rope for each kind
    of layer."""
    config = parse_config(GEMMA3)
    near, far = (
        RopeConfig(theta=1e4),
        RopeConfig(theta=1e6, kind="linear", factor=8.0, original_max_position=16384),
    )
    assert config.rope == (*[near] * 5, far, *[near] * 2)
    assert config.windows == (*[512] * 5, None, *[512] * 2)
    assert config.trained_length == 131072  # the stated length is that after scaling
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (
        8,
        4,
        256,
        262208,
    )
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    later = {**GEMMA3, "rope_scaling": None, "rope_parameters": ropes, "_sliding_window_pattern": 6}
    assert parse_config(later) == config
    types = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2
    assert parse_config(later | {"layer_types": types}) == config
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": GEMMA3 | {"architectures": None},
    }
    assert parse_config(whole | {"vision_config": {}}) == config


def test_gpt_oss():
    config = parse_config(GPT_OSS)
    assert config.windows == (128, None, 128, None)
    assert config.experts.count == 8
    assert (config.experts.width, config.experts.swiglu_limit, config.experts.biases) == (
        2880,
        7.0,
        True,
    )
    assert (config.qkv_bias, config.output_bias, config.score_sinks, config.qk_norm) == (
        True,
        True,
        True,
        False,
    )
    assert (config.rope.kind, config.rope.truncate, config.rope.theta) == ("yarn", False, 150000.0)
    assert config.rope.attention_factor == pytest.approx(0.1 * math.log(32.0) + 1)


LLAMA4 = {"architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 4}


def test_llama4():
    """Three of four layers turn keys and see a chunk; the fourth sees everything, and its queries
    grow."""
    config = parse_config(LLAMA4 | {"interleave_moe_layer_step": 2})
    turned, still = RopeConfig(theta=5e5), RopeConfig(kind="none")
    assert config.rope == (turned, turned, turned, still)
    assert config.windows == (8192, 8192, 8192, None)
    assert config.chunked == config.qk_norm == (True, True, True, False)
    assert (config.query_growth, config.growth_length, config.qk_gain) == (0.1, 8192, False)
    assert (config.mlp_width, config.experts.width, config.experts.shared_width) == (
        16384,
        8192,
        8192,
    )
    assert (config.experts.dense_layers, config.experts.sigmoid, config.experts.shared_gate) == (
        (0, 2),
        True,
        False,
    )
    plain = parse_config(
        LLAMA4 | {"use_qk_norm": False, "attn_temperature_tuning": False, "no_rope_layers": [1] * 4}
    )
    assert (plain.qk_norm, plain.query_growth, plain.rope, plain.chunked) == (
        False,
        0.0,
        turned,
        True,
    )


MISTRAL4 = {"architectures": ["Mistral4ForCausalLM"]}
LATENT_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "llama_4_scaling_beta": 0.1,
}


def test_mistral4():
    """One KV head of a latent and a turned part, whose scores are scaled as those of the heads they
    stand for."""
    config = parse_config(MISTRAL4)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.latent) == (
        32,
        1,
        320,
        256,
    )
    assert config.latent_heads == LatentHeads(query_rank=1024, key_dim=64, value_dim=128)
    assert config.scale == pytest.approx(128**-0.5 * (0.1 * math.log(128) + 1) ** 2)
    assert (config.rope.kind, config.rope.turned_channels(320), config.rope.attention_factor) == (
        "yarn",
        64,
        1.0,
    )
    assert (config.query_growth, config.growth_length, config.trained_length) == (
        0.1,
        None,
        1048576,
    )
    assert config.cached_width == 320
    assert config.dense_layers == ()
    assert (config.experts.count, config.experts.per_token, config.experts.normalised) == (
        128,
        4,
        True,
    )
    assert (config.experts.shared_width, config.experts.shared_gate) == (2048, False)
    first = parse_config(
        MISTRAL4 | {"first_k_dense_replace": 2, "n_shared_experts": 3, "norm_topk_prob": False}
    )
    assert (first.dense_layers, first.experts.shared_width, first.experts.normalised) == (
        (0, 1),
        6144,
        False,
    )
    assert parse_config(MISTRAL4 | {"first_k_dense_replace": 36}).experts is None
    plain = parse_config(MISTRAL4 | {"rope_parameters": LATENT_ROPE | {"attention_factor": 1.0}})
    assert plain.scale == 128**-0.5
    whole = {
        "model_type": "mistral3",
        "text_config": {"model_type": "mistral4"},
        "vision_config": {},
    }
    assert parse_config(whole) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_key_value_heads": 8},
            "num_key_value_heads = 8 is not supported; wanted num_attention_heads=32",
        ),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"kv_lora_rank": 255}, "kv_lora_rank = 255 .* wanted even"),
        ({"rope_interleave": False}, "rope_interleave = false"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5"),
        ({"n_group": 4}, "n_group = 4"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        (
            {"rope_parameters": LATENT_ROPE | {"rope_type": "default"}},
            r'rope_type = "default" .* wanted yarn',
        ),
        (
            {"rope_parameters": LATENT_ROPE | {"partial_rotary_factor": 1.0}},
            "partial_rotary_factor = 1.0 .* wanted 0.5",
        ),
        ({"rope_parameters": LATENT_ROPE}, "mscale is missing; wanted that of mscale_all_dim"),
    ],
)
def test_latents_that_are_not_computed_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        parse_config(MISTRAL4 | fields)


_OWN = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "head_dim": 16}
QWEN3_NEXT = {**QWEN3, **_OWN, "num_experts": 16, "mlp_only_layers": [0]}
QWEN3_5 = {
    **QWEN3,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "head_dim": 16,
}
QWEN3_5_MOE = {
    **QWEN3_NEXT,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
}
QUARTER = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}


def test_qwen3_next():
    """Three of four layers are recurrent; layers of attention turn a quarter of the channels. Sizes
    have defaults."""
    config = parse_config(QWEN3_NEXT)
    assert (config.num_layers, config.depth, config.attention_layers) == (1, 4, (3,))
    wanted = RecurrentConfig(
        layers=(0, 1, 2), key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4
    )
    assert config.recurrent == wanted
    assert config.rope == RopeConfig(fraction=0.25)
    assert (config.output_gate, config.qk_norm, config.norm_offset) == (True, True, 1.0)
    # Counted among all layers.
    assert (config.dense_layers, config.sparse_layers) == (
        (0,),
        (1, 2, 3),
    )
    assert parse_config(QWEN3_NEXT | {"full_attention_interval": 2}).attention_layers == (1, 3)
    types = ["full_attention", "linear_attention", "full_attention", "linear_attention"]
    assert parse_config(QWEN3_NEXT | {"layer_types": types}).recurrent.layers == (1, 3)
    assert parse_config(QWEN3_NEXT | {"layer_types": ["full_attention"] * 4}).recurrent is None


def test_qwen3_5_inside_a_model_of_pictures():
    """Both spellings of the rope, with the sections of pictures."""
    text = {k: v for k, v in QWEN3_5.items() if k != "architectures"}
    rope = {"rope_parameters": QUARTER | {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}}
    nested = {"model_type": "qwen3_5", "text_config": text | rope, "vision_config": {}}
    wanted = parse_config(QWEN3_5 | {"rope_theta": 1e7})
    assert parse_config(nested) == parse_config(QWEN3_5 | rope) == wanted
    assert wanted.experts is None
    assert (
        parse_config(QWEN3_5 | rope | {"attn_output_gate": True, "output_gate_type": "swish"})
        == wanted
    )
    sparse = parse_config(QWEN3_5_MOE).experts
    assert (sparse.count, sparse.shared_width, sparse.normalised, sparse.dense_layers) == (
        16,
        512,
        True,
        (),
    )


QWEN_VL = {k: v for k, v in QWEN3.items() if k not in ("architectures", "model_type")}


@pytest.mark.parametrize("kind", ["mrope", "default"])
def test_text_of_qwen_vl(kind):
    """Fields beside those of the pictures in Qwen2-VL, in a part of their own in Qwen3-VL;
    positions are numbers."""
    rope = {"type": kind, "mrope_section": [2, 3, 3]}
    flat = QWEN_VL | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
    }
    flat |= {"vision_config": {"depth": 2}, "rope_scaling": rope, "rope_theta": 5e5}
    assert parse_config(flat) == parse_config(QWEN2 | {"rope_theta": 5e5})
    nested = {"architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": True}
    text = QWEN_VL | {"model_type": "qwen3_vl_text", "rope_theta": 5e5, "rope_scaling": rope}
    tied = parse_config(QWEN3 | {"rope_theta": 5e5, "tie_word_embeddings": True})
    assert parse_config(nested | {"text_config": text | {"tie_word_embeddings": False}}) == tied
    assert (
        parse_config(
            nested | {"architectures": None, "model_type": "qwen3_vl", "text_config": text}
        )
        == tied
    )


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (GEMMA2 | {"hidden_activation": "gelu"}, 'hidden_activation = "gelu"'),
        (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention = true"),
        (GEMMA2 | {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping = -1.0"),
        (GEMMA2 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
        (GEMMA2 | {"attention_bias": True}, "attention_bias = true"),
        (
            GEMMA3 | {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping = 50.0",
        ),  # transformers passes it over
        (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        (GEMMA3 | {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters = "),
        (LLAMA4 | {"num_experts_per_tok": 2}, "num_experts_per_tok = 2"),
        (LLAMA4 | {"no_rope_layers": [1, 2, 0, 1]}, "no_rope_layers = "),
        (LLAMA4 | {"layer_types": ["sliding_attention"] * 4}, "layer_types = "),
        (LLAMA4 | {"moe_layers": "all"}, 'moe_layers = "all"'),
        (
            LLAMA4 | {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 4},
            "attention_chunk_size is",
        ),
        (GPT_OSS | {"attention_bias": False}, "attention_bias = false"),
        (GPT_OSS | {"swiglu_limit": -7.0}, "swiglu_limit = -7.0"),
        (
            {
                "architectures": ["Qwen3VLForConditionalGeneration"],
                "text_config": {"model_type": "qwen3"},
            },
            'text_config.model_type = "qwen3"',
        ),
        ({"architectures": ["Qwen3VLForConditionalGeneration"]}, "text_config is missing"),
        (QWEN3_NEXT | {"layer_types": ["linear_attention"] * 4}, "there is nothing to cache"),
        (
            QWEN3_NEXT | {"layer_types": ["sliding_attention"] * 4},
            "wanted 4 of full_attention or linear_attention",
        ),
        (QWEN3_NEXT | {"linear_num_value_heads": 24}, "linear_num_value_heads = 24"),
        (QWEN3_NEXT | {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim = 0"),
        (QWEN3_NEXT | {"sliding_window": 64, "use_sliding_window": True}, "sliding_window = 64"),
        (QWEN3_5 | {"attn_output_gate": False}, "attn_output_gate = false"),
        (QWEN3_5 | {"output_gate_type": "sigmoid"}, 'output_gate_type = "sigmoid"'),
        (
            QWEN3_5 | {"rope_parameters": QUARTER | {"partial_rotary_factor": 0.2}},
            "partial_rotary_factor = 0.2",
        ),
        (QWEN3 | {"attn_output_gate": True}, "attn_output_gate = true"),
    ],
)
def test_what_new_families_do_not_have(raw, text):
    with pytest.raises(UserError, match=r"^config\.json: ") as caught:
        parse_config(raw)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "raw",
    [
        GEMMA2,
        GEMMA2 | {"final_logit_softcapping": None},
        GEMMA3,
        GPT_OSS,
        LLAMA4,
        LLAMA4 | {"moe_layers": []},
        QWEN3_NEXT,
        QWEN3_NEXT | {"num_experts": 0},
        QWEN3_5,
        QWEN3_5_MOE,
        QWEN3_5 | {"rope_parameters": QUARTER},
        MISTRAL4,
        MISTRAL4 | {"first_k_dense_replace": 36},
        MISTRAL4 | {"rope_parameters": LATENT_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ],
)
def test_round_trip_of_new_families(raw):
    config = parse_config(raw)
    assert parse_config(json.loads(json.dumps(config_to_hf(config)))) == config
