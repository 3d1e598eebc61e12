"""How far a body is read on a GPU: static lengths, a program for each.

The host decides on each turn of a loop whose bound is data, so no loop of a step has such a bound there. A step's cost
would then follow the capacity. So the host chooses lengths between strides of steps. That of the longest row is the
capacity divided by a power of two. Where a body is decoded span by span, that of all rows together is a number of
sixteenths of what rows of this length hold."""

import dataclasses
from collections.abc import Sequence

from kvqjax.cache.cache_layout import CacheLayout, LengthBound
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache

__all__ = ["bound_for", "bounded"]

LEAST = 4096  # tokens; shorter bodies cost less than a step's weights
PARTS = 16  # static totals of a batch


def bound_for(layout: CacheLayout, lengths: Sequence[int]) -> LengthBound | None:
    """Choose the shortest static lengths of a layout that hold rows of at most `lengths` tokens each. None stands for
    the whole capacity, and for layouts whose loops end with the longest row."""
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
    """Say whether a few queries read spans of rows of a run's body (kvqjax/cache/readers/decoded.py)."""
    wiring = run.wiring
    return wiring.fast.direct is None and not wiring.chain.carry and not run.wraps and not run.budget


def bounded(cache: Cache, bound: LengthBound | None) -> Cache:
    """Give the same cache whose programs read no further than `bound`; None takes the promise back."""
    return cache.replace(layout=dataclasses.replace(cache.layout, bound=bound))
