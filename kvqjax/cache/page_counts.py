"""How many pages rows take, from a layout alone (kvqjax/cache/pages.py says what pages are).

Only encoded tokens lie in pages. The newest tokens lie in the window: a clock encodes a unit once a row holds
`window + unit` tokens that it has not encoded.
"""

from kvqjax._arguments import check_integer
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.runs import runs_of
from kvqjax.methods.layer_cache import Clock

__all__ = ["exact_beside_pages", "most_tokens", "pages_complete", "pages_needed", "table_width"]


def table_width(layout: CacheLayout) -> int:
    """Count the pages that a row of `capacity` tokens takes; 0 where no body lies in pages."""
    return max(run.slots // run.page if run.page else 0 for run in runs_of(layout))


def _clocks(layout: CacheLayout) -> list[Clock]:
    """List the clocks of all bodies in pages."""
    return [clock for run in runs_of(layout) if run.page for clock in run.wiring.storage.clocks]


def _encoded(layout: CacheLayout, tokens: int) -> list[int]:
    """Count the tokens that each of these clocks has encoded of a row that holds `tokens`."""
    body = min(tokens, layout.capacity) - layout.method.sinks
    return [max(0, (body - clock.window) // clock.unit * clock.unit) for clock in _clocks(layout)]


def exact_beside_pages(layout: CacheLayout) -> int:
    """Count the tokens that a row can hold without a further page: sinks, and what the window keeps before the first
    clock has a unit due."""
    return layout.method.sinks + min(clock.window + clock.unit for clock in _clocks(layout)) - 1


def most_tokens(layout: CacheLayout, batch: int) -> int:
    """Count the tokens that `batch` rows can hold together."""
    if layout.pool is None or not table_width(layout):
        return batch * layout.capacity
    return min(batch * layout.capacity, layout.pool.pages * layout.pool.tokens + batch * exact_beside_pages(layout))


def pages_needed(layout: CacheLayout, tokens: int) -> int:
    """Count the pages that a row of so many tokens needs.

    Args:
        layout: of a cache whose rows have pages.
        tokens: of the row, sinks and window included. More than the capacity count as the capacity.

    Returns:
        The number of pages. 0 where no body lies in pages.

    Raises:
        UserError: `tokens` is no whole number of at least 0.
    """
    tokens = check_integer("tokens", tokens, 0)
    if layout.pool is None or not table_width(layout):
        return 0
    return -(-max(_encoded(layout, tokens)) // layout.pool.tokens)


def pages_complete(layout: CacheLayout, tokens: int) -> int:
    """Count the pages of a row that are full, so that nothing is written to them any more. Other rows may share them
    while the row goes on.

    Args:
        layout: of a cache whose rows have pages.
        tokens: of the row, appended and not cropped.

    Returns:
        The number of pages, at most `pages_needed(layout, tokens)`.
    """
    if layout.pool is None or not table_width(layout):
        return 0
    # Where keys are encoded before values, a page is complete once both are.
    return min(_encoded(layout, tokens)) // layout.pool.tokens
