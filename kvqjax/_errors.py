"""The one exception for input that a user can mend, and how it names what was meant."""

import difflib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def _in_python(name: str, value: Any) -> str:
    """Write an option as Python has it; None stands for any value."""
    written = "..." if value is None else repr(value)
    return f"{name}={written}"


class UserError(ValueError):
    """Bad input (a folder, a file, an option). The text is one line that names the cause; the CLI
    exits with 2.

    An error is written once, and said at several doors: Python, the shell and HTTP call an option
    by different names, and not every door has it.

        raise UserError("texts of 2049 tokens are too long", "{beyond_trained} allows them",
        beyond_trained=True)

    is "...; beyond_trained=True allows them" in Python and "...; --beyond-trained allows them" in
    the shell. Over HTTP, where no request has such a field, the hint is left out.

    Args:
        cause: what is wrong, in words that suit every door.
        hint: what helps. `{name}` in it stands for one of `options`.
        parameter: the option whose value is wrong, where it is an option's.
        options: what the hint names, with the value that helps; None: any value.
    """

    def __init__(self, cause: str, hint: str = "", *, parameter: str | None = None, **options: Any):
        self.cause = cause
        self.parameter = parameter
        self._hint = hint
        self._options = options
        super().__init__(self.said(_in_python))

    def said(self, spell: Callable[[str, Any], str | None]) -> str:
        """Say the error at a door.

        Args:
            spell: writes an option of a name and a value as the door has it; None: the door has no
                such option.

        Returns:
            The text, without a hint that names an option which the door lacks.
        """
        if not self._hint:
            return self.cause
        spelled = {name: spell(name, value) for name, value in self._options.items()}
        if None in spelled.values():
            return self.cause
        hint = self._hint
        # A hint without options may have braces of its own.
        if spelled:
            hint = hint.format(**spelled)
        return f"{self.cause}; {hint}"


# Share of equal characters; with difflib's 0.6, names that mean something else are near.
ALIKE = 0.7
OPPOSITE = {"min": "max", "max": "min"}


class TooLong(UserError):
    """A text is more tokens than fit: `prompt` of them where at most `most` are possible."""

    def __init__(self, prompt: int, most: int, cause: str, hint: str = "", **options: Any):
        self.prompt = prompt
        self.most = most
        super().__init__(cause, hint, **options)


def _means_the_opposite(name: str, known: str) -> bool:
    """Say whether two names differ in a word that turns the meaning round, such as min_tokens and
    max_tokens."""
    known_words = _words(known)
    # A word that both names have turns nothing round.
    lacking = _words(name) - known_words
    return any(OPPOSITE.get(word) in known_words for word in lacking)


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name.lower()))


def suggest(name: str, known: Iterable[str]) -> str:
    """Write the end of a message about a name that is none of `known`.

    Args:
        name: what was written.
        known: the names that exist.

    Returns:
        The nearest known name, where one is near, and all of them.
    """
    names = list(known)
    candidates = [other for other in names if not _means_the_opposite(name, other)]
    nearest = difflib.get_close_matches(name, candidates, n=1, cutoff=ALIKE)
    question = f"; did you mean {nearest[0]!r}?" if nearest else "."
    return f"{question} Known: {', '.join(names)}"


def unwritten(path: Path, error: OSError) -> UserError:
    """Make the error for a path that cannot be written, from the system's."""
    reason = error.strerror or error
    # The system says "File exists" where a file stands in a folder's place.
    if isinstance(error, FileExistsError):
        reason = "a file stands where a folder is wanted"
    return UserError(f"{path}: cannot be written: {reason}")
