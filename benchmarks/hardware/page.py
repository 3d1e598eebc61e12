"""The page of a run: a table a stage, and two pictures where matplotlib is there."""

import importlib.util
from pathlib import Path
from typing import Any

from benchmarks.hardware.log import Log
from benchmarks.tables import table
from kvqjax._tables import cell
from kvqjax.eval.labels import Curve, curve_style, height_for, label_curves, new_figure

__all__ = ["write_page"]

TITLES = {
    "doctor": "Kernels and plain paths",
    "ceiling": "What this chip does at best",
    "attention": "Attention of one decode step, one layer",
    "steps": "Whole decode steps, random weights",
    "prompts": "Exact prefill",
    "million": "A very long context at 2 bits",
}


def _table(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[cell(name, row.get(name)).replace("|", "/") for name in names] for row in rows]
    return table([name.replace("_", " ") for name in names], cells)


def _picture(path: Path, rows: list[dict[str, Any]], label: str, value: str, title: str) -> None:
    """One line for every `label` over the context, rows of one."""
    alone = [row for row in rows if row["batch"] == 1]
    names = list(dict.fromkeys(row[label] for row in alone))
    figure = new_figure(6.4, height_for(names, 4.4))
    axes, curves = figure.subplots(), []
    for number, name in enumerate(names):
        points = sorted((row["context"], row[value]) for row in alone if row[label] == name)
        curves.append(Curve(name, *zip(*points, strict=True), curve_style(number)["color"]))
        axes.plot(curves[-1].x, curves[-1].y, lw=1.5, ms=5.5, **curve_style(number))
    axes.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel=f"time ({value})", title=title)
    axes.grid(alpha=0.3)
    label_curves(figure, [(axes, curves)])
    figure.savefig(path, dpi=200)


def write_page(folder: Path, log: Log, left: int) -> Path:
    """Write `page.md` and its pictures into the folder, from what the log holds."""
    parts = ["# Measured by `python -m benchmarks.hardware`", ", ".join(f"{k} {v}" for k, v in log.about.items())]
    if left:
        parts.append(f"{left} items are left; the same command goes on.")
    for stage, title in TITLES.items():
        if rows := log.rows(stage):
            parts += [f"## {title}", _table(rows)]
    plots = {"attention": ("way", "us"), "steps": ("cache", "ms")}
    if importlib.util.find_spec("matplotlib") is not None:
        for stage, (label, value) in plots.items():
            if rows := log.rows(stage):
                _picture(folder / f"{stage}.png", rows, label, value, TITLES[stage])
                parts.append(f"![{TITLES[stage]}]({stage}.png)")
    if problems := log.problems():
        parts += ["## What did not run", *(f"- {item}: {line}" for item, line in problems)]
    path = folder / "page.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path
