"""The version of the library. The package's metadata (pyproject.toml) read it here.

Between two releases it is the next one with `.dev0`. CHANGELOG.md, CITATION.cff and README.md name
the same version.
"""

__version__ = "0.6.0.dev0"
