"""The compressed cache: state, appending, surgery, saving."""

from kvqjax.cache.append import commit, pick
from kvqjax.cache.state import Cache, CacheLayout, Leaf, Run, RunPlan, allocate_cache, body_tokens, plan

__all__ = ["Cache", "CacheLayout", "Leaf", "Run", "RunPlan", "allocate_cache", "body_tokens", "commit", "pick", "plan"]
