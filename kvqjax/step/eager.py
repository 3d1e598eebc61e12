"""How public functions run outside jit: as one kept program each, because a loop that is called by itself is compiled
at each call; on one device or on every device's part of a mesh. Inside a user's jit they are plain functions."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvqjax._errors import UserError
from kvqjax.cache.state import Cache
from kvqjax.model.loading import Model
from kvqjax.parallel.sharding import over_mesh
from kvqjax.step.constants import with_own_constants

__all__ = ["kept_program", "run_step"]


@jax.custom_jvp
def _for_inference(tree):
    """`tree` itself, which cannot be differentiated: what is stored is rounded."""
    return tree


@_for_inference.defjvp
def _no_gradient(primals, tangents):
    raise UserError(
        "forward, attend, commit, prefill, attend_layer and append are for inference: a cache holds rounded numbers "
        "and has no gradient; train on kvqjax.model.decoder.logits"
    )


def kept_program(
    function: Callable, static_argnums: tuple[int, ...] = (), static_argnames: tuple[str, ...] = ()
) -> Callable:
    """`function` of arrays and trees, compiled once for its shapes and static arguments where no argument is traced.
    Raises UserError where a gradient is asked for."""

    @functools.wraps(function)
    @jax.enable_x64(False)  # tokens, counts and codes are 32-bit numbers whatever jax_enable_x64 says
    def plain(*arguments, **options):
        fixed = [x if i in static_argnums else _for_inference(x) for i, x in enumerate(arguments)]
        return function(*fixed, **options)

    compiled = jax.jit(plain, static_argnums=static_argnums, static_argnames=static_argnames)

    @functools.wraps(function)
    def call(*arguments, **options):
        inside = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((arguments, options)))
        return (plain if inside else compiled)(*arguments, **options)

    return call


def _placed(step, model: Model, cache: Cache, *arguments, out: tuple[str, ...], **options):
    """`step(model, cache, *arguments, **options)` on one device, or on every device's part of the model's mesh."""
    model = with_own_constants(model, cache.layout.method)
    arguments = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.int32), arguments)
    step = functools.partial(step, **options)
    if model.rules is None:
        return step(model, cache, *arguments)
    return over_mesh(step, model, cache, *arguments, out=out)


run_step = kept_program(_placed, static_argnums=(0,), static_argnames=("out", "within", "last", "reach"))
