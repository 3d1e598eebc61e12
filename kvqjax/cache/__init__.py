"""The compressed cache: state, appending, surgery, saving."""

import warnings

from kvqjax.cache.append import commit
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.encoding import at_layer
from kvqjax.cache.runs import RunLayout, runs_of
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

_RENAMED = {"plan": "runs_of", "RunPlan": "RunLayout", "pick": "at_layer"}


def __getattr__(name: str):
    if name not in _RENAMED:
        raise AttributeError(f"module 'kvqjax.cache' has no attribute {name!r}")
    warnings.warn(f"kvqjax.cache.{name} is now {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]
