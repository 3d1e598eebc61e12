"""Exact bodies for the GPU kernel's tests."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from kernel_cases import Case, make_query, vectors

from kvqjax.ops.packing.base import to_bits
from kvqjax.pallas_kernels.exact import ExactBody, ExactSpec

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
