"""Packed words to bfloat16 codes inside a TPU kernel, in the token order that is cheapest on the vector unit.

A word of the plane layout holds 32/bits codes of tokens 32 apart. Three ways to take them out of R rows of words:

- ways = 1:       shift, mask, convert; one plane at a time, tokens in their own order. Any width.
- ways = 2:       codes of two planes, 16 bits apart in the word, become bfloat16 128 + c by or-ing c into the mantissa
                  of 128: three operations for two codes and no conversion. 4 and 2 bits.
- ways = 32/bits: the word is reinterpreted as signed narrow integers and converted by the hardware.

With several ways the rows of one word come out next to each other: lane order differs from token order within a block,
which attention does not mind as long as keys, values, scales and positions agree. `token_order` says where each went.
Codes come out as c + offset(bits, ways).
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from kvqjax.layout import PLANE, split_bits

__all__ = ["block_size", "offset", "token_order", "unpack_block"]

MAGIC = 0x43004300  # bfloat16 128.0 twice; its seven mantissa bits count in ones
NARROW = {2: jnp.int2, 4: jnp.int4, 8: jnp.int8}


def block_size(bits: int) -> int:
    """Tokens of one block of words, for the narrowest plane set."""
    return 1024 // split_bits(bits)[-1]


def offset(bits: int, ways: int) -> int:
    """What must be subtracted from an unpacked code."""
    return {1: 0, 2: 128}.get(ways, -(1 << bits - 1))


def token_order(bits: int, ways: int) -> np.ndarray:
    """order[i] = token at position i of an unpacked block."""
    planes = block_size(bits) // PLANE
    if ways == 1:
        return np.arange(planes * PLANE)
    chunks = planes // ways
    # [chunk, word row, way] -> plane chunk + way*chunks, row
    plane = np.arange(chunks)[:, None, None] + np.arange(ways)[None, None] * chunks
    return (plane * PLANE + np.arange(PLANE)[None, :, None]).reshape(-1)


def unpack_block(words: list[jax.Array], bits: int, ways: int) -> jax.Array:
    """One block's words, [rows, W] uint32 for each plane set, to [tokens, W] bfloat16 in `token_order`."""
    if ways == 1:
        return _natural(words, bits)
    (rows,) = words
    if ways == 2:
        mask, magic = jnp.uint32((1 << bits) - 1 << 16 | (1 << bits) - 1), jnp.uint32(MAGIC)
        chunks = [((rows >> jnp.uint32(i)) & mask) | magic for i in range(0, 16, bits)]
        return jnp.concatenate([pltpu.bitcast(chunk, jnp.bfloat16) for chunk in chunks])
    sign = sum(1 << bit for bit in range(bits - 1, 32, bits))
    return pltpu.bitcast(rows ^ jnp.uint32(sign), NARROW[bits]).astype(jnp.bfloat16)


def _natural(words, bits):
    """Plane after plane; the plane sets of an odd width are added up."""
    size, shift, sets = block_size(bits), 0, []
    for rows, part in zip(words, split_bits(bits), strict=True):
        mask = jnp.uint32((1 << part) - 1)
        blocks = [rows[first : first + PLANE] for first in range(0, size * part // 32, PLANE)]
        planes = [(block >> jnp.uint32(i)) & mask for block in blocks for i in range(0, 32, part)]
        sets.append(jnp.concatenate(planes) << jnp.uint32(shift))
        shift += part
    return functools.reduce(operator.or_, sets).astype(jnp.int32).astype(jnp.float32).astype(jnp.bfloat16)
