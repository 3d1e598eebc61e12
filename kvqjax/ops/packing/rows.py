"""Plain numbers, unpacked: rows of channels, as vectors and groups' scales have them, and rows of tokens.

16-bit floats are stored as the integers that hold their bits (`kvqjax.ops.packing.words`).
"""

import dataclasses

import jax.numpy as jnp

from kvqjax.ops.finite import saturated
from kvqjax.ops.packing.base import CHANNELS, TOKENS, Packing, chosen, cut_tokens, with_entries
from kvqjax.ops.packing.words import from_bits, is_half, to_bits
from kvqjax.ops.xla_workarounds import cut_at, floor_divide, put_at, row_major

__all__ = ["Rows", "Tokens"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(Packing):
    """A row of W numbers for each token, or for every `group` of them, `[L, B, S/group, W]`."""

    @property
    def token_bits(self) -> float:
        dtype = "bfloat16" if self.dtype == "compute" else self.dtype
        return 8 * jnp.dtype(dtype).itemsize * self.width / self.group

    @property
    def in_bits(self):
        return dataclasses.replace(self, dtype="uint16") if is_half(self.dtype) else self

    def shape(self, slots: int) -> tuple[int, ...]:
        """Give the shape of one row of the batch."""
        return slots // self.group, self.width

    def start(self, token) -> tuple:
        """Say where in a row of the batch a token's numbers are."""
        return floor_divide(token, self.group), 0

    def allocate(self, lead, slots):
        return (jnp.zeros((*lead, *self.shape(slots)), "uint16" if is_half(self.dtype) else self.dtype),)

    def write(self, stored, index, token, tile, write_mask=None):
        start = (*index, *self.start(token))
        tile = to_bits(saturated(tile, self.dtype)).reshape((1,) * len(index) + tile.shape)
        if write_mask is not None:
            tile = chosen(write_mask, tile, cut_at(stored[0], start, tile.shape))
        return (put_at(stored[0], row_major(tile), start),)

    def read(self, stored, layer, token, count):
        start = floor_divide(token, self.group)
        return from_bits(cut_tokens(stored[0], layer, start, count // self.group, self.token_axis), self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens(Rows):
    """W numbers of each token, tokens on the lanes, `[L, B, W, S]`: a last axis of 1 would be padded to 128."""

    axes = (CHANNELS, TOKENS)
    scatters = True

    def shape(self, slots):
        return self.width, slots

    def start(self, token):
        return 0, token

    def scatter(self, stored, layer, slots, tile, write_mask):
        numbers = to_bits(saturated(tile, self.dtype)).T
        return (with_entries(stored[0], layer, slots, numbers, write_mask, lanes=True),)
