"""The compressed cache: state, appending, surgery, saving."""

from kvqjax.cache.append import commit
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.encoding import at_layer
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, Leaf, Run, allocate_cache, body_tokens

__all__ = [
    "Cache",
    "CacheLayout",
    "Leaf",
    "Run",
    "RunLayout",
    "allocate_cache",
    "at_layer",
    "body_tokens",
    "commit",
    "runs_of",
]


def __dir__() -> list[str]:
    return __all__
