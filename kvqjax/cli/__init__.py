"""The command line: a thin typer layer over the public API. Bad input gives one line on stderr and exit code 2."""

import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import typer

from kvqjax.cli.devices import look_for_present_devices
from kvqjax.cli.habits import command_hint, option_hint

__all__ = ["main"]


def _usage(error: Any) -> str | None:
    """The line about a command or option that there is not; None for any other error. Typer brings its own click, whose
    usage errors have no public base class; they all can format themselves."""
    describe = getattr(error, "format_message", None)
    if describe is None:
        return None
    context = getattr(error, "ctx", None)
    commands = getattr(getattr(context, "command", None), "commands", None)
    if commands and "No such command" in describe():
        name = re.search(r"No such command '(.*)'\.", describe(), re.DOTALL)
        wanted = name[1] if name else ""
        return f"No such command {wanted[:40]!r}{command_hint(wanted, commands)}"
    if hasattr(error, "option_name") and context is not None:
        known = [name for option in context.command.params for name in option.opts]
        hint = option_hint(error.option_name, known)
        return f"No such option: {error.option_name}; {hint}" if hint else describe()
    if "unexpected extra argument" in describe():
        return f"{describe()}; options begin with --, and a text of several words stands in quotation marks"
    return describe()


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
    usage = _usage(error)
    return None if usage is None else (f"error: {usage}", 2)


def _warn_once() -> Callable[..., None]:
    """A `warnings.showwarning` that prints one line for each text: a run may come by a place several times."""
    said = set()

    def show(message, *_, **__) -> None:
        text = " ".join(str(message).split())
        if text not in said:
            said.add(text)
            print(f"warning: {text}", file=sys.stderr)

    return show


def main() -> None:
    """Entry point of `kvqjax` and `python -m kvqjax`."""
    # Where transformers is needed for a tokenizer, it reports on stderr that it found no PyTorch.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    look_for_present_devices()
    warnings.showwarning = _warn_once()
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
