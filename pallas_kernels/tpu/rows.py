"""Queries and bounds as rows of the TPU decode-attention kernels, the tiles of a body, and results back as heads."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.pallas_kernels.higgs import HiggsStored
from kvqjax.pallas_kernels.packed import PackedBody
from kvqjax.pallas_kernels.tpu.plan import VMEM_BYTES, Plan
from kvqjax.pallas_kernels.tpu.rope import swapped
from kvqjax.pallas_kernels.tpu.tile import NEVER

__all__ = ["body_specs", "collect", "compiler_params", "fetched", "lane_queries", "row_bounds", "tile_ends"]

Body = TypeVar("Body", PackedBody, HiggsStored)


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


def fetched(row, number, ends):
    """The tile that is fetched where number `number` is due: one that its row sees, so that none is fetched in vain."""
    return jnp.clip(number, ends[0, row], ends[2, row])


def compiler_params(independent: int) -> pltpu.CompilerParams:
    """Parameters of a kernel with a grid of so many independent axes and one of tiles in order. Copies go without
    bounds checks, scalar work for every input of every step: what `fetched` names lies within the arrays by
    `tile_ends`."""
    semantics = [*[pltpu.PARALLEL] * independent, pltpu.ARBITRARY]
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True)


BY_TOKEN = ("value_scale", "value_low", "key_outliers", "value_outliers", "key_factor")


def body_specs(plan, body: Body, tile, by_token: tuple[str, ...] = BY_TOKEN) -> Body:
    """Block specs of a body on a grid whose first axis is the row: `tile(*step, ends)` is the number of the tile that
    is fetched at grid index `step`. Fields `by_token` have tokens on the lanes. Constants of a layer, [1, W], are
    fetched whole."""

    def place(at):
        *step, layer, ends = at
        return layer[0], step[0], tile(*step, ends)

    def rows(array):
        if array.ndim == 2:
            return pl.BlockSpec(array.shape, lambda *_: (0, 0))
        block = (1, 1, plan.tile * array.shape[2] // plan.slots, array.shape[3])
        return pl.BlockSpec(block, lambda *at: (*place(at), 0))

    def tokens(array):
        def index(*at):
            layer, row, number = place(at)
            return layer, row, 0, number

        return pl.BlockSpec((1, 1, array.shape[2], plan.tile), index)

    stored = {name: jax.tree.map(tokens if name in by_token else rows, x) for name, x in body._asdict().items()}
    return body._replace(**stored)


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
