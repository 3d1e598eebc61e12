"""Static choices of one call of the TPU kernel on HIGGS bodies, and the factors of its transform.

Sylvester's matrices are Kronecker products. For a group of n heads of D channels, each D/2 pairs,

    H = H_n (x) H_(D/2) (x) H_2        heads, pairs of a head, the two channels of a pair.

H_2 is applied to the points of the grid, once. H_(D/2) is applied to keys token by token, and to
values once, after they are summed. H_n commutes with RoPE, which rotates all heads alike, and is
applied to the queries."""

import dataclasses
import math

import numpy as np
from scipy.linalg import hadamard

from kvqjax.ops.packing.base import split_bits
from kvqjax.pallas_kernels.chips import TILE, TPUS
from kvqjax.pallas_kernels.higgs import HiggsSpec
from kvqjax.pallas_kernels.tpu.plan import LANES

VALUES = 4  # columns of values that are worked off together, at most
SPREAD = 256  # tokens whose scales are spread at a time


@dataclasses.dataclass(frozen=True)
class HiggsPlan:
    """Static choices of one call.

    Wherever numbers of tokens lie on rows, a token has two rows: one for the first channels of
    pairs, one for the second channels. For scores it has two lanes.

    Attributes:
        slots: Slots of a row.
        used: Query rows, T*G for each KV head.
        tile: Tokens of a tile.
        chunk: Tokens that are looked up together, and have a first position of their own."""

    spec: HiggsSpec
    slots: int
    used: int
    tile: int
    chunk: int

    @property
    def rows(self) -> int:
        """Query rows, padded to whole registers."""
        return -(-self.used // 8) * 8

    @property
    def tiles(self) -> int:
        return -(-self.slots // self.tile)

    @property
    def shared(self) -> int:
        """KV heads that are handled together: all."""
        return self.spec.kv_heads

    @property
    def lanes(self) -> int:
        """Codes of a token."""
        return self.spec.width // 2

    @property
    def parts(self) -> int:
        """Columns of 128 codes."""
        return self.lanes // LANES

    @property
    def value_columns(self) -> int:
        """Columns of values that are worked off together. A gather takes long, and several of them
        overlap."""
        return math.gcd(self.parts, VALUES)

    @property
    def staged(self) -> bool:
        """Say whether transformed keys go through memory, and scores are written in a loop. This is
        slower, but takes fewer registers. Many query rows need it, and wide codes, except in
        float32, where chunks are smaller."""
        return self.rows > 32 or (self.spec.key_bits > 4 and not self.wide)

    @property
    def piece(self) -> int:
        """Lanes of scores, two a token, that are made at a time."""
        return LANES if self.staged else 2 * LANES

    @property
    def pairs(self) -> int:
        """Pairs of channels of a head."""
        return self.spec.head_dim // 2

    @property
    def rows_per_group(self) -> int:
        """Query rows of the heads that share a scale."""
        return self.used // self.spec.groups

    @property
    def wide(self) -> bool:
        """Say whether keys are turned as float32."""
        return not TPUS[self.spec.target].vector_bfloat16

    @property
    def transform(self) -> np.ndarray:
        """The transform within the heads on 128 lanes, [128, 128]."""
        return np.kron(np.eye(LANES // self.pairs), hadamard(self.pairs))

    @property
    def between(self) -> np.ndarray:
        """The signs with which the heads of a query meet transformed heads of keys, [KV heads, KV
        heads]; 0 between groups."""
        return np.kron(np.eye(self.spec.groups), hadamard(self.spec.group // self.spec.head_dim))


def plan_higgs(
    spec: HiggsSpec, slots: int, stretch: int, per_head: int, tile: int | None = None
) -> HiggsPlan:
    """Make the plan of a call.

    Args:
        stretch: Tokens that are known to have consecutive positions.
        per_head: Query rows of a KV head, T*G.
        tile: Tokens of a tile; None: the usual number.

    Raises:
        ValueError: A body that the kernel does not read."""
    heads, dim = spec.group // spec.head_dim, spec.head_dim
    if (
        heads * dim != spec.group
        or spec.width % spec.group
        or heads & (heads - 1)
        or dim & (dim - 1)
    ):
        raise ValueError(f"{spec}: want groups of a power of two heads of a power of two channels")
    if (
        spec.width % (2 * LANES)
        or not 2 * 8 <= dim <= 2 * LANES
        or max(spec.key_bits, spec.value_bits) > 8
    ):
        raise ValueError(
            f"{spec}: want channels in multiples of {2 * LANES}, heads of at most {2 * LANES} "
            "channels, codes of up to 8 bits"
        )
    tile = min(tile or TILE, slots)
    chunk = 2 * LANES
    if not TPUS[spec.target].vector_bfloat16:  # float32 wants twice the registers
        chunk = LANES if spec.kv_heads * per_head <= 32 else LANES // 2
    unit = max(
        SPREAD,
        *(1024 // part for bits in (spec.key_bits, spec.value_bits) for part in split_bits(bits)),
    )
    if tile % unit or stretch % chunk:
        raise ValueError(
            f"tiles of {tile} tokens in stretches of {stretch}; want multiples of {unit} and of {chunk}"
        )
    return HiggsPlan(spec, slots, spec.kv_heads * per_head, tile, chunk)
