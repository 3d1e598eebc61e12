"""Which wirings of keys and values the packed kernels can read, and their stored fields in the kernels' terms."""

import dataclasses

import jax.numpy as jnp

from kvqjax.codecs import CodecSpec, Uniform
from kvqjax.codecs.balanced import Balanced
from kvqjax.codecs.commvq_keys import CommVQKeys
from kvqjax.codecs.commvq_values import CommVQValues
from kvqjax.codecs.higgs import Higgs, group_size, shipped_grid
from kvqjax.codecs.nuq import Nuq, channel_range, read_signposts
from kvqjax.codecs.scaled import Scaled
from kvqjax.methods.wiring import Packed
from kvqjax.model.config import KVShape
from kvqjax.model.rope import inverse_frequencies
from kvqjax.pallas_kernels.commvq import CommVQBody, CommVQSpec, decoding_matrix
from kvqjax.pallas_kernels.higgs import HiggsBody, HiggsSpec, HiggsStored
from kvqjax.pallas_kernels.latents import LatentBody, LatentSpec
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec, Rope, Signposts

__all__ = ["commvq_form", "latent_form", "packed_form"]

# Tokens that the plain path reads at a time: whole planes of any width, and few enough for a CPU's cache.
BLOCK = 1024


def packed_form(key: CodecSpec, value: CodecSpec, rope: str, config: KVShape) -> Packed | None:
    """How packed kernels see keys per channel and values per token, both uniform (KIVI, and with factors OScaR and
    KVarN) or both with signposts (KVQuant), or both with vector grids (HIGGS); None for what they do not read."""
    if isinstance(key, Scaled | Balanced):
        return _scaled_form(key, value, rope, config)
    if isinstance(key, Uniform) and isinstance(value, Uniform):
        if (key.along, value.along) != ("tokens", "channels") or key.dtype != value.dtype:
            return None
        groups = {"key_group": key.group, "value_group": min(value.group, config.kv_width)}
        return Packed(_spec(key, value, rope, config, **groups), _uniform_body)
    if isinstance(key, Nuq) and isinstance(value, Nuq):
        kinds = {value.dtype, key.outlier_dtype, value.outlier_dtype}
        if (key.per, value.per) != ("channel", "token") or len(kinds) > 1:
            return None
        slots = {"key_slots": key.slot_count(config.kv_width), "value_slots": value.slot_count(config.kv_width)}
        groups = {"key_group": 0, "value_group": config.kv_width}
        return Packed(_spec(key, value, rope, config, datatype="nuq", **slots, **groups), _nuq_body(key, value))
    if isinstance(key, Higgs) and isinstance(value, Higgs):
        return _higgs_form(key, value, rope, config)
    return None


def _scaled_form(key: Scaled | Balanced, value: CodecSpec, rope: str, config: KVShape) -> Packed | None:
    """Uniform keys times factors of their tokens, and values as they are (OScaR) or times factors of channels and key
    groups (KVarN)."""
    balanced = isinstance(value, Balanced)
    own = key.inner(config.kv_width) if isinstance(key, Balanced) else key.inner
    parts = key.heads if isinstance(key, Balanced) else key.parts
    inner = packed_form(own, value.inner(config.kv_width) if balanced else value, rope, config)
    # Signposts and grids take no factors, and no kernel rotates keys that have some.
    if inner is None or not isinstance(inner.spec, PackedSpec) or inner.spec.datatype != "uniform" or rope != "post":
        return None
    if not isinstance(own, Uniform) or key.dtype != own.dtype:
        return None
    if balanced and value.group != own.group:
        return None
    spec = dataclasses.replace(inner.spec, key_factors=parts, value_factors=balanced)

    def body(weights, constants, stored, positions) -> PackedBody:
        plain = inner.body(weights, constants, stored, positions)
        ((factor,), *more) = stored["k"]["factor"], *([stored["v"]["factor"]] if balanced else [])
        return plain._replace(key_factor=factor, value_factor=more[0][0] if more else None)

    return Packed(spec, body)


def _power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _higgs_form(key: Higgs, value: Higgs, rope: str, config: KVShape) -> Packed | None:
    """Keys before RoPE in pairs of channels, groups of a power of two whole heads, no random signs, and the transform
    in the codec."""
    alike = [(spec.dim, spec.seed, spec.dtype, spec.group) for spec in (key, value)]
    group = key.group or group_size(config.kv_width)
    whole = group % config.head_dim == 0 and config.kv_width % group == 0
    if alike[0] != alike[1] or alike[0][:2] != (2, None) or rope != "pre" or key.rotated or value.rotated:
        return None
    if not (whole and _power_of_two(group) and _power_of_two(config.head_dim)):
        return None
    grids = [shipped_grid(spec.bits, spec.dim) for spec in (key, value)]
    heads = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "rope": _rope(config)}
    bits = {"key_bits": key.dim * key.bits, "value_bits": value.dim * value.bits}

    def body(weights, constants, stored, positions) -> HiggsBody:
        keys, values = stored["k"], stored["v"]
        (key_scale,), (value_scale,) = keys["scale"], values["scale"]
        fields = HiggsStored(keys["codes"], key_scale, values["codes"], value_scale)
        key_grid, value_grid = map(jnp.asarray, grids)
        return HiggsBody(fields, key_grid, value_grid, positions)

    return Packed(HiggsSpec(group=group, scales=key.dtype, **heads, **bits), body)


def latent_form(key: CodecSpec, value: CodecSpec, rank: int, config: KVShape) -> Packed | None:
    """How packed kernels see two latents of `rank` numbers (XQuant), uniform per channel and per token; None for what
    they do not read."""
    if not (isinstance(key, Uniform) and isinstance(value, Uniform)) or key.dtype != value.dtype:
        return None
    stored = PackedSpec(
        key_bits=key.bits,
        value_bits=value.bits,
        key_group=key.group,
        value_group=min(value.group, rank),
        kv_heads=1,
        head_dim=rank,
        scales=value.dtype,
        block=BLOCK,
    )
    heads = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "rope": _rope(config)}
    epsilon = config.norm_eps if config.qk_norm else 0.0

    def body(weights, constants, stored, positions) -> LatentBody:
        arrays = _uniform_body(weights, constants, stored, positions)
        up = constants["k"]["up"].astype(weights["k"].dtype)
        return LatentBody(arrays, positions, up, weights.get("k_bias"), weights.get("k_norm"))

    return Packed(LatentSpec(stored=stored, epsilon=epsilon, **heads), body)


def commvq_form(key: CommVQKeys, value: CommVQValues, config: KVShape) -> Packed | None:
    """How packed kernels see CommVQ's codes, one pair of levels a round and head; None for what they do not read."""
    if key.pairs != config.head_dim // 2 or (key.dtype, value.dtype) != ("bfloat16", "bfloat16"):
        return None
    heads = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "rope": _rope(config)}
    width = value.bits * config.kv_width

    def body(weights, constants, stored, positions) -> CommVQBody:
        (prescale,), (bits,), (gain,) = stored["k"]["prescale"], stored["v"]["bits"], stored["v"]["gain"]
        matrix = decoding_matrix(constants["k"]["codebook"])
        return CommVQBody(stored["k"]["codes"], prescale, bits, gain, positions, matrix)

    return Packed(CommVQSpec(rounds=key.rounds, levels=key.levels, value_width=width, **heads), body)


def _rope(config: KVShape) -> Rope:
    factor = 1.0 if config.turning is None else config.turning.attention_factor
    return Rope(tuple(map(float, inverse_frequencies(config))), factor)


def _spec(key, value, rope: str, config: KVShape, **more) -> PackedSpec:
    shape = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "block": BLOCK}
    before = _rope(config) if rope == "pre" else None
    bits = {"key_bits": key.bits, "value_bits": value.bits}
    return PackedSpec(scales=value.dtype, rope=before, **bits, **shape, **more)


def _uniform_body(weights, constants, stored, positions) -> PackedBody:
    keys, values = stored["k"], stored["v"]
    (key_scale,), (key_low,), (value_scale,), (value_low,) = keys["scale"], keys["low"], values["scale"], values["low"]
    return PackedBody(keys["codes"], key_scale, key_low, values["codes"], value_scale, value_low, positions)


def _nuq_body(key: Nuq, value: Nuq):
    def body(weights, constants, stored, positions) -> PackedBody:
        keys, values = stored["k"], stored["v"]
        centre, scale = channel_range(constants["k"])
        (value_scale,), (value_low,) = values["scale"], values["centre"]
        tables = Signposts(read_signposts(key, constants["k"]), read_signposts(value, constants.get("v", {})))
        dense = PackedBody(keys["codes"], scale, centre, values["codes"], value_scale, value_low, positions, tables)
        (key_outliers,), (value_outliers,) = (fields.get("outliers", (None,)) for fields in (keys, values))
        return dense._replace(key_outliers=key_outliers, value_outliers=value_outliers)

    return body
