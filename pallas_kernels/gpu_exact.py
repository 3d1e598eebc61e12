"""Decode attention on exact bfloat16 keys and values, split over tokens: what packed kernels are measured against.

The same skeleton as `gpu_kernel` without unpacking: keys are the left operand of the scores as they lie in shared
memory, values, transposed, that of the output. benchmarks/decode_attention.py calls it; the cache does not.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int

from kvqjax.attention import Partial
from kvqjax.pallas_kernels import gpu_call, gpu_parts
from kvqjax.pallas_kernels.gpu_parts import State, along, product, put_transposed, tiled

__all__ = ["exact_attention"]

TILE = 128  # tokens
RESIDENT = 3  # programs that a multiprocessor's shared memory holds


class Refs(NamedTuple):
    ends: Any  # [3, B] i32: a row's first tile and the one after its last; the layer
    bounds: Any  # [B, 2, R] i32
    queries: Any  # [B, K, D, R] bf16
    keys: Any  # [L, B, S, K*D] bf16
    values: Any
    out: Any  # [B, K, splits, D, R] f32
    lse: Any  # [B, K, splits, R] f32
    raw: Any  # [1, R, D] bf16
    key: Any  # [1, TILE, D] bf16
    value: Any  # [1, TILE, D] bf16
    weights: Any  # [1, R, TILE] bf16
    keys_here: Any
    values_here: Any


@dataclasses.dataclass(frozen=True)
class _Plan:
    kv_heads: int
    dim: int
    slots: int
    rows: int
    splits: int
    tile: int = TILE

    def first_token(self, tile):
        return jnp.minimum(tile * self.tile, self.slots - self.tile)


def exact_attention(
    q: BFloat16[Array, "B T H D"],
    keys: BFloat16[Array, "L B S W"],
    values: BFloat16[Array, "L B S W"],
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    *,
    splits: int | None = None,
) -> Partial:
    """Attend to one layer, all KV heads side by side on the last axis W = K*D; query t of row b sees tokens start[b, t]
    <= s < stop[b, t]. D is a multiple of 64, S at least TILE."""
    batch, slots, width = keys.shape[1:]
    kv_heads, dim = width // q.shape[-1], q.shape[-1]
    if slots < TILE or dim % 64:
        raise ValueError(f"{slots} slots of {dim} channels; want at least {TILE}, and a multiple of 64")
    queries = gpu_call.columns(q, kv_heads)
    chosen = splits or gpu_call.default_splits(slots // TILE, batch * kv_heads, RESIDENT)
    plan = _Plan(kv_heads, dim, slots, queries.shape[-1], chosen)
    operands = (queries, keys, values)
    return gpu_call.attend(plan, _kernel, _scratch(plan), operands, q.shape, layer, start, stop)


def _scratch(plan: _Plan) -> list:
    return [
        tiled((1, plan.rows, plan.dim), jnp.bfloat16),
        tiled((1, TILE, plan.dim), jnp.bfloat16),
        tiled((1, TILE, plan.dim), jnp.bfloat16),
        tiled((1, plan.rows, TILE), jnp.bfloat16),
        plgpu.Barrier(num_arrivals=1),
        plgpu.Barrier(num_arrivals=1),
    ]


def _kernel(*refs, plan: _Plan):
    """Grid (row, head, split)."""
    refs = Refs(*refs)
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    begin, end = gpu_parts.share(refs.ends, row, split, plan.splits)
    where = (refs.ends[2, row], row, head)

    @pl.when(begin < end)
    def _():
        _fetch(refs.keys, refs.key, refs.keys_here, plan, where, begin)
        _fetch(refs.values, refs.value, refs.values_here, plan, where, begin)

    queries = gpu_parts.load(refs.queries.at[row, head], plgpu.Layout.WGMMA, optimized=False)
    put_transposed(refs.raw.at[0], queries)
    plgpu.commit_smem()
    limits = gpu_parts.load_limits(refs.bounds, row, (TILE, plan.rows))

    def step(tile, state):
        return _fold(refs, plan, where, tile, end, limits, state)

    state = lax.fori_loop(begin, end, step, gpu_parts.begin_state(TILE, plan.dim, plan.rows))
    gpu_parts.finish(state, refs.out.at[row, head, split], refs.lse.at[row, head, split])


def _fetch(source, target, here, plan: _Plan, where, tile):
    """Start copying a tile of one head."""
    tokens, lanes = pl.ds(plan.first_token(tile), TILE), pl.ds(where[2] * plan.dim, plan.dim)
    plgpu.copy_gmem_to_smem(source.at[*where[:2], tokens, lanes], target.at[0], here)


def _fold(refs: Refs, plan: _Plan, where, tile, end, limits, state: State) -> State:
    """Fold one tile into the running softmax."""
    nought = lax.shift_right_logical(tile, 31)  # see `gpu_kernel._hidden`
    near = refs._replace(**{name: getattr(refs, name).at[nought] for name in ("raw", "key", "value", "weights")})
    plgpu.barrier_wait(refs.keys_here)
    score = product(near.key, near.raw, plan.rows) * (plan.dim**-0.5 * math.log2(math.e))
    slot = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, score.shape, 0), plgpu.Layout.WGMMA)
    slot = slot + plan.first_token(tile)
    score = jnp.where(gpu_parts.visible(slot, limits, tile * TILE), score, gpu_parts.NEVER)
    plgpu.commit_smem()  # the keys are read
    pl.when(tile + 1 < end)(lambda: _fetch(refs.keys, refs.key, refs.keys_here, plan, where, tile + 1))
    peak = jnp.maximum(state.peak, score.max(0))
    decay, weight = jnp.exp2(state.peak - peak), jnp.exp2(score - along(peak, score))
    put_transposed(near.weights, weight.astype(jnp.bfloat16))
    plgpu.commit_smem()
    plgpu.barrier_wait(refs.values_here)
    sums = product(near.value.transpose((1, 0)), near.weights, plan.rows)
    plgpu.commit_smem()  # the values are read
    pl.when(tile + 1 < end)(lambda: _fetch(refs.values, refs.value, refs.values_here, plan, where, tile + 1))
    total, low, acc = (x * along(decay, x) for x in state[1:])
    return State(peak, total + weight, low, acc + sums)
