"""Look up signposts of non-uniform codes (nuq) in the registers of a Hopper warpgroup, as bfloat16.

A byte permutation picks four bytes of eight by the nibbles of a selector, and a quad of codes (`unpack`) is such a
selector as it stands. Two permutations, for the lower and the upper bytes of the signposts, look up four codes; two
more put the bytes together. With sixteen signposts there are two for each, and a third that picks by the code's highest
bit.

Operations for two numbers: 3.5 for two bits and three, 6.5 for four (tests/kernels/test_kernels_gpu_words.py counts
them). A table in shared memory would take one load for two numbers, and as many operations as two bits take here to
make the load's address."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

from kvqjax.ops.packing.words import to_bits
from kvqjax.pallas_kernels.gpu.unpack import ORDER
from kvqjax.pallas_kernels.gpu.words import packed

__all__ = ["TABLE", "look_up", "table_words", "to_signposts"]

TABLE = 8  # words that hold the bytes of up to 16 signposts, the lower bytes first


def table_words(signposts: Float[Array, " M"]) -> UInt[Array, " 8"]:
    """Return the lower and the upper bytes of M signposts rounded to bfloat16, four to a word; M is at most 16."""
    numbers = jnp.pad(to_bits(signposts.astype(jnp.bfloat16)).astype(jnp.uint32), (0, 16 - signposts.shape[0]))
    shifts = jnp.arange(0, 32, 8, dtype=jnp.uint32)[None]
    halves = [(half.reshape(4, 4) << shifts).sum(1, dtype=jnp.uint32) for half in (numbers & 255, numbers >> 8)]
    return jnp.concatenate(halves)


def _bytes(permute, selector, tail, table, bits: int):
    """Look up one byte of the signposts of four codes. With four bits, `tail` picks by the codes' bit 3 between the
    first and the last eight."""
    if bits < 4:
        return permute(table[0], table[1], selector)
    return permute(permute(table[0], table[1], selector), permute(table[2], table[3], selector), tail)


def to_signposts(permute, word, *table, bits: int):
    """Turn a word of a quad into four words of two signposts each, one for each nibble."""
    selectors, tails = word & (0x33333333 if bits == 2 else 0x77777777), None
    if bits == 4:
        tails = (word >> 1) & 0x44444444 | 0x32103210
    channels = []
    for shift in (0, 16):
        selector, tail = selectors >> shift if shift else selectors, tails
        if tail is not None and shift:
            tail = tail >> shift
        low, high = (_bytes(permute, selector, tail, table[half : half + 4], bits) for half in (0, 4))
        channels.append((permute(low, high, 0x5140), permute(low, high, 0x7362)))
    (first, last), (next_first, next_last) = channels
    pairs = (first, next_first), (last, next_last)
    return tuple(permute(*pair, picked) for pair in pairs for picked in (0x5410, 0x7632))


def look_up(nibbles, table, bits: int) -> list:
    """Return the signposts of the four steps of a quad, bfloat16. `table` is a reference to `table_words`."""
    words = tuple(table[i] for i in range(TABLE))
    signposts = packed(functools.partial(to_signposts, bits=bits), jnp.bfloat16, nibbles, scalars=words)
    return [signposts[ORDER[bits][step]] for step in range(len(signposts))]
