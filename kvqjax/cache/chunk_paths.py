"""How many queries at once attend on a chip: in blocks as small as a CPU's caches, in large ones, or by a kernel."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.runs import RunLayout
from kvqjax.ops.attention import Partial, blockwise_attention, merge, segment_attention, total_lse
from kvqjax.ops.large_tiles import tile_attention
from kvqjax.pallas_kernels import splash
from kvqjax.pallas_kernels.forms import SPLASH
from kvqjax.pallas_kernels.packed import family

__all__ = [
    "MANY_QUERIES",
    "MOST_ROWS",
    "attend_blocks",
    "attend_segment",
    "by_splash",
    "few_block",
    "kernels_of",
    "large_block",
]

MANY_QUERIES = 128  # from so many new tokens on, chunks take these paths
SCORES, DECODED = 2**31, 2**13  # of one block of a body: bytes of its weights on a GPU, its tokens on a TPU
SLACK = 1.25  # how much more a block may be, rather than one block more
FEW_TOKENS = 2**14  # of one row of a plain body, read at a time by a few queries on a TPU
MOST_ROWS = 128  # queries of all heads that a TPU multiplies with all heads' channels
CARRIED = 2**22  # of the numbers that flow between layers, read at a time on a TPU: what its fast memory holds
WHOLE = 2**28  # bytes of a layer's keys and values that a chunk on a TPU may hold decoded, all at once


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
    most = SCORES / (q.dtype.itemsize * batch * heads * length) if kernels == "tiles" else DECODED / batch
    whole = slots // reading
    if apart:
        return reading * max(n for n in range(1, max(1, min(round(most / reading), whole)) + 1) if whole % n == 0)
    count = math.ceil(whole * reading / (SLACK * most))  # of even blocks
    return reading * -(-whole // min(whole, count))


def few_block(run: RunLayout, batch: int, rows: int) -> int:
    """How many of a body's tokens a few queries, `rows` of all heads, on a TPU read at a time, where it is stored as it
    is read, or where layers feed each other: operations on a few tokens take longer to start than to run. The last
    block may begin within the one before it."""
    if not run.lanes or run.wraps:
        return run.reading
    chain = run.wiring.chain
    if chain.carry and chain.held:
        most = CARRIED // (batch * max(chain.carry.values()))
    elif run.plain and rows <= MOST_ROWS:
        most = FEW_TOKENS // max(1, batch // 2)
    else:
        return run.reading
    whole = run.slots_here // run.reading
    count = -(-whole // max(1, most // run.reading))  # of even blocks
    return run.reading * -(-whole // max(1, count))


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


def _attend_at_once(q, kv_heads: int, read, first, last, carry, slots: int, kernels: str) -> tuple[Partial, Any]:
    """Attention to a body by one call of the kernel: its blocks, which lie apart, first become keys and values of all
    its `slots`. All queries of a row see the same of it, its first tokens."""
    rows, length, _, dim = q.shape

    def step(j, loop):
        (whole_k, whole_v, seen), carry = loop
        k, v, mask, carry = read(j, carry)
        here = mask[:, 0]
        by_head = (jnp.swapaxes(jnp.where(here[:, :, None, None], x, 0), 1, 2) for x in (k, v))  # 0 x inf would be NaN
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=j * k.shape[1], axis=2)
        whole_k, whole_v = (put(x, part) for x, part in zip((whole_k, whole_v), by_head, strict=True))
        return (whole_k, whole_v, seen + here.sum(-1, dtype=jnp.int32)), carry

    blank = jnp.zeros((rows, kv_heads, slots, dim), q.dtype)
    (k, v, seen), carry = jax.lax.fori_loop(first, last, step, ((blank, blank, jnp.zeros(rows, jnp.int32)), carry))
    newest = jnp.broadcast_to(seen[:, None] - 1, (rows, length))

    def kernel(q, k, v, newest, interpret):
        each = [
            splash.splash_attention(q[row][None], k[row], v[row], newest[row], interpret=interpret)
            for row in range(rows)
        ]
        return Partial(*(jnp.concatenate(parts) for parts in zip(*each, strict=True)))

    def plain(q, k, v, newest):
        mask = jnp.arange(slots)[None, None] <= newest[:, :, None]
        return segment_attention(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), mask)

    return by_splash(kernels, kernel, plain, q, k, v, newest), carry


def attend_blocks(
    q, kv_heads: int, read, first, last, carry, width: int | None, kernels: str, alike: bool, slots: int
) -> tuple[Partial, Any]:
    """`blockwise_attention` of a body of `slots` tokens. Where all queries of a row see `alike`, it is tiles to a GPU,
    and one segment to the kernel if so much may be decoded; else its blocks are segments to the kernel."""
    few = q.shape[1] < MANY_QUERIES or width is not None
    if few or kernels == "off" or (kernels == "tiles" and not alike):
        return blockwise_attention(q, kv_heads, read, first, last, carry, width)
    if kernels == "tiles":
        return tile_attention(q, kv_heads, read, first, last, carry)
    decoded = 2 * q.dtype.itemsize * q.shape[0] * kv_heads * slots * q.shape[3]
    if alike and decoded <= WHOLE and splash.fits(q.shape[1], slots, q.shape[3]):
        return _attend_at_once(q, kv_heads, read, first, last, carry, slots, kernels)

    def step(j, loop):
        found, carry = loop
        k, v, mask, carry = read(j, carry)
        part = attend_segment(q, k, v, mask, kernels)
        return Partial(merge(found, part), total_lse(found, part)), carry

    blank = Partial(jnp.zeros(q.shape), jnp.full(q.shape[:3], -jnp.inf))
    return jax.lax.fori_loop(first, last, step, (blank, carry))
