"""The one exception for input that a user can mend, and how it names what was meant."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["UserError", "suggest", "unwritten"]


class UserError(ValueError):
    """Bad input (a folder, a file, an option). The text is one line that names the cause; the CLI exits with 2."""


ALIKE = 0.7  # share of equal characters; with difflib's 0.6, names that mean something else are near
OPPOSITE = {"min": "max", "max": "min"}


def _means_the_opposite(name: str, known: str) -> bool:
    """Say whether two names differ in a word that turns the meaning round, such as min_tokens and max_tokens."""
    words, others = (set(re.split(r"[^a-z]+", text.lower())) for text in (name, known))
    return any(OPPOSITE.get(word) in others and word not in others for word in words)


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is none of `known`: the nearest of them, and all."""
    names = list(known)
    alike = [other for other in names if not _means_the_opposite(name, other)]
    near = difflib.get_close_matches(name, alike, n=1, cutoff=ALIKE)
    return (f"; did you mean {near[0]!r}?" if near else ".") + f" Known: {', '.join(names)}"


def unwritten(path: Path, error: OSError) -> UserError:
    """Make the error for a path that cannot be written, from the system's."""
    # The system says "File exists" where a file stands in a folder's place.
    reason = "a file stands where a folder is wanted" if isinstance(error, FileExistsError) else error.strerror
    return UserError(f"{path}: cannot be written: {reason or error}")
