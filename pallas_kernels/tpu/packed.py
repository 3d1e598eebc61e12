"""Decode attention on packed keys and values as a Pallas TPU kernel (same contract as `reference.packed_attention`).

The grid is (row, split, tile): a tile of tokens of all KV heads is fetched at once and worked off by lane groups, the
smallest whole number of heads that fills the 128 lanes; the queries of the heads that share one are laid block-
diagonally, so the kernel sees one head of `lanes` channels. Per tile, with codes c and e, scale s and minimum m of a
key group g, r and n of a value:

    scores_t = (q * s_g) . c_t + q . m_g            scaled queries of the groups a product of tokens meets are stacked
    out      = sum_t (p_t r_t) e_t + sum_t p_t n_t  likewise for the channel groups of a head

Where groups are of fewer than 128 tokens, key scales multiply the codes instead (`keys`).

`rope` says how keys before RoPE are scored, `signposts` how KVQuant's codes become numbers, `outliers` what
its outliers add.

The products run in bfloat16 with float32 sums. Tiles outside a row's bounds are neither fetched nor computed.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec, check
from kvqjax.pallas_kernels.tpu import keys as tpu_keys
from kvqjax.pallas_kernels.tpu import outliers as tpu_outliers
from kvqjax.pallas_kernels.tpu import rope as tpu_rope
from kvqjax.pallas_kernels.tpu.kernel import kernel
from kvqjax.pallas_kernels.tpu.plan import LANES, Plan, make_plan
from kvqjax.pallas_kernels.tpu.rows import (
    body_specs,
    collect,
    compiler_params,
    fetched,
    lane_queries,
    row_bounds,
    tile_ends,
)
from kvqjax.pallas_kernels.tpu.signposts import pair_table
from kvqjax.pallas_kernels.tpu.work import Work

__all__ = ["packed_attention"]


class Inputs(NamedTuple):
    """What a call takes besides the body, in the order of `tpu_tile.Refs`, which has the shapes."""

    queries: Any
    bounds: Any
    order: Any
    onehot: Any
    table: Any = None
    patterns: Any = None
    turns: Any = None
    key_signposts: Any = None
    value_signposts: Any = None
    ends: Any = None
    rates: Any = None


def packed_attention(
    q: Float[Array, "B T H D"],
    body: PackedBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: PackedSpec,
    *,
    ways: int | None = None,
    work: Work | None = None,
    splits: int = 1,
    interpret: object = False,
) -> Partial:
    """As `reference.packed_attention`, with the queries rounded to bfloat16. Tiles of `work` are a multiple of the
    plan's block and of eight key groups; `splits` programs share a row's tokens where the batch alone does not fill the
    chip."""
    check(q, body, spec)
    if (spec.datatype == "nuq") != (spec.key_group == 0) or (spec.datatype == "nuq" and spec.rope is None):
        raise ValueError(f"{spec}: this kernel takes signposts with keys before RoPE that share their scales only")
    if spec.scales != "bfloat16":
        raise ValueError(f"scales={spec.scales!r}; the TPU kernel takes bfloat16 scales")
    plan = make_plan(q, body, spec, ways, work, splits)
    if (spec.key_slots or spec.value_slots) and plan.lanes != LANES:
        raise ValueError(f"{spec}: this kernel has outliers of heads that fill {LANES} lanes")
    if plan.tile % plan.block:
        raise ValueError(f"tiles of {plan.tile} tokens; want a multiple of {plan.block}")
    ends = tile_ends(start, stop, plan.tile, plan.slots)
    layer, inputs = jnp.asarray(layer, jnp.int32).reshape(1), _inputs(q, start, stop, body, plan)
    body = _stored(body)
    out, lse = _call(plan, q.shape[0], inputs, body, interpret)(layer, ends, inputs, body)
    return collect(out, lse, q.shape, plan)


def _stored(body: PackedBody) -> PackedBody:
    """What the kernel reads of a body as it lies; constants of a layer get an axis for the rows of a register."""
    scale, low = (x[None] if x.ndim == 1 else x for x in (body.key_scale, body.key_low))
    return body._replace(key_scale=scale, key_low=low, positions=None, signposts=None)


def _inputs(q, start, stop, body: PackedBody, plan: Plan) -> Inputs:
    spec = plan.spec
    queries, bounds = lane_queries(q, plan), row_bounds(start, stop, plan, q.shape[2] // spec.kv_heads)
    first = Inputs(queries, bounds, jnp.asarray(plan.order[None], jnp.int32), jnp.asarray(plan.onehot, jnp.bfloat16))
    if spec.rope is not None and body.positions is not None:
        first = first._replace(table=tpu_rope.table(plan), turns=tpu_rope.turns(body.positions, plan) * plan.spread)
    if plan.multiplied and not plan.wide:
        first = first._replace(patterns=tpu_keys.patterns(plan))
    if body.signposts is not None:
        pairs = zip(body.signposts, (spec.key_bits, spec.value_bits), strict=True)
        key, value = (pair_table(x, bits) if plan.paired else x[None] for x, bits in pairs)
        first = first._replace(key_signposts=key, value_signposts=value)
    if body.signposts is not None and (spec.key_slots or spec.value_slots):
        ends = jnp.stack([x.astype(jnp.bfloat16).astype(jnp.float32)[jnp.array([0, -1])] for x in body.signposts])
        first = first._replace(ends=ends, rates=jnp.asarray(tpu_outliers.rates(plan)))
    return first


def _specs(plan: Plan, inputs: Inputs, body: PackedBody, tile):
    """Block specs of the inputs and of the body, `tile(b, s, j, ends)` being the number of the tile that is fetched."""
    given = jax.tree.map(lambda array: pl.BlockSpec(array.shape, lambda *_: (0, 0)), inputs)
    given = given._replace(
        queries=pl.BlockSpec((1, *inputs.queries.shape[1:]), lambda b, *_: (b, 0, 0, 0)),
        bounds=pl.BlockSpec((1, plan.rows, 2), lambda b, *_: (b, 0, 0)),
    )
    if inputs.turns is not None:
        turns = pl.BlockSpec((1, *inputs.turns.shape[1:]), lambda b, s, j, layer, ends: (tile(b, s, j, ends), 0, 0))
        given = given._replace(turns=turns)
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    if plan.spec.datatype == "nuq" and not plan.paired:
        given = given._replace(key_signposts=scalars, value_signposts=scalars)
    if inputs.ends is not None:
        given = given._replace(ends=scalars)
    return given, body_specs(plan, body, tile)


def _scratch(plan: Plan) -> dict:
    """Working memory by its name in `tpu_tile.Refs`."""
    spec, shape = plan.spec, (plan.lane_groups, plan.rows)
    scales, factors = (plan.tile * plan.value_rows // LANES, LANES), (spec.width * plan.key_rows // LANES, LANES)
    sizes = dict.fromkeys(("peak", "total"), (*shape, 1)) | dict.fromkeys(("limits", "scores"), (plan.rows, plan.tile))
    sizes |= dict.fromkeys(("scales", "lows"), scales) | dict.fromkeys(("factors", "zeros"), factors)
    memory = {name: pltpu.VMEM(size, jnp.float32) for name, size in sizes.items()} | tpu_outliers.scratch(plan)
    if plan.multiplied and not plan.wide:
        slabs = pltpu.VMEM((tpu_keys.patterns(plan).shape[0], spec.width), jnp.bfloat16)
        memory |= {"slab_scales": slabs, "slab_zeros": slabs}
    if spec.key_factors:
        memory["token_factors"] = pltpu.VMEM((plan.tile * spec.key_factors // LANES, LANES), jnp.float32)
    if spec.value_factors:
        memory["channel_factors"] = pltpu.VMEM(factors, jnp.float32)
    return memory


def _call(plan: Plan, batch: int, inputs: Inputs, body: PackedBody, interpret):
    """The pallas_call of a plan, taking (layer, ends, inputs, body)."""
    per_split = -(-plan.tiles // plan.splits)

    def tile(b, s, j, ends):
        return fetched(b, s * per_split + j, ends)

    shape, form = (plan.lane_groups, plan.rows), "" if plan.spec.rope is None else f"{plan.spec.datatype}_pre_"
    return pl.pallas_call(
        functools.partial(kernel, plan=plan, per_split=per_split),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, plan.splits, per_split),
            in_specs=_specs(plan, inputs, body, tile),
            out_specs=[
                pl.BlockSpec((1, 1, *shape, plan.lanes), lambda b, s, *_: (b, s, 0, 0, 0)),
                pl.BlockSpec((1, 1, *shape, 1), lambda b, s, *_: (b, s, 0, 0, 0)),
            ],
            scratch_shapes=[_scratch(plan)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, plan.splits, *shape, plan.lanes), jnp.float32),
            jax.ShapeDtypeStruct((batch, plan.splits, *shape, 1), jnp.float32),
        ],
        compiler_params=compiler_params(2),
        name=f"packed_attention_{form}k{plan.spec.key_bits}v{plan.spec.value_bits}_{plan.tile}",
        interpret=interpret,
    )
