"""Packed storage of a cache body: what is written, where, and how it is read back.

A body array stores one `Field` for every layer and row, `[L, B, rows, lanes]`, the lanes being channels:

- codes:  b-bit integers, one per token and channel, packed along tokens into uint32 words in planes. A block of
          1024/b tokens is 32 rows of words; token t of the block sits in row t % 32, bits b*(t//32) and up. So one
          shift and one mask turn 32 rows into 32 consecutive tokens, and no data moves. Widths that are no power of
          two are several plane sets: 3 bits = 2 + 1, 6 = 4 + 2, 12 = 8 + 4.
- columns: the same words on the lanes, `[width, rows]`: for a width that is no multiple of 128, whose rows XLA for TPUs
          keeps like this anyway, and would turn before and after every decode loop.
- stripes: words of 1024 tokens of a channel side by side, `[S/1024, width, 32*b]`, as a CPU's vector unit sums values
          up: token t of a block sits in word t % (32*b), bits b*(t // (32*b)) and up.
- lines:  words of a token's neighbouring channels, head by head, as a CPU multiplies keys by queries
          (kvqjax/ops/lines.py).
- group:  one float per channel for every `group` tokens, `[S/group, lanes]`.
- token:  `width` numbers per token, tokens on the lanes: `[width, S]` (a trailing axis of 1 would be padded to 128).
- plain:  unpacked vectors in `dtype`, `[S, lanes]` (the exact cache).

These are the forms of CPUs and of our TPU kernels. With `heads` set, codes and plain vectors are stored head by head,
for GPUs (kvqjax/ops/head_major.py); what is written and read back is the same.

16-bit floats are stored as the integers that hold their bits: XLA's CPU backend has no 16-bit float operations, and
would convert a whole array to float32 and back around every slice and every update of it.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Num, Shaped, UInt

from kvqjax.ops import head_major, lines
from kvqjax.ops.finite import saturated
from kvqjax.ops.xla import cut_at, floor_divide, modulo, put_at, row_major

__all__ = [
    "FEW",
    "PLANE",
    "Field",
    "from_bits",
    "is_half",
    "read",
    "slot_rows",
    "split_bits",
    "to_bits",
    "write",
]

PLANE = 32  # tokens per plane: the rows of a block of words
FEW = 256  # tokens that are written block by block

Stored = tuple  # the arrays of one field, one per plane set


def split_bits(bits: int) -> tuple[int, ...]:
    """Split `bits` into powers of two, largest first: the plane sets of a code."""
    return tuple(1 << i for i in reversed(range(5)) if bits >> i & 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """One stored quantity of a codec. `kind` is "codes", "columns", "stripes", "lines", "group", "token" or "plain"
    (see the module); `role` is its ledger class: payload, scales, zeros or outliers; `dtype` "compute" stands for the
    cache's compute dtype; `heads` is the number of KV heads where it is stored head by head, else 0."""

    kind: str
    width: int
    role: str
    bits: int = 0
    group: int = 1
    dtype: str = "bfloat16"
    heads: int = 0

    def __post_init__(self):
        if self.kind not in ("codes", "columns", "stripes", "lines", "group", "token", "plain"):
            raise ValueError(f"unknown field kind {self.kind!r}")
        if self.packed and not 1 <= self.bits <= 16:
            raise ValueError(f"codes of {self.bits} bits; 1 to 16 can be packed")

    @property
    def packed(self) -> bool:
        """Whether it is stored as words of codes."""
        return self.kind in ("codes", "columns", "stripes", "lines")

    @property
    def head_major(self) -> bool:
        """Whether it is stored as `kvqjax.ops.head_major` says."""
        return self.heads > 0 and self.kind in ("codes", "plain")

    @property
    def along_lanes(self) -> bool:
        """Whether tokens follow each other on the lanes, the last axis."""
        return self.kind in ("columns", "token")

    @property
    def slots_axis(self) -> int:
        """The axis of the stored arrays, from the end, whose entries are the same number of slots each."""
        return {"columns": -1, "token": -1, "stripes": -3, "lines": -3}.get(self.kind, -2)

    def plane(self, bits: int) -> int:
        """Count the tokens of a plane: of a block's tokens, those whose codes of `bits` bits sit in the same bits of
        words side by side."""
        return PLANE * bits if self.kind == "stripes" else PLANE


def is_half(dtype) -> bool:
    """Say whether numbers of `dtype` are stored as the integers that hold their bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2


def to_bits(x: Shaped[Array, "*S"]) -> Shaped[Array, "*S"]:
    """Give what is stored for `x`: uint16 for 16-bit floats, `x` itself for everything else."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if is_half(x.dtype) else x


def from_bits(x: Shaped[Array, "*S"], dtype: str) -> Shaped[Array, "*S"]:
    """Give the numbers of `dtype` that `to_bits` stored. For slices: of a whole array it may make a copy."""
    return jax.lax.bitcast_convert_type(x, dtype) if is_half(dtype) else x


def slot_rows(count: int, dtype: str) -> int:
    """Count the rows of 16-bit words that `count` slots of a number of `dtype` and a channel take per token. One array
    holds both: XLA for TPUs lays it out anew around a decode loop unless its rows are a multiple of 8; 12 slots are 24.
    """
    return count * (jnp.dtype(dtype).itemsize // 2 + 1)


def _chosen(wanted, new, old):
    """`new` where it is wanted (None: always), else what stands there."""
    return new if wanted is None else jnp.where(wanted, new, old)


def _write_part(field, words, codes, index, token, bits, wanted):
    """Put the codes of u tokens from a multiple of u on, whole planes of one block or fewer tokens than a plane, into
    the words that hold them; their old bits are cleared first (write once, docs/design.md, idea 8)."""
    plane = field.plane(bits)
    per, count = plane * 32 // bits, max(1, len(codes) // plane)
    start = _start(field, index, floor_divide(token, per), token, plane)
    shift = jnp.asarray(floor_divide(modulo(token, per), plane) * bits, jnp.uint32)
    shifts = np.arange(0, count * bits, bits, dtype=np.uint32).reshape(-1, 1, 1)
    codes = (codes.reshape(count, -1, codes.shape[-1]) << shifts).sum(0, dtype=jnp.uint32) << shift
    codes = _turned(field, codes, plane)
    old = cut_at(words, start, (1,) * len(index) + codes.shape)
    mask = jnp.uint32((1 << count * bits) - 1) << shift
    new = _chosen(wanted, (old & ~mask) | codes.reshape(old.shape), old)
    return put_at(words, row_major(new), start)


def _start(field, index, block, token, plane) -> tuple:
    """Say where a token's words in a block are stored."""
    if field.kind == "stripes":
        return (*index, block, 0, modulo(token, plane))
    row = block * plane + modulo(token, plane)
    return (*index, 0, row) if field.along_lanes else (*index, row, 0)


def _turned(field, words, plane):
    """Turn rows of words, of one block or fewer or of whole blocks, as they are stored."""
    if field.kind == "stripes":
        return words.reshape(-1, min(len(words), plane), words.shape[-1]).swapaxes(1, 2)
    return words.T if field.along_lanes else words


def write(
    field: Field,
    stored: Stored,
    index: tuple[Int[Array, ""] | int, ...],
    token: Int[Array, ""] | int,
    tile: Num[Array, "rows lanes"],
    wanted: Bool[Array, ""] | None = None,
) -> Stored:
    """Store one tile at (layer, row) = `index`, starting at body token `token`; where `wanted` is False, nothing.

    A tile of codes, in words of any kind, holds u tokens `[u, W]`: u = 1, or u and `token` both multiples of 32, and
    `token` one of u where that is at most FEW. Group tiles are `[u/group, W]`, token tiles `[W, u]`, plain tiles
    `[u, W]`."""
    if field.head_major:
        return head_major.write(field, stored, index, token, tile, wanted)
    if field.packed:
        return tuple(_write_codes(field, stored, index, token, tile.astype(jnp.uint32), wanted))
    start = (*index, 0, token) if field.kind == "token" else (*index, floor_divide(token, field.group), 0)
    tile = to_bits(saturated(tile, field.dtype)).reshape((1,) * len(index) + tile.shape)
    if wanted is not None:
        tile = _chosen(wanted, tile, cut_at(stored[0], start, tile.shape))
    return (put_at(stored[0], row_major(tile), start),)


def _write_codes(field, stored, index, token, tile, wanted):
    shift = 0
    for words, bits in zip(stored, split_bits(field.bits), strict=True):
        part = (tile >> shift) & ((1 << bits) - 1)
        if field.kind == "lines":
            words = lines.write(words, part, bits, index, token, wanted)
        elif tile.shape[0] <= FEW:
            size = math.gcd(tile.shape[0], field.plane(bits) * 32 // bits)
            for first in range(0, tile.shape[0], size):
                words = _write_part(field, words, part[first : first + size], index, token + first, bits, wanted)
        else:
            words = _write_blocks(field, words, part, index, token, bits, wanted)
        yield words
        shift += bits


def _write_blocks(field, words, codes, index, token, bits, wanted):
    """Put many tokens' codes into the blocks that they are parts of, as one piece."""
    plane = field.plane(bits)
    blocks, per = math.prod(words.shape[len(index) :]) // (field.width * plane), plane * 32 // bits
    count = min(head_major.pieces(len(codes), per, PLANE), blocks)
    first = jnp.minimum(floor_divide(token, per), blocks - count)
    codes, here = head_major.placed(codes, token - first * per, count * per)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)[None, :, None, None]
    pack = lambda x: (x.reshape(count, -1, plane, x.shape[1]) << shifts).sum(1, dtype=jnp.uint32)  # noqa: E731
    full = jnp.where(here, jnp.uint32((1 << bits) - 1), jnp.uint32(0))[:, None]
    codes, mask = (pack(x).reshape(count * plane, -1) for x in (codes, full))
    start = _start(field, index, first, 0, plane)
    codes, mask = _turned(field, codes, plane), _turned(field, mask, plane)
    shape = (1,) * len(index) + codes.shape
    old = cut_at(words, start, shape)
    new = _chosen(wanted, (old & ~mask.reshape((1,) * len(index) + mask.shape)) | codes.reshape(shape), old)
    return put_at(words, row_major(new), start)


def unpack(words: UInt[Array, "*B R W"], bits: int, plane: int = PLANE) -> UInt[Array, "*B S W"]:
    """Unpack whole blocks of `plane` rows: R rows of words become the codes of R*32/bits tokens, in token order."""
    lead, (rows, width) = words.shape[:-2], words.shape[-2:]
    blocks = words.reshape(*lead, rows // plane, 1, plane, width)
    shifts = np.arange(0, 32, bits, dtype=np.uint32).reshape((1,) * (blocks.ndim - 3) + (-1, 1, 1))
    return ((blocks >> shifts) & jnp.uint32((1 << bits) - 1)).reshape(*lead, rows * 32 // bits, width)


def read(
    field: Field, stored: Stored, layer: Int[Array, ""] | int, token: Int[Array, ""] | int, count: int
) -> Shaped[Array, "B rows lanes"]:
    """Read `count` tokens of every row of one layer from body token `token`, both multiples of the block, unpacked to
    tiles as `write` takes them, with B in front."""
    if field.head_major:
        return head_major.read(field, stored, layer, token, count)
    axis = stored[0].ndim + field.slots_axis
    if not field.packed:
        per = 1 if field.along_lanes else field.group
        return from_bits(_cut(stored[0], layer, floor_divide(token, per), count // per, axis), field.dtype)
    codes, shift = jnp.uint32(0), 0
    for words, bits in zip(stored, split_bits(field.bits), strict=True):
        codes = codes | (_read_part(field, words, layer, token, count, bits, axis) << shift)
        shift += bits
    return codes


def _read_part(field, words, layer, token, count, bits, axis):
    """Read the codes of one plane set."""
    if field.kind == "lines":
        return lines.read(words, bits, layer, token, count)
    each, times = (1024, 1) if field.kind == "stripes" else (32, bits)  # tokens of an entry of `axis`, or bits of them
    part = _cut(words, layer, floor_divide(token * times, each), count * times // each, axis)
    if field.kind != "codes":
        part = jnp.swapaxes(part, -1, -2).reshape(len(part), -1, field.width)
    return unpack(part, bits, field.plane(bits))


def _cut(array, layer, start, count, axis: int):
    """Cut `start:start+count` along `axis` out of one layer, all batch rows."""
    starts, sizes = [layer, *[0] * (array.ndim - 1)], [1, *array.shape[1:]]
    starts[axis], sizes[axis] = start, count
    return row_major(cut_at(array, tuple(starts), tuple(sizes)))[0]
