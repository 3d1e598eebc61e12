"""Codes in stripes of words, as a CPU's vector unit sums values up.

A channel's words of 1024 tokens lie side by side. Token t of a block sits in word t % (32*b), bits b*(t // (32*b)) and
up: a block is a block of planes whose plane is 32*b tokens long, turned.
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
