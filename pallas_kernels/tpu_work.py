"""How the TPU decode-attention kernel works a tile off, as data: what takes the fewest bundles without spills, by
`benchmarks/tpu_bundles.py --attempt` (record of the choices made: benchmarks/records/tpu_bundles.json).

A lane group's scores are computed first and its values summed up after them, in one go or in loops over pieces of the
tile: what is loaded for one piece cannot fill the registers of another. Where registers abound, the scores of a lane
group are instead computed in turn with the values of the one before (`tpu_kernel`)."""

from typing import NamedTuple

from kvqjax.pallas_kernels.packed import PackedSpec

__all__ = ["Work", "work_of"]


class Work(NamedTuple):
    """Tokens of a tile; loops it is worked off in by every lane group; and turns of 512 tokens by which scores are
    ahead of values, or behind them if negative, where those of two lane groups are interleaved."""

    tile: int
    pieces: int = 1
    ahead: int | None = None


IN_TURN, AHEAD, BEHIND = Work(2048, 1, 0), Work(2048, 1, 1), Work(2048, 1, -4)
SHORT_IN_TURN, SHORT_AHEAD = Work(1024, 1, 0), Work(1024, 1, 1)
SHORT, WHOLE, HALVES, QUARTERS, BLOCKS = Work(1024), Work(2048), Work(2048, 2), Work(2048, 4), Work(2048, 8)
SIZES, OUTLIERS = ("", ", head_dim 64"), (", outliers",)


def _by_chip(v5: Work, v6e: Work, v7x: Work) -> dict[str, Work]:
    return {"v5e": v5, "v5p": v5, "v6e": v6e, "v7x": v7x}


CHOSEN = {
    "kivi 2 bits": _by_chip(AHEAD, IN_TURN, IN_TURN),
    "kivi 3 bits": _by_chip(HALVES, BEHIND, HALVES),
    "kivi 4 bits": _by_chip(AHEAD, AHEAD, IN_TURN),
    "kivi 8 bits": _by_chip(IN_TURN, AHEAD, AHEAD),
    "kivi 3 and 2 bits": _by_chip(WHOLE, BEHIND, WHOLE),
    "kivi 4 and 2 bits": _by_chip(IN_TURN, WHOLE, HALVES),
    "kivi 2 bits, groups of 32": _by_chip(SHORT, SHORT, Work(1024, 1, 2)),
    "kivi 4 bits, groups of 32": _by_chip(HALVES, SHORT, SHORT),
    "kivi 4 and 2 bits, groups of 32": _by_chip(WHOLE, SHORT, SHORT),
    "kivi 2 bits, head_dim 64": _by_chip(SHORT_AHEAD, QUARTERS, HALVES),
    "kivi 4 bits, head_dim 64": _by_chip(HALVES, WHOLE, HALVES),
    "kivi 2 bits, head_dim 64, groups of 32": _by_chip(HALVES, HALVES, SHORT),
    **{f"kivi {bits} bits, head_dim 96": _by_chip(HALVES, HALVES, HALVES) for bits in (2, 4)},
    "kivi 2 bits, head_dim 256": _by_chip(SHORT, SHORT_IN_TURN, SHORT_AHEAD),
    "kivi 4 bits, head_dim 256": _by_chip(SHORT_AHEAD, SHORT_IN_TURN, SHORT_AHEAD),
    "kivi_star 2 bits": _by_chip(WHOLE, QUARTERS, QUARTERS),
    "kivi_star 2 bits, head_dim 64": _by_chip(HALVES, QUARTERS, QUARTERS),
    "kivi_star 3 bits": _by_chip(HALVES, WHOLE, HALVES),
    **{f"kivi_star 4 bits{size}": _by_chip(BLOCKS, QUARTERS, QUARTERS) for size in SIZES},
    "kivi_star 2 bits, groups of 32": _by_chip(SHORT, Work(1024, 2), Work(512)),
    "kivi_star 4 bits, groups of 32": _by_chip(BLOCKS, Work(1024, 4), Work(1024, 4)),
    **{f"kvquant 2 bits{form}": _by_chip(WHOLE, WHOLE, WHOLE) for form in SIZES + OUTLIERS},
    **{f"kvquant 3 bits{form}": _by_chip(SHORT, HALVES, HALVES) for form in SIZES + OUTLIERS},
    **{f"kvquant 4 bits{form}": _by_chip(BLOCKS, HALVES, HALVES) for form in SIZES + OUTLIERS},
}


def work_of(spec: PackedSpec, per_head: int) -> Work:
    """The choice for `per_head` query rows of a KV head."""
    if per_head <= 8 and spec.target in CHOSEN.get(spec.row, {}):
        return CHOSEN[spec.row][spec.target]
    if spec.rope is None and spec.key_group >= 128:
        return SHORT_AHEAD if spec.target == "v6e" else SHORT_IN_TURN
    return SHORT
