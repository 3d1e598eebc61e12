"""HIGGS decoding for TPUs: no gathers, no narrow axes. Equal to kvqjax.codecs.higgs's own form but for rounding.

XLA gathers from a table row by row, and the p channels of a vector, which a row yields side by side, are not side by
side on the lanes that the codes lie on. So the table is a tree of selects on a code's bits, whose leaves are words that
hold two channels, and the channels of a vector never meet: with y_j the j-th channels of all vectors, M the matrix,

    M^T y = sum_j M[j::p]^T y_j,        M = M_outer (x) M_inner.

The inner transform is one product for a tile of vectors (as many as fill the lanes and a matrix unit), the outer one
adds and subtracts whole tiles. Grid numbers have 11 significant bits, so that two bfloat16 numbers hold each exactly,
and the matrix has small integers: only float32 sums and the scale round.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt

from kvqjax.codecs.hadamard import has_transform, transform_matrix
from kvqjax.ops.xla_workarounds import kept_apart

__all__ = ["Plan", "inverse", "plan"]

LANES = 128
CHANNELS = 256  # that one product transforms at least, where groups are as wide
MOST_POINTS = 256  # a select each: many more take long to compile
HALF = np.finfo(np.float16)


class Plan(NamedTuple):
    """`words` uint32 [p/2 rounded up, n]: the grid times 2^`raised` as float16, two of `dim` channels each. `tile`
    vectors at a time are multiplied by `matrix` [2 p tile, p tile]; `outer` [o, o] mixes o consecutive tiles."""

    words: np.ndarray
    raised: int
    dim: int
    tile: int
    matrix: np.ndarray
    outer: np.ndarray


def plan(points: np.ndarray, group: int, groups: int) -> Plan | None:
    """Say how to decode `groups` groups of `group` channels with the grid `points` float32 [n, p]; None where it cannot
    be done this way."""
    count, dim = points.shape
    raised = HALF.maxexp - 1 - math.frexp(float(np.abs(points).max()))[1]  # so that no number is subnormal
    halves = np.ldexp(points, raised).astype(np.float16)
    if group % dim or count > MOST_POINTS or not (np.ldexp(halves.astype(np.float32), -raised) == points).all():
        return None
    fields = np.pad(halves, [(0, 0), (0, dim % 2)]).view(np.uint16).astype(np.uint32)
    tile, inner, outer = _factors(group // dim, groups, dim)
    rows = [inner[j::dim] for j in range(dim) for _ in range(2)]
    return Plan((fields[:, 0::2] | fields[:, 1::2] << 16).T, raised, dim, tile, np.concatenate(rows), outer)


def _factors(vectors: int, groups: int, dim: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Choose (tile, inner, outer): a part of a group, or whole groups side by side until they fill the lanes."""
    part, group = max(LANES, CHANNELS // dim), vectors * dim
    if vectors % part == 0 and has_transform(vectors // part) and has_transform(part * dim):
        outer, inner = transform_matrix(vectors // part), transform_matrix(part * dim)
        if np.array_equal(np.kron(outer, inner), transform_matrix(group)):
            return part, inner, outer
    beside = LANES // vectors if vectors < LANES and LANES % vectors == 0 else 1
    beside = beside if groups % beside == 0 else 1
    return beside * vectors, np.kron(np.eye(beside, dtype=np.int8), transform_matrix(group)), transform_matrix(1)


def _chosen(table: np.ndarray, codes: UInt[Array, "*B V"]) -> UInt[Array, "*B V"]:
    """Look up table[codes] by selects, for tables of a power of two."""
    level = [jnp.uint32(word) for word in table]
    for bit in range(len(table).bit_length() - 1):
        is_set = (codes & jnp.uint32(1 << bit)) != 0
        level = [jnp.where(is_set, high, low) for low, high in zip(level[0::2], level[1::2], strict=True)]
    return jnp.broadcast_to(level[0], codes.shape)


def _pieces(half: UInt[Array, "*B V"], raised: int) -> list[Float[Array, "*B V"]]:
    """Split a float16 number, given in the low half of a word, over 2^raised, into two bfloat16 numbers that add up to
    it."""
    wide = (half & jnp.uint32(0x8000)) << 16 | (
        half & jnp.uint32(0x7FFF)
    ) << 13  # float32, but for its exponent's offset
    offset = jnp.finfo(jnp.float32).maxexp - HALF.maxexp
    number = jax.lax.bitcast_convert_type(wide, jnp.float32) * jnp.float32(2.0 ** (offset - raised))
    top = jax.lax.bitcast_convert_type(number, jnp.uint32) & jnp.uint32(0xFFFF0000)
    top = jax.lax.bitcast_convert_type(top, jnp.float32)
    return [top.astype(jnp.bfloat16), (number - top).astype(jnp.bfloat16)]


def _tile_product(plan: Plan, words: tuple[UInt[Array, "*B V"], ...]) -> Float[Array, "*B W"]:
    """Apply the inner transform to one tile of vectors."""
    halves = [half for word in words for half in (word & jnp.uint32(0xFFFF), word >> 16)][: plan.dim]
    y = jnp.concatenate([piece for half in halves for piece in _pieces(half, plan.raised)], axis=-1)
    matrix = jnp.asarray(plan.matrix, jnp.bfloat16)
    return jnp.einsum("...v,vc->...c", y, matrix, preferred_element_type=jnp.float32)


def inverse(plan: Plan, codes: UInt[Array, "*B V"]) -> Float[Array, "*B W"]:
    """Compute M^T y of every group, y being the grid points that `codes` name. It is not divided by the group's
    width."""
    # Kept apart, or XLA may select anew for every product.
    words = kept_apart([_chosen(table, codes) for table in plan.words])
    tiles = [jnp.split(word, codes.shape[-1] // plan.tile, axis=-1) for word in words]
    parts = [_tile_product(plan, words) for words in zip(*tiles, strict=True)]
    size = len(plan.outer)

    def mixed(parts, column):
        return functools.reduce(jnp.add, [jnp.float32(x) * part for part, x in zip(parts, column, strict=True)])

    groups = [parts[first : first + size] for first in range(0, len(parts), size)]
    return jnp.concatenate([mixed(group, column) for group in groups for column in plan.outer.T], axis=-1)
