"""Decode attention on exact bfloat16 keys and values, split over tokens: a GPU kernel that nothing
stands in for.

The same skeleton as the packed kernels' (`pallas_kernels/gpu/kernel.py`) without unpacking, so that
JAX's interpreter can run it whole and look for races: keys are the left operand of the scores as
they lie in shared memory, values, transposed, that of the output. No cache uses it."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int

from kvqjax.ops.attention import Partial
from kvqjax.pallas_kernels.gpu import call as gpu_call
from kvqjax.pallas_kernels.gpu import parts as gpu_parts
from kvqjax.pallas_kernels.gpu.parts import CHANNELS, State, along, product, put_transposed, tiled

TILE = 128  # tokens
RESIDENT = 3  # programs that a multiprocessor's shared memory holds


class Operands(NamedTuple):
    """Arrays in device memory."""

    queries: Any  # [B, K, D, R] bf16
    keys: Any  # [L, B, S, K*D] bf16
    values: Any


class Tile(NamedTuple):
    """Shared memory for one tile."""

    raw: Any  # [1, R, D] bf16: the queries
    key: Any  # [1, TILE, D] bf16
    value: Any  # [1, TILE, D] bf16
    weights: Any  # [1, R, TILE] bf16


class Memory(NamedTuple):
    """Shared memory, and the barriers that say that a copy has arrived."""

    held: Tile
    keys_here: Any
    values_here: Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static choices of one call: sizes, query rows of a KV head (a multiple of 8), programs that
    share a row's tokens."""

    kv_heads: int
    dim: int
    slots: int
    rows: int
    splits: int
    tile: int = TILE

    def first_token(self, tile):
        """Return the first token of a tile; the last tile may begin within the one before it."""
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
    """Attend to one layer, whose KV heads lie side by side on the last axis W = K*D. Query t of row
    b sees tokens start[b, t] <= s < stop[b, t]. D is a multiple of 64, S at least TILE."""
    batch, slots, width = keys.shape[1:]
    kv_heads, dim = width // q.shape[-1], q.shape[-1]
    if slots < TILE or dim % 64:
        raise ValueError(
            f"{slots} slots of {dim} channels; want at least {TILE}, and a multiple of 64"
        )
    queries = gpu_call.columns(q, kv_heads)
    chosen = splits or gpu_call.default_splits(slots // TILE, batch * kv_heads, RESIDENT)
    plan = Plan(kv_heads, dim, slots, queries.shape[-1], chosen)
    operands = Operands(queries, keys, values)
    return gpu_call.attend(plan, _kernel, memory(plan), operands, q.shape, layer, start, stop)


def memory(plan: Plan) -> Memory:
    """Declare shared memory and barriers."""
    held = Tile(
        tiled((1, plan.rows, plan.dim), jnp.bfloat16),
        tiled((1, TILE, plan.dim), jnp.bfloat16),
        tiled((1, TILE, plan.dim), jnp.bfloat16),
        tiled((1, plan.rows, TILE), jnp.bfloat16),
    )
    return Memory(held, plgpu.Barrier(num_arrivals=1), plgpu.Barrier(num_arrivals=1))


def _kernel(limits, data: Operands, memory: Memory, results, plan: Plan):
    """Attend to the tiles of one program. Grid (row, head, split)."""
    (ends, bounds), (out, lse) = limits, results
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    begin, end = gpu_parts.share(ends, row, split, plan.splits)
    where = (ends[2, row], row, head)

    def fetch(name: str, tile):
        source, target, here = {
            "keys": (data.keys, memory.held.key, memory.keys_here),
            "values": (data.values, memory.held.value, memory.values_here),
        }[name]
        tokens, lanes = pl.ds(plan.first_token(tile), TILE), pl.ds(head * plan.dim, plan.dim)
        plgpu.copy_gmem_to_smem(source.at[*where[:2], tokens, lanes], target.at[0], here)

    @pl.when(begin < end)
    def _():
        fetch("keys", begin)
        fetch("values", begin)

    queries = gpu_parts.load(data.queries.at[row, head], plgpu.Layout.WGMMA, optimized=False)
    put_transposed(memory.held.raw.at[0], queries)
    plgpu.commit_smem()  # the queries are written: products read all threads' parts
    limits = gpu_parts.load_limits(bounds, row, (TILE, plan.rows))

    def step(tile, state):
        return _fold(memory, plan, fetch, (tile, end), limits, state)

    state = lax.fori_loop(begin, end, step, gpu_parts.begin_state(TILE, plan.dim, plan.rows))
    gpu_parts.finish(state, out.at[row, head, split], lse.at[row, head, split])


def _fold(memory: Memory, plan: Plan, fetch, ends, limits, state: State) -> State:
    """Fold one tile into the online softmax."""
    tile, end = ends
    held = gpu_parts.hidden(memory.held, tile)
    plgpu.barrier_wait(memory.keys_here)
    score = product((held.key, held.raw)) * (plan.dim**-0.5 * math.log2(math.e))
    slot = gpu_parts.row_index(score.shape) + plan.first_token(tile)
    # An earlier tile has counted what is before.
    seen = gpu_parts.visible(slot, limits) & (slot >= tile * TILE)
    score = jnp.where(seen, score, gpu_parts.NEVER)
    plgpu.commit_smem()  # all threads have read the keys, which the next copy overwrites
    pl.when(tile + 1 < end)(lambda: fetch("keys", tile + 1))

    def write_weights(peak):
        weight = jnp.exp2(score - along(peak, score))
        put_transposed(held.weights, weight.astype(jnp.bfloat16))
        return weight, (jnp.zeros_like(weight),)

    def weigh():
        plgpu.commit_smem()  # the weights are written: products read all threads' parts
        plgpu.barrier_wait(memory.values_here)
        channels = (pl.ds(first, CHANNELS) for first in range(0, plan.dim, CHANNELS))
        sums = tuple(
            product((held.value.at[:, x].transpose((1, 0)), held.weights)) for x in channels
        )
        plgpu.commit_smem()  # all threads have read values and weights, which are overwritten next
        pl.when(tile + 1 < end)(lambda: fetch("values", tile + 1))
        return sums

    return gpu_parts.fold(state, [score], write_weights, weigh)
