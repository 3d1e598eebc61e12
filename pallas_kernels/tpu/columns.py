"""Share what the steps of the TPU kernels have in common: slices, loops, products, and the codes of a tile in columns.

A tile of tokens is worked off in blocks (where all arrays start afresh), a block in columns (the tokens of one
product)."""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvqjax.ops.packing.words import split_bits
from kvqjax.pallas_kernels.tpu import signposts as tpu_signposts
from kvqjax.pallas_kernels.tpu import unpack as tpu_unpack
from kvqjax.pallas_kernels.tpu.plan import LANES, Plan

__all__ = ["Place", "aligned", "columns", "dot", "filled", "groups_met", "key_rows", "lane_wise", "load_row", "loop"]
__all__ += ["of_heads", "owners", "pick", "place_of", "quotient", "words_of", "zero_beyond"]


class Place(NamedTuple):
    """A lane group: its number, the slice of its lanes, and the number of its first 128 lanes."""

    group: Any
    lanes: Any
    column: Any


def place_of(group, plan: Plan) -> Place:
    """Return the place of lane group number `group`, which may be traced."""
    lanes = pl.ds(pl.multiple_of(group * plan.lanes, LANES), plan.lanes)
    return Place(group, lanes, group * (plan.lanes // LANES))


def dot(a, b, axis: int):
    """Multiply a @ b (axis 0) or a @ b.T (axis 1) with float32 sums."""
    return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def quotient(x, divisor: int):
    """Divide natural numbers: x // divisor. The operator // also handles signs, and its lowering asks for a TPU at
    hand."""
    return jax.lax.div(x, jnp.full_like(x, divisor))


def lane_wise(operation, x):
    """Reduce [M, S] to [M, 128]: `operation` combines the columns of 128 lanes."""
    return functools.reduce(operation, (x[:, lane : lane + LANES] for lane in range(0, x.shape[1], LANES)))


def zero_beyond(x, first, limit: int, axis: int):
    """Return `x` with zeros where `first` + the index along `axis` reaches `limit`. What lies beyond an array must not
    reach a product, because 0 * NaN is NaN."""
    index = first + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where(index < limit, x, jnp.zeros_like(x))


def aligned(number, count: int):
    """Return the `number`-th aligned slice of length `count`; `number` may be traced."""
    return pl.ds(number * count if isinstance(number, int) else pl.multiple_of(number * count, count), count)


def loop(count: int, step) -> None:
    """Call `step(number)` for 0 to `count` - 1 in a loop of its own, which keeps its registers to itself."""
    jax.lax.fori_loop(0, count, lambda number, _: step(number), None)


def words_of(words, bits: int, place: Place, index, plan: Plan) -> list:
    """Load the words of block `index` of the tile in a lane group: one array [rows, W] for every plane set."""
    stored = []
    for ref, part in zip(words, split_bits(bits), strict=True):
        rows = plan.block * part // 32
        stored.append(ref[0, 0, aligned(index, rows), place.lanes])
    return stored


def columns(words, signposts, bits: int, place: Place, index, plan: Plan, mixed: bool):
    """Yield the codes of block `index` of the tile, [column, W] at a time: narrow integers if `mixed`, else bfloat16.
    With `signposts` the codes are replaced by the numbers they index."""
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
    """List the key groups that tokens of column `i` of a block belong to, counted from the block's first."""
    return sorted({int(token) // plan.group for token in plan.order[i * plan.column : (i + 1) * plan.column]})


def owners(refs, plan: Plan, i: int):
    """Return the key group of every token of column `i` of a block, counted from the block's first: [1, column]."""
    return quotient(refs.order[:, i * plan.column : (i + 1) * plan.column], plan.group)


def pick(pieces: list, owner, names: list[int]):
    """Choose for every lane the piece of its own group. `owner` holds one of `names` per lane; piece i is for
    names[i]."""
    chosen = pieces[0]
    for piece, name in zip(pieces[1:], names[1:], strict=True):
        chosen = jnp.where(owner == name, piece, chosen)
    return chosen


def load_row(ref, row, rows: int, column, width: int):
    """Load `width` lanes of row `row` of an array [rows, n], from column `column` of 128 lanes on, onto 8 equal rows:
    [8, width]. The array is stored as columns of 128 lanes, one below the other. Loading 128 lanes at a time fills all
    rows of a register for free."""
    pieces = [ref[pl.ds((column + i) * rows + row, 1), :] for i in range(width // LANES)]
    return jnp.concatenate([jnp.broadcast_to(piece, (8, LANES)) for piece in pieces], axis=1)


def key_rows(refs, plan: Plan, lane_group, part) -> tuple:
    """Load the scales and minima of key group `part` of the tile in a lane group, on all query rows: [M, W] twice."""
    row, column = part if plan.spec.key_group else 0, lane_group * (plan.lanes // LANES)
    rows = (load_row(ref, row, plan.key_rows, column, plan.lanes) for ref in (refs.factors, refs.zeros))
    return tuple(filled(x, plan) for x in rows)


def of_heads(ref, plan: Plan, numbers: Iterable, count: int, column):
    """Load a number per token for every head of a lane group, each onto the rows of its head's queries: [M, column].
    Head i takes row `numbers[i]` of `count`; a single number is for all heads. `column` is the number of the first 128
    tokens."""
    heads = [load_row(ref, number, count, column, plan.column) for number in numbers]
    row = jax.lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0)
    chosen = filled(heads[0], plan)
    for head, rows in enumerate(heads[1:], 1):
        chosen = jnp.where(row >= head * plan.rows_per_head, filled(rows, plan), chosen)
    return chosen


def filled(rows, plan: Plan):
    """Repeat [8, S] until it fills the query rows: [M, S]."""
    return jnp.concatenate([rows] * (plan.rows // 8))
