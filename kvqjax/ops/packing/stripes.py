"""Codes in stripes of words: the order in which a CPU's vector unit sums values over tokens.

A block is 1024 tokens, whose codes of b bits are 32*b words for each channel. The words of a channel lie side by side.
Word t % (32*b) has the code of the block's token t, in the b bits from bit b*(t // (32*b)) on. This is a block of
`Planes` with planes of 32*b tokens, transposed.
"""

import dataclasses

import jax.numpy as jnp

from kvqjax.ops.packing.base import CHANNELS, TOKENS
from kvqjax.ops.packing.planes import Planes
from kvqjax.ops.packing.words import PLANE
from kvqjax.ops.xla_workarounds import modulo

__all__ = ["Stripes"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stripes(Planes):
    """Words of a channel side by side, `[L, B, S/1024, W, 32*b]`."""

    axes = (TOKENS, CHANNELS, None)
    scatters = False

    def plane(self, bits):
        return PLANE * bits

    def words_shape(self, slots, bits):
        plane = self.plane(bits)
        return slots * bits // (32 * plane), self.width, plane

    def start(self, block, token, plane):
        return block, 0, modulo(token, plane)

    def entries(self, bits):
        return 1024, 1

    def turned(self, words, plane):
        return words.reshape(-1, min(len(words), plane), words.shape[-1]).swapaxes(1, 2)

    def upright(self, words):
        return jnp.swapaxes(words, -1, -2).reshape(len(words), -1, self.width)
