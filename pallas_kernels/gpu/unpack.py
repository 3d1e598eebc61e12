"""Unpack words to bfloat16 codes in the registers of a Hopper warpgroup.

A product takes 64 consecutive tokens: two neighbouring planes of a block (`ops/packing/planes.py`). A quad is four such
steps, 256 tokens. Its codes are brought together in 16-bit numbers, one for four tokens 64 apart: nibble i holds the
code of step ORDER[i]. Codes of 2 bits already lie so in the words, those of 4 bits are picked from both halves of a
word, those of 3 bits from the two words of their plane sets.

A code c becomes the bfloat16 number 2^e + c by or-ing it into the mantissa of 2^e, two at a time: a mask and an or (one
instruction) and in some places a shift. Where in the mantissa it lands decides e."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvqjax.ops.packing.words import split_bits
from kvqjax.pallas_kernels.gpu.parts import load
from kvqjax.pallas_kernels.gpu.words import TWICE, beside, half, packed, twice

__all__ = ["ORDER", "STEP", "STEPS", "Quad", "base", "codes", "half_bits", "key_nibbles", "place", "to_codes"]
__all__ += ["to_nibbles", "value_nibbles"]

STEP = 64  # tokens of one product
STEPS = 4  # of a quad
ORDER = {2: (0, 1, 2, 3), 3: (0, 1, 2, 3), 4: (0, 2, 1, 3)}  # its own inverse


class Quad(NamedTuple):
    """A quad: its tile, and which part of the tile it is; numbers in registers."""

    tile: Any
    part: Any


def _halves(words: list, bits: int, quad: Quad, layout) -> list:
    """Return the 16-bit halves of the words of each plane set that hold the codes of a quad."""
    if bits == 4:
        return [half(words[0], upper, layout) for upper in range(2)]
    out = [half(words[0], quad.part, layout)]
    if bits == 3:  # a block of single bits holds two tiles
        out.append(half(words[1], lax.rem(quad.tile, 2), layout))
    return out


def half_bits(bits: int) -> tuple[int, ...]:
    """Return the bits of a code in each of `_halves`."""
    return (4, 4) if bits == 4 else split_bits(bits)


def to_nibbles(permute, *words, bits: int, later: int = 0):
    """Turn words of `_halves` into those of a quad. `later` is 1 for the planes of odd number. With 3 bits, a word that
    says where the quad's single bits begin follows the halves. With 2 bits, the upper bits of a nibble are
    arbitrary."""
    del permute
    halves, begin = words[: len(half_bits(bits))], words[len(half_bits(bits)) :]
    if later:
        halves = [x >> part for x, part in zip(halves, half_bits(bits), strict=True)]
    if bits == 2:
        return halves
    if bits == 4:
        low, high = halves
        return (low & 0x0F0F0F0F | (high & 0x0F0F0F0F) << 4,)
    pairs, singles = halves
    singles = singles >> begin[0]
    spread = singles & 0x00050005 | (singles & 0x00500050) << 4
    return (pairs & 0x33333333 | (spread << 2 | spread << 4) & 0x44444444,)


def _nibbles(halves: list, quad: Quad, **static):
    """Apply `to_nibbles` to arrays of halves."""
    begin = ((8 * quad.part).astype(jnp.uint32),) if static["bits"] == 3 else ()
    return packed(functools.partial(to_nibbles, **static), jnp.uint16, *halves, scalars=begin)[0]


def key_nibbles(words, bits: int, quad: Quad):
    """Return a quad's nibbles of keys, tokens on the rows: [64, N], from references to the words of every plane set,
    [32, N]."""
    halves = _halves([load(x, TWICE) for x in words], bits, quad, TWICE)
    return _nibbles([twice(x, part) for x, part in zip(halves, half_bits(bits), strict=True)], quad, bits=bits)


def value_nibbles(words, bits: int, quad: Quad):
    """Return a quad's nibbles of values, tokens on the columns: [N, 64], from references to the words of every plane
    set, [32, N]."""
    layout = plgpu.Layout.WGMMA_TRANSPOSED
    halves = _halves([load(x.transpose((1, 0)), layout) for x in words], bits, quad, layout)
    halves = [plgpu.layout_cast(x, plgpu.Layout.WGMMA) for x in halves]
    return beside(*(_nibbles(halves, quad, bits=bits, later=later) for later in range(2)))


def place(nibble: int, bits: int) -> tuple[int, int]:
    """Return by how much a nibble of a quad is shifted right, and at which bit of the mantissa it then lies."""
    bit = 4 if nibble and bits < 4 else 0
    return 4 * nibble - bit, bit


def to_codes(permute, word, nibble: int, bits: int):
    """Turn a word of a quad into two numbers 2^e + c."""
    del permute
    shift, bit = place(nibble, bits)
    shifted = word >> shift if shift else word
    mask, base = ((1 << bits) - 1) << bit, (127 + 7 - bit) << 7
    return (shifted & mask * 0x10001 | base * 0x10001,)


def codes(nibbles, step: int, bits: int):
    """Return 2^e + the codes of one step of a quad, bfloat16."""
    change = functools.partial(to_codes, nibble=ORDER[bits][step], bits=bits)
    return packed(change, jnp.bfloat16, nibbles)[0]


def base(step: int, bits: int) -> float:
    """Return the 2^e of `codes`."""
    return float(1 << 7 - place(ORDER[bits][step], bits)[1])
