"""Unpack words to codes inside a TPU kernel, in the token order that is cheapest on the vector
unit.

A word of the plane layout holds 32/bits codes of tokens 32 apart. The word is cut into `ways`
fields of 32/ways bits. One shift and one mask leave one code in every field. The words are then
reinterpreted as arrays of narrow numbers, which takes the fields apart for free:

- ways = 8: nibbles, read as signed 4-bit integers (codes of up to 4 bits)
- ways = 4: bytes, read as signed 8-bit integers (codes of up to 8 bits)
- ways = 2: halves, read as bfloat16 (codes of up to 4 bits). The code is or-ed into the mantissa of
  a power of two, so that no conversion is needed. For chips that convert narrow integers slowly.

The codes of one word come out next to each other. So the order of unpacked tokens, the lane order,
differs from token order within a block. Attention does not depend on the order, as long as keys,
values, scales and positions agree in it. `token_order` says which token stands at each place. Plane
sets narrower than `base` bits are first spread to that width, so that codes of all widths come in
one order."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from kvqjax.ops.packing.base import PLANE, split_bits

NARROW = {8: jnp.int4, 4: jnp.int8}  # what a field is read as, by `ways`


def fitting_ways(bits: int) -> int:
    """Return the most fields of a word that can each hold a code of `bits`."""
    return 8 if bits <= 4 else 4


def _mantissa(bits: int) -> tuple[int, int]:
    """Return where codes of `bits` bits go in a bfloat16 number.

    Returns:
        (the bit of the word at which codes begin, the exponent field that makes this bit count 1).
        The number is then 2^bits + code."""
    # A mantissa has 7 bits, of which the code takes the upper ones. Exponents are stored plus 127.
    return 7 - bits, 127 + bits


def offset(bits: int, ways: int) -> int:
    """Return what must be subtracted from an unpacked number to get the code.

    Callers subtract it times the scale from the minimum. It is small, so that the rounding of
    scales does little harm."""
    if ways == 2:
        return 1 << bits
    # A code that fills its field is read as signed: `_fields` has subtracted half of its range.
    return -(1 << bits - 1) if bits * ways == 32 else 0


def token_order(base: int, ways: int, block: int) -> np.ndarray:
    """Return the token at each position of `block` unpacked tokens, [block]; their plane sets are
    spread to `base` bits."""
    planes = 32 // base
    parts = planes // ways  # codes of a field, which `chunks` yields one after the other
    # The axes of what `chunks` yields are (chunk, row of words, field). Field f of chunk c has
    # plane c + f*parts, and row r has token r of each plane of 32 tokens.
    plane = np.arange(parts)[:, None, None] + np.arange(ways)[None, None] * parts
    row = np.arange(PLANE)[None, :, None]
    order = (plane * PLANE + row).reshape(-1)
    # The order repeats itself for every `order.size` tokens.
    first = np.arange(0, block, order.size)
    return (first[:, None] + order[None]).reshape(-1)


def _repeated(field: int, ways: int) -> jax.Array:
    """Return a word that has the bits `field` in every one of `ways` fields."""
    field_bits = 32 // ways
    return jnp.uint32(sum(field << field_bits * i for i in range(ways)))


def _spread(words: jax.Array, bits: int, base: int) -> list[jax.Array]:
    """Spread [32, W] words of `bits`-bit planes to base/bits arrays of words whose planes are
    `base` bits apart."""
    if bits == base:
        return [words]
    # Each half of the word becomes a word of its own, in which codes are 2*bits apart. As many
    # doublings as are needed follow by recursion.
    halves = [words & jnp.uint32(0xFFFF), words >> jnp.uint32(16)]
    # The half begins as one run of 16 bits. In each turn every run is cut in two, and the upper
    # part moves up by its own length, until a run is one code.
    run = 16
    while run > bits:
        run //= 2
        mask = _repeated((1 << run) - 1, 16 // run)
        halves = [(half | (half << jnp.uint32(run))) & mask for half in halves]
    wide = []
    for half in halves:
        wide += _spread(half, 2 * bits, base)
    return wide


def _moved(words: jax.Array, shift: int) -> jax.Array:
    """Shift words right, or left where `shift` is negative."""
    if shift == 0:
        return words
    if shift > 0:
        return words >> jnp.uint32(shift)
    return words << jnp.uint32(-shift)


def _fields(sets, bits: int, first: int, ways: int) -> jax.Array:
    """Take the codes whose lowest bit lies `first` bits up in their fields: [32*ways, W] bfloat16,
    int8 or int4."""
    low, exponent = _mantissa(bits) if ways == 2 else (0, 0)
    codes = []
    # Each plane set holds some bits of every code, the first set the lowest ones. They go side by
    # side from `low` up.
    for words, part in zip(sets, split_bits(bits), strict=True):
        mask = ((1 << part) - 1) << low
        codes.append(_moved(words, first - low) & _repeated(mask, ways))
        low += part
    word = functools.reduce(operator.or_, codes)
    if ways == 2:
        return pltpu.bitcast(word | _repeated(exponent << 7, 2), jnp.bfloat16)
    if offset(bits, ways):
        # A code that fills its field is read as signed. Its first bit flipped, that number is the
        # code less half of its range.
        word = word ^ _repeated(1 << bits - 1, ways)
    return pltpu.bitcast(word, NARROW[ways])


def spread_sets(words: list[jax.Array], bits: int, base: int):
    """Yield a block's words, [rows, W] uint32 of each plane set, as tuples of [32, W] whose planes
    are all `base` bits apart. A tuple has words of the same tokens, one array of each plane set."""
    sets = []
    for rows, part in zip(words, split_bits(bits), strict=True):
        blocks = [rows[first : first + PLANE] for first in range(0, rows.shape[0], PLANE)]
        wide = []
        for block in blocks:
            wide += _spread(block, part, base)
        sets.append(wide)
    return zip(*sets, strict=True)


def chunks(words: list[jax.Array], bits: int, base: int, ways: int):
    """Yield the codes of a block's words, [rows, W] uint32 of each plane set, as successive
    [32*ways, W] in `token_order`."""
    for block in spread_sets(words, bits, base):
        # A field holds several codes, `base` bits apart.
        for first in range(0, 32 // ways, base):
            yield _fields(block, bits, first, ways)
