"""Decode attention on packed bodies for the chip a program is compiled for: a kernel where there is one, else jnp.

Each form of a body has one plain computation that equals its kernels: `reference` for uniform codes of keys after RoPE,
the caller's general way of reading a body for all others. `spec.target` decides at trace time, so a program for a TPU
or GPU can be compiled on a machine without one. The platform only guards: a program traced for one and lowered for
something else gets the plain computation.
"""

import functools
import importlib
from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

from kvqjax.attention import Partial
from kvqjax.pallas_kernels import reference
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec
from kvqjax.pallas_kernels.support import ROWS, lookup

__all__ = ["packed_attention", "path"]

# Query rows of a KV head the kernels were compiled for. 16 rows spill 1 register on v6e and v7x, 12 on v5e and v5p.
MOST_ROWS = {"tpu": 16, "gpu": 8}
MOST_ROWS_UNROTATED = 8  # of kernels for keys before RoPE
MOST_SLOTS = 12  # outlier slots of a token's keys, or values, likewise
PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}


def row_of(spec: PackedSpec) -> str:
    """The row of `support` that a body's form belongs to; "" for forms that no kernel was written for."""
    if spec.key_bits != spec.value_bits or spec.scales != "bfloat16":
        return ""
    size = f"{spec.key_bits} bits" + (f", head_dim {spec.head_dim}" if spec.head_dim != 128 else "")
    if spec.datatype == "nuq":
        known = spec.rope is not None and (spec.key_group, spec.value_group) == (0, spec.width)
        size = "kvquant " + size + (", outliers" if spec.key_slots or spec.value_slots else "")
    else:
        known = (spec.key_group, spec.value_group) == (128, spec.head_dim)
        size = ("kivi " if spec.rope is None else "kivi_star ") + size
    return size if known else ""


def path(spec: PackedSpec, rows: int, slots: int) -> str:
    """ "tpu", "gpu" or "reference": what computes a call with `rows` = T*G query rows of a KV head on a body of `slots`
    tokens. A kernel is taken only for the shapes it was compiled ahead of time for, and only once its results were seen
    to be right (`support`)."""
    kernel, row = "gpu" if spec.target.startswith("sm") else "tpu", row_of(spec)
    most = MOST_ROWS[kernel] if spec.rope is None else MOST_ROWS_UNROTATED
    if rows > most or max(spec.key_slots, spec.value_slots) > MOST_SLOTS:
        return "reference"
    if row not in ROWS or lookup(row, spec.target) not in ("fast", "correct"):
        return "reference"
    if kernel == "tpu" and slots % 256:  # what the widest product takes
        return "reference"
    return kernel


def packed_attention(
    q: Float[Array, "B T H D"],
    body: PackedBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: PackedSpec,
    general: Callable[[], Partial] | None = None,
) -> Partial:
    """As `reference.packed_attention`, for every form of a body; kernels round the queries to bfloat16. `general()`
    computes the same where the form is not `plain`."""
    chosen = path(spec, q.shape[1] * q.shape[2] // spec.kv_heads, body.value_scale.shape[-1])
    plain = functools.partial(reference.packed_attention, spec=spec) if spec.plain else lambda *_: general()
    if chosen == "reference":
        return plain(q, body, layer, start, stop)

    # Imported where it is wanted: not every jaxlib has the compiler of the other's kernels.
    module = importlib.import_module(f"kvqjax.pallas_kernels.{chosen}")
    kernels = {PLATFORMS[chosen]: functools.partial(module.packed_attention, spec=spec)}
    return jax.lax.platform_dependent(q, body, layer, start, stop, **kernels, default=plain)
