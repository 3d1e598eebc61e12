"""The command line: a thin typer layer over the public API. Bad input gives one line on stderr and exit code 2."""

import os
import sys
import warnings

import typer

__all__ = ["main"]


def _told(error: BaseException) -> tuple[str, int] | None:
    """What to print of an error and the exit code; None for a defect of ours, which keeps its traceback."""
    from kvqjax._errors import UserError

    if isinstance(error, typer.Abort | KeyboardInterrupt):
        return "stopped", 130
    if isinstance(error, UserError):
        return f"error: {error}", 2
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        reason = next(iter(str(error).splitlines()), "")
        return f"error: not enough memory; fewer rows or tokens take less ({reason})", 2
    # Typer brings its own click, whose usage errors have no public base class; they all can format themselves.
    describe = getattr(error, "format_message", None)
    return None if describe is None else (f"error: {describe()}", 2)


def main() -> None:
    """Entry point of `kvqjax` and `python -m kvqjax`."""
    # Transformers reports on stderr that it found no PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.formatwarning = lambda message, *_, **__: "warning: " + " ".join(str(message).split()) + "\n"
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        from kvqjax.cli.app import app

        code = app(standalone_mode=False) or 0
        if code == 130:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
    except (Exception, KeyboardInterrupt) as error:
        told = _told(error)
        if told is None:
            raise
        message, code = told
        print(" ".join(message.split()), file=sys.stderr)
    sys.exit(code)
