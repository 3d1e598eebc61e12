"""Decode attention on packed keys and values as a Pallas TPU kernel (same contract as `reference.packed_attention`).

The grid is (row, split, tile): a tile of tokens of all KV heads is fetched at once and worked off by lane groups, the
smallest whole number of heads that fills the 128 lanes; the queries of the heads that share one are laid block-
diagonally, so the kernel sees one head of `lanes` channels. Per tile, with codes c and e, scale s and minimum m of a
key group g, r and n of a value:

    scores_t = (q * s_g) . c_t + q . m_g            scaled queries of the groups a product of tokens meets are stacked
    out      = sum_t (p_t r_t) e_t + sum_t p_t n_t  likewise for the channel groups of a head

The products run in bfloat16 with float32 sums. Tiles outside a row's bounds are neither fetched nor computed.
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
from kvqjax.layout import split_bits
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec, check
from kvqjax.pallas_kernels.tpu_kernel import kernel
from kvqjax.pallas_kernels.tpu_tile import LANES, NEVER
from kvqjax.pallas_kernels.tpu_unpack import fitting_ways, token_order

__all__ = ["Plan", "default_tile", "lane_groups", "packed_attention"]

VMEM_BYTES = 64 * 2**20  # of a v7x core and of a v5p


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static choices of one call: query rows of a lane group (padded to 8), tokens per tile, fields per word (see
    tpu_unpack), lanes that are handled together, parallel splits of the token axis."""

    spec: PackedSpec
    slots: int
    rows: int
    rows_per_head: int
    tile: int
    ways: int
    lanes: int
    splits: int

    @property
    def lane_groups(self) -> int:
        return lane_groups(self.spec)

    @property
    def shared(self) -> int:
        """Heads of a lane group."""
        return self.lanes // self.spec.head_dim

    @property
    def base(self) -> int:
        """Bits to which narrower plane sets are spread, so that keys and values come in one order."""
        return max(split_bits(self.spec.key_bits)[0], split_bits(self.spec.value_bits)[0])

    @property
    def block(self) -> int:
        """Tokens after which codes and key groups start afresh."""
        narrowest = min(split_bits(self.spec.key_bits)[-1], split_bits(self.spec.value_bits)[-1])
        return math.lcm(1024 // narrowest, self.spec.key_group, self.column)

    @property
    def column(self) -> int:
        """Tokens of one product: what a matrix unit takes at once."""
        return max(32 * self.ways, 256 if self.spec.target in ("v6e", "v7x") else LANES)

    @property
    def mixed(self) -> bool:
        """Whether the matrix unit takes narrow codes beside bfloat16 queries as fast as bfloat16 ones."""
        return self.spec.target == "v7x" and self.ways > 2

    @property
    def tiles(self) -> int:
        return -(-self.slots // self.tile)

    @property
    def order(self) -> np.ndarray:
        """Token at each position of a block."""
        return token_order(self.base, self.ways, self.block)

    @property
    def period(self) -> int:
        """Tokens after which the order repeats itself."""
        return math.lcm(1024 // self.base, self.column)

    @property
    def key_rows(self) -> int:
        """Key groups of a tile."""
        return self.tile // self.spec.key_group

    @property
    def value_rows(self) -> int:
        """Value scales of a token."""
        return self.spec.width // self.spec.value_group

    @property
    def value_slices(self) -> int:
        """Slices of a head's channels with a value scale of their own."""
        return self.spec.head_dim // self.spec.value_slice


def _ways(spec: PackedSpec) -> int:
    """The cheapest unpacking by the schedules of benchmarks/records: v6e and v7x convert narrow integers fast, v5e and
    v5p or codes into a mantissa faster."""
    most = min(fitting_ways(spec.key_bits), fitting_ways(spec.value_bits))
    return 2 if spec.target in ("v5e", "v5p") and most == 8 else most


def lane_groups(spec: PackedSpec) -> int:
    """Groups of lanes that are handled one after the other: as few whole heads as fill 128 lanes. The matrix units of
    v6e and v7x could take 256 at once, but the registers can't: it spills."""
    lanes = math.lcm(spec.head_dim, LANES)
    return spec.width // lanes if spec.width % lanes == 0 else 1


def _rows(spec: PackedSpec, per_head: int) -> int:
    """Query rows of a lane group, a multiple of 8, with `per_head` = T*G rows of a KV head."""
    return -(-spec.width // lane_groups(spec) // spec.head_dim * per_head // 8) * 8


def default_tile(spec: PackedSpec, per_head: int) -> int:
    """Tokens per tile: 2048 where that needs no spills by benchmarks/records, else 1024. Half of a small chip's vector
    memory holds the words of two tiles."""
    one_register = _rows(spec, per_head) * spec.width // lane_groups(spec) <= 8 * LANES  # the queries of a lane group
    simple = spec.key_bits == spec.value_bits and spec.key_bits in (2, 4, 8) and spec.key_group >= LANES
    tile = 2048 if one_register and simple else 1024
    while 2 * tile * spec.width * (spec.key_bits + spec.value_bits) > 8 * VMEM_BYTES // 2:
        tile //= 2
    return tile


def _plan(q, body: PackedBody, spec: PackedSpec, ways: int | None, tile: int | None, splits: int) -> Plan:
    slots, lanes = body.value_scale.shape[-1], spec.width // lane_groups(spec)
    per_head = q.shape[1] * q.shape[2] // spec.kv_heads
    tile = min(tile or default_tile(spec, per_head), slots)
    rows, splits = _rows(spec, per_head), min(splits, -(-slots // tile))
    return Plan(spec, slots, rows, per_head, tile, ways or _ways(spec), lanes, splits)


def packed_attention(
    q: Float[Array, "B T H D"],
    body: PackedBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: PackedSpec,
    *,
    ways: int | None = None,
    tile: int | None = None,
    splits: int = 1,
    interpret: object = False,
) -> Partial:
    """As `reference.packed_attention`, with the queries rounded to bfloat16. `tile` is a multiple of the plan's block
    and of eight key groups; `splits` programs share a row's tokens where the batch alone does not fill the chip."""
    check(q, body, spec)
    if not spec.plain:
        raise ValueError(f"{spec}: this kernel has uniform codes of keys after RoPE")
    if spec.scales != "bfloat16":
        raise ValueError(f"scales={spec.scales!r}; the TPU kernel takes bfloat16 scales")
    plan = _plan(q, body, spec, ways, tile, splits)
    if plan.tile % plan.block:
        raise ValueError(f"tiles of {plan.tile} tokens; want a multiple of {plan.block}")
    rows, bounds = _lane_queries(q, plan), _row_bounds(start, stop, plan, q.shape[2] // spec.kv_heads)
    ends = jnp.stack([start.min(1) // plan.tile, -(-stop.max(1) // plan.tile)]).astype(jnp.int32)
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    out, lse = _call(plan, q.shape[0], body, interpret)(layer, ends, rows, bounds, *_constants(plan), *_arrays(body))
    return _collect(out, lse, q.shape, plan)


def _arrays(body: PackedBody):
    return (*body.key_codes, body.key_scale, body.key_low, *body.value_codes, body.value_scale, body.value_low)


def _constants(plan: Plan):
    """Token of every lane of a block [1, block], and the one-hot matrix that brings scales into that order."""
    onehot = np.zeros((plan.period, plan.period), np.float32)
    onehot[plan.order[: plan.period], np.arange(plan.period)] = 1
    return jnp.asarray(plan.order[None], jnp.int32), jnp.asarray(onehot, jnp.bfloat16)


def _lane_queries(q, plan: Plan) -> Float[Array, "B P M W"]:
    """Queries of the heads of every lane group, each in its own head's lanes and zero elsewhere."""
    batch, length, heads, dim = q.shape
    group, shared = heads // plan.spec.kv_heads, plan.shared
    q = q.astype(jnp.bfloat16).reshape(batch, length, plan.lane_groups, shared, group, dim)
    q = q.transpose(0, 2, 3, 1, 4, 5).reshape(batch, plan.lane_groups, shared, length * group, dim)
    own = jnp.eye(shared, dtype=q.dtype)[None, None, :, None, :, None]
    q = (q[..., None, :] * own).reshape(batch, plan.lane_groups, shared * length * group, plan.lanes)
    return jnp.pad(q, ((0, 0), (0, 0), (0, plan.rows - q.shape[2]), (0, 0)))


def _row_bounds(start, stop, plan: Plan, group: int) -> Int[Array, "B M 2"]:
    """First and last visible token of every query row; nothing for the rows of padding."""
    both = jnp.stack([start, stop], -1).astype(jnp.int32)
    rows = jnp.tile(jnp.repeat(both, group, axis=1), (1, plan.shared, 1))
    return jnp.pad(rows, ((0, 0), (0, plan.rows - rows.shape[1]), (0, 0)))


def _collect(out, lse, shape: tuple[int, ...], plan: Plan) -> Partial:
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


def _call(plan: Plan, batch: int, body: PackedBody, interpret):
    """The pallas_call of a plan, taking (layer, ends, queries, bounds, order, one-hot, *arrays)."""
    per_split = -(-plan.tiles // plan.splits)

    def tile(b, s, j, ends):
        return jnp.clip(s * per_split + j, ends[0, b], jnp.maximum(ends[1, b] - 1, ends[0, b]))

    def rows(array):
        block = (1, 1, plan.tile * array.shape[2] // plan.slots, array.shape[3])
        return pl.BlockSpec(block, lambda b, s, j, layer, ends: (layer[0], b, tile(b, s, j, ends), 0))

    def tokens(array):
        block = (1, 1, array.shape[2], plan.tile)
        return pl.BlockSpec(block, lambda b, s, j, layer, ends: (layer[0], b, 0, tile(b, s, j, ends)))

    key = (*body.key_codes, body.key_scale, body.key_low)
    fields = [rows(x) for x in (*key, *body.value_codes)] + [tokens(body.value_scale), tokens(body.value_low)]
    constants = [pl.BlockSpec(x.shape, lambda *_: (0, 0)) for x in _constants(plan)]
    queries = pl.BlockSpec((1, plan.lane_groups, plan.rows, plan.lanes), lambda b, *_: (b, 0, 0, 0))
    bounds = pl.BlockSpec((1, plan.rows, 2), lambda b, *_: (b, 0, 0))
    shape, token_rows = (plan.lane_groups, plan.rows), (plan.rows, plan.tile)
    scales, factors = plan.tile * plan.value_rows // LANES, plan.spec.width * plan.key_rows // LANES
    scratch = [(*shape, 1)] * 2 + [token_rows] + [(scales, LANES)] * 2 + [(factors, LANES)] * 2 + [token_rows]
    return pl.pallas_call(
        functools.partial(kernel, plan=plan, per_split=per_split),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, plan.splits, per_split),
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
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        name=f"packed_attention_k{plan.spec.key_bits}v{plan.spec.value_bits}_{plan.tile}",
        interpret=interpret,
    )
