"""Decode attention on exact keys and values as a Pallas TPU kernel (same contract as `reference.packed_attention`).

The grid is (row, tile). A tile of tokens of all KV heads is fetched at once, as the cache stores it, and worked off by
lane groups. A lane group is as few whole heads as fill the 128 lanes. Its queries are laid out block-diagonally. Tiles
outside a row's bounds are not fetched.

Memory is the bound on a v5e and v6e, where a tile takes fewer bundles than the cycles in which the next one arrives. On
a v7x both are about equal (benchmarks/kernels.md).

Before the first tile a row may attend to tokens that lie outside the body (`Recent`). One call is then all of a layer's
attention. XLA would make some thirty small operations of attending to these tokens and of merging.

Shapes in comments: P lane groups, M query rows of a lane group (a multiple of 8), W its lanes, S tokens of the tile.
Scores are base-2 logarithms."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.ops.packing.words import from_bits
from kvqjax.pallas_kernels.exact import ExactBody, ExactSpec, Recent, room
from kvqjax.pallas_kernels.tpu.call import Operand, Refs, by_row, invoke, memory, of_body, of_layer, scalars
from kvqjax.pallas_kernels.tpu.columns import aligned, dot, loop
from kvqjax.pallas_kernels.tpu.exact_plan import ExactPlan, make_plan
from kvqjax.pallas_kernels.tpu.plan import LOG2E
from kvqjax.pallas_kernels.tpu.rows import row_slots, tile_ends
from kvqjax.pallas_kernels.tpu.softmax import empty, normalise, over_tiles, to_weights
from kvqjax.pallas_kernels.tpu.tile import NEVER

__all__ = ["packed_attention"]


def packed_attention(
    q: Float[Array, "B T H D"],
    body: ExactBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: ExactSpec,
    recent: Recent | None = None,
    *,
    pages: Int[Array, "B N"] | None = None,
    interpret: object = False,
) -> Partial:
    """Attend as `reference.packed_attention` does, and to `recent` tokens as well, with queries and softmax weights
    rounded to bfloat16."""
    plan, (batch, length, heads, dim) = make_plan(q, body, spec, row_slots(body, pages)), q.shape
    rows = plan.lane_groups * plan.rows
    operands: dict[str, Operand | None] = {
        "queries": by_row(q.astype(jnp.bfloat16)),  # [1, T, H, D]
        "first": scalars(start.reshape(-1)),  # [B*T] i32: first visible token of the body
        "last": scalars(stop.reshape(-1)),  # one past the last
        "body": of_body(body, plan),  # [1, 1, S, P*W] u16
        "recent": None if recent is None else _of_recent(recent),
    }
    scratch = {name: memory(rows, 1) for name in ("peak", "total", "top")}  # so far; this tile's maximum
    scratch |= {"limits": memory(plan.rows, plan.tile), "scores": memory(rows, plan.tile)}
    scratch |= {"sums": memory(1, rows, plan.lanes), "q": memory(rows, plan.lanes)}
    ends = tile_ends(start, stop, plan.tile, plan.slots, pages)
    name, grid = f"packed_attention_exact_{plan.tile}", (batch, plan.slots // plan.tile)
    results = (length, heads, dim), (rows, 1)
    out, lse = invoke(_kernel, plan, grid, layer, ends, operands, results, scratch, name=name, interpret=interpret)
    lse = lse.reshape(batch, plan.lane_groups, plan.rows)[:, :, : plan.used]
    lse = jnp.where(lse > NEVER / 2, lse, -jnp.inf).reshape(batch, plan.lane_groups, length, plan.heads)
    return Partial(out, jnp.swapaxes(lse, 1, 2).reshape(batch, length, heads))


def _of_recent(recent: Recent) -> Operand:
    """Declare the tokens outside the body."""
    operands = tuple(tuple(of_layer(x) for x in pair) for pair in recent.held)
    spec = Recent(
        tuple(tuple(x.spec for x in pair) for pair in operands),
        tuple(by_row(x).spec for x in recent.new),
        by_row(recent.seen).spec,
    )
    return Operand(recent, spec)


def _by_query(plan: ExactPlan, choose):
    """Give every query row `choose(t)` of its new token t."""
    row, chosen = jax.lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0), choose(0)
    for t in range(1, plan.length):
        chosen = jnp.where(row >= t * plan.heads, choose(t), chosen)
    return chosen


def _kernel(refs: Refs, ends, plan: ExactPlan):
    """Attend to one tile."""
    # Sums of rows that are laid out for the products are results only after the last tile.
    refs = Refs(**(vars(refs) | {"out": refs.sums, "found": refs.out}))
    query = pl.program_id(0) * plan.length

    def stored(name: str, group, tokens=slice(None)):
        return from_bits(getattr(refs.body, name)[0, 0, tokens, aligned(group, plan.lanes)], "bfloat16")

    def score(group):
        rows, top = aligned(group, plan.rows), NEVER
        for tokens in plan.columns:
            scores = _scores(refs, plan, rows, stored("keys", group, tokens))
            scores = jnp.minimum(scores, refs.limits[:, tokens])
            refs.scores[rows, tokens] = scores
            top = jnp.maximum(top, scores.max(-1, keepdims=True))
        refs.top[rows] = top

    def add(group):
        rows = aligned(group, plan.rows)
        product = dot(refs.scores[rows].astype(jnp.bfloat16), stored("values", group), 0)
        refs.out[0, rows] = refs.out[0, rows] * refs.top[rows] + product

    def in_parts(step):
        loop(plan.parts, lambda part: step(refs, aligned(part, plan.rows * plan.lane_groups // plan.parts)))

    def work(tile):
        _write_limits(refs, plan, query, tile)
        loop(plan.lane_groups, score)
        in_parts(to_weights)
        loop(plan.lane_groups, add)

    def begin():
        _lay_out_queries(refs, plan)
        if refs.recent is None:
            empty(refs)
        else:
            _attend_recent(refs, plan)

    def end():
        in_parts(normalise)
        _bring_back(refs, plan)

    over_tiles(refs, ends, work, begin, end)


def _scores(refs, plan: ExactPlan, rows, keys):
    """Multiply the queries of a lane group with keys."""
    return dot(refs.q[rows].astype(jnp.bfloat16), keys, 1) * (LOG2E * plan.spec.head_dim**-0.5)


def _write_limits(refs, plan: ExactPlan, query, tile):
    """Write `limits` [M, S]: infinite where a row sees the token, NEVER elsewhere. `query` is the first one's number
    in the batch."""
    first, last = (_by_query(plan, lambda t, ref=ref: ref[query + t]) for ref in (refs.first, refs.last))
    for tokens in plan.columns:
        shape = plan.rows, tokens.stop - tokens.start
        token = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + (tile * plan.tile + tokens.start)
        refs.limits[:, tokens] = jnp.where((token >= first) & (token < last), jnp.inf, NEVER)


def _pieces(plan: ExactPlan, t: int):
    """Say which queries of new token t are which rows and lanes: (its heads, rows, lanes)."""
    for p in range(plan.lane_groups):
        for head in range(plan.shared):
            first, row = p * plan.heads + head * plan.group, p * plan.rows + t * plan.heads + head * plan.group
            places = (first, plan.group), (row, plan.group), (head * plan.spec.head_dim, plan.spec.head_dim)
            yield (slice(at, at + count) for at, count in places)


def _lay_out_queries(refs, plan: ExactPlan):
    """Lay out the queries of every lane group: each head's in its own lanes, zero elsewhere."""
    refs.q[...] = jnp.zeros(refs.q.shape)
    for t in range(plan.length):
        queries = refs.queries[0, t].astype(jnp.float32)
        for heads, rows, lanes in _pieces(plan, t):
            refs.q[rows, lanes] = queries[heads]


def _bring_back(refs, plan: ExactPlan):
    """Take every head's own lanes of the result."""
    for t in range(plan.length):
        for heads, rows, lanes in _pieces(plan, t):
            refs.found[0, t, heads] = refs.out[0, rows, lanes]


def _attend_recent(refs, plan: ExactPlan):
    """Begin the running sums with the tokens outside the body."""
    recent = refs.recent
    seen = _by_query(plan, lambda t: jnp.where(recent.seen[0, t : t + 1] > 0, jnp.inf, NEVER))

    def every(part: int, lanes):
        parts = [*(x[part][0, 0, :, lanes] for x in recent.held), recent.new[part][0, :, lanes]]
        return jnp.concatenate([_filled(x) for x in parts])

    def step(group):
        rows, lanes = aligned(group, plan.rows), aligned(group, plan.lanes)
        scores = jnp.minimum(_scores(refs, plan, rows, every(0, lanes)), seen)
        peak = scores.max(-1, keepdims=True)
        weights = jnp.exp2(scores - peak)
        refs.peak[rows], refs.total[rows] = peak, weights.sum(-1, keepdims=True)
        refs.out[0, rows] = dot(weights.astype(jnp.bfloat16), every(1, lanes), 0)

    loop(plan.lane_groups, step)


def _filled(x):
    """Pad tokens with zeros to the room that they have."""
    missing = room(x.shape[0]) - x.shape[0]
    return jnp.concatenate([x, jnp.zeros((missing, x.shape[1]), x.dtype)]) if missing else x
