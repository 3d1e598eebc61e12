"""benchmarks/scale.md: large models and long contexts, as planned and as compilers confirm."""

from benchmarks.paper_sizes import sizes
from benchmarks.tables import read, table
from benchmarks.xquant_roofline import CASES, CONTEXT, borders, operations

__all__ = ["text"]

GIB = 2**30
HEAD = """# Scale: what the planner says and what compilers confirm

Written by `python -m benchmarks.figures` from `benchmarks/records` and from the planner's arithmetic.

## Sizes in the papers

GiB. The planner's figures stand beside those of KVQuant's Tables 7 and 8 and AQUA-KV's Table 2, which counts the
predictors, as *with constants* does. KVQuant's Table 7 says 610 for two bits without scales at ten million tokens, its
Table 8 gives 611.5. HIGGS at 4 bits is printed as 10.6, but its own 4.02 bits of 40 GiB make 10.05. KIVI
keeps a window.

"""
PLANS = """
## Memory that the compiler confirms (`python benchmarks/compiled_plans.py --write`)

GiB of one device for `generate`'s decode loop, compiled ahead of time for a slice that is not there: bfloat16
weights, the donated cache updated in its own buffers. *Bits* are all that is stored, at the full context.

"""
TIMES = """
## Compile time (`python -m benchmarks.compile_times --chip h100|v5p --write`)

Processor seconds that XLA takes for programs of Llama-3.1-8B's geometry at 131 072 tokens of capacity in bfloat16, of
32 layers or, with `--layers`, of more: `generate`'s decode loop, and the exact prefill of 4096 tokens. On GPUs each
layer is compiled by itself, and XLA compiles one thing after the other; with `layers="scan"` it compiles one layer, and
copies the weights in every step. TPUs scan over layers. Programs are kept on disk (`--compilation-cache`), so this is
paid once.

"""
MATERIAL = """
## Where rematerialisation stops hiding behind memory traffic (XQuant, section 3.4)

The longest context, in tokens, at which making keys and values anew takes no longer than reading the weights and the
codes: one sequence, 16-bit weights, 2-bit codes with their scales. The paper prints 2.3K and 40.6K.

"""


def _plans() -> str:
    heads = ["model", "cache", "rows x tokens", "slice", "may hold", "bits", "cache", "planned", "compiled", "fits"]
    rows = []
    for row in read("compiled_plans").values():
        planned, compiled = row["planned"], row["compiled"]
        sizes = (f"{planned[name] / GIB:.2f}" for name in ("cache", "total"))
        total = f"{compiled['total'] / GIB:.2f}" if "total" in compiled else "refused by the compiler"
        cells = [
            row["model"],
            f"`{row['cache']}`",
            f"{row['batch']} x {row['context']}",
            f"{row['slice']} {row['mesh']}",
        ]
        cells += [f"{row['limit'] / GIB:.2f}", f"{planned['bits_stored']:.3f}", *sizes, total]
        rows.append([*cells, "yes" if compiled["fits"] else "no"])
    return PLANS + table(heads, rows)


def _times() -> str:
    record = read("compile_times")
    heads = [f"{chip}, {program}" for chip in record for program in ("decode", "prefill")]
    caches = dict.fromkeys(cache for rows in record.values() for cache in rows)
    seconds = lambda chip, cache, part: record[chip][cache][part]["processor"] if cache in record[chip] else ""  # noqa: E731
    rows = [
        [f"`{cache}`", *(str(seconds(c, cache, p)) for c in record for p in ("decode", "prefill"))] for cache in caches
    ]
    return TIMES + table(["method", *heads], rows)


def _rematerialised() -> str:
    about = f"\nOperations for a generated token at {CONTEXT} tokens: "
    said = "; ".join(f"{name}: {count:.1f} TFLOP" for name, count in operations().items())
    return MATERIAL + table(["device", "operations a byte", *CASES], borders()) + about + said + ".\n"


def text() -> str:
    """The page."""
    heads = ["table", "model", "cache", "tokens", "paper", "cache here", "with constants", "bits stored"]
    return HEAD + table(heads, sizes()) + _plans() + _times() + _rematerialised()
