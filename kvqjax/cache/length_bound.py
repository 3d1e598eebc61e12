"""How far a body is read on a GPU: static lengths, a program for each.

No loop of a step has a bound that is data there, since the host decides on each of its turns, so that a step's cost
would follow the capacity. The host chooses lengths between strides of steps: of the longest row the capacity, or it
divided by a power of two; of all rows together, where a body is decoded span by span, sixteenths of that many each."""

import dataclasses
from collections.abc import Sequence

from kvqjax.cache.cache_layout import CacheLayout, LengthBound
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache

__all__ = ["bound_for", "bounded"]

LEAST = 4096  # tokens; shorter bodies cost less than a step's weights
PARTS = 16  # static totals of a batch


def bound_for(layout: CacheLayout, held: Sequence[int]) -> LengthBound | None:
    """Choose the shortest of a layout's static lengths that rows of at most `held` tokens each fit. None stands for the
    whole capacity, and for layouts whose loops end with the longest row."""
    runs = [run for run in runs_of(layout) if run.static_loops]
    if not runs:
        return None
    row, batch = layout.capacity, len(held)
    while row > LEAST and -(-row // 2) >= max(held):
        row = -(-row // 2)
    part = -(-batch * row // PARTS)
    total = -(-sum(held) // part) * part
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
