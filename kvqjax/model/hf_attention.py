"""Attention in config.json: its heads, or the latents in their place, its scores, its rope."""

import functools
import math
from typing import Any

from kvqjax.model.config import KINDS, LatentHeads, RopeConfig
from kvqjax.model.hf_families import Family
from kvqjax.model.hf_fields import read_integer, read_number, refuse
from kvqjax.model.hf_layers import FULL_ATTENTION, SLIDING_ATTENTION

# --- Heads, and latents in their place ---

_LATENT_FIELDS = {
    "query_rank": "q_lora_rank",
    "key_dim": "qk_nope_head_dim",
    "value_dim": "v_head_dim",
}
_LATENT, _TURNED = "kv_lora_rank", "qk_rope_head_dim"


def heads_from_hf(raw: dict, family: Family, width: int, heads: int) -> dict[str, Any]:
    """Read the KV heads, the width of a head, and the scale of its scores.

    Args:
        raw: the contents of config.json, with the family's defaults.
        heads: how many query heads a layer has.

    Returns:
        Fields of `ModelConfig`.

    Raises:
        UserError: for a field that is missing, malformed, or asks for what the decoder does not
            compute.
    """
    if raw.get("head_dim") is not None:
        head_dim = read_integer(raw, "head_dim")
    else:
        if width % heads:
            wanted = f"without head_dim wanted a multiple of num_attention_heads={heads}"
            refuse("hidden_size", width, wanted)
        head_dim = width // heads
    kv_heads = heads
    if raw.get("num_key_value_heads") is not None:
        kv_heads = read_integer(raw, "num_key_value_heads")
    return {
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "scale": _scale_from_hf(raw, family, head_dim),
    }


def latents_from_hf(raw: dict, family: Family, heads: int) -> dict[str, Any]:
    """Read the one KV head that latents are, and the scale of scores.

    The scale is that of the heads which the latents stand for, times the square of yarn's factor of
    all channels.

    Args:
        raw: the contents of config.json, with the family's defaults.
        heads: how many query heads a layer has.

    Returns:
        Fields of `ModelConfig`.

    Raises:
        UserError: for a field that is missing, malformed, or asks for what the decoder does not
            compute.
    """
    if raw.get("num_key_value_heads") not in (None, heads):
        refuse(
            "num_key_value_heads", raw["num_key_value_heads"], f"wanted num_attention_heads={heads}"
        )
    fields = {name: read_integer(raw, field) for name, field in _LATENT_FIELDS.items()}
    sizes = LatentHeads(**fields)
    latent = read_integer(raw, _LATENT)
    turned = read_integer(raw, _TURNED)
    if latent % 2 or turned % 2:
        refuse(_LATENT, latent, f"it and {_TURNED}={turned} are wanted even")
    dim = sizes.key_dim + turned
    if raw.get("head_dim") not in (None, dim):
        refuse("head_dim", raw["head_dim"], f"wanted the sum of the two parts of a key, {dim}")
    rope, prefix = _rope_object(raw, family)
    scale = dim**-0.5
    if rope.get(_MSCALE):
        factor = read_number(rope, "factor", prefix=prefix)
        multiplier = read_number(rope, _MSCALE, prefix=prefix)
        scale *= _mscale(factor, multiplier) ** 2
    return {
        "num_kv_heads": 1,
        "head_dim": latent + turned,
        "latent": latent,
        "latent_heads": sizes,
        "scale": scale,
    }


# --- Scores ---

_SCALE = "query_pre_attn_scalar"


def _scale_from_hf(raw: dict, family: Family, head_dim: int) -> float | None:
    """Give the factor of the scores; None for D^-1/2, which most families have."""
    if not family.query_scale:
        return None
    divisor = read_number(raw, _SCALE)
    if divisor == head_dim:
        return None
    return divisor**-0.5


# --- Rotary embedding ---
#
# Two spellings are read: `rope_scaling` beside `rope_theta` (transformers 4) and `rope_parameters`
# (transformers 5).

_LENGTH = "original_max_position_embeddings"
_GROWTH = "llama_4_scaling_beta"
_MSCALE = "mscale_all_dim"
_ROPE_FIELDS = {
    *("rope_type", "type", "rope_theta", "factor", _LENGTH, "partial_rotary_factor", "finetuned"),
    *("low_freq_factor", "high_freq_factor"),
    *("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
    *("short_factor", "long_factor"),
}
KNOWN_KINDS = tuple(kind for kind in KINDS if kind != "none")
_GROWTH_FIELDS = {_GROWTH, "max_position_embeddings"}  # a rope whose queries grow has these too


def ropes_from_hf(
    raw: dict,
    family: Family,
    windows: tuple[int | None, ...],
    roped: tuple[bool, ...],
    head_dim: int,
    length: int | None = None,
) -> RopeConfig | tuple[RopeConfig, ...]:
    """Read the rope of every layer.

    Args:
        raw: the contents of config.json, with the family's defaults.
        windows: the sliding window of each layer with attention.
        roped: whether each of these layers has a rope.
        head_dim: the width of a head.
        length: the longest text in tokens; None: as long as the length before scaling.

    Returns:
        The rope that all layers share, or one for each layer.

    Raises:
        UserError: for a field that is missing, malformed, or asks for what the decoder does not
            compute.
    """
    if not family.rope_by_type:
        rope = _rope_from_hf(raw, family, head_dim, length)
        if all(roped):
            return rope
        return tuple(rope if has_rope else RopeConfig(kind="none") for has_rope in roped)
    of_type = {}
    for name, fields in _by_type(raw).items():
        of_type[name] = _rope_from_hf(fields, family, head_dim, length)
    ropes = []
    for window in windows:
        ropes.append(of_type[FULL_ATTENTION if window is None else SLIDING_ATTENTION])
    return tuple(ropes)


def _by_type(raw: dict) -> dict[str, dict]:
    """Give the config as layers of each type read it. transformers 5 writes a rope for each type.
    Version 4 writes a rope for full attention alone, and beside it the base of the sliding layers'
    frequencies."""
    ropes = raw.get("rope_parameters") or {}
    if not _are_ropes_by_type(ropes):
        wanted = f"wanted an object with {FULL_ATTENTION} and {SLIDING_ATTENTION}"
        refuse("rope_parameters", ropes, wanted)
    full_attention = {"rope_parameters": ropes.get(FULL_ATTENTION)}
    sliding_attention = {
        "rope_parameters": ropes.get(SLIDING_ATTENTION),
        "rope_scaling": None,
        "rope_theta": raw.get("rope_local_base_freq"),
    }
    return {FULL_ATTENTION: raw | full_attention, SLIDING_ATTENTION: raw | sliding_attention}


def _are_ropes_by_type(ropes: Any) -> bool:
    """Say whether a field has a rope, or null, for layers of each type and for nothing else."""
    if not isinstance(ropes, dict):
        return False
    if not ropes.keys() <= {FULL_ATTENTION, SLIDING_ATTENTION}:
        return False
    return all(isinstance(rope or {}, dict) for rope in ropes.values())


def _rope_from_hf(
    raw: dict, family: Family, head_dim: int, length: int | None = None
) -> RopeConfig:
    """Read one rope for texts of up to `length` tokens; None: up to the length before scaling."""
    rope, prefix = _rope_object(raw, family)
    share = _turned_share(raw, rope, family, head_dim, prefix)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if family.latent and kind != "yarn":
        refuse(f"{prefix}rope_type", kind, "wanted yarn")
    theta = read_number(rope, "rope_theta", read_number(raw, "rope_theta", 10000.0), prefix)
    # Queries grow from this length on, which other kinds than these have for themselves.
    growth_length = 0
    if family.query_growth and kind in ("default", "linear", "dynamic"):
        growth_length = read_integer(rope, _LENGTH, prefix)
    if kind == "default":
        return RopeConfig(theta=theta, fraction=share, original_max_position=growth_length)
    if kind == "linear":
        factor = read_number(rope, "factor", prefix=prefix)
        scaled_length = 0
        # The length that Gemma 3 states is the one after scaling, other families' the one before
        # it.
        if family.rope_by_type:
            scaled_length = read_integer(raw, "max_position_embeddings")
        original_length = growth_length or int(scaled_length / factor)
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=factor,
            original_max_position=original_length,
            fraction=share,
        )
    if kind not in KNOWN_KINDS:
        refuse(f"{prefix}rope_type", kind, f"known: {', '.join(KNOWN_KINDS)}")

    full_length = read_integer(raw, "max_position_embeddings")
    original_length = full_length
    if kind != "dynamic":
        original_length = _original_length(raw, rope, prefix)
    ratio = full_length / original_length
    turned = int(head_dim * share)  # channels
    if growth_length not in (0, original_length):
        refuse(f"{prefix}{_LENGTH}", growth_length, f"wanted {original_length}, as for the rope")
    if kind == "llama3":
        fields = _llama3(rope, prefix, family)
    elif kind == "yarn":
        fields = _yarn(rope, ratio, prefix)
        if family.latent and fields["attention_factor"] != 1:
            wanted = f"wanted that of {_MSCALE}: cos and sin are not scaled"
            refuse(f"{prefix}mscale", rope.get("mscale"), wanted)
    elif kind == "longrope":
        fields = _longrope(rope, original_length, ratio, turned // 2, prefix)
    else:
        fields = _dynamic(rope, turned, prefix)
    config = RopeConfig(
        theta=theta, kind=kind, original_max_position=original_length, fraction=share, **fields
    )
    if length is None:
        return config
    return config.for_length(length)


def _turned_share(raw: dict, rope: dict, family: Family, head_dim: int, prefix: str) -> float:
    """Read the share of a head's channels that a rope turns."""
    if family.latent:
        turned = read_integer(raw, _TURNED)
        # The config counts the channels of a key, the cache those of the latent in their place.
        share = turned / (turned + read_integer(raw, _LATENT_FIELDS["key_dim"]))
        if not math.isclose(rope.get("partial_rotary_factor") or share, share):
            refuse(
                f"{prefix}partial_rotary_factor", rope["partial_rotary_factor"], f"wanted {share:g}"
            )
        return turned / head_dim
    if not family.recurrent:
        if rope.get("partial_rotary_factor") not in (None, 1):
            refuse(f"{prefix}partial_rotary_factor", rope["partial_rotary_factor"], "wanted 1")
        return 1.0
    field = "partial_rotary_factor"
    share = read_number(rope, field, read_number(raw, field, 1.0), prefix)
    turned = int(head_dim * share)
    if share > 1 or turned % 2 or turned < 2:
        wanted = f"wanted a share of head_dim = {head_dim} that is an even number of channels"
        refuse(field, share, wanted)
    return share


def growth_from_hf(raw: dict, family: Family) -> dict[str, Any]:
    """Read how fast queries grow with their position, and beyond which length.

    Args:
        raw: the contents of config.json, with the family's defaults.

    Returns:
        Fields of `ModelConfig`; none in families whose queries do not grow.

    Raises:
        UserError: for a field that is missing, malformed, or asks for what the decoder does not
            compute.
    """
    if family.chunked and raw["attn_temperature_tuning"]:
        return {
            "query_growth": read_number(raw, "attn_scale"),
            "growth_length": read_integer(raw, "floor_scale"),
        }
    if not family.query_growth:
        return {}
    rope, prefix = _rope_object(raw, family)
    return {"query_growth": read_number(rope, _GROWTH, prefix=prefix)}


def _rope_object(raw: dict, family: Family) -> tuple[dict, str]:
    """Find the object that describes the rope, and its name as a prefix of its fields' names."""
    # A non-empty `rope_scaling` wins over `rope_parameters`, as in transformers.
    field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(field) or dict(family.rope_defaults)
    if not isinstance(rope, dict):
        refuse(field, rope, "wanted an object")
    fields = _ROPE_FIELDS
    if family.query_growth:
        fields = fields | _GROWTH_FIELDS
    for name in rope:
        if name not in fields:
            refuse(f"{field}.{name}", rope[name], "the field is unknown")
    return rope, f"{field}."


def _original_length(raw: dict, rope: dict, prefix: str) -> int:
    """Read the length before scaling: beside the rope's fields, among them, or else the full
    length."""
    if raw.get(_LENGTH) is not None:
        return read_integer(raw, _LENGTH)
    if rope.get(_LENGTH) is not None:
        return read_integer(rope, _LENGTH, prefix)
    return read_integer(raw, "max_position_embeddings")


def _llama3(rope: dict, prefix: str, family: Family) -> dict:
    """Read the fields of Llama 3's kind."""
    read = functools.partial(read_number, rope, prefix=prefix)
    low = read("low_freq_factor")
    high = read("high_freq_factor")
    # Llama 4 is published with equal factors: no wavelength lies between. transformers warns of
    # that and computes.
    if high < low or (high == low and not family.chunked):
        refuse(f"{prefix}high_freq_factor", high, f"wanted more than low_freq_factor = {low}")
    return {"factor": read("factor"), "low_freq_factor": low, "high_freq_factor": high}


def _dynamic(rope: dict, head_dim: int, prefix: str) -> dict:
    """Read the field of the kind dynamic. `head_dim` counts the channels that are turned."""
    factor = read_number(rope, "factor", prefix=prefix)
    if head_dim == 2 or factor < 1:
        reason = "dynamic wants at least 1, and heads of more than 2 channels"
        refuse(f"{prefix}factor", factor, reason)
    return {"factor": factor}


def _yarn(rope: dict, ratio: float, prefix: str) -> dict:
    """Read yarn's fields. A factor of null stands for `ratio`, the full length over the original
    one."""
    if "factor" not in rope:
        reason = "wanted a positive number, or null for max_position_embeddings / original"
        refuse(f"{prefix}factor", None, reason)
    factor = read_number(rope, "factor", ratio, prefix)
    return {
        "factor": factor,
        "attention_factor": _yarn_attention_factor(rope, factor, prefix),
        "beta_fast": read_number(rope, "beta_fast", 32.0, prefix),
        "beta_slow": read_number(rope, "beta_slow", 1.0, prefix),
        "truncate": bool(rope.get("truncate", True)),
    }


def _yarn_attention_factor(rope: dict, factor: float, prefix: str) -> float:
    """Give yarn's factor on cos and sin: that of the config, or 0.1 m ln(factor) + 1 (arXiv
    2309.00071).

    In a config with mscale and mscale_all_dim it is the ratio of the two.
    """
    if rope.get("attention_factor") is not None:
        return read_number(rope, "attention_factor", prefix=prefix)

    if rope.get("mscale") and rope.get(_MSCALE):
        numerator = _mscale(factor, read_number(rope, "mscale", prefix=prefix))
        return numerator / _mscale(factor, read_number(rope, _MSCALE, prefix=prefix))
    return _mscale(factor, 1.0)


def _mscale(factor: float, multiplier: float) -> float:
    """Compute 0.1 m ln(factor) + 1, and 1 where nothing is scaled."""
    if factor <= 1:
        return 1.0
    return 0.1 * multiplier * math.log(factor) + 1.0


def _longrope(rope: dict, original: int, ratio: float, pairs: int, prefix: str) -> dict:
    """Read the factors of every pair of a head, and the one on cos and sin (arXiv 2402.13753).

    The factor on cos and sin is that of the config, or sqrt(1 + ln(factor) / ln(original)). Where
    the config has no factor, it is `ratio`, the full length over the original one.
    """
    factor = read_number(rope, "factor", ratio, prefix)
    factors = {}
    for name in ("short_factor", "long_factor"):
        values = rope.get(name)
        if not isinstance(values, list | tuple) or len(values) != pairs:
            reason = f"wanted a list of {pairs} positive numbers, one for each pair of channels"
            refuse(prefix + name, values, reason)
        factors[name] = tuple(read_number({name: value}, name, prefix=prefix) for value in values)
    scale = 1.0
    if factor > 1:
        scale = math.sqrt(1 + math.log(factor) / math.log(max(2, original)))
    attention_factor = read_number(rope, "attention_factor", scale, prefix)
    return {"factor": factor, "attention_factor": attention_factor, **factors}
