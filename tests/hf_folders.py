"""A model of ours as a Hugging Face folder: config.json and model.safetensors. The library reads
them and never writes them.

`config_to_hf` undoes `kvqjax.model.hf_config.parse_config`, and `save_params` undoes
`kvqjax.model.weights.load_params`.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from kvqjax import UserError
from kvqjax.model.config import ExpertConfig, ModelConfig, RopeConfig
from kvqjax.model.hf_config import parse_config
from kvqjax.model.hf_families import FAMILIES, ExpertFields, Family
from kvqjax.model.hf_fields import LOGIT_CAP, SCORE_CAP
from kvqjax.model.tensor_rows import Order
from kvqjax.model.weight_trees import Params, Rows, stacked
from kvqjax.model.weights import Parameter, parameters

FULL, SLIDING, CHUNKED, LINEAR = (
    f"{kind}_attention" for kind in ("full", "sliding", "chunked", "linear")
)

ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}  # Hugging Face's names

# --- config.json ---


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Make the contents of config.json that `parse_config` reads back as the same config.

    Raises:
        UserError: for an unknown architecture, and a config that its fields do not describe.
    """
    if config.architecture not in FAMILIES:
        families = ", ".join(FAMILIES)
        raise UserError(f"architecture {config.architecture!r} is unknown; known: {families}")
    family = FAMILIES[config.architecture]
    raw: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        family.mlp_width: config.mlp_width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "hidden_act": ACTIVATIONS[config.activation],
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
    }
    raw |= _latents(config) if family.latent else _heads(config)
    raw |= _chunks(config) if family.chunked else _windows(config, family)
    raw |= _experts(config, family.experts)
    raw |= _scores(config, family)
    raw |= _recurrent(config) if family.recurrent else {}
    raw["rope_parameters"] = _ropes(config, family)
    _check(raw, config)
    return raw


def _check(raw: dict[str, Any], config: ModelConfig) -> None:
    """Raise UserError where `raw` is read back as another config."""
    length = max((rope.length for rope in config.ropes), default=0)
    back = parse_config(raw, rope_length=length or None)
    if back != config:
        fields = [
            name for name in vars(config) if getattr(back, name, None) != getattr(config, name)
        ]
        names = ", ".join(name for name in fields if name in ModelConfig.__dataclass_fields__)
        raise UserError(f"{config.architecture}: config.json cannot describe this {names}")


def _heads(config: ModelConfig) -> dict[str, Any]:
    return {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}


def _latents(config: ModelConfig) -> dict[str, Any]:
    sizes, latent = config.latent_heads, config.latent
    assert sizes is not None
    assert latent is not None
    turned = config.head_dim - latent
    return {
        "q_lora_rank": sizes.query_rank,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": sizes.key_dim,
        "qk_rope_head_dim": turned,
        "v_head_dim": sizes.value_dim,
        "num_key_value_heads": config.num_heads,
        "head_dim": sizes.key_dim + turned,
    }


def _scores(config: ModelConfig, family: Family) -> dict[str, Any]:
    """How scores are scaled, how scores and logits are capped, and what a family has beside
    these."""
    raw: dict[str, Any] = {}
    if family.activation != "silu":
        raw["hidden_activation"] = ACTIVATIONS[config.activation]
    if family.query_scale:
        scale = config.common_scale
        divisor = config.head_dim if scale is None else scale**-2
        # Config classes want a whole number as an integer, and a root leaves a rounding.
        is_whole = math.isclose(divisor, round(divisor), rel_tol=1e-12)
        raw["query_pre_attn_scalar"] = round(divisor) if is_whole else divisor
    if family.score_softcap:
        raw[SCORE_CAP] = config.softcap
    if family.logit_softcap:
        raw[LOGIT_CAP] = config.logit_softcap
    if family.output_bias:
        raw["attention_bias"] = True
    return raw


def _window(config: ModelConfig) -> int | None:
    return next((window for window in config.windows if window is not None), None)


def _windows(config: ModelConfig, family: Family) -> dict[str, Any]:
    raw: dict[str, Any] = {"sliding_window": _window(config)}
    if family.window_switch:
        raw["use_sliding_window"] = raw["sliding_window"] is not None
    if family.mixed_windows:
        raw["layer_types"] = [FULL if window is None else SLIDING for window in config.windows]
    return raw


def _chunks(config: ModelConfig) -> dict[str, Any]:
    """Chunks, layers without a rope, QK-norm, and how queries grow, of a family with chunks."""
    normed = config.qk_norm if isinstance(config.qk_norm, tuple) else (config.qk_norm,)
    growth = {"attn_scale": config.query_growth, "floor_scale": config.growth_length}
    return {
        "attention_chunk_size": _window(config),
        "layer_types": [FULL if window is None else CHUNKED for window in config.windows],
        "no_rope_layers": [
            int(rope is not None and rope.kind != "none") for rope in _by_layer(config)
        ],
        "use_qk_norm": any(normed),
        "attn_temperature_tuning": config.query_growth > 0,
        **(growth if config.query_growth else {}),
    }


def _recurrent(config: ModelConfig) -> dict[str, Any]:
    shape = config.recurrent
    layers = () if shape is None else shape.layers
    raw: dict[str, Any] = {
        "layer_types": [LINEAR if index in layers else FULL for index in range(config.depth)]
    }
    if shape is None:
        return raw
    return raw | {
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "linear_key_head_dim": shape.key_dim,
        "linear_value_head_dim": shape.value_dim,
        "linear_conv_kernel_dim": shape.kernel,
    }


def _experts(config: ModelConfig, names: ExpertFields | None) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return _without_experts(config, names)
    if names is None:
        raise UserError(f"{config.architecture} has no experts like {experts}")
    raw: dict[str, Any] = {names.count: experts.count, "num_experts_per_tok": experts.per_token}
    if names.limited:
        raw |= {"swiglu_limit": experts.swiglu_limit, "swiglu_alpha": experts.swiglu_alpha}
    if names.shared_width is not None and not names.sigmoid:
        raw[names.shared_width] = experts.shared_width
    if names.in_every_layer:
        return raw
    raw[names.width] = experts.width
    if names.sigmoid:
        return raw | {"moe_layers": list(config.sparse_layers)}
    raw["norm_topk_prob"] = experts.normalised
    if names.dense_first is not None and names.shared_count is not None:
        shared = experts.shared_width // experts.width
        return raw | {names.dense_first: len(experts.dense_layers), names.shared_count: shared}
    return raw | {"mlp_only_layers": list(experts.dense_layers), "decoder_sparse_step": 1}


def _without_experts(config: ModelConfig, names: ExpertFields | None) -> dict[str, Any]:
    if names is None:
        return {}
    if names.sigmoid:
        return {"moe_layers": [], names.width: config.mlp_width}
    if names.dense_first is not None:
        return {names.dense_first: config.depth}
    return {names.count: 0}


# --- Ropes, in the spelling of transformers 5 ---

# The fields of `RopeConfig` that each kind has.
FIELDS_OF_KINDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    "dynamic": ("factor",),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
}


def _by_layer(config: ModelConfig) -> tuple[RopeConfig | None, ...]:
    return config.rope if isinstance(config.rope, tuple) else (config.rope,) * config.num_layers


def _ropes(config: ModelConfig, family: Family) -> dict[str, Any]:
    ropes = _by_layer(config)
    if family.rope_by_type:
        types = [FULL if window is None else SLIDING for window in config.windows]
        return {
            name: _rope(rope) for name, rope in zip(types, ropes, strict=True) if rope is not None
        }
    raw = _rope(
        next((rope for rope in ropes if rope is not None and rope.kind != "none"), RopeConfig())
    )
    if family.query_growth:
        raw["llama_4_scaling_beta"] = config.query_growth
        raw["original_max_position_embeddings"] = max(
            rope.original_max_position for rope in config.ropes
        )
    if family.recurrent:
        raw["partial_rotary_factor"] = next((rope.fraction for rope in config.ropes), 1.0)
    return raw | (_latent_scale(config, raw["factor"]) if family.latent and "factor" in raw else {})


def _rope(rope: RopeConfig) -> dict[str, Any]:
    values = {name: getattr(rope, name) for name in FIELDS_OF_KINDS.get(rope.kind, ())}
    raw = {name: list(x) if isinstance(x, tuple) else x for name, x in values.items()}
    # The length before scaling of the kinds linear and dynamic follows from
    # max_position_embeddings.
    if rope.kind in ("llama3", "yarn", "longrope"):
        raw["original_max_position_embeddings"] = rope.original_max_position
    return {"rope_type": rope.kind, "rope_theta": rope.theta} | raw


def _latent_scale(config: ModelConfig, factor: float) -> dict[str, Any]:
    """The scale of latents' scores, which has the square of yarn's factor of all channels."""
    sizes, latent, scale = config.latent_heads, config.latent, config.common_scale
    assert sizes is not None
    assert latent is not None
    assert scale is not None
    turned = config.head_dim - latent
    dim = sizes.key_dim + turned
    raw = {"partial_rotary_factor": turned / dim}
    excess = (scale * dim**0.5) ** 0.5 - 1
    if factor > 1 and not math.isclose(excess, 0.0, abs_tol=1e-12):
        # As it was read, without the rounding of a root.
        raw["mscale_all_dim"] = float(f"{excess / (0.1 * math.log(factor)):.12g}")
    return raw


# --- model.safetensors ---

CONVOLUTION = "linear_attn.conv1d.weight"  # [channels, 1, tokens]
# Matrices whose products RoPE rotates.
TURNED = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
)
FUSED = {"gate_up_proj": ("experts_gate", "experts_up"), "down_proj": ("experts_down",)}


def save_params(folder: Path, params: Params, config: ModelConfig) -> None:
    """Write config.json and model.safetensors, the weights in their dtype. Raises UserError as
    `config_to_hf`."""
    raw, params = config_to_hf(config), stacked(params)
    family, tensors = FAMILIES[config.architecture], {}
    for parameter in parameters(config):
        name = parameter.name.removeprefix("layers/")
        value = params[name] if parameter.layers is None else params["layers"][name]
        value = np.asarray(value.stack if isinstance(value, Rows) else value)
        _add(tensors, parameter, [value] if parameter.layers is None else value)
    if family.paired_rope:
        for name in [name for name in tensors if name.endswith(TURNED)]:
            rows = np.arange(len(tensors[name]))
            unpaired = np.empty_like(tensors[name])
            unpaired[Order(2, config.head_dim // 2).places(rows)] = tensors[name]
            tensors[name] = unpaired
    tensors = {name: x[:, None] if name.endswith(CONVOLUTION) else x for name, x in tensors.items()}
    if config.experts is not None and family.experts is not None and family.experts.together:
        _fuse(tensors, config, family.experts, config.experts)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


def _add(tensors: dict[str, np.ndarray], parameter: Parameter, layers: Any) -> None:
    """Add the tensors of one parameter. Several parameters may be rows of one tensor."""
    for names, layer in zip(parameter.tensors, layers, strict=True):
        arrays = layer if parameter.by_expert else [layer]
        for name, array in zip(names, arrays, strict=True):
            array = np.ascontiguousarray(array.T if parameter.matrix else array)
            if parameter.picked is None:
                tensors[name] = array
                continue
            rows, total = parameter.picked
            tensor = tensors.setdefault(name, np.empty((total, *array.shape[1:]), array.dtype))
            tensor[rows] = array


def _fuse(
    tensors: dict[str, np.ndarray], config: ModelConfig, fields: ExpertFields, experts: ExpertConfig
) -> None:
    """Put the matrices of experts together, one tensor a layer, as the family saves them."""

    def joined(parts: list[np.ndarray]) -> np.ndarray:
        if fields.interleaved:
            columns = np.stack(parts, -1).reshape(*parts[0].shape[:-1], -1)
        else:
            columns = np.concatenate(parts, -1)
        if columns.ndim == 3 and not fields.inward:
            columns = columns.swapaxes(1, 2)
        # safetensors writes memory, whatever the order of axes.
        return np.ascontiguousarray(columns)

    tensors_of = {parameter.name: parameter.tensors for parameter in parameters(config)}
    for number in range(len(config.sparse_layers)):
        for fused, matrices in FUSED.items():
            names = [tensors_of[f"layers/{matrix}"][number] for matrix in matrices]
            together = f"{names[0][0].partition('.experts')[0]}.experts.{fused}"
            stacks = [
                np.stack([tensors.pop(name).T for name in of_experts]) for of_experts in names
            ]
            assert all(len(stack) == experts.count for stack in stacks)
            tensors[together] = joined(stacks)
            if fields.biases:
                biases = [tensors_of[f"layers/{matrix}_bias"][number] for matrix in matrices]
                tensors[f"{together}_bias"] = joined(
                    [tensors.pop(of_layer[0]) for of_layer in biases]
                )
