"""Decode attention on HIGGS bodies as a Pallas TPU kernel (see `higgs_plan` for the factors of the
transform).

The kernel's grid is (row, tile). A code stands for a pair of channels and names a point of the
codec's grid, which has two numbers. The points lie along the lanes, as words of 32 bits that hold
both numbers as bfloat16. A gather looks codes up. It gives words [tokens, pairs]. Read as bfloat16
these are rows of first and of second numbers in turn. They are left in this order. Queries
therefore have rows for the first and for the second channels of pairs, and a token has two lanes of
scores and of softmax weights. Per tile, with points y, scales s and softmax weights p:

    z      = y H_(D/2)                             on the matrix unit, all heads
    scores = s_t (q' . z cos + q'~ . z sin)        cos and sin of offsets in a chunk; q' is the query rotated back by
                                                   the chunk's first position, with the signs of H_n
    out    = sum_t p_t s_t y_t                     transformed once, after the sum over all tokens
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt
from scipy.linalg import hadamard

from kvqjax.ops.attention import Partial
from kvqjax.ops.packing.base import to_bits
from kvqjax.pallas_kernels.higgs import HiggsBody, HiggsSpec
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
from kvqjax.pallas_kernels.tpu.higgs_kernel import kernel
from kvqjax.pallas_kernels.tpu.higgs_plan import HiggsPlan, plan_higgs
from kvqjax.pallas_kernels.tpu.plan import LANES, LOG2E
from kvqjax.pallas_kernels.tpu.rope import angles, swapped
from kvqjax.pallas_kernels.tpu.rows import by_head, row_bounds, tile_ends
from kvqjax.pallas_kernels.tpu.tile import NEVER


def packed_attention(
    q: Float[Array, "B T H D"],
    body: HiggsBody,
    layer: Int[Array, ""] | int,
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    spec: HiggsSpec,
    *,
    tile: int | None = None,
    pages: Int[Array, "B N"] | None = None,
    interpret: object = False,
) -> Partial:
    """Attend as `reference.packed_attention` does. Queries, grids and transformed keys are rounded
    to bfloat16 before they are multiplied. `tile` is the number of tokens of a tile; None: the
    usual one. `pages` are those of each row, where the body's rows are pages."""
    slots, group = row_slots(body, pages), q.shape[2] // spec.kv_heads
    plan = plan_higgs(spec, slots, slots // len(body.positions), q.shape[1] * group, tile)
    ends = tile_ends(start, stop, plan.tile, plan.slots, pages)
    out, lse = invoke(
        kernel,
        plan,
        (q.shape[0], plan.tiles),
        layer,
        ends,
        _operands(q, row_bounds(start, stop, plan, group), body, plan),
        ((2 * plan.rows, plan.lanes), (plan.rows, 1)),
        _scratch(plan),
        name=f"packed_attention_higgs_k{spec.key_bits}v{spec.value_bits}_{plan.tile}",
        interpret=interpret,
    )
    return _collect(out, lse, q.shape, plan)


def _queries(q, plan: HiggsPlan) -> Float[Array, "B rows lanes"]:
    """Scale queries and lay them out as q | q~: rows for the first channels of pairs, then rows for
    the second ones. A head's pairs are repeated for every head that shares 128 lanes. Which heads a
    row's query meets, and with which signs, `_maps` says."""
    batch, length, _, dim = q.shape
    q = (
        q.astype(jnp.float32)
        .reshape(batch, length, plan.spec.kv_heads, -1, dim)
        .transpose(0, 2, 1, 3, 4)
    )
    # The transform's matrix is not normalised: H H^T = h I for groups of h channels.
    q = q.reshape(batch, plan.used, dim) * (LOG2E * dim**-0.5 / plan.spec.group)

    def rows(x):
        """Lay out vectors [B, used, D] as [B, 2M, 128]."""
        x = jnp.pad(x, ((0, 0), (0, plan.rows - plan.used), (0, 0)))
        x = x.reshape(batch, plan.rows, plan.pairs, 2).transpose(0, 3, 1, 2)
        x = x.reshape(batch, 2 * plan.rows, plan.pairs)
        return jnp.tile(x, (1, 1, LANES // plan.pairs))

    return jnp.concatenate([rows(q), rows(swapped(q))], axis=-1)


def _rates(plan: HiggsPlan) -> np.ndarray:
    """Return the angle per position of the first, then of the second channels of the pairs on 128
    lanes, [2 * 128]."""
    rates = np.tile(np.asarray(plan.spec.rope.frequencies, np.float64), 2).reshape(plan.pairs, 2)
    return np.tile(rates.T, (1, LANES // plan.pairs)).reshape(-1)


def _rope_inputs(body: HiggsBody, plan: HiggsPlan) -> tuple:
    """Make the rotations of queries and of keys.

    Returns:
        (cosine and sine of every chunk's first position, [tiles, chunks * 4, 128]: of first
        channels, then of second ones; cos | sin of every offset in a chunk, [2C, 2 * 128])."""
    positions, rates = body.positions, _rates(plan)
    chunks = plan.slots // len(positions) // plan.chunk
    first = (positions[:, None] + jnp.arange(chunks)[None] * plan.chunk).reshape(-1)
    # The last tile may reach beyond.
    first = jnp.pad(first, (0, plan.tiles * (plan.tile // plan.chunk) - first.size))
    turn = angles(first, rates)
    turns = jnp.stack([jnp.cos(turn), jnp.sin(turn)], 1) * plan.spec.rope.factor
    turn = np.arange(plan.chunk)[:, None] * rates[None]
    tables = [f(turn).reshape(2 * plan.chunk, LANES) for f in (np.cos, np.sin)]
    table = jnp.asarray(np.concatenate(tables, 1), jnp.float32)
    if not plan.wide:  # bfloat16: the rows of both channels of a token are the halves of words
        table = _halves(table[0::2], table[1::2])
    return turns.reshape(plan.tiles, -1, LANES), table


def _maps(body: HiggsBody, plan: HiggsPlan) -> tuple:
    """Make what is the same for all tiles.

    Returns:
        (the signs with which query rows meet every 128 codes, [N, M, 128]; the transform within
        heads; the matrix that gives a token's scales to its two lanes; the keys' grid as words; the
        values' grid as words)."""
    # [codes, heads]; 0 for the heads of other groups
    signs = np.repeat(plan.between, plan.pairs, axis=0)
    rows_per_head = plan.used // plan.spec.kv_heads
    signs = np.repeat(signs, rows_per_head, axis=1).reshape(plan.parts, LANES, plan.used)
    signs = np.pad(signs.transpose(0, 2, 1), ((0, 0), (0, plan.rows - plan.used), (0, 0)))
    onehot = jnp.asarray(np.repeat(np.eye(LANES), 2, axis=1), jnp.bfloat16)
    words = [pair_words(turned_grid(grid)) for grid in (body.key_grid, body.value_grid)]
    return (
        jnp.asarray(signs, jnp.float32),
        jnp.asarray(plan.transform, jnp.bfloat16),
        onehot,
        *words,
    )


def pair_words(pairs: Float[Array, "n 2"]) -> UInt[Array, "8 _"]:
    """Write pairs of numbers, rounded to bfloat16, as words [8, 128 or 256]: low halves, then high
    ones."""
    row = jnp.pad(_halves(pairs[:, 0], pairs[:, 1]), (0, -len(pairs) % LANES))
    return jnp.broadcast_to(row[None], (8, row.size))


def turned_grid(grid: Float[Array, "n 2"]) -> Float[Array, "n 2"]:
    """Return sum and difference of a point's numbers (H_2)."""
    first, second = grid[:, 0].astype(jnp.float32), grid[:, 1].astype(jnp.float32)
    return jnp.stack([first + second, first - second], axis=1)


def _halves(low, high) -> UInt[Array, "*S"]:
    """Write two arrays of bfloat16 numbers as the low and high halves of words."""
    low, high = (to_bits(x.astype(jnp.bfloat16)).astype(jnp.uint32) for x in (low, high))
    return low | (high << jnp.uint32(16))


def _collect(out, lse, shape: tuple[int, ...], plan: HiggsPlan) -> Partial:
    """Transform the summed values, take every head's own channels, and bring query rows back to [B,
    T, H].

    Args:
        out: Sums under the softmax weights, [B, 2M, N*128]: first channels, then second ones.
        lse: Log-sum-exps, [B, M, 1].
        shape: That of the queries, [B, T, H, D]."""
    (batch, length, _, dim), spec = shape, plan.spec
    heads, groups = spec.group // dim, spec.groups  # heads of a group
    lse = jnp.where(lse > NEVER / 2, lse, -jnp.inf)[:, : plan.used]
    out = out.reshape(batch, 2, plan.rows, groups, spec.group // 2)[:, :, : plan.used]
    # A row's own group, then of its transform the row's own head: [B, 2, group, head, row of a
    # head, group / 2]
    out = out.reshape(batch, 2, groups, heads, -1, groups, spec.group // 2)
    out = jnp.diagonal(out, axis1=2, axis2=5)  # [B, 2, head, row, group / 2, groups]
    # The part of the transform between pairs. H_2, within pairs, went into the grid.
    matrix = (
        jnp.asarray(hadamard(spec.group // 2), jnp.float32).reshape(heads, plan.pairs, -1)
        / spec.group
    )
    out = jnp.einsum("bchrng,hpn->bghrpc", out, matrix, precision=jax.lax.Precision.HIGHEST)
    out = by_head(out.reshape(batch, -1, dim), spec.kv_heads, length)
    return Partial(out, by_head(lse, spec.kv_heads, length)[..., 0])


def _operands(q, bounds, body: HiggsBody, plan: HiggsPlan) -> dict[str, Operand | None]:
    """Declare what the kernel reads. N columns of 128 codes, M query rows, S tokens of the tile, C
    of a chunk."""
    queries, (turns, table) = _queries(q, plan), _rope_inputs(body, plan)
    signs, transform, onehot, key_words, value_words = _maps(body, plan)
    return {
        "queries": by_row(queries),  # [1, 2M, 2*128] f32: q | q~, scaled, on every head's lanes
        "bounds": by_row(bounds),  # [1, M, 2] i32: first and last + 1 visible token of a row
        # [1, 4 * chunks, 128] f32: cosine of a chunk's first position for first and second
        # channels, then sine
        "turns": by_tile(turns),
        "table": constant(
            table
        ),  # [2C, 2*128] f32, or bf16 as words [C, 2*128]: cos | sin of a chunk's offsets
        "signs": constant(signs),  # [N, M, 128] f32
        "transform": constant(transform),  # [128, 128] bf16: the transform within heads
        "onehot": constant(onehot),  # [128, 256] bf16: gives a token's numbers to its two lanes
        "key_words": constant(
            key_words
        ),  # [8, 128 or 256] u32: the grid, a pair of numbers to a word
        "value_words": constant(value_words),
        # words [1, 1, rows, N*128], scales [1, 1, groups, S]
        "body": of_body(body.stored, plan, by_token=("key_scale", "value_scale")),
    }


def _scratch(plan: HiggsPlan) -> dict:
    """Declare working memory. M query rows, S tokens of the tile, C of a chunk."""
    rows, chunk, groups = plan.rows, 2 * plan.chunk, plan.spec.groups
    return {
        "peak": memory(rows, 1),  # running maximum
        "total": memory(rows, 1),  # running sum of the softmax weights
        "top": memory(rows, LANES),  # maxima of this tile's scores
        "key_scales": memory(groups, 2 * plan.tile),
        "value_scales": memory(groups, 2 * plan.tile),
        "scores": memory(rows, 2 * plan.tile),
        # [2M, 2C]: softmax weights of a chunk; zero where row and lane are of different channels
        "weights": memory(2 * rows, chunk, dtype=jnp.bfloat16),
        "words": memory(
            2, plan.chunk, plan.value_columns * LANES, dtype=jnp.uint32
        ),  # numbers of some columns, twice
        # [2C, 128]: a column of keys, transformed within heads
        "keys": memory(chunk, LANES, dtype=jnp.float32 if plan.wide else jnp.bfloat16),
        "products": memory(2 * rows, chunk),  # [2M, 2C]: of queries and the keys of a chunk so far
    }
