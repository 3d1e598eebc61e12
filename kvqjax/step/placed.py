"""How a step runs: as one kept program, on one device or on every device's part of a mesh."""

import functools

import jax
import jax.numpy as jnp

from kvqjax.cache.state import Cache
from kvqjax.model.loading import Model
from kvqjax.parallel.sharding import over_mesh
from kvqjax.step.eager import kept_program

__all__ = ["run_step"]


def _placed(step, model: Model, cache: Cache, *arguments, out: tuple[str, ...], **options):
    """`step(model, cache, *arguments, **options)` on one device, or on every device's part of the model's mesh."""
    arguments = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.int32), arguments)
    step = functools.partial(step, **options)
    if model.rules is None:
        return step(model, cache, *arguments)
    return over_mesh(step, model, cache, *arguments, out=out)


run_step = kept_program(_placed, static_argnums=(0,), static_argnames=("out", "within", "last", "reach"))
