"""The speed page as Markdown, from the records."""

from benchmarks.step_cost.account import ASSUMPTIONS
from benchmarks.step_cost.bound import CLOCKS, NAMES
from benchmarks.step_cost.row import Row

INTRO = """# Speed against the bound

What one decode step of `generate` costs on chips that are not here: its loop is compiled ahead of time for each, and
the compiled program is counted. **Nothing on this page was measured on a chip.** The model is {model} in bfloat16.

The **bound** is what an ideal bf16 cache takes: the weights once, and each row's keys and values once, at the chip's
bandwidth as its vendor states it. A row at 0.8 is estimated to be faster than any bf16 cache can be. A row above 1.0
saves memory and no time: it is marked *memory only*.

Of a batch the rows are ragged: their lengths lie evenly between a batch's part of the context and all of it. The figure
in brackets is of rows that are all full. `bytes`, `attention` and `weights` are over those of the bound; on TPUs the
last two are cycles.
"""
HEADS = ("cache", "rows", "tokens", "stored, GB")
GPU = ("launches", "syncs", "bytes", "attention", "weights")
TPU = ("bytes", "attention", "weights")
TIMES = ("estimate, ms", "bound, ms", "over the bound")


def _verdict(row: Row, ratio: float) -> str:
    return ", memory only" if ratio > 1 and row.cache != "exact" else ""


def _line(row: Row, found: dict, columns: tuple[str, ...]) -> str:
    head = [f"`{row.cache}`", str(row.batch), f"{row.context // 1024}K"]
    if "refused" in found:
        cells = [*head, "does not fit", *[""] * (len(columns) + len(TIMES))]
        return f"| {' | '.join(cells)} |"
    one = found.get("ragged", found["full"])
    keys = {name: f"{name}_over_bound" for name in ("bytes", "attention", "weights")}
    cells = [f"{one[keys[name]]:.2f}" if name in keys else f"{one[name]:,}".replace(",", " ") for name in columns]
    over = f"{one['time_over_bound']:.2f}" + _verdict(row, one["time_over_bound"])
    full = f" ({found['full']['time_over_bound']:.2f})" if "ragged" in found else ""
    times = [f"{one['estimated_ms']:.1f}", f"{one['bound_ms']:.1f}", over + full]
    return f"| {' | '.join([*head, format(found['cache_gb'], '.1f'), *cells, *times])} |"


def _chip(chip: str, found: dict[Row, dict | None]) -> list[str]:
    is_tpu = NAMES.get(chip, chip) in CLOCKS
    columns = TPU if is_tpu else GPU
    heads = [*HEADS, *columns, *TIMES]
    known = {row: one for row, one in found.items() if one is not None}
    lines = [f"## {chip}", "", f"| {' | '.join(heads)} |", "|---" * 4 + "|---:" * (len(heads) - 4) + "|"]
    lines += [_line(row, one, columns) for row, one in known.items()]
    missing = [row for row in found if row not in known]
    if missing:
        listed = sorted({row.cache for row in missing})
        lines += ["", f"Not computed yet: {len(missing)} rows, of {', '.join(f'`{cache}`' for cache in listed)}."]
    versions = sorted({" ".join(f"{k} {v}" for k, v in one["versions"].items()) for one in known.values()})
    return [*lines, "", *(f"Compiled with {text}." for text in versions), ""]


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
    return "\n".join(lines).rstrip() + "\n"
