"""The table of kernels: how far each kernel form was tested on each chip. `python -m
kvqjax.pallas_kernels` prints it.

Levels, each of which includes the ones before it:

- compiled: the kernel compiles for the chip without spills and copies (benchmarks/records). An
  interpreter ran it with stand-ins for what it does in registers.
- simulated: the kernel as it is equals the plain path in Pallas' interpreter.
- verified on <chip>: `kvqjax doctor` found the kernel right on a chip of that name.

A chip that is there uses a kernel only after checking it (`kvqjax.kernel_checks`), or where the
user forces it. The table decides for programs that are compiled ahead of time: they take kernels of
every level but `compiled`.
"""

from typing import NamedTuple

from kvqjax.pallas_kernels.chips import TARGETS
from kvqjax.pallas_kernels.forms import KernelForm
from kvqjax.pallas_kernels.work import (
    AHEAD,
    BEHIND,
    EIGHTHS_IN_TURN,
    HALVES,
    HALVES_AHEAD,
    HALVES_IN_TURN,
    IN_TURN,
    QUARTERS,
    QUARTERS_IN_TURN,
    SHORT,
    SHORT_AHEAD,
    SHORT_IN_TURN,
    WHOLE,
    Work,
)

COMPILED, SIMULATED = "compiled", "simulated"


def verified(chip: str) -> str:
    """Name the level of a kernel that was found right on a chip of this name."""
    return f"verified on {chip}"


class Entry(NamedTuple):
    """The record of one kernel on one chip.

    Attributes:
        level: How far it was tested.
        most_rows: The most query rows of a KV head with which it compiles without spilling
            registers.
        work: How a TPU kernel works a tile off, where this was chosen for the form."""

    level: str
    most_rows: int
    work: Work | None = None


Row = dict[str, Entry]


def _tpu(
    v5: Work | None, v6e: Work | None, v7x: Work | None, rows: tuple[int, int, int] = (8, 8, 8)
) -> Row:
    """Make a row of simulated kernels; `rows` are the most query rows on v5e and v5p, v6e, v7x."""
    chips = {
        "v5e": (v5, rows[0]),
        "v5p": (v5, rows[0]),
        "v6e": (v6e, rows[1]),
        "v7x": (v7x, rows[2]),
    }
    return {chip: Entry(SIMULATED, most, work) for chip, (work, most) in chips.items()}


def _fixed(most: int) -> Row:
    """Make a row of TPU kernels that always work a tile off in one way, with `most` query rows."""
    return _tpu(None, None, None, (most, most, most))


def _without_v5(v6e: Work, v7x: Work) -> Row:
    """Make a row of simulated kernels that spill registers on v5e."""
    return {chip: Entry(SIMULATED, 8, work) for chip, work in (("v6e", v6e), ("v7x", v7x))}


# The most query rows on v5e and v5p, v6e, v7x.
FEW, TWO, MANY = (4, 4, 4), (2, 2, 2), (16, 16, 16)
HOPPER = {"sm90": Entry(COMPILED, 8)}
EXACT_ON_HOPPER = {"sm90": Entry(COMPILED, 32)}
# Right, and 1.5 to 7 times as fast as XLA's path (docs/speed.md).
ON_HOPPER = {"sm90": Entry(verified("NVIDIA H100 80GB HBM3"), 8)}

TABLE: dict[KernelForm, Row] = {
    KernelForm("kivi", 2, 2): _tpu(AHEAD, IN_TURN, IN_TURN, (16, 8, 8)) | ON_HOPPER,
    KernelForm("kivi", 3, 3): _tpu(HALVES, BEHIND, HALVES_IN_TURN) | HOPPER,
    KernelForm("kivi", 4, 4): _tpu(AHEAD, AHEAD, IN_TURN, MANY) | ON_HOPPER,
    KernelForm("kivi", 8, 8): _tpu(IN_TURN, AHEAD, AHEAD, MANY),
    KernelForm("kivi", 4, 2): _tpu(IN_TURN, BEHIND, HALVES_IN_TURN),
    KernelForm("kivi", 3, 2): _tpu(WHOLE, BEHIND, WHOLE),
    KernelForm("kivi", 2, 2, group=32): _tpu(SHORT_IN_TURN, SHORT, Work(1024, 1, 2)) | HOPPER,
    KernelForm("kivi", 4, 4, group=32): _tpu(HALVES, SHORT, SHORT) | HOPPER,
    KernelForm("kivi", 4, 2, group=32): _tpu(WHOLE, HALVES, HALVES),
    KernelForm("kivi", 2, 2, 64): _tpu(HALVES_IN_TURN, QUARTERS_IN_TURN, HALVES_AHEAD) | HOPPER,
    KernelForm("kivi", 4, 4, 64): _tpu(HALVES_IN_TURN, WHOLE, HALVES_AHEAD) | HOPPER,
    KernelForm("kivi", 2, 2, 64, group=32): _tpu(HALVES, HALVES, SHORT) | HOPPER,
    KernelForm("kivi", 4, 4, 64, group=32): _fixed(8) | HOPPER,
    KernelForm("kivi", 2, 2, 96): _tpu(HALVES, HALVES, QUARTERS_IN_TURN, TWO),
    KernelForm("kivi", 4, 4, 96): _tpu(HALVES, HALVES_IN_TURN, HALVES_AHEAD, TWO),
    KernelForm("kivi", 2, 2, 256): _tpu(HALVES_IN_TURN, HALVES_IN_TURN, SHORT_AHEAD) | HOPPER,
    KernelForm("kivi", 4, 4, 256): _tpu(SHORT_AHEAD, SHORT_IN_TURN, SHORT_AHEAD) | HOPPER,
    KernelForm("omniscale", 2, 2): _tpu(AHEAD, IN_TURN, IN_TURN) | HOPPER,
    KernelForm("omniscale", 3, 3): HOPPER,
    KernelForm("omniscale", 4, 4): _tpu(AHEAD, AHEAD, IN_TURN) | HOPPER,
    KernelForm("omniscale", 2, 2, group=32): _without_v5(SHORT, Work(1024, 1, 2)) | HOPPER,
    KernelForm("omniscale", 4, 4, group=32): _without_v5(SHORT, SHORT) | HOPPER,
    KernelForm("omniscale", 2, 2, 64): HOPPER,
    KernelForm("omniscale", 4, 4, 64): HOPPER,
    KernelForm("omniscale", 2, 2, 64, group=32): HOPPER,
    KernelForm("omniscale", 4, 4, 64, group=32): HOPPER,
    KernelForm("kvarn", 2, 2): _without_v5(BEHIND, IN_TURN) | HOPPER,
    KernelForm("kvarn", 3, 3): HOPPER,
    KernelForm("kvarn", 4, 4): _without_v5(BEHIND, AHEAD) | HOPPER,
    KernelForm("kvarn", 2, 2, 64): HOPPER,
    KernelForm("kvarn", 4, 4, 64): HOPPER,
    KernelForm("kvarn", 4, 2): {"v7x": Entry(SIMULATED, 8, HALVES_IN_TURN)},
    KernelForm("oscar", 2, 2): _tpu(AHEAD, AHEAD, WHOLE) | HOPPER,
    KernelForm("oscar", 3, 3): HOPPER,
    KernelForm("oscar", 4, 4): _tpu(AHEAD, AHEAD, WHOLE) | HOPPER,
    KernelForm("oscar", 2, 2, 64): HOPPER,
    KernelForm("oscar", 4, 4, 64): HOPPER,
    KernelForm("turboquant", 2, 2): HOPPER,
    KernelForm("turboquant", 3, 3): HOPPER,
    KernelForm("turboquant", 4, 4): HOPPER,
    KernelForm("turboquant", 2, 2, 64): HOPPER,
    KernelForm("turboquant", 4, 4, 64): HOPPER,
    KernelForm("kivi_star", 2, 2): _tpu(WHOLE, QUARTERS_IN_TURN, QUARTERS_IN_TURN) | HOPPER,
    KernelForm("kivi_star", 3, 3): _tpu(HALVES_IN_TURN, WHOLE, HALVES) | HOPPER,
    KernelForm("kivi_star", 4, 4): _tpu(EIGHTHS_IN_TURN, QUARTERS_IN_TURN, QUARTERS_IN_TURN)
    | HOPPER,
    KernelForm("kivi_star", 2, 2, group=32): _tpu(SHORT, Work(1024, 4, 0), EIGHTHS_IN_TURN),
    KernelForm("kivi_star", 4, 4, group=32): _tpu(EIGHTHS_IN_TURN, QUARTERS, QUARTERS),
    KernelForm("kivi_star", 2, 2, 64): _tpu(HALVES, QUARTERS_IN_TURN, QUARTERS_IN_TURN, FEW),
    KernelForm("kivi_star", 4, 4, 64): _tpu(
        EIGHTHS_IN_TURN, QUARTERS_IN_TURN, QUARTERS_IN_TURN, FEW
    ),
    KernelForm("kvquant", 2, 2): _tpu(WHOLE, WHOLE, WHOLE) | HOPPER,
    KernelForm("kvquant", 3, 3): _tpu(HALVES_IN_TURN, HALVES, HALVES_IN_TURN) | ON_HOPPER,
    KernelForm("kvquant", 4, 4): _tpu(EIGHTHS_IN_TURN, HALVES, HALVES) | HOPPER,
    KernelForm("kvquant", 2, 2, outliers=True): _tpu(WHOLE, WHOLE, WHOLE),
    KernelForm("kvquant", 3, 3, outliers=True): _tpu(HALVES_IN_TURN, HALVES, HALVES_IN_TURN),
    KernelForm("kvquant", 4, 4, outliers=True): _tpu(EIGHTHS_IN_TURN, HALVES, HALVES),
    KernelForm("kvquant", 2, 2, 64): _tpu(WHOLE, WHOLE, WHOLE, FEW),
    KernelForm("kvquant", 3, 3, 64): _tpu(HALVES_IN_TURN, HALVES_IN_TURN, HALVES_IN_TURN, FEW),
    KernelForm("kvquant", 4, 4, 64): _tpu(EIGHTHS_IN_TURN, HALVES, HALVES, FEW),
    KernelForm("klt"): HOPPER,
    KernelForm("exact"): _fixed(64) | EXACT_ON_HOPPER,
    KernelForm("exact", head_dim=64): _fixed(16) | EXACT_ON_HOPPER,
    KernelForm("exact", head_dim=256): EXACT_ON_HOPPER,
    KernelForm("higgs", 2, 2): _fixed(8),
    KernelForm("higgs", 3, 3): _fixed(4),
    KernelForm("higgs", 4, 4): _fixed(4),
    KernelForm("higgs", 2, 2, 64): _fixed(4),
}


def lookup(form: KernelForm | None, target: str) -> Entry | None:
    """Return what is known of the kernel for `form` on the chip `target`; None where there is
    none."""
    return TABLE.get(form, {}).get(target) if form is not None else None


def main() -> None:
    """Print the table as Markdown: a level for every kernel, nothing where the plain path
    serves."""
    print(f"| kernel form | {' | '.join(TARGETS)} |\n|{'---|' * (len(TARGETS) + 1)}")
    for form, row in TABLE.items():
        print(
            f"| {form} | {' | '.join(row[chip].level if chip in row else '' for chip in TARGETS)} |"
        )
    print("\nEmpty cells, and bodies of all other methods: the plain path.")
