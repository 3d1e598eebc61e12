"""Plan a call of the TPU kernel on exact keys and values."""

import dataclasses

from kvqjax.pallas_kernels.chips import TPUS
from kvqjax.pallas_kernels.exact import ExactBody, ExactSpec
from kvqjax.pallas_kernels.tpu.plan import lane_groups

UNIT = 256  # tokens of the smallest tile
# What the registers hold beside other numbers.
SCORES = 2**15  # scores of a lane group
MOST_ROWS = 64  # query rows, of 128 tokens each


@dataclasses.dataclass(frozen=True)
class ExactPlan:
    """Static choices of one call.

    Attributes:
        slots: Slots of a row.
        tile: Tokens of a tile, a divisor of the slots.
        length: New tokens, T.
        group: Query heads of a KV head, G."""

    spec: ExactSpec
    slots: int
    tile: int
    length: int
    group: int

    @property
    def lane_groups(self) -> int:
        return lane_groups(self.spec)

    @property
    def lanes(self) -> int:
        """Lanes of a lane group."""
        return self.spec.width // self.lane_groups

    @property
    def shared(self) -> int:
        """KV heads of a lane group."""
        return self.lanes // self.spec.head_dim

    @property
    def heads(self) -> int:
        """Query heads of a lane group."""
        return self.shared * self.group

    @property
    def used(self) -> int:
        """Query rows of a lane group: all its query heads for the first new token, then for the
        second, and so on."""
        return self.length * self.heads

    @property
    def rows(self) -> int:
        """Query rows of a lane group, padded."""
        return -(-self.used // 8) * 8

    @property
    def columns(self) -> list[slice]:
        """The tile's tokens in parts, so that the scores of a lane group and a part fit the
        registers."""
        most = max(SCORES // self.rows, 128)
        return [slice(first, min(first + most, self.tile)) for first in range(0, self.tile, most)]

    @property
    def parts(self) -> int:
        """Parts of all query rows that are turned into softmax weights one after the other."""
        return self.lane_groups if self.rows * self.lane_groups > MOST_ROWS else 1


def tile_of(spec: ExactSpec, slots: int) -> int:
    """Choose the tokens of a tile of a body with `slots` slots. Raise ValueError unless UNIT
    divides the slots."""
    if slots % UNIT:
        raise ValueError(f"a body of {slots} slots; want a multiple of {UNIT}")
    token_bytes = 4 * spec.width  # a key and a value in bfloat16
    most = max(UNIT, TPUS[spec.target].exact_tile_bytes // token_bytes)
    return max(n for n in range(UNIT, most + 1, UNIT) if slots % n == 0)


def make_plan(q, body: ExactBody, spec: ExactSpec, slots: int) -> ExactPlan:
    """Make the plan of a call on rows of `slots` slots. A row of several pages has more slots than
    `body`, whose rows are pages."""
    return ExactPlan(
        spec, slots, tile_of(spec, body.slots), q.shape[1], q.shape[2] // spec.kv_heads
    )
