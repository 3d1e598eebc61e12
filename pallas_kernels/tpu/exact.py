"""Decode attention on exact keys and values as a Pallas TPU kernel (same contract as `reference.packed_attention`).

The grid is (row, tile). A tile of tokens of all KV heads is fetched at once, as the cache stores it, and worked off by
lane groups: as few whole heads as fill the 128 lanes, whose queries are laid out block-diagonally. Memory is the bound
on a v5e and v6e, where a tile takes fewer bundles than the cycles in which the next one arrives; on a v7x both are
about equal (benchmarks/kernels.md). Tiles outside a row's bounds are not fetched.

Shapes in comments: P lane groups, M query rows of a lane group (a multiple of 8), W its lanes, S tokens of the tile.
Scores are base-2 logarithms."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.ops.layout import from_bits
from kvqjax.pallas_kernels.exact import ExactBody, ExactSpec
from kvqjax.pallas_kernels.tpu.call import Operand, Refs, by_row, invoke, memory, of_body, whole
from kvqjax.pallas_kernels.tpu.columns import aligned, dot, loop
from kvqjax.pallas_kernels.tpu.plan import LOG2E, lane_groups
from kvqjax.pallas_kernels.tpu.rows import collect, lane_queries, row_bounds, tile_ends
from kvqjax.pallas_kernels.tpu.softmax import over_tiles, to_weights
from kvqjax.pallas_kernels.tpu.tile import write_limits

__all__ = ["packed_attention", "tile_of"]

UNIT, MOST_BYTES = 256, 2**23  # tokens and, of keys and values together, bytes of a tile


@dataclasses.dataclass(frozen=True)
class ExactPlan:
    """Static choices of one call: query rows of a lane group, padded, and tokens of a tile, a divisor of the slots."""

    spec: ExactSpec
    slots: int
    rows: int
    tile: int

    @property
    def lane_groups(self) -> int:
        return lane_groups(self.spec)

    @property
    def lanes(self) -> int:
        """Lanes of a lane group."""
        return self.spec.width // self.lane_groups

    @property
    def shared(self) -> int:
        """KV heads of a lane group."""
        return self.lanes // self.spec.head_dim

    @property
    def block(self) -> int:
        """Tokens whose limits are written at once: all."""
        return self.tile


def tile_of(spec: ExactSpec, slots: int) -> int:
    """Return the tokens of a tile of a body of so many slots. Raise ValueError for slots that are no multiple of
    UNIT."""
    if slots % UNIT:
        raise ValueError(f"a body of {slots} slots; want a multiple of {UNIT}")
    most = max(UNIT, MOST_BYTES // (4 * spec.width))
    return max(n for n in range(UNIT, most + 1, UNIT) if slots % n == 0)


def _plan(q, body: ExactBody, spec: ExactSpec) -> ExactPlan:
    """Make the plan of a call."""
    plan = ExactPlan(spec, body.slots, 0, tile_of(spec, body.slots))
    rows = -(-plan.shared * q.shape[1] * q.shape[2] // spec.kv_heads // 8) * 8
    return dataclasses.replace(plan, rows=rows)


def packed_attention(
    q: Float[Array, "B T H D"],
    body: ExactBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: ExactSpec,
    *,
    interpret: object = False,
) -> Partial:
    """Attend as `reference.packed_attention` does, with queries and softmax weights rounded to bfloat16."""
    plan, heads = _plan(q, body, spec), q.shape[2] // spec.kv_heads
    rows = plan.lane_groups * plan.rows
    queries = lane_queries(q, plan)
    operands: dict[str, Operand | None] = {
        "queries": by_row(queries.reshape(q.shape[0], rows, plan.lanes)),  # [1, P*M, W] bf16
        "bounds": by_row(row_bounds(start, stop, plan, heads)),  # [1, M, 2] i32: first and last + 1 visible token
        "order": whole(jnp.arange(plan.tile, dtype=jnp.int32)[None]),  # [1, S]
        "body": of_body(body, plan),  # [1, 1, S, P*W] u16
    }
    scratch = {name: memory(rows, 1) for name in ("peak", "total", "top")}  # so far; this tile's maximum
    scratch |= {"limits": memory(plan.rows, plan.tile), "scores": memory(rows, plan.tile)}
    ends = tile_ends(start, stop, plan.tile, plan.slots)
    name, grid = f"packed_attention_exact_{plan.tile}", (q.shape[0], plan.slots // plan.tile)
    results = (rows, plan.lanes), (rows, 1)
    out, lse = invoke(_kernel, plan, grid, layer, ends, operands, results, scratch, name=name, interpret=interpret)
    out, lse = (x.reshape(q.shape[0], 1, plan.lane_groups, plan.rows, -1) for x in (out, lse))
    return collect(out, lse, q.shape, plan)


def _kernel(refs: Refs, ends, plan: ExactPlan):
    """Attend to one tile."""

    def stored(name: str, group):
        return from_bits(getattr(refs.body, name)[0, 0, :, aligned(group, plan.lanes)], "bfloat16")

    def score(group):
        rows = aligned(group, plan.rows)
        scores = dot(refs.queries[0, rows], stored("keys", group), 1) * (LOG2E * plan.spec.head_dim**-0.5)
        scores = jnp.minimum(scores, refs.limits[...])
        refs.scores[rows] = scores
        refs.top[rows] = scores.max(-1, keepdims=True)

    def add(group):
        rows = aligned(group, plan.rows)
        found = dot(refs.scores[rows].astype(jnp.bfloat16), stored("values", group), 0)
        refs.out[0, rows] = refs.out[0, rows] * refs.top[rows] + found

    def work(tile):
        write_limits(refs, plan, tile)
        loop(plan.lane_groups, score)
        to_weights(refs)
        loop(plan.lane_groups, add)

    over_tiles(refs, ends, work)
