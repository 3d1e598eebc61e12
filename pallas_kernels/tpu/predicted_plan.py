"""Static choices of one call of the TPU kernel on AQUA-KV's bodies, and the factors of the codes'
transform.

The transform's matrix H of a group of n times 256 channels is Sylvester's, H = H_n (x) H_128 (x)
H_2 (see `higgs_plan`). A group has n columns of 128 codes. H_2 is applied to the points of the
grid. H_128 is a product for every column, which also brings the two channels of a pair side by
side. H_n adds and subtracts the products of the group's columns."""

import dataclasses
import math

import numpy as np
from scipy.linalg import hadamard

from kvqjax.ops.packing.base import split_bits
from kvqjax.pallas_kernels.chips import TILE, TPUS
from kvqjax.pallas_kernels.predicted import PredictedSpec
from kvqjax.pallas_kernels.tpu.plan import LANES

__all__ = ["TILE", "PredictedPlan", "plan_predicted"]

MOST_BESIDE = 4  # columns that are worked off together
COLUMN = 2 * LANES  # channels of a column of 128 codes
# Sums and differences of a grid's two numbers are stored as 16-bit integers in units of STEP: they
# are less than 8.
STEP = 2.0**-12


@dataclasses.dataclass(frozen=True)
class PredictedPlan:
    """Static choices of one call.

    - `used` query rows of a lane group, T*G for each of its KV heads; other rows are padding.
    - `tile` tokens of a tile, a divisor of the slots.
    - `chunk` tokens that are decoded together and have a first position of their own."""

    spec: PredictedSpec
    slots: int
    used: int
    tile: int
    chunk: int

    @property
    def lanes(self) -> int:
        """Lanes of a lane group: whole heads."""
        return max(COLUMN, self.spec.head_dim)

    @property
    def lane_groups(self) -> int:
        return self.spec.width // self.lanes

    @property
    def shared(self) -> int:
        """KV heads of a lane group."""
        return self.lanes // self.spec.head_dim

    @property
    def rows(self) -> int:
        """Query rows of a lane group, padded."""
        return -(-self.used // 8) * 8

    @property
    def tiles(self) -> int:
        return self.slots // self.tile

    @property
    def block(self) -> int:
        """Tokens with a first position of their own."""
        return self.chunk

    @property
    def blocks(self) -> int:
        return self.tile // self.chunk

    @property
    def parts(self) -> int:
        """Columns of 128 codes."""
        return self.spec.width // COLUMN

    @property
    def beside(self) -> int:
        """Columns that are worked off together, so that their products follow each other without a
        wait. A large grid, which is gathered from twice, leaves registers for one column only."""
        large = max(self.spec.codes.key_bits, self.spec.codes.value_bits) > 7
        return math.gcd(self.parts, 1 if large else MOST_BESIDE)

    @property
    def depth(self) -> int:
        """Inputs of a map that are multiplied at a time: longer sums spill registers."""
        return COLUMN

    @property
    def frequencies(self) -> np.ndarray:
        return np.asarray(self.spec.rope.frequencies, np.float64)

    @property
    def wide(self) -> bool:
        """Say whether keys are turned as float32."""
        return not TPUS[self.spec.target].vector_bfloat16

    @property
    def transform(self) -> np.ndarray:
        """The matrix [256, 256] of a column: 128 first numbers of pairs, then second ones, to
        channels in order."""
        matrix = np.zeros((2, LANES, LANES, 2))
        matrix[0, :, :, 0] = matrix[1, :, :, 1] = hadamard(LANES)
        return matrix.reshape(COLUMN, COLUMN)


def plan_predicted(
    spec: PredictedSpec, slots: int, stretch: int, per_head: int, tile: int | None = None
):
    """Make the plan of a call. Arguments, result and errors are those of `plan_higgs`."""
    codes, chunk = spec.codes, 2 * LANES
    columns = codes.group // COLUMN
    if codes.group % COLUMN or spec.width % codes.group or columns & (columns - 1):
        raise ValueError(f"{spec}: want groups of a power of two times {COLUMN} channels")
    if COLUMN % spec.head_dim or max(codes.key_bits, codes.value_bits) > 8:
        raise ValueError(f"{spec}: want heads that divide {COLUMN} channels, codes of up to 8 bits")
    parts = [part for bits in (codes.key_bits, codes.value_bits) for part in split_bits(bits)]
    unit = math.lcm(chunk, *(1024 // part for part in parts))
    if slots % unit or stretch % chunk or (tile or unit) % unit:
        raise ValueError(
            f"{slots} slots in stretches of {stretch}; want multiples of {unit} and of {chunk}"
        )
    tile = tile or max(n for n in range(unit, max(TILE, unit) + 1, unit) if slots % n == 0)
    return PredictedPlan(spec, slots, COLUMN // spec.head_dim * per_head, tile, chunk)
