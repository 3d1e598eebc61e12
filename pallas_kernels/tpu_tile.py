"""What the TPU decode-attention kernel prepares once per tile of tokens, for all lane groups, and how it is read back.

Shapes as in `tpu_kernel`: P lane groups, M query rows of a lane group, W its lanes, S tokens of the tile, N key groups
of the tile, C rows of value scales.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from kvqjax.layout import from_bits, split_bits
from kvqjax.pallas_kernels.tpu_unpack import offset

__all__ = ["LANES", "LOG2E", "NEVER", "Refs", "dot", "load_row", "named", "prepare", "quotient"]

LANES = 128
LOG2E = float(np.log2(np.e))
NEVER = -1e30  # a masked score: finite, so that the difference of two of them is a number


class Refs(NamedTuple):
    queries: Any  # [1, P, M, W] bf16, block-diagonal over the heads of a lane group
    bounds: Any  # [1, M, 2] i32: first and last + 1 visible token of a row
    order: Any  # [1, block] i32: token of every lane
    onehot: Any  # [period, period] bf16: brings scales into lane order
    key_codes: tuple  # [1, 1, rows, P*W] u32 for each plane set
    key_scale: Any  # [1, 1, N, P*W]
    key_low: Any
    value_codes: tuple
    value_scale: Any  # [1, 1, C, S]
    value_low: Any
    out: Any  # [1, 1, P, M, W] f32, the accumulator as well
    lse: Any  # [1, 1, P, M, 1] f32
    peak: Any  # [P, M, 1] f32
    total: Any  # [P, M, 1] f32
    limits: Any  # [M, S] f32: NEVER where a row must not look, else infinite
    scales: Any  # [S/128 * C, 128] f32: value scales in lane order
    lows: Any  # [S/128 * C, 128] f32: value minima, less the offset of the codes
    factors: Any  # [P*W/128 * N, 128] f32: key scales times D^-1/2 log2(e)
    zeros: Any  # [P*W/128 * N, 128] f32: key minima times D^-1/2 log2(e), less the offset of the codes
    scores: Any  # [M, S] f32


def named(refs, plan) -> Refs:
    """The kernel's references by name; plane sets are tuples."""
    keys, values = len(split_bits(plan.spec.key_bits)), len(split_bits(plan.spec.value_bits))
    head, key, rest = refs[:4], refs[4 : 4 + keys], refs[4 + keys :]
    return Refs._make((*head, key, *rest[:2], rest[2 : 2 + values], *rest[2 + values :]))


def prepare(refs: Refs, plan, tile) -> None:
    """Write limits, scales and factors of tile number `tile`."""
    _write_limits(refs, plan, tile)
    _order_scales(refs, plan, tile)
    _fold_constants(refs, plan, tile)


def dot(a, b, axis: int):
    """a @ b (axis 0) or a @ b.T (axis 1), float32 sums."""
    return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def quotient(x, divisor: int):
    """x // divisor of natural numbers; // itself asks for the sign, whose lowering asks for a TPU at hand."""
    return jax.lax.div(x, jnp.full_like(x, divisor))


def _write_limits(refs: Refs, plan, tile):
    """What every row may see of this tile, once for all lane groups."""
    first, last = refs.bounds[0, :, 0:1], refs.bounds[0, :, 1:2]
    for base in range(0, plan.tile, plan.block):
        token = refs.order[...] + (tile * plan.tile + base)
        refs.limits[:, base : base + plan.block] = jnp.where((token >= first) & (token < last), jnp.inf, NEVER)


def _order_scales(refs: Refs, plan, tile):
    """Bring this tile's value scales and minima into lane order, once for all lane groups."""
    count, stored = plan.value_rows, jnp.concatenate([refs.value_scale[0, 0], refs.value_low[0, 0]])  # [2C, S]
    both = from_bits(stored, plan.spec.scales)
    if plan.slots % plan.tile:  # what lies beyond the array must not reach a product: 0 * NaN
        token = tile * plan.tile + jax.lax.broadcasted_iota(jnp.int32, both.shape, 1)
        both = jnp.where(token < plan.slots, both, jnp.zeros_like(both))
    pieces = [both[:, first : first + plan.period] for first in range(0, plan.tile, plan.period)]
    product = dot(jnp.concatenate(pieces), refs.onehot[...], 0)
    for i in range(len(pieces)):
        scale, low = (product[(2 * i + n) * count : (2 * i + n + 1) * count] for n in range(2))
        _write_columns(refs.scales, scale, i * plan.period // LANES)
        _write_columns(refs.lows, low - offset(plan.spec.value_bits, plan.ways) * scale, i * plan.period // LANES)


def _write_columns(ref, x, first: int):
    """Write [rows, lanes] as columns of 128 lanes, one below the other, from column `first` on."""
    rows = x.shape[0]
    for i in range(x.shape[1] // LANES):
        ref[(first + i) * rows : (first + i + 1) * rows] = x[:, i * LANES : (i + 1) * LANES]


def _fold_constants(refs: Refs, plan, tile):
    """Key scales and minima of this tile as what queries are multiplied by, once for all lane groups."""
    spread = LOG2E * plan.spec.head_dim**-0.5
    key = refs.key_scale[0, 0], refs.key_low[0, 0]
    scale, low = (from_bits(x, plan.spec.scales).astype(jnp.float32) * spread for x in key)
    if plan.slots % plan.tile:
        group = tile * scale.shape[0] + jax.lax.broadcasted_iota(jnp.int32, scale.shape, 0)
        inside = group < plan.slots // plan.spec.key_group
        scale, low = jnp.where(inside, scale, 0.0), jnp.where(inside, low, 0.0)
    _write_columns(refs.factors, scale, 0)
    _write_columns(refs.zeros, low - offset(plan.spec.key_bits, plan.ways) * scale, 0)


def load_row(ref, row, rows: int, column, width: int):
    """A row of `rows`, `width` lanes from column `column` of 128 on, written by `_write_columns`: [8, width]. 128 lanes
    at a time, the load itself fills all rows of a register."""
    pieces = [ref[pl.ds((column + i) * rows + row, 1), :] for i in range(width // LANES)]
    return jnp.concatenate([jnp.broadcast_to(piece, (8, LANES)) for piece in pieces], axis=1)
