"""Decode attention on exact keys and values as a Pallas TPU kernel (same contract as
`reference.packed_attention`).

The grid is (row, tile). A tile of tokens of all KV heads is fetched at once, as the cache stores
it, and worked off by lane groups. A lane group is as few whole heads as fill the 128 lanes. Its
queries are laid out block-diagonally. Tiles outside a row's bounds are not fetched.

Memory is the bound on a v5e and v6e, where a tile takes fewer bundles than the cycles in which the
next one arrives. On a v7x both are about equal (benchmarks/kernels.md).

Before the first tile a row may attend to tokens that lie outside the body (`Recent`). One call is
then all of a layer's attention. Otherwise XLA would need some thirty small operations to attend to
these tokens and to merge the results.

Shapes in comments: P lane groups, M query rows of a lane group (a multiple of 8), W its lanes, S
tokens of the tile. Scores are base-2 logarithms."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.ops.packing.base import from_bits
from kvqjax.pallas_kernels.exact import ExactBody, ExactSpec, Recent, room
from kvqjax.pallas_kernels.packed import row_slots
from kvqjax.pallas_kernels.tpu.call import (
    Operand,
    Refs,
    by_row,
    invoke,
    memory,
    of_body,
    of_layer,
    scalars,
)
from kvqjax.pallas_kernels.tpu.columns import aligned, dot, loop
from kvqjax.pallas_kernels.tpu.exact_plan import ExactPlan, make_plan
from kvqjax.pallas_kernels.tpu.plan import LOG2E
from kvqjax.pallas_kernels.tpu.rows import tile_ends
from kvqjax.pallas_kernels.tpu.softmax import empty, normalise, over_tiles, to_weights
from kvqjax.pallas_kernels.tpu.tile import NEVER


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
    """Attend as `reference.packed_attention` does, and to `recent` tokens as well. Queries and
    softmax weights are rounded to bfloat16.

    Args:
        pages: the pages of each row, where the body's rows are pages.
        interpret: as `pallas_call` has it.

    Returns:
        The attention to all these tokens."""
    batch, length, heads, dim = q.shape
    plan = make_plan(q, body, spec, row_slots(body, pages))
    rows = plan.lane_groups * plan.rows
    operands: dict[str, Operand | None] = {
        "queries": by_row(q.astype(jnp.bfloat16)),  # [1, T, H, D]
        "first": scalars(start.reshape(-1)),  # [B*T] i32: first visible token of the body
        "last": scalars(stop.reshape(-1)),  # one past the last
        "body": of_body(body, plan),  # [1, 1, S, P*W] u16
        "recent": None if recent is None else _of_recent(recent),
    }
    scratch = {
        "peak": memory(rows, 1),  # running maximum
        "total": memory(rows, 1),  # running sum of the softmax weights
        "top": memory(rows, 1),  # maximum of this tile's scores, then the rescale factor
        "limits": memory(plan.rows, plan.tile),  # NEVER where a row must not look, else infinite
        "scores": memory(rows, plan.tile),  # scores, then softmax weights
        "sums": memory(1, rows, plan.lanes),  # running sums of the values
        "q": memory(rows, plan.lanes),  # the queries, each head's in its own lanes
    }
    ends = tile_ends(start, stop, plan.tile, plan.slots, pages)
    name = f"packed_attention_exact_{plan.tile}"
    grid = (batch, plan.slots // plan.tile)
    results = (length, heads, dim), (rows, 1)
    out, lse = invoke(
        _kernel, plan, grid, layer, ends, operands, results, scratch, name=name, interpret=interpret
    )
    # The rows of a lane group are its used ones, and others that fill up a multiple of 8.
    lse = lse.reshape(batch, plan.lane_groups, plan.rows)[:, :, : plan.used]
    # A row that saw no token has the log-sum-exp of an empty sum.
    lse = jnp.where(lse > NEVER / 2, lse, -jnp.inf)
    lse = lse.reshape(batch, plan.lane_groups, length, plan.heads)
    # [B, T, P, heads of a lane group] to [B, T, H]
    lse = jnp.swapaxes(lse, 1, 2).reshape(batch, length, heads)
    return Partial(out, lse)


def _of_recent(recent: Recent) -> Operand:
    """Declare the tokens outside the body, as one operand whose references are a `Recent`."""
    from_cache = []
    for keys, values in recent.held:
        from_cache.append((of_layer(keys).spec, of_layer(values).spec))
    new = tuple(by_row(x).spec for x in recent.new)
    spec = Recent(tuple(from_cache), new, by_row(recent.seen).spec)
    return Operand(recent, spec)


def _by_query(plan: ExactPlan, choose):
    """Give every query row the `choose(t)` of its new token t, [M, n]. The rows of a lane group are
    token after token."""
    row = jax.lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0)
    chosen = choose(0)
    for t in range(1, plan.length):
        chosen = jnp.where(row >= t * plan.heads, choose(t), chosen)
    return chosen


def _kernel(refs: Refs, ends, plan: ExactPlan):
    """Attend to one tile.

    Args:
        refs: as declared in `packed_attention`.
        ends: from `rows.tile_ends`."""
    # The functions of `softmax` sum into `out`, [1, P*M, W]. The kernel's result has its heads in
    # order, and is written after the last tile: here it is `result`.
    refs = Refs(**(vars(refs) | {"out": refs.sums, "result": refs.out}))
    query = pl.program_id(0) * plan.length  # number of the row's first query in the batch

    def stored(name: str, group, tokens=slice(None)):
        """Load the tile's keys or values of a lane group, [S, W] bfloat16."""
        tile = getattr(refs.body, name)
        words = tile[0, 0, tokens, aligned(group, plan.lanes)]
        return from_bits(words, "bfloat16")

    def score(group):
        """Write the scores of a lane group, and their maximum into `top`."""
        rows = aligned(group, plan.rows)
        top = NEVER
        # Some columns at a time, so that they fit the registers.
        for tokens in plan.columns:
            scores = _scores(refs, plan, rows, stored("keys", group, tokens))
            scores = jnp.minimum(scores, refs.limits[:, tokens])
            refs.scores[rows, tokens] = scores
            top = jnp.maximum(top, scores.max(-1, keepdims=True))
        refs.top[rows] = top

    def add(group):
        """Add the weighted values of a lane group to the running sums."""
        rows = aligned(group, plan.rows)
        weights = refs.scores[rows].astype(jnp.bfloat16)  # `to_weights` made them of the scores
        product = dot(weights, stored("values", group), 0)
        refs.out[0, rows] = refs.out[0, rows] * refs.top[rows] + product

    def in_parts(step):
        """Call step(refs, rows) for all query rows, in as many parts as registers need."""
        size = plan.rows * plan.lane_groups // plan.parts

        def of_part(part):
            step(refs, aligned(part, size))

        loop(plan.parts, of_part)

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
    """Multiply the queries of a lane group with keys: base-2 logarithms of softmax weights."""
    queries = refs.q[rows].astype(jnp.bfloat16)
    scale = LOG2E * plan.spec.head_dim**-0.5
    return dot(queries, keys, 1) * scale


def _write_limits(refs, plan: ExactPlan, query, tile):
    """Write `limits` [M, S]: infinite where a row sees the token, NEVER elsewhere. `query` is the
    number of the row's first query in the batch."""
    first = _by_query(plan, lambda t: refs.first[query + t])  # [M, 1]
    last = _by_query(plan, lambda t: refs.last[query + t])
    for tokens in plan.columns:
        shape = (plan.rows, tokens.stop - tokens.start)
        column = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        token = column + (tile * plan.tile + tokens.start)
        is_seen = (token >= first) & (token < last)
        refs.limits[:, tokens] = jnp.where(is_seen, jnp.inf, NEVER)


def _pieces(plan: ExactPlan, t: int):
    """Say where the queries of new token t lie among the rows and lanes of the products.

    Yields:
        (query heads, rows, lanes), as slices, for every KV head."""
    for p in range(plan.lane_groups):
        for head in range(plan.shared):
            first_query_head = p * plan.heads + head * plan.group
            first_row = p * plan.rows + t * plan.heads + head * plan.group
            first_lane = head * plan.spec.head_dim
            yield (
                slice(first_query_head, first_query_head + plan.group),
                slice(first_row, first_row + plan.group),
                slice(first_lane, first_lane + plan.spec.head_dim),
            )


def _lay_out_queries(refs, plan: ExactPlan):
    """Lay out the queries of every lane group: each head's in its own lanes, zero elsewhere."""
    refs.q[...] = jnp.zeros(refs.q.shape)
    for t in range(plan.length):
        queries = refs.queries[0, t].astype(jnp.float32)
        for heads, rows, lanes in _pieces(plan, t):
            refs.q[rows, lanes] = queries[heads]


def _bring_back(refs, plan: ExactPlan):
    """Write the result: every head's own lanes of the running sums."""
    for t in range(plan.length):
        for heads, rows, lanes in _pieces(plan, t):
            refs.result[0, t, heads] = refs.out[0, rows, lanes]


def _attend_recent(refs, plan: ExactPlan):
    """Begin the running sums with the tokens outside the body."""
    recent = refs.recent

    def limit(t: int):
        """Give the limits of new token t's scores, as `_write_limits` does."""
        return jnp.where(recent.seen[0, t : t + 1] > 0, jnp.inf, NEVER)

    limits = _by_query(plan, limit)

    def every(part: int, lanes):
        """Put the keys (`part` 0) or values (1) of all tokens outside the body one below the
        other."""
        tokens = [pair[part][0, 0, :, lanes] for pair in recent.held]
        tokens.append(recent.new[part][0, :, lanes])
        return jnp.concatenate([_filled(x) for x in tokens])

    def step(group):
        """Attend with the queries of a lane group."""
        rows = aligned(group, plan.rows)
        lanes = aligned(group, plan.lanes)
        scores = jnp.minimum(_scores(refs, plan, rows, every(0, lanes)), limits)
        peak = scores.max(-1, keepdims=True)
        weights = jnp.exp2(scores - peak)
        total = weights.sum(-1, keepdims=True)
        refs.peak[rows] = peak
        refs.total[rows] = total
        refs.out[0, rows] = dot(weights.astype(jnp.bfloat16), every(1, lanes), 0)

    loop(plan.lane_groups, step)


def _filled(x):
    """Pad tokens [n, W] with zeros to the room that they have in `Recent.seen`."""
    missing = room(x.shape[0]) - x.shape[0]
    if not missing:
        return x
    zeros = jnp.zeros((missing, x.shape[1]), x.dtype)
    return jnp.concatenate([x, zeros])
