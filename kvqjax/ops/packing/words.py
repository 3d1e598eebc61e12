"""Facts about stored numbers that packings and kernels share: plane sets, words of codes, the bits
of 16-bit floats."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped, UInt

__all__ = [
    "BLOCK",
    "FEW",
    "PLANE",
    "array_bytes",
    "from_bits",
    "is_half",
    "number_bits",
    "slot_rows",
    "split_bits",
    "to_bits",
    "unpack",
]

PLANE = 32  # tokens of a plane: the rows of a block of words
BLOCK = 256  # tokens; the blocks of every packing are multiples of it
FEW = 256  # tokens of a tile; longer tiles are written as one piece, shorter ones plane by plane


def split_bits(bits: int) -> tuple[int, ...]:
    """Split `bits` into powers of two, largest first: the plane sets of a code."""
    return tuple(1 << i for i in reversed(range(5)) if bits >> i & 1)


def unpack(words: UInt[Array, "*B R W"], bits: int, plane: int = PLANE) -> UInt[Array, "*B S W"]:
    """Unpack whole blocks of `plane` rows.

    Args:
        words: rows of words; R is a multiple of `plane`.
        bits: of a code, a power of two.
        plane: tokens whose codes sit in the same bits of neighbouring rows.

    Returns:
        The codes of S = R*32/bits tokens, in token order.
    """
    lead, (rows, width) = words.shape[:-2], words.shape[-2:]
    blocks = words.reshape(*lead, rows // plane, 1, plane, width)
    shifts = np.arange(0, 32, bits, dtype=np.uint32).reshape((1,) * (blocks.ndim - 3) + (-1, 1, 1))
    return ((blocks >> shifts) & jnp.uint32((1 << bits) - 1)).reshape(*lead, rows * 32 // bits, width)


# 16-bit floats are stored as the integers that hold their bits. XLA's CPU backend has no 16-bit float operations: it
# would convert a whole array to float32 and back around every slice and every update of it.


def is_half(dtype) -> bool:
    """Say whether numbers of `dtype` are stored as the integers that hold their bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2


def to_bits(x: Shaped[Array, "*S"]) -> Shaped[Array, "*S"]:
    """Give what is stored for `x`: uint16 for 16-bit floats, `x` itself for everything else."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if is_half(x.dtype) else x


def from_bits(x: Shaped[Array, "*S"], dtype: str) -> Shaped[Array, "*S"]:
    """Give the numbers of `dtype` that `to_bits` stored. For slices: of a whole array it may make a copy."""
    return jax.lax.bitcast_convert_type(x, dtype) if is_half(dtype) else x


def slot_rows(count: int, dtype: str) -> int:
    """Count the rows of 16-bit words that `count` slots take per token, each a number of `dtype` and a channel.

    One array holds both. XLA for TPUs lays it out anew around a decode loop unless its rows are a multiple of 8;
    12 slots are 24.
    """
    return count * (jnp.dtype(dtype).itemsize // 2 + 1)


def number_bits(dtype) -> int:
    """Count the bits of one stored number. XLA packs numbers narrower than a byte; `itemsize` says a byte for each."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 8 * dtype.itemsize


def array_bytes(tree) -> int:
    """Count the bytes of an array, or of all arrays of a pytree, live or abstract, on all devices together.

    Two int4 numbers share a byte, whatever an array's `nbytes` says: this is what the device's memory holds.
    """
    return sum(-(-math.prod(x.shape) * number_bits(x.dtype) // 8) for x in jax.tree.leaves(tree))
