"""The command line: a thin typer layer over the public API. Bad input gives one line on stderr and
exit code 2."""

import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from kvqjax.cli.environment import look_for_present_devices
from kvqjax.cli.habits import shell_line, usage_line
from kvqjax.cli.stopping import end_stopped, stopping_by_ctrl_c

__all__ = ["main"]


def _message_of(error: BaseException) -> tuple[str, int] | None:
    """What to print of an error and the exit code; None for a defect of ours, which keeps its
    traceback."""
    from kvqjax._errors import UserError

    if isinstance(error, UserError):
        return f"error: {shell_line(error)}", 2
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        reason = next(iter(str(error).splitlines()), "")
        return f"error: not enough memory; fewer rows or tokens take less ({reason})", 2
    # What no other place expects: a full disk behind standard output, a folder that was removed.
    if isinstance(error, OSError) and error.strerror is not None:
        return f"error: {f'{error.filename}: ' if error.filename else ''}{error.strerror}", 2

    usage = usage_line(error)
    return None if usage is None else (f"error: {usage}", 2)


def _interrupt_again(unraisable: Any) -> None:
    """Be a `sys.unraisablehook`: where Ctrl-C met a callback that may raise nothing, such as JAX's
    of the garbage collector, Python would say so and go on. The command is interrupted a moment
    later instead."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        # To the main thread, which may wait for something that only a signal ends.
        threading.Timer(
            0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
        ).start()
    else:
        sys.__unraisablehook__(unraisable)


def _warn_once() -> Callable[..., None]:
    """A `warnings.showwarning` that prints one line for each text: a run may come by a place
    several times."""
    from kvqjax.cli.environment import trouble_with_programs

    messages = set()

    def show(message, *_, **__) -> None:
        text = " ".join(str(message).split())
        if text not in messages and not trouble_with_programs(text):
            messages.add(text)
            print(f"warning: {text}", file=sys.stderr)

    return show


def main() -> None:
    """Entry point of `kvqjax` and `python -m kvqjax`."""
    try:
        with stopping_by_ctrl_c():
            _run()
    except KeyboardInterrupt:
        end_stopped()


def _run() -> NoReturn:
    # Imported here, where Ctrl-C is heeded.

    # Where transformers is needed for a tokenizer, it reports on stderr that it found no PyTorch.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    look_for_present_devices()
    warnings.showwarning = _warn_once()
    sys.unraisablehook = _interrupt_again
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model writes characters that the terminal's encoding may lack.
        sys.stdout.reconfigure(errors="replace")
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        from kvqjax.cli.app import app

        code = app(standalone_mode=False) or 0
        if code == 130:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
    except (typer.Abort, KeyboardInterrupt):
        end_stopped()
    except Exception as error:
        report = _message_of(error)
        if report is None:
            raise
        message, code = report
        print(" ".join(message.split()), file=sys.stderr)
    sys.exit(code)
