"""HIGGS decoding for TPUs, without gathers. Results equal those of kvqjax.codecs.higgs's own form
but for rounding.

A code names a grid point, a vector of p channels. XLA for TPUs gathers from a table row by row. A
row would yield the p channels of a point side by side, but the codes themselves lie side by side on
the lanes. So points are chosen by a tree of selects on the bits of a code. The leaves of the tree
are words that hold two channels. The channels of a vector never come to lie side by side. With y_j
the j-th channels of all vectors and M the matrix of the transform:

    M^T y = sum_j M[j::p]^T y_j,        M = M_outer (x) M_inner.

The inner transform is one product for a tile of vectors, which are as many as fill the lanes and a
matrix unit. The outer transform adds and subtracts whole tiles. A grid number has 11 significant
bits, so that the sum of two bfloat16 numbers is exactly equal to it. M has small integers. So only
the float32 sums and the scale round.
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

TPU_LANES = 128
CHANNELS = 256  # that one product transforms at least, where groups are as wide
MOST_POINTS = 256  # of a grid: each takes a select, and many more selects take long to compile
HALF = np.finfo(np.float16)


class Plan(NamedTuple):
    """How codes of one grid and group size are decoded.

    Attributes:
        words: the grid's n points times 2^`raised`, as float16 numbers in words of two channels:
            uint32 [p/2 rounded up, n].
        raised: makes the grid's numbers so large that none of them is subnormal in float16.
        dim: p, the channels of a point.
        tile: how many vectors one product transforms.
        matrix: of this product, [2 p tile, p tile]: two rows for each number, which comes as two
            bfloat16 numbers.
        outer: M_outer [o, o], which mixes o consecutive tiles.
    """

    words: np.ndarray
    raised: int
    dim: int
    tile: int
    matrix: np.ndarray
    outer: np.ndarray


def plan(points: np.ndarray, group: int, groups: int) -> Plan | None:
    """Plan how to decode a token's codes.

    Args:
        points: the grid's n points, float32 [n, p].
        group: channels that are transformed together.
        groups: how many groups a token has.

    Returns:
        The plan; None for grids that are too large or whose numbers float16 does not hold, and for
        groups that are not whole vectors.
    """
    count, dim = points.shape
    _, exponent = math.frexp(float(np.abs(points).max()))
    # So that the largest number comes to lie between 2^14 and 2^15; float16 ends just below 2^16.
    raised = HALF.maxexp - 1 - exponent
    halves = np.ldexp(points, raised).astype(np.float16)
    restored = np.ldexp(halves.astype(np.float32), -raised)
    is_exact = (restored == points).all()
    if group % dim or count > MOST_POINTS or not is_exact:
        return None
    even = np.pad(halves, [(0, 0), (0, dim % 2)])  # [n, p rounded up to even]
    fields = even.view(np.uint16).astype(np.uint32)
    low = fields[:, 0::2]
    high = fields[:, 1::2]
    words = (low | high << 16).T
    tile, inner, outer = _factors(group // dim, groups, dim)
    rows = []
    for channel in range(dim):
        # The rows of this channel of all vectors: twice, for the two pieces of a number.
        rows += [inner[channel::dim]] * 2
    return Plan(words, raised, dim, tile, np.concatenate(rows), outer)


def _factors(vectors: int, groups: int, dim: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Choose how many vectors one product transforms, and split the transform's matrix accordingly.

    Args:
        vectors: of a group.
        groups: of a token.
        dim: p, the channels of a vector.

    Returns:
        (tile, M_inner, M_outer). A tile is a part of a group, or else whole groups side by side, as
        many as fill the lanes; M_outer is then [[1]].
    """
    matrix = transform_matrix(vectors * dim)
    part = max(TPU_LANES, CHANNELS // dim)  # vectors
    parts = vectors // part
    if vectors % part == 0 and has_transform(parts) and has_transform(part * dim):
        outer = transform_matrix(parts)
        inner = transform_matrix(part * dim)
        # Paley's matrices are no such product.
        if np.array_equal(np.kron(outer, inner), matrix):
            return part, inner, outer
    groups_of_tile = 1
    if vectors < TPU_LANES and TPU_LANES % vectors == 0:
        groups_of_tile = TPU_LANES // vectors
    if groups % groups_of_tile:
        groups_of_tile = 1
    # Each group is transformed by itself.
    inner = np.kron(np.eye(groups_of_tile, dtype=np.int8), matrix)
    return groups_of_tile * vectors, inner, transform_matrix(1)


def _chosen(table: np.ndarray, codes: UInt[Array, "*B V"]) -> UInt[Array, "*B V"]:
    """Look up table[codes] by selects, for tables whose length is a power of two."""
    candidates = [jnp.uint32(word) for word in table]
    bits = len(table).bit_length() - 1
    # Each bit halves the candidates: the lowest bit decides between neighbours.
    for bit in range(bits):
        is_set = (codes & jnp.uint32(1 << bit)) != 0
        neighbours = zip(candidates[0::2], candidates[1::2], strict=True)
        candidates = [jnp.where(is_set, high, low) for low, high in neighbours]
    return jnp.broadcast_to(candidates[0], codes.shape)


def _pieces(half: UInt[Array, "*B V"], raised: int) -> list[Float[Array, "*B V"]]:
    """Split numbers into two bfloat16 numbers each that add up to them.

    Args:
        half: bits of float16 numbers, in the low halves of words: the numbers times 2^raised.
        raised: as in `Plan`.

    Returns:
        The number cut off after bfloat16's bits, and the rest.
    """
    sign = (half & jnp.uint32(0x8000)) << 16
    magnitude = (half & jnp.uint32(0x7FFF)) << 13  # exponent and mantissa, where float32 has them
    # Bits of a float32 number, too small by a power of two: exponents of float16 and float32 have
    # different offsets.
    wide = sign | magnitude
    offset = jnp.finfo(jnp.float32).maxexp - HALF.maxexp
    number = jax.lax.bitcast_convert_type(wide, jnp.float32) * jnp.float32(2.0 ** (offset - raised))
    # A bfloat16 number is the upper half of a float32 number.
    top_bits = jax.lax.bitcast_convert_type(number, jnp.uint32) & jnp.uint32(0xFFFF0000)
    top = jax.lax.bitcast_convert_type(top_bits, jnp.float32)
    return [top.astype(jnp.bfloat16), (number - top).astype(jnp.bfloat16)]


def _tile_product(plan: Plan, words: tuple[UInt[Array, "*B V"], ...]) -> Float[Array, "*B W"]:
    """Apply the inner transform to one tile of vectors, given as words of two channels."""
    channels = []
    for word in words:
        channels += [word & jnp.uint32(0xFFFF), word >> 16]
    pieces = []
    # Points of an odd number of channels leave the last half of their words empty.
    for half in channels[: plan.dim]:
        pieces += _pieces(half, plan.raised)
    y = jnp.concatenate(pieces, axis=-1)
    matrix = jnp.asarray(plan.matrix, jnp.bfloat16)
    return jnp.einsum("...v,vc->...c", y, matrix, preferred_element_type=jnp.float32)


def inverse(plan: Plan, codes: UInt[Array, "*B V"]) -> Float[Array, "*B W"]:
    """Compute M^T y of every group, y being the grid points that `codes` name. It is not divided by
    the group's width."""
    # Without `kept_apart`, XLA may select anew for every product.
    words = kept_apart([_chosen(table, codes) for table in plan.words])
    tiles = codes.shape[-1] // plan.tile
    words_by_tile = zip(*(jnp.split(word, tiles, axis=-1) for word in words), strict=True)
    products = [_tile_product(plan, words_of_tile) for words_of_tile in words_by_tile]
    size = len(plan.outer)  # tiles of a group
    mixed = []
    for first in range(0, tiles, size):
        for column in plan.outer.T:
            mixed.append(_weighted_sum(products[first : first + size], column))
    return jnp.concatenate(mixed, axis=-1)


def _weighted_sum(parts: list[Float[Array, "*B W"]], weights: np.ndarray) -> Float[Array, "*B W"]:
    """Sum arrays, each times its integer of `weights`."""
    terms = [jnp.float32(x) * part for part, x in zip(parts, weights, strict=True)]
    return functools.reduce(jnp.add, terms)
