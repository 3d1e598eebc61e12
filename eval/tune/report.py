"""What tuning reports, on text that it has not searched: rows, a table, a picture, and the commands that use the
result."""

import math
from typing import Any

import numpy as np

from kvqjax.eval.stamp import bytes_of
from kvqjax.eval.tune.choose import Bar
from kvqjax.eval.tune.measure import Meter
from kvqjax.eval.tune.search import Table, guess
from kvqjax.eval.tune.trial import Trial
from kvqjax.methods import Method

__all__ = ["line_at", "report_rows"]

Row = dict[str, Any]
FRONT = 9  # budgets from the smallest policy to the largest single choice at which the report shows a policy


def line_at(rows: list[Row], bits: float) -> float | None:
    """The divergence at `bits` on the logarithmic line between the best single choices on either side: of those that
    take at most so many bits, and of those that take at least so many, the ones of least divergence that no smaller
    one reaches. None where one side is empty."""
    below = [row for row in rows if row["kind"] == "single" and row["bits_stored"] <= bits]
    above = [row for row in rows if row["kind"] == "single" and row["bits_stored"] >= bits]
    if not below or not above:
        return None
    low = min(below, key=lambda row: row["kld"])
    steep = lambda row: math.log(max(row["kld"], 1e-12) / low["kld"]) / max(row["bits_stored"] - low["bits_stored"], 1e-9)  # noqa: E731
    high = min((row for row in above if row is not low), key=steep, default=low)
    if high is low or steep(high) > 0:
        return low["kld"]
    return low["kld"] * math.exp(steep(high) * (bits - low["bits_stored"]))


def _row(trial: Trial, kind: str, method: Method, kld: np.ndarray, context: int) -> Row:
    """Divergence on held-out windows with its standard error."""
    error = kld.std(ddof=1) / len(kld) ** 0.5 if len(kld) > 1 else float("nan")
    sizes = bytes_of(trial.model, method, context)
    return {"kind": kind, "cache": str(method), **sizes, "kld": float(kld.mean()), "kld_error": float(error)}


def report_rows(trial: Trial, table: Table, policy: np.ndarray, meter: Meter, context: int, bar: Bar) -> list[Row]:
    """The chosen policy, every single choice, and the first guesses at other budgets."""
    layers, parts = len(policy), trial.found.parts
    singles = [np.full((layers, 2), number) for number in range(len(parts))]
    low, high = float(table.bytes.min((1, 2)).sum()), max(table.size(single) for single in singles[1:])
    front = [guess(table, low * (high / low) ** (n / (FRONT - 1))) for n in range(FRONT)]
    front = {found.tobytes(): found for found in front if found is not None}
    marked = [("tuned", policy), *(("single", p) for p in singles), *(("front", p) for p in front.values())]
    subjects = [trial.subject(p) for _, p in marked]
    methods = [(kind, trial.found.method(p)) for kind, p in marked] + [("single", m) for m in trial.found.others]
    kld = meter([*subjects, *trial.others()], bar("held-out text"))
    return [_row(trial, kind, method, x, context) for (kind, method), x in zip(methods, kld, strict=True)]
