"""How public functions run outside jit: as one kept program each, because a loop that is called by itself is compiled
at each call. Inside a user's jit they are plain functions."""

import functools
from collections.abc import Callable

import jax

from kvqjax._errors import UserError

__all__ = ["kept_program"]


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
