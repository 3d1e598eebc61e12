"""How far a body is read on a GPU: up to a static length, which changes from time to time.

A GPU's host decides on every turn of a loop whose bound is data. So no loop of a step has such a bound there, and a
step would cost what the capacity costs. Between strides of steps, the host therefore promises how long rows are
(`LengthBound`). Every promise is a program of its own, so that only a few lengths are promised:

    the longest row      the capacity, divided by a power of two
    all rows together    so many sixteenths of what rows of that length hold; where a body is decoded span by span"""

import dataclasses
from collections.abc import Sequence

from kvqjax.cache.cache_layout import CacheLayout, LengthBound
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache

__all__ = ["bound_for", "bounded"]

LEAST = 4096  # tokens of the longest row: reading shorter bodies costs less than reading the model's weights
PARTS = 16  # how many totals of all rows can be promised


def bound_for(layout: CacheLayout, lengths: Sequence[int]) -> LengthBound | None:
    """Choose the promise for rows of these lengths.

    Args:
        layout: The cache's layout.
        lengths: The most tokens that each row will hold.

    Returns:
        The least promise that such rows keep. None where it would be no less than the capacity, and for layouts whose
        loops are bounded by data."""
    runs = [run for run in runs_of(layout) if run.static_loops]
    if not runs:
        return None
    row, batch = layout.capacity, len(lengths)
    while row > LEAST and -(-row // 2) >= max(lengths):
        row = -(-row // 2)
    part = -(-batch * row // PARTS)
    total = -(-sum(lengths) // part) * part
    if total >= batch * row or not any(map(_by_spans, runs)):
        total = None
    return LengthBound(row, total) if row < layout.capacity or total is not None else None


def _by_spans(run: RunLayout) -> bool:
    """Say whether a few queries may read a run's body span by span (kvqjax/cache/readers/decoded.py)."""
    wiring = run.wiring
    return wiring.fast.direct is None and not wiring.chain.carry and not run.wraps and not run.budget


def bounded(cache: Cache, bound: LengthBound | None) -> Cache:
    """Give the same cache whose programs read no further than `bound`; None takes the promise back."""
    return cache.replace(layout=dataclasses.replace(cache.layout, bound=bound))
