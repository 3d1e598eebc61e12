"""The one exception for input that a user can mend."""

__all__ = ["UserError"]


class UserError(ValueError):
    """Bad input (a folder, a file, an option). The text is one line that names the cause; the CLI exits with 2."""
