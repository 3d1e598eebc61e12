"""Look up signposts of non-uniform codes (nuq) in the registers of a Hopper warpgroup, as bfloat16.

The instruction `prmt`, a byte permutation, picks four of the eight bytes of two words. Four nibbles
of a selector say which bytes. A 16-bit number of a quad holds four codes in its nibbles (`unpack`),
so that it can be used as a selector without change. One permutation looks up the lower bytes of the
signposts of four codes, another one their upper bytes. Two more put the bytes together to numbers.

This serves up to eight signposts. Sixteen signposts have sixteen lower bytes. For them two
permutations look up among the first eight and among the last eight, and a third one picks between
the two results by the code's highest bit.

Two numbers take 3.5 operations with two bits or three, and 6.5 with four
(tests/kernels/test_kernels_gpu_words.py counts them). A table in shared memory would take one load
for two numbers. The address of the load would take as many operations as all permutations take here
with two bits."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

from kvqjax.ops.packing.base import to_bits
from kvqjax.pallas_kernels.gpu import unpack as gpu_unpack
from kvqjax.pallas_kernels.gpu.unpack import ORDER, STEPS
from kvqjax.pallas_kernels.gpu.words import packed

TABLE = 8  # words that hold the bytes of up to 16 signposts, the lower bytes first


def table_words(signposts: Float[Array, " M"]) -> UInt[Array, " 8"]:
    """Make the table by which `look_up` permutes.

    Args:
        signposts: The numbers that M codes stand for, M being at most 16.

    Returns:
        The lower bytes of the signposts, rounded to bfloat16, in 4 words of 4 bytes. Then the upper
        bytes."""
    numbers = jnp.pad(
        to_bits(signposts.astype(jnp.bfloat16)).astype(jnp.uint32), (0, 16 - signposts.shape[0])
    )
    shifts = jnp.arange(0, 32, 8, dtype=jnp.uint32)[None]
    halves = [
        (half.reshape(4, 4) << shifts).sum(1, dtype=jnp.uint32)
        for half in (numbers & 255, numbers >> 8)
    ]
    return jnp.concatenate(halves)


def _bytes(permute, selector, tail, table, bits: int):
    """Look up one byte of the signposts of four codes: a word of 4 bytes.

    `table` are the 4 words of the lower, or of the upper, bytes. With four bits, nibble i of `tail`
    is i where the code is one of the first eight, and 4 + i where it is one of the last eight."""
    if bits < 4:
        return permute(table[0], table[1], selector)
    return permute(
        permute(table[0], table[1], selector), permute(table[2], table[3], selector), tail
    )


def to_signposts(permute, word, *table, bits: int):
    """Turn a word of a quad into words of signposts.

    Args:
        permute: The byte permutation: `permute(low, high, selector)`.
        word: The codes of two neighbouring channels, in the four nibbles of either half.
        table: The words of `table_words`.

    Returns:
        Four words, one for each nibble, with the bfloat16 signposts of both channels."""
    # `prmt` reads 3 bits of a nibble as the number of a byte. Bit 3 asks for copies of the byte's
    # sign, and must be 0. With two bits, bit 2 is arbitrary too (`unpack.to_nibbles`).
    selectors, tails = word & (0x33333333 if bits == 2 else 0x77777777), None
    if bits == 4:
        # Nibble i: bit 2 is the code's bit 3, bits 0 and 1 are i.
        tails = (word >> 1) & 0x44444444 | 0x32103210
    channels = []
    for shift in (0, 16):  # the word's lower half, then its upper half
        selector, tail = selectors >> shift if shift else selectors, tails
        if tail is not None and shift:
            tail = tail >> shift
        low, high = (
            _bytes(permute, selector, tail, table[half : half + 4], bits) for half in (0, 4)
        )
        # Bytes 0 and 1 of `low`, each below the byte of `high` that belongs to it: signposts of
        # nibbles 0 and 1. Then bytes 2 and 3: of nibbles 2 and 3.
        channels.append((permute(low, high, 0x5140), permute(low, high, 0x7362)))
    (first, last), (next_first, next_last) = channels
    pairs = (first, next_first), (last, next_last)
    # The lower halves of both channels' words side by side (0x5410), then the upper halves
    # (0x7632).
    return tuple(permute(*pair, picked) for pair in pairs for picked in (0x5410, 0x7632))


def look_up(nibbles, table, bits: int) -> list:
    """Look up the signposts of a quad.

    Args:
        nibbles: The quad's 16-bit numbers (`unpack`), [64, N] or [N, 64].
        table: A reference to `table_words`.

    Returns:
        The signposts of the four steps in order, bfloat16, each of the shape of `nibbles`."""
    words = tuple(table[i] for i in range(TABLE))
    signposts = packed(
        functools.partial(to_signposts, bits=bits), jnp.bfloat16, nibbles, scalars=words
    )
    return [signposts[ORDER[bits][step]] for step in range(len(signposts))]


def decode(nibbles, table, bits: int):
    """Decode a quad for products.

    Args:
        nibbles: The quad's 16-bit numbers (`unpack`), [64, N] or [N, 64].
        table: A reference to the signposts' table; None for uniform codes.

    Returns:
        The signposts of the four steps in order, or 2^e + the codes (`unpack.base`), bfloat16, each
        of the shape of `nibbles`."""
    if table is not None:
        return look_up(nibbles, table, bits)
    # A generator: the codes of one step at a time take fewer registers than those of all.
    return (gpu_unpack.codes(nibbles, step, bits) for step in range(STEPS))
