"""The protocol of packings: how the arrays of a field are laid out, written and read.

A packing is a value. It knows the sizes of a field, and where the number of (layer, row, token,
channel) lies. The arrays of a field are `Stored`, a tuple of `[L, B, *axes]`. Tokens are written
and read as tiles. A tile's shape depends on the field's kind (`kvqjax.ops.layout.Field`) and not on
the packing, so every packing gives back equal tiles.

What packings and kernels alike know of stored numbers: plane sets, words of codes, the bits of
16-bit floats.

Plain numbers, unpacked: rows of channels, as vectors and groups' scales have them, and rows of
tokens.

16-bit floats are stored as the integers that hold their bits (`kvqjax.ops.packing.base`)."""

import abc
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Num, Shaped, UInt

from kvqjax.ops.finite import saturated
from kvqjax.ops.xla_workarounds import cut_at, floor_divide, put_at, row_major

PLANE = 32  # tokens of a plane: the rows of a block of words
BLOCK = 256  # tokens; the blocks of every packing are multiples of it
FEW = 256  # tokens of a tile; longer tiles are written as one piece, shorter ones plane by plane


def split_bits(bits: int) -> tuple[int, ...]:
    """Split `bits` into powers of two, largest first: the plane sets of a code."""
    return tuple(1 << i for i in reversed(range(5)) if bits >> i & 1)


def unpack(words: UInt[Array, "*B R W"], bits: int, plane: int = PLANE) -> UInt[Array, "*B S W"]:
    """Unpack whole blocks of `plane` rows.

    Args:
        words: rows of words; R is a multiple of `plane`.
        bits: of a code, a power of two.
        plane: tokens whose codes sit in the same bits of neighbouring rows.

    Returns:
        The codes of S = R*32/bits tokens, in token order.
    """
    lead, (rows, width) = words.shape[:-2], words.shape[-2:]
    blocks = words.reshape(*lead, rows // plane, 1, plane, width)
    shifts = np.arange(0, 32, bits, dtype=np.uint32).reshape((1,) * (blocks.ndim - 3) + (-1, 1, 1))
    return ((blocks >> shifts) & jnp.uint32((1 << bits) - 1)).reshape(
        *lead, rows * 32 // bits, width
    )


# 16-bit floats are stored as the integers that hold their bits. XLA's CPU backend has no 16-bit
# float operations: it would convert a whole array to float32 and back around every slice and every
# update of it.


def is_half(dtype) -> bool:
    """Say whether numbers of `dtype` are stored as the integers that hold their bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2


def to_bits(x: Shaped[Array, "*S"]) -> Shaped[Array, "*S"]:
    """Give what is stored for `x`: uint16 for 16-bit floats, `x` itself for everything else."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if is_half(x.dtype) else x


def from_bits(x: Shaped[Array, "*S"], dtype: str) -> Shaped[Array, "*S"]:
    """Give the numbers of `dtype` that `to_bits` stored. For slices: of a whole array it may make a
    copy."""
    return jax.lax.bitcast_convert_type(x, dtype) if is_half(dtype) else x


def slot_rows(count: int, dtype: str) -> int:
    """Count the rows of 16-bit words that `count` slots take per token, each a number of `dtype`
    and a channel.

    One array holds both. XLA for TPUs lays it out anew around a decode loop unless its rows are a
    multiple of 8; 12 slots are 24.
    """
    return count * (jnp.dtype(dtype).itemsize // 2 + 1)


@functools.cache
def number_bits(dtype) -> int:
    """Count the bits of one stored number. XLA packs numbers narrower than a byte; `itemsize` says
    a byte for each."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 8 * dtype.itemsize


def array_bytes(tree) -> int:
    """Count the bytes of an array, or of all arrays of a pytree, live or abstract, on all devices
    together.

    Two int4 numbers share a byte, whatever an array's `nbytes` says: this is what the device's
    memory holds.
    """
    return sum(-(-math.prod(x.shape) * number_bits(x.dtype) // 8) for x in jax.tree.leaves(tree))


Stored = tuple  # the arrays of one field: one for each plane set, else a single one
Number = Int[Array, ""] | int

TOKENS, CHANNELS = "tokens", "channels"  # what an axis of a stored array counts
# Tokens that `convert` moves at a time; groups have 32, 64 or 128 tokens, so these are whole groups
PIECE = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing(abc.ABC):
    """The place of the numbers of one field in memory.

    Attributes:
        width: channels of a token, or numbers of a token.
        bits: of a code; 0 where plain numbers are stored.
        group: tokens that share a number.
        dtype: of plain numbers; "compute" until a cache's compute dtype is known.
        heads: KV heads, where they are stored apart, else 0.
        axes: what the axes of a stored array behind [L, B] count: TOKENS, CHANNELS, or None for an
            axis that a mesh never splits.
        scatters: whether the packing has `scatter`.
    """

    width: int
    bits: int = 0
    group: int = 1
    dtype: str = "bfloat16"
    heads: int = 0

    axes: ClassVar[tuple[str | None, ...]] = (TOKENS, CHANNELS)
    scatters: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def token_bits(self) -> float:
        """Stored bits per token, without padding; the compute dtype counts as 16 bits until it is
        known."""

    @property
    def block(self) -> int:
        """Tokens of a block: a body has whole blocks, and is read in whole blocks."""
        return math.lcm(BLOCK, self.group)

    @property
    def token_axis(self) -> int:
        """The axis of the stored arrays that counts tokens. All its entries have the same number of
        slots."""
        return 2 + self.axes.index(TOKENS)

    @property
    def in_bits(self) -> "Packing":
        """A packing of the same arrays whose tiles are the stored integers: for moving numbers
        without converting."""
        return self

    @abc.abstractmethod
    def allocate(self, lead: tuple[int, ...], slots: int) -> Stored:
        """Make zeroed arrays for `slots` tokens, with `lead` = (L, B) in front."""

    @abc.abstractmethod
    def write(
        self,
        stored: Stored,
        index: tuple[Number, ...],
        token: Number,
        tile: Num[Array, "rows lanes"],
        write_mask: Bool[Array, ""] | None = None,
    ) -> Stored:
        """Store one tile.

        Args:
            stored: the arrays.
            index: (layer, row).
            token: the slot of the tile's first token.
            tile: of u tokens, shaped as the field's kind says. For codes u is 1, or u and `token`
                are multiples of 32; a tile of at most FEW tokens begins at a multiple of u.
            write_mask: whether to store it; None is always.

        Returns:
            The arrays with the tile, or as they were where the mask is False.
        """

    @abc.abstractmethod
    def read(
        self, stored: Stored, layer: Number, token: Number, count: int
    ) -> Shaped[Array, "B rows lanes"]:
        """Read `count` tokens of every row of one layer from slot `token`, both whole blocks, as a
        tile of each row."""

    def scatter(
        self,
        stored: Stored,
        layer: Number,
        slots: Int[Array, " B"],
        tile: Num[Array, "_ _"],
        write_mask: Bool[Array, " B"],
    ) -> Stored:
        """Store one token of each row that `write_mask` marks, in the slot of `slots`, by one
        scatter per array. `tile` has a token of each row. The result is the same as that of `write`
        row by row."""
        raise NotImplementedError(f"{type(self).__name__} has no scatter")

    def first_slots(self, stored: Stored, slots: int, count: int) -> Stored:
        """Take the first `count` of a body's `slots` slots, both static and whole blocks, as they
        are stored."""
        axis = self.token_axis
        return tuple(
            jax.lax.slice_in_dim(x, 0, x.shape[axis] * count // slots, axis=axis) for x in stored
        )

    def spans(
        self,
        stored: Stored,
        slots: int,
        layer: Number,
        rows: Int[Array, " n"],
        first: Int[Array, " n"],
        size: int,
    ) -> Stored:
        """Cut `size` of a body's `slots` slots out of each of `rows`, from slot `first` on, both
        whole blocks.

        Returns:
            Arrays as they are stored, [1, n, ...].
        """
        axis = self.token_axis

        def cut(x):
            slots_each = slots // x.shape[axis]  # of an entry
            shape = [1, 1, *x.shape[2:]]
            shape[axis] = size // slots_each

            def span(row, slot):
                start = [layer, row, *[0] * (x.ndim - 2)]
                start[axis] = floor_divide(slot, slots_each)
                return cut_at(x, tuple(start), tuple(shape))

            return jax.vmap(span, out_axes=1)(rows, first)[:, :, 0]

        return tuple(map(cut, stored))

    def resized(self, stored: Stored, slots: int, new_slots: int) -> Stored:
        """Change the number of slots from `slots` to `new_slots`. New slots are zero. If nothing
        changes, the arrays themselves are returned."""
        axis = self.token_axis

        def resize(x):
            missing = x.shape[axis] * new_slots // slots - x.shape[axis]
            if missing < 0:
                return jax.lax.slice_in_dim(x, 0, x.shape[axis] + missing, axis=axis)
            blank = jnp.zeros((*x.shape[:axis], missing, *x.shape[axis + 1 :]), x.dtype)
            return jnp.concatenate([x, blank], axis)

        return stored if slots == new_slots else tuple(map(resize, stored))


@functools.partial(jax.jit, static_argnames=("old", "new", "slots", "new_slots"))
def convert(old: Packing, new: Packing, stored: Stored, slots: int, new_slots: int) -> Stored:
    """Read one layer's field in one packing and write it in another, PIECE tokens at a time.

    Args:
        old: the packing of `stored`.
        new: the packing of the result; its tiles have the same shape.
        stored: arrays [1, B, ...].
        slots: of `stored`.
        new_slots: of the result. The two differ where the packings have blocks of different sizes;
            slots that only one of them has hold no token.

    Returns:
        Arrays [1, B, ...] of the new packing.
    """
    rows, common = stored[0].shape[1], min(slots, new_slots)
    tiles = old.read(stored, 0, 0, slots)[:, :common].reshape(rows, -1, PIECE, old.width)

    def put(number, out):
        row, piece = number // tiles.shape[1], number % tiles.shape[1]
        return new.write(out, (jnp.int32(0), row), piece * PIECE, tiles[row, piece])

    return jax.lax.fori_loop(0, rows * tiles.shape[1], put, new.allocate((1, rows), new_slots))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordPacking(Packing):
    """Codes in uint32 words. A number of bits that is no power of two is stored as several plane
    sets, each in an array of its own: 3 bits = 2 + 1, 6 = 4 + 2, 12 = 8 + 4. A subclass says where
    the words of one plane set lie."""

    @property
    def token_bits(self) -> float:
        return float(self.bits * self.width)

    @property
    def block(self) -> int:
        return math.lcm(BLOCK, *(self.plane(bits) * 32 // bits for bits in split_bits(self.bits)))

    def plane(self, bits: int) -> int:
        """Count the tokens of a plane: the tokens of a block whose codes of `bits` bits are in the
        same bits of neighbouring words."""
        return PLANE

    @abc.abstractmethod
    def words_shape(self, slots: int, bits: int) -> tuple[int, ...]:
        """Give the shape of one row's words of a plane set."""

    @abc.abstractmethod
    def write_set(
        self, words, codes: UInt[Array, "u W"], bits: int, index, token, write_mask
    ) -> UInt[Array, "..."]:
        """Put codes of `bits` bits into the words of their plane set; the rest is as in `write`."""

    @abc.abstractmethod
    def read_set(self, words, bits: int, layer, token, count: int) -> UInt[Array, "B count W"]:
        """Read codes of `bits` bits from the words of their plane set; the rest is as in `read`."""

    def allocate(self, lead, slots):
        return tuple(
            jnp.zeros((*lead, *self.words_shape(slots, bits)), jnp.uint32)
            for bits in split_bits(self.bits)
        )

    def by_set(
        self, stored: Stored, codes: UInt[Array, "u W"]
    ) -> Iterator[tuple[Array, Array, int]]:
        """Yield each plane set's words, its part of the codes and the bits of that part."""
        shift = 0
        for words, bits in zip(stored, split_bits(self.bits), strict=True):
            yield words, (codes >> shift) & ((1 << bits) - 1), bits
            shift += bits

    def write(self, stored, index, token, tile, write_mask=None):
        parts = self.by_set(stored, tile.astype(jnp.uint32))
        return tuple(
            self.write_set(words, part, bits, index, token, write_mask)
            for words, part, bits in parts
        )

    def read(self, stored, layer, token, count):
        codes, shift = jnp.uint32(0), 0
        for words, bits in zip(stored, split_bits(self.bits), strict=True):
            codes = codes | (self.read_set(words, bits, layer, token, count) << shift)
            shift += bits
        return codes


# ---- What several packings have in common ----


def chosen(write_mask: Bool[Array, ""] | None, new: Array, old: Array) -> Array:
    """Take `new` where the mask is True (None: always), else `old`."""
    return new if write_mask is None else jnp.where(write_mask, new, old)


def cut_tokens(
    array: Shaped[Array, "L B ..."], layer: Number, start: Number, count: int, axis: int
) -> Array:
    """Cut `count` entries from `start` on along `axis` out of one layer, all batch rows."""
    starts = [layer, *[0] * (array.ndim - 1)]
    sizes = [1, *array.shape[1:]]
    starts[axis] = start
    sizes[axis] = count
    return row_major(cut_at(array, tuple(starts), tuple(sizes)))[0]


def pieces(tokens: int, piece: int, step: int) -> int:
    """Count the most pieces that a run of consecutive tokens can touch.

    Args:
        tokens: of the run.
        piece: tokens of a piece; pieces begin at multiples of it.
        step: tokens; the run begins at a multiple of it, which need not be a multiple of `piece`.

    Returns:
        The number of pieces, the first and the last of which may be touched in part."""
    return -(-(tokens + piece - step) // piece)


def placed(
    codes: Num[Array, "u W"], offset: Number, count: int
) -> tuple[Num[Array, "n W"], Bool[Array, " n"]]:
    """Put the codes of u tokens from place `offset` on among `count` tokens of code 0. Also mark
    these u places."""
    place = jnp.arange(count)
    blank = jnp.zeros((count, codes.shape[1]), codes.dtype)
    return put_at(blank, codes, (offset, 0)), (place >= offset) & (place < offset + len(codes))


def entry_index(array: Array, layer: Number, place: Int[Array, " B"], lanes: bool) -> tuple:
    """Make the index of one entry of every row, [B, W].

    With `lanes` entries are on the last axis. Then every single number is indexed: XLA would
    transpose an array of which whole entries are scattered along an axis that is not among the
    first."""
    rows = jnp.arange(array.shape[1])
    if not lanes:
        return layer, rows, place
    return layer, rows[:, None], jnp.arange(array.shape[2])[None], place[:, None]


def with_entries(
    array: Array,
    layer: Number,
    place: Int[Array, " B"],
    new: Num[Array, "B W"],
    row_mask: Bool[Array, " B"],
    lanes: bool,
) -> Array:
    """Return `array` with one new entry of every marked row."""
    place = jnp.where(row_mask, place, array.shape[-1 if lanes else -2])  # beyond the end: dropped
    return array.at[entry_index(array, layer, place, lanes)].set(
        new, mode="drop", unique_indices=True, wrap_negative_indices=False
    )


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
        return (
            jnp.zeros((*lead, *self.shape(slots)), "uint16" if is_half(self.dtype) else self.dtype),
        )

    def write(self, stored, index, token, tile, write_mask=None):
        start = (*index, *self.start(token))
        tile = to_bits(saturated(tile, self.dtype)).reshape((1,) * len(index) + tile.shape)
        if write_mask is not None:
            tile = chosen(write_mask, tile, cut_at(stored[0], start, tile.shape))
        return (put_at(stored[0], row_major(tile), start),)

    def read(self, stored, layer, token, count):
        start = floor_divide(token, self.group)
        return from_bits(
            cut_tokens(stored[0], layer, start, count // self.group, self.token_axis), self.dtype
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens(Rows):
    """W numbers of each token, tokens on the lanes, `[L, B, W, S]`: a last axis of 1 would be
    padded to 128."""

    axes = (CHANNELS, TOKENS)
    scatters = True

    def shape(self, slots):
        return self.width, slots

    def start(self, token):
        return 0, token

    def scatter(self, stored, layer, slots, tile, write_mask):
        numbers = to_bits(saturated(tile, self.dtype)).T
        return (with_entries(stored[0], layer, slots, numbers, write_mask, lanes=True),)
