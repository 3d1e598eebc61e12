"""The version, for code and for the package's metadata (pyproject.toml reads it here)."""

__all__ = ["__version__"]

__version__ = "0.1.0"
