"""Codes in planes of words, as TPU kernels read them and CPUs decode them; and the same words on
the lanes.

A block is 1024/b tokens with codes of b bits, in 32 rows of words. Row t % 32 has the code of the
block's token t, in the b bits from bit b*(t//32) on. So one shift and one mask turn 32 rows into 32
consecutive tokens, and no data moves.

Codes in lines of words: the order in which a CPU's vector unit multiplies keys by queries.

A word has the b-bit codes of 32/b neighbouring channels of one token, the first channel in its
lowest bits. A stretch is 32 tokens, whose words of the same channels lie side by side. So a head's
words are consecutive in memory, a vector instruction multiplies a query's channel by that channel
of 32 tokens, and no word is shared by two tokens.

Codes in stripes of words: the order in which a CPU's vector unit sums values over tokens.

A block is 1024 tokens, whose codes of b bits are 32*b words for each channel. The words of a
channel lie side by side. Word t % (32*b) has the code of the block's token t, in the b bits from
bit b*(t // (32*b)) on. This is a block of `Planes` with planes of 32*b tokens, transposed."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt

from kvqjax.ops.packing.base import (
    CHANNELS,
    FEW,
    PLANE,
    TOKENS,
    WordPacking,
    chosen,
    cut_tokens,
    entry_index,
    pieces,
    placed,
    split_bits,
    unpack,
    with_entries,
)
from kvqjax.ops.xla_workarounds import cut_at, floor_divide, kept_apart, modulo, put_at, row_major


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planes(WordPacking):
    """Words of all channels side by side, `[L, B, S*b/32, W]`."""

    scatters = True

    def words_shape(self, slots, bits) -> tuple[int, ...]:
        return slots * bits // 32, self.width

    def start(self, block, token, plane: int) -> tuple:
        """Give the place, in a row's words, of the word of `token` in a block; `plane` is a plane's
        tokens."""
        return block * plane + modulo(token, plane), 0

    def entries(self, bits: int) -> tuple[int, int]:
        """Give a number of tokens, and the number of entries that they take along the axis of
        tokens."""
        return 32, bits

    def turned(self, words: UInt[Array, "R W"], plane: int) -> Array:
        """Bring rows of words into the stored order of axes. They are a part of one block, or whole
        blocks."""
        return words

    def upright(self, words: Array) -> UInt[Array, "B R W"]:
        """Undo `turned` for every row of the batch."""
        return words

    def write_set(self, words, codes, bits, index, token, write_mask):
        if len(codes) > FEW:
            return self._write_blocks(words, codes, bits, index, token, write_mask)
        size = math.gcd(len(codes), self.plane(bits) * 32 // bits)
        for first in range(0, len(codes), size):
            words = self._write_planes(
                words, codes[first : first + size], bits, index, token + first, write_mask
            )
        return words

    def _write_planes(self, words, codes, bits, index, token, write_mask):
        """Put the codes of u tokens into their words. The first token is a multiple of u. The
        tokens are whole planes of one block, or a part of one plane."""
        plane = self.plane(bits)
        block_tokens = plane * 32 // bits
        count = max(1, len(codes) // plane)  # planes
        start = (*index, *self.start(floor_divide(token, block_tokens), token, plane))
        # The lowest bit of the first plane, and the planes' bits relative to it.
        shift = jnp.asarray(floor_divide(modulo(token, block_tokens), plane) * bits, jnp.uint32)
        shifts = np.arange(0, count * bits, bits, dtype=np.uint32).reshape(-1, 1, 1)
        # Planes have no bits in common, so that their sum has the bits of all.
        codes = (codes.reshape(count, -1, codes.shape[-1]) << shifts).sum(
            0, dtype=jnp.uint32
        ) << shift
        codes = self.turned(codes, plane)
        old = cut_at(words, start, (1,) * len(index) + codes.shape)
        # Old bits are cleared first, so that a slot can be written again (docs/design.md, idea 8).
        mask = jnp.uint32((1 << count * bits) - 1) << shift
        new = chosen(write_mask, (old & ~mask) | codes.reshape(old.shape), old)
        return put_at(words, row_major(new), start)

    def _write_blocks(self, words, codes, bits, index, token, write_mask):
        """Put the codes of many tokens into their words. All blocks that hold the tokens are read,
        changed and written as one piece."""
        plane = self.plane(bits)
        block_tokens = plane * 32 // bits
        blocks = math.prod(words.shape[len(index) :]) // (self.width * plane)  # of a row
        count = min(pieces(len(codes), block_tokens, PLANE), blocks)  # blocks of the piece
        first = jnp.minimum(floor_divide(token, block_tokens), blocks - count)
        codes, token_mask = placed(codes, token - first * block_tokens, count * block_tokens)
        shifts = np.arange(0, 32, bits, dtype=np.uint32)[None, :, None, None]

        def pack(x):
            """Pack numbers of tokens, [tokens, W], into rows of words."""
            blocks = (x.reshape(count, -1, plane, x.shape[1]) << shifts).sum(1, dtype=jnp.uint32)
            return blocks.reshape(count * plane, -1)

        full = jnp.where(token_mask, jnp.uint32((1 << bits) - 1), jnp.uint32(0))[:, None]
        codes = self.turned(pack(codes), plane)
        mask = self.turned(pack(full), plane)  # the bits of the new tokens; one channel, for all
        start = (*index, *self.start(first, 0, plane))
        lead = (1,) * len(index)
        codes, mask = codes.reshape(lead + codes.shape), mask.reshape(lead + mask.shape)
        old = cut_at(words, start, codes.shape)
        new = (old & ~mask) | codes
        return put_at(words, row_major(chosen(write_mask, new, old)), start)

    def read_set(self, words, bits, layer, token, count):
        tokens, entries = self.entries(bits)
        start = floor_divide(token * entries, tokens)
        part = cut_tokens(words, layer, start, count * entries // tokens, self.token_axis)
        return unpack(self.upright(part), bits, self.plane(bits))

    def scatter(self, stored, layer, slots, tile, write_mask):
        lanes = self.axes[-1] == TOKENS
        arrays = []
        for words, part, bits in self.by_set(stored, tile.astype(jnp.uint32)):
            block_tokens = PLANE * 32 // bits
            place = jnp.asarray(floor_divide(slots, block_tokens) * PLANE + modulo(slots, PLANE))
            shift = jnp.asarray(
                floor_divide(modulo(slots, block_tokens), PLANE) * bits, jnp.uint32
            )[:, None]
            # The old words are read by a kernel of their own: a kernel that also wrote the array in
            # place would need a copy of it.
            old = kept_apart(words[entry_index(words, layer, place, lanes)])
            new = (old & ~(jnp.uint32((1 << bits) - 1) << shift)) | part << shift
            arrays.append(with_entries(words, layer, place, new, write_mask, lanes))
        return tuple(arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns(Planes):
    """The same words transposed, `[L, B, W, S*b/32]`, with tokens on a TPU's lanes: for a width
    that is no multiple of 128. XLA for TPUs stores arrays of such widths in this order anyway.
    Declared as `Planes`, they would be transposed before and after every decode loop."""

    axes = (CHANNELS, TOKENS)

    def words_shape(self, slots, bits):
        return self.width, slots * bits // 32

    def start(self, block, token, plane):
        return 0, block * plane + modulo(token, plane)

    def turned(self, words, plane):
        return words.T

    def upright(self, words):
        return jnp.swapaxes(words, -1, -2)


STRETCH = 32  # tokens side by side


def words_shape(heads: int, dim: int, bits: int, slots: int) -> tuple[int, ...]:
    """Give the shape of one row's words for `slots` tokens; a word's codes must divide a head's
    `dim` channels."""
    return heads, slots // STRETCH, dim * bits // 32, STRETCH


def _places(bits: int, ndim: int) -> UInt[np.ndarray, "*_ P"]:
    """Give the lowest bit of each code of a word, on the last of `ndim` axes."""
    return np.arange(0, 32, bits, dtype=np.uint32).reshape((1,) * (ndim - 1) + (-1,))


def unpack_lines(words: UInt[Array, "*B n R 32"], bits: int) -> UInt[Array, "*B n*32 D"]:
    """Unpack whole stretches to the codes of their tokens."""
    # Words are transposed, not codes, which are more.
    turned = jnp.swapaxes(words, -1, -2)[..., None]
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
        new = (
            (by_word << _places(bits, by_word.ndim)).sum(-1, dtype=jnp.uint32).transpose(2, 0, 3, 1)
        )
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

    def read_last(self, stored, layer, token, count: int) -> UInt[Array, "B W count"]:
        """Read `count` tokens from slot `token` on, whole blocks, with tokens on the last axis: the
        order in which the words lie."""
        codes, shift = jnp.uint32(0), 0
        for words, bits in zip(stored, split_bits(self.bits), strict=True):
            block_tokens, _ = self.entries(bits)
            first, blocks = floor_divide(token, block_tokens), count // block_tokens
            part = cut_tokens(words, layer, first, blocks, self.token_axis)
            # [B, blocks, W, words] -> [B, W, blocks, places of a word, words]
            part = jnp.swapaxes(part, 1, 2)[:, :, :, None]
            places = np.arange(0, 32, bits, dtype=np.uint32).reshape(1, 1, 1, -1, 1)
            part = (part >> places) & jnp.uint32((1 << bits) - 1)
            codes = codes | (part.reshape(*part.shape[:2], count) << shift)
            shift += bits
        return codes
