"""Bodies of coefficients by KV head (`klt:heads=own`) for the kernel tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from kernel_cases import BATCH, LLAMA31_8B, QUICK, Case, make_query, packed_codes
from kernel_forms import first_positions, turned

import kvqjax as kvq
from kvqjax.model.rope import inverse_frequencies
from kvqjax.pallas_kernels.klt import KltBody
from kvqjax.pallas_kernels.packed import Rope

HEADS, DIM = 2, 128
SHAPE = dataclasses.replace(LLAMA31_8B, num_heads=8, num_kv_heads=HEADS, width=1024)
SLOTS = 1024
CASE = Case(
    key_bits=2,
    value_bits=2,
    key_group=128,
    value_group=128,
    kv_heads=HEADS,
    head_dim=DIM,
    group=4,
    slots=SLOTS,
    rope=Rope(tuple(map(float, inverse_frequencies(SHAPE)))),
)


def _constants(wiring, rng) -> dict:
    """Transforms of a falling spectrum in a random basis, means, and a matrix from keys to
    values."""
    constants: dict = {}
    for source, fall in (("k", 1.0), ("v", 0.4)):
        kept = wiring.storage.codecs[source].needs["into"][2]
        sigma = 4.0 * (1 + 48 * np.arange(kept) / DIM) ** -fall
        basis = [np.linalg.qr(rng.normal(size=(DIM, DIM)))[0][:, :kept] for _ in range(HEADS)]
        constants[source] = {
            "mean": rng.normal(size=HEADS * DIM, scale=1.0 if source == "k" else 0.2),
            "into": np.stack([x / sigma for x in basis]),
            "back": np.stack([(x * sigma).T for x in basis]),
        }
    size = constants["k"]["back"].shape
    constants["v"]["from_keys"] = 0.02 * rng.normal(size=size)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), constants)


def packed_of(bits: float, heads: int = HEADS):
    """How kernels read the bodies of `heads` KV heads."""
    shape = dataclasses.replace(SHAPE, num_heads=4 * heads, num_kv_heads=heads)
    return kvq.klt(bits=bits, heads="own").layer.build(shape).fast.packed


@functools.cache
def make(bits: float, length: int = 1, seed: int = 0, first: int = 4, apart: int = 0):
    """A body whose layer 1 holds random tokens, one of them the mean, and queries.

    Returns:
        (spec, queries, body, keys as attended [B, S, K, D], values, start, stop)"""
    rng = np.random.default_rng(seed)
    wiring = kvq.klt(bits=bits, heads="own").layer.build(SHAPE)
    constants = _constants(wiring, rng)
    sources = {}
    for source, spread in (("k", 1.0), ("v", 0.5)):
        fields = constants[source]
        z = rng.normal(size=(BATCH, SLOTS, HEADS, fields["back"].shape[1])) * spread
        z *= np.exp2(rng.uniform(-1, 1, z.shape[:3]))[..., None]
        z[:, 5] = 0
        x = np.einsum("bskr,krd->bskd", z, fields["back"]).reshape(BATCH, SLOTS, -1)
        sources[source] = jnp.asarray(x + np.asarray(fields["mean"]), jnp.float32)

    def coded(tile):
        payload, _, _ = wiring.maps.encode(constants, tile, {})
        return payload

    payload = jax.jit(jax.vmap(coded), compiler_options=QUICK)(sources)
    decoded, _ = jax.jit(
        lambda payload: wiring.maps.decode(constants, payload, {}), compiler_options=QUICK
    )(payload)
    stored = {
        source: {
            name: tuple(
                jnp.asarray(np.stack([np.zeros_like(words), words]))
                for words in packed_codes(np.asarray(codes), codec.fields[name].bits)
            )
            for name, codes in payload[source].items()
        }
        for source, codec in wiring.storage.codecs.items()
    }
    positions = first_positions(CASE, first, apart)
    packed = wiring.fast.packed
    body = packed.body(constants, stored, jnp.asarray(positions, jnp.int32))
    assert isinstance(body, KltBody)
    key, value = (decoded[x].reshape(BATCH, SLOTS, HEADS, DIM) for x in "kv")
    q, start, stop = make_query(dataclasses.replace(CASE, length=length))
    # Long enough that scores differ by more than their rounding.
    q = (4 * q).astype(jnp.bfloat16).astype(jnp.float32)
    return packed.spec, q, body, turned(key, CASE, positions), value, start, stop
