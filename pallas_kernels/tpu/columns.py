"""What the steps of the TPU decode-attention kernel share: codes of a column of tokens, and rows across lanes."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvqjax.ops.layout import split_bits
from kvqjax.pallas_kernels.tpu import signposts as tpu_signposts
from kvqjax.pallas_kernels.tpu import unpack as tpu_unpack
from kvqjax.pallas_kernels.tpu.plan import LANES, Plan

__all__ = [
    "Place",
    "columns",
    "dot",
    "each",
    "filled",
    "groups_met",
    "key_rows",
    "lane_wise",
    "load_row",
    "of_heads",
    "owners",
    "pick",
    "place_of",
    "quotient",
    "some",
    "within",
    "words_of",
]


class Place(NamedTuple):
    """A lane group, its lanes, and the first of its columns of 128 lanes."""

    group: Any
    lanes: Any
    column: Any


def place_of(group, plan: Plan) -> Place:
    lanes = pl.ds(pl.multiple_of(group * plan.lanes, LANES), plan.lanes)
    return Place(group, lanes, group * (plan.lanes // LANES))


def dot(a, b, axis: int):
    """a @ b (axis 0) or a @ b.T (axis 1), float32 sums."""
    return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def quotient(x, divisor: int):
    """x // divisor of natural numbers; // itself asks for the sign, whose lowering asks for a TPU at hand."""
    return jax.lax.div(x, jnp.full_like(x, divisor))


def lane_wise(operation, x):
    """[M, S] to [M, 128]: columns of 128 lanes put together by `operation`."""
    return functools.reduce(operation, (x[:, lane : lane + LANES] for lane in range(0, x.shape[1], LANES)))


def within(x, first, limit: int, axis: int):
    """`x`, zero where `first` + the index along `axis` reaches `limit`: what lies beyond an array must not reach a
    product, 0 * NaN being NaN."""
    index = first + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where(index < limit, x, jnp.zeros_like(x))


def some(number, count: int):
    """`count` rows, or lanes, or tokens, from a multiple of it on: number `number` of such stretches, which may be
    traced."""
    return pl.ds(number * count if isinstance(number, int) else pl.multiple_of(number * count, count), count)


def each(count: int, step) -> None:
    """A loop: a step of its own keeps its registers to itself."""
    if count == 1:
        step(0)
    else:
        jax.lax.fori_loop(0, count, lambda number, _: step(number), None)


def words_of(words, bits: int, place: Place, index, plan: Plan) -> list:
    """The words of block `index` of the tile, of every plane set."""
    stored = []
    for ref, part in zip(words, split_bits(bits), strict=True):
        rows = plan.block * part // 32
        stored.append(ref[0, 0, some(index, rows), place.lanes])
    return stored


def columns(words, signposts, bits: int, place: Place, index, plan: Plan, mixed: bool):
    """Codes of block `index` of the tile, [column, W] at a time: narrow integers if `mixed`, else bfloat16."""
    stored = words_of(words, bits, place, index, plan)
    if signposts is None:
        pieces = tpu_unpack.chunks(stored, bits, plan.base, plan.ways)
    else:
        pieces = tpu_signposts.chunks(stored, bits, signposts, plan.paired)
    waiting = []
    for piece in pieces:
        waiting.append(piece if mixed else piece.astype(jnp.bfloat16))
        if len(waiting) * piece.shape[0] == plan.column:
            yield jnp.concatenate(waiting) if len(waiting) > 1 else waiting[0]
            waiting = []


def groups_met(plan: Plan, i: int) -> list[int]:
    """Groups that tokens of column `i` of a block belong to, counted from the block's first."""
    return sorted({int(token) // plan.group for token in plan.order[i * plan.column : (i + 1) * plan.column]})


def owners(refs, plan: Plan, i: int):
    """Group of every token of column `i` of a block, counted from the block's first, [1, column]."""
    return quotient(refs.order[:, i * plan.column : (i + 1) * plan.column], plan.group)


def pick(pieces: list, owner, names: list[int]):
    """For every lane the piece of its own group: `owner` holds one of `names` per lane."""
    chosen = pieces[0]
    for piece, name in zip(pieces[1:], names[1:], strict=True):
        chosen = jnp.where(owner == name, piece, chosen)
    return chosen


def load_row(ref, row, rows: int, column, width: int):
    """A row of `rows`, `width` lanes from column `column` of 128 on, of an array written as columns of 128 lanes one
    below the other: [8, width]. 128 lanes at a time, the load itself fills all rows of a register."""
    pieces = [ref[pl.ds((column + i) * rows + row, 1), :] for i in range(width // LANES)]
    return jnp.concatenate([jnp.broadcast_to(piece, (8, LANES)) for piece in pieces], axis=1)


def key_rows(refs, plan: Plan, lane_group, part) -> tuple:
    """Factors and minima of the keys of group `part` of the tile in a lane group, on the query rows: [M, W] twice."""
    row, column = part if plan.spec.key_group else 0, lane_group * (plan.lanes // LANES)
    rows = (load_row(ref, row, plan.key_rows, column, plan.lanes) for ref in (refs.factors, refs.zeros))
    return tuple(filled(x, plan) for x in rows)


def of_heads(ref, plan: Plan, numbers: list, count: int, column):
    """A row for each head of a lane group, of `count` rows that stand for a token, on the rows of its queries:
    [M, S]. `column` of 128 tokens is the first; equal rows need one number alone."""
    heads = [load_row(ref, number, count, column, plan.column) for number in numbers]
    row = jax.lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0)
    chosen = filled(heads[0], plan)
    for head, own in enumerate(heads[1:], 1):
        chosen = jnp.where(row >= head * plan.rows_per_head, filled(own, plan), chosen)
    return chosen


def filled(rows, plan: Plan):
    """[8, S] as often as it takes to fill the query rows [M, S]."""
    return jnp.concatenate([rows] * (plan.rows // 8))
