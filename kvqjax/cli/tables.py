"""How commands print: rows of figures as a table or as JSON, with a report's stamp."""

import json
from typing import Any

import typer

from kvqjax._tables import Row, cell, fits, size, table, terminal_width

__all__ = ["cell", "fits", "show", "size", "table", "terminal_width"]


def show(rows: list[Row], as_json: bool, title: str = "", about: dict[str, Any] | None = None, note: str = "") -> None:
    """Print rows of equal keys as a table with a note below it, or as a JSON list. A report's stamp `about` becomes the
    last entry, "about", of every row of the list."""
    if as_json:
        stamped = {"about": about} if about else {}
        typer.echo(json.dumps([row | stamped for row in rows], indent=1))
        return
    typer.echo("\n".join(table(rows, terminal_width(), title, note)))
