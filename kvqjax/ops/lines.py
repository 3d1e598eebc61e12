"""Codes stored in lines, as a CPU's vector unit multiplies keys by queries: `[L, B, K, S/32, D*b/32, 32]`.

A word has the b-bit codes of 32/b neighbouring channels of one token, the first channel in its lowest bits. A stretch
of 32 tokens lies side by side, word by word. So a head is read from memory in one go, a query's channel multiplies all
tokens of a stretch, and a token that is written shares no word with another."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt

from kvqjax.ops.xla import cut_at, floor_divide, modulo, put_at, row_major

__all__ = ["read", "shape", "unpack", "write"]

STRETCH = 32  # tokens side by side


def shape(heads: int, dim: int, bits: int, slots: int) -> tuple[int, ...]:
    """Give the shape of one row's words for `slots` tokens; a word's codes must divide a head's `dim` channels."""
    return heads, slots // STRETCH, dim * bits // 32, STRETCH


def _places(bits: int, ndim: int) -> UInt[np.ndarray, "*_ P"]:
    return np.arange(0, 32, bits, dtype=np.uint32).reshape((1,) * (ndim - 1) + (-1,))


def write(
    words: UInt[Array, "... K n R 32"],
    codes: UInt[Array, "u W"],
    bits: int,
    index: tuple[Int[Array, ""] | int, ...],
    token: Int[Array, ""] | int,
    wanted: Bool[Array, ""] | None,
) -> UInt[Array, "... K n R 32"]:
    """Store the codes of one token, or of whole stretches, at `index` from body token `token` on; where `wanted` is
    False, nothing."""
    tokens, (heads, _, rows, _) = len(codes), words.shape[-4:]
    parts = codes.reshape(-1, min(tokens, STRETCH), heads, rows, 32 // bits)
    new = (parts << _places(bits, parts.ndim)).sum(-1, dtype=jnp.uint32).transpose(2, 0, 3, 1)
    new = new.reshape((1,) * len(index) + new.shape)
    start = (*index, 0, floor_divide(token, STRETCH), 0, modulo(token, STRETCH))
    if wanted is not None:
        new = jnp.where(wanted, new, cut_at(words, start, new.shape))
    return put_at(words, row_major(new), start)


def unpack(words: UInt[Array, "*B n R 32"], bits: int) -> UInt[Array, "*B n*32 D"]:
    """Unpack whole stretches to the codes of their tokens. Words are transposed, not codes, which are more."""
    turned = jnp.swapaxes(words, -1, -2)[..., None]
    codes = (turned >> _places(bits, turned.ndim)) & jnp.uint32((1 << bits) - 1)
    return codes.reshape(*words.shape[:-3], words.shape[-3] * STRETCH, -1)


def read(
    words: UInt[Array, "L B K n R 32"], bits: int, layer: Int[Array, ""] | int, token: Int[Array, ""] | int, count: int
) -> UInt[Array, "B count W"]:
    """Read `count` tokens of every row of one layer from body token `token`, both whole stretches."""
    size = (1, *words.shape[1:3], count // STRETCH, *words.shape[4:])
    part = row_major(cut_at(words, (layer, 0, 0, floor_divide(token, STRETCH), 0, 0), size))[0]
    codes = jnp.swapaxes(unpack(part, bits), 1, 2)
    return codes.reshape(*codes.shape[:2], -1)
