"""How many queries at once attend on a chip: in blocks as small as a CPU's caches, in large ones, or by a kernel."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.ops.attention import Partial, blockwise_attention, merge, segment_attention, total_lse
from kvqjax.pallas_kernels import splash
from kvqjax.pallas_kernels.forms import SPLASH
from kvqjax.pallas_kernels.packed import family

__all__ = ["MANY_QUERIES", "attend_blocks", "attend_segment", "by_splash", "kernels_of", "large_block"]

MANY_QUERIES = 128  # from so many new tokens on, chunks take these paths
SCORES, DECODED = 2**30, 2**13  # of one block of a body: bytes of its scores on a GPU, its tokens on a TPU


def kernels_of(layout: CacheLayout) -> str:
    """ "off", "tiles" (large blocks of plain products, on GPUs) or "splash" (on TPUs, where the layout lets it run);
    "interpret" is splash in the interpreter."""
    kind = family(layout.target)
    if kind == "gpu":
        return "tiles"
    return "splash" if kind == "tpu" and layout.kernels.allow(SPLASH) else "off"


def large_block(q: Float[Array, "B T H D"], reading: int, slots: int, kernels: str, apart: bool) -> int:
    """How many of a body's `slots` tokens a chunk reads at a time where it may be more than `reading`: each is decoded
    once, and few programs run. The last block may begin within the one before it, unless blocks must lie `apart`."""
    batch, length, heads, _ = q.shape
    if kernels == "off" or length < MANY_QUERIES:
        return reading
    most = SCORES // (4 * batch * heads * length) if kernels == "tiles" else DECODED // batch
    whole = slots // reading
    numbers = range(1, max(1, min(most // reading, whole)) + 1)
    return reading * max(n for n in numbers if not apart or whole % n == 0)


def by_splash(kernels: str, kernel: Callable, plain: Callable, *arrays):
    """`kernel(*arrays, interpret)` where a program is for a TPU or the interpreter is asked for, else `plain(*arrays)`;
    a program for a TPU may be lowered for something else."""
    if kernels == "interpret":
        return kernel(*arrays, True)
    return jax.lax.platform_dependent(*arrays, tpu=lambda *x: kernel(*x, False), default=plain)


def _splashed(q, k, v, newest: Int[Array, "B T"], oldest: Int[Array, "B T"], interpret: bool) -> Partial:
    """Row by row: splash attention's mask is one for all heads, and rows are heads to it."""
    each = []
    for row in range(q.shape[0]):
        own_k, own_v = (jnp.swapaxes(x[row], 0, 1) for x in (k, v))
        limits = {"newest": newest[row], "oldest": oldest[row]}
        each.append(splash.splash_attention(q[row][None], own_k, own_v, interpret=interpret, **limits))
    return Partial(*(jnp.concatenate(parts) for parts in zip(*each, strict=True)))


def attend_segment(q, k, v, mask: Bool[Array, "B T S"], kernels: str) -> Partial:
    """`segment_attention` where every query sees consecutive keys, by a kernel where there is one."""
    keys = k.shape[1]
    if kernels not in ("splash", "interpret") or not splash.fits(q.shape[1], keys, q.shape[3]):
        return segment_attention(q, k, v, mask)
    place = jnp.arange(keys)[None, None]
    newest, oldest = jnp.where(mask, place, -1).max(2), jnp.where(mask, place, keys).min(2)

    def plain(q, k, v, newest, oldest):
        return segment_attention(q, k, v, (place <= newest[:, :, None]) & (place >= oldest[:, :, None]))

    return by_splash(kernels, _splashed, plain, q, k, v, newest, oldest)


def attend_blocks(q, kv_heads: int, read, first, last, carry, width: int | None, kernels: str):
    """`blockwise_attention` of a body, whose blocks are segments to kernels."""
    if kernels not in ("splash", "interpret") or q.shape[1] < MANY_QUERIES or width is not None:
        return blockwise_attention(q, kv_heads, read, first, last, carry, width)

    def step(j, loop):
        found, carry = loop
        k, v, mask, carry = read(j, carry)
        part = attend_segment(q, k, v, mask, kernels)
        return Partial(merge(found, part), total_lse(found, part)), carry

    blank = Partial(jnp.zeros(q.shape), jnp.full(q.shape[:3], -jnp.inf))
    return jax.lax.fori_loop(first, last, step, (blank, carry))
