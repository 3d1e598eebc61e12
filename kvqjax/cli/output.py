"""What commands print. On stdout: rows of figures as a table or as JSON, with a report's stamp. On
stderr: what long work will do, how far it is, and how long it will still take."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvqjax._tables import Row, table, terminal_width
from kvqjax._timing import product_rate

_ERRORS = Console(stderr=True)
FIRST, EVERY = 10.0, 60.0  # seconds until the first line without a terminal, and between the others


def show(
    rows: list[Row],
    as_json: bool,
    title: str = "",
    about: dict[str, Any] | None = None,
    note: str = "",
) -> None:
    """Print rows of equal keys as a table with a note below it, or as a JSON list. A report's stamp
    `about` becomes the last entry, "about", of every row of the list."""
    if as_json:
        stamped = {"about": about} if about else {}
        typer.echo(json.dumps([row | stamped for row in rows], indent=1))
        return
    typer.echo("\n".join(table(rows, terminal_width(), title, note)))


def announce(text: str) -> None:
    """Say on stderr what is about to be done, so that a pipe or a log of stdout holds the result
    alone."""
    print(text, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """About how long, in one unit: "40 s", "7 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def at_least(work: float) -> str:
    """How long `work` floating point operations take at least, at the rate at which this device
    multiplies matrices."""
    seconds = work / product_rate()
    if seconds < 1:
        return "the arithmetic alone takes less than a second on this device"
    return f"the arithmetic alone takes {duration(seconds)} on this device; a better estimate follows the first steps"


def reporter(label: str, say: Callable[[str], None] = announce) -> Callable[[float], None]:
    """update(fraction) for where no bar can be drawn: a line after FIRST seconds, then one every
    EVERY. The time left is estimated from the updates after the first. Before that programs were
    compiled, or an earlier run did the work.
    """
    start_time = last = time.monotonic()
    start: tuple[float, float] | None = None
    wait = FIRST

    def update(fraction: float) -> None:
        nonlocal start, last, wait
        now = time.monotonic()
        if start is None:
            start = now, fraction
        if fraction < 1 and now - last >= wait and fraction > start[1]:
            seconds = (1 - fraction) * (now - start[0]) / (fraction - start[1])
            say(
                f"{label}: {fraction:.0%} after {duration(now - start_time)}, about {duration(seconds)} left"
            )
            last, wait = now, EVERY

    return update


@contextmanager
def progress_bar() -> Iterator[Callable[[str], Callable[[float], None]]]:
    """Yields start(label) -> update(fraction): a bar on stderr where that is a terminal, else a
    line now and then."""
    if not _ERRORS.is_terminal:
        yield reporter
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_ERRORS, transient=True) as bars:

        def start(label: str) -> Callable[[float], None]:
            task = bars.add_task(label, total=1.0)
            return lambda fraction: bars.update(task, completed=fraction)

        yield start
