"""Attend to packed bodies on the chip that a program is compiled for: by a kernel where there is
one, else in jnp.

The caller brings a plain computation in jnp with the same result. `spec.target` chooses between the
two while the program is traced, so that a program for a TPU or GPU can be compiled on a machine
without one. When the program is lowered, the platform is checked as well: a program that was traced
for one chip and is lowered for another platform gets the plain computation."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.pallas_kernels.chips import TILE, family
from kvqjax.pallas_kernels.exact import ExactBody, ExactSpec
from kvqjax.pallas_kernels.forms import Spec, form_of
from kvqjax.pallas_kernels.higgs import HiggsBody, HiggsSpec
from kvqjax.pallas_kernels.klt import KltBody, KltSpec
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec
from kvqjax.pallas_kernels.support import COMPILED, lookup

MOST_CALLS = 8  # of a kernel, where it cannot take all query rows of a KV head at once
PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}
# The module of `tpu` or `gpu` that has the kernels for a type of spec.
MODULES: dict[type, str] = {
    PackedSpec: "packed",
    HiggsSpec: "higgs",
    KltSpec: "klt",
    ExactSpec: "exact",
}


def at_once(spec: Spec, group: int, length: int = 1) -> int:
    """Choose how many query heads of a KV head one call of the kernel takes.

    Args:
        group: Query heads of a KV head, G.
        length: New tokens, T.

    Returns:
        The number of query heads, the same for every call but the last. A call has no more query
        rows than the kernel was compiled for. 0 where there is no kernel, or where too many calls
        would be needed."""
    entry = lookup(form_of(spec), spec.target)
    most_heads = entry.most_rows // length if entry is not None else 0
    if not most_heads:
        return 0
    calls = -(-group // most_heads)
    return -(-group // calls) if calls <= MOST_CALLS else 0


def path(spec: Spec, group: int, slots: int, length: int = 1, trusted: bool = False) -> str:
    """Name what computes a call: "tpu" or "gpu" for a kernel, or "reference".

    Args:
        group: Query heads of a KV head.
        length: New tokens.
        trusted: True takes the kernel at any level of the table: this chip checked it, or the user
            forces it. False takes it only where the table's level says that it is right.

    Returns:
        The name. A kernel is taken only for shapes for which it was compiled ahead of time."""
    if spec.target == "cpu":
        return "reference"
    kernel, entry = family(spec.target), lookup(form_of(spec), spec.target)
    if (
        entry is None
        or (entry.level == COMPILED and not trusted)
        or not at_once(spec, group, length)
    ):
        return "reference"
    if kernel == "tpu" and slots % 256:  # what the widest product takes
        return "reference"
    return kernel


def takes_pages(chip: str | None, page: int) -> bool:
    """Say whether the kernels of this kind of chip, "tpu" or "gpu", read pages of `page` tokens by
    the table of pages.

    A tile lies in one page, so that a page must be whole tiles of every kernel. Powers of two
    are."""
    return chip == "tpu" and page >= TILE and page.bit_count() == 1


def _shared_out(kernel: Callable[..., Partial], count: int, spec: Spec) -> Callable[..., Partial]:
    """Return a function that calls `kernel` repeatedly, on at most `count` query heads of each KV
    head at a time, and puts the results together."""

    def attend(q, *arguments) -> Partial:
        q = q.reshape(*q.shape[:2], spec.kv_heads, -1, q.shape[3])  # [B, T, K, G, D]
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
    body: PackedBody | HiggsBody | KltBody | ExactBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: Spec,
    without_kernel: Callable[[], Partial],
    trusted: bool = False,
    **also: Any,
) -> Partial:
    """Attend as `reference.packed_attention` does, to a body of any kind. Kernels round the queries
    to bfloat16.

    Args:
        without_kernel: Computes the same where no kernel runs.
        trusted: As in `path`.
        also: What some kernels get as well. `recent`: tokens beside the body, to which a TPU's
            kernel for exact bodies attends too. `pages` [B, N]: the pages in which a row's tokens
            lie, -1 where there is none, for bodies whose rows are pages (`takes_pages`).

    Returns:
        What `without_kernel` returns."""
    length, group = q.shape[1], q.shape[2] // spec.kv_heads
    chosen = path(spec, group, body.slots, length, trusted)
    if chosen == "reference":
        return without_kernel()

    # Imported only here: a jaxlib for TPUs need not have the compiler of GPU kernels, nor the other
    # way round.
    module = importlib.import_module(f"kvqjax.pallas_kernels.{chosen}.{MODULES[type(spec)]}")
    kernel = functools.partial(module.packed_attention, spec=spec, **also)
    count = at_once(spec, group, length)
    kernels = {PLATFORMS[chosen]: kernel if count == group else _shared_out(kernel, count, spec)}
    return jax.lax.platform_dependent(
        q, body, layer, start, stop, **kernels, default=lambda *_: without_kernel()
    )
