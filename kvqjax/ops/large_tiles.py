"""Attention of many queries to keys that all of them see or none: large products on a GPU, without a kernel of ours.

What a GPU's compiler takes into a product is the exponential of its result, but not what is subtracted before it, nor a
mask. So both are channels of the product: a query's row holds its channels, 1 and its peak below zero; a key's holds
its channels, 0 or a number that leaves no weight, and 1. Weights then reach memory in the inputs' dtype, and scores in
float32 never do.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvqjax.ops.attention import Partial, Running, finish, grouped
from kvqjax.ops.xla import zeros_by

__all__ = ["tile_attention"]

COLUMNS = 16  # beside the channels: as many as a matrix unit takes at once


class _State(NamedTuple):
    """Peaks so far, the queries' rows with them, and the weighted sums of values, behind them those of the weights."""

    peak: Float[Array, "B K G T"]
    rows: Float[Array, "B K G T E"]
    sums: Float[Array, "B K G T E"]


def _with_columns(x: Float[Array, "*B D"], *columns: Shaped[Array, "*B 1"]) -> Float[Array, "*B E"]:
    """`x` with COLUMNS channels more, those that are not given 0."""
    rest = jnp.zeros((*x.shape[:-1], COLUMNS - len(columns)), x.dtype)
    return jnp.concatenate([x, *(column.astype(x.dtype) for column in columns), rest], -1)


def _rows(q: Float[Array, "B K G T D"], peak: Float[Array, "B K G T"]) -> Float[Array, "B K G T E"]:
    """The queries' rows; a peak of -inf, which no key has raised yet, counts as 0."""
    below = jnp.where(jnp.isneginf(peak), 0, -peak)[..., None]
    return _with_columns(q, jnp.ones(below.shape), below)


def _add(
    state: _State,
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    seen: Bool[Array, "B S"],
) -> _State:
    """Fold one tile in. A first product finds how far it rises above the peaks, rounded: any number near a peak will
    do, as long as all of a query's weights are taken from the same one."""
    low = float(jnp.finfo(q.dtype).min) / 2
    shown = jnp.broadcast_to(seen[:, :, None, None], (*k.shape[:3], 1))
    k, v = (jnp.where(shown, x, 0) for x in (k, v))
    k, v = _with_columns(k, jnp.where(shown, 0, low), jnp.ones(shown.shape)), _with_columns(v, shown)
    rise = jnp.einsum("bkgte,bske->bkgts", state.rows, k, preferred_element_type=q.dtype).max(-1)
    old = jnp.where(jnp.isneginf(state.peak), 0, state.peak)
    peak = jnp.maximum(state.peak, jnp.where(rise > low / 2, old + rise, -jnp.inf))
    rows = _rows(q, peak)
    weights = jnp.exp(jnp.einsum("bkgte,bske->bkgts", rows, k, preferred_element_type=jnp.float32)).astype(v.dtype)
    sums = jnp.einsum("bkgts,bske->bkgte", weights, v, preferred_element_type=jnp.float32)
    decay = jnp.where(jnp.isneginf(state.peak), 0, jnp.exp((state.peak - peak).astype(jnp.float32)))
    return _State(peak, rows, state.sums * decay[..., None] + sums)


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
        return _add(state, by_head, k, v, mask[:, 0]), carry

    peak = jnp.full(by_head.shape[:-1], -jnp.inf, q.dtype)
    rows = _rows(by_head, peak)
    start = _State(peak, rows, zeros_by(q, rows.shape))
    state, carry = jax.lax.fori_loop(first, last, step, (start, carry))
    dim = q.shape[-1]
    peaks = state.peak.astype(jnp.float32)
    return finish(Running(peaks, state.sums[..., dim], state.sums[..., :dim])), carry
