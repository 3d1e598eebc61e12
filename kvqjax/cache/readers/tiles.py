"""Reader `tiles`: many queries meet large tiles of decoded tokens. A tile is the tokens that are
decoded together, the same slots of every row.

`RunLayout.tiles`, here `kind`, says how the queries of a run attend to a tile:

    "tiles"      by plain products, on GPUs
    "splash"     by JAX's splash attention, on TPUs whose layout lets it run
    "interpret"  by splash attention in Pallas' interpreter, for tests
    "off"        this reader does not take the run

On a TPU the whole body is one tile where its decoded keys and values fit `WHOLE`."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvqjax.cache.readers.blocks import body_blocks
from kvqjax.cache.view import BodyCall, Carry, sees_all
from kvqjax.ops.attention import Partial, blockwise_attention, merged, segment_attention
from kvqjax.ops.large_tiles import tile_attention
from kvqjax.pallas_kernels import splash

SPLASH_KINDS = ("splash", "interpret")
SCORES = 2**31  # bytes of one tile's softmax weights on a GPU, at most
DECODED = 2**13  # tokens of one tile on a TPU, those of all rows counted together
# Tiles of even size may exceed these limits by this factor: that is better than one more tile
SLACK = 1.25
WHOLE = 2**28  # bytes of a layer's keys and values that a TPU may hold decoded at once


def attend_in_tiles(call: BodyCall, carry: Carry) -> tuple[Partial, Carry]:
    """Attend to the body tile by tile, or all at once where a TPU has the memory.

    Args:
        carry: The layer below's carry of every body token.

    Returns:
        (attention to the body, this layer's carry)."""
    run, q, softcap = call.view.run, call.q, call.ask.softcap
    kind = run.tiles
    batch, length, _, dim = q.shape
    same_mask = sees_all(call.view, call.tokens)  # for all queries of a row
    # `_attend_whole_body` puts tile j at slot j * size. A carry that tiles without overlap go
    # through needs no select (`put_into_carry`).
    disjoint = bool(run.wiring.chain.carry) or kind in SPLASH_KINDS
    size = large_block(q, run.reading, run.slots_here, kind, disjoint)
    read, first, last = body_blocks(call.view, call.tokens, size, call.shared)
    width = None if call.shared is None else call.shared.width
    # `tile_attention` has no place for what changes a score before its exponential: a cap, or a
    # mask that differs between queries. Neither it nor splash attention takes values that heads
    # share.
    if width is not None or (kind == "tiles" and (softcap is not None or not same_mask)):
        return blockwise_attention(
            q, call.kv_heads, read, first, last, carry, width, softcap=softcap
        )
    if kind == "tiles":
        return tile_attention(q, call.kv_heads, read, first, last, carry)
    # Keys and values.
    decoded_bytes = 2 * q.dtype.itemsize * batch * call.kv_heads * run.slots_here * dim
    if same_mask and decoded_bytes <= WHOLE and splash.fits(length, run.slots_here, dim):
        return _attend_whole_body(call, read, first, last, carry)

    def step(j, loop):
        partial, carry = loop
        k, v, mask, carry = read(j, carry)
        part = attend_segment(q, k, v, mask, kind, softcap)
        return merged(partial, part), carry

    blank = Partial(jnp.zeros(q.shape), jnp.full(q.shape[:3], -jnp.inf))
    return jax.lax.fori_loop(first, last, step, (blank, carry))


def large_block(
    q: Float[Array, "B T H D"], reading: int, slots: int, kind: str, disjoint: bool
) -> int:
    """Choose how many tokens of every row a tile has: as many as memory allows, so that few
    programs run.

    Args:
        reading: What a tile is a multiple of, in tokens; it divides `slots`.
        slots: How many slots the body has.
        kind: How queries attend to a tile (see the module).
        disjoint: Whether tiles must divide the body. Otherwise the last tile may begin within the
            one before it.

    Returns:
        The tokens of a tile, at least `reading`."""
    batch, length, heads, _ = q.shape
    if kind == "tiles":
        most = SCORES / (q.dtype.itemsize * batch * heads * length)
    else:
        most = DECODED / batch
    blocks = slots // reading
    if disjoint:
        limit = max(1, min(round(most / reading), blocks))
        return reading * max(n for n in range(1, limit + 1) if blocks % n == 0)
    tile_count = math.ceil(blocks * reading / (SLACK * most))
    return reading * -(-blocks // min(blocks, tile_count))  # tiles as even as whole blocks allow


def by_splash(kind: str, kernel: Callable, plain: Callable, *arrays):
    """Call splash attention in programs for a TPU, and plain attention in others.

    A program that was traced for a TPU may be lowered for another platform.

    Args:
        kind: "splash", or "interpret" to call the kernel on every platform, in Pallas' interpreter.
        kernel: `kernel(*arrays, interpret)` attends by splash attention.
        plain: `plain(*arrays)` does the same without it.
        arrays: What both are given.

    Returns:
        What the one that was called returned."""
    if kind == "interpret":
        return kernel(*arrays, True)
    return jax.lax.platform_dependent(*arrays, tpu=lambda *x: kernel(*x, False), default=plain)


def _row_by_row(
    q,
    k,
    v,
    newest: Int[Array, "B T"],
    oldest: Int[Array, "B T"] | None,
    interpret: bool,
    softcap: float | None,
) -> Partial:
    """Attend by splash attention, a call for each row: the heads of one call share a mask, and rows
    have their own.

    Args:
        q: The queries, [B, T, H, D].
        k: The keys, [B, K, S, D].
        v: The values, [B, K, S, D].
        newest: The last key that each query sees; -1: none.
        oldest: The first key that each query sees. None: all keys up to the newest.
        interpret: Whether the kernel runs in Pallas' interpreter.

    Returns:
        Attention to these keys."""
    rows = []
    for row in range(q.shape[0]):
        limits = {"newest": newest[row], "oldest": None if oldest is None else oldest[row]}
        options = {"interpret": interpret, "softcap": softcap}
        rows.append(splash.splash_attention(q[row][None], k[row], v[row], **limits, **options))
    return Partial(*(jnp.concatenate(parts) for parts in zip(*rows, strict=True)))


def attend_segment(
    q, k, v, mask: Bool[Array, "B T S"], kind: str, softcap: float | None = None
) -> Partial:
    """Attend as `segment_attention` does, by splash attention where there is a kernel for these
    sizes.

    Args:
        q: The queries, [B, T, H, D].
        k: The keys, [B, S, K, D].
        v: The values, [B, S, K, D].
        mask: Which keys each query sees. They must be consecutive for each query.
        kind: How queries attend to a tile (see the module).

    Returns:
        Attention to these keys."""
    keys = k.shape[1]
    if kind not in SPLASH_KINDS or not splash.fits(q.shape[1], keys, q.shape[3]):
        return segment_attention(q, k, v, mask, softcap)
    place = jnp.arange(keys)[None, None]
    # A query that sees no key gets newest = -1 and oldest = S.
    newest, oldest = jnp.where(mask, place, -1).max(2), jnp.where(mask, place, keys).min(2)

    def kernel(q, k, v, newest, oldest, interpret):
        k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
        return _row_by_row(q, k, v, newest, oldest, interpret, softcap)

    def plain(q, k, v, newest, oldest):
        mask = (place <= newest[:, :, None]) & (place >= oldest[:, :, None])
        return segment_attention(q, k, v, mask, softcap)

    return by_splash(kind, kernel, plain, q, k, v, newest, oldest)


def _attend_whole_body(
    call: BodyCall, read: Callable, first, last, carry: Carry
) -> tuple[Partial, Carry]:
    """Attend to the whole body by one call of splash attention for each row.

    Tiles are decoded one after the other into the keys and values of all slots, [B, K, S, D]. All
    queries of a row see the same tokens: all that the body holds of the row, which are the first.

    Args:
        read: Decodes a tile (`body_blocks`).
        first: The first tile that is read.
        last: One past the last tile.
        carry: The layer below's carry of every body token.

    Returns:
        (attention to the body, this layer's carry)."""
    q, slots, softcap = call.q, call.view.run.slots_here, call.ask.softcap
    rows, length, _, dim = q.shape

    def step(j, loop):
        (body_k, body_v, filled), carry = loop
        k, v, mask, carry = read(j, carry)
        row_mask = mask[:, 0]  # [B, size]; all queries of a row have the same
        # Tokens that are not valid may hold infinities, and 0 x inf is NaN.
        by_head = (jnp.swapaxes(jnp.where(row_mask[:, :, None, None], x, 0), 1, 2) for x in (k, v))
        put = functools.partial(
            jax.lax.dynamic_update_slice_in_dim, start_index=j * k.shape[1], axis=2
        )
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
