"""The compressed cache: state, appending, surgery, saving."""

from kvqjax.cache.append import commit
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.encoding import pick
from kvqjax.cache.runs import RunPlan, plan
from kvqjax.cache.state import Cache, Leaf, Run, allocate_cache, body_tokens

__all__ = ["Cache", "CacheLayout", "Leaf", "Run", "RunPlan", "allocate_cache", "body_tokens", "commit", "pick", "plan"]
