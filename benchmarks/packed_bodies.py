"""The forms of packed bodies that decode-attention kernels read, by name: descriptions and
shapes."""

import dataclasses

import jax
import jax.numpy as jnp

from kvqjax.codecs.klt import SCALE_BITS
from kvqjax.methods import parse
from kvqjax.model.config import KVShape, RopeConfig
from kvqjax.ops.packing.base import slot_rows, split_bits
from kvqjax.pallas_kernels.exact import ExactBody, ExactSpec, Recent, room
from kvqjax.pallas_kernels.klt import KltBody, KltCoded, KltSpec, Levels, count
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec, Rope, Signposts

HEAD_DIM = GROUP = 128
SHORT = 32  # KIVI's own groups
STRETCH = 1024  # tokens that follow each other; a multiple of every layout's block


def spec_of(
    form: str, bits: int, kv_heads: int, target: str, head_dim: int = HEAD_DIM, short: bool = False
) -> PackedSpec:
    """Keys and values of `bits`: KIVI's keys after RoPE, KIVI*'s before, KVQuant's signposts
    without outliers, or those of a rotated method. `short`: with groups of 32."""
    rope = (
        Rope(tuple(5e5 ** (-i / head_dim) for i in range(0, head_dim, 2)))
        if form in ("kivi_star", "kvquant")
        else None
    )
    groups = {"key_group": GROUP, "value_group": head_dim, "datatype": "uniform"}
    if short:
        groups |= {"key_group": SHORT, "value_group": SHORT}
    if form == "kvquant":
        groups = {"key_group": 0, "value_group": kv_heads * head_dim, "datatype": "nuq"}
    if form == "omniscale":
        groups |= {"key_factors": 1}
    if form == "kvarn":
        groups |= {"key_factors": kv_heads, "value_factors": True}
    if form in ("oscar", "turboquant"):
        datatype = "uniform" if form == "oscar" else "nuq"
        groups |= {"key_group": 0, "key_channels": head_dim, "datatype": datatype}
    shape = {"kv_heads": kv_heads, "head_dim": head_dim, "target": target}
    return PackedSpec(key_bits=bits, value_bits=bits, rope=rope, **groups, **shape)


def shapes(spec: PackedSpec, layers: int, batch: int, slots: int) -> PackedBody:
    """The arrays of a body as `jax.ShapeDtypeStruct`."""
    shaped, lead = jax.ShapeDtypeStruct, (layers, batch)

    def words(bits):
        return tuple(
            shaped((*lead, slots * part // 32, spec.width), jnp.uint32) for part in split_bits(bits)
        )

    def outliers(count):
        return shaped((*lead, slot_rows(count, spec.scales), slots), jnp.uint16) if count else None

    value = shaped((*lead, spec.width // spec.value_group, slots), jnp.uint16)
    if spec.key_channels:
        key = shaped((*lead, spec.width // spec.key_channels, slots), jnp.uint16)
    elif spec.key_group:
        key = shaped((*lead, slots // spec.key_group, spec.width), jnp.uint16)
    else:
        key = shaped((spec.width,), jnp.float32)
    body = PackedBody(words(spec.key_bits), key, key, words(spec.value_bits), value, value)
    if not spec.minima:
        body = body._replace(key_low=None, value_low=None)
    if spec.rope is not None:
        body = body._replace(positions=shaped((slots // STRETCH,), jnp.int32))
    if spec.datatype == "nuq":
        body = body._replace(
            signposts=Signposts(
                *(shaped((2**b,), jnp.float32) for b in (spec.key_bits, spec.value_bits))
            )
        )
    if spec.key_factors:
        body = body._replace(key_factor=shaped((*lead, spec.key_factors, slots), jnp.uint16))
    if spec.value_factors:
        body = body._replace(value_factor=key)
    return body._replace(
        key_outliers=outliers(spec.key_slots), value_outliers=outliers(spec.value_slots)
    )


def klt_spec_of(bits: float, kv_heads: int, target: str) -> KltSpec:
    """Coefficients of every KV head, `bits` a channel."""
    shape = KVShape(
        num_layers=1,
        num_heads=kv_heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        rope=RopeConfig(theta=5e5),
    )
    packed = parse(f"klt:bits={bits},heads=own").layer.build(shape).fast.packed
    return dataclasses.replace(packed.spec, target=target)


def klt_shapes(spec: KltSpec, layers: int, batch: int, slots: int) -> KltBody:
    """The arrays of such a body as `jax.ShapeDtypeStruct`."""
    shaped, lead, heads = jax.ShapeDtypeStruct, (layers, batch), spec.kv_heads

    def coded(levels: Levels) -> KltCoded:
        codes = tuple(
            tuple(
                shaped((*lead, slots * part // 32, heads * n), jnp.uint32)
                for part in split_bits(bits)
            )
            for bits, n in levels
        )
        return KltCoded(codes, shaped((*lead, slots * SCALE_BITS // 32, heads), jnp.uint32))

    keys, values = count(spec.key_levels), count(spec.value_levels)
    mean = shaped((heads * spec.head_dim,), jnp.float32)
    return KltBody(
        coded(spec.key_levels),
        coded(spec.value_levels),
        shaped((heads, keys, spec.head_dim), jnp.float32),
        mean,
        shaped((heads, keys + values, spec.head_dim), jnp.float32),
        mean,
        shaped((slots // STRETCH,), jnp.int32),
    )


def exact_spec_of(kv_heads: int, target: str, head_dim: int = HEAD_DIM) -> ExactSpec:
    """Exact keys after RoPE and values, in bfloat16."""
    return ExactSpec(kv_heads=kv_heads, head_dim=head_dim, dtype="bfloat16", target=target)


def exact_shapes(spec: ExactSpec, layers: int, batch: int, slots: int) -> ExactBody:
    """The arrays of such a body as `jax.ShapeDtypeStruct`."""
    vectors = jax.ShapeDtypeStruct((layers, batch, slots, spec.width), jnp.uint16)
    return ExactBody(vectors, vectors)


def recent_shapes(spec: ExactSpec, layers: int, batch: int, window: int = 32) -> Recent:
    """A window and one new token as `jax.ShapeDtypeStruct`."""

    def pair(*lead):
        vectors = jax.ShapeDtypeStruct((*lead, spec.width), jnp.bfloat16)
        return vectors, vectors

    seen = jax.ShapeDtypeStruct((batch, 1, room(window) + room(1)), jnp.int32)
    return Recent((pair(layers, batch, window),), pair(batch, 1), seen)
