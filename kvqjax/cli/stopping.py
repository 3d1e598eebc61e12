"""How Ctrl-C ends a command.

Python tells the main thread of a signal between two of its own instructions. A compiler or a device
that computes returns to these after many seconds only, so a second thread is told as well: it says
what is waited for.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

PATIENCE = 1.0  # seconds that Ctrl-C may go without an answer before a line says what is waited for
LOOK = 0.1  # seconds between two looks at whether that wait is over
WAITING = "stopping once a program is compiled or computed; Ctrl-C again ends at once"


def say_at_once(text: str) -> None:
    """Write a line to stderr from a signal handler, which may have interrupted another print."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())


def end_stopped() -> NoReturn:
    """Say "stopped" and end the process with exit code 130, at once: threads of JAX that still
    compute crash where Python takes its own end."""
    with suppress(
        OSError, RuntimeError
    ):  # a pipe that nobody reads any more, a print that was interrupted
        sys.stdout.flush()
    say_at_once("stopped")
    os._exit(130)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class _Interrupts:
    """The handler of Ctrl-C, and the thread that watches whether it is called."""

    def __init__(self) -> None:
        self._handled = threading.Event()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def interrupt(self, _: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt. While modules are imported, end the process: nothing is lost
        then, and libraries that are interrupted in their import swallow it or make other errors of
        it."""
        self._handled.set()
        if _is_importing(frame):
            end_stopped()
        raise KeyboardInterrupt

    def watch(self) -> None:
        while signals := os.read(self._reader, 1):
            # A server has a handler of its own.
            if signals[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) == self.interrupt:
                if not self._handled.wait(PATIENCE):
                    say_at_once(WAITING)
                    self._wait_or_end()
                self._handled.clear()
        os.close(self._reader)

    def _wait_or_end(self) -> None:
        """Wait until Ctrl-C is handled. A second one ends the process."""
        while not self._handled.wait(LOOK):
            if select.select([self._reader], [], [], 0)[0] and os.read(self._reader, 1)[
                :1
            ] == bytes([signal.SIGINT]):
                end_stopped()

    @contextmanager
    def installed(self) -> Iterator[None]:
        handler = signal.signal(signal.SIGINT, self.interrupt)
        before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self.watch, name="kvqjax-ctrl-c", daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            signal.signal(signal.SIGINT, handler)
            os.close(self._writer)


@contextmanager
def stopping_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C interrupt what runs here, and end the process while modules are imported. Where
    the main thread does not take notice within a second, a line says what is waited for, and a
    second Ctrl-C ends the process at once."""
    in_main = threading.current_thread() is threading.main_thread()
    # Ignored, another program's, or not ours to set. Windows has no such pipes.
    if (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        or not in_main
        or os.name == "nt"
    ):
        yield
        return
    with _Interrupts().installed():
        yield
