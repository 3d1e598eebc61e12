"""The command line: a thin typer layer over the public API. Bad input gives one line on stderr and exit code 2."""

import os
import sys
import warnings

import typer

__all__ = ["main"]


def main() -> None:
    """Entry point of `kvqjax` and `python -m kvqjax`."""
    from kvqjax.cli.app import app
    from kvqjax.errors import UserError

    # Transformers reports on stderr that it found no PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.formatwarning = lambda message, *_, **__: "warning: " + " ".join(str(message).split()) + "\n"
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except typer.Abort:
        message, code = "stopped", 130
    except UserError as error:
        message, code = str(error), 2
    except Exception as error:
        # Typer brings its own click, whose usage errors have no public base class; they all can format themselves.
        if not hasattr(error, "format_message"):
            raise
        message, code = error.format_message(), 2
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(code)
