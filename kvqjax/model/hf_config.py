"""Hugging Face's config.json as a `ModelConfig`: which model it is, and how its weights are packed.

A field that changes what a model computes is either read or refused by its name and value. An
unknown field is ignored. An absent field has the default of transformers' config class
(kvqjax/model/hf_families.py).

The parts of a config have files of their own: heads and their rope hf_attention.py, the kinds of
layers hf_layers.py, experts hf_experts.py, single fields hf_fields.py.
"""

import dataclasses
from pathlib import Path
from typing import Any

from kvqjax._errors import UserError
from kvqjax._files import path_of, read_object
from kvqjax.model.config import ModelConfig
from kvqjax.model.gguf_file import is_gguf
from kvqjax.model.gguf_model import read_fields
from kvqjax.model.hf_attention import (
    growth_from_hf,
    heads_from_hf,
    latents_from_hf,
    ropes_from_hf,
)
from kvqjax.model.hf_experts import experts_from_hf
from kvqjax.model.hf_families import FAMILIES, PICTURE_FAMILIES, PictureFamily, architectures_of
from kvqjax.model.hf_fields import (
    LOGIT_CAP,
    SCORE_CAP,
    check_accepted,
    read_bos_id,
    read_eos_ids,
    read_integer,
    read_number,
    read_softcap,
    refuse,
)
from kvqjax.model.hf_layers import (
    layers_with_rope,
    recurrent_from_hf,
    windows_from_hf,
)

MOST_LAYERS = 10_000  # layers; a tuple of this length is made before anything else is checked

# --- config.json as a whole ---


def read_config(path: str | Path, rope_length: int | None = None) -> ModelConfig:
    """Read the config of a Hugging Face folder or a GGUF file.

    Args:
        path: the folder, its config.json, or the file.
        rope_length: the longest text, as `parse_config` has it.

    Returns:
        The config, with the end tokens of generation_config.json where that file lies beside
        config.json.

    Raises:
        UserError: for an absent file, one that is not JSON, or a field that is not supported.
    """
    path = path_of(path)
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
    generation_file = file.with_name("generation_config.json")
    generation = read_object(generation_file) if generation_file.exists() else None
    return parse_config(read_object(file), generation, rope_length)


def parse_config(
    raw: dict, generation: dict | None = None, rope_length: int | None = None
) -> ModelConfig:
    """Make a config from the contents of config.json.

    Args:
        generation: the contents of generation_config.json, where the folder has one.
        rope_length: the longest text in tokens, for the kinds of rope that depend on it
            (`RopeConfig`). None stands for the length that the model was trained on first.

    Returns:
        The config of the language model.

    Raises:
        UserError: for a field that is missing, malformed, or asks for what the decoder does not
            compute.
    """
    raw = _language_part(raw)
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    raw = {"model_type": family.model_type, **family.defaults, **raw}
    layers = read_integer(raw, "num_hidden_layers", most=MOST_LAYERS)
    recurrent = None
    if family.recurrent:
        recurrent = recurrent_from_hf(raw, layers)
        raw = raw | _without_sections(raw) | {"layer_types": None}
    attention = layers - (0 if recurrent is None else len(recurrent.layers))
    windows = windows_from_hf(raw, architecture, attention)
    roped = layers_with_rope(raw, family, len(windows))
    check_accepted(raw, family)
    read_scheme(raw)  # refuses weights that cannot be decoded before any of them is read

    width = read_integer(raw, "hidden_size")
    heads = read_integer(raw, "num_attention_heads")
    sizes = (
        latents_from_hf(raw, family, heads)
        if family.latent
        else heads_from_hf(raw, family, width, heads)
    )
    fields: dict[str, Any] = {
        "vocab_size": read_integer(raw, "vocab_size"),
        "width": width,
        "mlp_width": read_integer(raw, family.mlp_width),
        "num_layers": attention,
        "recurrent": recurrent,
        "output_gate": family.recurrent,
        "num_heads": heads,
        **sizes,
        "rope": ropes_from_hf(raw, family, windows, roped, sizes["head_dim"], rope_length),
        "experts": experts_from_hf(raw, family.experts, layers),
        **growth_from_hf(raw, family),
        "norm_eps": read_number(raw, "rms_norm_eps", 1e-6),
        "qkv_bias": family.qkv_bias,
        "qk_norm": tuple(bool(raw["use_qk_norm"]) and on for on in roped)
        if family.chunked
        else family.qk_norm,
        "qk_gain": not family.chunked,
        "chunked": tuple(window is not None for window in windows) if family.chunked else False,
        "norm_offset": family.norm_offset,
        "output_bias": family.output_bias,
        "score_sinks": family.score_sinks,
        "post_norms": family.post_norms,
        "activation": family.activation,
        "embedding_scale": width**0.5 if family.scaled_embedding else 1.0,
        "softcap": read_softcap(raw, SCORE_CAP, family.score_softcap),
        "logit_softcap": read_softcap(raw, LOGIT_CAP, family.logit_softcap),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "sliding_window": windows,
        "max_position": read_integer(raw, "max_position_embeddings"),
        "eos_ids": read_eos_ids(raw, generation or {}),
        "bos_id": read_bos_id(raw),
        "architecture": architecture,
    }
    try:
        return ModelConfig(**fields)
    except ValueError as error:
        raise UserError(f"config.json: {error}") from error


# --- Architecture ---


def _language_part(raw: dict) -> dict:
    """The config of the language part of a checkpoint of pictures and text; any other as it is."""
    names, text = raw.get("architectures"), raw.get("text_config")
    family = _picture_family(names, raw.get("model_type"))
    if family is None:
        if text is None and ("vision_config" in raw or "Vision" in str(names)):
            refuse("architectures", names, "a vision model without a language part")
        return raw
    first = next(iter(family.languages))
    if text is None and family.flat:
        text = raw | {"model_type": first}
    if not isinstance(text, dict):
        refuse("text_config", text, "wanted the language part's config")
    kind = text.get("model_type", first)
    if kind not in list(family.languages):  # it may be a list, which a dictionary cannot look up
        refuse("text_config.model_type", kind, f"wanted {' or '.join(family.languages)}")
    architecture = family.languages[kind]
    # transformers writes these for the whole checkpoint, outside of the language part.
    shared = (
        "quantization_config", "tie_word_embeddings", "eos_token_id", "bos_token_id", "auto_map",
    )  # fmt: skip
    outer = {name: raw[name] for name in shared if raw.get(name) is not None}
    fixed = {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].model_type,
        **family.fixed,
    }
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
            ropes[field] = {
                name: "default" if value == "mrope" else value for name, value in plain.items()
            }
    return ropes


def _picture_family(names: Any, model_type: Any) -> PictureFamily | None:
    """The family of a config of pictures and text; without `architectures` it follows from
    `model_type`."""
    for name, family in PICTURE_FAMILIES.items():
        if name in names if isinstance(names, list) else model_type == family.model_type:
            return family
    return None


def _architecture(raw: dict) -> str:
    """The one architecture of the config; without `architectures` it follows from `model_type`."""
    families = ", ".join(FAMILIES)
    names = raw.get("architectures")
    if not names:
        names = architectures_of(raw.get("model_type"))
        if not names:
            refuse("model_type", raw.get("model_type"), f"known architectures: {families}")
    # A name from a file may be a list or an object, which a dictionary cannot look up.
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(FAMILIES):
        refuse("architectures", names, f"known: {families}")
    model_type = FAMILIES[names[0]].model_type
    if raw.get("model_type", model_type) != model_type:
        refuse("model_type", raw["model_type"], f"{names[0]} has {model_type!r}")
    return names[0]


# --- Packed weights (kvqjax/model/checkpoint.py decodes them) ---

_BITS = {"gptq": (4, 8), "awq": (4,)}  # bits of a code that are decoded


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The packing of a checkpoint's codes.

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
        refuse("quantization_config", packing, "decoded are quant_method fp8, gptq, awq and mxfp4")
    if method == "mxfp4":
        return Scheme("mxfp4", bits=4)
    if method == "fp8":
        return Scheme("fp8", block=_fp8_block(packing.get("weight_block_size")))
    bits, layout = packing.get("bits", 4), packing.get("version", "gemm")
    if bits not in _BITS[method]:
        choices = " or ".join(map(str, _BITS[method]))
        refuse("quantization_config.bits", bits, f"{method} is decoded of {choices} bits")
    if method == "awq" and str(layout).lower() != "gemm":
        refuse("quantization_config.version", layout, "wanted gemm")
    version = packing.get("checkpoint_format", "gptq")
    if method == "gptq" and version not in ("gptq", "gptq_v2"):
        refuse("quantization_config.checkpoint_format", version, "wanted gptq or gptq_v2")
    return Scheme(method, bits, offset=int(method == "gptq" and version == "gptq"))


def _fp8_block(block: Any) -> tuple[int, int] | None:
    if block is None:
        return None
    pair = isinstance(block, list) and len(block) == 2
    if not pair or not all(isinstance(size, int) and size > 0 for size in block):
        reason = "wanted two positive integers or null"
        refuse("quantization_config.weight_block_size", block, reason)
    return block[0], block[1]
