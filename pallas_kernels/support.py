"""Which decode attention each method gets on each chip, as data. `python -m kvqjax.pallas_kernels.support` prints it.

fast:      the kernel is within its budget of bundles (benchmarks/records).
correct:   the kernel compiles for the chip without spills and copies, equals the reference in interpret mode, and its
           bundles are recorded; it is over its budget or has none.
reference: blockwise jnp, compiled by XLA.
"""

from kvqjax.pallas_kernels.packed import TARGETS

__all__ = ["ROWS", "lookup", "main"]

TPUS = ("v5e", "v5p", "v6e", "v7x")


def _row(tpu: str) -> dict[str, str]:
    return {target: tpu if target in TPUS else "reference" for target in TARGETS}


ROWS = {
    "kivi 2 bits": _row("correct"),
    "kivi 3 bits": _row("correct"),
    "kivi 4 bits": _row("correct"),
    "kivi 8 bits": _row("correct"),
    "kivi, keys and values of different bits": _row("correct"),
    "uniform": _row("reference"),
    "kivi_star": _row("reference"),
    "kvquant": _row("reference"),
    "commvq": _row("reference"),
    "higgs": _row("reference"),
    "aqua": _row("reference"),
    "xquant": _row("reference"),
    "xquant_cl": _row("reference"),
}


def lookup(method: str, target: str) -> str:
    """fast, correct or reference; KeyError for an unknown row or chip."""
    return ROWS[method][target]


def main() -> None:
    """Print the table as Markdown."""
    print(f"| method | {' | '.join(TARGETS)} |\n|{'---|' * (len(TARGETS) + 1)}")
    for method, row in ROWS.items():
        print(f"| {method} | {' | '.join(row.values())} |")


if __name__ == "__main__":
    main()
