"""Pictures of reports (matplotlib): divergence against stored bits and against the step, accuracy
by depth."""

import importlib.util
import math
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvqjax._errors import UserError
from kvqjax._files import path_of
from kvqjax.eval.labels import (
    Curve,
    curve_style,
    height_for,
    label_curves,
    name_in_lines,
    new_figure,
)
from kvqjax.eval.scores import ROUNDING

Rows = list[dict[str, Any]]
KINDS = (".pdf", ".png", ".svg")
PANELS = 3  # side by side
KLD = "KL divergence from the exact cache (nats)"


def _grouped(rows: Rows, *keys: str) -> dict[str, Rows]:
    """Group rows by the values of `keys`, in their order."""
    groups: dict[str, Rows] = {}
    for row in rows:
        name = ", ".join(str(row[key]) for key in keys)
        groups.setdefault(name, []).append(row)
    return groups


def series(cache: str) -> str:
    """Return the policy without its bits: it is the same for the rows of one line."""
    policy, *exceptions = cache.split(";")
    name, _, options = policy.partition(":")
    settings = []
    for option in options.split(","):
        key = option.partition("=")[0]
        if option and not key.endswith("bits"):
            settings.append(option)
    if settings:
        name += ":" + ",".join(settings)
    return ";".join([name, *exceptions])


def _lines(rows: Rows, several: bool) -> dict[str, Rows]:
    """Group the rows into lines by their labels. If `several`, modes and windows differ, and the
    labels name them."""
    labelled = []
    for row in rows:
        label = series(row["cache"])
        if several:
            label += f", {row['mode']}, {row['windows']}"
        labelled.append(row | {"label": label})
    return _grouped(labelled, "label")


def count(tokens: int) -> str:
    """Write a number of tokens as it is spoken: 32K for 32768."""
    if tokens and tokens % 1024 == 0:
        return f"{tokens // 1024}K"
    return str(tokens)


def _curve(axes, number: int, name: str, points: Sequence[tuple], **style) -> Curve:
    """Draw points, joined by a line, as the picture's curve `number`."""
    x = [float(point[0]) for point in points]
    y = [float(point[1]) for point in points]
    style = {"lw": 1.5, "ms": 5.5, **curve_style(number), **style}
    (line,) = axes.plot(x, y, label=name, **style)
    return Curve(name, x, y, line.get_color())


def zero_line(axes, name: str) -> None:
    """End a log axis below in a line that stands for 0, which it cannot show, and write `name` on
    it."""
    heights = [float(value) for line in axes.lines for value in line.get_ydata()]
    # The decade below the lowest point; 1.5 keeps a point from lying on the line.
    low = 10.0 ** math.floor(math.log10(min([*heights, 1.0]) / 1.5))
    axes.set_ylim(low, 2 * max([*heights, 10 * low]))
    axes.axhline(low, color="black", ls="--", lw=1.5, clip_on=False, label=name)
    axes.annotate(name, (0.02, 0), (0, 4), "axes fraction", textcoords="offset points", fontsize=9)

    def tick(value: float, _) -> str:
        # The tick on the line; 1.01 allows for rounding.
        return "0" if value < 1.01 * low else _plain(value)

    axes.yaxis.set_major_formatter(tick)


def _plain(value: float) -> str:
    """Write a power of ten without an exponent, while it is short."""
    if 1e-6 < value < 1e6:
        return f"{value:.6f}".rstrip("0").rstrip(".")
    return f"{value:g}"


def _log_axis(axes, label: str) -> None:
    """Make a log axis with whole decades in plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.set_ylabel(label)
    axes.yaxis.set_major_locator(LogLocator(numticks=12))
    axes.yaxis.set_major_formatter(lambda value, _: _plain(value))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)


def _can_be_drawn(kld: float | int) -> bool:
    """Say whether a log axis can show a divergence: it is more than rounding, and neither infinite
    nor NaN."""
    return ROUNDING < kld < math.inf


def _note_left_out(axes, rows: Rows) -> None:
    """Name below the axis the caches with divergences that are infinite or NaN, which no axis can
    show."""

    names: dict[str, None] = {}
    for row in rows:
        # Drift has a divergence for each span, the other reports one for a row.
        divergences = row["kld"] if isinstance(row["kld"], Sequence) else [row["kld"]]
        if not all(map(math.isfinite, divergences)):
            names[row["cache"]] = None
    if names:
        note = "not drawn where the divergence is infinite or NaN: " + ", ".join(names)
        axes.set_xlabel(f"{axes.get_xlabel()}\n{textwrap.fill(note, 80)}")


def _bits_label(tokens: int) -> str:
    return f"bits stored per key or value number (everything, rows of {count(tokens)} tokens)"


def _quality(figure, rows: Rows) -> None:
    """Draw KL divergence against bits, a line a method. The exact cache, which a log axis cannot
    show, is its floor."""
    axes = figure.subplots()
    lossy = [row for row in rows if _can_be_drawn(row["kld"])]
    setups = _grouped(rows, "mode", "windows")
    curves = []
    for number, (name, group) in enumerate(_lines(lossy, len(setups) > 1).items()):
        points = sorted((row["bits_stored"], row["kld"]) for row in group)
        curves.append(_curve(axes, number, name, points))
    _log_axis(axes, KLD)
    exact_rows = [row for row in rows if row["cache"] == "exact"]
    exact_bits = f", {exact_rows[0]['bits_stored']:.3g} bits" if exact_rows else ""
    zero_line(axes, f"exact cache{exact_bits}: 0")
    label = _bits_label(rows[0]["context"])
    if len(setups) == 1:
        label += f"\n{next(iter(setups))}"
    axes.set_xlabel(label)
    _note_left_out(axes, rows)
    axes.xaxis.get_major_locator().set_params(nbins=6)
    axes.margins(x=0.05)
    low, high = axes.get_xlim()
    axes.set_xlim(low - 0.06 * (high - low), high)  # room for the name of a curve that ends early
    label_curves(figure, [(axes, curves)])


def _drift(figure, rows: Rows) -> None:
    """Draw KL divergence in spans of a long decode, a line a cache."""
    axes = figure.subplots()
    lossy = [row for row in rows if any(map(_can_be_drawn, row["kld"]))]
    curves = []
    for number, row in enumerate(lossy):
        width = row["steps"] / len(row["kld"])
        points = []
        for span, kld in enumerate(row["kld"]):
            if _can_be_drawn(kld):
                points.append(((span + 0.5) * width, kld))  # in the middle of its span
        curves.append(_curve(axes, number, row["cache"], points))
    _log_axis(axes, KLD)
    lossless = [row["cache"] for row in rows if all(kld <= ROUNDING for kld in row["kld"])]
    if lossless:
        zero_line(axes, ", ".join(lossless) + ": 0")
    axes.set_xlabel("decode step (tokens), means over equal spans")
    _note_left_out(axes, rows)
    axes.set_xlim(0, max(row["steps"] for row in rows))
    label_curves(figure, [(axes, curves)])


def _retrieval(figure, rows: Rows) -> None:
    """Draw accuracy by prompt length and depth as numbers in cells, a panel a cache, with one
    colour bar."""
    caches = _grouped(rows, "cache", "mode", "task")
    several_tasks = len({row["task"] for row in rows}) > 1
    wide = min(len(caches), PANELS)
    high = -(-len(caches) // wide)
    panels = figure.subplots(high, wide, squeeze=False)
    for axes in panels.flat[len(caches) :]:
        axes.remove()
    drawn = list(panels.flat[: len(caches)])
    for place, (axes, group) in enumerate(zip(drawn, caches.values(), strict=True)):
        _accuracy_panel(axes, group)
        title = name_in_lines(group[0]["cache"], 26)
        if several_tasks:
            title += f"\n{group[0]['task']}"
        axes.set_title(title, fontsize=9)
        # Axes are named at the left of each row of panels, and below the lowest panel of a column.
        if place % wide == 0:
            axes.set_ylabel("prompt (tokens)")
        if place + wide >= len(caches):
            axes.set_xlabel("depth of the answer (%)")
    figure.colorbar(drawn[0].images[0], ax=drawn, label="share of answers right", shrink=0.9)


def _accuracy_panel(axes, rows: Rows) -> None:
    """Draw the accuracy of one cache: a line of cells for each length, a column for each depth."""
    # Few samples make few spans: a short row is stretched over the same depths.
    spans = max(len(row["by_depth"]) for row in rows)
    grid = []
    for row in rows:
        accuracies = row["by_depth"]
        grid.append([accuracies[i * len(accuracies) // spans] for i in range(spans)])
    axes.imshow(grid, aspect="auto", extent=(0, 100, len(rows), 0), vmin=0, vmax=1, cmap="cividis")
    for line, accuracies in enumerate(grid):
        for span, accuracy in enumerate(accuracies):
            axes.text(
                100 * (span + 0.5) / spans,
                line + 0.5,
                f"{accuracy:.2f}".removesuffix("0"),
                ha="center",
                va="center",
                color="black" if accuracy > 0.4 else "white",  # cividis is dark below
                fontsize=9,
            )
    axes.set_yticks([n + 0.5 for n in range(len(rows))], [str(row["length"]) for row in rows])
    axes.set_xticks([0, 50, 100])


def _tasks(figure, rows: Rows) -> None:
    """Draw a bar a task, metric and cache, with its score."""
    axes = figure.subplots()
    caches = list(_grouped(rows, "cache"))
    tasks = _grouped([row | {"name": _task_name(row, rows)} for row in rows], "name")
    places = []
    names = []
    at = 0.0
    for task, group in tasks.items():
        for row in group:
            colour = curve_style(caches.index(row["cache"]))["color"]
            bar = axes.barh(at, row["score"], height=0.85, color=colour, label=row["cache"])
            axes.bar_label(bar, [f"{row['score']:.3g}"], padding=3, fontsize=9)
            # A single task is named below the axis instead of at every bar.
            name = f"{task}: {row['cache']}" if len(tasks) > 1 else row["cache"]
            names.append(name_in_lines(name, 40))
            places.append(at)
            at += 1
        at += 0.6  # a gap between tasks
    axes.set_yticks(places, names, fontsize=9)
    axes.set_xlabel("score" if len(tasks) > 1 else f"score: {next(iter(tasks))}")
    axes.margins(x=0.12)
    axes.invert_yaxis()


def _as_tasks(rows: Rows) -> Rows:
    """Turn rows of structured texts into rows of tasks, whose score is the share of right
    tokens."""
    tasks = []
    for row in rows:
        name = f"{row['kind']}, {count(row['length'])}, {row['mode']}"
        tasks.append(row | {"task": name, "score": row["right"]})
    return tasks


def _copies(figure, rows: Rows) -> None:
    """Draw a bar a kind of text, length, mode and cache, with the share of right tokens."""
    _tasks(figure, _as_tasks(rows))


def _task_name(row: dict[str, Any], rows: Rows) -> str:
    """Name a task, with its metric and filter where the report has several."""
    parts = [row["task"]]
    for key in ("metric", "filter"):
        values = {entry.get(key) for entry in rows}
        if len(values) > 1 and row.get(key):
            parts.append(str(row[key]))
    return ", ".join(parts)


PLOTS: dict[str, Callable[[Any, Rows], None]] = {
    "ppl": _quality,
    "compare": _quality,
    "drift": _drift,
    "retrieval": _retrieval,
    "copy": _copies,
    "harness": _tasks,
}


MEASURED = {
    "ppl": "KL divergence by bits stored",
    "compare": "KL divergence by bits stored",
    "drift": "KL divergence along a long decode",
    "retrieval": "answers found in the prompt",
    "copy": "share of tokens given back right",
    "harness": "scores of tasks",
}


def title_of(kind: str, model: str, text: str | None = None) -> str:
    """Title a picture: the model, the text that it read, what is measured."""
    subject = Path(model).resolve().name if Path(model).is_dir() else model
    if text:
        subject += f" on {Path(text).name}"
    return f"{subject}: {MEASURED[kind]}"


def check_picture(path: Path) -> None:
    """Raise UserError where no picture can be drawn into `path`. Call it before the work whose
    result the picture shows."""
    if path.suffix.lower() not in KINDS:
        kinds = ", ".join(KINDS)
        raise UserError(f"{path}: no kind of picture; its name must end in one of {kinds}")
    # A file that exists is written over; a new one needs a folder that takes it.
    place = path if path_of(path).exists() else path.parent
    if path.is_dir() or not os.access(place, os.W_OK) or not path.parent.is_dir():
        raise UserError(f"{path}: cannot be written")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("a picture needs matplotlib: pip install matplotlib")


def _size(kind: str, rows: Rows) -> tuple[float, float]:
    """Return width and height of a report's picture in inches."""
    if kind == "retrieval":
        panels = _grouped(rows, "cache", "mode", "task")
        wide = min(len(panels), PANELS)
        high = -(-len(panels) // wide)
        lengths = max(len(group) for group in panels.values())
        width = 1.4 + 1.9 * wide + 1.3 * (wide == 1)
        return width, 1.0 + (1.2 + 0.35 * lengths) * high
    if kind == "copy":
        rows = _as_tasks(rows)
    if kind in ("copy", "harness"):
        return 6.4, 1.4 + 0.3 * len(rows) + 0.2 * len(_grouped(rows, "task"))
    caches = {row["cache"] for row in rows}
    names = caches if kind == "drift" else {series(cache) for cache in caches}
    return 6.4, height_for(sorted(names), 4.4)


def draw(kind: str, rows: Rows, title: str, path: Path) -> None:
    """Draw the rows of one kind of report into a PNG, SVG or PDF file (by its name); see
    `check_picture`.

    Args:
        kind: of the report, a key of PLOTS.
        rows: as the report has them.
        title: model, text and what is measured.
        path: of the file.

    Raises:
        UserError: the file cannot be written.
    """
    figure = new_figure(*_size(kind, rows))
    letters = int(12 * figure.get_figwidth())  # 12 letters of this size in an inch
    figure.suptitle(textwrap.fill(title, letters), fontsize=11)
    PLOTS[kind](figure, rows)
    try:
        figure.savefig(path, dpi=200)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be written: {error}") from error
