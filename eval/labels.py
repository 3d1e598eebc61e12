"""Names at the ends of a picture's curves (matplotlib), which a legend would put far from what they
name."""

import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

# Okabe and Ito's colours, which differ also for colour-blind readers. Grey is in the place of their
# yellow, which is hard to see on white. Black is left for the exact cache.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#7A3E00")
MARKERS = "osD^v<P*"
DASHES = ("-", "--", ":", "-.")  # the second eight curves have the first eight colours, and dashes
LINE = 22  # characters of a name in one line
GAP = 3.0  # pixels between two names
MARKER = 3.0  # pixels that a name keeps from the middle of lines and markers, beside GAP
# A curve that ends left of this share of the axes' width is named beside it, where there is room
NEAR = 0.6
COLUMN = 1.03  # where the column begins, in widths of the axes

# Where a name may stand beside an end: offset in points, and which edge of the name is there. The
# best first.
PLACES = tuple(
    (dx * far, dy * far, across, along)
    for far in (7, 12)
    for dx, dy, across, along in (
        (1, 0, "left", "center"),
        (0, -1, "center", "top"),
        (0, 1, "center", "bottom"),
        (-1, 0, "right", "center"),
        (1, -1, "left", "top"),
        (1, 1, "left", "bottom"),
        (-1, -1, "right", "top"),
        (-1, 1, "right", "bottom"),
        (1, -1, "right", "top"),
        (1, 1, "right", "bottom"),
        (-1, -1, "left", "top"),
        (-1, 1, "left", "bottom"),
    )
)


class Curve(NamedTuple):
    """A drawn curve: its name, its points in the order of x in units of the axes, its colour."""

    name: str
    x: Sequence[int | float]
    y: Sequence[int | float]
    colour: str


def new_figure(width: float, height: float):
    """Make a figure of `width` by `height` inches. A saved one has 200 dots an inch: 6.4 inches
    shown 640 pixels wide have letters of 12 pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def curve_style(number: int) -> dict[str, Any]:
    """Marker, colour and dashes of a picture's curve `number`; those of 32 curves differ."""
    place = number % len(COLOURS)
    return {
        "color": COLOURS[place],
        "marker": MARKERS[place],
        "ls": DASHES[number // len(COLOURS) % len(DASHES)],
    }


def text_colour(colour: str) -> tuple[float, ...]:
    """A curve's colour, darkened until letters of it can be read on white."""
    from matplotlib.colors import to_rgb

    return tuple(0.7 * part for part in to_rgb(colour))


def name_in_lines(name: str, most: int = LINE) -> str:
    """Break a name, where it is long, after the commas, colons and semicolons of a policy and at
    spaces."""
    lines = [""]
    for part in re.findall(r"[^,;: /]+[,;: /]*|[,;: /]+", name):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > most:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def spread(places: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Move centres apart by as little as their sizes ask, in their order, between `low` and `high`
    where all fit.

    Centres that would overlap form a block around their mean; blocks that meet become one.
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    blocks: list[list[int]] = []

    def begin(block: list[int]) -> float:
        """Choose where a block begins: as the mean of its members would have it."""
        starts = []
        offset = 0.0  # of a member within the block
        for i in block:
            starts.append(places[i] - sizes[i] / 2 - offset)
            offset += sizes[i]
        return max(low, min(sum(starts) / len(starts), high - offset))

    def end(block: list[int]) -> float:
        return begin(block) + sum(sizes[i] for i in block)

    for index in order:
        block = [index]
        # A block that grows begins further down, and may meet the next one.
        while blocks and end(blocks[-1]) > begin(block):
            block = blocks.pop() + block
        blocks.append(block)
    moved = list(places)
    for block in blocks:
        start = begin(block)
        for i in block:
            moved[i] = start + sizes[i] / 2
            start += sizes[i]
    return moved


def _pixels(axes, x: Sequence[int | float], y: Sequence[int | float]) -> np.ndarray:
    """Return the points of a curve on the canvas, with many between each two, [N, 2]."""
    points = axes.transData.transform(np.column_stack([x, y]).astype(float))
    if len(points) == 1:
        return points
    steps = np.linspace(0, 1, 60)[:, None]
    pieces = [first + steps * (last - first) for first, last in itertools.pairwise(points)]
    return np.concatenate(pieces)


def _box(text):
    """Return the area of a text on the canvas, with half of GAP around it, without the line to its
    curve."""
    from matplotlib.text import Annotation, Text

    renderer = text.figure.canvas.get_renderer()
    if isinstance(text, Annotation):
        text.update_positions(renderer)
    return Text.get_window_extent(text, renderer).padded(GAP / 2)


def _beside(axes, curve: Curve, points: np.ndarray, boxes: list, options: dict[str, Any]):
    """Write the name beside its curve's last point or its first; None where it would cover
    something."""
    name = name_in_lines(curve.name)
    area = axes.bbox.padded(-2)
    for end in (-1, 0):
        for dx, dy, across, along in PLACES:
            text = axes.annotate(
                name,
                xy=(curve.x[end], curve.y[end]),
                xytext=(dx, dy),
                textcoords="offset points",
                ha=across,
                va=along,
                **options,
            )
            box = _box(text)
            is_inside = (
                area.containsx(box.x0)
                and area.containsx(box.x1)
                and axes.bbox.y0 < box.y0
                and box.y1 < axes.bbox.y1
            )
            box = box.padded(MARKER)
            covered = (points > (box.x0, box.y0)) & (points < (box.x1, box.y1))
            covers_curve = covered.all(1).any()
            covers_name = any(box.overlaps(neighbour) for neighbour in boxes)
            if is_inside and not covers_curve and not covers_name:
                return text
            text.remove()
    return None


def _joined(axes, curve: Curve, options: dict[str, Any]):
    """Write the name to the right of the axes, joined to its curve's end."""
    joint = {
        "arrowstyle": "-",
        "color": curve.colour,
        "lw": 0.9,
        "ls": ":",
        "relpos": (0, 0.5),
        "shrinkA": 1,
        "shrinkB": 4,
    }
    return axes.annotate(
        name_in_lines(curve.name),
        xy=(curve.x[-1], curve.y[-1]),
        xytext=(COLUMN, 0.5),
        textcoords="axes fraction",
        ha="left",
        va="center",
        color=text_colour(curve.colour),
        arrowprops=joint,
        annotation_clip=False,
        **options,
    )


def _place(axes, curves: Sequence[Curve], column: dict[str, Any], options: dict[str, Any]) -> list:
    """Write the names that have room beside their curves; return those texts. The others' names
    join `column`."""
    points = np.concatenate([_pixels(axes, curve.x, curve.y) for curve in curves])
    # Names in the column are outside of the axes, so that they cover nothing.
    boxes = [_box(text) for text in axes.texts if text not in column.values()]
    texts = []
    for curve in curves:
        if curve.name in column:
            continue
        end, _ = axes.transData.transform((curve.x[-1], curve.y[-1]))
        text = None
        if end < axes.bbox.x0 + NEAR * axes.bbox.width:
            colour = {"color": text_colour(curve.colour)}
            text = _beside(axes, curve, points, boxes, options | colour)
        if text is None:
            column[curve.name] = _joined(axes, curve, options)
        else:
            boxes.append(_box(text))
            texts.append(text)
    return texts


def _spread(axes, curves: Sequence[Curve], column: dict[str, Any]) -> None:
    """Move the names of the column apart, each as near to the height of its curve's end as there is
    room."""
    joined = [curve for curve in curves if curve.name in column]
    heights = [_box(column[curve.name]).height for curve in joined]
    places = []
    for curve in joined:
        _, height = axes.transData.transform((curve.x[-1], curve.y[-1]))
        places.append(height)
    moved = spread(places, heights, axes.bbox.y0, axes.bbox.y1)
    for curve, place in zip(joined, moved, strict=True):
        column[curve.name].set_position((COLUMN, (place - axes.bbox.y0) / axes.bbox.height))


def label_curves(
    figure, panels: Sequence[tuple[Any, Sequence[Curve]]], *, size: float = 9.0
) -> None:
    """Write the names of curves at their ends: in a column to the right of the axes, joined to the
    end by dots, or, where a curve ends far from there, beside it.

    Args:
        figure: a `new_figure` whose curves are drawn and whose limits are set.
        panels: axes, and the curves that are drawn in them, each with another name.
        size: of the letters, in points.
    """
    options: dict[str, Any] = {"fontsize": size, "linespacing": 1.1}
    panels = [(axes, curves) for axes, curves in panels if curves]
    columns: list[dict[str, Any]] = [{} for _ in panels]
    before = -1
    in_columns = 0
    # A name in a column makes the axes narrower, after which another may have lost its room.
    while before < in_columns:
        before = in_columns
        figure.draw_without_rendering()
        texts = []
        for (axes, curves), column in zip(panels, columns, strict=True):
            texts += _place(axes, curves, column, options)
        in_columns = sum(len(column) for column in columns)
        if before < in_columns:
            # The names beside curves are placed anew.
            for text in texts:
                text.remove()
    for (axes, curves), column in zip(panels, columns, strict=True):
        _spread(axes, curves, column)


def height_for(names: Sequence[str], least: float, size: float = 9.0) -> float:
    """Return the inches of a figure in whose column all names have room."""
    lines = sum(name_in_lines(name).count("\n") + 1 for name in names)
    return max(least, 1.4 + lines * (size + 3) / 72)
