"""Lay queries out as rows of the TPU kernels, find the tiles that a row sees, and bring results
back to heads."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.pallas_kernels.tpu.rope import swapped
from kvqjax.pallas_kernels.tpu.tile import NEVER


def lane_queries(q, plan) -> Float[Array, "B P M W"]:
    """Lay out queries [B, T, H, D] as rows of every lane group: each head's in its own lanes, zero
    elsewhere.

    P lane groups of W lanes, M query rows. For keys before RoPE the half-swapped queries q~ follow
    beside q: then there are 2W lanes."""
    batch, length, heads, dim = q.shape
    group, shared = heads // plan.spec.kv_heads, plan.shared
    # Query heads are numbered by lane group, KV head in it, query head of that: [B, T, P, shared,
    # G, D].
    q = q.astype(jnp.bfloat16).reshape(batch, length, plan.lane_groups, shared, group, dim)
    q = q.transpose(0, 2, 3, 1, 4, 5).reshape(batch, plan.lane_groups, shared, length * group, dim)
    # A row is put in all heads' lanes, and kept in its own head's lanes only: [B, P, shared, T*G,
    # shared, D].
    head_mask = jnp.eye(shared, dtype=q.dtype)[None, None, :, None, :, None]
    parts = [q] if plan.spec.rope is None else [q, swapped(q)]
    used = shared * length * group
    rows = [(x[..., None, :] * head_mask).reshape(batch, plan.lane_groups, used, -1) for x in parts]
    return jnp.pad(jnp.concatenate(rows, -1), ((0, 0), (0, 0), (0, plan.rows - used), (0, 0)))


def row_bounds(start, stop, plan, group: int) -> Int[Array, "B M 2"]:
    """Return the first visible token of every query row, and one past the last.

    A group of M rows has the queries of `plan.shared` KV heads with `group` query heads each. Rows
    of padding see no token: both numbers are 0."""
    bounds = jnp.stack([start, stop], -1).astype(jnp.int32)  # [B, T, 2]
    # A KV head has G rows for every token in turn, and all KV heads of the group see the same.
    rows = jnp.tile(jnp.repeat(bounds, group, axis=1), (1, plan.shared, 1))
    return jnp.pad(rows, ((0, 0), (0, plan.rows - rows.shape[1]), (0, 0)))


def tile_ends(
    start, stop, tile: int, slots: int, pages: Int[Array, "B N"] | None = None
) -> Int[Array, "B _"]:
    """Say which tiles each row of the batch sees.

    Args:
        start: First token that each query sees, [B, T].
        stop: One past the last token that each query sees, [B, T].
        pages: The pages of each row, where its body lies in pages; -1: none.

    Returns:
        For every row: first visible tile, one past the last, the last tile to fetch, then the
        numbers of its pages. All tiles and pages lie within the arrays, even for rows that see
        nothing. The axis of a row's numbers is last, because scalar memory pads the last axis to
        128 numbers."""
    tiles = -(-slots // tile)
    first = jnp.minimum(start.min(1) // tile, tiles - 1)
    end = jnp.minimum(-(-stop.max(1) // tile), tiles)
    ends = jnp.stack([first, end, jnp.maximum(end - 1, first)], axis=1)
    if pages is not None:
        # No query sees a token of a page that is not there (-1). A tile of it may be fetched all
        # the same.
        ends = jnp.concatenate([ends, jnp.maximum(pages, 0)], axis=1)
    return ends.astype(jnp.int32)


def collect(out, lse, shape: tuple[int, ...], plan) -> Partial:
    """Merge the splits of a row, take every head's own lanes, and bring rows back to tokens and
    heads.

    Args:
        out: Normalised outputs of every split, [B, splits, P, M, W].
        lse: Their log-sum-exps, [B, splits, P, M, 1]; NEVER where a row saw no token.
        shape: That of the queries, [B, T, H, D].

    Returns:
        Attention [B, T, H, D] and its log-sum-exp [B, T, H]."""
    batch, length, heads, dim = shape
    group, shared = heads // plan.spec.kv_heads, plan.shared

    # Splits are merged: each counts as much as its share of the softmax weights.
    peak = lse.max(1, keepdims=True)
    weights = jnp.exp(lse - peak)
    total = weights.sum(1)
    lse = jnp.where(peak[:, 0] > NEVER / 2, jnp.log(total) + peak[:, 0], -jnp.inf)[..., 0]
    out = (out * (weights / total[:, None])).sum(1)  # [B, P, M, W]

    # Rows are brought back to tokens and heads, without padding.
    used = shared * length * group
    out = out[:, :, :used].reshape(batch, plan.lane_groups, shared, length, group, shared, dim)
    # A head's rows in its own lanes: [B, P, T, G, D, shared]
    out = jnp.diagonal(out, axis1=2, axis2=5)
    # Heads are numbered by lane group, KV head in it, query head of that: [B, T, P, shared, G, D].
    out = out.transpose(0, 2, 1, 5, 3, 4).reshape(shape)
    # [B, P, shared, T, G]
    lse = lse[:, :, :used].reshape(batch, plan.lane_groups, shared, length, group)
    lse = lse.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads)
    return Partial(out, lse)


def by_head(x: Float[Array, "B R N"], kv_heads: int, length: int) -> Float[Array, "B T H N"]:
    """Bring rows, R = K*T*G in the order (KV head, token, query head of it), back to tokens and
    heads."""
    x = x.reshape(x.shape[0], kv_heads, length, -1, x.shape[-1])  # [B, K, T, G, N]
    return x.transpose(0, 2, 1, 3, 4).reshape(x.shape[0], length, -1, x.shape[-1])
