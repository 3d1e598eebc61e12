"""Package discovery: every package below the folders that pyproject.toml maps, so that a new one
cannot go missing."""

import tomllib
from pathlib import Path

from setuptools import find_packages, setup

mapping = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
packages = list(mapping)
for name, folder in mapping.items():
    packages += [f"{name}.{child}" for child in find_packages(folder)]
setup(packages=packages)
