"""Attention of many queries by large products on a GPU, without a kernel of ours. The queries are
in parts, and a part's queries all see the same keys.

XLA for GPUs fuses the exponential into the product of queries and keys, but neither a mask nor a
subtraction before the exponential. So mask and subtraction become channels of the product. Vectors
have E = D + COLUMNS channels:

                  D channels    P columns, one a part                  1 column             the rest
    query's row   the query     1 for its own part, 0 for the others   its peak, negated    0
    key's row     the key       0 if the part sees the key, else low   1                    0

                  D channels    1 column                               the rest
    value's row   the value     1 if any part sees the key, else 0     0

The product of a query's row and a key's row is score - peak, or for a key that is not seen so low
that its exponential is 0. The exponential is the softmax weight. So weights are written to memory
in the inputs' dtype, and scores in float32 never are. The weighted sum of values' rows has the sum
of the weights in the column behind the values.

A part is some consecutive queries. It sees a key if all its queries see the key. A peak is a
query's running maximum, rounded to the queries' dtype. A tile is the keys that one turn of the loop
reads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvqjax.ops.attention import Partial, Running, finish, grouped
from kvqjax.ops.xla_workarounds import zeros_by

# Channels in addition to those of a head. A GPU's matrix unit takes 16 at once. One is for the
# peak, the others for parts.
COLUMNS = 16


class _State(NamedTuple):
    """The online softmax of the queries.

    Attributes:
        peak: of every query so far, in the queries' dtype; -inf before any key.
        rows: the queries' rows with these peaks.
        sums: weighted sums of values' rows, float32: of the values, and behind them the sum of the
            weights.
    """

    peak: Float[Array, "B K G T"]
    rows: Float[Array, "B K G T E"]
    sums: Float[Array, "B K G T E"]


def _with_columns(x: Float[Array, "*B D"], *columns: Shaped[Array, "*B _"]) -> Float[Array, "*B E"]:
    """Put COLUMNS channels behind those of `x`: the given columns, and 0 in the rest."""
    width = sum(column.shape[-1] for column in columns)
    padding = jnp.zeros((*x.shape[:-1], COLUMNS - width), x.dtype)
    return jnp.concatenate([x, *(column.astype(x.dtype) for column in columns), padding], -1)


def _rows(
    q: Float[Array, "B K G T D"], peak: Float[Array, "B K G T"], parts: int
) -> Float[Array, "B K G T E"]:
    """Make the rows of queries that are in `parts` equal parts."""
    # A peak is -inf until a key raises it. Rows must be finite, so it counts as 0 until then.
    negated = jnp.where(jnp.isneginf(peak), 0, -peak)[..., None]
    part = jnp.arange(q.shape[3]) // (q.shape[3] // parts)
    return _with_columns(
        q, jnp.broadcast_to(jax.nn.one_hot(part, parts), (*peak.shape, parts)), negated
    )


def _add(
    state: _State,
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    seen: Bool[Array, "B P S"],
) -> _State:
    """Fold one tile of keys and values into the online softmax.

    Args:
        q: the queries, scaled by D^-1/2.
        k: the tile's keys.
        v: the tile's values.
        seen: the keys of the tile that each of P parts of the queries sees.

    Returns:
        The online softmax after the tile.
    """
    # Half of the lowest number: a score and a peak are added to it, and the sum must stay finite.
    low = float(jnp.finfo(q.dtype).min) / 2
    # [B, S, K, P]
    by_part = jnp.broadcast_to(jnp.swapaxes(seen, 1, 2)[:, :, None], (*k.shape[:3], seen.shape[1]))
    any_part = by_part.any(-1, keepdims=True)
    # Keys and values that no part sees may be infinite, and 0 x inf is NaN.
    k, v = (jnp.where(any_part, x, 0) for x in (k, v))
    k = _with_columns(k, jnp.where(by_part, 0, low), jnp.ones(any_part.shape))
    v = _with_columns(v, any_part)
    # A first product finds by how much the tile's scores exceed the peaks. It may be rounded: any
    # number near the maximum serves as a peak, as long as all weights of a query are taken relative
    # to the same number.
    rise = jnp.einsum("bkgte,bske->bkgts", state.rows, k, preferred_element_type=q.dtype).max(-1)
    old = jnp.where(jnp.isneginf(state.peak), 0, state.peak)
    # The rise of a query that sees no key of the tile is about `low`. Its peak stays.
    peak = jnp.maximum(state.peak, jnp.where(rise > low / 2, old + rise, -jnp.inf))
    rows = _rows(q, peak, seen.shape[1])
    weights = jnp.exp(
        jnp.einsum("bkgte,bske->bkgts", rows, k, preferred_element_type=jnp.float32)
    ).astype(v.dtype)
    sums = jnp.einsum("bkgts,bske->bkgte", weights, v, preferred_element_type=jnp.float32)
    # A query that has seen nothing has no sums to keep; -inf - -inf would be NaN.
    decay = jnp.where(jnp.isneginf(state.peak), 0, jnp.exp((state.peak - peak).astype(jnp.float32)))
    return _State(peak, rows, state.sums * decay[..., None] + sums)


def _finished(peak: Float[Array, "B K G T"], sums: Float[Array, "B K G T E"]) -> Partial:
    """Divide the sums of values by those of the weights, and give them with their log-sum-exp."""
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
    """Attend to blocks one at a time, as `blockwise_attention` does, where all queries of a row see
    the same keys.

    Peaks are of the queries' dtype, so scores must stay below 4e4 in bfloat16: the exponential of
    one that exceeds its rounded peak by more than float32's exponent range would be infinite.

    Args:
        q: queries, not yet scaled.
        kv_heads: K, the number of KV heads.
        read: `read(j, carry)` gives (k [B, S, K, D], v [B, S, K, D], mask [B, T, S], carry) of
            block j. The masks of a row's T queries are equal.
        first: the first block that is read.
        last: one past the last block.
        carry: what goes from block to block; any pytree.

    Returns:
        Output and log-sum-exp, float32, and the carry after the last block.
    """
    by_head = grouped(q, kv_heads)

    def step(j, loop):
        state, carry = loop
        k, v, mask, carry = read(j, carry)
        return _add(state, by_head, k, v, mask[:, :1]), carry

    peak = jnp.full(by_head.shape[:-1], -jnp.inf, q.dtype)
    rows = _rows(by_head, peak, 1)
    # Constant zeros would be made for all unrolled layers at once.
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
    """Attend from many chunks of queries to the tiles that each of them sees.

    Args:
        q: queries of T tokens, not yet scaled.
        k: keys of S tokens.
        v: values of the same tokens.
        seen: `seen(chunk, places)` marks the keys at `places` (of S) that each of the P parts of a
            chunk sees.
        tiles: the pairs (chunk of queries, tile of keys) that are computed, in this order.
        size: queries of a chunk, and keys of a tile; they divide T and S.

    Returns:
        The output in the queries' dtype, and the log-sum-exp, float32. A query that sees nothing
        merges as nothing.
    """
    queries, keys = size
    chunks = grouped(q, k.shape[2])
    # [B, K, G, T, D] -> [chunks, B, K, G, queries, D]
    chunks = jnp.moveaxis(chunks.reshape(*chunks.shape[:3], -1, queries, chunks.shape[4]), 3, 0)

    # One loop over all pairs, whose length is static: a GPU runs it without asking its host.
    def step(number, loop):
        all_peaks, all_sums = loop
        chunk, tile = jnp.asarray(np.asarray(tiles, np.int32))[number]
        chunk_q, peak, sums = (
            jax.lax.dynamic_index_in_dim(x, chunk, keepdims=False)
            for x in (chunks, all_peaks, all_sums)
        )
        tile_k, tile_v = (jax.lax.dynamic_slice_in_dim(x, tile * keys, keys, 1) for x in (k, v))
        visible = seen(chunk, tile * keys + jnp.arange(keys))
        # Rows are made of queries and peaks anew for every tile, so that they need not be kept.
        rows = _rows(chunk_q, peak, visible.shape[1])
        state = _add(_State(peak, rows, sums), chunk_q, tile_k, tile_v, visible)
        all_peaks = jax.lax.dynamic_update_index_in_dim(all_peaks, state.peak, chunk, 0)
        all_sums = jax.lax.dynamic_update_index_in_dim(all_sums, state.sums, chunk, 0)
        return all_peaks, all_sums

    peak = jnp.full(chunks.shape[:-1], -jnp.inf, q.dtype)
    start = peak, zeros_by(q, (*peak.shape, q.shape[3] + COLUMNS))
    peaks, sums = jax.lax.fori_loop(0, len(tiles), step, start)
    results = jax.vmap(_finished)(peaks, sums)
    # [chunks, B, queries, ..] -> [B, T, ..]
    out, lse = (jnp.moveaxis(x, 0, 1).reshape(q.shape[:2] + x.shape[3:]) for x in results)
    return Partial(out.astype(q.dtype), lse)
