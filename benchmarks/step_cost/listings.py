"""What every command that compiles for a chip does around it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from benchmarks.step_cost import tpu
from kvqjax._errors import UserError

__all__ = ["listings"]


@contextmanager
def listings(is_tpu: bool) -> Iterator[Path]:
    """An empty folder, where libtpu puts its listings if `is_tpu`. A mistake of the user's ends the command with one
    line and exit code 2."""
    with tempfile.TemporaryDirectory() as folder:
        if is_tpu:
            tpu.prepare(folder)
        try:
            yield Path(folder)
        except UserError as error:
            typer.echo(error, err=True)
            raise typer.Exit(2) from error
