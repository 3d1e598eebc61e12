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
    """Write a number of bytes in powers of 1024."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if abs(count) < 1024:
            return f"{count:.2f} {unit}"
    return f"{count / 1024:.2f} TiB"


def cell(name: str, value: Any) -> str:
    """Write the value of column `name` in one line of text."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(cell("", item) for item in value)
    # A bool is an int: it must be asked for first.
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and name.startswith("bytes"):
        return size(value).replace(" ", TIE)
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("\n", " ")


def _heading(name: str) -> str:
    return name.replace("_", " ")


def _cells(row: Row, names: list[str]) -> list[str]:
    """Write some columns of a row."""
    return [cell(name, row[name]) for name in names]


def _has_kind(rows: list[Row], name: str, kind: Any) -> bool:
    """Say whether all values of a column are of a type."""
    return all(isinstance(row[name], kind) for row in rows)


def _wrapped(text: str, width: int) -> list[str]:
    """Break a text into lines of at most `width` characters. A longer word has a line of its own.
    An empty text is one empty line."""
    lines = textwrap.wrap(text, max(1, width), break_long_words=False, break_on_hyphens=False)
    return lines or [""]


def _paragraph(text: str, width: int) -> list[str]:
    """Break a text into lines like `_wrapped`. An empty text has no line."""
    return _wrapped(text, width) if text else []


def _longest(texts: list[str]) -> int:
    return max(len(text) for text in texts)


def _widths(columns: list[list[str]], room: int) -> list[int] | None:
    """Find a width for every column, so that all fit `room` and no word is broken. Return None
    where there is not so much room."""
    room -= GAP * (len(columns) - 1)
    wanted = [_longest(column) for column in columns]
    if sum(wanted) <= room:
        return wanted
    widths = [_longest(" ".join(column).split(" ")) for column in columns]  # of single words
    if sum(widths) > room:
        return None
    # Every column has its longest word. Each character that is left goes to the column whose
    # longest cell takes the most lines.
    for _ in range(room - sum(widths)):
        lines = [full / max(1, width) for full, width in zip(wanted, widths, strict=True)]
        fullest = lines.index(max(lines))
        widths[fullest] += 1
    return widths


def _line(cells: list[str], widths: list[int], right: list[bool]) -> list[str]:
    """Set one row of a table. The cell with the most lines sets the number of lines."""
    pieces = [_wrapped(text, width) for text, width in zip(cells, widths, strict=True)]
    lines = []
    for parts in itertools.zip_longest(*pieces, fillvalue=""):
        padded = []
        for part, width, is_number in zip(parts, widths, right, strict=True):
            padded.append(part.rjust(width) if is_number else part.ljust(width))
        lines.append((" " * GAP).join(padded).rstrip())
    return lines


def _grid(rows: list[Row], names: list[str], room: int) -> list[list[str]] | None:
    """Set the header and every row, each as a list of lines. Return None where the columns do not
    fit `room`."""
    headings = [_heading(name) for name in names]
    cells = [_cells(row, names) for row in rows]
    columns = [list(column) for column in zip(headings, *cells, strict=True)]
    widths = _widths(columns, room)
    if widths is None:
        return None
    # Numbers stand at the right of their column, so that their digits lie below each other.
    right = [_has_kind(rows, name, int | float | None) for name in names]
    rule = (" " * GAP).join("-" * width for width in widths)
    header = [*_line(headings, widths, right), rule]
    return [header, *(_line(texts, widths, right) for texts in cells)]


def _named(rows: list[Row], names: list[str], width: int) -> list[list[str]] | None:
    """Set the rows in two parts: a row's words on a line of their own, and its numbers below, as a
    grid. Return None where the numbers do not fit either."""
    # The first column names the row, whatever it holds.
    words = [name for name in names if name == names[0] or _has_kind(rows, name, str)]
    numbers = [name for name in names if name not in words]
    grid = _grid(rows, numbers, width - GAP)
    if grid is None:
        return None
    above = [", ".join(_heading(name) for name in words)]
    above += [", ".join(_cells(row, words)) for row in rows]
    named = []
    for text, lines in zip(above, grid, strict=True):
        indented = [" " * GAP + line for line in lines]
        named.append([*_wrapped(text, width), *indented])
    return named


def _cards(rows: list[Row], names: list[str], width: int) -> list[str]:
    """Set every row by itself, with a line for each figure. This fits any width."""
    label = max((len(name) for name in names[1:]), default=0) + GAP
    lines = []
    for row in rows:
        lines.append(cell(names[0], row[names[0]]))
        for name in names[1:]:
            first, *more = _wrapped(cell(name, row[name]), width - GAP - label)
            lines.append((" " * GAP + _heading(name).ljust(label) + first).rstrip())
            lines += [" " * (GAP + label) + part for part in more]
    return lines


def _untied(lines: Iterable[str]) -> list[str]:
    """Put plain spaces between numbers and units, once all lines are broken."""
    return [line.replace(TIE, " ") for line in lines]


def fits(rows: list[Row], width: int) -> bool:
    """Say whether the columns of such a table fit `width`."""
    return _grid(rows, list(rows[0]), width) is not None


def _repeated(rows: list[Row]) -> list[str]:
    """List the columns, beside the first, that have one value in all of several rows."""
    if len(rows) < 2:
        return []
    repeated = []
    for name in list(rows[0])[1:]:
        values = [row[name] for row in rows]
        if all(value == values[0] for value in values):
            repeated.append(name)
    return repeated


def table(
    rows: list[Row], width: int, title: str = "", caption: str = "", alike: bool = True
) -> list[str]:
    """Set rows of equal keys in lines of at most `width` characters. If `alike`, a value that is
    the same in all rows is written once, below. Where the columns do not fit, words take a line of
    their own. Where that is not enough, every figure does. Only a word that is longer than `width`
    makes a longer line."""
    head = _paragraph(title, width)
    if not rows:
        return [*head, "(nothing)", *_paragraph(caption, width)]
    repeated = _repeated(rows) if alike else []
    names = [name for name in rows[0] if name not in repeated]
    # From the closest form to the longest: a grid, words above numbers, a line for every figure.
    grid = _grid(rows, names, width)
    if grid is None and len(rows) > 1:
        grid = _named(rows, names, width)
    if grid is None:
        body = _cards(rows, names, width)
    else:
        body = list(itertools.chain.from_iterable(grid))
    notes = []
    if repeated:
        values = [f"{_heading(name)} {cell(name, rows[0][name])}" for name in repeated]
        notes = _wrapped("all rows: " + ", ".join(values), width)
    return _untied([*head, *body, *notes, *_paragraph(caption, width)])


def terminal_width() -> int:
    """Return the columns of the terminal, or what COLUMNS says. Without a terminal it is 80."""
    return shutil.get_terminal_size((80, 24)).columns


class Section(NamedTuple):
    """A part of a printed table: a title, rows of equal keys, and a note below them. `across`: a
    column for each row, where the width allows it."""

    title: str
    rows: list[Row]
    note: str = ""
    across: bool = False

    def turned(self) -> list[Row]:
        """Return the same figures with a column for each row."""
        first, *names = self.rows[0]
        headings = [cell(first, row[first]) for row in self.rows]
        turned = []
        for name in names:
            values = [cell(name, row[name]) for row in self.rows]
            turned.append({"": name, **dict(zip(headings, values, strict=True))})
        return turned

    def lines(self, width: int) -> list[str]:
        """Set the part in lines of at most `width` characters."""
        if not self.rows and self.title:
            return _wrapped(self.title, width)
        if not self.across:
            return table(self.rows, width, self.title, self.note)
        turned = self.turned()
        if fits(turned, width):
            return table(turned, width, self.title, self.note, alike=False)
        cards = _cards(self.rows, list(self.rows[0]), width)
        return _untied([*_paragraph(self.title, width), *cards, *_paragraph(self.note, width)])

    def html(self) -> str:
        """Set an HTML table between its title and its note."""
        title = _html_paragraph(self.title)
        if not self.rows and self.title:
            return title
        rows = self.turned() if self.across and self.rows else self.rows
        headings = [_heading(name) for name in rows[0]] if rows else []
        lines = [_html_row("th", headings)]
        for row in rows:
            texts = [cell(name, value) for name, value in row.items()]
            lines.append(_html_row("td", _untied(texts)))
        return f"{title}<table>{''.join(lines)}</table>{_html_paragraph(self.note)}"


def _html_paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>" if text else ""


def _html_row(tag: str, texts: list[str]) -> str:
    cells = [f"<{tag}>{html.escape(text)}</{tag}>" for text in texts]
    return f"<tr>{''.join(cells)}</tr>"


class Table(list):
    """Rows, each a dict with the same keys: a list like any other, which `pandas.DataFrame(rows)`
    takes. It prints as a table as wide as the terminal, and shows as a table in a notebook. `about`
    holds the facts that all rows share: versions, data, seed."""

    def __init__(
        self, rows: Iterable[Row] = (), sections: Iterable[Section] = (), about: Row | None = None
    ):
        super().__init__(rows)
        self.sections = tuple(sections) or (Section("", list(self)),)
        self.about = about or {}

    def text(self, width: int) -> str:
        """Set all parts in lines of at most `width` characters."""
        texts = ["\n".join(section.lines(width)) for section in self.sections]
        return "\n\n".join(texts)

    def __repr__(self) -> str:
        return self.text(terminal_width())

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return "".join(section.html() for section in self.sections)
