"""Lay queries out as rows of the TPU kernels, find the tiles that a row sees, and bring results back to heads."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.pallas_kernels.tpu.rope import swapped
from kvqjax.pallas_kernels.tpu.tile import NEVER

__all__ = ["by_head", "collect", "collect_groups", "lane_queries", "row_bounds", "row_slots", "tile_ends"]


def lane_queries(q, plan) -> Float[Array, "B P M W"]:
    """Lay out the queries of every lane group: each head's in its own lanes, zero elsewhere. For keys before RoPE q~
    follows beside q, 2W lanes."""
    batch, length, heads, dim = q.shape
    group, shared = heads // plan.spec.kv_heads, plan.shared
    q = q.astype(jnp.bfloat16).reshape(batch, length, plan.lane_groups, shared, group, dim)
    q = q.transpose(0, 2, 3, 1, 4, 5).reshape(batch, plan.lane_groups, shared, length * group, dim)
    head_mask = jnp.eye(shared, dtype=q.dtype)[None, None, :, None, :, None]
    parts = [q] if plan.spec.rope is None else [q, swapped(q)]
    rows = [(x[..., None, :] * head_mask).reshape(batch, plan.lane_groups, shared * length * group, -1) for x in parts]
    return jnp.pad(jnp.concatenate(rows, -1), ((0, 0), (0, 0), (0, plan.rows - rows[0].shape[2]), (0, 0)))


def row_bounds(start, stop, plan, group: int) -> Int[Array, "B M 2"]:
    """Return first and last + 1 visible token of every query row, nothing for padding. `plan.shared` KV heads of
    `group` query heads each are together in a group of M rows."""
    bounds = jnp.stack([start, stop], -1).astype(jnp.int32)
    rows = jnp.tile(jnp.repeat(bounds, group, axis=1), (1, plan.shared, 1))
    return jnp.pad(rows, ((0, 0), (0, plan.rows - rows.shape[1]), (0, 0)))


def row_slots(body, pages: Int[Array, "B N"] | None) -> int:
    """Count the slots of a row: those of the body's arrays, or of all N pages that a row may have."""
    return body.slots if pages is None else body.slots * pages.shape[1]


def tile_ends(start, stop, tile: int, slots: int, pages: Int[Array, "B N"] | None = None) -> Int[Array, "B _"]:
    """Return per row of the batch: first visible tile, one past the last, and the last tile to fetch (never out of
    bounds, even for rows that see nothing). The numbers of the row's pages follow, where its body lies in pages.

    The numbers of a row lie side by side: scalar memory pads the last axis to 128 numbers."""
    tiles = -(-slots // tile)
    first, end = jnp.minimum(start.min(1) // tile, tiles - 1), jnp.minimum(-(-stop.max(1) // tile), tiles)
    ends = jnp.stack([first, end, jnp.maximum(end - 1, first)], axis=1)
    if pages is not None:
        # No query sees a token of a page that is not there (-1). Still a tile may be fetched of it.
        ends = jnp.concatenate([ends, jnp.maximum(pages, 0)], axis=1)
    return ends.astype(jnp.int32)


def collect(out, lse, shape: tuple[int, ...], plan) -> Partial:
    """Merge the splits by their log-sum-exps, take every head's own lanes, and bring rows back to [B, T, H]."""
    batch, length, heads, dim = shape
    group, shared = heads // plan.spec.kv_heads, plan.shared
    peak = lse.max(1, keepdims=True)
    weights = jnp.exp(lse - peak)
    total = weights.sum(1)
    lse = jnp.where(peak[:, 0] > NEVER / 2, jnp.log(total) + peak[:, 0], -jnp.inf)[..., 0]
    out = (out * (weights / total[:, None])).sum(1)
    used = shared * length * group
    out = out[:, :, :used].reshape(batch, plan.lane_groups, shared, length, group, shared, dim)
    out = jnp.diagonal(out, axis1=2, axis2=5)  # [B, P, T, G, D, shared]
    out = out.transpose(0, 2, 1, 5, 3, 4).reshape(shape)
    lse = lse[:, :, :used].reshape(batch, plan.lane_groups, shared, length, group)
    return Partial(out, lse.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads))


def by_head(x: Float[Array, "B R N"], kv_heads: int, length: int) -> Float[Array, "B T H N"]:
    """Bring rows, R = K*T*G in the order (KV head, token, query head of it), back to tokens and heads."""
    x = x.reshape(x.shape[0], kv_heads, length, -1, x.shape[-1])
    return x.transpose(0, 2, 1, 3, 4).reshape(x.shape[0], length, -1, x.shape[-1])


def collect_groups(out, lse, length: int, plan) -> Partial:
    """Bring the results of groups of heads back to [B, T, H], without the rows of padding. A plan's groups have `used`
    of `rows` query rows each."""

    def used(x):
        x = x.reshape(x.shape[0], plan.groups, plan.rows, -1)[:, :, : plan.used]
        return by_head(x.reshape(x.shape[0], -1, x.shape[-1]), plan.spec.kv_heads, length)

    return Partial(used(out), used(jnp.where(lse > NEVER / 2, lse, -jnp.inf))[..., 0])
