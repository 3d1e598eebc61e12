"""Decode attention on packed keys and values as a Pallas TPU kernel (same contract as `reference.packed_attention`).

The grid is (row, split, tile, lane group): a tile of tokens is fetched once per lane group, the smallest whole number
of heads that fills the 128 lanes; the queries of the heads that share it are laid block-diagonally, so the kernel sees
one head of `lanes` channels. Per tile, with codes c and e, scale s and minimum m of a key group g, r and n of a value:

    scores_t = (q * s_g) . c_t + q . m_g           scaled queries of the groups a column of 128 tokens meets are stacked
    out      = sum_t (p_t r_t) e_t + sum_t p_t n_t  likewise for the channel groups that share the lanes

The products run in bfloat16 with float32 sums; the offset of the unpacked codes is subtracted with the same rounded
factors, so it cancels. Tiles outside a row's bounds are neither fetched nor computed.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kvqjax.attention import Partial
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec, check
from kvqjax.pallas_kernels.tpu_kernel import COLUMN, NEVER, kernel
from kvqjax.pallas_kernels.tpu_unpack import block_size, token_order

__all__ = ["Plan", "packed_attention"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static choices of one call: tokens per tile, tokens per unpacked block, the unpacking (see tpu_unpack), lanes and
    lane groups, rows of queries per lane group and parallel splits of the token axis."""

    spec: PackedSpec
    slots: int
    rows: int
    tile: int
    ways: int
    splits: int

    @property
    def lanes(self) -> int:
        shared = math.lcm(self.spec.head_dim, 128)
        return shared if self.spec.width % shared == 0 else self.spec.width

    @property
    def lane_groups(self) -> int:
        return self.spec.width // self.lanes

    @property
    def block(self) -> int:
        return max(block_size(self.spec.key_bits), block_size(self.spec.value_bits))

    @property
    def tiles(self) -> int:
        return -(-self.slots // self.tile)

    @property
    def order(self) -> np.ndarray:
        """Token at each position of a block."""
        if self.ways == 1:
            return np.arange(self.block)
        return token_order(self.spec.key_bits, self.ways)

    @property
    def value_rows(self) -> int:
        """Rows of value scales that one lane group may need."""
        return max(1, self.lanes // self.spec.value_group)


def _ways(spec: PackedSpec) -> int:
    """The cheapest unpacking by the schedules of benchmarks/records: v6e and v7x convert narrow integers fast, v5e and
    v5p or codes into a mantissa faster (4 bits on v5e: 135 against 163 bundles for 512 tokens). Only equal widths of
    keys and values may leave the tokens' order."""
    if spec.key_bits != spec.value_bits or spec.key_bits not in (2, 4, 8):
        return 1
    return 2 if spec.target in ("v5e", "v5p") and spec.key_bits < 8 else 32 // spec.key_bits


def _plan(q, body: PackedBody, spec: PackedSpec, ways: int | None, tile: int, splits: int) -> Plan:
    slots = body.value_scale.shape[-1]
    exact = spec.scales == "bfloat16"
    ways = (_ways(spec) if exact else 1) if ways is None else ways
    heads = q.shape[2] // spec.kv_heads
    plan = Plan(spec, slots, 0, min(tile, slots), ways, splits)
    rows = plan.lanes // spec.head_dim * heads * q.shape[1]
    return dataclasses.replace(plan, rows=-(-rows // 8) * 8, splits=min(splits, plan.tiles))


def packed_attention(
    q: Float[Array, "B T H D"],
    body: PackedBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: PackedSpec,
    *,
    ways: int | None = None,
    tile: int = 2048,
    splits: int = 1,
    interpret: object = False,
) -> Partial:
    """As `reference.packed_attention`, with the queries rounded to bfloat16. `tile` is a multiple of the layout's block
    and of eight key groups; `splits` programs share a row's tokens where the batch alone does not fill the chip."""
    check(q, body, spec)
    plan = _plan(q, body, spec, ways, tile, splits)
    rows, bounds = _lane_queries(q, plan), _row_bounds(start, stop, plan, q.shape[2] // spec.kv_heads)
    ends = jnp.stack([start.min(1) // plan.tile, -(-stop.max(1) // plan.tile)]).astype(jnp.int32)
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    out, lse = _call(plan, q.shape[0], body, interpret)(layer, ends, rows, bounds, *_constants(plan), *_arrays(body))
    return _collect(out, lse, q.shape, plan)


def _arrays(body: PackedBody):
    return (*body.key_codes, body.key_scale, body.key_low, *body.value_codes, body.value_scale, body.value_low)


def _constants(plan: Plan):
    """Token of every lane of a block [1, block], and the one-hot matrix that brings scales into that order."""
    order = plan.order
    onehot = np.zeros((plan.block, plan.block) if plan.ways > 1 else (8, COLUMN), np.float32)
    if plan.ways > 1:
        onehot[order, np.arange(plan.block)] = 1
    return jnp.asarray(order[None], jnp.int32), jnp.asarray(onehot, jnp.bfloat16)


def _lane_queries(q, plan: Plan) -> Float[Array, "B P M W"]:
    """Queries of the heads of every lane group, each in its own head's lanes and zero elsewhere."""
    batch, length, heads, dim = q.shape
    group, shared = heads // plan.spec.kv_heads, plan.lanes // dim
    q = q.astype(jnp.bfloat16).reshape(batch, length, plan.lane_groups, shared, group, dim)
    q = q.transpose(0, 2, 3, 1, 4, 5).reshape(batch, plan.lane_groups, shared, length * group, dim)
    own = jnp.eye(shared, dtype=q.dtype)[None, None, :, None, :, None]
    q = (q[..., None, :] * own).reshape(batch, plan.lane_groups, shared * length * group, plan.lanes)
    return jnp.pad(q, ((0, 0), (0, 0), (0, plan.rows - q.shape[2]), (0, 0)))


def _row_bounds(start, stop, plan: Plan, group: int) -> Int[Array, "B M 2"]:
    """First and last visible token of every query row; nothing for the rows of padding."""
    shared = plan.lanes // plan.spec.head_dim
    both = jnp.stack([start, stop], -1).astype(jnp.int32)
    rows = jnp.tile(jnp.repeat(both, group, axis=1), (1, shared, 1))
    return jnp.pad(rows, ((0, 0), (0, plan.rows - rows.shape[1]), (0, 0)))


def _collect(out, lse, shape: tuple[int, ...], plan: Plan) -> Partial:
    """Merge the splits, take every head's own lanes, and bring rows back to [B, T, H]."""
    batch, length, heads, dim = shape
    group, shared = heads // plan.spec.kv_heads, plan.lanes // dim
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


def _call(plan: Plan, batch: int, body: PackedBody, interpret):
    """The pallas_call of a plan, taking (layer, ends, queries, bounds, order, one-hot, *arrays)."""
    per_split = -(-plan.tiles // plan.splits)

    def tile(b, s, j, ends):
        return jnp.clip(s * per_split + j, ends[0, b], jnp.maximum(ends[1, b] - 1, ends[0, b]))

    def rows(array):
        share = plan.slots // array.shape[2]
        return pl.BlockSpec(
            (1, 1, plan.tile // share, plan.lanes),
            lambda b, s, j, p, layer, ends: (layer[0], b, tile(b, s, j, ends), p),
        )

    def tokens(array):
        return pl.BlockSpec(
            (1, 1, array.shape[2], plan.tile), lambda b, s, j, p, layer, ends: (layer[0], b, 0, tile(b, s, j, ends))
        )

    key = (*body.key_codes, body.key_scale, body.key_low)
    fields = [rows(x) for x in (*key, *body.value_codes)] + [tokens(body.value_scale), tokens(body.value_low)]
    constants = [pl.BlockSpec(x.shape, lambda *_: (0, 0)) for x in _constants(plan)]
    queries = pl.BlockSpec((1, plan.lane_groups, plan.rows, plan.lanes), lambda b, *_: (b, 0, 0, 0))
    bounds = pl.BlockSpec((1, plan.rows, 2), lambda b, *_: (b, 0, 0))
    shape = (plan.lane_groups, plan.rows)
    scratch = [(*shape, 1)] * 2 + [(body.value_scale.shape[2], plan.tile)] * 2
    scratch += [(plan.tile // plan.spec.key_group, plan.lanes)] * 2 + [(plan.rows, plan.tile)]
    return pl.pallas_call(
        functools.partial(kernel, plan=plan, per_split=per_split),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, plan.splits, per_split, plan.lane_groups),
            in_specs=[queries, bounds, *constants, *fields],
            out_specs=[
                pl.BlockSpec((1, 1, *shape, plan.lanes), lambda b, s, *_: (b, s, 0, 0, 0)),
                pl.BlockSpec((1, 1, *shape, 1), lambda b, s, *_: (b, s, 0, 0, 0)),
            ],
            scratch_shapes=[pltpu.VMEM(size, jnp.float32) for size in scratch],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, plan.splits, *shape, plan.lanes), jnp.float32),
            jax.ShapeDtypeStruct((batch, plan.splits, *shape, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=64 * 2**20
        ),
        name=f"packed_attention_k{plan.spec.key_bits}v{plan.spec.value_bits}_{plan.tile}",
        interpret=interpret,
    )
