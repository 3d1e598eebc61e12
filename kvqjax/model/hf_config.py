"""Hugging Face config.json -> ModelConfig. What the decoder does not compute is refused by field name and value.

Absent fields take the defaults of transformers' config classes; fields known to nobody are ignored.
"""

import json
from pathlib import Path

from kvqjax._errors import UserError
from kvqjax._files import read_object
from kvqjax.model.config import ModelConfig, RopeConfig
from kvqjax.model.hf_experts import experts_from_hf, experts_to_hf
from kvqjax.model.hf_families import DEFAULTS, NESTED, QK_NORM, QKV_BIAS
from kvqjax.model.hf_fields import integer, number, refuse
from kvqjax.model.hf_rope import growth_from_hf, rope_from_hf, rope_to_hf
from kvqjax.model.hf_windows import windows_from_hf, windows_to_hf
from kvqjax.model.stored import read_scheme

__all__ = ["config_to_hf", "parse_config", "read_config"]

MOST_LAYERS = 10_000  # a tuple of this length is made before anything else is checked

# Fields that change what a model computes, with the values that leave it as the decoder has it; null is always fine.
_ACCEPTED = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "pretraining_tp": (1,),
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


def _language_part(raw: dict) -> dict:
    """The config of the language part of a checkpoint of pictures and text; any other as it is."""
    names, text = raw.get("architectures"), raw.get("text_config")
    nested = any(name in NESTED for name in names) if isinstance(names, list) else raw.get("model_type") == "mistral3"
    if not nested:
        if text is None and ("vision_config" in raw or "Vision" in str(names)):
            refuse("architectures", names, "a vision model without a language part")
        return raw
    if not isinstance(text, dict):
        refuse("text_config", text, "wanted the language part's config")
    kind = text.get("model_type", "mistral")
    own = [name for name, defaults in DEFAULTS.items() if defaults["model_type"] == kind]
    if kind not in ("mistral", "ministral3"):
        refuse("text_config.model_type", kind, "wanted mistral or ministral3")
    shared = ("quantization_config", "tie_word_embeddings", "eos_token_id", "bos_token_id", "auto_map")
    outer = {name: raw[name] for name in shared if raw.get(name) is not None}
    return outer | text | {"architectures": own, "model_type": kind}


def _architecture(raw: dict) -> str:
    """The one architecture of the config; without `architectures` it follows from `model_type`."""
    known = ", ".join(DEFAULTS)
    names = raw.get("architectures")
    if not names:
        names = [name for name, defaults in DEFAULTS.items() if defaults["model_type"] == raw.get("model_type")]
        if not names:
            refuse("model_type", raw.get("model_type"), f"known architectures: {known}")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(DEFAULTS):
        refuse("architectures", names, f"known: {known}")
    wanted = DEFAULTS[names[0]]["model_type"]
    if raw.get("model_type", wanted) != wanted:
        refuse("model_type", raw["model_type"], f"{names[0]} has {wanted!r}")
    return names[0]


def _check_accepted(raw: dict, architecture: str):
    for field, accepted in _ACCEPTED.items():
        value = raw.get(field)
        if value is not None and value not in accepted:
            refuse(field, value, f"wanted {' or '.join(json.dumps(a) for a in accepted) or 'null'}")
    # In Llama and Qwen3 this flag also gives o_proj a bias; Qwen2 ignores it and always has biases on q, k and v, but
    # its kind with experts has a flag of its own.
    if raw.get("qkv_bias", True) is not True and architecture in QKV_BIAS:
        refuse("qkv_bias", raw["qkv_bias"], "wanted true")
    if raw.get("attention_bias") and architecture not in QKV_BIAS:
        refuse("attention_bias", raw["attention_bias"], "a bias on o_proj is not computed; wanted false")
    code = raw.get("auto_map") or {}
    if not isinstance(code, dict) or any(name.startswith("AutoModel") for name in code):
        refuse("auto_map", code, "code from a checkpoint is never run")


def _eos_ids(*sources: dict) -> tuple[int, ...]:
    """End-of-sequence ids of config.json, then those that generation_config.json adds."""
    ids = []
    for source in sources:
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        refuse("eos_token_id", ids, "wanted an integer or a list of integers")
    return tuple(dict.fromkeys(ids))


def _bos_id(raw: dict) -> int | None:
    value = raw.get("bos_token_id")
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(value, bool) or not isinstance(value, int | None):
        refuse("bos_token_id", value, "wanted an integer")
    return value


def parse_config(raw: dict, generation: dict | None = None, rope_length: int | None = None) -> ModelConfig:
    """ModelConfig from the contents of config.json and, where present, generation_config.json, its rope for texts of
    up to `rope_length` tokens (RopeConfig says which kinds ask for it). Raises UserError."""
    raw = _language_part(raw)
    architecture = _architecture(raw)
    raw = {**DEFAULTS[architecture], **raw}
    _check_accepted(raw, architecture)
    read_scheme(raw)
    width, heads = (integer(raw, field) for field in ("hidden_size", "num_attention_heads"))
    layers = integer(raw, "num_hidden_layers", most=MOST_LAYERS)
    if raw.get("head_dim") is None and width % heads:
        refuse("hidden_size", width, f"without head_dim wanted a multiple of num_attention_heads={heads}")
    head_dim = width // heads if raw.get("head_dim") is None else integer(raw, "head_dim")
    fields = {
        "vocab_size": integer(raw, "vocab_size"),
        "width": width,
        "mlp_width": integer(raw, "intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads if raw.get("num_key_value_heads") is None else integer(raw, "num_key_value_heads"),
        "head_dim": head_dim,
        "rope": rope_from_hf(raw, head_dim, rope_length),
        "experts": experts_from_hf(raw, architecture, layers),
        "query_growth": growth_from_hf(raw),
        "norm_eps": number(raw, "rms_norm_eps", 1e-6),
        "qkv_bias": architecture in QKV_BIAS,
        "qk_norm": architecture in QK_NORM,
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "sliding_window": windows_from_hf(raw, architecture, layers),
        "max_position": integer(raw, "max_position_embeddings"),
        "eos_ids": _eos_ids(raw, generation or {}),
        "bos_id": _bos_id(raw),
        "architecture": architecture,
    }
    try:
        return ModelConfig(**fields)
    except ValueError as error:
        raise UserError(f"config.json: {error}") from error


def read_config(path: str | Path, rope_length: int | None = None) -> ModelConfig:
    """ModelConfig of a Hugging Face folder, or of a config.json named directly; `rope_length` as `parse_config` has it.
    Raises UserError in one line."""
    path = Path(path).expanduser()
    if not path.exists():
        raise UserError(f"{path}: no such folder")
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise UserError(f"{path}: no config.json in this folder")
    generation = file.with_name("generation_config.json")
    return parse_config(read_object(file), read_object(generation) if generation.exists() else None, rope_length)


def config_to_hf(config: ModelConfig) -> dict:
    """The contents of config.json for a ModelConfig: what `parse_config` reads back as the same value."""
    if config.architecture not in DEFAULTS:
        raise UserError(f"architecture {config.architecture!r} is unknown; known: {', '.join(DEFAULTS)}")
    raw = {
        "architectures": [config.architecture],
        "model_type": DEFAULTS[config.architecture]["model_type"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
    }
    raw |= windows_to_hf(config) | experts_to_hf(config)
    return raw | rope_to_hf(config.rope or RopeConfig(), config.query_growth)
