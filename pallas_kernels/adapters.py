"""Adapters between codecs and kernels.

A codec knows nothing of kernels. A kernel wants two things: a spec that describes how keys and
values are stored, and a body that holds the stored fields under the kernel's names. An adapter
makes both for a pair of codecs.

There is one adapter for each type of key codec. It gives None where no kernel reads such keys
beside the given values. A codec of another package brings its adapter as a method `packed` of its
own (`Packable`)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp

from kvqjax.codecs.balanced import Balanced
from kvqjax.codecs.base import CodecSpec
from kvqjax.codecs.clipped import Clipped
from kvqjax.codecs.exact import Exact
from kvqjax.codecs.higgs import Higgs
from kvqjax.codecs.higgs_grid import shipped_grid
from kvqjax.codecs.klt import Klt
from kvqjax.codecs.nuq import Nuq, read_signposts
from kvqjax.codecs.nuq_range import channel_range
from kvqjax.codecs.scaled import Scaled
from kvqjax.codecs.uniform import Uniform
from kvqjax.model.config import KVShape
from kvqjax.model.rope import inverse_frequencies, pair_factors
from kvqjax.pallas_kernels.exact import ExactBody, ExactSpec
from kvqjax.pallas_kernels.forms import Spec
from kvqjax.pallas_kernels.higgs import HiggsBody, HiggsSpec, HiggsStored
from kvqjax.pallas_kernels.klt import LANE, KltBody, KltCoded, KltSpec
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec, Rope, Signposts, uniform_body


class Packed(NamedTuple):
    """Describes how a kernel reads a body as it is stored.

    Attributes:
        spec: what is static about the body.
        body: body(constants, stored, positions) makes the body of the spec's kind, such as
            PackedBody for PackedSpec. `constants` are those of the codecs of the layer's sources.
            `stored` is {source: {field: arrays}}. `positions` [n] say where each of n equal
            stretches of tokens begins in the sequence.
        trusted: the chip itself checked the kernel, or the user forces it. The table of kernels is
            not asked then.
        straight: something reads the stored words without decoding all of them first: a kernel of
            the cache's chip, or the plain form of uniform codes.
    """

    spec: Spec
    body: Callable
    trusted: bool = False
    straight: bool = True


@runtime_checkable
class Packable(Protocol):
    """A codec's spec that brings its own adapter, for keys."""

    def packed(self, value: CodecSpec, rope: str, shape: KVShape) -> Packed | None:
        """Do as `packed_form` does, for keys of this spec."""
        ...


def packed_form(key: CodecSpec, value: CodecSpec, rope: str, shape: KVShape) -> Packed | None:
    """Say how kernels read keys and values of these codecs.

    Args:
        key: the codec of keys.
        value: the codec of values.
        rope: "pre" for keys stored before RoPE, "post" for keys stored after it.
        shape: the model's.

    Returns:
        The kernel's spec, and the function that names the stored fields as it wants them. None
        where no kernel reads such keys beside such values.
    """
    if rope == "pre" and not turns_alike(shape):
        return None
    if isinstance(key, Packable):
        return key.packed(value, rope, shape)
    adapter = _ADAPTERS.get(type(key))
    return None if adapter is None else adapter(key, value, rope, shape)


def turns_alike(shape: KVShape) -> bool:
    """Say whether kernels can turn a shape's keys: they know one factor for all pairs."""
    return shape.rope is None or isinstance(pair_factors(shape), float)


def rope_of(shape: KVShape) -> Rope:
    """Make the kernels' description of a shape's RoPE."""
    return Rope(tuple(map(float, inverse_frequencies(shape))), float(pair_factors(shape)))


def _packed_spec(key: Any, value: Any, rope: str, shape: KVShape, **fields: Any) -> PackedSpec:
    """Describe packed keys and values.

    Args:
        key: the codec of keys; has `bits`.
        value: the codec of values; has `bits` and `dtype`, that of the scales.
        rope: as in `packed_form`.
        shape: the model's.
        fields: those of `PackedSpec` that differ from codec to codec.
    """
    heads = {"kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    before = rope_of(shape) if rope == "pre" else None
    return PackedSpec(
        key_bits=key.bits, value_bits=value.bits, scales=value.dtype, rope=before, **heads, **fields
    )


# ---- Exact vectors ----


def _exact(key: Exact, value: CodecSpec, rope: str, shape: KVShape) -> Packed | None:
    """Exact keys after RoPE beside exact values."""
    if not isinstance(value, Exact) or (rope != "post" and shape.rope is not None):
        return None

    def body(constants, stored, positions) -> ExactBody:
        return ExactBody(*(stored[source]["x"][0] for source in ("k", "v")))

    return Packed(ExactSpec(kv_heads=shape.num_kv_heads, head_dim=shape.head_dim), body)


# ---- Uniform codes, and codecs around them ----


def _uniform(key: Uniform, value: CodecSpec, rope: str, shape: KVShape) -> Packed | None:
    """Keys with scales per channel (KIVI), or per token and head (OSCAR). Values are uniform too,
    with scales per token and of the same dtype."""
    if not isinstance(value, Uniform) or (value.along, value.dtype) != ("channels", key.dtype):
        return None
    groups = {"key_group": key.group, "value_group": min(value.group, shape.kv_width)}
    if key.along == "channels":
        if rope == "pre" or key.group != shape.head_dim:
            return None
        groups |= {"key_group": 0, "key_channels": key.group}
    return Packed(_packed_spec(key, value, rope, shape, **groups), uniform_body)


def _clipped(key: Clipped, value: CodecSpec, rope: str, shape: KVShape) -> Packed | None:
    """Clipping shows in no stored field."""
    return packed_form(key.inner, value.inner if isinstance(value, Clipped) else value, rope, shape)


def _with_factors(
    plain: Packed | None, dtype: str, parts: int, values: bool = False
) -> Packed | None:
    """Add factors to the form of uniform codes with keys after RoPE.

    Args:
        plain: the form without factors, or None.
        dtype: of the factors.
        parts: factors of a token's keys.
        values: whether values have factors too, one for each channel and group of tokens.

    Returns:
        The form with factors; None for other forms: no kernel reads factors of signposts or grids,
        or of keys that it rotates itself.
    """
    if plain is None or not isinstance(plain.spec, PackedSpec):
        return None
    if (
        plain.spec.datatype != "uniform"
        or plain.spec.rope is not None
        or plain.spec.scales != dtype
    ):
        return None

    def body(constants, stored, positions) -> PackedBody:
        read = plain.body(constants, stored, positions)._replace(
            key_factor=stored["k"]["factor"][0]
        )
        return read._replace(value_factor=stored["v"]["factor"][0]) if values else read

    return Packed(dataclasses.replace(plain.spec, key_factors=parts, value_factors=values), body)


def _scaled(key: Scaled, value: CodecSpec, rope: str, shape: KVShape) -> Packed | None:
    """The keys' norms are factors of tokens (OScaR)."""
    return _with_factors(packed_form(key.inner, value, rope, shape), key.dtype, key.parts)


def _balanced(key: Balanced, value: CodecSpec, rope: str, shape: KVShape) -> Packed | None:
    """Keys and values that are both balanced, in tiles of the same number of tokens (KVarN)."""
    if not isinstance(value, Balanced) or value.group != key.group:
        return None
    plain = packed_form(key.inner(shape.kv_width), value.inner(shape.kv_width), rope, shape)
    return _with_factors(plain, key.dtype, key.heads, values=True)


# ---- KVQuant's signposts ----


def _nuq(key: Nuq, value: CodecSpec, rope: str, shape: KVShape) -> Packed | None:
    """Keys per channel beside values per token, both with signposts and of one dtype."""
    if not isinstance(value, Nuq) or (key.per, value.per) != ("channel", "token"):
        return None
    if len({value.dtype, key.outlier_dtype, value.outlier_dtype}) > 1:
        return None
    width = shape.kv_width
    slots = {"key_slots": key.slot_count(width), "value_slots": value.slot_count(width)}
    spec = _packed_spec(
        key, value, rope, shape, datatype="nuq", key_group=0, value_group=width, **slots
    )
    return Packed(spec, functools.partial(_nuq_body, key, value))


def _nuq_body(key: Nuq, value: Nuq, constants, stored, positions) -> PackedBody:
    """Name the stored fields as kernels name them, with each channel's range and both tables of
    signposts."""
    keys, values = stored["k"], stored["v"]
    centre, scale = channel_range(constants["k"])
    (value_scale,), (value_low,) = values["scale"], values["centre"]
    tables = Signposts(
        read_signposts(key, constants["k"]), read_signposts(value, constants.get("v", {}))
    )
    dense = PackedBody(
        keys["codes"], scale, centre, values["codes"], value_scale, value_low, positions, tables
    )
    (key_outliers,), (value_outliers,) = (
        fields.get("outliers", (None,)) for fields in (keys, values)
    )
    return dense._replace(key_outliers=key_outliers, value_outliers=value_outliers)


# ---- HIGGS, and the scalar grids of TurboQuant ----


def _points(key: Higgs, value: Higgs, rope: str, shape: KVShape) -> Packed | None:
    """Rotated keys after RoPE and values, both as points of scalar grids, with one scale for each
    token and head."""
    parameters = [(spec.dim, spec.dtype, spec.group) for spec in (key, value)]
    if rope == "pre" or parameters != [(1, key.dtype, shape.head_dim)] * 2:
        return None
    groups = {"key_group": 0, "key_channels": shape.head_dim, "value_group": shape.head_dim}
    # x_hat = scale * point / sqrt(D): the root goes into the table.
    points = [shipped_grid(spec.bits, 1)[:, 0] * shape.head_dim**-0.5 for spec in (key, value)]

    def body(constants, stored, positions) -> PackedBody:
        keys, values = stored["k"], stored["v"]
        (key_scale,), (value_scale,) = keys["scale"], values["scale"]
        tables = Signposts(*map(jnp.asarray, points))
        return PackedBody(
            keys["codes"], key_scale, None, values["codes"], value_scale, None, positions, tables
        )

    return Packed(_packed_spec(key, value, rope, shape, datatype="nuq", **groups), body)


def _higgs(key: Higgs, value: CodecSpec, rope: str, shape: KVShape) -> Packed | None:
    """Keys before RoPE and values, both in pairs of channels and groups of a power of two whole
    heads, without random signs, and with the transform in the codec. Or rotated ones (`_points`)."""
    if not isinstance(value, Higgs) or key.rotated != value.rotated:
        return None
    if key.rotated:
        return _points(key, value, rope, shape)
    if rope != "pre":
        return None
    parameters = [(spec.dim, spec.seed, spec.dtype, spec.group) for spec in (key, value)]
    group = key.size(shape.kv_width)
    whole_heads = group % shape.head_dim == 0 and shape.kv_width % group == 0
    # Kernels read points of two numbers, and undo the transform without random signs.
    if parameters[0] != parameters[1] or (key.dim, key.seed) != (2, None):
        return None
    powers_of_two = group.bit_count() == shape.head_dim.bit_count() == 1
    if not (whole_heads and powers_of_two):
        return None
    heads = {"kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "rope": rope_of(shape)}
    bits = {"key_bits": key.dim * key.bits, "value_bits": value.dim * value.bits}
    grids = [shipped_grid(spec.bits, spec.dim) for spec in (key, value)]

    def body(constants, stored, positions) -> HiggsBody:
        keys, values = stored["k"], stored["v"]
        (key_scale,), (value_scale,) = keys["scale"], values["scale"]
        fields = HiggsStored(keys["codes"], key_scale, values["codes"], value_scale)
        key_grid, value_grid = map(jnp.asarray, grids)
        return HiggsBody(fields, key_grid, value_grid, positions)

    return Packed(HiggsSpec(group=group, scales=key.dtype, **heads, **bits), body)


# ---- Transform coding, values as what keys do not say ----


def klt_form(key: Klt, value: Klt, shape: KVShape) -> Packed | None:
    """Say how kernels read coefficients of keys before RoPE, and of what they do not say of values.

    Args:
        key: the codec of keys, with its channels filled in.
        value: the codec of values, likewise.
        shape: the model's.

    Returns:
        The kernel's spec, and the function that names the stored fields as it wants them. None
        unless every KV head has a transform of its own, and levels that kernels can cut.
    """
    by_head = (key.heads, value.heads, key.channels, value.channels) == (
        1,
        1,
        *[shape.head_dim] * 2,
    )
    scaled = (key.scale, value.scale) == ("token", "token")
    if shape.rope is None or not turns_alike(shape) or not (by_head and scaled):
        return None
    key_levels, value_levels = (
        tuple((bits, n) for bits, _, n in spec.levels(shape.kv_width)) for spec in (key, value)
    )
    if any(n % LANE for _, n in key_levels + value_levels):
        return None

    def coded(fields, levels) -> KltCoded:
        (scale,) = fields["scale"]
        return KltCoded(tuple(fields[f"codes{bits}"] for bits, _ in levels), scale)

    def body(constants, stored, positions) -> KltBody:
        keys, values = constants["k"], constants["v"]
        return KltBody(
            coded(stored["k"], key_levels),
            coded(stored["v"], value_levels),
            keys["back"],
            keys["mean"],
            jnp.concatenate([values["from_keys"], values["back"]], 1),
            values["mean"],
            positions,
        )

    spec = KltSpec(
        key_levels=key_levels,
        value_levels=value_levels,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rope=rope_of(shape),
    )
    return Packed(spec, body)


_ADAPTERS: dict[type, Callable[[Any, CodecSpec, str, KVShape], Packed | None]] = {
    Exact: _exact,
    Uniform: _uniform,
    Clipped: _clipped,
    Scaled: _scaled,
    Balanced: _balanced,
    Nuq: _nuq,
    Higgs: _higgs,
}
