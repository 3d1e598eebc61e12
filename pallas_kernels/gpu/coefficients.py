"""Unpack coefficients of transform coding (kvqjax.codecs.klt) to bfloat16 in the registers of a
Hopper warpgroup.

A pair is two steps of 64 tokens. Codes of every number of bits lie in planes of 32 tokens, so that
a step is two neighbouring planes of each plane set. Up to 4 bits a pair of steps lies in one half
of a word. Codes of 8 bits have the first step in the lower half of a word, the second one in the
upper half.

Up to 4 bits a code becomes its distance from the middle code, which is exact in bfloat16: the
distance between points is a factor of the matrices (`kvqjax.pallas_kernels.klt.steps`). Codes of 6
and 8 bits, of which there are few, become their points."""

import functools
import math
import operator

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvqjax.codecs.klt import REACH, STEPS
from kvqjax.ops.packing.base import split_bits
from kvqjax.pallas_kernels.gpu.parts import load, tiled
from kvqjax.pallas_kernels.gpu.unpack import STEP
from kvqjax.pallas_kernels.gpu.words import HALF, TWICE, beside, half, packed, twice

PAIR = 2  # steps that are unpacked together
TILE = 256  # tokens: a block of codes of 4 bits
SWIZZLE = 32  # bytes: tiles of 8 words, as wide as the smallest level
LOG2E = math.log2(math.e)


def blocks(part: int) -> int:
    """Count the blocks of words that a tile has of a plane set of `part` bits."""
    return max(1, TILE * part // 1024)


def memory(levels) -> tuple:
    """Declare shared memory for the words of a tile.

    Returns:
        Declarations [1, blocks, 32, n] uint32, for every level those of its plane sets."""
    return tuple(
        tuple(
            tiled((1, blocks(part), HALF, n), jnp.uint32, swizzle=SWIZZLE)
            for part in split_bits(bits)
        )
        for bits, n in levels
    )


def copies(sources: tuple, targets: tuple, levels, indices, tile):
    """List the copies of a tile's words.

    Args:
        sources: References to the words of every level's plane sets, [L, B, rows, K*n] each.
        targets: References to shared memory, [blocks, 32, n] each.
        levels: (bits, n) of every level.
        indices: The numbers of layer, row and KV head.

    Yields:
        (source, target) of every copy."""
    layer, row, head = indices
    for (bits, n), words, into in zip(levels, sources, targets, strict=True):
        lanes = pl.ds(head * n, n)
        for part, source, target in zip(split_bits(bits), words, into, strict=True):
            # A block of narrow bits has the tokens of several tiles.
            first = lax.div(tile * TILE, 1024 // part)
            for block in range(blocks(part)):
                rows = pl.ds((first + block) * HALF, HALF)
                yield source.at[layer, row, rows, lanes], target.at[block]


def copy_count(levels) -> int:
    """Count the copies of a tile's words."""
    return sum(blocks(part) for bits, _ in levels for part in split_bits(bits))


def mantissa_bit(bits: int, step: int) -> int:
    """Choose the bit of a bfloat16 mantissa at which codes are put.

    Returns:
        The bit. Codes of up to 4 bits leave bit 0 free, since their middle is no integer."""
    place = PAIR * bits * step
    fits = len(split_bits(bits)) == 1 and place and place + bits <= 7
    return place if fits else int(bits <= 4)


def to_numbers(permute, *words, bits: int, step: int):
    """Turn registers of both planes of a pair into the numbers 2^e + c of one step.

    Args:
        words: A register of every plane set, two 16-bit numbers each.

    Returns:
        A tuple of one register with two bfloat16 numbers."""
    del permute
    parts, bit = split_bits(bits), mantissa_bit(bits, step)
    target, mantissas = bit, []
    for word, part in zip(words, parts, strict=True):
        shift = PAIR * part * step - target
        if shift:
            word = word >> shift if shift > 0 else word << -shift
        # 0x10001 repeats a 16-bit number in both halves.
        mantissas.append(word & (((1 << part) - 1) << target) * 0x10001)
        target += part
    return (functools.reduce(operator.or_, mantissas) | _exponent(bit),)


def to_nibbles(permute, word):
    """Turn a register of codes of 8 bits into the numbers 2^7 + their lower, and upper, 4 bits."""
    del permute
    return tuple((word >> 4 * i if i else word) & 0x000F000F | _exponent(0) for i in range(2))


def _exponent(bit: int) -> int:
    """Make the bits of two bfloat16 numbers 2^(7 - bit), in whose mantissas `bit` counts 1."""
    return (127 + 7 - bit << 7) * 0x10001


def _point(centred, bits: int):
    """Compute the points of codes whose points are evenly spaced in asinh x, bfloat16.

    Args:
        centred: The codes less their middle, float32."""
    power = centred * (math.asinh(REACH) / (((1 << bits) - 1) / 2) * LOG2E)
    return (0.5 * (jnp.exp2(power) - jnp.exp2(-power))).astype(jnp.bfloat16)


def _eight_bits(words, pair) -> list:
    """Unpack a level of 8 bits: [64, n] for each step of a pair."""
    block = load(words[0].at[lax.rem(pair, TILE // (PAIR * STEP))], TWICE)
    points = []
    for step in range(PAIR):
        nibbles = packed(to_nibbles, jnp.bfloat16, twice(half(block, step, TWICE), 8))
        low, high = (x.astype(jnp.float32) - 128.0 for x in nibbles)
        points.append(_point(low + 16.0 * high - 127.5, 8))
    return points


def _level(words, bits: int, pair) -> list:
    """Unpack one level: [64, n] bfloat16 for each step of a pair."""
    if bits == 8:
        return _eight_bits(words, pair)
    halves = []
    for part, ref in zip(split_bits(bits), words, strict=True):
        first = lax.rem(PAIR * PAIR * part * pair, 32)  # the pair's first bit in a word
        lower_or_upper = half(load(ref.at[0], TWICE), lax.div(first, 16), TWICE)
        halves.append(twice(lower_or_upper, part, lax.rem(first, 16)))
    middle, steps = ((1 << bits) - 1) / 2, []
    for step in range(PAIR):
        change = functools.partial(to_numbers, bits=bits, step=step)
        numbers = packed(change, jnp.bfloat16, *halves)[0]
        base = float(1 << 7 - mantissa_bit(bits, step)) + middle
        if bits in STEPS:
            steps.append(numbers - base)
        else:
            steps.append(_point(numbers.astype(jnp.float32) - base, bits))
    return steps


def put(words: tuple, levels, pair, target) -> None:
    """Unpack the coefficients of a pair of steps to shared memory.

    Args:
        words: References to the words of every level's plane sets, [blocks, 32, n] each.
        levels: (bits, n) of every level.
        pair: The number of the pair, counted through all tiles of a row.
        target: A reference [2, 64, N]; columns behind the last coefficient get zeros."""
    unpacked = [_level(x, bits, pair) for x, (bits, _) in zip(words, levels, strict=True)]
    blank = target.shape[2] - sum(n for _, n in levels)
    for step, numbers in enumerate(zip(*unpacked, strict=True)):
        if blank:
            zeros = jnp.zeros((STEP, blank), jnp.bfloat16)
            numbers = (*numbers, plgpu.layout_cast(zeros, plgpu.Layout.WGMMA))
        target.at[step][...] = beside(*numbers)
