"""Rows of figures as plain text that fits the terminal, no cell broken inside a word, and as HTML
for notebooks."""

import html
import itertools
import shutil
import textwrap
from collections.abc import Iterable
from typing import Any, NamedTuple

Row = dict[str, Any]
GAP = 2  # spaces between columns
TIE = "\u00a0"  # holds a number and its unit together until they are placed


def size(count: int | float) -> str:
    """Bytes in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def cell(name: str, value: Any) -> str:
    if isinstance(value, list):
        return " ".join(cell("", v) for v in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and name.startswith("bytes"):
        return size(value).replace(" ", TIE)
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value).replace("\n", " ")


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters, or of one word that is longer."""
    return textwrap.wrap(text, max(1, width), break_long_words=False, break_on_hyphens=False) or [
        ""
    ]


def _widths(columns: list[list[str]], room: int) -> list[int] | None:
    """A width for every column within `room`, none below its longest word; None where there is not
    so much room."""
    room -= GAP * (len(columns) - 1)
    wanted = [max(map(len, column)) for column in columns]
    if sum(wanted) <= room:
        return wanted
    widths = [max(len(word) for cell in column for word in cell.split(" ")) for column in columns]
    if sum(widths) > room:
        return None
    for _ in range(room - sum(widths)):
        fullest = max(range(len(widths)), key=lambda i: wanted[i] / max(1, widths[i]))
        widths[fullest] += 1
    return widths


def _line(cells: list[str], widths: list[int], right: list[bool]) -> list[str]:
    """One row of a table; its longest cell sets the number of lines."""
    pieces = [_wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
    lines = []
    for parts in itertools.zip_longest(*pieces, fillvalue=""):
        placed = zip(parts, widths, right, strict=True)
        lines.append(
            (" " * GAP).join(p.rjust(w) if r else p.ljust(w) for p, w, r in placed).rstrip()
        )
    return lines


def _grid(rows: list[Row], names: list[str], room: int) -> list[list[str]] | None:
    """Lines of the header and of every row, or None where they do not fit `room`."""
    heads, cells = (
        [n.replace("_", " ") for n in names],
        [[cell(n, row[n]) for n in names] for row in rows],
    )
    widths = _widths([list(column) for column in zip(heads, *cells, strict=True)], room)
    if widths is None:
        return None
    right = [all(isinstance(row[n], int | float | None) for row in rows) for n in names]
    rule = (" " * GAP).join("-" * width for width in widths)
    return [[*_line(heads, widths, right), rule], *(_line(row, widths, right) for row in cells)]


def _named(rows: list[Row], names: list[str], width: int) -> list[list[str]] | None:
    """The same with every row's words on a line of their own above its numbers."""
    words = [n for n in names if n == names[0] or all(isinstance(row[n], str) for row in rows)]
    grid = _grid(rows, [n for n in names if n not in words], width - GAP)
    if grid is None:
        return None
    above = [
        ", ".join(words).replace("_", " "),
        *(", ".join(cell(n, row[n]) for n in words) for row in rows),
    ]
    named = zip(above, grid, strict=True)
    return [
        [*_wrapped(name, width), *(" " * GAP + line for line in lines)] for name, lines in named
    ]


def _cards(rows: list[Row], names: list[str], width: int) -> list[str]:
    """Every row by itself, a line for each figure: what always fits."""
    label = max((len(name) for name in names[1:]), default=0) + GAP
    lines = []
    for row in rows:
        lines.append(cell(names[0], row[names[0]]))
        for name in names[1:]:
            first, *more = _wrapped(cell(name, row[name]), width - GAP - label)
            lines.append((" " * GAP + name.replace("_", " ").ljust(label) + first).rstrip())
            lines += [" " * (GAP + label) + part for part in more]
    return lines


def fits(rows: list[Row], width: int) -> bool:
    """Say whether every row of such a table has a line of its own."""
    return _grid(rows, list(rows[0]), width) is not None


def table(
    rows: list[Row], width: int, title: str = "", caption: str = "", alike: bool = True
) -> list[str]:
    """Lines of at most `width` characters for rows of equal keys. What is the same in all rows is
    said once, below, if `alike`. Where the columns do not fit, names and other words take a line of
    their own; where that is not enough, every figure does. Only a word that is longer than `width`
    makes a longer line."""
    head = _wrapped(title, width) if title else []
    if not rows:
        return [*head, "(nothing)", *(_wrapped(caption, width) if caption else [])]
    first, *others = rows[0]
    same = [
        n for n in others if alike and len(rows) > 1 and all(row[n] == rows[0][n] for row in rows)
    ]
    names = [first, *(n for n in others if n not in same)]
    grid = _grid(rows, names, width)
    if grid is None and len(rows) > 1:
        grid = _named(rows, names, width)
    body = _cards(rows, names, width) if grid is None else list(itertools.chain.from_iterable(grid))
    told = ", ".join(f"{name.replace('_', ' ')} {cell(name, rows[0][name])}" for name in same)
    notes = [
        line
        for text in (told and f"all rows: {told}", caption)
        if text
        for line in _wrapped(text, width)
    ]
    return [line.replace(TIE, " ") for line in (*head, *body, *notes)]


def terminal_width() -> int:
    """Columns of the terminal, or what COLUMNS says; 80 where there is none."""
    return shutil.get_terminal_size((80, 24)).columns


class Section(NamedTuple):
    """A part of a printed table: a title, rows of equal keys, and a note below them. `across`: a
    column for each row, where the width allows it."""

    title: str
    rows: list[Row]
    note: str = ""
    across: bool = False

    def turned(self) -> list[Row]:
        """The same figures with a column for each row."""
        first, *names = self.rows[0]
        return [
            {"": name} | {cell(first, row[first]): cell(name, row[name]) for row in self.rows}
            for name in names
        ]

    def lines(self, width: int) -> list[str]:
        """Text of at most `width` characters a line."""
        if not self.rows and self.title:
            return _wrapped(self.title, width)
        if not self.across:
            return table(self.rows, width, self.title, self.note)
        turned = self.turned()
        if fits(turned, width):
            return table(turned, width, self.title, self.note, alike=False)
        title, note = (_wrapped(text, width) if text else [] for text in (self.title, self.note))
        return [
            line.replace(TIE, " ")
            for line in (*title, *_cards(self.rows, list(self.rows[0]), width), *note)
        ]

    def html(self) -> str:
        """An HTML table between its title and its note."""
        rows = self.turned() if self.across and self.rows else self.rows
        names = [name.replace("_", " ") for name in rows[0]] if rows else []
        cells = [
            [cell(name, value).replace(TIE, " ") for name, value in row.items()] for row in rows
        ]

        def line(tag, row):
            return "<tr>" + "".join(f"<{tag}>{html.escape(x)}</{tag}>" for x in row) + "</tr>"

        said = [f"<p>{html.escape(text)}</p>" if text else "" for text in (self.title, self.note)]
        if not rows and self.title:
            return said[0]
        return f"{said[0]}<table>{line('th', names)}{''.join(line('td', row) for row in cells)}</table>{said[1]}"


class Table(list):
    """Rows, each a dict with the same keys: a list like any other, which `pandas.DataFrame(rows)`
    takes. It prints as a table as wide as the terminal, and shows as a table in a notebook. `about`
    is what holds for all rows: versions, data, seed."""

    def __init__(
        self, rows: Iterable[Row] = (), sections: Iterable[Section] = (), about: Row | None = None
    ):
        super().__init__(rows)
        self.sections = tuple(sections) or (Section("", list(self)),)
        self.about = about or {}

    def text(self, width: int) -> str:
        """The printed form, at most `width` characters a line."""
        return "\n\n".join("\n".join(section.lines(width)) for section in self.sections)

    def __repr__(self) -> str:
        return self.text(terminal_width())

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return "".join(section.html() for section in self.sections)
