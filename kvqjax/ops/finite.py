"""Numbers that are not finite, and numbers too large for their type (docs/design.md, idea 13).

A slot that no query sees is read with weight 0, and 0 x inf = NaN. So no slot may hold a NaN or an
infinity. `found_finite` and `zeroed` keep them out of the cache. `wide` and `saturated` keep codecs
from making them."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

# Encoders sum squares over a token's channels, in float32: 2**16 numbers of this size still have a
# finite sum.
LARGEST = 2.0**56

Sources = dict  # source name -> array


def found_finite(dtype, *sources: Sources) -> Bool[Array, "B T"]:
    """Say for each token whether all its sources [..., B, T, W] are finite numbers of `dtype`."""
    # Arrays of one shape are combined number by number before they are reduced: XLA does that in
    # one kernel for all layers.
    finite: dict[tuple[int, ...], Array] = {}
    arrays = [x for named in sources for x in named.values()]
    for x in arrays:
        finite[x.shape] = jnp.isfinite(x.astype(dtype)) & finite.get(x.shape, True)
    return functools.reduce(
        jnp.logical_and, [x.all((*range(x.ndim - 3), -1)) for x in finite.values()]
    )


def zeroed(dtype, sources: Sources) -> Sources:
    """Replace every number that is not finite in `dtype` by 0."""
    return {name: jnp.where(jnp.isfinite(x.astype(dtype)), x, 0) for name, x in sources.items()}


def leading(finite: Bool[Array, "B T"]) -> Int[Array, " B"]:
    """Count the tokens of each row before its first token that is not finite."""
    return jnp.cumprod(finite, axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)


def spoiled(finite: Bool[Array, "B T"], counts: Int[Array, " B"]) -> Bool[Array, "B T"]:
    """Mark the new tokens that see a token that is not finite: themselves, or an earlier one among
    the first `counts[b]` tokens of their row."""
    valid = jnp.arange(finite.shape[1])[None] < counts[:, None]
    return jnp.cumsum(~finite & valid, axis=1) > 0


def wide(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Convert `x` to float32. Finite numbers beyond +-LARGEST saturate, so that sums of squares
    stay finite."""
    x = x.astype(jnp.float32)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -LARGEST, LARGEST), x)


def saturated(x: Num[Array, "*S"], dtype) -> Num[Array, "*S"]:
    """Convert `x` to `dtype`. Numbers beyond the range of float16 become its largest number. Other
    types have the range of float32."""
    x = x.astype(dtype)
    most = float(jnp.finfo(jnp.float16).max)
    return jnp.clip(x, -most, most) if x.dtype == jnp.float16 else x
