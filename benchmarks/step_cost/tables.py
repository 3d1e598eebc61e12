"""The speed page as Markdown, from the records."""

from benchmarks.step_cost.account import ASSUMPTIONS
from benchmarks.step_cost.bound import CLOCKS, NAMES
from benchmarks.step_cost.limits import CHIP as LIMITED
from benchmarks.step_cost.limits import limits
from benchmarks.step_cost.row import ALIKE, SAME, Row
from kvqjax.hardware.planner import DEVICES, GIB

INTRO = """# Speed against the bound

How long one decode step of `generate` takes on chips that are not here, estimated: its loop is compiled ahead of time
for each chip, and the work in the compiled program is counted. **Nothing on this page was measured on a chip.** The
model is {model} in bfloat16.

The **bound** is what an ideal bf16 cache takes: the weights once, and each row's keys and values once, at the chip's
bandwidth as its vendor states it. *Over the bound* divides a row's estimated time by that bound. At 0.8 the step is
estimated to be faster than a step with any bf16 cache can be. Above 1.0 the compressed cache saves memory, but need not
save time: such rows are marked *memory only*. A cache that is *too large* for one chip is counted all the same, unless
the compiler refuses it.

The rows of a batch differ in length: with 8 rows, the shortest holds an eighth of the context, the longest all of it,
and the others lie evenly between. The figure in brackets is for rows that are all full. `bytes`, `attention` and
`weights` are divided by those of the bound; on TPUs the last two are cycles. On GPUs each row of the exact cache and of
KIVI's costs as much as the longest row, since no row of XLA's products can end at a length that is data. Other bodies
are decoded there in spans of the tokens that rows hold; the number of spans is rounded up to a sixteenth of the batch.
"""
HEADS = ("cache", "rows", "tokens", "stored, GB")
GPU = ("launches", "syncs", "bytes", "attention", "weights")
TPU = ("bytes", "attention", "weights")
TIMES = ("estimate, ms", "bound, ms", "over the bound")


def _verdict(row: Row, found: dict, ratio: float) -> str:
    marks = ["memory only"] if ratio > 1 and row.cache != "exact" else []
    marks += ["loops not known"] if found["full"]["unsure"] else []
    marks += [f"from {' and '.join(map(str, found['layers']))} layers"] if "layers" in found else []
    return "".join(f", {mark}" for mark in marks)


def _stored(row: Row, found: dict) -> str:
    """Gigabytes of the cache; whether all that the program keeps fits the chip."""
    memory = DEVICES[NAMES.get(row.chip, row.chip)].memory * GIB / 1e9
    return f"{found['cache_gb']:.1f}" + (", too large" if found["arguments_gb"] + found["temp_gb"] > memory else "")


def _line(row: Row, found: dict, columns: tuple[str, ...]) -> str:
    head = [f"`{row.cache}`", str(row.batch), f"{row.context // 1024}K"]
    if "refused" in found:
        cells = [*head, "too large", *[""] * (len(columns) + len(TIMES))]
        return f"| {' | '.join(cells)} |"
    one = found.get("ragged", found["full"])
    keys = {name: f"{name}_over_bound" for name in ("bytes", "attention", "weights")}

    def full(key: str) -> str:
        return f" ({found['full'][key]:.2f})" if "ragged" in found else ""

    cells = [f"{one[keys[name]]:.2f}" if name in keys else f"{one[name]:,}".replace(",", " ") for name in columns]
    cells = [
        x + (full(keys[name]) if name in ("bytes", "attention") else "") for name, x in zip(columns, cells, strict=True)
    ]
    over = f"{one['time_over_bound']:.2f}" + _verdict(row, found, one["time_over_bound"])
    times = [f"{one['estimated_ms']:.1f}", f"{one['bound_ms']:.1f}", over + full("time_over_bound")]
    return f"| {' | '.join([*head, _stored(row, found), *cells, *times])} |"


def _listed(missing: list[Row]) -> str:
    """Missing rows: those of one batch that lack the same contexts together."""
    contexts: dict[tuple[str, int], list[str]] = {}
    for row in missing:
        contexts.setdefault((row.cache, row.batch), []).append(f"{row.context // 1024}K")
    groups: dict[tuple[int, str], list[str]] = {}
    for (cache, batch), sizes in contexts.items():
        groups.setdefault((batch, ", ".join(sizes)), []).append(f"`{cache}`")
    return "; ".join(f"{batch} x {sizes}: {', '.join(caches)}" for (batch, sizes), caches in groups.items())


def _chip(chip: str, found: dict[Row, dict | None]) -> list[str]:
    is_tpu = NAMES.get(chip, chip) in CLOCKS
    columns = TPU if is_tpu else GPU
    heads = [*HEADS, *columns, *TIMES]
    known = {row: one for row, one in found.items() if one is not None}
    lines = [f"## {chip}", ""]
    if known:
        lines += [f"| {' | '.join(heads)} |", "|---" * 4 + "|---:" * (len(heads) - 4) + "|"]
    lines += [_line(row, one, columns) for row, one in known.items()]
    missing = [row for row in found if row not in known]
    if missing:
        lines += [*([""] if known else []), f"Not computed yet: {_listed(missing)}."]
    versions = sorted({" ".join(f"{k} {v}" for k, v in one["versions"].items()) for one in known.values()})
    lines += ["", *(f"Compiled with {text}." for text in versions)]
    other = (SAME | ALIKE).get(chip)
    return [*lines, *([f"The programs are those of {other}."] if other else []), ""]


def page_text(found: dict[Row, dict | None]) -> str:
    """The page: what is counted, what is assumed, a table for each chip."""
    chips = list(dict.fromkeys(row.chip for row in found))
    model = next(iter(found)).model
    lines = [INTRO.format(model=model), "## What is assumed", ""]
    lines += [f"- {text}." for text in ASSUMPTIONS["both"]]
    lines += [f"- GPUs: {text}." for text in ASSUMPTIONS["gpu"]]
    lines += [f"- TPUs: {text}." for text in ASSUMPTIONS["tpu"]]
    lines += ["", "Written by `python -m benchmarks.step_cost.page`; one row by `python -m benchmarks.step_cost`.", ""]
    for chip in chips:
        lines += _chip(chip, {row: one for row, one in found.items() if row.chip == chip})
        lines += [limits(found)] if chip == LIMITED else []
    return "\n".join(lines).rstrip() + "\n"
