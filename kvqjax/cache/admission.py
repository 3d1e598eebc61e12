"""What a row admits of new tokens: as many as fit, and how many of them are finite."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvqjax.cache.state import Cache

__all__ = ["admitted", "finite_tokens"]


def admitted(cache: Cache, counts: Int[Array, " B"]) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """How many of `counts` new tokens still fit each row, and the overflow flags after them."""
    fits = jnp.clip(counts, 0, cache.layout.capacity - cache.lengths)
    return fits, cache.overflow | (fits < counts)


def finite_tokens(cache: Cache, whole: Int[Array, " B"], counts: Int[Array, " B"]) -> Int[Array, " B"]:
    """The cache's `finite` after `counts` new tokens of each row, `whole` of which come before the first that is not
    finite. Devices that hold other heads see other numbers: the least counts."""
    axes = cache.layout.heads_over
    whole = jax.lax.pmin(whole, axes) if axes else whole
    return jnp.where(cache.nonfinite, cache.finite, cache.lengths + jnp.minimum(whole, counts))
