"""Fields stored head by head, `[L, B, K, rows, D]`: the form that XLA reads best on GPUs, straight into its products.

Codes are signed integers, because XLA for GPUs fuses the conversion of those into a product and no other unpacking:

- 3 or 4 bits: int4, c - 8. 3 bits are stored as 4: a third plane would be read a second time.
- 1 or 2 bits: two tokens a nibble, n = 4 c1 - 8 + (c0, or 3 - c0 where c1 is even), so that c1 - 2 = floor(n / 4) and
  c0 + 0.5 = ||n + 0.5| - 4|: of each code's reading XLA makes one chain of operations, which it fuses as well. Of 256
  consecutive tokens the first 128 are the c0 of 128 rows, the others their c1.
- 5 to 8 bits: int8, c - 128.

Floats are stored as they are.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Num, Shaped

from kvqjax.ops.finite import saturated
from kvqjax.ops.xla import cut_at, floor_divide, modulo, put_at, row_major

__all__ = ["HALF", "allocate", "offset", "read", "stored_bits", "tokens_per_row", "write"]

HALF = 128  # tokens of one plane of a nibble: whole groups of every size


def tokens_per_row(bits: int) -> int:
    """How many tokens' codes of `bits` bits share a stored number."""
    return 2 if bits <= 2 else 1


def stored_bits(bits: int) -> int:
    """Bits that a code of `bits` bits takes here."""
    return 2 if bits <= 2 else 4 if bits <= 4 else 8


def offset(bits: int) -> int:
    """What is taken off a code that has a number of its own, so that it is signed."""
    return 128 if bits > 4 else 8


def _dtype(field):
    if field.kind == "plain":
        return jnp.dtype(field.dtype)
    return jnp.dtype("int8") if field.bits > 4 else jnp.dtype("int4")


def allocate(field, lead: tuple[int, ...], slots: int) -> tuple[Array, ...]:
    """Zeroed array for `slots` tokens, with `lead` = (L, B) in front."""
    rows = slots // tokens_per_row(field.bits) if field.packed else slots
    return (jnp.zeros((*lead, field.heads, rows, field.width // field.heads), _dtype(field)),)


def _split(x: Shaped[Array, "*B u W"], heads: int) -> Shaped[Array, "*B K u D"]:
    return jnp.swapaxes(x.reshape(*x.shape[:-1], heads, -1), -2, -3)


def _joined(x: Shaped[Array, "*B K u D"]) -> Shaped[Array, "*B u W"]:
    x = jnp.swapaxes(x, -2, -3)
    return x.reshape(*x.shape[:-2], -1)


def _split_pair(n: Int[Array, "*S"]) -> tuple[Int[Array, "*S"], Int[Array, "*S"]]:
    """Both codes of a nibble."""
    upper = (n + 8) >> 2
    return jnp.where(upper & 1 == 1, n & 3, 3 - (n & 3)), upper


def _as_pair(lower: Int[Array, "*S"], upper: Int[Array, "*S"]) -> Int[Array, "*S"]:
    """The nibble of two codes."""
    return 4 * upper - 8 + jnp.where(upper & 1 == 1, lower, 3 - lower)


def _place(field, token):
    """(row, plane) of a body token."""
    if field.packed and tokens_per_row(field.bits) == 2:
        plane = floor_divide(modulo(token, 2 * HALF), HALF)
        return floor_divide(token, 2 * HALF) * HALF + modulo(token, HALF), plane
    return token, jnp.int32(0)


def _write_piece(field, array, index, token, piece, wanted):
    """Put `piece` [K, u, D] of consecutive tokens into consecutive rows of one plane."""
    row, plane = _place(field, token)
    start, shape = (*index, 0, row, 0), (1,) * len(index) + piece.shape
    old = cut_at(array, start, shape)
    if not field.packed:
        new = saturated(piece, array.dtype).reshape(shape)
    else:
        new = piece.astype(jnp.int32).reshape(shape)
        if tokens_per_row(field.bits) == 2:
            lower, upper = _split_pair(old.astype(jnp.int32))
            new = _as_pair(jnp.where(plane == 0, new, lower), jnp.where(plane == 0, upper, new))
        else:
            new = new - offset(field.bits)
        new = new.astype(array.dtype)
    if wanted is not None:
        new = jnp.where(wanted, new, old)
    return put_at(array, row_major(new), start)


def pieces(tokens: int, piece: int, step: int) -> int:
    """The most pieces of `piece` tokens that a stretch of `tokens` from any multiple of `step` on is part of."""
    return -(-(tokens + piece - step) // piece)


def placed(codes: Num[Array, "u W"], offset, count: int) -> tuple[Num[Array, "n W"], Bool[Array, " n"]]:
    """The codes from `offset` on among `count` tokens that are else 0, and which tokens they are."""
    place = jnp.arange(count)
    blank = jnp.zeros((count, codes.shape[1]), codes.dtype)
    return put_at(blank, codes, (offset, 0)), (place >= offset) & (place < offset + len(codes))


def _write_rows(field, array, index, token, tile, wanted):
    """Put many tokens `tile` [K, u, D] into the rows that they are parts of, as one piece."""
    heads, tokens, dim = tile.shape
    pair = 2 * HALF
    if not (field.packed and tokens_per_row(field.bits) == 2):
        start, shape = (*index, 0, token, 0), (1,) * len(index) + tile.shape
        new = tile.astype(jnp.int32) - offset(field.bits) if field.packed else saturated(tile, array.dtype)
        new, old = new.astype(array.dtype).reshape(shape), cut_at(array, start, shape)
    else:
        count = min(pieces(tokens, pair, 32), array.shape[-2] // HALF)
        first = jnp.minimum(floor_divide(token, pair), array.shape[-2] // HALF - count)
        flat = jnp.swapaxes(tile, 0, 1).reshape(tokens, heads * dim).astype(jnp.int32)
        codes, here = placed(flat, token - first * pair, count * pair)
        planes = jnp.moveaxis(codes.reshape(count, 2, HALF, heads, dim), (1, 3), (0, 1))
        here = jnp.moveaxis(here.reshape(count, 2, HALF), 1, 0)[:, None, ..., None]
        start = (*index, 0, first * HALF, 0)
        old = cut_at(array, start, (1,) * len(index) + (heads, count * HALF, dim))
        held = _split_pair(old.astype(jnp.int32).reshape(heads, count, HALF, dim))
        lower, upper = (jnp.where(mine, x, y) for mine, x, y in zip(here, planes, held, strict=True))
        new = _as_pair(lower, upper).astype(array.dtype).reshape(old.shape)
    if wanted is not None:
        new = jnp.where(wanted, new, old)
    return put_at(array, row_major(new), start)


def write(
    field,
    stored: tuple[Array, ...],
    index: tuple[Int[Array, ""] | int, ...],
    token: Int[Array, ""] | int,
    tile: Num[Array, "u W"],
    wanted: Bool[Array, ""] | None = None,
) -> tuple[Array, ...]:
    """Store one tile at (layer, row) = `index` from body token `token`; where `wanted` is False, nothing. As
    `kvqjax.ops.layout.write`, whose tiles these are: u is 1, or u and `token` are multiples of 32 and u divides 128
    or is more than 256."""
    tile, (array,) = _split(tile, field.heads), stored
    if tile.shape[1] > 2 * HALF:
        return (_write_rows(field, array, index, token, tile, wanted),)
    for first in range(0, tile.shape[1], HALF):
        array = _write_piece(field, array, index, token + first, tile[:, first : first + HALF], wanted)
    return (array,)


def read(field, stored: tuple[Array, ...], layer, token, count: int) -> Shaped[Array, "B count W"]:
    """`count` tokens of every row of one layer from body token `token`, both multiples of 256: codes as uint32."""
    (array,), per = stored, tokens_per_row(field.bits) if field.packed else 1
    shape = (1, *array.shape[1:3], count // per, array.shape[4])
    part = row_major(cut_at(array, (layer, 0, 0, floor_divide(token, per), 0), shape))[0]
    if not field.packed:
        return _joined(part)
    codes = part.astype(jnp.int32)
    if per == 2:
        pairs = codes.reshape(*codes.shape[:2], -1, 1, HALF, codes.shape[3])
        codes = jnp.concatenate(_split_pair(pairs), axis=3).reshape(*codes.shape[:2], count, -1)
    else:
        codes = codes + offset(field.bits)
    return _joined(codes).astype(jnp.uint32)
