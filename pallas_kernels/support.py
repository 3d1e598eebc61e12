"""Which decode attention each method gets on each chip, as data. `python -m kvqjax.pallas_kernels` prints it.

fast:      as correct, and within its budget of bundles (`BUDGETS`, before RoPE `EXACT`).
correct:   the kernel compiles for the chip without spills and copies, equals the reference in interpret mode, and its
           bundles are recorded (benchmarks/records); it is over its budget or has none.
compiled:  the kernel compiles for the chip without spills and copies (benchmarks/records), and equals the reference
           in an interpreter only with stand-ins for what it does in registers; it has not run on the chip.
reference: blockwise jnp, compiled by XLA.

On a chip that is there none is used unless that chip checked it (kvqjax.verdicts) or the user forces it; the levels
decide for programs that are compiled ahead of time, where those of level compiled are not used.
"""

from kvqjax.pallas_kernels.packed import TARGETS

__all__ = ["BUDGETS", "EXACT", "FIXED_BUDGET", "ROWS", "lookup", "main"]

TPUS = "v5e", "v5p", "v6e", "v7x"

# Bundles that 512 tokens of K and V of a KV head add, head_dim 128, 8 query rows; and what a tile may cost besides.
BUDGETS = {
    "kivi 2 bits": {"v5e": 135, "v6e": 85, "v7x": 78},
    "kivi 4 bits": {"v5e": 125, "v6e": 88, "v7x": 60},
    "kivi 8 bits": {"v5e": 130, "v6e": 90, "v7x": 85},
}
FIXED_BUDGET = 220
# For keys before RoPE all bundles for as many tokens, head_dim 128, and of other sizes in proportion: those in which
# the chip's memory delivers as many keys and values as bfloat16. Within them no exact cache can be faster.
EXACT = {"v5e": 480, "v6e": 280, "v7x": 156}


def _row(*correct: str, fast: tuple[str, ...] = (), compiled: tuple[str, ...] = ()) -> dict[str, str]:
    levels = dict.fromkeys(correct, "correct") | dict.fromkeys(fast, "fast") | dict.fromkeys(compiled, "compiled")
    return {target: levels.get(target, "reference") for target in TARGETS}


# Groups of 128 tokens and of as many channels as a head has unless they are said to be of 32 of each, head_dim 128
# unless said otherwise; two widths are those of keys and of values. Query rows are those that `dispatch` puts into a
# call; outlier slots may be up to 12. XQuant: latents of the sizes in `dispatch`. HIGGS: shapes in `dispatch`, pairs of
# channels, keys before RoPE, no random signs, all heads sharing a scale. CommVQ: the shapes in `dispatch`, 64 levels.
ROWS = {
    "kivi 2 bits": _row("v5p", fast=("v5e", "v6e", "v7x"), compiled=("sm90",)),
    "kivi 3 bits": _row(*TPUS, compiled=("sm90",)),
    "kivi 4 bits": _row("v5p", fast=("v5e", "v6e", "v7x"), compiled=("sm90",)),
    "kivi 8 bits": _row("v5p", fast=("v5e", "v6e", "v7x")),
    "kivi 4 and 2 bits": _row(*TPUS),
    "kivi 3 and 2 bits": _row(*TPUS),
    "kivi 2 bits, groups of 32": _row(*TPUS),
    "kivi 4 bits, groups of 32": _row(*TPUS),
    "kivi 4 and 2 bits, groups of 32": _row(*TPUS),
    "kivi 2 bits, head_dim 64": _row(*TPUS),
    "kivi 4 bits, head_dim 64": _row(*TPUS),
    "kivi 2 bits, head_dim 64, groups of 32": _row(*TPUS),
    "kivi 4 bits, head_dim 64, groups of 32": _row(*TPUS),
    "kivi 2 bits, head_dim 96": _row(*TPUS),
    "kivi 4 bits, head_dim 96": _row(*TPUS),
    "kivi 2 bits, head_dim 256": _row(*TPUS),
    "kivi 4 bits, head_dim 256": _row(*TPUS),
    "omniscale 2 bits": _row("v6e", "v7x"),
    "omniscale 4 bits": _row("v6e", "v7x"),
    "omniscale 2 bits, groups of 32": _row("v6e", "v7x"),
    "omniscale 4 bits, groups of 32": _row("v6e", "v7x"),
    "kvarn 2 bits": _row("v6e", "v7x"),
    "kvarn 4 bits": _row("v6e", "v7x"),
    "kvarn 4 and 2 bits": _row("v7x"),
    "oscar": _row(),
    "uniform": _row(),
    "kivi_star 2 bits": _row("v5p", "v7x", fast=("v5e", "v6e"), compiled=("sm90",)),
    "kivi_star 3 bits": _row("v5p", "v7x", fast=("v5e", "v6e"), compiled=("sm90",)),
    "kivi_star 4 bits": _row("v5p", "v7x", fast=("v5e", "v6e"), compiled=("sm90",)),
    "kivi_star 2 bits, groups of 32": _row("v5p", "v7x", fast=("v5e", "v6e")),
    "kivi_star 4 bits, groups of 32": _row("v5p", "v7x", fast=("v5e", "v6e")),
    "kivi_star 2 bits, head_dim 64": _row("v5p", "v7x", fast=("v5e", "v6e")),
    "kivi_star 4 bits, head_dim 64": _row("v5p", "v7x", fast=("v5e", "v6e")),
    "kvquant 2 bits": _row("v5p", "v7x", fast=("v5e", "v6e"), compiled=("sm90",)),
    "kvquant 3 bits": _row("v5p", "v6e", "v7x", fast=("v5e",), compiled=("sm90",)),
    "kvquant 4 bits": _row(*TPUS, compiled=("sm90",)),
    "kvquant 2 bits, outliers": _row(*TPUS),
    "kvquant 3 bits, outliers": _row(*TPUS),
    "kvquant 4 bits, outliers": _row(*TPUS),
    "kvquant 2 bits, head_dim 64": _row("v5p", "v7x", fast=("v5e", "v6e")),
    "kvquant 3 bits, head_dim 64": _row("v5p", "v6e", "v7x", fast=("v5e",)),
    "kvquant 4 bits, head_dim 64": _row(*TPUS),
    "commvq 1 bit": _row(*TPUS),
    "commvq 2 bits": _row(*TPUS),
    "commvq 1 bit, head_dim 64": _row(*TPUS),
    "commvq 2 bits, head_dim 64": _row(*TPUS),
    "commvq": _row(),
    "higgs 2 bits": _row(*TPUS),
    "higgs 3 bits": _row(*TPUS),
    "higgs 4 bits": _row(*TPUS),
    "higgs 2 bits, head_dim 64": _row(*TPUS),
    "higgs": _row(),
    "aqua": _row(),
    "xquant 2 bits": _row(*TPUS),
    "xquant 3 bits": _row(*TPUS),
    "xquant 4 bits": _row(*TPUS),
    "xquant 4 bits, QK-norm": _row(*TPUS),
    "xquant 4 bits, head_dim 64": _row(*TPUS),
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
