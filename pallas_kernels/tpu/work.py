"""How the TPU decode-attention kernel works a tile off, as data: what takes the fewest bundles without spills, by
`benchmarks/tpu_bundles.py --attempt` (record of the choices made: benchmarks/records/tpu_bundles.json).

A lane group's scores are computed first and its values summed up after them, in one go or in loops over pieces of the
tile: what is loaded for one piece cannot fill the registers of another. Where registers abound, the scores of a lane
group are instead computed in turn with the values of the one before (`kernel`)."""

from typing import NamedTuple

from kvqjax.pallas_kernels.packed import PackedSpec

__all__ = ["Work", "work_of"]


class Work(NamedTuple):
    """Tokens of a tile; loops it is worked off in by every lane group; and turns of 512 tokens by which scores are
    ahead of values, or behind them if negative, where those of two lane groups are interleaved."""

    tile: int
    pieces: int = 1
    ahead: int | None = None


FORMS = "", ", head_dim 64", ", outliers"
SHORT, WHOLE, HALVES, QUARTERS = Work(1024), Work(2048), Work(2048, 2), Work(2048, 4)
IN_TURN, AHEAD, BEHIND = Work(2048, 1, 0), Work(2048, 1, 1), Work(2048, 1, -4)
SHORT_IN_TURN, SHORT_AHEAD = Work(1024, 1, 0), Work(1024, 1, 1)
HALVES_IN_TURN, HALVES_AHEAD = Work(2048, 2, 0), Work(2048, 2, 1)
QUARTERS_IN_TURN, EIGHTHS_IN_TURN = Work(2048, 4, 0), Work(2048, 8, 0)


def _by_chip(v5: Work, v6e: Work, v7x: Work) -> dict[str, Work]:
    return {"v5e": v5, "v5p": v5, "v6e": v6e, "v7x": v7x}


CHOSEN = {
    "kivi 2 bits": _by_chip(AHEAD, IN_TURN, IN_TURN),
    "kivi 3 bits": _by_chip(HALVES, BEHIND, HALVES_IN_TURN),
    "kivi 4 bits": _by_chip(AHEAD, AHEAD, IN_TURN),
    "kivi 8 bits": _by_chip(IN_TURN, AHEAD, AHEAD),
    "kivi 3 and 2 bits": _by_chip(WHOLE, BEHIND, WHOLE),
    "kivi 4 and 2 bits": _by_chip(IN_TURN, BEHIND, HALVES_IN_TURN),
    "kivi 2 bits, groups of 32": _by_chip(SHORT_IN_TURN, SHORT, Work(1024, 1, 2)),
    "kivi 4 bits, groups of 32": _by_chip(HALVES, SHORT, SHORT),
    "kivi 4 and 2 bits, groups of 32": _by_chip(WHOLE, HALVES, HALVES),
    "kivi 2 bits, head_dim 64": _by_chip(HALVES_IN_TURN, QUARTERS_IN_TURN, HALVES_AHEAD),
    "kivi 4 bits, head_dim 64": _by_chip(HALVES_IN_TURN, WHOLE, HALVES_AHEAD),
    "kivi 2 bits, head_dim 64, groups of 32": _by_chip(HALVES, HALVES, SHORT),
    "kivi 2 bits, head_dim 96": _by_chip(HALVES, HALVES, QUARTERS_IN_TURN),
    "kivi 4 bits, head_dim 96": _by_chip(HALVES, HALVES_IN_TURN, HALVES_AHEAD),
    "kivi 2 bits, head_dim 256": _by_chip(HALVES_IN_TURN, HALVES_IN_TURN, SHORT_AHEAD),
    "kivi 4 bits, head_dim 256": _by_chip(SHORT_AHEAD, SHORT_IN_TURN, SHORT_AHEAD),
    "omniscale 2 bits": _by_chip(AHEAD, IN_TURN, IN_TURN),
    "omniscale 4 bits": _by_chip(AHEAD, AHEAD, IN_TURN),
    "omniscale 2 bits, groups of 32": _by_chip(SHORT_IN_TURN, SHORT, Work(1024, 1, 2)),
    "omniscale 4 bits, groups of 32": _by_chip(HALVES, SHORT, SHORT),
    "kvarn 2 bits": _by_chip(AHEAD, BEHIND, IN_TURN),
    "kvarn 4 bits": _by_chip(AHEAD, BEHIND, AHEAD),
    "kvarn 4 and 2 bits": _by_chip(AHEAD, BEHIND, HALVES_IN_TURN),
    "kivi_star 2 bits": _by_chip(WHOLE, QUARTERS_IN_TURN, QUARTERS_IN_TURN),
    "kivi_star 2 bits, head_dim 64": _by_chip(HALVES, QUARTERS_IN_TURN, QUARTERS_IN_TURN),
    "kivi_star 3 bits": _by_chip(HALVES_IN_TURN, WHOLE, HALVES),
    "kivi_star 4 bits": _by_chip(EIGHTHS_IN_TURN, QUARTERS_IN_TURN, QUARTERS_IN_TURN),
    "kivi_star 4 bits, head_dim 64": _by_chip(EIGHTHS_IN_TURN, QUARTERS_IN_TURN, QUARTERS_IN_TURN),
    "kivi_star 2 bits, groups of 32": _by_chip(SHORT, Work(1024, 4, 0), EIGHTHS_IN_TURN),
    "kivi_star 4 bits, groups of 32": _by_chip(EIGHTHS_IN_TURN, QUARTERS, QUARTERS),
    **{f"kvquant 2 bits{form}": _by_chip(WHOLE, WHOLE, WHOLE) for form in FORMS},
    "kvquant 3 bits": _by_chip(HALVES_IN_TURN, HALVES, HALVES_IN_TURN),
    "kvquant 3 bits, head_dim 64": _by_chip(HALVES_IN_TURN, HALVES_IN_TURN, HALVES_IN_TURN),
    "kvquant 3 bits, outliers": _by_chip(HALVES_IN_TURN, HALVES, HALVES_IN_TURN),
    **{f"kvquant 4 bits{form}": _by_chip(EIGHTHS_IN_TURN, HALVES, HALVES) for form in FORMS},
}


def work_of(spec: PackedSpec, per_head: int) -> Work:
    """The choice for `per_head` query rows of a KV head."""
    if per_head <= 8 and spec.target in CHOSEN.get(spec.row, {}):
        return CHOSEN[spec.row][spec.target]
    if spec.rope is None and spec.key_group >= 128:
        return {"v6e": HALVES_AHEAD, "v7x": HALVES_IN_TURN}.get(spec.target, SHORT_IN_TURN)
    return SHORT
