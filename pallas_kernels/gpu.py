"""Decode attention on packed keys and values as a Mosaic GPU kernel for Hopper (contract of `reference`)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kvqjax.attention import Partial
from kvqjax.pallas_kernels.gpu_kernel import HALF, NEVER, PART, kernel, scratch
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec, check

__all__ = ["Plan", "packed_attention"]

PROGRAMS = 3 * 132  # what fills an H100 or H200: three programs on each multiprocessor


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static choices of one call: rows of queries of a KV head (padded to 8) and programs that share a row's tokens."""

    spec: PackedSpec
    slots: int
    rows: int
    splits: int

    @property
    def per_word(self) -> int:
        """Tokens of a word: the planes of a block."""
        return 32 // self.spec.key_bits

    @property
    def planes(self) -> int:
        return self.per_word

    @property
    def block(self) -> int:
        return self.planes * HALF

    @property
    def tile(self) -> int:
        return 2 * self.block

    @property
    def parts(self) -> int:
        """Steps in which a tile is worked off."""
        return self.planes // PART

    @property
    def groups(self) -> int:
        """Key groups of a block."""
        return self.block // self.spec.key_group

    def first_token(self, tile):
        """First token that is read for a tile: the last one is moved back into the array."""
        return jnp.minimum(tile * self.tile, self.slots - self.tile)


def packed_attention(
    q: Float[Array, "B T H D"],
    body: PackedBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: PackedSpec,
    *,
    splits: int | None = None,
) -> Partial:
    """As `reference.packed_attention`, with the queries rounded to bfloat16."""
    check(q, body, spec)
    batch, length, heads, dim = q.shape
    used = length * heads // spec.kv_heads
    slots = body.value_scale.shape[-1]
    plan = Plan(spec, slots, -(-used // 8) * 8, 1)
    plan = dataclasses.replace(plan, splits=splits or max(1, min(-(-slots // plan.tile), PROGRAMS // (batch * spec.kv_heads))))
    ends = jnp.stack([start.min(1) // plan.tile, -(-stop.max(1) // plan.tile), jnp.full((batch,), layer)])
    bounds = jnp.repeat(jnp.stack([start, stop], 1), heads // spec.kv_heads, axis=2)
    bounds = jnp.pad(bounds, ((0, 0), (0, 0), (0, plan.rows - used)))
    out, lse = _call(plan, batch)(ends.astype(jnp.int32), bounds.astype(jnp.int32), _columns(q, plan), *_arrays(body, plan))
    return _collect(out, lse, q.shape)


def _arrays(body: PackedBody, plan: Plan):
    def planes(x):
        return x.reshape(*x.shape[:3], -1, plan.planes, HALF)

    values = (*body.value_codes, planes(body.value_scale), planes(body.value_low))
    return (*body.key_codes, body.key_scale, body.key_low, *values)


def _columns(q, plan: Plan) -> Float[Array, "B K D R"]:
    batch, length, heads, dim = q.shape
    q = q.astype(jnp.bfloat16).astype(jnp.float32).reshape(batch, length, plan.spec.kv_heads, -1, dim)
    q = q.transpose(0, 2, 4, 1, 3).reshape(batch, plan.spec.kv_heads, dim, -1)
    return jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, plan.rows - q.shape[-1])))


def _collect(out, lse, shape) -> Partial:
    batch, length, heads, dim = shape
    peak = lse.max(2, keepdims=True)
    weights = jnp.exp(lse - peak)
    total = weights.sum(2)
    lse = jnp.where(peak[:, :, 0] > NEVER / 2, jnp.log(total) + peak[:, :, 0], -jnp.inf)  # [B, K, R]
    out = (out * (weights / total[:, :, None])[:, :, :, None]).sum(2)  # [B, K, D, R]
    kv = out.shape[1]
    used = length * heads // kv
    out = out[..., :used].reshape(batch, kv, dim, length, -1).transpose(0, 3, 1, 4, 2).reshape(shape)
    lse = lse[..., :used].reshape(batch, kv, length, -1).transpose(0, 2, 1, 3).reshape(batch, length, heads)
    return Partial(out, lse)


def _call(plan: Plan, batch: int):
    spec = plan.spec
    lead = (batch, spec.kv_heads, plan.splits)
    return plgpu.kernel(
        functools.partial(kernel, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct((*lead, spec.head_dim, plan.rows), jnp.float32),
            jax.ShapeDtypeStruct((*lead, plan.rows), jnp.float32),
        ],
        scratch_types=scratch(plan),
        grid=lead,
        grid_names=("row", "head", "split"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
