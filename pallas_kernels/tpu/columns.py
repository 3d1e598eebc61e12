"""Shared parts of the steps of TPU kernels: slices, loops, products, and the codes of a tile in
columns.

A tile of tokens is worked off in blocks, and a block in columns. At the first token of a block
words, key groups and lane order all begin anew. A column is the tokens of one product.

Shapes: M query rows of a lane group (a multiple of 8), W lanes of a lane group, S tokens of a tile.
Indices that may be traced have no annotation."""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvqjax.ops.packing.base import split_bits
from kvqjax.pallas_kernels.tpu import signposts as tpu_signposts
from kvqjax.pallas_kernels.tpu import unpack as tpu_unpack
from kvqjax.pallas_kernels.tpu.plan import LANES, Plan


class Place(NamedTuple):
    """The place of a lane group in an array of all channels.

    Attributes:
        group: Its number.
        lanes: The slice of its lanes.
        column: The number of its first 128 lanes, of arrays that are stored as columns of 128 lanes
        (`load_row`)."""

    group: Any
    lanes: Any
    column: Any


def place_of(group, plan: Plan) -> Place:
    """Return the place of lane group number `group`, which may be traced."""
    lanes = pl.ds(pl.multiple_of(group * plan.lanes, LANES), plan.lanes)
    return Place(group, lanes, group * (plan.lanes // LANES))


def dot(a, b, axis: int):
    """Multiply a @ b (axis 0) or a @ b.T (axis 1) with float32 sums."""
    return jax.lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32
    )


def quotient(x, divisor: int):
    """Divide natural numbers: x // divisor. The operator // would also handle signs, and its
    lowering works only where a TPU is attached, which ahead-of-time compilation does not have."""
    return jax.lax.div(x, jnp.full_like(x, divisor))


def lane_wise(operation, x):
    """Reduce [M, S] to [M, 128]: `operation` combines the columns of 128 lanes. Nothing moves
    between lanes; the caller reduces the 128 lanes once, at the end."""
    columns_of_lanes = (x[:, lane : lane + LANES] for lane in range(0, x.shape[1], LANES))
    return functools.reduce(operation, columns_of_lanes)


def zero_beyond(x, first, limit: int, axis: int):
    """Return `x` with zeros from index `limit` on. Index 0 of `x` along `axis` counts as index
    `first`.

    The last tile may reach beyond an array. What is read there must not reach a product, because 0
    * NaN is NaN."""
    index = first + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where(index < limit, x, jnp.zeros_like(x))


def aligned(number, count: int):
    """Return the slice of `count` entries that begins at entry `number` * `count`; `number` may be
    traced."""
    first = number * count
    if not isinstance(number, int):
        first = pl.multiple_of(first, count)  # the compiler must know that it is aligned
    return pl.ds(first, count)


def loop(count: int, step) -> None:
    """Call `step(number)` for 0 to `count` - 1 in a loop of the program. Unlike a Python loop it is
    not unrolled, so that the steps do not compete for registers."""
    jax.lax.fori_loop(0, count, lambda number, _: step(number), None)


def words_of(words, bits: int, place: Place, index, plan: Plan) -> list:
    """Load the words of block `index` of the tile in a lane group: one array [rows, W] for every
    plane set.

    Args:
        words: References [1, 1, rows of the tile, all lanes] uint32, one for every plane set.
        index: Number of the block in its tile."""
    stored = []
    for ref, part in zip(words, split_bits(bits), strict=True):
        rows = plan.block * part // 32  # a word of 32 bits holds codes of 32 / part tokens
        stored.append(ref[0, 0, aligned(index, rows), place.lanes])
    return stored


def columns(words, signposts, bits: int, place: Place, index, plan: Plan, mixed: bool):
    """Yield the codes of block `index` of the tile, one column [column, W] at a time.

    Args:
        words: As in `words_of`.
        signposts: None, or what the codes are replaced by: as `table` in `signposts.chunks`.
        index: Number of the block in its tile.
        mixed: True yields narrow integers as they are unpacked, False bfloat16."""
    stored = words_of(words, bits, place, index, plan)
    if signposts is None:
        pieces = tpu_unpack.chunks(stored, bits, plan.base, plan.ways)
    else:
        pieces = tpu_signposts.chunks(stored, bits, signposts, plan.paired)
    waiting = []  # pieces of a column that is not complete
    for piece in pieces:
        waiting.append(piece if mixed else piece.astype(jnp.bfloat16))
        if len(waiting) * piece.shape[0] == plan.column:
            yield jnp.concatenate(waiting) if len(waiting) > 1 else waiting[0]
            waiting = []


def groups_met(plan: Plan, i: int) -> list[int]:
    """List the key groups that tokens of column `i` of a block belong to, counted from the block's
    first."""
    tokens = plan.order[i * plan.column : (i + 1) * plan.column]
    return sorted({int(token) // plan.group for token in tokens})


def owners(refs, plan: Plan, i: int):
    """Return the key group of every token of column `i` of a block, counted from the block's first:
    [1, column]."""
    return quotient(refs.order[:, i * plan.column : (i + 1) * plan.column], plan.group)


def pick(pieces: list, owner, names: list[int]):
    """Choose for every lane the piece of its own group.

    Args:
        pieces: Arrays [M, lanes], or [M, 1].
        owner: Name of the group that each lane belongs to, [1, lanes].
        names: Name of each piece's group."""
    chosen = pieces[0]
    for piece, name in zip(pieces[1:], names[1:], strict=True):
        chosen = jnp.where(owner == name, piece, chosen)
    return chosen


def load_row(ref, row, rows: int, column, width: int):
    """Load a part of one row of an array onto the 8 rows of registers.

    The load broadcasts 128 lanes to all rows of a register for free. It needs the array [rows, n]
    to be stored as columns of 128 lanes, one below the other: [n/128 * rows, 128].

    Args:
        rows: How many rows the array has.
        column: Number of the first column of 128 lanes.
        width: How many lanes are loaded.

    Returns:
        [8, width], all rows equal."""
    pieces = [ref[pl.ds((column + i) * rows + row, 1), :] for i in range(width // LANES)]
    return jnp.concatenate([jnp.broadcast_to(piece, (8, LANES)) for piece in pieces], axis=1)


def key_rows(refs, plan: Plan, lane_group, part) -> tuple:
    """Load the scales and minima of key group `part` of the tile in a lane group, on all query
    rows: [M, W] twice."""
    row = part if plan.spec.key_group else 0  # without key groups one row serves all tokens
    column = lane_group * (plan.lanes // LANES)
    loaded = []
    for ref in (refs.factors, refs.zeros):
        rows = load_row(ref, row, plan.key_rows, column, plan.lanes)
        loaded.append(filled(rows, plan))
    return tuple(loaded)


def of_heads(ref, plan: Plan, numbers: Iterable, count: int, column):
    """Load a number per token for every head of a lane group, each onto the rows of its head's
    queries: [M, column].

    Args:
        ref: Reference to an array with `count` numbers a token, stored as in `load_row`.
        numbers: Which of the `count` numbers each head takes. A single one is for all heads.
        count: Numbers of a token.
        column: Number of the first 128 tokens."""
    heads = [load_row(ref, number, count, column, plan.column) for number in numbers]
    row = jax.lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0)
    chosen = filled(heads[0], plan)
    for head, rows in enumerate(heads[1:], 1):
        chosen = jnp.where(row >= head * plan.rows_per_head, filled(rows, plan), chosen)
    return chosen


def filled(rows, plan: Plan):
    """Repeat [8, n] until it fills the query rows: [M, n]."""
    return jnp.concatenate([rows] * (plan.rows // 8))
