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
from jaxtyping import Array, Float, Int

from kvqjax.attention import Partial
from kvqjax.pallas_kernels import reference
from kvqjax.pallas_kernels.commvq import CommVQBody, CommVQSpec
from kvqjax.pallas_kernels.higgs import HiggsBody, HiggsSpec
from kvqjax.pallas_kernels.latents import LatentBody, LatentSpec
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec
from kvqjax.pallas_kernels.support import ROWS, lookup

__all__ = ["packed_attention", "path"]

Spec = PackedSpec | LatentSpec | HiggsSpec | CommVQSpec
MOST_ROWS = 8  # query rows of a KV head that all kernels were compiled for
# Bits of KIVI's keys and values in groups of 128, head_dim 128, at which twice as many do not spill.
MANY_ROWS = {"v5e": (2, 3, 4, 8), "v5p": (2, 3, 4, 8), "v6e": (4, 8), "v7x": (4, 8)}
MOST_SLOTS = 12  # outlier slots of a token's keys, or values, likewise
MOST_ROWS_COMMVQ = 4  # of the kernel on CommVQ's codes; 8 rows spill
MOST_ROWS_LATENT = 4  # of the kernel on latents; 8 rows spill on v6e and v7x
PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}
# Rank, channels of the keys and head_dim of latents that were compiled: what vector memory and registers depend on.
LATENT_SHAPES = ((1024, 1024, 128), (512, 512, 64))
MOST_ROWS_HIGGS = {"higgs 2 bits": 8}  # of others 4
HIGGS_SHAPES = ((8, 128, 1024), (8, 64, 512))  # KV heads, head_dim and channels that share a scale, likewise
# Levels, KV heads, head_dim and then rounds of CommVQ's keys and bits of its values that were compiled.
COMMVQ_SHAPES = {(64, 8, 128): {1: 11, 2: 21}, (64, 8, 64): {1: 5, 2: 11}}


class Form(NamedTuple):
    """How calls with one type of spec find their kernel: what the name of its module ends with, the row of `support`
    that a spec belongs to ("" for what no kernel was written for), and whether the kernels were compiled for so many
    query rows of a KV head."""

    suffix: str
    row: Callable[[Any], str]
    fits: Callable[[Any, int], bool]


def _packed_row(spec: PackedSpec) -> str:
    if spec.scales != "bfloat16":
        return ""
    bits = f"{spec.key_bits}" if spec.key_bits == spec.value_bits else f"{spec.key_bits} and {spec.value_bits}"
    size = f"{bits} bits" + (f", head_dim {spec.head_dim}" if spec.head_dim != 128 else "")
    if spec.datatype == "nuq":
        known = spec.rope is not None and (spec.key_group, spec.value_group) == (0, spec.width)
        size = "kvquant " + size + (", outliers" if spec.key_slots or spec.value_slots else "")
    else:
        groups = spec.key_group, spec.value_group
        known = groups in ((128, spec.head_dim), (32, 32))
        size += ", groups of 32" if groups == (32, 32) else ""
        size = ("kivi " if spec.rope is None else "kivi_star ") + size
    return size if known else ""


def _packed_fits(spec: PackedSpec, rows: int) -> bool:
    many = _packed_row(spec) in [f"kivi {bits} bits" for bits in MANY_ROWS.get(spec.target, ())]
    return rows <= (2 * MOST_ROWS if many else MOST_ROWS) and max(spec.key_slots, spec.value_slots) <= MOST_SLOTS


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
    PackedSpec: Form("", _packed_row, _packed_fits),
    LatentSpec: Form("_latents", _latent_row, lambda spec, rows: rows <= MOST_ROWS_LATENT),
    HiggsSpec: Form("_higgs", _higgs_row, lambda spec, rows: rows <= MOST_ROWS_HIGGS.get(_higgs_row(spec), 4)),
    CommVQSpec: Form("_commvq", _commvq_row, lambda spec, rows: rows <= MOST_ROWS_COMMVQ),
}


def row_of(spec: Spec) -> str:
    """The row of `support` that a body's form belongs to; "" for forms that no kernel was written for."""
    return FORMS[type(spec)].row(spec)


def path(spec: Spec, rows: int, slots: int) -> str:
    """ "tpu", "gpu" or "reference": what computes a call with `rows` = T*G query rows of a KV head on a body of `slots`
    tokens. A kernel is taken only for the shapes it was compiled ahead of time for, and only once its results were seen
    to be right (`support`)."""
    kernel, row = "gpu" if spec.target.startswith("sm") else "tpu", row_of(spec)
    if not FORMS[type(spec)].fits(spec, rows):
        return "reference"
    if row not in ROWS or lookup(row, spec.target) not in ("fast", "correct"):
        return "reference"
    if kernel == "tpu" and slots % 256:  # what the widest product takes
        return "reference"
    return kernel


def packed_attention(
    q: Float[Array, "B T H D"],
    body: PackedBody | LatentBody | HiggsBody | CommVQBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: Spec,
    general: Callable[[], Partial] | None = None,
) -> Partial:
    """As `reference.packed_attention`, for every form of a body; kernels round the queries to bfloat16. `general()`
    computes the same where the form is not `plain`."""
    chosen = path(spec, q.shape[1] * q.shape[2] // spec.kv_heads, body.slots)
    if isinstance(spec, PackedSpec) and spec.plain:
        plain: Callable[..., Partial] = functools.partial(reference.packed_attention, spec=spec)
    elif general is None:
        raise ValueError(f"{spec}: only the caller can read this form")
    else:
        plain = lambda *_: general()  # noqa: E731
    if chosen == "reference":
        return plain(q, body, layer, start, stop)

    # Imported where it is wanted: not every jaxlib has the compiler of the other's kernels.
    module = importlib.import_module(f"kvqjax.pallas_kernels.{chosen}{FORMS[type(spec)].suffix}")
    kernels = {PLATFORMS[chosen]: functools.partial(module.packed_attention, spec=spec)}
    return jax.lax.platform_dependent(q, body, layer, start, stop, **kernels, default=plain)
