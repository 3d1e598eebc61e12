"""A cache for tunix's `Sampler`, which asks the model for one and hands it back at every call:

    class Transformer(nnx.Module):
        def init_cache(self, batch_size, cache_size, dtype):
            return init_cache(SHAPE, "kivi:bits=4", batch_size, cache_size, dtype)

        def __call__(self, tokens, positions, cache, attention_mask):
            cache = layers(cache, attention_mask)                            # {"layer_0": a view, ...}
            for name, layer in ...:
                cache[name], x = layer(x, positions, cache[name], attention_mask)
            return logits, commit_layers(cache)

An attention layer has `out, cache = cache.attend(q, k, v)` in place of its update of an array and
its scores. The sampler pads prompts on the left, donates the cache, and for beams repeats and picks
rows along the first axis of every array. The interface is that of google-tunix 0.1.7
(tunix/generate/sampler.py and beam_search.py). Nothing of tunix is imported here.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool

from kvqjax._arguments import named
from kvqjax._errors import UserError
from kvqjax.cache import Cache
from kvqjax.cache.surgery import row_axes
from kvqjax.methods import MethodLike
from kvqjax.model.config import KVShape
from kvqjax.step import views
from kvqjax.step.checks import is_mask
from kvqjax.step.new_cache import init_cache as plain_cache
from kvqjax.step.views import CacheView

__all__ = ["SamplerCache", "commit_layers", "init_cache", "layers"]

LAYER = "layer_{}"  # how tunix names the layers of a cache


def __dir__() -> list[str]:
    return __all__


class SamplerCache(struct.PyTreeNode):
    """A cache whose rows are the first axis of every array, as tunix's sampler expects of any
    cache.

    `cache` is the ordinary one, `SamplerCache.of(cache)` the way back:
    `kvq.ledger(sampler_cache.cache)`."""

    rows_first: Cache

    @classmethod
    def of(cls, cache: Cache) -> "SamplerCache":
        """Put the rows of every array of a cache in front."""
        return cls(jax.tree.map(lambda axis, x: jnp.moveaxis(x, axis, 0), row_axes(cache), cache))

    @property
    def cache(self) -> Cache:
        """The ordinary cache. Also of rows that were repeated or picked."""
        stored = self.rows_first
        return jax.tree.map(lambda axis, x: jnp.moveaxis(x, 0, axis), row_axes(stored), stored)


def init_cache(
    shape: KVShape,
    method: MethodLike,
    batch_size: int,
    cache_size: int,
    dtype: DTypeLike | None = None,
    **options: Any,
) -> SamplerCache:
    """Make the empty cache that a model's `init_cache` returns to the sampler.

    Args:
        shape: the model's keys and values.
        method: how they are stored, such as "kivi:bits=4".
        batch_size: rows, as the sampler says.
        cache_size: the most tokens of a row, as the sampler says.
        dtype: of keys and values as they come, as the sampler says.
        options: those of `kvq.init_cache`. Layers are stored one by one (`layers="unroll"`), unless
            they say otherwise: so rows come in front without a copy.

    Returns:
        The cache.

    Raises:
        UserError: as `kvq.init_cache`.
    """
    options = {"layers": "unroll", **options}
    return SamplerCache.of(
        plain_cache(shape, method, batch_size, cache_size, dtype=dtype, **options)
    )


def layers(
    cache: Any, attention_mask: Bool[Array, "..."], *, constants: Any = None
) -> dict[str, CacheView]:
    """Open the cache that the sampler gave the model.

    Args:
        cache: a SamplerCache, as `init_cache` or `commit_layers` made it.
        attention_mask: [B, T, S], as the sampler made it. A token that sees no place at all is
            padding. The cache itself knows what a token attends to: what came before it in its row,
            within a layer's sliding window.
        constants: an artifact's.

    Returns:
        One view for every layer, by tunix's names, "layer_0" and so on; see `kvq.layers`. A layer
        stores what `view.attend` returned under the same name.

    Raises:
        UserError: for what is no cache of `init_cache`, and for a mask of another shape.
    """
    if not isinstance(cache, SamplerCache):
        raise UserError(
            f"{named(cache)} is no cache for tunix's sampler; kvqjax.adapters.tunix.init_cache makes one"
        )
    plain = cache.cache
    if not is_mask(attention_mask) or attention_mask.ndim != 3:
        raise UserError(
            f"attention_mask is {named(attention_mask)}; wanted bool[{plain.batch}, T, cache_size], the sampler's"
        )
    opened = views.layers(plain, valid=attention_mask.any(-1), constants=constants)
    assert isinstance(opened, list)
    return {LAYER.format(view.layer): view for view in opened}


def commit_layers(cache: Mapping[str, Any]) -> SamplerCache:
    """Store the new tokens of all layers, once each has attended.

    Args:
        cache: the views that `layers` gave, each replaced by the one its `attend` returned.

    Returns:
        The cache that the model returns to the sampler.

    Raises:
        UserError: as `kvq.commit_layers`.
    """
    names = [LAYER.format(number) for number in range(len(cache))]
    if missing := [name for name in names if name not in cache]:
        raise UserError(
            f"no view of {missing[0]}; wanted those of all layers, {', '.join(names)}, not {list(cache)}"
        )
    return SamplerCache.of(views.commit_layers([cache[name] for name in names]))
