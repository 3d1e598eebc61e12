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
    """Rows by the values of `keys`, in their order."""
    out: dict[str, Rows] = {}
    for row in rows:
        out.setdefault(", ".join(str(row[key]) for key in keys), []).append(row)
    return out


def series(cache: str) -> str:
    """Give the policy without its bits: it is the same for the rows of one line."""
    policy, *exceptions = cache.split(";")
    name, _, options = policy.partition(":")
    settings = [
        option
        for option in options.split(",")
        if option and not option.partition("=")[0].endswith("bits")
    ]
    return ";".join([":".join([name, *([",".join(settings)] if settings else [])]), *exceptions])


def _lines(rows: Rows, several: bool) -> dict[str, Rows]:
    """The rows of each line, by its label; `several`: with mode and windows, which differ."""

    def label(row):
        return ", ".join([series(row["cache"]), *([row["mode"], row["windows"]] * several)])

    return _grouped([row | {"label": label(row)} for row in rows], "label")


def count(tokens: int) -> str:
    """A number of tokens as it is spoken: 32K for 32768."""
    return f"{tokens // 1024}K" if tokens and tokens % 1024 == 0 else str(tokens)


def _curve(axes, number: int, name: str, points: Sequence[tuple], **style) -> Curve:
    """Draw points, joined by a line, as the picture's curve `number`."""
    x, y = ([float(part) for part in parts] for parts in zip(*points, strict=True))
    (line,) = axes.plot(x, y, label=name, **{"lw": 1.5, "ms": 5.5, **curve_style(number), **style})
    return Curve(name, x, y, line.get_color())


def zero_line(axes, name: str) -> None:
    """End a log axis below in a line that stands for 0, which it cannot show, and write `name` on
    it."""
    heights = [float(value) for line in axes.lines for value in line.get_ydata()]
    low = 10.0 ** math.floor(math.log10(min([*heights, 1.0]) / 1.5))
    axes.set_ylim(low, 2 * max([*heights, 10 * low]))
    axes.axhline(low, color="black", ls="--", lw=1.5, clip_on=False, label=name)
    axes.annotate(name, (0.02, 0), (0, 4), "axes fraction", textcoords="offset points", fontsize=9)
    axes.yaxis.set_major_formatter(lambda value, _: "0" if value < 1.01 * low else _plain(value))


def _plain(value: float) -> str:
    """A power of ten without an exponent, while it is short."""
    return f"{value:.6f}".rstrip("0").rstrip(".") if 1e-6 < value < 1e6 else f"{value:g}"


def _log_axis(axes, label: str) -> None:
    """A log axis with whole decades in plain numbers."""
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

    def wrong(kld):
        return not all(map(math.isfinite, kld if isinstance(kld, Sequence) else [kld]))

    if names := dict.fromkeys(row["cache"] for row in rows if wrong(row["kld"])):
        note = textwrap.fill(
            "not drawn where the divergence is infinite or NaN: " + ", ".join(names), 80
        )
        axes.set_xlabel(f"{axes.get_xlabel()}\n{note}")


def _bits_label(tokens: int) -> str:
    return f"bits stored per key or value number (everything, rows of {count(tokens)} tokens)"


def _quality(figure, rows: Rows) -> None:
    """KL divergence against bits, a line a method; the exact cache, which a log axis cannot show,
    as its floor."""
    axes = figure.subplots()
    lossy = [row for row in rows if _can_be_drawn(row["kld"])]
    setups = _grouped(rows, "mode", "windows")
    curves = []
    for number, (name, group) in enumerate(_lines(lossy, len(setups) > 1).items()):
        curves.append(
            _curve(axes, number, name, sorted((row["bits_stored"], row["kld"]) for row in group))
        )
    _log_axis(axes, KLD)
    exact = next(
        (f", {row['bits_stored']:.3g} bits" for row in rows if row["cache"] == "exact"), ""
    )
    zero_line(axes, f"exact cache{exact}: 0")
    axes.set_xlabel(
        _bits_label(rows[0]["context"]) + (f"\n{next(iter(setups))}" if len(setups) == 1 else "")
    )
    _note_left_out(axes, rows)
    axes.xaxis.get_major_locator().set_params(nbins=6)
    axes.margins(x=0.05)
    low, high = axes.get_xlim()
    axes.set_xlim(low - 0.06 * (high - low), high)  # room for the name of a curve that ends early
    label_curves(figure, [(axes, curves)])


def _drift(figure, rows: Rows) -> None:
    """KL divergence in spans of a long decode, a line a cache."""
    axes, curves = figure.subplots(), []
    lossy = [row for row in rows if any(map(_can_be_drawn, row["kld"]))]
    for number, row in enumerate(lossy):
        width = row["steps"] / len(row["kld"])
        spans = [
            ((span + 0.5) * width, kld) for span, kld in enumerate(row["kld"]) if _can_be_drawn(kld)
        ]
        curves.append(_curve(axes, number, row["cache"], spans))
    _log_axis(axes, KLD)
    if lossless := [row["cache"] for row in rows if all(kld <= ROUNDING for kld in row["kld"])]:
        zero_line(axes, ", ".join(lossless) + ": 0")
    axes.set_xlabel("decode step (tokens), means over equal spans")
    _note_left_out(axes, rows)
    axes.set_xlim(0, max(row["steps"] for row in rows))
    label_curves(figure, [(axes, curves)])


def _retrieval(figure, rows: Rows) -> None:
    """Accuracy by prompt length and depth as numbers in cells, a panel a cache, one colour bar."""
    caches = _grouped(rows, "cache", "mode", "task")
    wide = min(len(caches), PANELS)
    panels = figure.subplots(-(-len(caches) // wide), wide, squeeze=False)
    scale = {"vmin": 0, "vmax": 1, "cmap": "cividis"}
    for axes in panels.flat[len(caches) :]:
        axes.remove()
    for place, (axes, group) in enumerate(zip(panels.flat, caches.values(), strict=False)):
        # Few samples make few spans: a short row is stretched over the same depths.
        spans = max(len(row["by_depth"]) for row in group)
        grid = [
            [row["by_depth"][i * len(row["by_depth"]) // spans] for i in range(spans)]
            for row in group
        ]
        axes.imshow(grid, aspect="auto", extent=(0, 100, len(group), 0), **scale)
        for line, values in enumerate(grid):
            for span, value in enumerate(values):
                at, colour = (
                    (100 * (span + 0.5) / spans, line + 0.5),
                    "black" if value > 0.4 else "white",
                )
                axes.text(
                    *at,
                    f"{value:.2f}".removesuffix("0"),
                    ha="center",
                    va="center",
                    color=colour,
                    fontsize=9,
                )
        axes.set_yticks([n + 0.5 for n in range(len(group))], [str(row["length"]) for row in group])
        axes.set_xticks([0, 50, 100])
        task = "" if len({row["task"] for row in rows}) == 1 else f"\n{group[0]['task']}"
        axes.set_title(name_in_lines(group[0]["cache"], 26) + task, fontsize=9)
        if place % wide == 0:
            axes.set_ylabel("prompt (tokens)")
        if place + wide >= len(caches):
            axes.set_xlabel("depth of the answer (%)")
    figure.colorbar(panels.flat[0].images[0], ax=panels, label="share of answers right", shrink=0.9)


def _tasks(figure, rows: Rows) -> None:
    """A bar a task, metric and cache, with its score."""
    axes, caches = figure.subplots(), list(_grouped(rows, "cache"))
    tasks = _grouped([row | {"name": _task_name(row, rows)} for row in rows], "name")
    ticks, at = [], 0.0
    for name, group in tasks.items():
        for row in group:
            colour = curve_style(caches.index(row["cache"]))["color"]
            bar = axes.barh(at, row["score"], height=0.85, color=colour, label=row["cache"])
            axes.bar_label(bar, [f"{row['score']:.3g}"], padding=3, fontsize=9)
            ticks.append((at, (f"{name}: " if len(tasks) > 1 else "") + row["cache"]))
            at += 1
        at += 0.6
    axes.set_yticks(
        [place for place, _ in ticks], [name_in_lines(name, 40) for _, name in ticks], fontsize=9
    )
    axes.set_xlabel("score" if len(tasks) > 1 else f"score: {next(iter(tasks))}")
    axes.margins(x=0.12)
    axes.invert_yaxis()


def _as_tasks(rows: Rows) -> Rows:
    """Rows of structured texts as those of tasks, with the share of right tokens as their score."""
    return [
        row
        | {"task": f"{row['kind']}, {count(row['length'])}, {row['mode']}", "score": row["right"]}
        for row in rows
    ]


def _copies(figure, rows: Rows) -> None:
    """A bar a kind of text, length, mode and cache, with the share of right tokens."""
    _tasks(figure, _as_tasks(rows))


def _task_name(row: dict[str, Any], rows: Rows) -> str:
    """A task, with its metric and filter where the report has several."""
    several = [key for key in ("metric", "filter") if len({entry.get(key) for entry in rows}) > 1]
    return ", ".join([row["task"], *(str(row[key]) for key in several if row.get(key))])


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
    """A picture's title: the model, the text that it read, what is measured."""
    name = Path(model).resolve().name if Path(model).is_dir() else model
    return f"{name} on {Path(text).name}: {MEASURED[kind]}" if text else f"{name}: {MEASURED[kind]}"


def check_picture(path: Path) -> None:
    """Raise UserError where no picture can be drawn into `path`: before the work whose result it
    would show."""
    if path.suffix.lower() not in KINDS:
        raise UserError(
            f"{path}: no kind of picture; its name must end in one of {', '.join(KINDS)}"
        )
    place = path if path_of(path).exists() else path.parent
    if path.is_dir() or not os.access(place, os.W_OK) or not path.parent.is_dir():
        raise UserError(f"{path}: cannot be written")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("a picture needs matplotlib: pip install matplotlib")


def _size(kind: str, rows: Rows) -> tuple[float, float]:
    """Inches of a report's picture."""
    if kind == "retrieval":
        panels = _grouped(rows, "cache", "mode", "task")
        wide, lengths = min(len(panels), PANELS), max(len(group) for group in panels.values())
        return 1.4 + 1.9 * wide + 1.3 * (wide == 1), 1.0 + (1.2 + 0.35 * lengths) * -(
            -len(panels) // wide
        )
    if kind == "copy":
        rows = _as_tasks(rows)
    if kind in ("copy", "harness"):
        return 6.4, 1.4 + 0.3 * len(rows) + 0.2 * len(_grouped(rows, "task"))
    names = {series(row["cache"]) if kind != "drift" else row["cache"] for row in rows}
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
    figure.suptitle("\n".join(textwrap.wrap(title, int(12 * figure.get_figwidth()))), fontsize=11)
    PLOTS[kind](figure, rows)
    try:
        figure.savefig(path, dpi=200)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be written: {error}") from error
