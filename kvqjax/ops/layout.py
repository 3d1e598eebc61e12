"""The fields of a cache body, one for every quantity of a codec.

The field of a body is stored for every layer and row. What it stores is its kind; where the numbers
lie in memory is its packing (`kvqjax.ops.packing`). A codec declares kinds, and a cache chooses
packings for its chip. Codecs see tiles alone, whose shape follows from the kind. A tile has u
tokens, and W is the field's width:

| kind | holds | tile |
| --- | --- | --- |
| codes | integers of `bits` bits, one per token and channel | `[u, W]` |
| plain | vectors in `dtype` | `[u, W]` |
| group | W numbers in `dtype` for every `group` tokens | `[u/group, W]` |
| token | W numbers in `dtype` per token | `[W, u]` |
"""

import dataclasses
import functools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from kvqjax.ops.packing import PACKINGS, Packing
from kvqjax.ops.packing.base import BLOCK

USUAL_FORMS = {"codes": "planes", "plain": "rows", "group": "rows", "token": "tokens"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """One stored quantity of a codec.

    Attributes:
        kind: "codes", "plain", "group" or "token" (see the module).
        width: channels, or numbers a token.
        role: the ledger's class: payload, scales, zeros or outliers.
        bits: of a code, 1 to 16.
        group: tokens that share the numbers of kind "group".
        dtype: of the numbers of other kinds than codes; "compute" stands for the cache's compute
            dtype.
        form: the packing's name in `kvqjax.ops.packing.PACKINGS`; "" is the usual one of the kind.
        heads: KV heads, where the form stores them apart, else 0.
    """

    kind: str
    width: int
    role: str
    bits: int = 0
    group: int = 1
    dtype: str = "bfloat16"
    form: str = ""
    heads: int = 0

    def __post_init__(self):
        if self.kind not in USUAL_FORMS:
            raise ValueError(f"unknown field kind {self.kind!r}")
        if self.packed and not 1 <= self.bits <= 16:
            raise ValueError(f"codes of {self.bits} bits; 1 to 16 can be packed")
        if not self.form:
            object.__setattr__(self, "form", USUAL_FORMS[self.kind])

    @property
    def packed(self) -> bool:
        """Say whether codes are stored, and not plain numbers."""
        return self.kind == "codes"

    @functools.cached_property
    def packing(self) -> Packing:
        """The packing: it knows the place of the numbers, and writes and reads them."""
        return PACKINGS[self.form](
            width=self.width, bits=self.bits, group=self.group, dtype=self.dtype, heads=self.heads
        )

    def by_head(self, heads: int) -> "Field":
        """Give the field as it is stored head by head: codes and vectors, whose channels are those
        of `heads` KV heads; other fields stay as they are."""
        wide = self.kind in ("codes", "plain")
        return dataclasses.replace(self, form="heads", heads=heads) if wide else self

    # Tiles: what is done to them without knowing what they hold.

    @property
    def _tokens_last(self) -> bool:
        return self.kind == "token"

    def cut_tile(
        self, tile: Shaped[Array, "rows lanes"], start: Int[Array, ""] | int, size: int
    ) -> Array:
        """Cut `size` tokens from token `start` on out of a tile, whole groups."""
        if self._tokens_last:
            return jax.lax.dynamic_slice_in_dim(tile, start, size, 1)
        return jax.lax.dynamic_slice_in_dim(tile, start // self.group, size // self.group, 0)

    def join_tiles(self, tiles: Shaped[Array, "n rows lanes"]) -> Array:
        """Join tiles of tokens that follow each other to one."""
        if self._tokens_last:
            return jnp.moveaxis(tiles, 0, 1).reshape(self.width, -1)
        return tiles.reshape(-1, tiles.shape[-1])

    def split_tiles(
        self, tiles: Shaped[Array, "B rows lanes"], size: int
    ) -> Shaped[Array, "n r l"]:
        """Split B tiles into tiles of `size` tokens, in their order."""
        if self._tokens_last:
            tiles = tiles.reshape(*tiles.shape[:2], -1, size).transpose(0, 2, 1, 3)
        else:
            tiles = tiles.reshape(tiles.shape[0], -1, size // self.group, tiles.shape[2])
        return tiles.reshape(-1, *tiles.shape[2:])

    def choose(self, tokens: Bool[Array, " u"], tile: Array, fallback: Array) -> Array:
        """Take the numbers of `tokens` from `tile` and the others from `fallback`. A group goes by
        its first token."""
        mask = tokens[None] if self._tokens_last else tokens[:: self.group, None]
        return jnp.where(mask, tile, fallback)


def block_tokens(fields: Iterable[Field]) -> int:
    """Count the tokens after which every field starts a fresh block: what a body is allocated and
    read in multiples of."""
    return math.lcm(BLOCK, *(field.packing.block for field in fields))
