"""Attend to packed bodies on the chip that a program is compiled for: by a kernel where there is one, else in jnp.

The caller brings the computation in plain jnp that equals a body's kernels. `spec.target` decides at trace time, so a
program for a TPU or GPU can be compiled on a machine without one. The platform only guards: a program traced for one
and lowered for something else gets the plain computation."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.ops.packing.words import PLANE, split_bits
from kvqjax.pallas_kernels.chips import family
from kvqjax.pallas_kernels.commvq import CommVQBody, CommVQSpec
from kvqjax.pallas_kernels.exact import ExactBody, ExactSpec
from kvqjax.pallas_kernels.forms import Spec, form_of
from kvqjax.pallas_kernels.higgs import HiggsBody, HiggsSpec
from kvqjax.pallas_kernels.latents import LatentBody, LatentSpec
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec
from kvqjax.pallas_kernels.predicted import PredictedBody, PredictedSpec
from kvqjax.pallas_kernels.support import COMPILED, lookup

__all__ = ["MODULES", "at_once", "least_page", "packed_attention", "path", "takes_pages"]

MOST_CALLS = 8  # of a kernel, for query rows of a KV head that it takes one after the other
TILE, LANES = 1024, 128  # tokens of a tile that every TPU kernel takes; numbers side by side in a TPU's register
PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}
# The module of `tpu` or `gpu` that has the kernels for a type of spec.
MODULES: dict[type, str] = {
    PackedSpec: "packed",
    LatentSpec: "latents",
    HiggsSpec: "higgs",
    CommVQSpec: "commvq",
    ExactSpec: "exact",
    PredictedSpec: "predicted",
}


def at_once(spec: Spec, group: int, length: int = 1) -> int:
    """Return how many of the G = `group` query heads of a KV head one call of the kernel takes, with T = `length` new
    tokens. It takes no more query rows than it was compiled for. 0 means no kernel, or too many calls; a kernel that
    passes what flows from layer to layer through a layer is called once."""
    entry = lookup(form_of(spec), spec.target)
    most = entry.most_rows // length if entry is not None else 0
    number = -(-group // most) if most else MOST_CALLS + 1
    return -(-group // number) if number <= (1 if isinstance(spec, PredictedSpec) else MOST_CALLS) else 0


def path(spec: Spec, group: int, slots: int, length: int = 1, trusted: bool = False) -> str:
    """Name what computes a call with `length` new tokens and `group` query heads of a KV head on a body of `slots`
    tokens: "tpu", "gpu" or "reference". A kernel is taken only for the shapes that it was compiled ahead of time for.
    The table's level decides whether it is trusted; `trusted` overrides it: this chip checked the kernel, or the user
    forces it."""
    if spec.target == "cpu":
        return "reference"
    kernel, entry = family(spec.target), lookup(form_of(spec), spec.target)
    if entry is None or (entry.level == COMPILED and not trusted) or not at_once(spec, group, length):
        return "reference"
    if kernel == "tpu" and slots % 256:  # what the widest product takes
        return "reference"
    return kernel


def least_page(spec: Spec) -> int:
    """Give the tokens of the smallest page that a TPU's kernel reads by the table of pages: a tile's, which is of one
    page.

    By estimate a grid step takes a third of a microsecond by itself, in which a v6e's memory brings the codes of 1000
    keys and values of 1024 channels at 2 bits. Smaller tiles would wait for the grid."""
    if not isinstance(spec, CommVQSpec):
        return TILE
    # Words of key codes lie along the lanes. XLA lays out anew what has fewer than 128 of them, at every call.
    return max(TILE, LANES * PLANE // split_bits(spec.bits)[-1])


def takes_pages(spec: Spec, chip: str | None, page: int) -> bool:
    """Say whether the kernel of this kind of chip, "tpu" or "gpu", goes from page to page of `page` tokens. A page is
    whole tiles of every kernel, and whole blocks of 128 words of CommVQ's, only where it is a power of two."""
    return chip == "tpu" and page >= least_page(spec) and page.bit_count() == 1


def _shared_out(kernel: Callable[..., Partial], count: int, spec: Spec) -> Callable[..., Partial]:
    """Return a function that calls `kernel` repeatedly, on at most `count` query heads of each KV head at a time, and
    puts the results together."""

    def attend(q, *arguments) -> Partial:
        q = q.reshape(*q.shape[:2], spec.kv_heads, -1, q.shape[3])
        results = []
        for first in range(0, q.shape[3], count):
            part = q[:, :, :, first : first + count]
            out, lse = kernel(part.reshape(*q.shape[:2], -1, q.shape[4]), *arguments)
            results.append((out.reshape(*part.shape[:4], -1), lse.reshape(part.shape[:4])))
        out, lse = (jnp.concatenate(parts, axis=3) for parts in zip(*results, strict=True))
        return Partial(out.reshape(*q.shape[:2], -1, out.shape[4]), lse.reshape(*q.shape[:2], -1))

    return attend


def packed_attention(
    q: Float[Array, "B T H D"],
    body: PackedBody | LatentBody | HiggsBody | CommVQBody | ExactBody | PredictedBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: Spec,
    without_kernel: Callable[[], Any],
    trusted: bool = False,
    **also: Any,
) -> Any:
    """Attend as `reference.packed_attention` does, to a body of any kind. Kernels round the queries to bfloat16.

    Args:
        without_kernel: Computes the same where no kernel runs.
        trusted: As in `path`.
        also: `recent` tokens beside the body, which a TPU's kernel for exact bodies attends to as well; the `carry` of
            layers that feed each other; the table of `pages` [B, N] in which a row's tokens lie, where the body's rows
            are pages (`takes_pages`). A page that is not there is -1.

    Returns:
        What `without_kernel` returns: attention, or with a carry (attention, carry)."""
    length, group = q.shape[1], q.shape[2] // spec.kv_heads
    chosen = path(spec, group, body.slots, length, trusted)
    if chosen == "reference":
        return without_kernel()

    # Imported where it is wanted: not every jaxlib has the compiler of the other's kernels.
    module = importlib.import_module(f"kvqjax.pallas_kernels.{chosen}.{MODULES[type(spec)]}")
    kernel, count = functools.partial(module.packed_attention, spec=spec, **also), at_once(spec, group, length)
    kernels = {PLATFORMS[chosen]: kernel if count == group else _shared_out(kernel, count, spec)}
    return jax.lax.platform_dependent(q, body, layer, start, stop, **kernels, default=lambda *_: without_kernel())
