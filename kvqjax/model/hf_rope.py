"""Rotary embedding of a Hugging Face config, in both spellings: `rope_scaling` + `rope_theta` (transformers 4) and
`rope_parameters` (transformers 5)."""

import functools
import math
from typing import Any

from kvqjax.model.config import RopeConfig
from kvqjax.model.hf_fields import integer, number, refuse

__all__ = ["growth_from_hf", "rope_from_hf", "rope_to_hf"]

_LENGTH = "original_max_position_embeddings"
_FIELDS = {
    *("rope_type", "type", "rope_theta", "factor", _LENGTH, "partial_rotary_factor", "finetuned"),
    *("low_freq_factor", "high_freq_factor"),
    *("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
    *("short_factor", "long_factor"),
}
_GROWTH, _FULL = "llama_4_scaling_beta", "max_position_embeddings"
_MINISTRAL3 = {  # what its config class has where nothing is said
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    _LENGTH: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _GROWTH: 0.1,
}
_WRITTEN = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    "dynamic": ("factor",),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
}


def _attention_factor(rope: dict, factor: float, prefix: str) -> float:
    """Yarn's factor on cos and sin: given, or 0.1 m ln(factor) + 1 (arXiv 2309.00071; with mscale, a ratio of two)."""
    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor", prefix=prefix)

    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(number(rope, "mscale", prefix=prefix)) / scale(number(rope, "mscale_all_dim", prefix=prefix))
    return scale(1.0)


def _yarn(rope: dict, ratio: float, prefix: str) -> dict:
    """`ratio` of full to original length is the factor when none is given."""
    if "factor" not in rope:
        refuse(f"{prefix}factor", None, "wanted a positive number, or null for max_position_embeddings / original")
    factor = number(rope, "factor", ratio, prefix)
    return {
        "factor": factor,
        "attention_factor": _attention_factor(rope, factor, prefix),
        "beta_fast": number(rope, "beta_fast", 32.0, prefix),
        "beta_slow": number(rope, "beta_slow", 1.0, prefix),
        "truncate": bool(rope.get("truncate", True)),
    }


def _longrope(rope: dict, original: int, ratio: float, pairs: int, prefix: str) -> dict:
    """Factors of every pair of a head, and the one on cos and sin: given, or sqrt(1 + ln(factor) / ln(original))
    (arXiv 2402.13753). `ratio` of full to original length is the factor when none is given."""
    factor, found = number(rope, "factor", ratio, prefix), {}
    for name in ("short_factor", "long_factor"):
        given = rope.get(name)
        if not isinstance(given, list) or len(given) != pairs:
            refuse(prefix + name, given, f"wanted a list of {pairs} positive numbers, one for each pair of channels")
        found[name] = tuple(number({name: x}, name, prefix=prefix) for x in given)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(max(2, original)))
    return {"factor": factor, "attention_factor": number(rope, "attention_factor", scale, prefix), **found}


def _llama3(rope: dict, prefix: str) -> dict:
    read = functools.partial(number, rope, prefix=prefix)
    low, high = read("low_freq_factor"), read("high_freq_factor")
    if high <= low:
        refuse(f"{prefix}high_freq_factor", high, f"wanted more than low_freq_factor = {low}")
    return {"factor": read("factor"), "low_freq_factor": low, "high_freq_factor": high}


def _original_length(raw: dict, rope: dict, prefix: str) -> int:
    """Length before scaling: beside the rope fields, among them, or else the full length."""
    if raw.get(_LENGTH) is not None:
        return integer(raw, _LENGTH)
    if rope.get(_LENGTH) is not None:
        return integer(rope, _LENGTH, prefix)
    return integer(raw, "max_position_embeddings")


def _fields(raw: dict) -> tuple[dict, str]:
    """The object that describes the rope, and where it stands; a non-empty `rope_scaling` wins over
    `rope_parameters`, as in transformers."""
    field, grows = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters", raw["model_type"] == "ministral3"
    rope, prefix = raw.get(field) or (_MINISTRAL3 if grows else {}), f"{field}."
    if not isinstance(rope, dict):
        refuse(field, rope, "wanted an object")
    for name in rope:
        if name not in _FIELDS | ({_GROWTH, _FULL} if grows else set()):
            refuse(prefix + name, rope[name], "the field is unknown")
    return rope, prefix


def growth_from_hf(raw: dict) -> float:
    """How fast queries grow beyond the length before scaling."""
    rope, prefix = _fields(raw)
    return number(rope, _GROWTH, prefix=prefix) if raw["model_type"] == "ministral3" else 0.0


def rope_from_hf(raw: dict, head_dim: int, length: int | None = None) -> RopeConfig:
    """RopeConfig of a config.json, for texts of up to `length` tokens; None: up to the length before scaling."""
    rope, prefix = _fields(raw)
    if rope.get("partial_rotary_factor") not in (None, 1):
        refuse(f"{prefix}partial_rotary_factor", rope["partial_rotary_factor"], "wanted 1")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = number(rope, "rope_theta", number(raw, "rope_theta", 10000.0), prefix)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=number(rope, "factor", prefix=prefix))
    if kind not in list(_WRITTEN):
        refuse(f"{prefix}rope_type", kind, f"known: {', '.join(_WRITTEN)}")
    full = integer(raw, "max_position_embeddings")
    fields: dict[str, Any] = {}
    original = full if kind == "dynamic" else _original_length(raw, rope, prefix)
    if kind == "llama3":
        fields |= _llama3(rope, prefix)
    elif kind == "yarn":
        fields |= _yarn(rope, full / original, prefix)
    elif kind == "longrope":
        fields |= _longrope(rope, original, full / original, head_dim // 2, prefix)
    else:
        fields |= {"factor": number(rope, "factor", prefix=prefix)}
        if head_dim == 2 or fields["factor"] < 1:
            refuse(f"{prefix}factor", fields["factor"], "dynamic wants at least 1, and heads of more than 2 channels")
    found = RopeConfig(theta=theta, kind=kind, original_max_position=original, **fields)
    return found if length is None else found.for_length(length)


def rope_to_hf(rope: RopeConfig, growth: float = 0.0) -> dict:
    """The fields of config.json for a RopeConfig, in transformers 4's spelling, which version 5 reads too."""
    scaling = {"rope_type": rope.kind} | {name: getattr(rope, name) for name in _WRITTEN[rope.kind]}
    if rope.original_max_position and rope.kind != "dynamic":  # whose is the full length
        scaling[_LENGTH] = rope.original_max_position
    scaling |= {_GROWTH: growth} if growth else {}
    return {"rope_theta": rope.theta, "rope_scaling": None if rope.kind == "default" else scaling}
