"""Static choices of one call of the TPU decode-attention kernel, and the order in which it takes tokens."""

import dataclasses
import math

import numpy as np

from kvqjax.ops.layout import split_bits
from kvqjax.pallas_kernels.forms import form_of
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec
from kvqjax.pallas_kernels.support import lookup
from kvqjax.pallas_kernels.tpu.signposts import pair_order
from kvqjax.pallas_kernels.tpu.unpack import fitting_ways, token_order
from kvqjax.pallas_kernels.work import HALVES_AHEAD, HALVES_IN_TURN, SHORT, SHORT_IN_TURN, Work

__all__ = [
    "LANES",
    "LOG2E",
    "SHARE",
    "VMEM_BYTES",
    "WIDE",
    "Plan",
    "cheapest_ways",
    "lane_groups",
    "make_plan",
    "members",
]

LANES = 128
LOG2E = math.log2(math.e)
WIDE = "v5e", "v5p"  # chips whose vector units have no bfloat16
SHARE = 8  # lane groups that share a one-hot matrix of outliers
VMEM_BYTES = 64 * 2**20  # of a v7x core and of a v5p


def members(number, count: int) -> list:
    """The numbers of what is in stretch `number`, which may be traced, of `count` each."""
    return [number * count + i for i in range(count)]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static choices of one call: query rows of a lane group (padded to 8), tokens per tile, fields per word (see
    tpu_unpack), lanes that are handled together, parallel splits of the token axis, and how a tile is worked off (see
    tpu_work)."""

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
    def lane_groups(self) -> int:
        return lane_groups(self.spec)

    @property
    def shared(self) -> int:
        """Heads of a lane group."""
        return self.lanes // self.spec.head_dim

    @property
    def base(self) -> int:
        """Bits to which narrower plane sets are spread, so that keys and values come in one order."""
        return max(split_bits(self.spec.key_bits)[0], split_bits(self.spec.value_bits)[0])

    @property
    def block(self) -> int:
        """Tokens after which codes and key groups start afresh."""
        narrowest = min(split_bits(self.spec.key_bits)[-1], split_bits(self.spec.value_bits)[-1])
        return math.lcm(1024 // narrowest, self.spec.key_group or 1, self.column)

    @property
    def blocks(self) -> int:
        """Blocks of a tile."""
        return self.tile // self.block

    @property
    def group(self) -> int:
        """Tokens for which a query is scaled, and rotated, once."""
        return self.spec.key_group or self.block

    def groups(self, index) -> list:
        """Numbers of the groups of block `index` of a tile."""
        return members(index, self.block // self.group)

    def columns(self, index) -> list:
        """Numbers of the columns of block `index` of a tile."""
        return members(index, self.block // self.column)

    @property
    def column(self) -> int:
        """Tokens of one product: what a matrix unit takes at once, but for signposts, whose making needs registers."""
        widest = 256 if self.spec.target in ("v6e", "v7x") and self.spec.datatype == "uniform" else LANES
        return max(32 * self.ways, widest)

    @property
    def frequencies(self) -> np.ndarray:
        """Angle per position of each pair of channels, for keys before RoPE."""
        return np.asarray(() if self.spec.rope is None else self.spec.rope.frequencies, np.float64)

    @property
    def mixed(self) -> bool:
        """Whether the matrix unit takes narrow codes beside bfloat16 queries as fast as bfloat16 ones."""
        return self.spec.target == "v7x" and self.ways > 2

    @property
    def spread(self) -> float:
        """What products of queries and keys are multiplied by to be scores as base-2 logarithms."""
        return LOG2E * self.spec.head_dim**-0.5 * (1.0 if self.spec.rope is None else self.spec.rope.factor)

    @property
    def paired(self) -> bool:
        """Whether signposts are gathered two at a time (see tpu_signposts): where 16-bit numbers cannot be compared, or
        comparing them spills."""
        scarce = self.spec.target == "v7x" and 3 in (self.spec.key_bits, self.spec.value_bits)
        return self.spec.datatype == "nuq" and (self.wide or scarce)

    @property
    def wide(self) -> bool:
        """Whether codes are multiplied as float32."""
        return self.spec.target in WIDE

    @property
    def multiplied(self) -> bool:
        """Whether codes of keys are multiplied by their scales. Else queries are, once for every group: cheaper where
        a product meets few groups, but each of them has its own rows in it."""
        return self.spec.rope is not None or (0 < self.spec.key_group < LANES and (self.ways == 2 or not self.wide))

    @property
    def slabs(self) -> bool:
        """Whether scales of keys are laid out like the codes, in bfloat16 (`keys`)."""
        return self.multiplied and not self.wide

    @property
    def tiles(self) -> int:
        return -(-self.slots // self.tile)

    @property
    def order(self) -> np.ndarray:
        """Token at each position of a block."""
        return pair_order(self.base, self.block) if self.paired else token_order(self.base, self.ways, self.block)

    @property
    def tile_order(self) -> np.ndarray:
        """Token at each position of a tile."""
        return np.concatenate([self.order + first for first in range(0, self.tile, self.block)])

    @property
    def period(self) -> int:
        """Tokens after which the order repeats itself."""
        return math.lcm(1024 // self.base, self.column)

    @property
    def onehot(self) -> np.ndarray:
        """The matrix that brings numbers of `period` tokens into this order, [period, period] float32."""
        matrix = np.zeros((self.period, self.period), np.float32)
        matrix[self.order[: self.period], np.arange(self.period)] = 1
        return matrix

    @property
    def key_rows(self) -> int:
        """Scales of a channel of keys for a tile."""
        return self.tile // self.spec.key_group if self.spec.key_group else 1

    @property
    def value_rows(self) -> int:
        """Value scales of a token."""
        return self.spec.width // self.spec.value_group

    @property
    def value_slices(self) -> int:
        """Slices of a head's channels with a value scale of their own."""
        return self.spec.head_dim // self.spec.value_slice


def cheapest_ways(spec: PackedSpec) -> int:
    """The cheapest unpacking by the schedules of benchmarks/records: v6e and v7x convert narrow integers fast, v5e and
    v5p or codes into a mantissa faster."""
    most = min(fitting_ways(spec.key_bits), fitting_ways(spec.value_bits))
    if spec.datatype == "nuq" or (spec.target in WIDE and most == 8):
        return 2
    return most if spec.rope is None and spec.key_group >= LANES else 4  # 8 spill where codes of keys are multiplied


def lane_groups(spec: PackedSpec) -> int:
    """Groups of lanes that are handled one after the other: as few whole heads as fill 128 lanes. The matrix units of
    v6e and v7x could take 256 at once, but the registers can't: it spills."""
    lanes = math.lcm(spec.head_dim, LANES)
    return spec.width // lanes if spec.width % lanes == 0 else 1


def _rows(spec: PackedSpec, per_head: int) -> int:
    """Query rows of a lane group, a multiple of 8, with `per_head` = T*G rows of a KV head."""
    return -(-spec.width // lane_groups(spec) // spec.head_dim * per_head // 8) * 8


def work_of(spec: PackedSpec, per_head: int) -> Work:
    """Return how a tile is worked off with `per_head` query rows of a KV head: the table's choice, or a usual one."""
    entry = lookup(form_of(spec), spec.target)
    if per_head <= 8 and entry is not None and entry.work is not None:
        return entry.work
    if spec.rope is None and spec.key_group >= 128:
        return {"v6e": HALVES_AHEAD, "v7x": HALVES_IN_TURN}.get(spec.target, SHORT_IN_TURN)
    return SHORT


def make_plan(
    q, body: PackedBody, spec: PackedSpec, ways: int | None = None, work: Work | None = None, splits: int = 1
) -> Plan:
    """The plan of a call; what is None is what `work` chose, tiles being halved until half of a small chip's vector
    memory holds the words of two."""
    slots, lanes = body.value_scale.shape[-1], spec.width // lane_groups(spec)
    per_head = q.shape[1] * q.shape[2] // spec.kv_heads
    rows = _rows(spec, per_head)
    chosen = work or work_of(spec, per_head)
    tile = chosen.tile
    while not work and 2 * tile * spec.width * (spec.key_bits + spec.value_bits) > 8 * VMEM_BYTES // 2:
        tile //= 2
    tile = min(tile, slots)
    splits, ways = min(splits, -(-slots // tile)), ways or cheapest_ways(spec)
    plan = Plan(spec, slots, rows, per_head, tile, ways, lanes, splits, ahead=chosen.ahead)
    return dataclasses.replace(plan, pieces=math.gcd(chosen.pieces, plan.blocks))
