"""Reader `tiles`: many queries meet large tiles of decoded tokens. On GPUs a tile is a plain product; on TPUs it is a
call of JAX's splash attention, or all of the body is, where memory allows.

What kind a program uses is planned with the run (`RunLayout.tiles`): "off", "tiles" on GPUs, "splash" on TPUs whose
layout lets it run, "interpret" for splash in Pallas' interpreter."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvqjax.cache.readers.blocks import body_blocks
from kvqjax.cache.readers.reader import BodyCall, Carry
from kvqjax.cache.view import sees_all
from kvqjax.ops.attention import Partial, blockwise_attention, merged, segment_attention
from kvqjax.ops.large_tiles import tile_attention
from kvqjax.pallas_kernels import splash

__all__ = ["SPLASH_KINDS", "attend_in_tiles", "attend_segment", "by_splash", "large_block"]

SPLASH_KINDS = ("splash", "interpret")
SCORES = 2**31  # bytes; of one tile's softmax weights on a GPU
DECODED = 2**13  # tokens of all rows; of one tile on a TPU
SLACK = 1.25  # how much more a tile may have, rather than one tile more
WHOLE = 2**28  # bytes; of a layer's keys and values that a TPU may hold decoded, all at once


def attend_in_tiles(call: BodyCall, carry: Carry) -> tuple[Partial, Carry]:
    """Attend to the body tile by tile, or all at once where a TPU has the memory."""
    run, kind, q, softcap = call.view.run, call.view.run.tiles, call.q, call.ask.softcap
    by_row = sees_all(call.view, call.tokens)
    disjoint = bool(run.wiring.chain.carry) or kind in SPLASH_KINDS
    size = large_block(q, run.reading, run.slots_here, kind, disjoint)
    read, first, last = body_blocks(call.view, call.tokens, size, call.shared)
    width = None if call.shared is None else call.shared.width
    # A large product cannot take what lies between a score and its exponential: neither a cap nor a query's own mask.
    if width is not None or (kind == "tiles" and (softcap is not None or not by_row)):
        return blockwise_attention(q, call.kv_heads, read, first, last, carry, width, softcap=softcap)
    if kind == "tiles":
        return tile_attention(q, call.kv_heads, read, first, last, carry)
    decoded = 2 * q.dtype.itemsize * q.shape[0] * call.kv_heads * run.slots_here * q.shape[3]
    if by_row and decoded <= WHOLE and splash.fits(q.shape[1], run.slots_here, q.shape[3]):
        return _attend_whole_body(call, read, first, last, carry)

    def step(j, loop):
        partial, carry = loop
        k, v, mask, carry = read(j, carry)
        part = attend_segment(q, k, v, mask, kind, softcap)
        return merged(partial, part), carry

    blank = Partial(jnp.zeros(q.shape), jnp.full(q.shape[:3], -jnp.inf))
    return jax.lax.fori_loop(first, last, step, (blank, carry))


def large_block(q: Float[Array, "B T H D"], reading: int, slots: int, kind: str, disjoint: bool) -> int:
    """Choose how many of a body's `slots` tokens are read at a time: at least `reading`, and as many as memory allows,
    so that each is decoded once and few programs run. The last tile may begin within the one before it, unless tiles
    must be `disjoint`."""
    batch, length, heads, _ = q.shape
    most = SCORES / (q.dtype.itemsize * batch * heads * length) if kind == "tiles" else DECODED / batch
    blocks = slots // reading
    if disjoint:
        limit = max(1, min(round(most / reading), blocks))
        return reading * max(n for n in range(1, limit + 1) if blocks % n == 0)
    count = math.ceil(blocks * reading / (SLACK * most))  # of even tiles
    return reading * -(-blocks // min(blocks, count))


def by_splash(kind: str, kernel: Callable, plain: Callable, *arrays):
    """Call `kernel(*arrays, interpret)` in a program for a TPU, or where the interpreter is asked for, else
    `plain(*arrays)`: a program that was traced for a TPU may be lowered for something else."""
    if kind == "interpret":
        return kernel(*arrays, True)
    return jax.lax.platform_dependent(*arrays, tpu=lambda *x: kernel(*x, False), default=plain)


def _row_by_row(
    q, k, v, newest: Int[Array, "B T"], oldest: Int[Array, "B T"] | None, interpret: bool, softcap: float | None
) -> Partial:
    """Attend row by row, to keys and values [B, K, S, D]: splash attention has one mask for all heads, so a row's heads
    are one call."""
    rows = []
    for row in range(q.shape[0]):
        limits = {"newest": newest[row], "oldest": None if oldest is None else oldest[row]}
        rows.append(
            splash.splash_attention(q[row][None], k[row], v[row], **limits, interpret=interpret, softcap=softcap)
        )
    return Partial(*(jnp.concatenate(parts) for parts in zip(*rows, strict=True)))


def attend_segment(q, k, v, mask: Bool[Array, "B T S"], kind: str, softcap: float | None = None) -> Partial:
    """Attend as `segment_attention` does where every query sees consecutive keys, by splash where there is a kernel."""
    keys = k.shape[1]
    if kind not in SPLASH_KINDS or not splash.fits(q.shape[1], keys, q.shape[3]):
        return segment_attention(q, k, v, mask, softcap)
    place = jnp.arange(keys)[None, None]
    newest, oldest = jnp.where(mask, place, -1).max(2), jnp.where(mask, place, keys).min(2)

    def kernel(q, k, v, newest, oldest, interpret):
        k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
        return _row_by_row(q, k, v, newest, oldest, interpret, softcap)

    def plain(q, k, v, newest, oldest):
        mask = (place <= newest[:, :, None]) & (place >= oldest[:, :, None])
        return segment_attention(q, k, v, mask, softcap)

    return by_splash(kind, kernel, plain, q, k, v, newest, oldest)


def _attend_whole_body(call: BodyCall, read: Callable, first, last, carry: Carry) -> tuple[Partial, Carry]:
    """Attend to a body by one call of the kernel. Blocks are decoded one after the other into keys and values of all
    slots, [B, K, S, D]. All queries of a row see the same of it, its first tokens."""
    q, slots, softcap = call.q, call.view.run.slots_here, call.ask.softcap
    rows, length, _, dim = q.shape

    def step(j, loop):
        (body_k, body_v, filled), carry = loop
        k, v, mask, carry = read(j, carry)
        row_mask = mask[:, 0]
        # Tokens that are not valid may hold infinities, and 0 x inf is NaN.
        by_head = (jnp.swapaxes(jnp.where(row_mask[:, :, None, None], x, 0), 1, 2) for x in (k, v))
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=j * k.shape[1], axis=2)
        body_k, body_v = (put(x, part) for x, part in zip((body_k, body_v), by_head, strict=True))
        return (body_k, body_v, filled + row_mask.sum(-1, dtype=jnp.int32)), carry

    blank = jnp.zeros((rows, call.kv_heads, slots, dim), q.dtype)
    start = (blank, blank, jnp.zeros(rows, jnp.int32)), carry
    (k, v, filled), carry = jax.lax.fori_loop(first, last, step, start)
    newest = jnp.broadcast_to(filled[:, None] - 1, (rows, length))

    def kernel(q, k, v, newest, interpret):
        return _row_by_row(q, k, v, newest, None, interpret, softcap)

    def plain(q, k, v, newest):
        mask = jnp.arange(slots)[None, None] <= newest[:, :, None]
        return segment_attention(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), mask, softcap)

    return by_splash(call.view.run.tiles, kernel, plain, q, k, v, newest), carry
