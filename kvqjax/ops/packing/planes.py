"""Codes in planes of words, as TPU kernels read them and CPUs decode them; and the same words on the lanes.

A block of 1024/b tokens is 32 rows of words. Token t of the block sits in row t % 32, bits b*(t//32) and up. So one
shift and one mask turn 32 rows into 32 consecutive tokens, and no data moves.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt

from kvqjax.ops.packing.base import (
    CHANNELS,
    TOKENS,
    WordPacking,
    chosen,
    cut_tokens,
    entry_index,
    pieces,
    placed,
    with_entries,
)
from kvqjax.ops.packing.words import FEW, PLANE, unpack
from kvqjax.ops.xla_workarounds import cut_at, floor_divide, kept_apart, modulo, put_at, row_major

__all__ = ["Columns", "Planes"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planes(WordPacking):
    """Words of all channels side by side, `[L, B, S*b/32, W]`."""

    scatters = True

    def words_shape(self, slots, bits) -> tuple[int, ...]:
        return slots * bits // 32, self.width

    def start(self, block, token, plane: int) -> tuple:
        """Say where in a row's words the plane of a token in a block begins."""
        return block * plane + modulo(token, plane), 0

    def entries(self, bits: int) -> tuple[int, int]:
        """Give a number of tokens, and the entries along the axis of tokens that they take."""
        return 32, bits

    def turned(self, words: UInt[Array, "R W"], plane: int) -> Array:
        """Turn rows of words, of one block or fewer or of whole blocks, as they are stored."""
        return words

    def upright(self, words: Array) -> UInt[Array, "B R W"]:
        """Turn stored words of every row back to rows of words."""
        return words

    def write_set(self, words, codes, bits, index, token, write_mask):
        if len(codes) > FEW:
            return self._write_blocks(words, codes, bits, index, token, write_mask)
        size = math.gcd(len(codes), self.plane(bits) * 32 // bits)
        for first in range(0, len(codes), size):
            words = self._write_planes(words, codes[first : first + size], bits, index, token + first, write_mask)
        return words

    def _write_planes(self, words, codes, bits, index, token, write_mask):
        """Put the codes of u tokens from a multiple of u on, whole planes of one block or fewer tokens than a plane,
        into the words that hold them."""
        plane = self.plane(bits)
        per, count = plane * 32 // bits, max(1, len(codes) // plane)
        start = (*index, *self.start(floor_divide(token, per), token, plane))
        shift = jnp.asarray(floor_divide(modulo(token, per), plane) * bits, jnp.uint32)
        shifts = np.arange(0, count * bits, bits, dtype=np.uint32).reshape(-1, 1, 1)
        codes = (codes.reshape(count, -1, codes.shape[-1]) << shifts).sum(0, dtype=jnp.uint32) << shift
        codes = self.turned(codes, plane)
        old = cut_at(words, start, (1,) * len(index) + codes.shape)
        # Old bits are cleared first, so that a slot can be written again (docs/design.md, idea 8).
        mask = jnp.uint32((1 << count * bits) - 1) << shift
        new = chosen(write_mask, (old & ~mask) | codes.reshape(old.shape), old)
        return put_at(words, row_major(new), start)

    def _write_blocks(self, words, codes, bits, index, token, write_mask):
        """Put many tokens' codes into the blocks that they are parts of, as one piece."""
        plane = self.plane(bits)
        blocks, per = math.prod(words.shape[len(index) :]) // (self.width * plane), plane * 32 // bits
        count = min(pieces(len(codes), per, PLANE), blocks)
        first = jnp.minimum(floor_divide(token, per), blocks - count)
        codes, token_mask = placed(codes, token - first * per, count * per)
        shifts = np.arange(0, 32, bits, dtype=np.uint32)[None, :, None, None]

        def pack(x):
            return (x.reshape(count, -1, plane, x.shape[1]) << shifts).sum(1, dtype=jnp.uint32)

        full = jnp.where(token_mask, jnp.uint32((1 << bits) - 1), jnp.uint32(0))[:, None]
        codes, mask = (pack(x).reshape(count * plane, -1) for x in (codes, full))
        start = (*index, *self.start(first, 0, plane))
        codes, mask = self.turned(codes, plane), self.turned(mask, plane)
        shape = (1,) * len(index) + codes.shape
        old = cut_at(words, start, shape)
        new = (old & ~mask.reshape((1,) * len(index) + mask.shape)) | codes.reshape(shape)
        return put_at(words, row_major(chosen(write_mask, new, old)), start)

    def read_set(self, words, bits, layer, token, count):
        tokens, entries = self.entries(bits)
        start = floor_divide(token * entries, tokens)
        part = cut_tokens(words, layer, start, count * entries // tokens, self.token_axis)
        return unpack(self.upright(part), bits, self.plane(bits))

    def scatter(self, stored, layer, slots, tile, write_mask):
        lanes, arrays = self.axes[-1] == TOKENS, []
        for words, part, bits in self.by_set(stored, tile.astype(jnp.uint32)):
            per = PLANE * 32 // bits
            place = jnp.asarray(floor_divide(slots, per) * PLANE + modulo(slots, PLANE))
            shift = jnp.asarray(floor_divide(modulo(slots, per), PLANE) * bits, jnp.uint32)[:, None]
            # Read in a kernel of its own, so that none reads the array that it writes in place.
            old = kept_apart(words[entry_index(words, layer, place, lanes)])
            new = (old & ~(jnp.uint32((1 << bits) - 1) << shift)) | part << shift
            arrays.append(with_entries(words, layer, place, new, write_mask, lanes))
        return tuple(arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns(Planes):
    """The same words on the lanes, `[L, B, W, S*b/32]`: for a width that is no multiple of 128. XLA for TPUs keeps
    such rows like this anyway, and would turn them before and after every decode loop."""

    axes = (CHANNELS, TOKENS)

    def words_shape(self, slots, bits):
        return self.width, slots * bits // 32

    def start(self, block, token, plane):
        return 0, block * plane + modulo(token, plane)

    def turned(self, words, plane):
        return words.T

    def upright(self, words):
        return jnp.swapaxes(words, -1, -2)
