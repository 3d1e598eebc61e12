"""Which decode attention each method gets on each chip, as data. `python -m kvqjax.pallas_kernels.support` prints it.

fast:      the kernel is within its budget of bundles (benchmarks/records).
correct:   the kernel compiles for the chip without spills and copies, equals the reference in interpret mode, and its
           bundles are recorded; it is over its budget or has none.
compiled:  the kernel compiles for the chip without spills and copies (benchmarks/records), and equals the reference
           in an interpreter only with stand-ins for what it does in registers; it has not run on the chip. No program
           uses it unasked: call `gpu.packed_attention` by name.
reference: blockwise jnp, compiled by XLA.
"""

from kvqjax.pallas_kernels.packed import TARGETS

__all__ = ["ROWS", "lookup", "main"]


# Compiled so far: head_dim 128, groups of 128 tokens and of 128 channels. v5e and v5p still spill a few registers.
def _row(*correct: str, compiled: tuple[str, ...] = ()) -> dict[str, str]:
    levels = dict.fromkeys(correct, "correct") | dict.fromkeys(compiled, "compiled")
    return {target: levels.get(target, "reference") for target in TARGETS}


ROWS = {
    "kivi 2 bits": _row("v7x", compiled=("sm90",)),
    "kivi 3 bits": _row(),
    "kivi 4 bits": _row("v6e", "v7x", compiled=("sm90",)),
    "kivi 8 bits": _row("v6e"),
    "kivi, keys and values of different bits": _row(),
    "uniform": _row(),
    "kivi_star": _row(),
    "kvquant": _row(),
    "commvq": _row(),
    "higgs": _row(),
    "aqua": _row(),
    "xquant": _row(),
    "xquant_cl": _row(),
}


def lookup(method: str, target: str) -> str:
    """fast, correct, compiled or reference; KeyError for an unknown row or chip."""
    return ROWS[method][target]


def main() -> None:
    """Print the table as Markdown."""
    print(f"| method | {' | '.join(TARGETS)} |\n|{'---|' * (len(TARGETS) + 1)}")
    for method, row in ROWS.items():
        print(f"| {method} | {' | '.join(row.values())} |")


if __name__ == "__main__":
    main()
