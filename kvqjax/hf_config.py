"""Hugging Face config.json -> ModelConfig. What the decoder does not compute is refused by field name and value.

Both spellings of the rotary embedding are read: `rope_scaling` + `rope_theta` (transformers 4) and `rope_parameters`
(transformers 5). Absent fields take the defaults of transformers' config classes. Unknown fields are ignored.
"""

import json
import math
from pathlib import Path

from kvqjax.config import ModelConfig, RopeConfig
from kvqjax.errors import UserError

__all__ = ["parse_config", "read_config"]

_DEFAULTS = {
    "LlamaForCausalLM": {"model_type": "llama", "max_position_embeddings": 2048},
    "MistralForCausalLM": {
        "model_type": "mistral",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "Qwen2ForCausalLM": {
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "Qwen3ForCausalLM": {
        "model_type": "qwen3",
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "head_dim": 128,
    },
}

# Fields that change what a model computes, with the values that leave it as the decoder has it; null is always fine.
_ACCEPTED = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "pretraining_tp": (1,),
    "quantization_config": (),
    "compression_config": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_causal": (True,),
    "alibi": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "clip_qkv": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
}

_ROPE_FIELDS = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
    *("low_freq_factor", "high_freq_factor", "attention_factor", "mscale", "mscale_all_dim"),
    *("beta_fast", "beta_slow", "truncate", "finetuned"),
}


def _refuse(field: str, value, wanted: str):
    raise UserError(f"config.json: {field}={json.dumps(value)} is not supported; {wanted}")


def _integer(raw: dict, field: str) -> int:
    value = raw.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _refuse(field, value, "wanted a positive integer")
    return value


def _number(raw: dict, field: str, default: float | None = None) -> float:
    value = default if raw.get(field) is None else raw[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        _refuse(field, value, "wanted a positive number")
    return float(value)


def _architecture(raw: dict) -> str:
    """The one architecture of the config; without `architectures` it follows from `model_type`."""
    known = ", ".join(_DEFAULTS)
    names = raw.get("architectures")
    if not names:
        names = [name for name, defaults in _DEFAULTS.items() if defaults["model_type"] == raw.get("model_type")]
        if not names:
            _refuse("model_type", raw.get("model_type"), f"known architectures: {known}")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _DEFAULTS:
        _refuse("architectures", names, f"known: {known}")
    wanted = _DEFAULTS[names[0]]["model_type"]
    if raw.get("model_type", wanted) != wanted:
        _refuse("model_type", raw["model_type"], f"{names[0]} has {wanted!r}")
    return names[0]


def _check_accepted(raw: dict, architecture: str):
    for field, accepted in _ACCEPTED.items():
        value = raw.get(field)
        if value is not None and value not in accepted:
            _refuse(field, value, f"wanted {' or '.join(json.dumps(a) for a in accepted) or 'null'}")
    # In Llama and Qwen3 this flag also gives o_proj a bias; Qwen2 ignores it and always has biases on q, k and v.
    if raw.get("attention_bias") and architecture != "Qwen2ForCausalLM":
        _refuse("attention_bias", raw["attention_bias"], "a bias on o_proj is not computed; wanted false")
    code = raw.get("auto_map") or {}
    if any(name.startswith("AutoModel") for name in code):
        _refuse("auto_map", code, "code from a checkpoint is never run")


def _yarn_attention_factor(rope: dict, factor: float) -> float:
    """Factor on cos and sin: given, or 0.1 m ln(factor) + 1 (arXiv 2309.00071, eq. 22; with mscale: a ratio of two)."""
    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor")

    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(_number(rope, "mscale")) / scale(_number(rope, "mscale_all_dim"))
    return scale(1.0)


def _yarn(rope: dict, original: int, max_position: int) -> dict:
    factor = _number(rope, "factor", max_position / original)
    return {
        "factor": factor,
        "attention_factor": _yarn_attention_factor(rope, factor),
        "beta_fast": _number(rope, "beta_fast", 32.0),
        "beta_slow": _number(rope, "beta_slow", 1.0),
        "truncate": bool(rope.get("truncate", True)),
    }


def _llama3(rope: dict) -> dict:
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    if high <= low:
        _refuse("high_freq_factor", high, f"wanted more than low_freq_factor={low}")
    return {"factor": _number(rope, "factor"), "low_freq_factor": low, "high_freq_factor": high}


def _rope(raw: dict) -> RopeConfig:
    """Rotary embedding from either spelling; a non-empty `rope_scaling` wins over `rope_parameters`."""
    field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(field) or {}
    if not isinstance(rope, dict):
        _refuse(field, rope, "wanted an object")
    for name in rope:
        if name not in _ROPE_FIELDS:
            _refuse(f"{field}.{name}", rope[name], "the field is unknown")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor") not in (None, 1):
        _refuse(f"{field}.partial_rotary_factor", rope["partial_rotary_factor"], "wanted 1")
    theta = _number(rope, "rope_theta", raw.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=_number(rope, "factor"))
    if kind not in ("llama3", "yarn"):
        _refuse(f"{field}.rope_type", kind, "known: default, linear, llama3, yarn")
    name = "original_max_position_embeddings"  # beside the rope fields, among them, or equal to the full length
    max_position = _integer(raw, "max_position_embeddings")
    original = _integer(next(source for source in (raw, rope, {name: max_position}) if source.get(name) is not None), name)
    extra = _llama3(rope) if kind == "llama3" else _yarn(rope, original, max_position)
    return RopeConfig(theta=theta, kind=kind, original_max_position=original, **extra)


def _windows(raw: dict, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer; Mistral slides everywhere, Qwen by `layer_types` or from `max_window_layers` up."""
    window, types = raw.get("sliding_window"), raw.get("layer_types")
    qwen = architecture.startswith("Qwen")
    if qwen and not raw.get("use_sliding_window"):
        window = None
    if window is not None:
        window = _integer(raw, "sliding_window")
    if architecture == "LlamaForCausalLM" and window is not None:
        _refuse("sliding_window", window, "Llama attends to everything; wanted null")
    uniform = (window,) * num_layers
    if types is None and qwen and window is not None:
        first = raw["max_window_layers"]
        if not isinstance(first, int):
            _refuse("max_window_layers", first, "wanted an integer")
        return tuple(window if index >= first else None for index in range(num_layers))
    if types is None:
        return uniform
    wanted = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != num_layers or any(name not in wanted for name in types):
        _refuse("layer_types", types, f"wanted {num_layers} of full_attention or sliding_attention")
    if window is None and "sliding_attention" in types:
        _refuse("layer_types", types, "sliding_attention without a sliding window")
    windows = tuple(wanted[name] for name in types)
    if not qwen and windows != uniform:
        _refuse("layer_types", types, f"all layers of {architecture} attend alike")
    return windows


def _eos_ids(*sources: dict) -> tuple[int, ...]:
    """End-of-sequence ids of config.json, then those that generation_config.json adds."""
    ids = []
    for source in sources:
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        _refuse("eos_token_id", ids, "wanted an integer or a list of integers")
    return tuple(dict.fromkeys(ids))


def parse_config(raw: dict, generation: dict | None = None) -> ModelConfig:
    """ModelConfig from the contents of config.json and, where present, generation_config.json. Raises UserError."""
    architecture = _architecture(raw)
    raw = {**_DEFAULTS[architecture], **raw}
    _check_accepted(raw, architecture)
    width, heads, layers = (_integer(raw, f) for f in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    if raw.get("head_dim") is None and width % heads:
        _refuse("hidden_size", width, f"without head_dim wanted a multiple of num_attention_heads={heads}")
    fields = {
        "vocab_size": _integer(raw, "vocab_size"),
        "width": width,
        "mlp_width": _integer(raw, "intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads if raw.get("num_key_value_heads") is None else _integer(raw, "num_key_value_heads"),
        "head_dim": width // heads if raw.get("head_dim") is None else _integer(raw, "head_dim"),
        "rope": _rope(raw),
        "norm_eps": _number(raw, "rms_norm_eps", 1e-6),
        "qkv_bias": architecture == "Qwen2ForCausalLM",
        "qk_norm": architecture == "Qwen3ForCausalLM",
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "windows": _windows(raw, architecture, layers),
        "max_position": _integer(raw, "max_position_embeddings"),
        "eos_ids": _eos_ids(raw, generation or {}),
        "bos_id": raw.get("bos_token_id"),
        "architecture": architecture,
    }
    try:
        return ModelConfig(**fields)
    except ValueError as error:
        raise UserError(f"config.json: {error}") from error


def _read_json(path: Path) -> dict:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(contents, dict):
        raise UserError(f"{path}: wanted a JSON object, got {type(contents).__name__}")
    return contents


def read_config(path: str | Path) -> ModelConfig:
    """ModelConfig of a Hugging Face folder, or of a config.json named directly. Raises UserError in one line."""
    path = Path(path).expanduser()
    if not path.exists():
        raise UserError(f"{path}: no such folder")
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise UserError(f"{path}: no config.json in this folder")
    generation = file.with_name("generation_config.json")
    return parse_config(_read_json(file), _read_json(generation) if generation.exists() else None)
