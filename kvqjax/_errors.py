"""The one exception for input that a user can mend, and how it names what was meant."""

import difflib
from collections.abc import Iterable

__all__ = ["UserError", "suggest"]


class UserError(ValueError):
    """Bad input (a folder, a file, an option). The text is one line that names the cause; the CLI exits with 2."""


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is none of `known`: the nearest of them, and all."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return (f"; did you mean {near[0]!r}?" if near else ".") + f" Known: {', '.join(names)}"
