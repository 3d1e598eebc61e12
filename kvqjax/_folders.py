"""The user's folder for files that the library can make again."""

import os
import sys
from pathlib import Path

from kvqjax._errors import UserError


def _system_folder() -> Path:
    """Give the folder in which programs of this system keep such files."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"])
    return Path.home() / ".cache"


def user_folder(name: str) -> Path:
    """The folder `name` of this library below XDG_CACHE_HOME, or below the system's own: ~/.cache,
    ~/Library/Caches on macOS, LOCALAPPDATA on Windows. It need not exist. Raises UserError for a
    user without a home."""
    user_choice = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (user_choice if user_choice.is_absolute() else _system_folder()) / "kvqjax" / name
    except RuntimeError as error:
        raise UserError("this user has no home folder; set XDG_CACHE_HOME") from error
