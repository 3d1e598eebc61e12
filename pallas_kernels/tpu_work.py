"""How the TPU decode-attention kernel works a tile off, as data: what takes the fewest bundles without spills, by
`benchmarks/tpu_bundles.py --attempt` (record of the choices made: benchmarks/records/tpu_bundles.json).

A lane group's scores are computed first and its values summed up after them, in one go or in loops over pieces of the
tile: what is loaded for one piece cannot fill the registers of another. Where registers abound, the scores of a lane
group are instead interleaved with the values of the one before (`tpu_kernel`)."""

from typing import NamedTuple

from kvqjax.pallas_kernels.packed import PackedSpec

__all__ = ["Work", "work_of"]


class Work(NamedTuple):
    """Tokens of a tile, and loops it is worked off in by every lane group; 0: interleaved, in one go."""

    tile: int
    pieces: int


INTERLEAVED, SHORT, WHOLE, HALVES, QUARTERS = Work(2048, 0), Work(1024, 1), Work(2048, 1), Work(2048, 2), Work(2048, 4)
BLOCKS = Work(2048, 8)
SIZES, OUTLIERS = ("", ", head_dim 64"), (", outliers",)


def _by_chip(v5: Work, v6e: Work, v7x: Work) -> dict[str, Work]:
    return {"v5e": v5, "v5p": v5, "v6e": v6e, "v7x": v7x}


CHOSEN = {
    **{f"kivi {bits} bits": _by_chip(INTERLEAVED, INTERLEAVED, INTERLEAVED) for bits in (2, 4, 8)},
    "kivi 3 bits": _by_chip(HALVES, INTERLEAVED, HALVES),
    "kivi 3 and 2 bits": _by_chip(WHOLE, INTERLEAVED, WHOLE),
    "kivi 4 and 2 bits": _by_chip(INTERLEAVED, WHOLE, HALVES),
    "kivi 2 bits, groups of 32": _by_chip(SHORT, SHORT, Work(1024, 0)),
    "kivi 4 bits, groups of 32": _by_chip(HALVES, SHORT, SHORT),
    "kivi 4 and 2 bits, groups of 32": _by_chip(WHOLE, SHORT, SHORT),
    "kivi 2 bits, head_dim 64": _by_chip(Work(1024, 0), QUARTERS, HALVES),
    "kivi 4 bits, head_dim 64": _by_chip(HALVES, WHOLE, HALVES),
    "kivi 2 bits, head_dim 64, groups of 32": _by_chip(HALVES, HALVES, SHORT),
    **{f"kivi {bits} bits, head_dim 96": _by_chip(HALVES, HALVES, HALVES) for bits in (2, 4)},
    "kivi 2 bits, head_dim 256": _by_chip(SHORT, Work(1024, 0), Work(1024, 0)),
    "kivi_star 2 bits": _by_chip(WHOLE, QUARTERS, QUARTERS),
    "kivi_star 2 bits, head_dim 64": _by_chip(HALVES, QUARTERS, QUARTERS),
    "kivi_star 3 bits": _by_chip(HALVES, WHOLE, HALVES),
    **{f"kivi_star 4 bits{size}": _by_chip(BLOCKS, QUARTERS, QUARTERS) for size in SIZES},
    "kivi_star 2 bits, groups of 32": _by_chip(SHORT, Work(1024, 2), Work(512, 1)),
    "kivi_star 4 bits, groups of 32": _by_chip(BLOCKS, Work(1024, 4), Work(1024, 4)),
    **{f"kvquant 2 bits{form}": _by_chip(WHOLE, WHOLE, WHOLE) for form in SIZES + OUTLIERS},
    **{f"kvquant 3 bits{form}": _by_chip(SHORT, HALVES, HALVES) for form in SIZES + OUTLIERS},
    **{f"kvquant 4 bits{form}": _by_chip(BLOCKS, HALVES, HALVES) for form in SIZES + OUTLIERS},
}


def work_of(spec: PackedSpec, per_head: int) -> Work:
    """The choice for `per_head` query rows of a KV head."""
    if per_head <= 8 and spec.target in CHOSEN.get(spec.row, {}):
        return CHOSEN[spec.row][spec.target]
    return Work(1024, 0 if spec.rope is None and spec.key_group >= 128 else 1)
