"""Attention of many queries to keys that all of a part of them see or none: large products on a GPU, without a kernel
of ours.

What a GPU's compiler takes into a product is the exponential of its result, but not what is subtracted before it, nor a
mask. So both are channels of the product: a query's row holds its channels, 1 for its part and 0 for the other parts,
and its peak below zero; a key's holds its channels, for each part 0 or a number that leaves no weight, and 1. Weights
then reach memory in the inputs' dtype, and scores in float32 never do.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvqjax.ops.attention import Partial, Running, finish, grouped
from kvqjax.ops.xla_workarounds import zeros_by

__all__ = ["tile_attention", "tiled_attention"]

COLUMNS = 16  # beside the channels: as many as a matrix unit takes at once; all but one may be parts


class _State(NamedTuple):
    """Peaks so far, the queries' rows with them, and the weighted sums of values, behind them those of the weights."""

    peak: Float[Array, "B K G T"]
    rows: Float[Array, "B K G T E"]
    sums: Float[Array, "B K G T E"]


def _with_columns(x: Float[Array, "*B D"], *columns: Shaped[Array, "*B _"]) -> Float[Array, "*B E"]:
    """`x` with COLUMNS channels more, those that are not given 0."""
    rest = jnp.zeros((*x.shape[:-1], COLUMNS - sum(column.shape[-1] for column in columns)), x.dtype)
    return jnp.concatenate([x, *(column.astype(x.dtype) for column in columns), rest], -1)


def _rows(q: Float[Array, "B K G T D"], peak: Float[Array, "B K G T"], parts: int) -> Float[Array, "B K G T E"]:
    """The queries' rows; a peak of -inf, which no key has raised yet, counts as 0."""
    below = jnp.where(jnp.isneginf(peak), 0, -peak)[..., None]
    part = jnp.arange(q.shape[3]) // (q.shape[3] // parts)
    return _with_columns(q, jnp.broadcast_to(jax.nn.one_hot(part, parts), (*peak.shape, parts)), below)


def _add(
    state: _State,
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    seen: Bool[Array, "B P S"],
) -> _State:
    """Fold one tile in, of which each of P parts of the queries sees what is `seen`. A first product finds how far it
    rises above the peaks, rounded: any number near a peak will do, as long as all of a query's weights are taken from
    the same one."""
    low = float(jnp.finfo(q.dtype).min) / 2
    parts = jnp.broadcast_to(jnp.swapaxes(seen, 1, 2)[:, :, None], (*k.shape[:3], seen.shape[1]))
    shown = parts.any(-1, keepdims=True)
    k, v = (jnp.where(shown, x, 0) for x in (k, v))
    k, v = _with_columns(k, jnp.where(parts, 0, low), jnp.ones(shown.shape)), _with_columns(v, shown)
    rise = jnp.einsum("bkgte,bske->bkgts", state.rows, k, preferred_element_type=q.dtype).max(-1)
    old = jnp.where(jnp.isneginf(state.peak), 0, state.peak)
    peak = jnp.maximum(state.peak, jnp.where(rise > low / 2, old + rise, -jnp.inf))
    rows = _rows(q, peak, seen.shape[1])
    weights = jnp.exp(jnp.einsum("bkgte,bske->bkgts", rows, k, preferred_element_type=jnp.float32)).astype(v.dtype)
    sums = jnp.einsum("bkgts,bske->bkgte", weights, v, preferred_element_type=jnp.float32)
    decay = jnp.where(jnp.isneginf(state.peak), 0, jnp.exp((state.peak - peak).astype(jnp.float32)))
    return _State(peak, rows, state.sums * decay[..., None] + sums)


def _finished(peak: Float[Array, "B K G T"], sums: Float[Array, "B K G T E"]) -> Partial:
    dim = sums.shape[-1] - COLUMNS
    return finish(Running(peak.astype(jnp.float32), sums[..., dim], sums[..., :dim]))


def tile_attention(
    q: Float[Array, "B T H D"],
    kv_heads: int,
    read: Callable[[Int[Array, ""], Any], tuple],
    first: Int[Array, ""] | int,
    last: Int[Array, ""] | int,
    carry: Any = None,
) -> tuple[Partial, Any]:
    """`blockwise_attention` where all queries of a row see the same keys of every block. Peaks are of the queries'
    dtype, so scores must stay below 4e4 in bfloat16: one above its rounded peak by more than float32's exponent range
    would be infinite."""
    by_head = grouped(q, kv_heads)

    def step(j, loop):
        state, carry = loop
        k, v, mask, carry = read(j, carry)
        return _add(state, by_head, k, v, mask[:, :1]), carry

    peak = jnp.full(by_head.shape[:-1], -jnp.inf, q.dtype)
    rows = _rows(by_head, peak, 1)
    start = _State(peak, rows, zeros_by(q, rows.shape))
    state, carry = jax.lax.fori_loop(first, last, step, (start, carry))
    return _finished(state.peak, state.sums), carry


def tiled_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    seen: Callable[[Int[Array, ""], Int[Array, " s"]], Bool[Array, "B P s"]],
    tiles: list[tuple[int, int]],
    size: tuple[int, int],
) -> Partial:
    """The same for many chunks of queries: `tiles` are (chunk, tile of keys) in units of `size`. `seen(chunk, keys)`
    says which keys, by their places, all queries of each part of a chunk see. Who sees none merges as nothing; the
    output is of the queries' dtype. The loop is one, and its length static: a GPU runs it without asking the host."""
    queries, keys = size
    chunks = grouped(q, k.shape[2])
    chunks = jnp.moveaxis(chunks.reshape(*chunks.shape[:3], -1, queries, chunks.shape[4]), 3, 0)

    def step(n, whole):
        chunk, tile = jnp.asarray(np.asarray(tiles, np.int32))[n]
        part, peak, sums = (jax.lax.dynamic_index_in_dim(x, chunk, keepdims=False) for x in (chunks, *whole))
        own_k, own_v = (jax.lax.dynamic_slice_in_dim(x, tile * keys, keys, 1) for x in (k, v))
        shown = seen(chunk, tile * keys + jnp.arange(keys))
        state = _add(_State(peak, _rows(part, peak, shown.shape[1]), sums), part, own_k, own_v, shown)
        put = lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, chunk, 0)  # noqa: E731
        return put(whole[0], state.peak), put(whole[1], state.sums)

    peak = jnp.full(chunks.shape[:-1], -jnp.inf, q.dtype)
    start = peak, zeros_by(q, (*peak.shape, q.shape[3] + COLUMNS))
    found = jax.vmap(_finished)(*jax.lax.fori_loop(0, len(tiles), step, start))
    out, lse = (jnp.moveaxis(x, 0, 1).reshape(q.shape[:2] + x.shape[3:]) for x in found)
    return Partial(out.astype(q.dtype), lse)
