"""How far a body is read on a GPU: static lengths, a program for each.

No loop of a step has a bound that is data there, since the host decides on each of its turns, so that a step's cost
would follow the capacity.
The host chooses a length between strides of steps: the capacity, or it divided by a power of two."""

from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.runs import runs_of

__all__ = ["reach_for"]

LEAST = 4096  # tokens; shorter bodies cost less than a step's weights


def reach_for(layout: CacheLayout, tokens: int) -> int | None:
    """Choose the shortest of a layout's static lengths that rows of at most `tokens` tokens fit. None stands for the
    whole capacity, and for layouts whose loops end with the longest row."""
    if not any(run.static for run in runs_of(layout)):
        return None
    reach = layout.capacity
    while reach > LEAST and -(-reach // 2) >= tokens:
        reach = -(-reach // 2)
    return reach if reach < layout.capacity else None
