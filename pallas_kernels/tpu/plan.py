"""Static choices of one call of the TPU decode-attention kernel, and the order in which it takes
tokens."""

import dataclasses
import math

import numpy as np

from kvqjax.ops.packing.base import split_bits
from kvqjax.pallas_kernels.chips import LANES, TPUS, Tpu
from kvqjax.pallas_kernels.exact import ExactSpec
from kvqjax.pallas_kernels.packed import PackedSpec
from kvqjax.pallas_kernels.tpu.signposts import pair_order
from kvqjax.pallas_kernels.tpu.unpack import token_order

LOG2E = math.log2(math.e)
SHARE = 8  # lane groups that share a one-hot matrix of outliers, at most (`outlier_values`)
VMEM_BYTES = 64 * 2**20  # what a kernel may take; each of the chips has at least so much


def members(number, count: int) -> list:
    """List the numbers of the `count` members of stretch number `number`, which may be traced."""
    return [number * count + i for i in range(count)]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static choices of one call.

    Attributes:
        slots: Slots of a row.
        rows: Query rows of a lane group, padded to a multiple of 8.
        rows_per_head: Query rows of a KV head, T*G.
        tile: Tokens of a tile.
        ways: Fields of a word (`unpack`).
        lanes: Lanes of a lane group.
        splits: Programs that share a row's tokens.
        pieces: Parts in which a tile is worked off (`work.Work`).
        ahead: By how many turns scores are ahead of values (`work.Work`)."""

    spec: PackedSpec
    slots: int
    rows: int
    rows_per_head: int
    tile: int
    ways: int
    lanes: int
    splits: int = 1
    pieces: int = 1
    ahead: int | None = None

    @property
    def chip(self) -> Tpu:
        """The chip's properties."""
        return TPUS[self.spec.target]

    @property
    def lane_groups(self) -> int:
        """The number of lane groups."""
        return lane_groups(self.spec)

    @property
    def shared(self) -> int:
        """KV heads of a lane group."""
        return self.lanes // self.spec.head_dim

    @property
    def base(self) -> int:
        """Bits to which narrower plane sets are spread, so that keys and values come in one
        order."""
        return max(split_bits(self.spec.key_bits)[0], split_bits(self.spec.value_bits)[0])

    @property
    def block(self) -> int:
        """Tokens after which words, key groups and columns all start afresh."""
        # 32 words of 32 bits hold 1024 bits: codes of 1024/b tokens for every channel.
        narrowest = min(split_bits(self.spec.key_bits)[-1], split_bits(self.spec.value_bits)[-1])
        return math.lcm(1024 // narrowest, self.spec.key_group or 1, self.column)

    @property
    def blocks(self) -> int:
        """Blocks of a tile."""
        return self.tile // self.block

    @property
    def group(self) -> int:
        """Tokens of a key group, or of a block where all tokens share scales."""
        return self.spec.key_group or self.block

    def groups(self, index) -> list:
        """List the numbers, within a tile, of the key groups of block `index`."""
        return members(index, self.block // self.group)

    def columns(self, index) -> list:
        """List the numbers, within a tile, of the columns of block `index`."""
        return members(index, self.block // self.column)

    @property
    def column(self) -> int:
        """Tokens of one product: as many as the matrix unit takes at once, and a multiple of those
        that one piece of unpacked codes has. Signposts get fewer tokens, because making them takes
        registers."""
        widest = self.chip.matrix_lanes if self.spec.datatype == "uniform" else LANES
        return max(32 * self.ways, widest)

    @property
    def frequencies(self) -> np.ndarray:
        """Angle per position of each pair of channels, [D/2]; none for keys after RoPE."""
        return np.asarray(() if self.spec.rope is None else self.spec.rope.frequencies, np.float64)

    @property
    def mixed(self) -> bool:
        """Say whether the matrix unit multiplies narrow codes by bfloat16 queries as fast as
        bfloat16 by bfloat16."""
        return self.chip.narrow_products and self.ways > 2

    @property
    def spread(self) -> float:
        """The factor that turns products of queries and keys into scores as base-2 logarithms."""
        return (
            LOG2E
            * self.spec.head_dim**-0.5
            * (1.0 if self.spec.rope is None else self.spec.rope.factor)
        )

    @property
    def paired(self) -> bool:
        """Say whether signposts are gathered two at a time (`signposts`): where 16-bit numbers
        cannot be compared, or comparing them spills."""
        scarce = self.chip.pairs_3_bits and 3 in (self.spec.key_bits, self.spec.value_bits)
        return self.spec.datatype == "nuq" and (self.wide or scarce)

    @property
    def wide(self) -> bool:
        """Say whether codes are multiplied by scales as float32 numbers, since the vector unit has
        no bfloat16."""
        return not self.chip.vector_bfloat16

    @property
    def multiplied(self) -> bool:
        """Say whether key scales multiply the codes. Otherwise they multiply the queries, once for
        every key group.

        To multiply queries is cheaper where a product meets few groups, because each group has its
        own rows in the product. Keys before RoPE must be decoded before they are rotated."""
        small_groups = 0 < self.spec.key_group < LANES
        return self.spec.rope is not None or (small_groups and (self.ways == 2 or not self.wide))

    @property
    def slabs(self) -> bool:
        """Say whether scales of keys are laid out like the codes, in bfloat16 (`keys`)."""
        return self.multiplied and not self.wide

    @property
    def tiles(self) -> int:
        """Tiles of a row."""
        return -(-self.slots // self.tile)

    @property
    def order(self) -> np.ndarray:
        """Token at each position of a block, [block]."""
        return (
            pair_order(self.base, self.block)
            if self.paired
            else token_order(self.base, self.ways, self.block)
        )

    @property
    def period(self) -> int:
        """Tokens after which the order repeats itself."""
        return math.lcm(1024 // self.base, self.column)

    @property
    def onehot(self) -> np.ndarray:
        """The matrix that brings numbers of `period` tokens into lane order, [period, period]
        float32: x @ onehot."""
        matrix = np.zeros((self.period, self.period), np.float32)
        matrix[self.order[: self.period], np.arange(self.period)] = 1
        return matrix

    @property
    def key_rows(self) -> int:
        """Scales that a tile has for each channel of keys."""
        return self.tile // self.spec.key_group if self.spec.key_group else 1

    @property
    def value_rows(self) -> int:
        """Value scales of a token."""
        return self.spec.width // self.spec.value_group

    @property
    def value_slices(self) -> int:
        """Slices of a head's channels with a value scale of their own."""
        return self.spec.head_dim // self.spec.value_slice


def lane_groups(spec: PackedSpec | ExactSpec) -> int:
    """Return how many groups of lanes are handled one after the other.

    A group is the smallest number of whole heads that fills registers of 128 lanes. (A matrix unit
    of 256 lanes could take twice as many heads, but that spills registers.) Where such groups do
    not divide the width, all lanes are one group."""
    lanes = math.lcm(spec.head_dim, LANES)
    return spec.width // lanes if spec.width % lanes == 0 else 1
