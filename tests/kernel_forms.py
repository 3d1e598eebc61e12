"""Bodies of keys before RoPE and of KVQuant's signposts, for the kernel tests: `kernel_cases` has
the plain ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from kernel_cases import BATCH, QUICK, Case, make_body, make_query, packed_codes, vectors

from kvqjax.codecs.base import CodecSpec
from kvqjax.codecs.higgs import Higgs
from kvqjax.codecs.nuq import Nuq
from kvqjax.codecs.nuq_range import channel_range
from kvqjax.model.config import KVShape
from kvqjax.ops.packing.base import to_bits
from kvqjax.pallas_kernels.adapters import packed_form
from kvqjax.pallas_kernels.packed import PackedBody, Rope, Signposts


def rope(theta: float, head_dim: int, factor: float = 1.0) -> Rope:
    return Rope(tuple(theta ** (-np.arange(0, head_dim, 2) / head_dim)), factor)


def within(first: int = 4, apart: int = 0) -> float:
    """How far an output may be off: 1 %, three times that where float32 no longer resolves the
    angles of positions."""
    return 0.03 if first > 2**17 else 0.01


def first_positions(case: Case, first: int, apart: int) -> np.ndarray:
    """Where each stretch of a unit of the layout begins: `apart` stretches lie between two of them
    on other devices."""
    return first + np.arange(0, case.slots, case.spec.unit) * (apart + 1)


def turned(key, case: Case, positions: np.ndarray):
    """Keys [B, S, K, D] at their positions, in float64."""
    token = (positions[:, None] + np.arange(case.slots // len(positions))[None]).reshape(-1)
    angle = token[:, None] * np.asarray(case.rope.frequencies)[None]
    cos, sin = (case.rope.factor * f(angle)[None, :, None] for f in (np.cos, np.sin))
    low, high = np.split(np.asarray(key, np.float64), 2, axis=-1)
    return jnp.asarray(
        np.concatenate([low * cos - high * sin, high * cos + low * sin], -1), jnp.float32
    )


def make_form(case: Case, first: int = 4, apart: int = 0):
    """A body of the case's form whose layer 1 holds random tokens, with keys as attended and
    values, [B, S, K, D]."""
    positions = first_positions(case, first, apart)
    body, key, value = _signpost_body(case) if case.datatype == "nuq" else make_body(case)
    return (
        body._replace(positions=jnp.asarray(positions, jnp.int32)),
        turned(key, case, positions),
        value,
    )


def _signposts(rng, bits: int):
    """Sorted, uneven, and to nearly the ends of [-1, 1]."""
    return jnp.asarray(
        np.sort(np.append(rng.uniform(-1, 1, 2**bits - 2), (-0.93, 0.97))), jnp.float32
    )


def _signpost_body(case: Case, seed: int = 0):
    rng = np.random.default_rng(seed)
    table = [_signposts(rng, bits) for bits in (case.key_bits, case.value_bits)]
    x, y = vectors(rng, case, 3.0), vectors(rng, case, 0.5)
    low, high = np.quantile(np.asarray(x), (0.02, 0.98), axis=(0, 1)).astype(np.float32)
    constants = {"signposts": table[0], "upper": jnp.asarray(high), "lower": jnp.asarray(low)}
    k, key = _stored(Nuq(bits=case.key_bits, per="channel", slots=case.key_slots), constants, x)
    v, value = _stored(
        Nuq(bits=case.value_bits, per="token", slots=case.value_slots), {"signposts": table[1]}, y
    )
    centre, scale = channel_range(constants)
    body = PackedBody(k["codes"], scale, centre, v["codes"], v["scale"], v["centre"])
    body = body._replace(signposts=Signposts(*table))
    for name, fields in (("key_outliers", k), ("value_outliers", v)):
        if "outliers" in fields:
            body = body._replace(**{name: fields["outliers"]})
    shape = BATCH, case.slots, case.kv_heads, case.head_dim
    return body, key.reshape(shape), value.reshape(shape)


def _points_body(case: Case, seed: int = 0):
    """TurboQuant's, named by its adapter, whose spec is the case's."""
    rng = np.random.default_rng(seed)
    heads, dim = case.kv_heads, case.head_dim
    key, value = (
        Higgs(bits=bits, dim=1, group=dim, rotated=True, norm="corrected")
        for bits in (case.key_bits, case.value_bits)
    )
    shape = KVShape(num_layers=1, num_heads=heads * case.group, num_kv_heads=heads, head_dim=dim)
    packed = packed_form(key, value, "post", shape)
    assert dataclasses.replace(packed.spec, target=case.target) == case.spec
    stored, decoded = {}, []
    for source, spec, offset in (("k", key, 3.0), ("v", value, 0.5)):
        fields, x = _stored(spec, {}, vectors(rng, case, offset))
        stored[source] = fields | {"scale": (fields["scale"],)}
        decoded.append(x.reshape(BATCH, case.slots, heads, dim))
    return packed.body({}, stored, None), *decoded


def _stored(spec: CodecSpec, constants, x):
    """The fields of a body whose layer 1 holds `x` and whose layer 0 holds zeros, and what the
    codec decodes."""
    codec = spec.build(x.shape[-1])
    payload = jax.jit(jax.vmap(lambda rows: codec.encode(constants, rows)), compiler_options=QUICK)(
        x
    )
    decoded = jax.jit(lambda payload: codec.decode(constants, payload), compiler_options=QUICK)(
        payload
    )
    fields = {name: to_bits(part) for name, part in payload.items()} | {
        "codes": packed_codes(np.asarray(payload["codes"]), spec.bits)
    }
    return jax.tree.map(lambda a: jnp.asarray(np.stack([np.zeros_like(a), a])), fields), decoded


def case_of(bits: int, **options) -> Case:
    """A small case of `bits` for keys and values before RoPE."""
    usual = {"kv_heads": 2, "head_dim": 128, "group": 4, "slots": 1024}
    merged = usual | {"rope": rope(10000.0, options.get("head_dim", 128))} | options
    if merged.get("datatype") == "nuq":
        groups = {"key_group": 0, "value_group": merged["kv_heads"] * merged["head_dim"]}
    else:
        groups = {"key_group": 128, "value_group": merged["head_dim"]}
    return Case(key_bits=bits, value_bits=bits, **groups, **merged)


def changed(case: Case, **options) -> Case:
    return dataclasses.replace(case, **options)


def inputs(case: Case, **place):
    make = _points_body if case.datatype == "nuq" and case.key_channels else make_body
    body, key, value = make_form(case, **place) if case.rope else make(case)
    q, start, stop = make_query(case)
    return q.astype(jnp.bfloat16).astype(jnp.float32), body, key, value, start, stop


def name(case: Case) -> str:
    form = {"uniform": "kivi" if case.rope is None else "kivi_star", "nuq": "kvquant"}[
        case.datatype
    ]
    if case.key_factors:
        form = "kvarn" if case.value_factors else "omniscale"
    if case.key_channels:
        form = "oscar" if case.datatype == "uniform" else "turboquant"
    return f"{form}{case.key_bits}"
