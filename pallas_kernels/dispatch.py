"""Decode attention on packed bodies for the chip a program is compiled for: a kernel where there is one, else jnp.

Each form of a body has one plain computation that equals its kernels: `reference` for uniform codes of keys after RoPE,
the caller's general way of reading a body for all others. `spec.target` decides at trace time, so a program for a TPU
or GPU can be compiled on a machine without one. The platform only guards: a program traced for one and lowered for
something else gets the plain computation.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.pallas_kernels import reference
from kvqjax.pallas_kernels.commvq import CommVQBody, CommVQSpec
from kvqjax.pallas_kernels.higgs import HiggsBody, HiggsSpec
from kvqjax.pallas_kernels.latents import LatentBody, LatentSpec
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec, family
from kvqjax.pallas_kernels.support import ROWS, lookup

__all__ = ["packed_attention", "path"]

Spec = PackedSpec | LatentSpec | HiggsSpec | CommVQSpec
# Query rows of a KV head that kernels were compiled for without spills; more are several calls, up to so many.
MOST_ROWS, MOST_CALLS = 8, 8
# Bits of KIVI's keys and values in groups of 128, head_dim 128, at which twice as many do not spill.
MANY_ROWS = {"v5e": (2, 4, 8), "v5p": (2, 4, 8), "v6e": (4, 8), "v7x": (4, 8)}
SHARED = {96: 2}  # where several heads share their lanes: so many each
SHARED_BEFORE = {64: 4}  # keys before RoPE likewise
MOST_SLOTS = 12  # outlier slots of a token's keys, or values, likewise
PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}
# Rank, channels of the keys and head_dim of latents that were compiled: what vector memory and registers depend on.
LATENT_SHAPES = ((1024, 1024, 128), (512, 512, 64))
HIGGS_SHAPES = ((8, 128, 1024), (8, 64, 512))  # KV heads, head_dim and channels that share a scale, likewise
# Levels, KV heads, head_dim and then rounds of CommVQ's keys and bits of its values that were compiled.
COMMVQ_SHAPES = {(64, 8, 128): {1: 11, 2: 21}, (64, 8, 64): {1: 5, 2: 11}}


class Form(NamedTuple):
    """How calls with one type of spec find their kernel: the name of its module, the row of `support`
    that a spec belongs to ("" for what no kernel was written for), and how many query rows of a KV head the kernels
    were compiled for."""

    module: str
    row: Callable[[Any], str]
    most: Callable[[Any], int]


def _packed_rows(spec: PackedSpec) -> int:
    if max(spec.key_slots, spec.value_slots) > MOST_SLOTS:
        return 0
    if spec.row in [f"kivi {bits} bits" for bits in MANY_ROWS.get(spec.target, ())]:
        return 2 * MOST_ROWS
    return (SHARED if spec.rope is None else SHARED_BEFORE).get(spec.head_dim, MOST_ROWS)


def _latent_row(spec: LatentSpec) -> str:
    stored, shape = spec.stored, (spec.rank, spec.width, spec.head_dim)
    same = (stored.key_bits, stored.key_group, stored.value_group) == (stored.value_bits, 128, 128)
    size = f"xquant {stored.key_bits} bits" + (f", head_dim {spec.head_dim}" if spec.head_dim != 128 else "")
    known = same and stored.scales == "bfloat16" and shape in LATENT_SHAPES
    return size + (", QK-norm" if spec.epsilon else "") if known else ""


def _higgs_row(spec: HiggsSpec) -> str:
    known = spec.key_bits == spec.value_bits and spec.scales == "bfloat16"
    shape = spec.kv_heads, spec.head_dim, spec.group
    size = f"higgs {spec.key_bits // 2} bits" + (f", head_dim {spec.head_dim}" if spec.head_dim != 128 else "")
    return size if known and shape in HIGGS_SHAPES else ""


def _commvq_row(spec: CommVQSpec) -> str:
    bits = spec.value_width // (spec.kv_heads * spec.head_dim)
    known = COMMVQ_SHAPES.get((spec.levels, spec.kv_heads, spec.head_dim), {}).get(bits) == spec.rounds
    size = f"commvq {bits} bit{'s' * (bits > 1)}" + (f", head_dim {spec.head_dim}" if spec.head_dim != 128 else "")
    return size if known else ""


FORMS = {
    PackedSpec: Form("packed", lambda spec: spec.row, _packed_rows),
    LatentSpec: Form("latents", _latent_row, lambda _: MOST_ROWS),
    HiggsSpec: Form("higgs", _higgs_row, lambda spec: MOST_ROWS // (1 if _higgs_row(spec) == "higgs 2 bits" else 2)),
    CommVQSpec: Form("commvq", _commvq_row, lambda _: MOST_ROWS // 2),
}


def row_of(spec: Spec) -> str:
    """The row of `support` that a body's form belongs to; "" for forms that no kernel was written for."""
    return FORMS[type(spec)].row(spec)


def at_once(spec: Spec, group: int, length: int = 1) -> int:
    """How many of the G = `group` query heads of a KV head a call takes, with T = `length` new tokens, so that no
    kernel gets more rows than it was compiled for; 0 where that would be too many calls."""
    most = FORMS[type(spec)].most(spec) // length
    number = -(-group // most) if most else MOST_CALLS + 1
    return -(-group // number) if number <= MOST_CALLS else 0


def path(spec: Spec, group: int, slots: int, length: int = 1, trusted: bool = False) -> str:
    """ "tpu", "gpu" or "reference": what computes a call with `length` new tokens and `group` query heads of a KV head
    on a body of `slots` tokens. A kernel is taken only for the shapes it was compiled ahead of time for, and only once
    its results were seen to be right: by the table (`support`), or `trusted`, because this chip checked them or the
    user forces them."""
    kernel, row = "gpu" if family(spec.target) == "gpu" else "tpu", row_of(spec)
    enough = ("fast", "correct", "compiled") if trusted else ("fast", "correct")
    if row not in ROWS or lookup(row, spec.target) not in enough or not at_once(spec, group, length):
        return "reference"
    if kernel == "tpu" and slots % 256:  # what the widest product takes
        return "reference"
    return kernel


def _shared_out(kernel: Callable[..., Partial], some: int, spec: Spec) -> Callable[..., Partial]:
    """`kernel` on `some` query heads of every KV head after the other."""

    def attend(q, *rest) -> Partial:
        q = q.reshape(*q.shape[:2], spec.kv_heads, -1, q.shape[3])
        done = []
        for first in range(0, q.shape[3], some):
            part = q[:, :, :, first : first + some]
            out, lse = kernel(part.reshape(*q.shape[:2], -1, q.shape[4]), *rest)
            done.append((out.reshape(*part.shape[:4], -1), lse.reshape(part.shape[:4])))
        out, lse = (jnp.concatenate(parts, axis=3) for parts in zip(*done, strict=True))
        return Partial(out.reshape(*q.shape[:2], -1, out.shape[4]), lse.reshape(*q.shape[:2], -1))

    return attend


def packed_attention(
    q: Float[Array, "B T H D"],
    body: PackedBody | LatentBody | HiggsBody | CommVQBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: Spec,
    general: Callable[[], Partial] | None = None,
    trusted: bool = False,
) -> Partial:
    """As `reference.packed_attention`, for every form of a body; kernels round the queries to bfloat16. `general()`
    computes the same where the form is not `plain`; `trusted` as in `path`."""
    length, group = q.shape[1], q.shape[2] // spec.kv_heads
    chosen = path(spec, group, body.slots, length, trusted)
    if isinstance(spec, PackedSpec) and spec.plain:
        plain: Callable[..., Partial] = functools.partial(reference.packed_attention, spec=spec)
    elif general is None:
        raise ValueError(f"{spec}: only the caller can read this form")
    else:
        plain = lambda *_: general()  # noqa: E731
    if chosen == "reference":
        return plain(q, body, layer, start, stop)

    # Imported where it is wanted: not every jaxlib has the compiler of the other's kernels.
    module = importlib.import_module(f"kvqjax.pallas_kernels.{chosen}.{FORMS[type(spec)].module}")
    kernel, some = functools.partial(module.packed_attention, spec=spec), at_once(spec, group, length)
    kernels = {PLATFORMS[chosen]: kernel if some == group else _shared_out(kernel, some, spec)}
    return jax.lax.platform_dependent(q, body, layer, start, stop, **kernels, default=plain)
