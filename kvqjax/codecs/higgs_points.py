"""From HIGGS's codes to the numbers of their grid points."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt

from kvqjax.codecs.hadamard import multiplied, transform_factors, transform_matrix
from kvqjax.codecs.nuq_table import look_up

__all__ = ["inverse_at_once", "inverse_of", "numbers_of", "points_of"]

MOST_SELECTS = 16  # points that a CPU looks up by their codes' bits


def points_of(points: np.ndarray, codes: UInt[Array, "*lead vectors"]) -> Float[Array, "*lead numbers"]:
    """Look up the grid points of codes, side by side."""
    found = look_up(codes, jnp.asarray(points[:, 0])) if points.shape[1] == 1 else jnp.asarray(points)[codes]
    return found.reshape(*codes.shape[:-1], -1)


def numbers_of(column: np.ndarray, codes: UInt[Array, "*S"]) -> Float[Array, "*S"]:
    """Look up one number of every code's grid point. CPUs gather number by number."""
    few = column.shape[0] <= MOST_SELECTS
    by_selects = lambda codes: look_up(codes, jnp.asarray(column))  # noqa: E731
    gathered = lambda codes: jnp.asarray(column)[codes]  # noqa: E731
    return jax.lax.platform_dependent(codes, cpu=by_selects if few else gathered, default=gathered)


def inverse_of(points: np.ndarray, group: int, codes: UInt[Array, "*lead vectors"]) -> Float[Array, "*lead group"]:
    """Transform the grid points of codes back as `transform` does, on a CPU: the numbers of the same place in their
    points side by side, and the last Kronecker factor, whose rows stand likewise, before the others."""
    *others, last = transform_factors(group)
    size, dim = last.shape[0], points.shape[1]
    codes = codes.reshape(*codes.shape[:-1], -1, size // dim)
    found = jnp.concatenate([numbers_of(column, codes) for column in points.T], axis=-1)
    rows = last.reshape(-1, dim, size).swapaxes(0, 1).reshape(size, size)
    found = jnp.einsum("...j,ji->...i", found, jnp.asarray(rows, jnp.float32), precision="highest")
    found = found.reshape(*codes.shape[:-2], -1)
    return multiplied(found, others, inverse=True) if others else found


def inverse_at_once(points: np.ndarray, group: int, codes: UInt[Array, "*lead vectors"]) -> Float[Array, "*lead group"]:
    """Transform the grid points of codes back as `transform` does, for small groups: with y_j the j-th numbers of all
    points, M^T y = sum_j M[j::p]^T y_j. The numbers of a point never meet, which XLA for CPUs would move one by one."""
    dim = points.shape[1]

    def product(place: int):
        found, rows = numbers_of(points[:, place], codes), jnp.asarray(transform_matrix(group)[place::dim], jnp.float32)
        return jnp.einsum("...v,vc->...c", found, rows, precision="highest")

    return functools.reduce(jnp.add, map(product, range(dim)))
