"""Codes in lines of words: the order in which a CPU's vector unit multiplies keys by queries.

A word has the b-bit codes of 32/b neighbouring channels of one token, the first channel in its lowest bits. A stretch
is 32 tokens, whose words of the same channels lie side by side. So a head's words are consecutive in memory, a vector
instruction multiplies a query's channel by that channel of 32 tokens, and no word is shared by two tokens.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt

from kvqjax.ops.packing.base import CHANNELS, TOKENS, WordPacking
from kvqjax.ops.xla_workarounds import cut_at, floor_divide, modulo, put_at, row_major

__all__ = ["Lines", "unpack_lines", "words_shape"]

STRETCH = 32  # tokens side by side


def words_shape(heads: int, dim: int, bits: int, slots: int) -> tuple[int, ...]:
    """Give the shape of one row's words for `slots` tokens; a word's codes must divide a head's `dim` channels."""
    return heads, slots // STRETCH, dim * bits // 32, STRETCH


def _places(bits: int, ndim: int) -> UInt[np.ndarray, "*_ P"]:
    """Give the lowest bit of each code of a word, on the last of `ndim` axes."""
    return np.arange(0, 32, bits, dtype=np.uint32).reshape((1,) * (ndim - 1) + (-1,))


def unpack_lines(words: UInt[Array, "*B n R 32"], bits: int) -> UInt[Array, "*B n*32 D"]:
    """Unpack whole stretches to the codes of their tokens."""
    turned = jnp.swapaxes(words, -1, -2)[..., None]  # words are transposed, not codes, which are more
    codes = (turned >> _places(bits, turned.ndim)) & jnp.uint32((1 << bits) - 1)
    return codes.reshape(*words.shape[:-3], words.shape[-3] * STRETCH, -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lines(WordPacking):
    """Words of a head's neighbouring channels, `[L, B, K, S/32, D*b/32, 32]`."""

    axes = (CHANNELS, TOKENS, None, None)

    def words_shape(self, slots, bits):
        return words_shape(self.heads, self.width // self.heads, bits, slots)

    def write_set(self, words, codes, bits, index, token, write_mask):
        heads, _, rows, _ = words.shape[-4:]
        # [stretches, tokens, K, words, codes of a word] -> [K, stretches, words, tokens]
        by_word = codes.reshape(-1, min(len(codes), STRETCH), heads, rows, 32 // bits)
        new = (by_word << _places(bits, by_word.ndim)).sum(-1, dtype=jnp.uint32).transpose(2, 0, 3, 1)
        new = new.reshape((1,) * len(index) + new.shape)
        start = (*index, 0, floor_divide(token, STRETCH), 0, modulo(token, STRETCH))
        if write_mask is not None:
            new = jnp.where(write_mask, new, cut_at(words, start, new.shape))
        return put_at(words, row_major(new), start)

    def read_set(self, words, bits, layer, token, count):
        size = (1, *words.shape[1:3], count // STRETCH, *words.shape[4:])
        part = row_major(cut_at(words, (layer, 0, 0, floor_divide(token, STRETCH), 0, 0), size))[0]
        codes = jnp.swapaxes(unpack_lines(part, bits), 1, 2)
        return codes.reshape(*codes.shape[:2], -1)
