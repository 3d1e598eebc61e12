"""Decode attention on packed bodies for the chip a program is compiled for: a kernel where there is one, else jnp.

`spec.target` decides at trace time, so a program for a TPU can be compiled on a machine without one. The platform only
guards: a program traced for a TPU and lowered for something else gets the reference.
"""

import functools

import jax
from jaxtyping import Array, Float, Int

from kvqjax.attention import Partial
from kvqjax.pallas_kernels import reference, tpu
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec
from kvqjax.pallas_kernels.support import ROWS, lookup

__all__ = ["packed_attention", "path"]

MOST_ROWS = 8  # query rows of a KV head the kernels were compiled for


def path(spec: PackedSpec, rows: int) -> str:
    """ "tpu" or "reference": what a call with `rows` = T*G query rows of a KV head is computed by. A kernel is taken
    only for the shapes it was compiled ahead of time for (`support`)."""
    known = (spec.head_dim, spec.key_group, spec.value_group) == (128, 128, 128) and spec.key_bits == spec.value_bits
    if not known or rows > MOST_ROWS or f"kivi {spec.key_bits} bits" not in ROWS:
        return "reference"
    return "reference" if lookup(f"kivi {spec.key_bits} bits", spec.target) == "reference" else "tpu"


def packed_attention(
    q: Float[Array, "B T H D"],
    body: PackedBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: PackedSpec,
) -> Partial:
    """As `reference.packed_attention`; kernels round the queries to bfloat16."""
    if path(spec, q.shape[1] * q.shape[2] // spec.kv_heads) == "reference":
        return reference.packed_attention(q, body, layer, start, stop, spec)

    kernel = functools.partial(tpu.packed_attention, spec=spec)
    plain = functools.partial(reference.packed_attention, spec=spec)
    return jax.lax.platform_dependent(q, body, layer, start, stop, tpu=kernel, default=plain)
