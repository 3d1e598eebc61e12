"""The compressed cache: state, appending, surgery, saving."""

from kvqjax.cache.append import at_layer, commit
from kvqjax.cache.layout import CacheLayout, RunLayout
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
