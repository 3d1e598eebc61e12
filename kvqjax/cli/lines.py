"""What a user types, line by line: with history and editing in a terminal, as it is from a pipe."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from kvqjax._errors import UserError
from kvqjax._files import decode_text
from kvqjax._folders import user_folder

__all__ = ["Lines"]

PROMPT, MORE = "> ", "… "
KEPT = 1000  # lines of history that are written


def _editor() -> Any:
    """The module that edits lines, or None where Python was built without it (Windows)."""
    try:
        import readline
    except ImportError:
        return None
    return readline


class Lines(Iterator[str]):
    """Texts that a user types, one at a time. A line that ends with a backslash goes on with the next.

    In a terminal lines can be edited, and those of earlier runs are there (kvqjax/history in the user's cache folder,
    readable by the user alone). Ctrl-C leaves the line that is being typed; Ctrl-D ends. From a pipe every line is a
    text; the last one needs no line end."""

    def __init__(self, source: Any):
        """source: a text file as sys.stdin is one, or None where there is none. No type of `typing` or `io` fits all
        that may stand there: files, buffers, and what replaces sys.stdin."""
        self.terminal = source is not None and source.isatty()
        self._source = source
        self._editor = _editor() if self.terminal else None

    def __enter__(self) -> "Lines":
        if self._editor is not None:
            with contextlib.suppress(OSError, UserError):
                self._editor.read_history_file(user_folder("history"))
        return self

    def __exit__(self, *_: object) -> None:
        if self._editor is not None:
            with contextlib.suppress(OSError, UserError):
                file = user_folder("history")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch(mode=0o600)
                self._editor.set_history_length(KEPT)
                self._editor.write_history_file(file)

    def __next__(self) -> str:
        lines: list[str] = []
        while True:
            try:
                line = self._line(MORE if lines else PROMPT)
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
                print(file=sys.stderr)
                lines = []
                continue
            if line is None:
                if lines:
                    return "\n".join(lines)
                raise StopIteration
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _line(self, prompt: str) -> str | None:
        """One line without its end; None where there are no more."""
        if self._source is None:
            return None
        if self.terminal:
            try:
                return input(prompt)
            except EOFError:
                print(file=sys.stderr)
                return None
        raw = self._source.buffer.readline()
        return decode_text(raw, "standard input").removesuffix("\n") if raw else None
