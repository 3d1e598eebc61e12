"""Describes as data how the TPU decode-attention kernel works a tile off.
`benchmarks/tpu_bundles.py --attempt` compiled kernels with different choices. `support.TABLE` has,
for each kernel form and chip, the choice that took the fewest bundles (instruction words) without
spilling registers.

Every lane group (`tpu.plan`) of a tile has two steps: its scores, then its values. They are worked
off

- in one go, or in loops over pieces of the tile: what is loaded for one piece cannot fill the
  registers of another;
- one after the other, or interleaved with the neighbouring lane group's: `tpu.kernel` has a diagram
  of both."""

from typing import NamedTuple


class Work(NamedTuple):
    """The way in which a kernel works off a tile.

    Attributes:
        tile: Tokens of a tile.
        pieces: Parts in which every lane group works off the tile.
        ahead: By how many turns of 512 tokens scores are ahead of values (negative: behind), where
            lane groups are interleaved. None: they are not interleaved."""

    tile: int
    pieces: int = 1
    ahead: int | None = None


# By their names: pieces of a tile (SHORT: a tile of 1024 tokens), and whether scores are in turn
# with values, ahead of them or behind them.
SHORT, WHOLE, HALVES, QUARTERS = Work(1024), Work(2048), Work(2048, 2), Work(2048, 4)
IN_TURN, AHEAD, BEHIND = Work(2048, 1, 0), Work(2048, 1, 1), Work(2048, 1, -4)
SHORT_IN_TURN, SHORT_AHEAD = Work(1024, 1, 0), Work(1024, 1, 1)
HALVES_IN_TURN, HALVES_AHEAD = Work(2048, 2, 0), Work(2048, 2, 1)
QUARTERS_IN_TURN, EIGHTHS_IN_TURN = Work(2048, 4, 0), Work(2048, 8, 0)
