"""Logits equal those of transformers' torch models on small random checkpoints that transformers
wrote itself."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from cases import thinned, with_nightly
from checkpoints import edit
from hf_folders import save_params

torch = pytest.importorskip(
    "torch", reason="parity needs torch (pip install torch), the reference implementation"
)

import transformers  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

import kvqjax as kvq  # noqa: E402
from kvqjax import UserError, load  # noqa: E402
from kvqjax.calibrate.xquant import prepared  # noqa: E402
from kvqjax.model import weights  # noqa: E402
from kvqjax.model.checkpoint import decode_slice, find_weight, open_checkpoint  # noqa: E402
from kvqjax.model.config import RopeConfig  # noqa: E402
from kvqjax.model.decoder import logits  # noqa: E402
from kvqjax.model.hf_config import Scheme  # noqa: E402

# The language models that AutoModelForCausalLM of transformers 5.24 does not list, by their model
# type.
UNLISTED = {"mistral4": transformers.Mistral4ForCausalLM}

LENGTH = 72  # longer than every original_max_position_embeddings and sliding window below
TOLERANCE = 2e-4
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
MHA, GQA = {"num_key_value_heads": 4}, {"num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
RATIOS = {"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5}
SLIDING = {"use_sliding_window": True, "sliding_window": 20}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 40}
MINISTRAL3 = {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}

LATENTS = {
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
MISTRAL4 = {
    **MHA,
    **LATENTS,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
MISTRAL4 |= {
    "rope_parameters": {**MINISTRAL3, "llama_4_scaling_beta": 0.5, "partial_rotary_factor": 8 / 18}
}
GEMMA = {
    **GQA,
    "head_dim": 16,
    "sliding_window": 20,
    "query_pre_attn_scalar": 12,
    "bos_token_id": 5,
    "eos_token_id": 6,
}
LLAMA4 = {
    **GQA,
    "head_dim": 16,
    "num_local_experts": 4,
    "intermediate_size_mlp": 40,
    "attention_chunk_size": 16,
}
LLAMA4 |= {"bos_token_id": 5, "eos_token_id": 6}
DELTA = {**GQA, "head_dim": 16, "num_hidden_layers": 4, "full_attention_interval": 2}
DELTA |= {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
MIXED = [_SLIDING, _FULL, _SLIDING]
FAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
NEAR = {"rope_type": "default", "rope_theta": 100.0}

# name: (model type, fields, what must change the logits when it is taken from our config: proof
# that it is exercised)
MODELS = {
    "llama-mha": ("llama", MHA, None),
    "llama-gqa-tied": ("llama", {**GQA, "tie_word_embeddings": True}, None),
    "llama-mqa-head-dim-given": ("llama", {"num_key_value_heads": 1, "head_dim": 12}, None),
    "llama3": ("llama", {**GQA, "rope_parameters": LLAMA3}, "rope"),
    "llama-linear": (
        "llama",
        {**GQA, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        "rope",
    ),
    "llama-yarn-given-factor": (
        "llama",
        {**GQA, "rope_parameters": {**YARN, "attention_factor": 1.5}},
        "rope",
    ),
    "mistral-full": ("mistral", {**GQA, "sliding_window": None}, None),
    "mistral-sliding": ("mistral", {**GQA, "sliding_window": 20}, "sliding_window"),
    "mistral-head-dim-given": ("mistral", {**GQA, "head_dim": 16, "sliding_window": None}, None),
    "qwen2": ("qwen2", GQA, None),
    "qwen2-tied-yarn": (
        "qwen2",
        {**GQA, "rope_parameters": YARN, "tie_word_embeddings": True},
        "rope",
    ),
    "qwen2-yarn-mscale": (
        "qwen2",
        {**GQA, "rope_parameters": {**YARN, **RATIOS, "truncate": False}},
        "rope",
    ),
    "qwen2-upper-layers-slide": (
        "qwen2",
        {**GQA, **SLIDING, "max_window_layers": 1},
        "sliding_window",
    ),
    "qwen3": ("qwen3", {**GQA, "head_dim": 16}, None),
    "qwen3-tied-layer-types": (
        "qwen3",
        {
            **MHA,
            **SLIDING,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "sliding_window",
    ),
    "qwen3-linear": (
        "qwen3",
        {**GQA, "head_dim": 16, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        "rope",
    ),
    "qwen3-llama3": ("qwen3", {**GQA, "head_dim": 16, "rope_parameters": LLAMA3}, "rope"),
    "qwen3-yarn": ("qwen3", {**GQA, "head_dim": 16, "rope_parameters": YARN}, "rope"),
    "mixtral": ("mixtral", {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2}, None),
    "mixtral-sliding": (
        "mixtral",
        {**GQA, "num_local_experts": 4, "sliding_window": 20},
        "sliding_window",
    ),
    "qwen2-moe": ("qwen2_moe", {**GQA, **SHARED}, None),
    "qwen2-moe-dense-among-sparse": (
        "qwen2_moe",
        {**GQA, **SHARED, "mlp_only_layers": [1], "norm_topk_prob": True},
        None,
    ),
    "qwen2-moe-every-other-slides": (
        "qwen2_moe",
        {**GQA, **SHARED, **SLIDING, "max_window_layers": 3},
        "sliding_window",
    ),
    "qwen3-moe": ("qwen3_moe", {**GQA, **EXPERTS, "head_dim": 16, "norm_topk_prob": True}, None),
    "qwen3-moe-step-2-tied": (
        "qwen3_moe",
        {**GQA, **EXPERTS, "head_dim": 16, "decoder_sparse_step": 2, "tie_word_embeddings": True},
        None,
    ),
    "ministral-mixed": (
        "ministral",
        {
            **GQA,
            "head_dim": 8,
            "sliding_window": 20,
            "layer_types": ["full_attention", *2 * ["sliding_attention"]],
        },
        "sliding_window",
    ),
    "ministral3": (
        "ministral3",
        {**GQA, "head_dim": 16, "rope_parameters": {**MINISTRAL3, "llama_4_scaling_beta": 0.5}},
        "query_growth",
    ),
    "mistral4": (
        "mistral4",
        {**MISTRAL4, "first_k_dense_replace": 1, "n_shared_experts": 2},
        "query_growth",
    ),
    "mistral4-without-yarn's-factor": (
        "mistral4",
        {
            **MISTRAL4,
            "norm_topk_prob": False,
            "rope_parameters": MISTRAL4["rope_parameters"] | {"factor": 1.0},
        },
        None,
    ),
    "gemma2": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        "softcap",
    ),
    "gemma3": (
        "gemma3_text",
        GEMMA | {"layer_types": MIXED, "rope_parameters": {_FULL: FAR, _SLIDING: NEAR}},
        "rope",
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            **GQA,
            "head_dim": 16,
            "sliding_window": 20,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.5,
            "rope_parameters": {**YARN, "truncate": False},
        },
        "rope",
    ),
    "llama4": (
        "llama4_text",
        {
            **LLAMA4,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "floor_scale": 8,
            "attn_scale": 0.5,
            "rope_parameters": {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
        },
        "chunked",
    ),
    "llama4-without-norms": (
        "llama4_text",
        {
            **LLAMA4,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "no_rope_layer_interval": 3,
        },
        "chunked",
    ),
    "qwen3-next": ("qwen3_next", {**DELTA, **SHARED, "mlp_only_layers": [1]}, "rope"),
    "qwen3.5": (
        "qwen3_5_text",
        {**DELTA, "layer_types": ["linear_attention", _FULL, _FULL, "linear_attention"]},
        "rope",
    ),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**DELTA, **SHARED}, "rope"),
    "qwen3.5-yarn": (
        "qwen3_5_text",
        {**DELTA, "rope_parameters": {**YARN, "partial_rotary_factor": 0.25}},
        "rope",
    ),
    "qwen3.5-moe-linear": (
        "qwen3_5_moe_text",
        {**DELTA, **SHARED, "rope_parameters": {**FAR, "partial_rotary_factor": 0.5}},
        "rope",
    ),
    "qwen3-next-llama3": (
        "qwen3_next",
        {**DELTA, **SHARED, "rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.5}},
        "rope",
    ),
}

# Each has parts that no other family has.
NEWEST = (
    "mistral4",
    "gemma2",
    "gemma3",
    "gpt-oss",
    "llama4",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
    "qwen3.5-yarn",
)

FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.0, 5.0, 9.0]}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "original_max_position_embeddings": 48,
    **FACTORS,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}
BY_LENGTH = {  # (model type, fields)
    "llama-longrope": ("llama", {**GQA, "rope_parameters": LONGROPE}),
    "qwen3-longrope-given-factor": (
        "qwen3",
        {**GQA, "head_dim": 8, "rope_parameters": {**LONGROPE, "factor": 3.0}},
    ),
    "mistral-longrope-given-attention-factor": (
        "mistral",
        {**GQA, "sliding_window": None, "rope_parameters": {**LONGROPE, "attention_factor": 1.4}},
    ),
    "qwen3-dynamic": (
        "qwen3",
        {**GQA, "head_dim": 8, "rope_parameters": DYNAMIC, "max_position_embeddings": 48},
    ),
    "qwen3.5-longrope": (
        "qwen3_5_text",
        {**DELTA, "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.5}},
    ),
    "llama-dynamic": ("llama", {**GQA, "rope_parameters": DYNAMIC, "max_position_embeddings": 48}),
}


def randomise(model: torch.nn.Module):
    """Weights of unit gain, norms far from one, biases larger than what they are added to: no name
    can hide."""
    generator = torch.Generator().manual_seed(7)
    # Gains of two and three a layer would make of float32's last digit the fourth of a logit.
    centred = type(model).__name__.startswith(("Qwen3Next", "Qwen3_5"))
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("bias"):
            weight.data = 3 * noise
        elif "norm" in name:
            weight.data = 0.4 * noise + (0 if centred and "linear_attn" not in name else 1)
        elif "embed" in name:
            weight.data = noise
        else:
            weight.data = noise * weight.shape[-1] ** -0.5


def write(folder, kind: str, fields: dict, dtype=torch.float32, **saving):
    config = transformers.AutoConfig.for_model(kind, **(SIZES | fields))
    make = (
        UNLISTED[kind]._from_config
        if kind in UNLISTED
        else transformers.AutoModelForCausalLM.from_config
    )
    model = make(config, attn_implementation="eager", dtype=dtype).eval()
    randomise(model)
    model.to(dtype).save_pretrained(folder, **saving)
    # Read back: a cast of the live model would round its rotary frequencies too.
    return read_back(folder) if saving or dtype != torch.float32 else model


def read_back(folder):
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    language_model = UNLISTED.get(kind, transformers.AutoModelForCausalLM)
    return language_model.from_pretrained(folder, dtype="float32", attn_implementation="eager")


def tokens() -> np.ndarray:
    return np.random.default_rng(3).integers(0, SIZES["vocab_size"], (2, LENGTH)).astype(np.int32)


def reference(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens(), dtype=torch.long)).logits.numpy()


PLAIN = jax.jit(logits, static_argnums=2)
STEP = jax.jit(kvq.forward)


def ours(model, **changes) -> np.ndarray:
    config = dataclasses.replace(model.config, **changes)
    return np.asarray(PLAIN(model.params, tokens(), config))


# A model of each way of computing; the others add fields.
BY_DAY = ("qwen3-llama3", "mistral4", "gemma3", "gpt-oss", "qwen3-next")


@pytest.mark.parametrize("name", with_nightly(MODELS, BY_DAY))
def test_logits_equal_torch(name, tmp_path):
    kind, fields, exercised = MODELS[name]
    wanted = reference(write(tmp_path, kind, fields))
    model = load(tmp_path, dtype="f32")
    assert np.std(wanted) > 0.3
    np.testing.assert_allclose(ours(model), wanted, rtol=0, atol=TOLERANCE)
    neutral = {
        "rope": RopeConfig(),
        "sliding_window": None,
        "query_growth": 0.0,
        "softcap": None,
        "chunked": False,
    }
    if isinstance(model.config.rope, RopeConfig):
        neutral["rope"] = RopeConfig(theta=model.config.rope.theta)
    if exercised:
        broken = ours(model, **{exercised: neutral[exercised]})
        assert np.abs(broken - wanted)[:, -8:].max() > 100 * TOLERANCE


@pytest.mark.nightly
def test_latents_are_written_on_as_torch_does(tmp_path):
    """Greedy text of a model whose cache holds latents."""
    theirs, prompt = write(tmp_path, *MODELS["mistral4"][:2]), tokens()[0, :40].tolist()
    row, margins = torch.tensor([prompt]), []
    for _ in range(24):
        with torch.no_grad():
            best = theirs(row).logits[0, -1].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        row = torch.cat([row, best.indices[None, :1]], 1)
    assert min(margins) > 10 * TOLERANCE, "a tie would make this comparison meaningless"
    model = load(tmp_path, dtype="f32")
    made = kvq.generate(model, [prompt], "exact", max_new_tokens=24, eos_ids=()).tokens
    assert made == [row[0, 40:].tolist()]


@pytest.mark.parametrize(
    "name", thinned(with_nightly(BY_LENGTH, ["llama-longrope", "qwen3-dynamic"]), 2)
)
def test_rope_by_length(name, tmp_path):
    """Texts up to the length before scaling, and longer ones under the length that was said."""
    kind, fields = BY_LENGTH[name]
    theirs, text, found = write(tmp_path, kind, fields), tokens(), {}
    for length, rope_length in ((40, None), (LENGTH, LENGTH)):
        model = load(tmp_path, dtype="f32", rope_length=rope_length)
        with torch.no_grad():
            wanted = theirs(torch.tensor(text[:, :length], dtype=torch.long)).logits.numpy()
        found[length] = np.asarray(PLAIN(model.params, text[:, :length], model.config))
        np.testing.assert_allclose(found[length], wanted, rtol=0, atol=TOLERANCE)
    # The two are told apart.
    assert np.abs(found[LENGTH][:, :40] - found[40]).max() > 100 * TOLERANCE
    save_params(tmp_path / "ours", model.params, model.config)
    assert load(tmp_path / "ours", dtype="f32", rope_length=LENGTH).config == model.config


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [pytest.param("qwen3-longrope-given-factor", marks=pytest.mark.nightly), "llama-dynamic"],
)
def test_rope_by_length_of_caches(name, tmp_path):
    """Keys cached after RoPE, before it, and layer inputs, in two steps; nothing longer than what
    was said."""
    kind, fields = BY_LENGTH[name]
    wanted, text = reference(write(tmp_path, kind, fields)), tokens()
    model, half = load(tmp_path, dtype="f32", rope_length=LENGTH), LENGTH // 2
    for method in ("exact", "kivi_star:bits=8,window=32", "xquant:bits=8,group=32"):
        ready = prepared(model, kvq.parse(method)) if method.startswith("xquant") else model
        cache = kvq.init_cache(ready, method, 2, LENGTH)
        for part in (text[:, :half], text[:, half:]):
            out, cache = STEP(ready, part, np.full(2, half, np.int32), cache)
        apart = np.abs(out - wanted[:, half:]).max()
        assert apart < (TOLERANCE if method == "exact" else 0.2 * np.std(wanted)), method
    short, said = (
        load(tmp_path, dtype="f32"),
        r"more than the 48 that .* RoPE are for; load it with rope_length=\d+",
    )
    for refused in (
        lambda: kvq.init_cache(short, "exact", 1, 49),
        lambda: PLAIN(short.params, text, short.config),
    ):
        with pytest.raises(UserError, match=said):
            refused()
    with pytest.raises(UserError, match="rope_length=0; it must be a whole number of at least 1"):
        load(tmp_path, rope_length=0)


@pytest.mark.parametrize("kind", with_nightly(["mixtral", "qwen2_moe", "qwen3_moe"], ["mixtral"]))
def test_fused_experts(kind, tmp_path):
    """Newer releases of transformers may save one tensor for all experts of a layer."""
    fields = (
        MODELS["mixtral"][1] if kind == "mixtral" else {**GQA, **SHARED, "mlp_only_layers": [1]}
    )
    theirs = write(tmp_path, kind, fields, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    np.testing.assert_allclose(
        ours(load(tmp_path, dtype="f32")), reference(theirs), rtol=0, atol=TOLERANCE
    )


def test_sharded_checkpoint(tmp_path):
    wanted = reference(write(tmp_path, "llama", GQA, max_shard_size="20KB"))
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    np.testing.assert_allclose(ours(load(tmp_path, dtype="f32")), wanted, rtol=0, atol=TOLERANCE)


def test_bfloat16_checkpoint(tmp_path):
    wanted = reference(write(tmp_path, "qwen2", GQA, dtype=torch.bfloat16))
    model = load(tmp_path, dtype="f32")
    np.testing.assert_allclose(ours(model), wanted, rtol=0, atol=TOLERANCE)
    kept = load(tmp_path, dtype="bf16")
    same = jax.tree.map(
        lambda a, b: bool((a.astype(b.dtype) == b).all()), kept.params, model.params
    )
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize(
    "name", ["llama3", "llama-linear", "qwen2-tied-yarn", "qwen2-yarn-mscale", "llama-mha"]
)
def test_both_spellings_of_rope_are_one_config(name, tmp_path):
    """transformers 5 writes rope_parameters; the same checkpoint in version 4's spelling is the
    same model."""
    kind, fields, _ = MODELS[name]
    write(tmp_path, kind, fields)
    config, file = load(tmp_path).config, tmp_path / "config.json"
    raw = json.loads(file.read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = (
        None if rope["rope_type"] == "default" else rope | {"type": rope.pop("rope_type")}
    )
    file.write_text(json.dumps(raw))
    assert load(tmp_path).config == config
    assert (
        transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"]
        == config.rope.theta
    )


@pytest.mark.parametrize(
    "name", with_nightly(["qwen3-tied-layer-types", *NEWEST], ["gpt-oss", "qwen3.5-moe"])
)
def test_saved_params_are_read_by_transformers(name, tmp_path):
    kind, fields, _ = MODELS[name]
    wanted = reference(write(tmp_path / "theirs", kind, fields))
    model = load(tmp_path / "theirs", dtype="f32")
    save_params(tmp_path / "ours", model.params, model.config)
    np.testing.assert_array_equal(reference(read_back(tmp_path / "ours")), wanted)
    assert load(tmp_path / "ours").config == model.config


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["qwen3-next", pytest.param("qwen3.5", marks=pytest.mark.nightly)])
def test_packed_rows_as_codes_and_in_a_list(name, tmp_path):
    """Parameters that share a tensor: as stacks, as a list, in FP8, as integers; layers that draft
    tokens are left."""
    kind, fields, _ = MODELS[name]
    wanted = reference(write(tmp_path, kind, fields))
    edit(tmp_path, lambda tensors: tensors.update({"mtp.norm.weight": np.ones(32, np.float32)}))
    stacks, apart = (load(tmp_path, dtype="f32", layers=layers) for layers in ("scan", "unroll"))
    assert stacks.weights == apart.weights == "float32"
    np.testing.assert_allclose(ours(apart), wanted, rtol=0, atol=TOLERANCE)
    coded = load(tmp_path, dtype="f32", weights="int8")
    assert coded.weights == "int8"
    assert np.abs(ours(coded) - wanted).mean() < 0.1 * np.std(wanted)
    for gate in ("delta_a", "delta_b"):  # what decides how much is kept stays as it is
        np.testing.assert_array_equal(
            coded.params["layers"][gate].stack, stacks.params["layers"][gate].stack
        )

    def packed(tensors):
        for key in [
            key
            for key, x in tensors.items()
            if x.ndim == 2 and ("self_attn" in key or "linear_attn" in key)
        ]:
            scale = np.asarray(
                np.random.default_rng(1).uniform(
                    0.5, 2, [-(-size // 8) for size in tensors[key].shape]
                )
            )
            tensors[key] = tensors[key].astype(ml_dtypes.float8_e4m3fn)
            tensors[key.removesuffix(".weight") + ".weight_scale_inv"] = scale.astype(np.float32)
        written.update(tensors)

    written: dict = {}
    edit(tmp_path, packed)
    file = tmp_path / "config.json"
    scheme = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": scheme}))
    decoded = load(tmp_path, dtype="f32")

    def whole(name: str) -> np.ndarray:
        """One matrix of the checkpoint, decoded as it is written."""
        codes, scale = (
            written[f"{name}.{part}"].astype(np.float32) for part in ("weight", "weight_scale_inv")
        )
        return codes * np.repeat(np.repeat(scale, 8, 0), 8, 1)[: codes.shape[0], : codes.shape[1]]

    layer = decoded.config.attention_layers[0]
    q = whole(f"model.layers.{layer}.self_attn.q_proj").reshape(4, 2, 16, 32)
    gate = decoded.params["layers"]["q_gate"].stack[0].T.reshape(4, 16, 32)
    np.testing.assert_array_equal(gate, q[:, 1])
    # Four channels turn: two pairs at the front of the halves.
    turned = [
        0,
        1,
        *range(4, 10),
        2,
        3,
        *range(10, 16),
    ]
    np.testing.assert_array_equal(
        decoded.params["layers"]["q"].stack[0].T.reshape(4, 16, 32), q[:, 0, turned]
    )


def mistral3(folder, kind: str, rope: dict):
    """A checkpoint of pictures and text, as Mistral Small and Ministral 3 are published."""
    text = (
        SIZES
        | GQA
        | {"head_dim": 16, "model_type": kind, "sliding_window": None, "tie_word_embeddings": False}
        | rope
    )
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
    }
    vision |= {"num_attention_heads": 1, "image_size": 28, "patch_size": 14, "head_dim": 16}
    config = transformers.AutoConfig.for_model(
        "mistral3",
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_index=95,
    )
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "rope", "architecture"),
    [
        pytest.param("mistral", {}, "MistralForCausalLM", marks=pytest.mark.nightly),
        pytest.param(
            "ministral3",
            {"rope_parameters": {**MINISTRAL3, "llama_4_scaling_beta": 0.5}},
            "Ministral3ForCausalLM",
            marks=pytest.mark.nightly,
        ),
        ("mistral4", MISTRAL4 | {"head_dim": 18}, "Mistral4ForCausalLM"),
    ],
)
def test_language_part_of_a_checkpoint_with_a_vision_part(kind, rope, architecture, tmp_path):
    theirs = mistral3(tmp_path, kind, rope)
    with pytest.raises(
        UserError,
        match=r"tensor '\S*multi_modal_projector\S*' is of the vision part .*text_only=True",
    ):
        load(tmp_path)
    model = load(tmp_path, dtype="f32", text_only=True)
    assert model.config.architecture == architecture
    ids = tokens() % 95  # the last token stands for a picture
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(ids, dtype=torch.long)).logits.numpy()
    got = jax.jit(logits, static_argnames="config")(model.params, ids, config=model.config)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE)


SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
}
QWEN3_5_VISION = {**QWEN_VISION, "num_position_embeddings": 16}
DEEP = {**QWEN_VISION, "deepstack_visual_indexes": [0]}
QUARTER = {
    **SECTIONS,
    "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
    "partial_rotary_factor": 0.25,
}
SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
WIDE = {**GQA, "head_dim": 16}
# model type: (class, fields of the language part, of the vision part, of the whole, the language
# part's architecture)
PICTURES = {
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {**GQA, "rope_parameters": {**SECTIONS, "mrope_section": [1, 1, 2]}},
        {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
        {},
        "Qwen2ForCausalLM",
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {**GQA, "rope_parameters": {**SECTIONS, "mrope_section": [1, 1, 2]}},
        QWEN_VISION,
        {"tie_word_embeddings": True},
        "Qwen2ForCausalLM",
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {**WIDE, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}},
        DEEP,
        {"tie_word_embeddings": True},
        "Qwen3ForCausalLM",
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            **WIDE,
            **EXPERTS,
            "mlp_only_layers": [1],
            "rope_parameters": {**SECTIONS, "mrope_interleaved": True},
        },
        DEEP,
        {},
        "Qwen3MoeForCausalLM",
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {**DELTA, "rope_parameters": QUARTER},
        QWEN3_5_VISION,
        {},
        "Qwen3_5ForCausalLM",
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        {**DELTA, **SHARED, "rope_parameters": QUARTER},
        QWEN3_5_VISION,
        {},
        "Qwen3_5MoeForCausalLM",
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        LLAMA4,
        {
            **SIGLIP,
            "image_size": 28,
            "patch_size": 14,
            "vision_output_dim": 16,
            "intermediate_size": 32,
        }
        | {"projector_input_dim": 16, "projector_output_dim": 16},
        {},
        "Llama4ForCausalLM",
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        GEMMA | {"layer_types": MIXED},
        SIGLIP | {"image_size": 28, "patch_size": 14},
        {"mm_tokens_per_image": 4},
        "Gemma3ForCausalLM",
    ),
}


def pictures(folder, kind: str):
    """A checkpoint of pictures and text with random weights, as transformers writes it."""
    name, text, vision, whole, _ = PICTURES[kind]
    text = SIZES | {"bos_token_id": 1, "eos_token_id": 2} | text
    config = transformers.AutoConfig.for_model(
        kind, text_config=text, vision_config=vision, **whole
    )
    model = getattr(transformers, name)(config).eval()
    model.set_attn_implementation("eager")
    randomise(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", thinned(with_nightly(PICTURES, ["qwen3_vl_moe", "gemma3"]), 2))
def test_text_of_a_model_of_pictures(kind, tmp_path):
    theirs = pictures(tmp_path, kind)
    # Without a picture, transformers' Llama 4 fails when it puts its results together.
    wanted = reference(theirs.language_model if kind == "llama4" else theirs)
    with pytest.raises(UserError, match=r"is of the vision part .*text_only=True"):
        load(tmp_path)
    model = load(tmp_path, dtype="f32", text_only=True)
    assert model.config.architecture == PICTURES[kind][-1]
    np.testing.assert_allclose(ours(model), wanted, rtol=0, atol=TOLERANCE)
    # The language part alone is a checkpoint of its own, which transformers reads as a model of
    # text.
    save_params(tmp_path / "text", model.params, model.config)
    np.testing.assert_allclose(
        reference(read_back(tmp_path / "text")), wanted, rtol=0, atol=TOLERANCE
    )


def test_experts_that_lie_inward(tmp_path):
    """Qwen3-VL's experts are published as [inputs, outputs], and saved by transformers 5 as
    [outputs, inputs]."""
    wanted = reference(pictures(tmp_path, "qwen3_vl_moe"))
    tensors = load_file(tmp_path / "model.safetensors")
    fused = [name for name in tensors if "mlp.experts." in name]
    assert {tensors[name].shape for name in fused} == {(6, 48, 32), (6, 32, 24)}
    turned = {name: np.ascontiguousarray(tensors[name].swapaxes(1, 2)) for name in fused}
    save_file(tensors | turned, tmp_path / "model.safetensors")
    np.testing.assert_allclose(
        ours(load(tmp_path, dtype="f32", text_only=True)), wanted, rtol=0, atol=TOLERANCE
    )


def test_mxfp4_experts(tmp_path):
    """gpt-oss as it is published: experts of 4 bits with a power of two for every 32 inputs.
    transformers decodes its blocks to the same numbers."""
    fields = MODELS["gpt-oss"][1] | {"intermediate_size": 64}
    write(tmp_path, "gpt_oss", fields)
    tensors, random = load_file(tmp_path / "model.safetensors"), np.random.default_rng(5)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        tensors |= {
            f"{name}_blocks": blocks,
            f"{name}_scales": random.integers(122, 125, blocks.shape[:3], np.uint8),
        }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
        )
    )
    decoded = convert_moe_packed_tensors(
        *(
            torch.tensor(tensors[f"model.layers.1.mlp.experts.gate_up_proj_{x}"])
            for x in ("blocks", "scales")
        ),
        dtype=torch.float32,
    ).numpy()
    model = load(tmp_path, dtype="f32")
    gate, up = (
        np.asarray(model.params["layers"][f"experts_{name}"].stack[1]) for name in ("gate", "up")
    )
    np.testing.assert_array_equal(gate, decoded[..., ::2])
    np.testing.assert_array_equal(up, decoded[..., 1::2])
    checkpoint = weights._named_alike(open_checkpoint(tmp_path), model.config, tmp_path, False)
    stored = find_weight(
        checkpoint, "model.layers.0.mlp.experts.2.down_proj.weight", Scheme("mxfp4", bits=4)
    )
    whole = decode_slice(stored, (slice(None), slice(None)))
    np.testing.assert_array_equal(
        decode_slice(stored, (slice(3, 9), slice(5, 50))), whole[3:9, 5:50]
    )
    assert load(tmp_path, dtype="f32", weights="int8").weights == "int8"
    edit(tmp_path, lambda t: t.pop("model.layers.1.mlp.experts.down_proj_scales"))
    with pytest.raises(
        UserError, match=r"down_proj.exponents' is missing; without it .* cannot be decoded"
    ):
        load(tmp_path)


GREEDY = with_nightly(
    ["mixtral", "qwen2-moe-dense-among-sparse", "qwen3-moe", "ministral3", *NEWEST],
    [],  # by day: test_latents_are_written_on_as_torch_does
)


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_text_equals_torch(name, tmp_path):
    kind, fields, _ = MODELS[name]
    theirs = write(tmp_path, kind, fields)
    prompt = tokens()[0, :20].tolist()
    with torch.no_grad():
        made = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
    for layers in ("unroll",) if name in NEWEST else ("scan", "unroll"):
        model = load(tmp_path, dtype="f32", layers=layers)
        model = model.replace(config=dataclasses.replace(model.config, eos_ids=()), folder="")
        assert kvq.generate(model, [prompt], max_new_tokens=24).tokens == [made[0, 20:].tolist()]


def test_saved_experts_are_read_by_transformers(tmp_path):
    kind, fields, _ = MODELS["qwen2-moe-dense-among-sparse"]
    wanted = reference(write(tmp_path / "theirs", kind, fields))
    model = load(tmp_path / "theirs", dtype="f32")
    save_params(tmp_path / "ours", model.params, model.config)
    np.testing.assert_allclose(reference(read_back(tmp_path / "ours")), wanted, rtol=0, atol=1e-5)
    assert load(tmp_path / "ours").config == model.config
