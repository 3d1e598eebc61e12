"""Scores of keys that are stored before RoPE, in the TPU decode-attention kernel.

R(p) is the rotation to position p. It turns the pairs of channels (i, i + D/2) of a head. q is a
query that is rotated already. k_t is the key at position p_0 + t of a block that begins at p_0. x~
is the half-swapped x: x~_i = x_{i+D/2}, x~_{i+D/2} = -x_i.

    y      = R(-p_0) q = q cos(p_0) + q~ sin(p_0)        y~ = q~ cos(p_0) - q sin(p_0)
    q . R(p_0 + t) k_t = y . R(t) k_t = sum_i k_ti (cos(t)_i y_i + sin(t)_i y~_i)

The query turns once per block (`turned`). All blocks and heads have the same table of cos(t) and
sin(t) (`table`). The decoded keys of `keys` are multiplied by the table's cos and by its sin
(`rotated`). Both products side by side meet [y | y~] in one matrix product of depth 2W, W being the
lanes of a lane group.

The multiplications by cos and sin are in float32 where the vector unit has no bfloat16
(`Plan.wide`), else in bfloat16.

The plain path rounds an angle to float32 at every position, this kernel only at every block's first
position. Angles differ by what float32 resolves at position p.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvqjax.pallas_kernels.tpu.columns import Place
from kvqjax.pallas_kernels.tpu.keys import halves, packed, slab_keys
from kvqjax.pallas_kernels.tpu.plan import LANES, Plan

DIGIT = 10  # bits of a position's lower digit; the upper digit of positions below 2^20 has no more


def swapped(q: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """Make the half-swapped q~ of queries.

    Args:
        q: Vectors of one head each.

    Returns:
        q~: second half of q, then its first half negated."""
    first, second = jnp.split(q, 2, axis=-1)
    return jnp.concatenate([second, -first], axis=-1)


def _across(pairs, plan) -> np.ndarray:
    """Spread a number per pair of channels, [D/2], over the lanes of a lane group, [1, W].

    The numbers of a head stand twice side by side, since channels i and i + D/2 are a pair. Heads
    follow each other."""
    return np.tile(np.asarray(pairs), 2 * plan.shared)[None]


def table(plan: Plan) -> Float[Array, "block C"]:
    """Make the table by which `rotated` multiplies keys.

    Returns:
        cos | sin (C = 2W) of the offset of every token of a block from the block's first token.
        Tokens come in lane order; in float32 (`Plan.wide`) each column has the tokens in lower
        halves of words first, then those in upper halves."""
    order = plan.order
    # Two bfloat16 numbers at consecutive places share a word: the even place is its lower half.
    # `rotated` multiplies the two halves apart, and so reads each half's rows of the table as one
    # slice.
    if plan.wide:
        order = order.reshape(-1, plan.column // 2, 2).swapaxes(1, 2).reshape(-1)
    angles = order[:, None] * _across(plan.frequencies, plan)
    cells = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    return jnp.asarray(cells, jnp.float32 if plan.wide else jnp.bfloat16)


def angles(positions: Int[Array, " n"], rates: np.ndarray) -> Float[Array, "n C"]:
    """Multiply positions by rates, modulo full turns.

    A position is split into two digits of `DIGIT` bits, because float32 resolves the angle of
    position 2^19 to no more than 2^-5.

    Args:
        rates: Angle per position of each of C lanes, [C] float64, in radians.

    Returns:
        Angles in radians, which equal position times rate but for full turns."""
    high = positions >> DIGIT
    low = positions & (1 << DIGIT) - 1
    high = high[:, None].astype(jnp.float32)
    low = low[:, None].astype(jnp.float32)
    # The turn of 2^DIGIT positions is reduced to less than a full turn on the host, in float64,
    # which loses no digit.
    turn = (1 << DIGIT) * rates % (2 * np.pi)
    of_high = turn[None].astype(np.float32)
    of_low = rates[None].astype(np.float32)
    return high * of_high + low * of_low


def turns(positions: Int[Array, " n"], plan) -> Float[Array, "tiles rows 128"]:
    """Make the rotations by which `turned` turns queries back.

    Args:
        positions: Position of the first token of every stretch. The body is cut into n equal
            stretches, and the tokens of a stretch have consecutive positions.

    Returns:
        cos | sin of every block's first position, for all blocks of a tile. Each block has W/128
        rows of cos, then as many of sin.

    Raises:
        ValueError: A stretch is not whole blocks, so that the positions of a block may not be
        consecutive."""
    stretch = plan.slots // len(positions)
    if stretch % plan.block:
        raise ValueError(
            f"positions of every {stretch} tokens; this kernel takes {plan.block} in a row"
        )
    # The first position of every block, [n, blocks of a stretch].
    first = positions[:, None] + jnp.arange(0, stretch, plan.block, dtype=positions.dtype)[None]
    turn = angles(first.reshape(-1), _across(plan.frequencies, plan)[0])
    cells = jnp.concatenate([jnp.cos(turn), jnp.sin(turn)], axis=1)
    # The last tile may reach beyond the last block. No query sees a token of the blocks that are
    # padded here.
    missing = plan.tiles * plan.blocks - len(cells)
    cells = jnp.pad(cells, ((0, missing), (0, 0)))
    return cells.reshape(plan.tiles, -1, LANES)


def turned(refs, plan, group, index):
    """Rotate the queries of a lane group back to the first position of a block.

    Args:
        refs: The kernel's references, `queries` [1, P, M, 2W] (q | q~) and `turns` [1, rows, 128]
            among them.
        index: Number of the block in its tile.

    Returns:
        y and y~, [M, W] float32 each."""
    # q~ is stored beside q. Swapping halves here would move numbers between lanes.
    q = refs.queries[0, group, :, pl.ds(0, plan.lanes)].astype(jnp.float32)
    partner = refs.queries[0, group, :, pl.ds(plan.lanes, plan.lanes)].astype(jnp.float32)
    columns = plan.lanes // LANES

    def of_block(i: int):
        """Load the cos (`i` 0) or sin (1) of block `index`, which has `columns` rows of each."""
        pieces = []
        for n in range(columns):
            row = (2 * index + i) * columns + n
            pieces.append(refs.turns[0, pl.ds(row, 1)])
        return jnp.broadcast_to(jnp.concatenate(pieces, axis=1), q.shape)

    cos = of_block(0)
    sin = of_block(1)
    return q * cos + partner * sin, partner * cos - q * sin


def rotated(codes, refs, plan: Plan, place: Place, index, i: int):
    """Turn the codes of a column into keys times cos and times sin.

    Args:
        codes: Codes of the column, [column, W].
        refs: The kernel's references, the `table` of cos | sin among them.
        index: Number of the block in its tile.
        i: Number of the column in its block.

    Returns:
        keys * cos | keys * sin, [column, 2W] bfloat16."""
    cells = refs.table[i * plan.column : (i + 1) * plan.column]
    parts = [slice(0, plan.lanes), slice(plan.lanes, 2 * plan.lanes)]
    if not plan.wide:
        keys = slab_keys(codes, refs, plan, place, index, i)
        return jnp.concatenate([keys * cells[:, part] for part in parts], axis=1)
    # A word of two bfloat16 keys is unpacked to two float32 arrays, one per half. Each is
    # multiplied by its own rows of the table. Both are then packed into words again.
    low, high = halves(codes, refs, plan, place, index, i)
    first, second = jnp.split(cells, 2)
    turned_keys = [packed(low * first[:, part], high * second[:, part]) for part in parts]
    return jnp.concatenate(turned_keys, axis=1)
