"""Hugging Face's config.json as a `ModelConfig`, and back.

A field that changes what a model computes is either read or refused by its name and value. A field that nobody knows
is ignored. An absent field has the default of transformers' config class (kvqjax/model/hf_families.py).

The parts of a config follow each other below: its architecture, its attention windows, its rope, its experts, its
packed weights. What reads a part and what writes it stand side by side.
"""

import dataclasses
import functools
import json
import math
import sys
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from kvqjax._errors import UserError
from kvqjax._files import read_object
from kvqjax.model.config import ExpertConfig, LatentHeads, ModelConfig, RecurrentConfig, RopeConfig
from kvqjax.model.gguf_file import is_gguf
from kvqjax.model.gguf_model import read_fields
from kvqjax.model.hf_families import (
    FAMILIES,
    PICTURE_FAMILIES,
    SHARED_COUNT,
    ExpertFields,
    Family,
    PictureFamily,
    architectures_of,
)

__all__ = ["Scheme", "config_to_hf", "parse_config", "read_config", "read_scheme"]

MOST_LAYERS = 10_000  # layers; a tuple of this length is made before anything else is checked

# Fields that change what a model computes, with the values that leave it as the decoder has it. Null is always fine.
_ACCEPTED: dict[str, tuple] = {
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
    "attn_output_gate": (False,),
    "output_gate_type": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
}
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}  # Hugging Face's names


# --- config.json as a whole ---


def read_config(path: str | Path, rope_length: int | None = None) -> ModelConfig:
    """Read the config of a Hugging Face folder or a GGUF file.

    Args:
        path: the folder, its config.json, or the file.
        rope_length: the longest text, as `parse_config` has it.

    Returns:
        The config, with the end tokens of generation_config.json where that file lies beside config.json.

    Raises:
        UserError: for an absent file, one that is not JSON, or a field that is not supported.
    """
    path = Path(path).expanduser()
    if is_gguf(path):
        fields = read_fields(path)
        try:
            return parse_config(fields, rope_length=rope_length)
        except UserError as error:
            raise UserError(f"{path}: {str(error).removeprefix('config.json: ')}") from error
    if not path.exists():
        raise UserError(f"{path}: no such folder")
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise UserError(f"{path}: no config.json in this folder")
    beside = file.with_name("generation_config.json")
    generation = read_object(beside) if beside.exists() else None
    return parse_config(read_object(file), generation, rope_length)


def parse_config(raw: dict, generation: dict | None = None, rope_length: int | None = None) -> ModelConfig:
    """Make a config of what config.json holds.

    Args:
        raw: the contents of config.json.
        generation: the contents of generation_config.json, where the folder has one.
        rope_length: the longest text in tokens, for the kinds of rope that depend on it (`RopeConfig`). None stands
            for the length that the model was trained on first.

    Returns:
        The config of the language model.

    Raises:
        UserError: for a field that is missing, malformed, or asks for what the decoder does not compute.
    """
    raw = _language_part(raw)
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    raw = {"model_type": family.model_type, **family.defaults, **raw}
    layers = _integer(raw, "num_hidden_layers", most=MOST_LAYERS)
    recurrent = None
    if family.recurrent:
        recurrent = _recurrent_from_hf(raw, layers)
        raw = raw | _without_sections(raw) | {"layer_types": None}
    attention = layers - (0 if recurrent is None else len(recurrent.layers))
    windows = _windows_from_hf(raw, architecture, attention)
    roped = _layers_with_rope(raw, family, len(windows))
    _check_accepted(raw, family)
    read_scheme(raw)  # refuses weights that cannot be decoded before any of them is read

    width = _integer(raw, "hidden_size")
    heads = _integer(raw, "num_attention_heads")
    sizes = _latents_from_hf(raw, family, heads) if family.latent else _heads_from_hf(raw, family, width, heads)
    fields: dict[str, Any] = {
        "vocab_size": _integer(raw, "vocab_size"),
        "width": width,
        "mlp_width": _integer(raw, family.mlp_width),
        "num_layers": attention,
        "recurrent": recurrent,
        "output_gate": family.recurrent,
        "num_heads": heads,
        **sizes,
        "rope": _ropes_from_hf(raw, family, windows, roped, sizes["head_dim"], rope_length),
        "experts": _experts_from_hf(raw, family.experts, layers),
        **_growth_from_hf(raw, family),
        "norm_eps": _number(raw, "rms_norm_eps", 1e-6),
        "qkv_bias": family.qkv_bias,
        "qk_norm": tuple(bool(raw["use_qk_norm"]) and on for on in roped) if family.chunked else family.qk_norm,
        "qk_gain": not family.chunked,
        "chunked": tuple(window is not None for window in windows) if family.chunked else False,
        "norm_offset": family.norm_offset,
        "output_bias": family.output_bias,
        "score_sinks": family.score_sinks,
        "post_norms": family.post_norms,
        "activation": family.activation,
        "embedding_scale": width**0.5 if family.scaled_embedding else 1.0,
        "softcap": _softcap(raw, _SCORE_CAP, family.score_softcap),
        "logit_softcap": _softcap(raw, _LOGIT_CAP, family.logit_softcap),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "sliding_window": windows,
        "max_position": _integer(raw, "max_position_embeddings"),
        "eos_ids": _eos_ids(raw, generation or {}),
        "bos_id": _bos_id(raw),
        "architecture": architecture,
    }
    try:
        return ModelConfig(**fields)
    except ValueError as error:
        raise UserError(f"config.json: {error}") from error


def config_to_hf(config: ModelConfig) -> dict:
    """Make the contents of config.json that `parse_config` reads back as the same config.

    Args:
        config: the config.

    Returns:
        The fields, of JSON's types alone.

    Raises:
        UserError: for an unknown architecture, or one that has no such experts.
    """
    if config.architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"architecture {config.architecture!r} is unknown; known: {known}")
    family = FAMILIES[config.architecture]
    raw = {
        "architectures": [config.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        family.mlp_width: config.mlp_width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        **(_latents_to_hf(config) if family.latent else _heads_to_hf(config)),
        "hidden_act": _ACTIVATIONS[config.activation],
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
    }
    raw |= _windows_to_hf(config, family)
    raw |= _experts_to_hf(config, family.experts)
    raw |= _scores_to_hf(config, family)
    raw |= _chunks_to_hf(config) if family.chunked else {}
    raw |= _recurrent_to_hf(config) if family.recurrent else {}
    return raw | _ropes_to_hf(config, family)


# --- Heads, and latents in their place ---

_LATENT_FIELDS = {"query_rank": "q_lora_rank", "key_dim": "qk_nope_head_dim", "value_dim": "v_head_dim"}
_LATENT, _TURNED = "kv_lora_rank", "qk_rope_head_dim"


def _heads_from_hf(raw: dict, family: Family, width: int, heads: int) -> dict[str, Any]:
    """The KV heads, the width of a head, and the scale of its scores."""
    if raw.get("head_dim") is None and width % heads:
        _refuse(
            "hidden_size",
            width,
            f"without head_dim wanted a multiple of num_attention_heads={heads}",
        )
    head_dim = width // heads if raw.get("head_dim") is None else _integer(raw, "head_dim")
    grouped = raw.get("num_key_value_heads") is not None
    kv_heads = _integer(raw, "num_key_value_heads") if grouped else heads
    return {"num_kv_heads": kv_heads, "head_dim": head_dim, "scale": _scale_from_hf(raw, family, head_dim)}


def _heads_to_hf(config: ModelConfig) -> dict:
    return {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}


def _latents_from_hf(raw: dict, family: Family, heads: int) -> dict[str, Any]:
    """The one KV head that latents are, and the scale of scores: that of the heads which they stand for, times the
    square of yarn's factor of all channels."""
    if raw.get("num_key_value_heads") not in (None, heads):
        _refuse("num_key_value_heads", raw["num_key_value_heads"], f"wanted num_attention_heads={heads}")
    made = LatentHeads(**{name: _integer(raw, field) for name, field in _LATENT_FIELDS.items()})
    latent, turned = _integer(raw, _LATENT), _integer(raw, _TURNED)
    if latent % 2 or turned % 2:
        _refuse(_LATENT, latent, f"it and {_TURNED}={turned} are wanted even")
    dim = made.key_dim + turned
    if raw.get("head_dim") not in (None, dim):
        _refuse("head_dim", raw["head_dim"], f"wanted the sum of the two parts of a key, {dim}")
    rope, prefix = _rope_object(raw, family)
    scale = dim**-0.5
    if rope.get(_MSCALE):
        scale *= _mscale(_number(rope, "factor", prefix=prefix), _number(rope, _MSCALE, prefix=prefix)) ** 2
    return {
        "num_kv_heads": 1,
        "head_dim": latent + turned,
        "latent": latent,
        "latent_heads": made,
        "scale": scale,
    }


def _latents_to_hf(config: ModelConfig) -> dict:
    made, latent = config.latent_heads, config.latent
    assert made is not None
    assert latent is not None
    turned = config.head_dim - latent
    raw = {field: getattr(made, name) for name, field in _LATENT_FIELDS.items()}
    raw |= {"num_key_value_heads": config.num_heads, "head_dim": made.key_dim + turned}
    return raw | {_LATENT: latent, _TURNED: turned}


def _latent_rope_to_hf(config: ModelConfig, rope: dict) -> dict:
    """The fields of a rope, with those that scores of latents are scaled by; they are read in this spelling alone."""
    scaling = dict(rope["rope_scaling"])
    made, latent, scale = config.latent_heads, config.latent, config.common_scale
    assert made is not None
    assert latent is not None
    assert scale is not None
    dim = made.key_dim + config.head_dim - latent
    factor = math.log(scaling["factor"]) if scaling["factor"] > 1 else 0.0
    excess = (scale * dim**0.5) ** 0.5 - 1  # beyond 1 of yarn's factor of all channels
    if factor and not math.isclose(excess, 0.0, abs_tol=1e-12):
        scaling[_MSCALE] = float(f"{excess / (0.1 * factor):.12g}")  # as it was read, without the rounding of a root
    scaling |= {"partial_rotary_factor": (config.head_dim - latent) / dim, "rope_theta": rope["rope_theta"]}
    return {"rope_parameters": scaling}


# --- Scores and logits ---

_SCALE, _SCORE_CAP, _LOGIT_CAP = "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"


def _scale_from_hf(raw: dict, family: Family, head_dim: int) -> float | None:
    """What scores are multiplied by; None for the root of the head's width, which is every other family's."""
    divisor = _number(raw, _SCALE) if family.query_scale else head_dim
    return None if divisor == head_dim else divisor**-0.5


def _softcap(raw: dict, field: str, known: bool) -> float | None:
    return _number(raw, field) if known and raw.get(field) is not None else None


def _scores_to_hf(config: ModelConfig, family: Family) -> dict:
    raw: dict[str, Any] = {}
    if family.activation != "silu":
        raw["hidden_activation"] = _ACTIVATIONS[config.activation]
    if family.query_scale:
        scale = config.common_scale
        raw[_SCALE] = config.head_dim if scale is None else _plain_number(scale**-2)
    if family.score_softcap:
        raw[_SCORE_CAP] = config.softcap
    if family.logit_softcap:
        raw[_LOGIT_CAP] = config.logit_softcap
    if family.output_bias:
        raw["attention_bias"] = True
    return raw


# --- Architecture, and fields that are only checked ---


def _language_part(raw: dict) -> dict:
    """The config of the language part of a checkpoint of pictures and text; any other as it is."""
    names, text = raw.get("architectures"), raw.get("text_config")
    family = _picture_family(names, raw.get("model_type"))
    if family is None:
        if text is None and ("vision_config" in raw or "Vision" in str(names)):
            _refuse("architectures", names, "a vision model without a language part")
        return raw
    first = next(iter(family.languages))
    if text is None and family.flat:
        text = raw | {"model_type": first}
    if not isinstance(text, dict):
        _refuse("text_config", text, "wanted the language part's config")
    kind = text.get("model_type", first)
    if kind not in list(family.languages):  # it may be a list, which a dictionary cannot look up
        _refuse("text_config.model_type", kind, f"wanted {' or '.join(family.languages)}")
    architecture = family.languages[kind]
    # transformers writes these for the whole checkpoint, outside of the language part.
    shared = (
        "quantization_config", "tie_word_embeddings", "eos_token_id", "bos_token_id", "auto_map",
    )  # fmt: skip
    outer = {name: raw[name] for name in shared if raw.get(name) is not None}
    fixed = {"architectures": [architecture], "model_type": FAMILIES[architecture].model_type, **family.fixed}
    if family.sectioned_rope:
        fixed |= _without_sections(text)
    if family.tied_by == "whole" and _TIED in outer:
        fixed[_TIED] = outer[_TIED]
    elif family.tied_by == "either":
        fixed[_TIED] = bool(outer.get(_TIED) or text.get(_TIED))
    return dict(family.defaults) | outer | text | fixed


_TIED = "tie_word_embeddings"


def _without_sections(text: dict) -> dict:
    """The rope of a language part for positions that are single numbers."""
    ropes = {}
    for field in ("rope_scaling", "rope_parameters"):
        rope = text.get(field)
        if isinstance(rope, dict):
            plain = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
            ropes[field] = {name: "default" if value == "mrope" else value for name, value in plain.items()}
    return ropes


def _picture_family(names: Any, model_type: Any) -> PictureFamily | None:
    """The family of a config of pictures and text; without `architectures` it follows from `model_type`."""
    for name, family in PICTURE_FAMILIES.items():
        if name in names if isinstance(names, list) else model_type == family.model_type:
            return family
    return None


def _architecture(raw: dict) -> str:
    """The one architecture of the config; without `architectures` it follows from `model_type`."""
    known = ", ".join(FAMILIES)
    names = raw.get("architectures")
    if not names:
        names = architectures_of(raw.get("model_type"))
        if not names:
            _refuse("model_type", raw.get("model_type"), f"known architectures: {known}")
    # A name from a file may be a list or an object, which a dictionary cannot look up.
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(FAMILIES):
        _refuse("architectures", names, f"known: {known}")
    model_type = FAMILIES[names[0]].model_type
    if raw.get("model_type", model_type) != model_type:
        _refuse("model_type", raw["model_type"], f"{names[0]} has {model_type!r}")
    return names[0]


def _check_accepted(raw: dict, family: Family):
    """Refuse what the decoder does not compute."""
    read = {_SCORE_CAP: family.score_softcap, _LOGIT_CAP: family.logit_softcap}
    for field, accepted in (_ACCEPTED | dict(family.accepted)).items():
        value = None if read.get(field) else raw.get(field)
        if field == "partial_rotary_factor" and family.recurrent:
            continue  # read with the rope
        if value is not None and value not in accepted:
            choices = " or ".join(json.dumps(choice) for choice in accepted) or "null"
            _refuse(field, value, f"wanted {choices}")
    # In Llama and Qwen3 `attention_bias` also gives o_proj a bias. Qwen2 ignores it and always has biases on q, k and
    # v, but its kind with experts has a flag of its own.
    if raw.get("qkv_bias", True) is not True and family.qkv_bias:
        _refuse("qkv_bias", raw["qkv_bias"], "wanted true")
    if raw.get("attention_bias") and not family.qkv_bias:
        reason = "a bias on o_proj is not computed; wanted false"
        _refuse("attention_bias", raw["attention_bias"], reason)
    code = raw.get("auto_map") or {}
    if not isinstance(code, dict) or any(name.startswith("AutoModel") for name in code):
        _refuse("auto_map", code, "code from a checkpoint is never run")


def _eos_ids(*files: dict) -> tuple[int, ...]:
    """End-of-sequence ids of config.json, then those that generation_config.json adds."""
    ids = []
    for raw in files:
        value = raw.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if not all(_is_integer(number) for number in ids):
        _refuse("eos_token_id", ids, "wanted an integer or a list of integers")
    return tuple(dict.fromkeys(ids))


def _bos_id(raw: dict) -> int | None:
    value = raw.get("bos_token_id")
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if value is not None and not _is_integer(value):
        _refuse("bos_token_id", value, "wanted an integer")
    return value


# --- Recurrent layers among those of attention ---

_LINEAR = "linear_attention"  # what layer_types calls them
_DELTA_FIELDS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
}


def _recurrent_from_hf(raw: dict, num_layers: int) -> RecurrentConfig | None:
    """The recurrent layers: those that `layer_types` names, or all but every so many."""
    types = raw.get("layer_types")
    if types is None:
        interval = _integer(raw, "full_attention_interval")
        types = [_LINEAR if (index + 1) % interval else _FULL for index in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(x not in (_FULL, _LINEAR) for x in types):
        _refuse("layer_types", types, f"wanted {num_layers} of {_FULL} or {_LINEAR}")
    layers = tuple(index for index, kind in enumerate(types) if kind == _LINEAR)
    if len(layers) == num_layers:
        _refuse("layer_types", types, f"without {_FULL} there is nothing to cache")
    sizes = {name: _integer(raw, field) for name, field in _DELTA_FIELDS.items()}
    if sizes["value_heads"] % sizes["key_heads"]:
        field = _DELTA_FIELDS["value_heads"]
        _refuse(field, sizes["value_heads"], f"wanted a multiple of linear_num_key_heads = {sizes['key_heads']}")
    return RecurrentConfig(layers=layers, **sizes) if layers else None


def _recurrent_to_hf(config: ModelConfig) -> dict:
    shape, ropes = config.recurrent, config.rope if isinstance(config.rope, tuple) else (config.rope,)
    others = () if shape is None else shape.layers
    raw: dict[str, Any] = {
        "layer_types": [_LINEAR if index in others else _FULL for index in range(config.depth)],
        "partial_rotary_factor": 1.0 if ropes[0] is None else ropes[0].fraction,
    }
    return raw if shape is None else raw | {field: getattr(shape, name) for name, field in _DELTA_FIELDS.items()}


def _turned_share(raw: dict, rope: dict, family: Family, head_dim: int, prefix: str) -> float:
    """The share of a head's channels that a rope turns."""
    if family.latent:
        turned = _integer(raw, _TURNED)
        share = turned / (turned + _integer(raw, _LATENT_FIELDS["key_dim"]))
        if not math.isclose(rope.get("partial_rotary_factor") or share, share):
            _refuse(f"{prefix}partial_rotary_factor", rope["partial_rotary_factor"], f"wanted {share:g}")
        return turned / head_dim
    if not family.recurrent:
        if rope.get("partial_rotary_factor") not in (None, 1):
            _refuse(f"{prefix}partial_rotary_factor", rope["partial_rotary_factor"], "wanted 1")
        return 1.0
    field = "partial_rotary_factor"
    share = _number(rope, field, _number(raw, field, 1.0), prefix)
    if share > 1 or int(head_dim * share) % 2 or int(head_dim * share) < 2:
        _refuse(field, share, f"wanted a share of head_dim = {head_dim} that is an even number of channels")
    return share


# --- Sliding windows, layer by layer ---

_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def _windows_from_hf(raw: dict, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer."""
    family = FAMILIES[architecture]
    if family.chunked:
        return _chunks_from_hf(raw, family, num_layers)
    window, types = raw.get("sliding_window"), raw.get("layer_types")
    if family.window_switch and not raw.get("use_sliding_window"):
        window = None
    if window is not None:
        window = _integer(raw, "sliding_window")
    if window is not None and not family.sliding_window:
        name = architecture.removesuffix("ForCausalLM")
        _refuse("sliding_window", window, f"{name} attends to everything; wanted null")
    if types is None:
        types = [_FULL] * num_layers if window is None else _default_types(raw, family, num_layers)
    known = {_FULL: None, _SLIDING: window}
    fits = isinstance(types, list) and len(types) == num_layers
    if not fits or any(name not in list(known) for name in types):
        _refuse("layer_types", types, f"wanted {num_layers} of {_FULL} or {_SLIDING}")
    if window is None and _SLIDING in types:
        _refuse("layer_types", types, f"{_SLIDING} without a sliding window")
    windows = tuple(known[name] for name in types)
    if not family.mixed_windows and windows != (window,) * num_layers:
        _refuse("layer_types", types, f"all layers of {architecture} attend alike")
    return windows


def _layers_with_rope(raw: dict, family: Family, num_layers: int) -> tuple[bool, ...]:
    """Which layers turn queries and keys: all but those of which `no_rope_layers`, a misnomer, has a 0."""
    if not family.chunked:
        return (True,) * num_layers
    marks = raw.get("no_rope_layers")
    if not marks:
        interval = _integer(raw, "no_rope_layer_interval")
        marks = [int((index + 1) % interval > 0) for index in range(num_layers)]
    if not isinstance(marks, list) or len(marks) != num_layers or any(mark not in (0, 1) for mark in marks):
        _refuse("no_rope_layers", marks, f"wanted {num_layers} of 0 or 1")
    return tuple(bool(mark) for mark in marks)


def _chunks_from_hf(raw: dict, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The chunk of each layer: of those with a rope, where `layer_types` says nothing else."""
    chunk, types = raw.get("attention_chunk_size"), raw.get("layer_types")
    if chunk is not None:
        chunk = _integer(raw, "attention_chunk_size")
    if types is None:
        roped = _layers_with_rope(raw, family, num_layers)
        types = [_CHUNKED if on and chunk is not None else _FULL for on in roped]
    if not isinstance(types, list) or len(types) != num_layers or any(x not in (_FULL, _CHUNKED) for x in types):
        _refuse("layer_types", types, f"wanted {num_layers} of {_FULL} or {_CHUNKED}")
    if chunk is None and _CHUNKED in types:
        _refuse("attention_chunk_size", None, f"wanted for layers of {_CHUNKED}")
    return tuple(chunk if name == _CHUNKED else None for name in types)


def _chunks_to_hf(config: ModelConfig) -> dict:
    ropes = config.rope if isinstance(config.rope, tuple) else (config.rope,) * config.num_layers
    chunk = next((window for window in config.windows if window is not None), None)
    normed = config.qk_norm if isinstance(config.qk_norm, tuple) else (config.qk_norm,)
    return {
        "attention_chunk_size": chunk,
        "layer_types": [_FULL if window is None else _CHUNKED for window in config.windows],
        "no_rope_layers": [int(rope is not None and rope.kind != "none") for rope in ropes],
        "use_qk_norm": any(normed),
        "attn_temperature_tuning": config.query_growth > 0,
        **({"attn_scale": config.query_growth, "floor_scale": config.growth_length} if config.query_growth else {}),
    }


def _default_types(raw: dict, family: Family, num_layers: int) -> list[str]:
    """Which layers slide where `layer_types` is absent and there is a window."""
    if family.slides is None:
        return [_SLIDING] * num_layers
    # transformers 5 writes the period of Gemma's layers with an underscore in front.
    edge = raw.get(f"_{family.slides_by}", raw[family.slides_by])
    if not _is_integer(edge) or (edge < 1 and family.slides_by != "max_window_layers"):
        _refuse(family.slides_by, edge, "wanted an integer")
    return [_SLIDING if family.slides(index, edge) else _FULL for index in range(num_layers)]


def _windows_to_hf(config: ModelConfig, family: Family) -> dict:
    window = next((window for window in config.windows if window is not None), None)
    if family.chunked:
        return {}
    raw: dict[str, Any] = {"sliding_window": window}
    if family.window_switch:
        raw["use_sliding_window"] = window is not None
    if family.mixed_windows:
        raw["layer_types"] = [_FULL if window is None else _SLIDING for window in config.windows]
    return raw


# --- Rotary embedding ---
#
# Two spellings are read: `rope_scaling` beside `rope_theta` (transformers 4) and `rope_parameters` (transformers 5).

_LENGTH = "original_max_position_embeddings"
_GROWTH = "llama_4_scaling_beta"
_MSCALE = "mscale_all_dim"
_ROPE_FIELDS = {
    *("rope_type", "type", "rope_theta", "factor", _LENGTH, "partial_rotary_factor", "finetuned"),
    *("low_freq_factor", "high_freq_factor"),
    *("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
    *("short_factor", "long_factor"),
}
_GROWTH_FIELDS = {_GROWTH, "max_position_embeddings"}  # a rope whose queries grow has these too

# The fields of `RopeConfig` that are written for each kind. Kinds that stand here are known.
_WRITTEN = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    "dynamic": ("factor",),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
}


def _ropes_from_hf(
    raw: dict,
    family: Family,
    windows: tuple[int | None, ...],
    roped: tuple[bool, ...],
    head_dim: int,
    length: int | None = None,
) -> RopeConfig | tuple[RopeConfig, ...]:
    """The rope of every layer, for texts of up to `length` tokens; None: up to the length before scaling."""
    if not family.rope_by_type:
        rope = _rope_from_hf(raw, family, head_dim, length)
        return rope if all(roped) else tuple(rope if on else RopeConfig(kind="none") for on in roped)
    of_type = {name: _rope_from_hf(fields, family, head_dim, length) for name, fields in _by_type(raw).items()}
    return tuple(of_type[_FULL if window is None else _SLIDING] for window in windows)


def _by_type(raw: dict) -> dict[str, dict]:
    """The config as layers of each type read it. transformers 5 writes a rope for each; version 4 one that only full
    attention has, and the base of the sliding layers' frequencies beside it."""
    ropes = raw.get("rope_parameters") or {}
    if not isinstance(ropes, dict) or not all(isinstance(ropes.get(name) or {}, dict) for name in (_FULL, _SLIDING)):
        _refuse("rope_parameters", ropes, f"wanted an object with {_FULL} and {_SLIDING}")
    if ropes and not ropes.keys() <= {_FULL, _SLIDING}:
        _refuse("rope_parameters", ropes, f"wanted an object with {_FULL} and {_SLIDING}")
    full = raw | {"rope_parameters": ropes.get(_FULL)}
    sliding = raw | {"rope_parameters": ropes.get(_SLIDING), "rope_scaling": None}
    return {_FULL: full, _SLIDING: sliding | {"rope_theta": raw.get("rope_local_base_freq")}}


def _ropes_to_hf(config: ModelConfig, family: Family) -> dict:
    ropes = config.rope if isinstance(config.rope, tuple) else (config.rope,) * config.num_layers
    if not family.rope_by_type:
        rope = next((rope for rope in ropes if rope is not None and rope.kind != "none"), RopeConfig())
        raw = _rope_to_hf(rope, 0.0 if family.chunked else config.query_growth)
        return _latent_rope_to_hf(config, raw) if family.latent else raw
    of_type = {window is None: rope or RopeConfig() for window, rope in zip(config.windows, ropes, strict=True)}
    # A type that no layer has keeps what it would be read as.
    raw = _rope_to_hf(of_type[True], 0.0) if True in of_type else {}
    return raw | ({"rope_local_base_freq": of_type[False].theta} if False in of_type else {})


def _rope_from_hf(raw: dict, family: Family, head_dim: int, length: int | None = None) -> RopeConfig:
    """One rope for texts of up to `length` tokens; None: up to the length before scaling."""
    rope, prefix = _rope_object(raw, family)
    share = _turned_share(raw, rope, family, head_dim, prefix)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if family.latent and kind != "yarn":
        _refuse(f"{prefix}rope_type", kind, "wanted yarn")
    theta = _number(rope, "rope_theta", _number(raw, "rope_theta", 10000.0), prefix)
    if kind == "default":
        return RopeConfig(theta=theta, fraction=share)
    if share < 1 and not family.latent:
        _refuse(f"{prefix}rope_type", kind, f"wanted default where {share:g} of the channels are turned")
    if kind == "linear":
        factor = _number(rope, "factor", prefix=prefix)
        # The length that Gemma 3 states is the one after scaling, other families' the one before it.
        original = int(_integer(raw, "max_position_embeddings") / factor) if family.rope_by_type else 0
        return RopeConfig(theta=theta, kind=kind, factor=factor, original_max_position=original)
    if kind not in list(_WRITTEN):  # it may be a list, which a dictionary cannot look up
        _refuse(f"{prefix}rope_type", kind, f"known: {', '.join(_WRITTEN)}")

    full = _integer(raw, "max_position_embeddings")
    original = full if kind == "dynamic" else _original_length(raw, rope, prefix)
    if kind == "llama3":
        fields = _llama3(rope, prefix, family)
    elif kind == "yarn":
        fields = _yarn(rope, full / original, prefix)
        if family.latent and fields["attention_factor"] != 1:
            _refuse(f"{prefix}mscale", rope.get("mscale"), f"wanted that of {_MSCALE}: cos and sin are not scaled")
    elif kind == "longrope":
        fields = _longrope(rope, original, full / original, head_dim // 2, prefix)
    else:
        fields = _dynamic(rope, head_dim, prefix)
    config = RopeConfig(theta=theta, kind=kind, original_max_position=original, fraction=share, **fields)
    return config if length is None else config.for_length(length)


def _rope_to_hf(rope: RopeConfig, growth: float) -> dict:
    """The fields of a rope in transformers 4's spelling, which version 5 reads too."""
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    scaling |= {name: getattr(rope, name) for name in _WRITTEN[rope.kind]}
    # The length before scaling of the kinds linear and dynamic follows from max_position_embeddings.
    if rope.original_max_position and rope.kind not in ("linear", "dynamic"):
        scaling[_LENGTH] = rope.original_max_position
    if growth:
        scaling[_GROWTH] = growth
    return {"rope_theta": rope.theta, "rope_scaling": None if rope.kind == "default" else scaling}


def _growth_from_hf(raw: dict, family: Family) -> dict[str, Any]:
    """How fast queries grow, and beyond which length; nothing in families whose queries do not."""
    if family.chunked and raw["attn_temperature_tuning"]:
        return {"query_growth": _number(raw, "attn_scale"), "growth_length": _integer(raw, "floor_scale")}
    if not family.query_growth:
        return {}
    rope, prefix = _rope_object(raw, family)
    return {"query_growth": _number(rope, _GROWTH, prefix=prefix)}


def _rope_object(raw: dict, family: Family) -> tuple[dict, str]:
    """The object that describes the rope, and its name as a prefix of its fields' names."""
    # A non-empty `rope_scaling` wins over `rope_parameters`, as in transformers.
    field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(field) or dict(family.rope_defaults)
    if not isinstance(rope, dict):
        _refuse(field, rope, "wanted an object")
    known = _ROPE_FIELDS | (_GROWTH_FIELDS if family.query_growth else set())
    for name in rope:
        if name not in known:
            _refuse(f"{field}.{name}", rope[name], "the field is unknown")
    return rope, f"{field}."


def _original_length(raw: dict, rope: dict, prefix: str) -> int:
    """The length before scaling: beside the rope's fields, among them, or else the full length."""
    if raw.get(_LENGTH) is not None:
        return _integer(raw, _LENGTH)
    if rope.get(_LENGTH) is not None:
        return _integer(rope, _LENGTH, prefix)
    return _integer(raw, "max_position_embeddings")


def _llama3(rope: dict, prefix: str, family: Family) -> dict:
    read = functools.partial(_number, rope, prefix=prefix)
    low, high = read("low_freq_factor"), read("high_freq_factor")
    # Llama 4 is published with equal ones: no wavelength lies between. transformers warns of it and computes.
    if high < low or (high == low and not family.chunked):
        _refuse(f"{prefix}high_freq_factor", high, f"wanted more than low_freq_factor = {low}")
    return {"factor": read("factor"), "low_freq_factor": low, "high_freq_factor": high}


def _dynamic(rope: dict, head_dim: int, prefix: str) -> dict:
    factor = _number(rope, "factor", prefix=prefix)
    if head_dim == 2 or factor < 1:
        reason = "dynamic wants at least 1, and heads of more than 2 channels"
        _refuse(f"{prefix}factor", factor, reason)
    return {"factor": factor}


def _yarn(rope: dict, ratio: float, prefix: str) -> dict:
    """Yarn's fields. `ratio` of full to original length is the factor where that is null."""
    if "factor" not in rope:
        reason = "wanted a positive number, or null for max_position_embeddings / original"
        _refuse(f"{prefix}factor", None, reason)
    factor = _number(rope, "factor", ratio, prefix)
    return {
        "factor": factor,
        "attention_factor": _yarn_attention_factor(rope, factor, prefix),
        "beta_fast": _number(rope, "beta_fast", 32.0, prefix),
        "beta_slow": _number(rope, "beta_slow", 1.0, prefix),
        "truncate": bool(rope.get("truncate", True)),
    }


def _yarn_attention_factor(rope: dict, factor: float, prefix: str) -> float:
    """Yarn's factor on cos and sin: that of the config, or 0.1 m ln(factor) + 1 (arXiv 2309.00071).

    Of a config with mscale and mscale_all_dim it is the ratio of the two.
    """
    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor", prefix=prefix)

    if rope.get("mscale") and rope.get(_MSCALE):
        numerator = _mscale(factor, _number(rope, "mscale", prefix=prefix))
        return numerator / _mscale(factor, _number(rope, _MSCALE, prefix=prefix))
    return _mscale(factor, 1.0)


def _mscale(factor: float, multiplier: float) -> float:
    """0.1 m ln(factor) + 1, and 1 where nothing is scaled."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def _longrope(rope: dict, original: int, ratio: float, pairs: int, prefix: str) -> dict:
    """Factors of every pair of a head, and the one on cos and sin (arXiv 2402.13753).

    The one on cos and sin is that of the config, or sqrt(1 + ln(factor) / ln(original)). `ratio` of full to original
    length is the factor where the config has none.
    """
    factor = _number(rope, "factor", ratio, prefix)
    factors = {}
    for name in ("short_factor", "long_factor"):
        values = rope.get(name)
        if not isinstance(values, list) or len(values) != pairs:
            reason = f"wanted a list of {pairs} positive numbers, one for each pair of channels"
            _refuse(prefix + name, values, reason)
        factors[name] = tuple(_number({name: value}, name, prefix=prefix) for value in values)
    scale = 1.0
    if factor > 1:
        scale = math.sqrt(1 + math.log(factor) / math.log(max(2, original)))
    attention_factor = _number(rope, "attention_factor", scale, prefix)
    return {"factor": factor, "attention_factor": attention_factor, **factors}


# --- Mixtures of experts ---


def _experts_from_hf(raw: dict, names: ExpertFields | None, num_layers: int) -> ExpertConfig | None:
    """The experts of a model; None for a family, or a model, without them."""
    if names is None:
        return None
    count_field = SHARED_COUNT if raw.get(SHARED_COUNT) is not None else names.count
    if not names.in_every_layer and raw.get(count_field) == 0:
        return None
    count, per_token = _integer(raw, count_field), _integer(raw, "num_experts_per_tok")
    if per_token > count:
        _refuse("num_experts_per_tok", per_token, f"there are {count} experts")
    if names.sigmoid and per_token != 1:
        _refuse("num_experts_per_tok", per_token, "inputs scaled by their scores are computed for one; wanted 1")
    if names.in_every_layer:
        gate: dict[str, Any] = (
            {name: _number(raw, name) for name in ("swiglu_limit", "swiglu_alpha")} if names.limited else {}
        )
        return ExpertConfig(
            count=count,
            per_token=per_token,
            width=_integer(raw, names.width),
            biases=names.biases,
            shared_width=0 if names.shared_width is None else _integer(raw, names.shared_width),
            **gate,
        )
    dense_layers = (_dense_by_step if names.sigmoid else _dense_layers)(raw, names, num_layers)
    if len(dense_layers) == num_layers:
        return None
    width = _integer(raw, names.width)
    shared_width = 0 if names.shared_width is None else _integer(raw, names.shared_width)
    return ExpertConfig(
        count=count,
        per_token=per_token,
        width=width,
        shared_width=shared_width if names.shared_count is None else width * _integer(raw, names.shared_count),
        normalised=not names.sigmoid and bool(raw.get("norm_topk_prob", False)),
        dense_layers=dense_layers,
        sigmoid=names.sigmoid,
        shared_gate=names.shared_gate,
    )


def _dense_layers(raw: dict, names: ExpertFields, num_layers: int) -> tuple[int, ...]:
    """Layers without experts: the first few, or those that are named, and those that the step leaves out."""
    if names.dense_first is not None:
        count = raw.get(names.dense_first)
        if not _is_integer(count) or count < 0:
            _refuse(names.dense_first, count, "wanted a count of layers")
        return tuple(range(min(count, num_layers)))
    dense, step = raw.get("mlp_only_layers") or [], raw.get("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(_is_integer(index) for index in dense):
        _refuse("mlp_only_layers", dense, "wanted a list of layer numbers")
    if not _is_integer(step) or step < 1:
        _refuse("decoder_sparse_step", step, "wanted a positive integer")
    return tuple(index for index in range(num_layers) if index in dense or (index + 1) % step)


def _dense_by_step(raw: dict, names: ExpertFields, num_layers: int) -> tuple[int, ...]:
    """Layers without experts: those that are not named, or that the step leaves out."""
    sparse, step = raw.get("moe_layers"), _integer(raw, "interleave_moe_layer_step")
    if sparse is None:
        sparse = list(range(step - 1, num_layers, step))
    if not isinstance(sparse, list) or not all(_is_integer(index) for index in sparse):
        _refuse("moe_layers", sparse, "wanted a list of layer numbers")
    return tuple(index for index in range(num_layers) if index not in sparse)


def _experts_to_hf(config: ModelConfig, names: ExpertFields | None) -> dict:
    experts = config.experts
    if experts is None and names is not None and names.sigmoid:
        return {"moe_layers": [], names.width: config.mlp_width}
    if experts is None and names is not None and names.dense_first is not None:
        return {names.dense_first: config.depth}
    if experts is None:
        return {} if names is None else {names.count: 0}
    if names is None or not _fits(experts, names, config.mlp_width):
        raise UserError(f"{config.architecture} has no experts like {experts}")
    raw: dict[str, Any] = {names.count: experts.count, "num_experts_per_tok": experts.per_token}
    if names.limited:
        raw |= {"swiglu_limit": experts.swiglu_limit, "swiglu_alpha": experts.swiglu_alpha}
    if names.shared_width is not None and not names.sigmoid:
        raw[names.shared_width] = experts.shared_width
    if names.in_every_layer:
        return raw
    if names.sigmoid:
        return raw | {names.width: experts.width, "moe_layers": list(config.sparse_layers)}
    if names.dense_first is not None and names.shared_count is not None:
        raw |= {names.dense_first: len(experts.dense_layers), names.width: experts.width}
        shared = experts.shared_width // experts.width
        return raw | {names.shared_count: shared, "norm_topk_prob": experts.normalised}
    raw |= {
        names.width: experts.width,
        "norm_topk_prob": experts.normalised,
        "mlp_only_layers": list(experts.dense_layers),
        "decoder_sparse_step": 1,
    }
    return raw


def _fits(experts: ExpertConfig, names: ExpertFields, mlp_width: int) -> bool:
    """Say whether the fields of a family can describe these experts."""
    shares = names.shared_width is not None or names.shared_count is not None
    if (experts.shared_width > 0) != shares or (shares and experts.shared_gate != names.shared_gate):
        return False
    if names.dense_first is not None and experts.dense_layers != tuple(range(len(experts.dense_layers))):
        return False
    if names.shared_count is not None and experts.shared_width % experts.width:
        return False
    if (
        experts.sigmoid != names.sigmoid
        or experts.biases != names.biases
        or (experts.swiglu_limit is not None) != names.limited
    ):
        return False
    if not names.in_every_layer:
        return True
    return experts.normalised and not experts.dense_layers and mlp_width == experts.width


# --- Packed weights (kvqjax/model/checkpoint.py decodes them) ---

_BITS = {"gptq": (4, 8), "awq": (4,)}  # bits of a code that are decoded


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a checkpoint's codes are packed.

    Attributes:
        method: "fp8", "mxfp4", "gptq" or "awq".
        bits: bits of a code.
        offset: what is added to GPTQ's stored zeros.
        block: outputs and inputs that share one scale of FP8; None: one scale for all.
    """

    method: str
    bits: int = 8
    offset: int = 0
    block: tuple[int, int] | None = None


def read_scheme(raw: dict) -> Scheme | None:
    """Read how the weights of a checkpoint are packed.

    Args:
        raw: the contents of config.json.

    Returns:
        The scheme; None for plain numbers.

    Raises:
        UserError: for a scheme that is not decoded here.
    """
    packing = raw.get("quantization_config")
    if packing is None:
        return None
    method = str(packing.get("quant_method")) if isinstance(packing, dict) else ""
    if method not in ("fp8", "mxfp4", *_BITS):
        _refuse("quantization_config", packing, "decoded are quant_method fp8, gptq, awq and mxfp4")
    if method == "mxfp4":
        return Scheme("mxfp4", bits=4)
    if method == "fp8":
        return Scheme("fp8", block=_fp8_block(packing.get("weight_block_size")))
    bits, layout = packing.get("bits", 4), packing.get("version", "gemm")
    if bits not in _BITS[method]:
        choices = " or ".join(map(str, _BITS[method]))
        _refuse("quantization_config.bits", bits, f"{method} is decoded of {choices} bits")
    if method == "awq" and str(layout).lower() != "gemm":
        _refuse("quantization_config.version", layout, "wanted gemm")
    version = packing.get("checkpoint_format", "gptq")
    if method == "gptq" and version not in ("gptq", "gptq_v2"):
        _refuse("quantization_config.checkpoint_format", version, "wanted gptq or gptq_v2")
    return Scheme(method, bits, offset=int(method == "gptq" and version == "gptq"))


def _fp8_block(block: Any) -> tuple[int, int] | None:
    if block is None:
        return None
    pair = isinstance(block, list) and len(block) == 2
    if not pair or not all(isinstance(size, int) and size > 0 for size in block):
        reason = "wanted two positive integers or null"
        _refuse("quantization_config.weight_block_size", block, reason)
    return block[0], block[1]


# --- Single fields ---


def _refuse(field: str, value: Any, wanted: str) -> NoReturn:
    """Raise the one-line UserError for a field of config.json."""
    problem = "is missing" if value is None else f"= {json.dumps(value)} is not supported"
    # A field's name comes from a file and may hold a line break.
    raise UserError(" ".join(f"config.json: {field} {problem}; {wanted}".split()))


def _plain_number(value: float) -> int | float:
    """A number that came back from a root: whole ones, which config classes want as integers, without its rounding."""
    return round(value) if math.isclose(value, round(value), rel_tol=1e-12) else value


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer(raw: dict, field: str, prefix: str = "", most: int = 2**31 - 1) -> int:
    """A positive integer; `prefix` names the object that `raw` is inside config.json."""
    value = raw.get(field)
    if not _is_integer(value) or not 1 <= value <= most:
        _refuse(prefix + field, value, f"wanted a positive integer of at most {most}")
    return value


def _number(raw: dict, field: str, default: float | None = None, prefix: str = "") -> float:
    """A positive number; null means `default`."""
    value = default if raw.get(field) is None else raw[field]
    # Compared with the largest float because a JSON integer can be larger than any.
    if not _is_number(value) or not 0 < value <= sys.float_info.max:
        _refuse(prefix + field, value, "wanted a positive number")
    return float(value)
