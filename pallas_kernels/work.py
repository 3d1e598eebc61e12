"""How the TPU decode-attention kernel works a tile off, as data: what takes the fewest bundles without spills, by
`benchmarks/tpu_bundles.py --attempt` (record of the choices made: benchmarks/records/tpu_bundles.json).

A lane group's scores are computed first and its values summed up after them, in one go or in loops over pieces of the
tile: what is loaded for one piece cannot fill the registers of another. Where registers abound, the scores of a lane
group are instead computed in turn with the values of the one before (`kernel`)."""

from typing import NamedTuple

__all__ = ["AHEAD", "BEHIND", "EIGHTHS_IN_TURN", "HALVES", "HALVES_AHEAD", "HALVES_IN_TURN", "IN_TURN", "QUARTERS"]
__all__ += ["QUARTERS_IN_TURN", "SHORT", "SHORT_AHEAD", "SHORT_IN_TURN", "WHOLE", "Work"]


class Work(NamedTuple):
    """Tokens of a tile; loops it is worked off in by every lane group; and turns of 512 tokens by which scores are
    ahead of values, or behind them if negative, where those of two lane groups are interleaved."""

    tile: int
    pieces: int = 1
    ahead: int | None = None


SHORT, WHOLE, HALVES, QUARTERS = Work(1024), Work(2048), Work(2048, 2), Work(2048, 4)
IN_TURN, AHEAD, BEHIND = Work(2048, 1, 0), Work(2048, 1, 1), Work(2048, 1, -4)
SHORT_IN_TURN, SHORT_AHEAD = Work(1024, 1, 0), Work(1024, 1, 1)
HALVES_IN_TURN, HALVES_AHEAD = Work(2048, 2, 0), Work(2048, 2, 1)
QUARTERS_IN_TURN, EIGHTHS_IN_TURN = Work(2048, 4, 0), Work(2048, 8, 0)
