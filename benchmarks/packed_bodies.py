"""The forms of packed bodies that decode-attention kernels read, by name: descriptions, shapes, decoded blocks."""

import jax
import jax.numpy as jnp

from kvqjax.codecs.nuq import Nuq
from kvqjax.codecs.uniform import Uniform
from kvqjax.model.rope import turn
from kvqjax.ops.layout import read, slot_rows, split_bits
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec, Rope, Signposts

FORMS = ("kivi", "kivi_star", "kvquant")
HEAD_DIM = GROUP = 128
STRETCH = 1024  # tokens that follow each other; a multiple of every layout's block


def spec_of(form: str, bits: int, kv_heads: int, target: str) -> PackedSpec:
    """Keys and values of `bits`: KIVI's keys after RoPE, KIVI*'s before, KVQuant's signposts without outliers."""
    rope = None if form == "kivi" else Rope(tuple(5e5 ** (-i / HEAD_DIM) for i in range(0, HEAD_DIM, 2)))
    groups = {"key_group": GROUP, "value_group": GROUP, "datatype": "uniform"}
    if form == "kvquant":
        groups = {"key_group": 0, "value_group": kv_heads * HEAD_DIM, "datatype": "nuq"}
    shape = {"kv_heads": kv_heads, "head_dim": HEAD_DIM, "block": STRETCH, "target": target}
    return PackedSpec(key_bits=bits, value_bits=bits, rope=rope, **groups, **shape)


def shapes(spec: PackedSpec, layers: int, batch: int, slots: int) -> PackedBody:
    """The arrays of a body as `jax.ShapeDtypeStruct`."""
    shaped, lead = jax.ShapeDtypeStruct, (layers, batch)

    def words(bits):
        return tuple(shaped((*lead, slots * part // 32, spec.width), jnp.uint32) for part in split_bits(bits))

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
    if spec.rope is not None:
        body = body._replace(positions=shaped((slots // STRETCH,), jnp.int32))
    if spec.datatype == "nuq":
        body = body._replace(
            signposts=Signposts(*(shaped((2**b,), jnp.float32) for b in (spec.key_bits, spec.value_bits)))
        )
    if spec.key_factors:
        body = body._replace(key_factor=shaped((*lead, spec.key_factors, slots), jnp.uint16))
    if spec.value_factors:
        body = body._replace(value_factor=key)
    return body._replace(key_outliers=outliers(spec.key_slots), value_outliers=outliers(spec.value_slots))


def random_body(key: jax.Array, spec: PackedSpec, batch: int, slots: int) -> PackedBody:
    """A body of one layer: random codes, scales and minima such that keys and values have about unit variance."""
    keys, bits = iter(jax.random.split(key, 16)), spec.key_bits
    nuq = spec.datatype == "nuq"
    unit, centre = (1.7, 0.0) if nuq else (3.4 / (2**bits - 1), -(2**bits - 1) / 2)

    def words(x):
        return jax.random.bits(next(keys), x.shape, jnp.uint32)

    def numbers(x, low: float, high: float):
        drawn = unit * jax.random.uniform(next(keys), x.shape, minval=low, maxval=high)
        return drawn if x.dtype == jnp.float32 else jax.lax.bitcast_convert_type(drawn.astype(jnp.bfloat16), x.dtype)

    body, around = shapes(spec, 1, batch, slots), ((-0.1, 0.1) if nuq else (1.1 * centre, 0.9 * centre))
    key_codes, value_codes = (tuple(map(words, x)) for x in (body.key_codes, body.value_codes))
    scales = (numbers(x, 0.5, 1.5) for x in (body.key_scale, body.value_scale))
    lows = (numbers(x, *around) for x in (body.key_low, body.value_low))
    (key_scale, value_scale), (key_low, value_low) = scales, lows
    filled = PackedBody(key_codes, key_scale, key_low, value_codes, value_scale, value_low)
    if spec.rope is not None:
        filled = filled._replace(positions=jnp.arange(0, slots, STRETCH, dtype=jnp.int32))
    if nuq:
        posts = (jnp.sort(jax.random.uniform(next(keys), (2**bits,), minval=-1.0)) for _ in range(2))
        filled = filled._replace(signposts=Signposts(*posts))
    return filled


def _codec(spec: PackedSpec, body: PackedBody, side: str):
    """The codec of keys or values, its constants and its stored fields."""
    codes, scale, low = (getattr(body, f"{side}_{name}") for name in ("codes", "scale", "low"))
    if spec.datatype == "uniform":
        along, group = ("tokens", spec.key_group) if side == "key" else ("channels", spec.value_group)
        codec = Uniform(bits=spec.key_bits, along=along, group=group).build(spec.width)
        return codec, {}, {"codes": codes, "scale": (scale,), "low": (low,)}
    constants = {"signposts": getattr(body.signposts, side)}
    if side == "key":
        codec = Nuq(bits=spec.key_bits, per="channel").build(spec.width)
        return codec, constants | {"upper": low + scale, "lower": low - scale}, {"codes": codes}
    codec = Nuq(bits=spec.value_bits, per="token").build(spec.width)
    return codec, constants, {"codes": codes, "scale": (scale,), "centre": (low,)}


def decoded(body: PackedBody, spec: PackedSpec, token) -> list[jax.Array]:
    """Keys as attended and values of one stretch from `token`, [B, STRETCH, K, D] float32."""
    found = []
    for side in ("key", "value"):
        codec, constants, stored = _codec(spec, body, side)
        payload = {name: read(field, stored[name], 0, token, STRETCH) for name, field in codec.fields.items()}
        x = codec.decode(constants, payload).astype(jnp.float32)
        found.append(x.reshape(*x.shape[:2], spec.kv_heads, spec.head_dim))
    if spec.rope is not None:
        position = (body.positions[token // STRETCH] + jnp.arange(STRETCH)).astype(jnp.float32)
        angles = position[:, None] * jnp.asarray(spec.rope.frequencies, jnp.float32)[None]
        found[0] = turn(found[0], jnp.broadcast_to(angles[None], (len(found[0]), *angles.shape)), spec.rope.factor)
    return found
