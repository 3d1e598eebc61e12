"""Where this library keeps what it can make again, for one user."""

import os
from pathlib import Path

from kvqjax._errors import UserError

__all__ = ["user_folder"]


def user_folder(name: str) -> Path:
    """The folder `name` of this library below XDG_CACHE_HOME, or ~/.cache; it need not exist. Raises UserError for a
    user without a home."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (given if given.is_absolute() else Path.home() / ".cache") / "kvqjax" / name
    except RuntimeError as error:
        raise UserError("this user has no home folder; set XDG_CACHE_HOME") from error
