"""Queries and bounds as rows of the TPU decode-attention kernels, the tiles of a body, and results back as heads."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.pallas_kernels.tpu.plan import Plan
from kvqjax.pallas_kernels.tpu.rope import swapped
from kvqjax.pallas_kernels.tpu.tile import NEVER

__all__ = ["collect", "lane_queries", "row_bounds", "tile_ends"]


def lane_queries(q, plan: Plan) -> Float[Array, "B P M W"]:
    """Queries of the heads of every lane group, each in its own head's lanes and zero elsewhere; for keys before RoPE
    q~ beside q, 2W lanes."""
    batch, length, heads, dim = q.shape
    group, shared = heads // plan.spec.kv_heads, plan.shared
    q = q.astype(jnp.bfloat16).reshape(batch, length, plan.lane_groups, shared, group, dim)
    q = q.transpose(0, 2, 3, 1, 4, 5).reshape(batch, plan.lane_groups, shared, length * group, dim)
    own = jnp.eye(shared, dtype=q.dtype)[None, None, :, None, :, None]
    parts = [q] if plan.spec.rope is None else [q, swapped(q)]
    rows = [(x[..., None, :] * own).reshape(batch, plan.lane_groups, shared * length * group, -1) for x in parts]
    return jnp.pad(jnp.concatenate(rows, -1), ((0, 0), (0, 0), (0, plan.rows - rows[0].shape[2]), (0, 0)))


def row_bounds(start, stop, plan, group: int) -> Int[Array, "B M 2"]:
    """First and last visible token of every query row; nothing for the rows of padding.
    `plan.shared` KV heads of `group` query heads each are together."""
    both = jnp.stack([start, stop], -1).astype(jnp.int32)
    rows = jnp.tile(jnp.repeat(both, group, axis=1), (1, plan.shared, 1))
    return jnp.pad(rows, ((0, 0), (0, plan.rows - rows.shape[1]), (0, 0)))


def tile_ends(start, stop, tile: int, slots: int) -> Int[Array, "3 B"]:
    """First tile of every row of `slots` tokens, the one after its last, and the last that is fetched: the first if it
    sees none. All within the row, also where a row starts to see beyond it."""
    tiles = -(-slots // tile)
    first, end = jnp.minimum(start.min(1) // tile, tiles - 1), jnp.minimum(-(-stop.max(1) // tile), tiles)
    return jnp.stack([first, end, jnp.maximum(end - 1, first)]).astype(jnp.int32)


def collect(out, lse, shape: tuple[int, ...], plan: Plan) -> Partial:
    """Merge the splits, take every head's own lanes, and bring rows back to [B, T, H]."""
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
