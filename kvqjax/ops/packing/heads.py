"""Fields stored head by head, `[L, B, K, rows, D]`: the form that XLA reads best on GPUs, straight
into its products.

Codes c are stored as signed integers n. XLA for GPUs fuses the conversion of signed integers into a
product, but hardly any other unpacking:

- 3 or 4 bits: int4, n = c - 8. 3 bits take the room of 4: packed by itself, the third bit would be
  read twice.
- 1 or 2 bits: int4 with the codes c0 and c1 of two tokens, n = 4 c1 - 8 + (c0, or 3 - c0 where c1
  is even). So c1 - 2 = floor(n / 4), and c0 + 0.5 = ||n + 0.5| - 4|. Each code is read by a single
  chain of operations, which XLA fuses, too. Of 256 consecutive tokens the first 128 are the c0 of
  128 rows, the others the c1 of the same rows.
- 5 to 8 bits: int8, n = c - 128.

Floats are stored as they are.
"""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Int, Num, Shaped

from kvqjax.ops.finite import saturated
from kvqjax.ops.packing.base import (
    BLOCK,
    CHANNELS,
    PLANE,
    TOKENS,
    Packing,
    chosen,
    pieces,
    placed,
    split_bits,
)
from kvqjax.ops.xla_workarounds import cut_at, floor_divide, modulo, put_at, row_major

# Consecutive tokens of one plane (c0 or c1); groups have 32, 64 or 128 tokens, so these are whole
# groups
HALF = 128


def tokens_per_row(bits: int) -> int:
    """Count the tokens whose codes of `bits` bits share a stored number."""
    return 2 if bits <= 2 else 1


def offset(bits: int) -> int:
    """Give the number that is subtracted from a code to make it signed, where no two codes share a
    stored number."""
    return 128 if bits > 4 else 8


def by_head(**sizes) -> "Heads":
    """Make the packing of codes or vectors that are stored head by head; `sizes` are the fields of
    `Packing`."""
    bits = sizes.get("bits", 0)
    if not bits:
        return Heads(**sizes)
    return IntegersByHead(**sizes) if tokens_per_row(bits) == 1 else NibblesByHead(**sizes)


def _split(x: Shaped[Array, "*B u W"], heads: int) -> Shaped[Array, "*B K u D"]:
    return jnp.swapaxes(x.reshape(*x.shape[:-1], heads, -1), -2, -3)


def _joined(x: Shaped[Array, "*B K u D"]) -> Shaped[Array, "*B u W"]:
    x = jnp.swapaxes(x, -2, -3)
    return x.reshape(*x.shape[:-2], -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads(Packing):
    """Vectors in their own dtype."""

    axes = (CHANNELS, TOKENS, None)

    @property
    def token_bits(self) -> float:
        dtype = "bfloat16" if self.dtype == "compute" else self.dtype
        return float(8 * jnp.dtype(dtype).itemsize * self.width)

    @property
    def number(self):
        """The dtype of a stored number."""
        return jnp.dtype(self.dtype)

    def rows(self, slots):
        """Count the rows of `slots` tokens, whole blocks, static or not."""
        return slots

    def encoded(self, tile: Num[Array, "K u D"], array: Array) -> Array:
        """Give the numbers that are stored for a tile."""
        return saturated(tile, array.dtype)

    def decoded(self, numbers: Array) -> Array:
        """Give the numbers that `encoded` took."""
        return numbers

    def allocate(self, lead, slots):
        return (
            jnp.zeros((*lead, self.heads, self.rows(slots), self.width // self.heads), self.number),
        )

    def write(self, stored, index, token, tile, write_mask=None):
        tile, (array,) = _split(tile, self.heads), stored
        start, shape = (*index, 0, token, 0), (1,) * len(index) + tile.shape
        new = self.encoded(tile, array).reshape(shape)
        new = chosen(write_mask, new, cut_at(array, start, shape))
        return (put_at(array, row_major(new), start),)

    def read(self, stored, layer, token, count):
        (array,) = stored
        shape = (1, *array.shape[1:3], self.rows(count), array.shape[4])
        part = row_major(cut_at(array, (layer, 0, 0, self.rows(token), 0), shape))[0]
        return _joined(self.decoded(part))


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntegersByHead(Heads):
    """Codes of 3 to 8 bits, a signed integer each."""

    @property
    def token_bits(self) -> float:
        return float(jnp.iinfo(self.number).bits * self.width)

    @property
    def block(self) -> int:
        # The same blocks as in planes, so that a cache keeps its blocks when it changes its form.
        return math.lcm(BLOCK, *(PLANE * 32 // bits for bits in split_bits(self.bits)))

    @property
    def number(self):
        return jnp.dtype("int8") if self.bits > 4 else jnp.dtype("int4")

    def encoded(self, tile, array):
        return (tile.astype(jnp.int32) - offset(self.bits)).astype(array.dtype)

    def decoded(self, numbers):
        return (numbers.astype(jnp.int32) + offset(self.bits)).astype(jnp.uint32)


def _split_pair(n: Int[Array, "*S"]) -> tuple[Int[Array, "*S"], Int[Array, "*S"]]:
    """Give both codes, c0 and c1, of a stored number."""
    upper = (n + 8) >> 2
    return jnp.where(upper & 1 == 1, n & 3, 3 - (n & 3)), upper


def _as_pair(lower: Int[Array, "*S"], upper: Int[Array, "*S"]) -> Int[Array, "*S"]:
    """Give the stored number of two codes, c0 and c1."""
    return 4 * upper - 8 + jnp.where(upper & 1 == 1, lower, 3 - lower)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NibblesByHead(IntegersByHead):
    """Codes of 1 or 2 bits, those of two tokens in a nibble."""

    @property
    def token_bits(self) -> float:
        return 2.0 * self.width

    def rows(self, slots):
        return floor_divide(slots, 2)

    def decoded(self, numbers):
        nibbles = numbers.astype(jnp.int32)
        heads, rows, dim = nibbles.shape[1:]
        pairs = nibbles.reshape(-1, heads, rows // HALF, 1, HALF, dim)
        codes = jnp.concatenate(_split_pair(pairs), axis=3)
        return codes.reshape(-1, heads, 2 * rows, dim).astype(jnp.uint32)

    def write(self, stored, index, token, tile, write_mask=None):
        tile, (array,) = _split(tile, self.heads), stored
        if tile.shape[1] > 2 * HALF:
            return (self._write_blocks(array, index, token, tile, write_mask),)
        for first in range(0, tile.shape[1], HALF):
            array = self._write_half(
                array, index, token + first, tile[:, first : first + HALF], write_mask
            )
        return (array,)

    def _write_half(self, array, index, token, tile: Num[Array, "K u D"], write_mask):
        """Put consecutive tokens into consecutive rows of one plane."""
        is_lower = floor_divide(modulo(token, 2 * HALF), HALF) == 0
        row = floor_divide(token, 2 * HALF) * HALF + modulo(token, HALF)
        start, shape = (*index, 0, row, 0), (1,) * len(index) + tile.shape
        old = cut_at(array, start, shape)
        codes = tile.astype(jnp.int32).reshape(shape)
        lower, upper = _split_pair(old.astype(jnp.int32))
        new = _as_pair(jnp.where(is_lower, codes, lower), jnp.where(is_lower, upper, codes)).astype(
            array.dtype
        )
        return put_at(array, row_major(chosen(write_mask, new, old)), start)

    def _write_blocks(self, array, index, token, tile: Num[Array, "K u D"], write_mask):
        """Put many tokens into the array. All blocks of 2 * HALF tokens that hold some of them are
        read, changed and written as one piece."""
        heads, tokens, dim = tile.shape
        block, blocks = 2 * HALF, array.shape[-2] // HALF
        count = min(pieces(tokens, block, PLANE), blocks)  # blocks of the piece
        first = jnp.minimum(floor_divide(token, block), blocks - count)
        flat = jnp.swapaxes(tile, 0, 1).reshape(tokens, heads * dim).astype(jnp.int32)
        codes, token_mask = placed(flat, token - first * block, count * block)
        # By plane: new codes [2, K, count, HALF, D], and the mask of the tokens that get them, [2,
        # 1, count, HALF, 1].
        codes = jnp.moveaxis(codes.reshape(count, 2, HALF, heads, dim), (1, 3), (0, 1))
        token_mask = jnp.moveaxis(token_mask.reshape(count, 2, HALF), 1, 0)[:, None, ..., None]
        start = (*index, 0, first * HALF, 0)
        old = cut_at(array, start, (1,) * len(index) + (heads, count * HALF, dim))
        old_lower, old_upper = _split_pair(old.astype(jnp.int32).reshape(heads, count, HALF, dim))
        lower = jnp.where(token_mask[0], codes[0], old_lower)
        upper = jnp.where(token_mask[1], codes[1], old_upper)
        new = _as_pair(lower, upper).astype(array.dtype).reshape(old.shape)
        return put_at(array, row_major(chosen(write_mask, new, old)), start)
