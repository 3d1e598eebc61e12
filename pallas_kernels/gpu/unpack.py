"""Unpack words to bfloat16 codes in the registers of a Hopper warpgroup.

A step is one product, of 64 consecutive tokens. These are two neighbouring planes of a block
(`ops/packing/planes.py`). A quad is four steps: 256 tokens, or eight planes. The codes of a quad
are brought together in 16-bit numbers of four nibbles. A number has one token of every step, and
nibble i holds the code of step ORDER[bits][i]. Codes of 2 bits lie in this way in the words
already. Codes of 4 bits are picked from both halves of a word, and codes of 3 bits from the two
words of their plane sets.

A code c becomes the bfloat16 number 2^e + c: c is or-ed into the mantissa of 2^e. For the two
numbers of a 32-bit register this takes a mask and an or, which are one instruction, and for some
nibbles a shift. The bit of the mantissa at which c is put decides e."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvqjax.ops.packing.base import split_bits
from kvqjax.pallas_kernels.gpu.parts import load
from kvqjax.pallas_kernels.gpu.words import TWICE, beside, half, packed, twice

STEP = 64  # tokens of one product
STEPS = 4  # products of a quad
# The step of each nibble, by bits. With 4 bits the upper half of a word fills the odd nibbles
# (`to_nibbles`). Each order is its own inverse, so that ORDER[bits][step] is the nibble of a step
# too.
ORDER = {2: (0, 1, 2, 3), 3: (0, 1, 2, 3), 4: (0, 2, 1, 3)}


class Quad(NamedTuple):
    """A quad: the number of its tile, and its number in the tile. Both are in registers."""

    tile: Any
    part: Any


def _halves(words: list, bits: int, quad: Quad, layout) -> list:
    """Take the 16-bit halves of words that hold the codes of a quad.

    `words` are those of every plane set. With 4 bits a quad is both halves of a word. With 2 bits
    it is one half. With 3 bits it is one half of a word of 2 bits, and 8 bits of one half of a word
    of single bits."""
    if bits == 4:
        return [half(words[0], upper, layout) for upper in range(2)]
    out = [half(words[0], quad.part, layout)]
    if bits == 3:  # a word of single bits has 32 planes: a tile of 16 planes in either half
        out.append(half(words[1], lax.rem(quad.tile, 2), layout))
    return out


def half_bits(bits: int) -> tuple[int, ...]:
    """List how many bits of a code each half has.

    Returns:
        The bits, for each of `_halves`."""
    return (4, 4) if bits == 4 else split_bits(bits)


def to_nibbles(permute, *words, bits: int, later: int = 0):
    """Turn registers of `_halves` into registers of a quad's nibbles.

    Args:
        words: A register of each half. With 3 bits, the number of the quad's first single bit
            follows: 0 or 8.
        later: 0 for the planes of even number, 1 for those of odd number.

    Returns:
        One register, as the only entry. With 2 bits, the upper bits of a nibble are arbitrary."""
    del permute
    halves, begin = words[: len(half_bits(bits))], words[len(half_bits(bits)) :]
    # A shift by one code brings the odd planes to where the even ones were.
    if later:
        halves = [x >> part for x, part in zip(halves, half_bits(bits), strict=True)]
    if bits == 2:  # nibble i has plane 2i, or 2i + 1 if `later`, in its lower two bits
        return halves
    # The lower half has planes 0 to 3, the upper half planes 4 to 7. Planes 0 and 2 go to nibbles 0
    # and 2, planes 4 and 6 to nibbles 1 and 3.
    if bits == 4:
        low, high = halves
        return (low & 0x0F0F0F0F | (high & 0x0F0F0F0F) << 4,)
    # The pairs are in place as with 2 bits. The single bits of planes 0, 2, 4 and 6 are bits 0, 2,
    # 4 and 6. They are to be bits 2, 6, 10 and 14, on top of their pairs: bits 4 and 6 go to 8 and
    # 10 first, then bits 0 and 8 by 2 places, bits 2 and 10 by 4.
    pairs, singles = halves
    singles = singles >> begin[0]
    single_bits = singles & 0x00050005 | (singles & 0x00500050) << 4
    return (pairs & 0x33333333 | (single_bits << 2 | single_bits << 4) & 0x44444444,)


def _nibbles(halves: list, quad: Quad, **static):
    """Apply `to_nibbles` to arrays of halves."""
    # The second quad of a tile has the upper 8 of 16 single bits.
    begin = ((8 * quad.part).astype(jnp.uint32),) if static["bits"] == 3 else ()
    return packed(functools.partial(to_nibbles, **static), jnp.uint16, *halves, scalars=begin)[0]


def key_nibbles(words, bits: int, quad: Quad):
    """Unpack a quad's keys to nibbles, with tokens on the rows.

    Args:
        words: References to the words of every plane set, [32, N] each.

    Returns:
        The nibbles, [64, N] uint16: 32 tokens of the even planes, then 32 of the odd planes."""
    halves = _halves([load(x, TWICE) for x in words], bits, quad, TWICE)
    return _nibbles(
        [twice(x, part) for x, part in zip(halves, half_bits(bits), strict=True)], quad, bits=bits
    )


def value_nibbles(words, bits: int, quad: Quad):
    """Unpack a quad's values to nibbles, with tokens on the columns.

    Args:
        words: References to the words of every plane set, [32, N] each.

    Returns:
        The nibbles, [N, 64] uint16: 32 tokens of the even planes, then 32 of the odd planes."""
    layout = plgpu.Layout.WGMMA_TRANSPOSED
    halves = _halves([load(x.transpose((1, 0)), layout) for x in words], bits, quad, layout)
    halves = [plgpu.layout_cast(x, plgpu.Layout.WGMMA) for x in halves]
    return beside(*(_nibbles(halves, quad, bits=bits, later=later) for later in range(2)))


def place(nibble: int, bits: int) -> tuple[int, int]:
    """Say where a nibble of a quad goes in a mantissa.

    Returns:
        (by how many bits the quad is shifted right, the bit of the mantissa at which the nibble
        then lies)."""
    # Nibbles lie at bits 0, 4, 8 and 12, and a mantissa has bits 0 to 6. Codes of fewer than 4 bits
    # fit at bit 4 too, where nibble 1 lies without a shift.
    bit = 4 if nibble and bits < 4 else 0
    return 4 * nibble - bit, bit


def to_codes(permute, word, nibble: int, bits: int):
    """Turn a register of a quad into the numbers 2^e + c of one nibble.

    Args:
        word: The register, with two 16-bit numbers.

    Returns:
        A tuple of one register with two bfloat16 numbers."""
    del permute
    shift, bit = place(nibble, bits)
    nibble_bits = word >> shift if shift else word
    # The lowest bit of a mantissa of 2^e counts 2^(e - 7). A code at `bit` counts 1 where e = 7 -
    # bit. Exponents are stored plus 127, above the 7 bits of the mantissa. 0x10001 repeats a 16-bit
    # number in both halves.
    mask, base = ((1 << bits) - 1) << bit, (127 + 7 - bit) << 7
    return (nibble_bits & mask * 0x10001 | base * 0x10001,)


def codes(nibbles, step: int, bits: int):
    """Unpack the codes of one step of a quad.

    Args:
        nibbles: The quad's nibbles, from `key_nibbles` or `value_nibbles`.

    Returns:
        2^e + the codes (`base`), bfloat16, of the shape of `nibbles`."""
    change = functools.partial(to_codes, nibble=ORDER[bits][step], bits=bits)
    return packed(change, jnp.bfloat16, nibbles)[0]


def base(step: int, bits: int) -> float:
    """Compute the 2^e that `codes` adds to the codes.

    Args:
        step: The number of the step.
        bits: Bits of a code.

    Returns:
        The number."""
    return float(1 << 7 - place(ORDER[bits][step], bits)[1])
