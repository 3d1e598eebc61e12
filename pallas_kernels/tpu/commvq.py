"""Decode attention on CommVQ's codes as a Pallas TPU kernel: codebook rows are summed by products
with one-hot columns that never leave the chip.

The grid is (row, tile). Per tile of S tokens, with tokens on the lanes, the levels of all keys are
unpacked once. Then for each KV head

    K^T = matrix @ one-hot columns          on the matrix unit, [D, S], float32 sums over 2R levels a token
    k   = K * cos + swap(K) * sin           cos and sin of offsets in a tile: the same for every tile
    scores = prescale * (q . k)             q: the query rotated back by the tile's first position

After the softmax of all query heads, out = sum_t p_t gain_t bits_t.

The matrix unit holds one operand of a product still while the other one passes by. It holds the
one-hot columns still, so that the codebook passes by once for 256 tokens. One-hot columns are made
as halves of 32-bit words: one comparison and one choice make sixteen levels of 128 tokens.

Codebook rows are rounded to bfloat16, so a key is off by 2^-9 of the sum of its rows' sizes at
most. Key and query are rounded once more before they are multiplied."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvqjax.ops.attention import Partial
from kvqjax.ops.packing.base import PLANE, split_bits
from kvqjax.pallas_kernels.commvq import CommVQBody, CommVQSpec
from kvqjax.pallas_kernels.packed import row_slots
from kvqjax.pallas_kernels.tpu.call import (
    Operand,
    by_row,
    constant,
    fetched,
    invoke,
    lies_at,
    memory,
)
from kvqjax.pallas_kernels.tpu.commvq_kernel import kernel
from kvqjax.pallas_kernels.tpu.commvq_plan import CommVQPlan, plan_commvq
from kvqjax.pallas_kernels.tpu.plan import LANES, LOG2E
from kvqjax.pallas_kernels.tpu.rope import angles, swapped
from kvqjax.pallas_kernels.tpu.rows import collect_groups, row_bounds, tile_ends


def packed_attention(
    q: Float[Array, "B T H D"],
    body: CommVQBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: CommVQSpec,
    *,
    pages: Int[Array, "B N"] | None = None,
    interpret: object = False,
) -> Partial:
    """Return the means of gain * bits [B, T, H, N] under attention to the decoded keys, and the
    log-sum-exp. Query t of row b sees body tokens start[b, t] <= s < stop[b, t]. `q` carries its
    rotation and not yet the D^-1/2. Queries, keys and codebook are rounded to bfloat16 before they
    are multiplied."""
    slots, group = row_slots(body, pages), q.shape[2] // spec.kv_heads
    plan = plan_commvq(spec, slots, slots // len(body.positions), q.shape[1] * group)
    rows, width = plan.groups * plan.rows, spec.value_width
    out, lse = invoke(
        kernel,
        plan,
        (q.shape[0], plan.tiles),
        layer,
        tile_ends(start, stop, plan.tile, plan.slots, pages),
        _operands(q, row_bounds(start, stop, plan, group), body, plan),
        ((rows, width), (rows, 1)),
        _scratch(plan),
        name=f"packed_attention_commvq_k{spec.bits}v{width // (spec.kv_heads * spec.head_dim)}_{plan.tile}",
        interpret=interpret,
    )
    return collect_groups(out, lse, q.shape[1], plan)


def _queries(q, positions, plan: CommVQPlan) -> Float[Array, "B tiles P M W"]:
    """Scale the queries, rotate them back by the first position of every tile, and lay out those of
    a group of heads: each in its own head's lanes, zero elsewhere."""
    batch, length, count, dim = q.shape
    tiles = plan.slots // len(positions) // plan.tile
    first = (positions[:, None] + jnp.arange(tiles)[None] * plan.tile).reshape(-1)
    cos, sin = (jnp.tile(x, (1, 2))[None, :, None, None] for x in _cos_sin(first, plan))
    q = (q.astype(jnp.float32) * (LOG2E * dim**-0.5 * plan.spec.rope.factor))[:, None]
    # Only these queries depend on a tile's position: all tiles share one table for keys.
    q = (q * cos + swapped(q) * sin).astype(jnp.bfloat16)  # [B, tiles, T, H, D]
    q = q.reshape(
        batch, plan.tiles, length, plan.groups, plan.shared, count // plan.spec.kv_heads, dim
    )
    q = q.transpose(0, 1, 3, 4, 2, 5, 6)  # [B, tiles, P, shared, T, G, D]
    # A row is put in the lanes of all heads of its group, and kept in those of its own head only.
    head_mask = jnp.eye(plan.shared, dtype=q.dtype).reshape(
        1, 1, 1, plan.shared, 1, 1, plan.shared, 1
    )
    rows = (q[..., None, :] * head_mask).reshape(batch, plan.tiles, plan.groups, plan.used, -1)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, plan.rows - plan.used), (0, 0)))


def _cos_sin(positions, plan: CommVQPlan) -> tuple:
    """Return cosine and sine of every pair at n positions, [n, D/2] float32 each."""
    turn = angles(positions, np.asarray(plan.spec.rope.frequencies, np.float64))
    return jnp.cos(turn), jnp.sin(turn)


def _operands(q, bounds, body: CommVQBody, plan: CommVQPlan) -> dict[str, Operand | None]:
    """Declare what the kernel reads. P groups of heads, M query rows of a group, W its channels, S
    tokens of the tile, K KV heads of D channels, R rounds of V levels, N bits of values."""

    stored = body.slots // plan.tile  # tiles of a row of the arrays, or of a page

    # In what follows b and j are the row and the tile of a grid step.
    def place(b, j, ends):
        """Find (row of the arrays, tile) of the tile to fetch."""
        return lies_at(b, fetched(b, j, ends), ends, stored)

    def columns(array):
        """Make the spec of words on the lanes. A block of 128 words may hold several tiles."""
        lanes = min(LANES, array.shape[3])
        tiles = lanes * stored // array.shape[3]

        def index(b, j, layer, ends):
            row, tile = place(b, j, ends)
            return layer[0], row, 0, jax.lax.div(tile, tiles)

        return pl.BlockSpec((1, 1, array.shape[2], lanes), index)

    def on_lanes(b, j, layer, ends):
        """Choose the block of an array with one number for each token."""
        row, tile = place(b, j, ends)
        return layer[0], row, 0, tile

    queries = _queries(q, body.positions, plan)
    order = jnp.asarray(plan.order.reshape(1, -1), jnp.int32)
    cos, sin = _cos_sin(order[0], plan)
    query = pl.BlockSpec(
        (1, 1, *queries.shape[2:]), lambda b, j, layer, ends: (b, fetched(b, j, ends), 0, 0, 0)
    )
    token = pl.BlockSpec((1, 1, 1, plan.tile), on_lanes)
    bits = (1, 1, PLANE, plan.spec.value_width)
    bits = pl.BlockSpec(bits, lambda b, j, layer, ends: (layer[0], *place(b, j, ends), 0))
    return {
        # [1, 1, P, M, W] bf16, block-diagonal over the heads of a group, rotated back by the tile's
        # first position
        "queries": Operand(queries, query),
        "bounds": by_row(bounds),  # [1, M, 2] i32: first and last + 1 visible token of a row
        "order": constant(order),  # [1, S] i32: token of every lane
        # [3, 8, 128] i32: plane (of a column's four), row of words and column of every lane of a
        # tile
        "places": constant(jnp.asarray(plan.places, jnp.int32)),
        "cos": constant(cos.T),  # [D/2, S] f32 of every token's offset in the tile
        "sin": constant(sin.T),
        "matrix": constant(body.matrix),  # [K*D, 2R*V] bf16
        "key_codes": Operand(
            body.key_codes, tuple(map(columns, body.key_codes))
        ),  # words [1, 1, 2R*K, 128]
        "prescale": Operand(body.prescale, token),  # [1, 1, 1, S] u16
        "value_bits": Operand(body.value_bits, bits),  # words [1, 1, 32, N]
        "gain": Operand(body.gain, token),  # [1, 1, 1, S] u16
    }


def _scratch(plan: CommVQPlan) -> dict:
    """Declare working memory. P*M query rows, S tokens of the tile, K KV heads, R rounds."""
    rows, columns, sets = (
        plan.groups * plan.rows,
        plan.tile // LANES,
        len(split_bits(plan.spec.bits)),
    )
    levels = memory(columns * plan.key_rows, LANES, dtype=jnp.int32)
    return {
        "peak": memory(rows, 1),  # running maximum
        "total": memory(rows, 1),  # running sum of the softmax weights
        "top": memory(rows, 1),  # maxima of this tile's scores, then the rescale factor
        "limits": memory(plan.rows, plan.tile),  # NEVER where a row must not look, else infinite
        "sizes": memory(columns, LANES),  # prescale of every token
        "gains": memory(columns, LANES),
        "words": memory(
            sets, plan.key_rows, LANES, dtype=jnp.int32
        ),  # words of the key codes, planes in turn
        "pairs": levels,  # [S/128 * 2R*K, 128]: every level's word of a one-hot column
        "ones": levels,  # which of `ONES` it puts there
        "products": memory(
            plan.summands, plan.lanes, plan.tile
        ),  # summands of a group's keys before rotation
        "scores": memory(rows, plan.tile),  # scores, then softmax weights
        "weights": memory(rows, plan.tile, dtype=jnp.bfloat16),  # softmax weights times gains
    }
