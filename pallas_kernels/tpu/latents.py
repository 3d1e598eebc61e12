"""Decode attention on packed latents as a Pallas TPU kernel: keys are rematerialised tile by tile
and never leave the chip's vector memory.

The grid is (row, tile). Per tile of S tokens the key latents x are unpacked once. Then for each
group of heads, number p, keys are made from them by the columns F_p of the up-projection and the
bias b, and scored:

    K = x F_p + b                                  on the matrix unit, [S, W]
    k = K * cos + swap(K) * sin                    cos and sin of offsets in a stretch: the same for every tile
    scores = q_p . k                               q_p: the query rotated back by the stretch's first position

After the softmax of all query heads, the value latents y are summed under the softmax weights.
Their scales and minima go into the weights, as in `packed`.

RoPE rotates pairs of channels. The columns of F are ordered such that the first channels of all
pairs of a group lie on the first half of the lanes, and the second channels on the second half. So
a rotation moves no number between lanes."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.pallas_kernels.latents import LatentBody, LatentSpec
from kvqjax.pallas_kernels.packed import row_slots
from kvqjax.pallas_kernels.tpu.call import (
    Operand,
    by_row,
    by_tile,
    constant,
    invoke,
    memory,
    of_body,
)
from kvqjax.pallas_kernels.tpu.latents_kernel import kernel
from kvqjax.pallas_kernels.tpu.latents_plan import LatentPlan, plan_latents
from kvqjax.pallas_kernels.tpu.plan import LANES, LOG2E
from kvqjax.pallas_kernels.tpu.rope import angles
from kvqjax.pallas_kernels.tpu.rows import collect_groups, row_bounds, tile_ends


def packed_attention(
    q: Float[Array, "B T H D"],
    body: LatentBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: LatentSpec,
    *,
    ways: int | None = None,
    tile: int | None = None,
    pages: Int[Array, "B N"] | None = None,
    interpret: object = False,
) -> Partial:
    """Return the means of the value latents [B, T, H, R] under attention to the rematerialised
    keys, and the log-sum-exp. Query t of row b sees body tokens start[b, t] <= s < stop[b, t]. `q`
    carries its rotation and not yet the D^-1/2. Queries, latents and keys are rounded to bfloat16
    before they are multiplied."""
    slots, group = row_slots(body, pages), q.shape[2] // spec.kv_heads
    plan = plan_latents(spec, slots, slots // len(body.positions), q.shape[1] * group, ways, tile)
    parts = plan.parts
    out, lse = invoke(
        kernel,
        plan,
        (q.shape[0], parts.tiles),
        layer,
        tile_ends(start, stop, parts.tile, parts.slots, pages),
        _operands(q, row_bounds(start, stop, plan, group), body, plan),
        ((parts.rows, spec.rank), (parts.rows, 1)),
        _scratch(plan),
        name=f"packed_attention_latents_k{parts.spec.key_bits}v{parts.spec.value_bits}_{parts.tile}",
        interpret=interpret,
    )
    return collect_groups(out, lse, q.shape[1], plan)


def _halves(x, plan: LatentPlan):
    """Order channels [..., K*D] such that in each group of heads the first channels of all pairs
    come before the second ones."""
    x = x.reshape(*x.shape[:-1], plan.groups, plan.shared, 2, plan.spec.head_dim // 2)
    return jnp.swapaxes(x, -2, -3).reshape(*x.shape[:-4], -1)


def _queries(q, plan: LatentPlan) -> Float[Array, "B P M W"]:
    """Scale the queries and lay out those of a group of heads: each in its own head's lanes, zero
    elsewhere."""
    batch, length, count, dim = q.shape
    group = count // plan.spec.kv_heads
    q = q.astype(jnp.float32).reshape(batch, length, plan.groups, plan.shared, group, 2, dim // 2)
    q = q.transpose(0, 2, 3, 1, 4, 5, 6) * (LOG2E * dim**-0.5)  # [B, P, heads, T, G, 2, D/2]
    # A row is put in the lanes of all heads of its group, and kept in those of its own head only.
    head_mask = jnp.eye(plan.shared)[None, None, :, None, None, None, :, None]
    q = (q[..., None, :] * head_mask).reshape(batch, plan.groups, plan.used, plan.lanes)
    return jnp.pad(q, ((0, 0), (0, 0), (0, plan.rows - plan.used), (0, 0)))


def _cos_sin(positions, plan: LatentPlan) -> tuple:
    """Return cosine and sine of every pair of a group of heads at n positions, [n, W/2] float32
    each."""
    turn = angles(positions, np.asarray(plan.spec.rope.frequencies, np.float64))
    return tuple(jnp.tile(f(turn), (1, plan.shared)) for f in (jnp.cos, jnp.sin))


def _turns(positions, plan: LatentPlan) -> Float[Array, "tiles _ half"]:
    """Return cosine and sine of the first position of every stretch, for all tiles: [tiles, 2 *
    stretches, W/2]."""
    stretches = plan.parts.slots // len(positions) // plan.stretch
    first = (positions[:, None] + jnp.arange(stretches)[None] * plan.stretch).reshape(-1)
    total = plan.parts.tiles * (plan.parts.tile // plan.stretch)
    first = jnp.pad(first, (0, total - first.size))  # the last tile may reach beyond the array
    return jnp.stack(_cos_sin(first, plan), 1).reshape(plan.parts.tiles, -1, plan.half)


def _tables(plan: LatentPlan) -> dict:
    """Return what is the same for all tiles.

    - order: the token of every lane of a block.
    - onehot, spread: the matrices that bring value scales into that order, and key scales to rows.
    - cos, sin: of every token's offset in its stretch, [S, W/2].
    - own: 1 in the lanes of each row's own head, [M, W]."""
    parts = plan.parts
    spread = np.zeros((plan.pattern.size, parts.tile // parts.spec.key_group), np.float32)
    spread[np.arange(plan.pattern.size), plan.pattern] = 1
    offsets = jnp.asarray(parts.tile_order % plan.stretch)
    cos, sin = (x * plan.spec.rope.factor for x in _cos_sin(offsets, plan))
    # [used, heads], then [used, W]: a head has lanes in both halves, then rows of padding.
    lane_mask = np.repeat(np.eye(plan.shared), plan.used // plan.shared, 0)
    lane_mask = np.tile(np.repeat(lane_mask, plan.spec.head_dim // 2, 1), 2)
    lane_mask = np.pad(lane_mask, ((0, plan.rows - plan.used), (0, 0)))
    ones = {
        name: jnp.asarray(x, jnp.bfloat16)
        for name, x in (("onehot", parts.onehot), ("spread", spread), ("own", lane_mask))
    }
    return {"order": jnp.asarray(parts.order[None], jnp.int32), "cos": cos, "sin": sin, **ones}


def _maps(body: LatentBody, plan: LatentPlan) -> dict:
    """Return the up-projection [R, K*D] bfloat16, and bias and gain [2, K*D] float32."""
    width, dim = plan.spec.width, plan.spec.head_dim
    bias = jnp.zeros(width) if body.bias is None else body.bias.astype(jnp.float32)
    gain = jnp.ones(dim) if body.gain is None else body.gain.astype(jnp.float32)
    rows = jnp.stack([bias, jnp.tile(gain, plan.spec.kv_heads)])
    return {"up": _halves(body.up.astype(jnp.bfloat16), plan), "maps": _halves(rows, plan)}


def _operands(q, bounds, body: LatentBody, plan: LatentPlan) -> dict[str, Operand | None]:
    """Declare what the kernel reads. P groups of heads, M query rows of a group, W its lanes, S
    tokens of the tile, N key groups of the tile, C rows of value scales, R the rank."""
    queries, turns = _queries(q, plan), _turns(body.positions, plan)
    tables, maps = _tables(plan), _maps(body, plan)
    return {
        "queries": by_row(
            queries
        ),  # [1, P, M, W] f32, block-diagonal over the heads of a group, scaled
        "turns": by_tile(turns),  # [1, 2*n, W/2] f32: cos and sin of the n stretches' positions
        "bounds": by_row(bounds),  # [1, M, 2] i32: first and last + 1 visible token of a row
        "order": constant(tables["order"]),  # [1, block] i32: token of every lane
        "onehot": constant(
            tables["onehot"]
        ),  # [period, period] bf16: brings value scales into lane order
        "spread": constant(
            tables["spread"]
        ),  # [8 * chunks, N] bf16: brings key scales to the rows of unpacked codes
        "cos": constant(tables["cos"]),  # [S, W/2] f32 of every token's offset in its stretch
        "sin": constant(tables["sin"]),
        "own": constant(tables["own"]),  # [M, W] bf16: 1 in the lanes of a row's head
        "up": constant(maps["up"]),  # [R, P*W] bf16
        "maps": constant(maps["maps"]),  # [2, P*W] f32: bias and gain
        # words [1, 1, rows, R], scales [1, 1, N, R] and [1, 1, C, S]
        "body": of_body(body.stored._replace(positions=None), plan.parts),
    }


def _scratch(plan: LatentPlan) -> dict:
    """Declare working memory. P*M query rows, S tokens of the tile, W lanes of a group, C rows of
    value scales, R the rank."""
    parts, rank, spread = plan.parts, plan.spec.rank, plan.pattern.size
    scales = parts.tile * parts.value_rows // LANES, LANES
    return {
        "peak": memory(parts.rows, 1),  # running maximum
        "total": memory(parts.rows, 1),  # running sum of the softmax weights
        "top": memory(parts.rows, 1),  # maxima of this tile's scores, then the rescale factor
        "limits": memory(plan.rows, parts.tile),  # NEVER where a row must not look, else infinite
        "scales": memory(*scales),  # [S/128 * C, 128]: value scales in lane order
        "lows": memory(*scales),  # value minima, less the offset of the codes
        "factors": memory(
            spread, rank
        ),  # [8 * chunks, R]: key scales of the 8 rows that repeat in a chunk
        "zeros": memory(spread, rank),  # key minima likewise, less the offset of the codes
        "products": memory(parts.tile, plan.lanes),  # [S, W]: latents times up-projection
        "scores": memory(parts.rows, parts.tile),  # scores, then softmax weights
        "latents": memory(parts.tile, rank, dtype=jnp.bfloat16),  # [S, R]: of the keys
    }
