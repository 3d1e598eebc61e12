"""Reads records and writes Markdown tables for the pages."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def read(name: str) -> Any:
    """A record by its name."""
    return json.loads(
        (Path(__file__).parent / "records" / f"{name}.json").read_text(encoding="utf-8")
    )


def standard_error(values: np.ndarray) -> float:
    """Of a mean of values that are independent of each other."""
    return float(values.std(ddof=1) / len(values) ** 0.5)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table that ends with a newline."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
