"""Pictures of reports (matplotlib): perplexity against stored bits, divergence against the step, accuracy by depth."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvqjax.errors import UserError

__all__ = ["PLOTS", "check_picture", "draw"]

Rows = list[dict[str, Any]]
KINDS = (".pdf", ".png", ".svg")


def _grouped(rows: Rows, *keys: str) -> dict[str, Rows]:
    """Rows by the values of `keys`, in their order."""
    out: dict[str, Rows] = {}
    for row in rows:
        out.setdefault(", ".join(str(row[key]) for key in keys), []).append(row)
    return out


def _ppl(figure, rows: Rows) -> None:
    axes = figure.subplots()
    for mode, group in _grouped(rows, "mode", "windows").items():
        axes.plot([row["bits_stored"] for row in group], [row["ppl"] for row in group], "o", label=mode)
        for row in group:
            place = (row["bits_stored"], row["ppl"])
            axes.annotate(row["cache"], place, xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.margins(0.15)
    axes.set(xlabel="stored bits per value", ylabel="perplexity")
    axes.legend(fontsize=8)


def _drift(figure, rows: Rows) -> None:
    axes = figure.subplots()
    for row in rows:
        width = row["steps"] / len(row["kld"])
        middles = [(number + 0.5) * width for number in range(len(row["kld"]))]
        axes.plot(middles, row["kld"], marker="o", label=row["cache"])
    axes.set(xlabel="decode step", ylabel="KL divergence to the exact cache (nats)")
    axes.legend(fontsize=8)


def _retrieval(figure, rows: Rows) -> None:
    caches = _grouped(rows, "cache", "mode", "task")
    panels = figure.subplots(1, len(caches), squeeze=False)[0]
    for axes, (name, group) in zip(panels, caches.items(), strict=True):
        # Few samples make few spans: a short row is stretched over the same depths.
        spans = max(len(row["by_depth"]) for row in group)
        grid = [[row["by_depth"][i * len(row["by_depth"]) // spans] for i in range(spans)] for row in group]
        picture = axes.imshow(grid, vmin=0, vmax=1, aspect="auto", cmap="viridis", extent=(0, 1, len(group), 0))
        axes.set_yticks([n + 0.5 for n in range(len(group))], [str(row["length"]) for row in group])
        axes.set_title(name, fontsize=7)
        axes.set(xlabel="depth", ylabel="prompt tokens")
        figure.colorbar(picture, ax=axes, label="accuracy")


def _tasks(figure, rows: Rows) -> None:
    axes = figure.subplots()
    caches = _grouped(rows, "cache")
    for number, (cache, group) in enumerate(caches.items()):
        at = [place + 0.8 * number / len(caches) for place in range(len(group))]
        axes.barh(at, [row["score"] for row in group], height=0.8 / len(caches), label=cache)
        axes.set_yticks(range(len(group)), [row["task"] for row in group], fontsize=7)
    axes.set(xlabel="score")
    axes.invert_yaxis()
    axes.legend(fontsize=8)


PLOTS: dict[str, Callable[[Any, Rows], None]] = {
    "ppl": _ppl,
    "drift": _drift,
    "retrieval": _retrieval,
    "tasks": _tasks,
    "harness": _tasks,
}


def check_picture(path: Path) -> None:
    """Raise UserError where no picture can be drawn into `path`: before the work whose result it would show."""
    if path.suffix.lower() not in KINDS:
        raise UserError(f"{path}: no kind of picture; its name must end in one of {', '.join(KINDS)}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{path}: cannot be written")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib: pip install 'kvqjax[plots]'")


def draw(kind: str, rows: Rows, title: str, path: Path) -> None:
    """Draw the rows of one kind of report into a PNG, SVG or PDF file (by its name); see `check_picture`."""
    from matplotlib.figure import Figure

    panels = len(_grouped(rows, "cache", "mode", "task")) if kind == "retrieval" else 1
    figure = Figure(figsize=(min(6.4 * max(1, panels * 0.6), 24), 4.8), layout="constrained")
    PLOTS[kind](figure, rows)
    figure.suptitle(title, fontsize=9)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be written: {error}") from error
