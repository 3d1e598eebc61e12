"""Compare one kernel with the plain path: it must give the same results, the same at every call,
and sooner. Pure but for the clock: both sides are functions, so that a test can hand in a kernel
that is wrong, races, crashes or is slow.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from kvqjax.kernel_checks.store import Verdict
from kvqjax.ops.attention import Partial

MOST = 0.01  # relative error of a query's output, and of what its weights add up to
REPEATS = 3

Attention = Callable[[jax.Array], Partial]


class Speed(NamedTuple):
    """Milliseconds of a call of the kernel and of the plain path."""

    kernel: float
    plain: float


def worst_error(got: Partial, want: Partial) -> float:
    """Return the largest relative error of a query: of its output, by norm, or of the sum of its
    softmax weights. It is infinite where something is not finite that should be, or where a query
    that sees nothing gives something."""
    out, lse, right_out, right_lse = (np.asarray(x, np.float64) for x in (*got, *want))
    if out.shape != right_out.shape or lse.shape != right_lse.shape:
        return float("inf")
    empty = np.isneginf(right_lse)
    if (
        not np.isneginf(lse[empty]).all()
        or np.any(out[empty] != 0)
        or not np.isfinite(lse[~empty]).all()
    ):
        return float("inf")
    distance = np.linalg.norm(out - right_out, axis=-1)[~empty]
    size = np.linalg.norm(right_out, axis=-1)[~empty]
    weights = np.abs(np.expm1(lse[~empty] - right_lse[~empty]))
    errors = np.concatenate([distance / np.maximum(size, np.finfo(np.float32).tiny), weights])
    worst = float(errors.max(initial=0.0))
    return worst if np.isfinite(worst) else float("inf")


def _line(error: BaseException) -> str:
    """Say in one line what was raised."""
    text = next(iter(str(error).splitlines()), "").strip()
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def _equal_bits(first: Partial, second: Partial) -> bool:
    """Say whether two results are equal bit for bit."""
    return all(
        np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)
        for a, b in zip(first, second, strict=True)
    )


def examine(
    kernel: Attention, plain: Attention, queries: Sequence[jax.Array], timed: Callable[[], Speed]
) -> Verdict:
    """Compare `kernel` with `plain` on every array of queries, REPEATS times, and then by what
    `timed()` says. What the kernel raises is a finding. What the plain path raises is raised,
    because it says nothing of the kernel."""
    references = [jax.block_until_ready(plain(q)) for q in queries]
    worst = 0.0
    try:
        for q, want in zip(queries, references, strict=True):
            first = jax.block_until_ready(kernel(q))
            worst = max(worst, worst_error(first, want))
            if worst > MOST:
                return Verdict(
                    outcome="wrong",
                    error=worst,
                    note=f"a query of {q.shape[1]} is off by {worst:.2%}",
                )
            for _ in range(REPEATS - 1):
                if not _equal_bits(first, jax.block_until_ready(kernel(q))):
                    return Verdict(
                        outcome="wrong", error=worst, note="results differ from call to call"
                    )
        speed = timed()
    except Exception as error:  # a compiler or a chip may raise anything
        return Verdict(outcome="failed", note=_line(error))
    outcome = "faster" if speed.kernel < speed.plain else "slower"
    return Verdict(outcome=outcome, error=worst, kernel_ms=speed.kernel, plain_ms=speed.plain)
