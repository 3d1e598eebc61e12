"""Static choices of one call of the TPU kernel on packed latents."""

import dataclasses
import math

import numpy as np

from kvqjax.pallas_kernels.chips import TILE
from kvqjax.pallas_kernels.latents import LatentSpec
from kvqjax.pallas_kernels.tpu.plan import LANES, Plan
from kvqjax.pallas_kernels.tpu.planning import cheapest_ways

__all__ = ["TILE", "LatentPlan", "plan_latents"]


@dataclasses.dataclass(frozen=True)
class LatentPlan:
    """Static choices of one call.

    Attributes:
        parts: The plan of the latents alone, as heads of 128 channels that all query rows attend
            to.
        spec: The form of the body.
        shared: KV heads whose keys are made together, a group.
        used: Query rows of a group.
        chunk: Tokens of a product that makes keys.
        columns: Latents, and lanes of keys, of such a product: the matrix unit's columns.
        slice: Tokens whose keys are rotated at a time.
        stretch: Tokens of a tile that have a first position of their own."""

    parts: Plan
    spec: LatentSpec
    shared: int
    used: int
    chunk: int
    columns: int
    slice: int
    stretch: int

    @property
    def rows(self) -> int:
        """Query rows of a group of heads."""
        return -(-self.used // 8) * 8

    @property
    def groups(self) -> int:
        return self.spec.kv_heads // self.shared

    @property
    def lanes(self) -> int:
        """Key channels of a group of heads."""
        return self.shared * self.spec.head_dim

    @property
    def half(self) -> int:
        """Lanes of the first channels of a group's pairs."""
        return self.lanes // 2

    @property
    def apart(self) -> bool:
        """Say whether the minima of values are summed in a loop of their own. This is slower, but
        takes fewer registers. Many query rows need it, and codes of two plane sets on some
        chips."""
        return self.parts.rows > 32 or (
            self.parts.chip.sums_3_bit_minima_apart and self.spec.stored.value_bits == 3
        )

    @property
    def pattern(self) -> np.ndarray:
        """Key group of each of the 8 rows that repeat themselves in every unpacked chunk of a tile,
        [chunks * 8]."""
        return (
            self.parts.tile_order.reshape(-1, 32 * self.parts.ways)[:, :8].reshape(-1)
            // self.parts.spec.key_group
        )


def _heads_together(spec: LatentSpec, per_head: int) -> int:
    """Choose how many KV heads are made together: as few as fill two registers of lanes and, where
    possible, eight query rows."""
    fill = math.lcm(2 * LANES, spec.head_dim) // spec.head_dim
    # Fewer than all heads that divide them and have whole registers of query rows.
    fitting = (
        n
        for n in range(fill, spec.kv_heads, fill)
        if spec.kv_heads % n == 0 and n * per_head % 8 == 0
    )
    return next(fitting, fill)


def plan_latents(
    spec: LatentSpec,
    slots: int,
    stretch: int,
    per_head: int,
    ways: int | None = None,
    tile: int | None = None,
) -> LatentPlan:
    """Make the plan of a call.

    Args:
        spec: The form of the body.
        slots: Slots of a row.
        stretch: Tokens that are known to have consecutive positions.
        per_head: Query rows of a KV head, T*G.
        ways: Fields of a word (`unpack`); None: the cheapest number.
        tile: Tokens of a tile; None: the usual number.

    Returns:
        The plan.

    Raises:
        ValueError: A body that the kernel does not read."""
    heads = _heads_together(spec, per_head)
    if spec.kv_heads % heads or spec.rank % LANES or spec.stored.value_group % LANES:
        raise ValueError(
            f"{spec}: want heads that fill {2 * LANES} lanes and a rank and value groups of {LANES}s"
        )
    stored = dataclasses.replace(
        spec.stored, kv_heads=spec.rank // LANES, head_dim=LANES, target=spec.target
    )
    used = heads * per_head
    rows = spec.kv_heads // heads * -(-used // 8) * 8
    tile = min(tile or TILE, slots)
    parts = Plan(stored, slots, rows, rows, tile, ways or cheapest_ways(stored), LANES)
    columns, stretch = parts.chip.matrix_lanes, min(stretch, tile)
    if tile % parts.block or tile % stretch or stretch % parts.block:
        raise ValueError(
            f"tiles of {tile} tokens in stretches of {stretch}; want multiples of {parts.block}"
        )
    # Tokens whose keys are rotated at a time, at most. With QK-norm the keys are needed twice,
    # which takes registers.
    limit = LANES if spec.epsilon and columns == LANES else 512
    return LatentPlan(
        parts, spec, heads, used, min(tile, 512), columns, min(stretch, limit), stretch
    )
