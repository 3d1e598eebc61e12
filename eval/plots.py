"""Pictures of reports (matplotlib): divergence against stored bits and against the step, accuracy by depth."""

import importlib.util
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvqjax._errors import UserError
from kvqjax.eval.scores import ROUNDING

__all__ = ["PLOTS", "check_picture", "draw"]

Rows = list[dict[str, Any]]
KINDS = (".pdf", ".png", ".svg")
MARKERS = "osD^v<>Pphd*X8"


def _grouped(rows: Rows, *keys: str) -> dict[str, Rows]:
    """Rows by the values of `keys`, in their order."""
    out: dict[str, Rows] = {}
    for row in rows:
        out.setdefault(", ".join(str(row[key]) for key in keys), []).append(row)
    return out


def series(cache: str) -> str:
    """What the rows of one line have in common: the policy without its bits."""
    policy, *exceptions = cache.split(";")
    name, _, options = policy.partition(":")
    rest = [option for option in options.split(",") if option and not option.partition("=")[0].endswith("bits")]
    return ";".join([":".join([name, *([",".join(rest)] if rest else [])]), *exceptions])


def _lines(rows: Rows, several: bool) -> dict[str, Rows]:
    """The rows of each line, by its label; `several`: with mode and windows, which differ."""
    label = lambda row: "\n".join([series(row["cache"]), *([f"{row['mode']}, {row['windows']}"] * several)])  # noqa: E731
    return _grouped([row | {"label": label(row)} for row in rows], "label")


def _count(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _quality(figure, rows: Rows) -> None:
    """KL divergence against bits per number, a line a method; the exact cache, which a log axis cannot show, as its
    floor."""
    axes, handles = figure.subplots(), []
    lossy = [row for row in rows if row["kld"] > ROUNDING]
    setups = _grouped(rows, "mode", "windows")
    for number, (name, group) in enumerate(_lines(lossy, len(setups) > 1).items()):
        points = sorted((row["bits_stored"], row["kld"]) for row in group)
        style = {"marker": MARKERS[number % len(MARKERS)], "color": f"C{number % 10}", "label": name}
        handles += axes.plot(*zip(*points, strict=True), lw=1.2, ms=6, **style)
    floor = 10.0 ** math.floor(math.log10(min((row["kld"] for row in lossy), default=1.0) / 2))
    exact = next((f" ({row['bits_stored']:.3g} bits)" for row in rows if row["cache"] == "exact"), "")
    handles += [axes.axhline(floor, color="black", ls="--", lw=1.5, label=f"exact{exact}: 0", clip_on=False)]
    axes.set(yscale="log", ylim=(floor, None))
    setup = f"\n({next(iter(setups))})" if len(setups) == 1 else ""
    axes.set_xlabel(f"bits per number: all that is stored for {_count(rows[0]['context'])} tokens{setup}")
    axes.set_ylabel("KL divergence from the exact cache (nats)")
    axes.grid(alpha=0.3)
    # From top to bottom as the lines end.
    handles.sort(key=lambda line: -line.get_ydata()[-1])
    figure.legend(handles=handles, loc="outside right center", fontsize=10, frameon=False, labelspacing=0.8)


def _tune(figure, rows: Rows) -> None:
    """KL divergence against bits: the chosen policy, single choices by method, the front of first guesses."""
    axes = figure.subplots()
    lossy = [row for row in rows if row["kld"] > ROUNDING]
    singles = [row | {"series": series(row["cache"])} for row in lossy if row["kind"] == "single"]
    for number, (name, group) in enumerate(_grouped(singles, "series").items()):
        points = sorted((row["bits_stored"], row["kld"]) for row in group)
        style = {"marker": MARKERS[number % len(MARKERS)], "color": f"C{number % 10}", "label": name}
        axes.plot(*zip(*points, strict=True), lw=0.8, ms=5, **style)
    for kind, style in {"front": "k.--", "tuned": "r*"}.items():
        points = sorted((row["bits_stored"], row["kld"], row["kld_error"]) for row in lossy if row["kind"] == kind)
        if points:
            bits, kld, error = zip(*points, strict=True)
            axes.errorbar(bits, kld, yerr=error, fmt=style, ms=14 if kind == "tuned" else 5, lw=1.2, label=kind)
    axes.set(yscale="log", xlabel="bits per number: all that is stored", ylabel="KL divergence (nats)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=9, frameon=False)


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
    "ppl": _quality,
    "compare": _quality,
    "tune": _tune,
    "drift": _drift,
    "retrieval": _retrieval,
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
    width = 9.6 if kind in ("ppl", "compare", "tune") else min(6.4 * max(1, panels * 0.6), 24)
    figure = Figure(figsize=(width, 4.8), layout="constrained")
    PLOTS[kind](figure, rows)
    figure.suptitle(title, fontsize=9)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be written: {error}") from error
