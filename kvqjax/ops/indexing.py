"""Index arithmetic and slices that compile to one operation each.

`//` and `%` round down for negative numbers too, and slices of `jax.lax` take a negative start from the end. XLA
expands each into four to a dozen scalar operations. A decode step has them in every layer, and on GPUs every layer is
compiled by itself: they were up to half of its program.
"""

import jax
from jaxtyping import Array, Int, Shaped

__all__ = ["cut_along", "cut_at", "floor_divide", "modulo", "put_at"]

Index = Int[Array, "*S"] | int


def floor_divide(x: Index, by: int) -> Index:
    """Return `x // by`, for `by` > 0: a power of two is one shift."""
    return x // by if by & (by - 1) else x >> by.bit_length() - 1


def modulo(x: Index, by: int) -> Index:
    """Return `x % by`, for `by` > 0: a power of two is one mask."""
    return x % by if by & (by - 1) else x & (by - 1)


def cut_at(array: Shaped[Array, "..."], start: tuple[Index, ...], shape: tuple[int, ...]) -> Shaped[Array, "..."]:
    """Return the part of `shape` that begins at `start`, which is nowhere negative."""
    return jax.lax.dynamic_slice(array, start, shape, allow_negative_indices=False)


def cut_along(array: Shaped[Array, "..."], start: Index, count: int, axis: int) -> Shaped[Array, "..."]:
    """Return `count` entries of an axis from `start` on, which is not negative."""
    return jax.lax.dynamic_slice_in_dim(array, start, count, axis, allow_negative_indices=False)


def put_at(array: Shaped[Array, "..."], part: Shaped[Array, "..."], start: tuple[Index, ...]) -> Shaped[Array, "..."]:
    """Return `array` with `part` in the place that begins at `start`, which is nowhere negative."""
    return jax.lax.dynamic_update_slice(array, part, start, allow_negative_indices=False)
