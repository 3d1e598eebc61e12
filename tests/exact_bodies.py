"""Exact bodies for the GPU kernel's tests."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from kernel_cases import BATCH, LAYERS, Case, make_query, vectors

from kvqjax.ops.attention import Partial, segment_attention
from kvqjax.ops.packing.base import to_bits
from kvqjax.pallas_kernels.exact import ExactBody, ExactSpec, Recent, room

CASE = Case(
    key_bits=16, value_bits=16, key_group=0, value_group=0, kv_heads=2, head_dim=128, group=4
)


@functools.cache
def make(head_dim: int, slots: int, length: int = 1):
    """A body whose layer 1 holds random tokens, and queries.

    Returns:
        (spec, queries, body, keys [B, S, K, D], values, start, stop)"""
    case = dataclasses.replace(CASE, head_dim=head_dim, slots=slots, length=length)
    rng = np.random.default_rng(0)

    keys, values = (vectors(rng, case, offset).astype(jnp.bfloat16) for offset in (3.0, 0.5))
    body = ExactBody(*(to_bits(jnp.stack([jnp.zeros_like(x), x])) for x in (keys, values)))
    spec = ExactSpec(kv_heads=case.kv_heads, head_dim=head_dim, dtype="bfloat16", target="sm90")
    shape = keys.shape[0], slots, case.kv_heads, head_dim
    key, value = (x.astype(jnp.float32).reshape(shape) for x in (keys, values))
    q, start, stop = make_query(case)
    return spec, q.astype(jnp.bfloat16).astype(jnp.float32), body, key, value, start, stop


def recent_of(spec: ExactSpec, length: int = 1):
    """Three sinks, a window of 60 tokens and new tokens, of which the second row sees some.

    Returns:
        (the tokens as the kernel takes them, their keys [B, N, K, D], values, a mask [B, T, N])"""
    rng = np.random.default_rng(5)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=(*shape, spec.width)), jnp.bfloat16)

    sizes = 3, 60
    held = tuple((draw(LAYERS, BATCH, n), draw(LAYERS, BATCH, n)) for n in sizes)
    new = draw(BATCH, length), draw(BATCH, length)
    seen = [rng.random((BATCH, length, n)) < 0.7 for n in (*sizes, length)]
    padded = [np.pad(x, ((0, 0), (0, 0), (0, room(x.shape[2]) - x.shape[2]))) for x in seen]
    recent = Recent(held, new, jnp.asarray(np.concatenate(padded, 2), jnp.int32))
    key, value = (
        jnp.concatenate([*(x[part][1] for x in held), new[part]], 1)
        .astype(jnp.float32)
        .reshape(BATCH, -1, spec.kv_heads, spec.head_dim)
        for part in (0, 1)
    )
    return recent, key, value, jnp.asarray(np.concatenate(seen, 2), bool)


def oracle_with(recent, q, key, value, start, stop) -> Partial:
    """Attention to a body and to the tokens beside it, from `recent_of`."""
    _, more_keys, more_values, mask = recent
    slot = jnp.arange(key.shape[1])[None, None]
    in_body = (slot >= start[..., None]) & (slot < stop[..., None])
    return segment_attention(
        q,
        jnp.concatenate([key, more_keys], 1),
        jnp.concatenate([value, more_values], 1),
        jnp.concatenate([in_body, mask], 2),
    )
