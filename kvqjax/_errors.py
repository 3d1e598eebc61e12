"""The one exception for input that a user can mend, and how it names what was meant."""

import difflib
from collections.abc import Iterable
from pathlib import Path

__all__ = ["UserError", "suggest", "unwritten"]


class UserError(ValueError):
    """Bad input (a folder, a file, an option). The text is one line that names the cause; the CLI exits with 2."""


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is none of `known`: the nearest of them, and all."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return (f"; did you mean {near[0]!r}?" if near else ".") + f" Known: {', '.join(names)}"


def unwritten(path: Path, error: OSError) -> UserError:
    """Make the error for a path that cannot be written, from the system's."""
    # The system says "File exists" where a file stands in a folder's place.
    reason = "a file stands where a folder is wanted" if isinstance(error, FileExistsError) else error.strerror
    return UserError(f"{path}: cannot be written: {reason or error}")
