"""Static choices of one call of the TPU kernel on CommVQ's codes, and the order in which it takes
tokens."""

import dataclasses

import numpy as np

from kvqjax.ops.packing.base import PLANE, split_bits
from kvqjax.pallas_kernels.chips import TILE, TPUS
from kvqjax.pallas_kernels.commvq import CommVQSpec
from kvqjax.pallas_kernels.tpu.plan import LANES
from kvqjax.pallas_kernels.tpu.unpack import token_order

__all__ = ["TILE", "CommVQPlan", "plan_commvq"]


@dataclasses.dataclass(frozen=True)
class CommVQPlan:
    """Static choices of one call.

    Attributes:
        spec: The form of the body.
        slots: Slots of a row.
        shared: KV heads that are scored together, a group.
        used: Query rows of a group.
        ways: Fields into which words of value bits are cut (`unpack`).
        chunk: Tokens whose keys are made at a time.
        depth: Rows of the codebook that one product sums over.
        slice: Tokens whose keys are rotated at a time."""

    spec: CommVQSpec
    slots: int
    shared: int
    used: int
    ways: int
    chunk: int
    depth: int
    slice: int

    tile = block = TILE  # also the tokens of a block of value bits

    @property
    def rows(self) -> int:
        """Query rows of a group of heads."""
        return -(-self.used // 8) * 8

    @property
    def groups(self) -> int:
        return self.spec.kv_heads // self.shared

    @property
    def tiles(self) -> int:
        return self.slots // TILE

    @property
    def lanes(self) -> int:
        """Channels of a group of heads."""
        return self.shared * self.spec.head_dim

    @property
    def key_rows(self) -> int:
        """Rows of the key codes: levels of a token."""
        return self.spec.codes * self.spec.kv_heads

    @property
    def steps(self) -> list[range]:
        """The levels of a token for one head, in the ranges that one product takes."""
        count = self.depth // self.spec.levels
        return [
            range(first, min(first + count, self.spec.codes))
            for first in range(0, self.spec.codes, count)
        ]

    @property
    def summands(self) -> int:
        """The number of sums of products that are kept apart until keys are rotated."""
        return min(2, len(self.steps))

    @property
    def order(self) -> np.ndarray:
        """Token at each position of a tile, [columns, 128].

        The planes of column c are c, c + 8, c + 16 and c + 24, for every `ways`. Unpacked value
        bits come in this order once pieces of columns are put together. Keys are brought into
        it."""
        pieces = token_order(1, self.ways, TILE).reshape(4 // self.ways, TILE // LANES, -1)
        return np.concatenate(list(pieces), axis=1)

    @property
    def places(self) -> np.ndarray:
        """Find where the token at every position of a tile is stored, [3, columns, 128]: which of
        its column's four planes, the row of words, the column."""
        planes, rows = self.order // PLANE, self.order % PLANE
        return np.stack([planes // len(planes), rows, planes % len(planes)])


def plan_commvq(spec: CommVQSpec, slots: int, stretch: int, per_head: int) -> CommVQPlan:
    """Make the plan of a call.

    Args:
        spec: The form of the body.
        slots: Slots of a row.
        stretch: Tokens that are known to have consecutive positions.
        per_head: Query rows of a KV head, T*G.

    Returns:
        The plan.

    Raises:
        ValueError: A body that the kernel does not read."""
    if slots % TILE or stretch % TILE:
        raise ValueError(f"{slots} slots in stretches of {stretch}; want multiples of {TILE}")
    if (
        spec.head_dim % 16
        or split_bits(spec.bits)[0] > 4
        or spec.levels % 16
        or spec.value_width % LANES
    ):
        raise ValueError(
            f"{spec}: want head_dim and levels in 16s, 128 levels at most, value bits in {LANES}s"
        )
    # As few KV heads as have whole registers of query rows.
    heads = next((n for n in (1, 2, 4, 8) if spec.kv_heads % n == 0 and n * per_head % 8 == 0), 1)
    ways, chunk = (4, 512) if TPUS[spec.target].vector_bfloat16 else (2, 256)
    return CommVQPlan(spec, slots, heads, heads * per_head, ways, chunk, 8 * spec.levels, LANES)
