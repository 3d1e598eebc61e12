"""Keys stored before RoPE in the TPU decode-attention kernel: scores without rotating a key twice.

With R(p) the rotation to position p, q a rotated query, k_t the key at position p_0 + t of a block that begins at p_0,
and x~ the half-swapped x (x~_i = x_{i+D/2}, x~_{i+D/2} = -x_i):

    y      = R(-p_0) q = q cos(p_0) + q~ sin(p_0)        y~ = q~ cos(p_0) - q sin(p_0)
    q . R(p_0 + t) k_t = y . R(t) k_t = sum_i k_ti (cos(t)_i y_i + sin(t)_i y~_i)

so that the query turns once per block, and cos(t), sin(t) are one table for all blocks and heads. Keys (`keys`) are
multiplied by the table's cos and by its sin, and meet [y | y~] in one product of 2D lanes: in float32 where the vector
unit has no bfloat16 (`Plan.wide`), else in bfloat16 throughout.

Angles are rounded to float32 per position elsewhere and per block here: they differ by what float32 resolves at p.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvqjax.pallas_kernels.tpu.columns import Place
from kvqjax.pallas_kernels.tpu.keys import halves, packed, slab_keys
from kvqjax.pallas_kernels.tpu.plan import LANES, Plan

__all__ = ["angles", "rotated", "swapped", "table", "turned", "turns"]

DIGIT = 10  # bits of the lower digit of a position


def swapped(q: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """Return q~: a head's halves exchanged, the second negated."""
    first, second = jnp.split(q, 2, axis=-1)
    return jnp.concatenate([second, -first], axis=-1)


def _across(pairs, plan) -> np.ndarray:
    """Spread a number per pair of channels over the lanes of a lane group, [D/2] -> [1, W]: a head's pairs twice, one
    head after the other."""
    return np.tile(np.asarray(pairs), 2 * plan.shared)[None]


def table(plan: Plan) -> Float[Array, "block C"]:
    """Return cos | sin (C = 2W) of every token of a block, counted from its first, in lane order. As float32 (`wide`)
    the tokens of a product that lie in lower halves of words come first: `rotated` takes them apart."""
    order = plan.order
    if plan.wide:  # a word has the tokens of two consecutive places: the even ones in lower halves
        order = order.reshape(-1, plan.column // 2, 2).swapaxes(1, 2).reshape(-1)
    angles = order[:, None] * _across(plan.frequencies, plan)
    cells = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    return jnp.asarray(cells, jnp.float32 if plan.wide else jnp.bfloat16)


def angles(positions: Int[Array, " n"], rates: np.ndarray) -> Float[Array, "n C"]:
    """Multiply positions by rates [C], modulo full turns. A position is split into two digits, because float32 resolves
    the angle of position 2^19 to no more than 2^-5."""
    high, low = (x[:, None].astype(jnp.float32) for x in (positions >> DIGIT, positions & (1 << DIGIT) - 1))
    # The upper digit's turn is reduced on the host, in float64, where no digit is lost.
    turn = (1 << DIGIT) * rates % (2 * np.pi)
    return high * turn[None].astype(np.float32) + low * rates[None].astype(np.float32)


def turns(positions: Int[Array, " n"], plan) -> Float[Array, "tiles rows 128"]:
    """Return cos | sin of every block's first position, 128 lanes a row. Raise ValueError unless blocks are
    contiguous."""
    stretch = plan.slots // len(positions)
    if stretch % plan.block:
        raise ValueError(f"positions of every {stretch} tokens; this kernel takes {plan.block} in a row")
    # `positions` has the first token of every stretch. Its blocks follow it in a row.
    first = positions[:, None] + jnp.arange(0, stretch, plan.block, dtype=positions.dtype)[None]
    turn = angles(first.reshape(-1), _across(plan.frequencies, plan)[0])
    cells = jnp.concatenate([jnp.cos(turn), jnp.sin(turn)], axis=1)
    # The last tile may reach beyond the last block. What stands there is never read.
    cells = jnp.pad(cells, ((0, plan.tiles * plan.blocks - len(cells)), (0, 0)))
    return cells.reshape(plan.tiles, -1, LANES)


def turned(refs, plan, group, index):
    """Rotate the queries of a lane group back to the first position of a block: y and y~, [M, W] float32 each."""
    # The queries come with q~ beside them, so that no lanes are exchanged here.
    parts = [pl.ds(i * plan.lanes, plan.lanes) for i in range(2)]
    q, partner = (refs.queries[0, group, :, part].astype(jnp.float32) for part in parts)
    # Of each block `turns` has the rows of cos, and below them those of sin.
    columns = plan.lanes // LANES
    rows = ([refs.turns[0, pl.ds((2 * index + i) * columns + n, 1)] for n in range(columns)] for i in range(2))
    cos, sin = (jnp.broadcast_to(jnp.concatenate(row, axis=1), q.shape) for row in rows)
    return q * cos + partner * sin, partner * cos - q * sin


def rotated(codes, refs, plan: Plan, place: Place, index, i: int):
    """Turn the codes of column `i` of a block, [column, W], into keys times cos and times sin, [column, 2W]
    bfloat16."""
    cells = refs.table[i * plan.column : (i + 1) * plan.column]
    parts = [slice(0, plan.lanes), slice(plan.lanes, 2 * plan.lanes)]
    if not plan.wide:
        keys = slab_keys(codes, refs, plan, place, index, i)
        return jnp.concatenate([keys * cells[:, part] for part in parts], axis=1)
    # Products in float32 are of the tokens of one half each. Only then are the halves words again.
    low, high = halves(codes, refs, plan, place, index, i)
    first, second = jnp.split(cells, 2)
    return jnp.concatenate([packed(low * first[:, part], high * second[:, part]) for part in parts], axis=1)
