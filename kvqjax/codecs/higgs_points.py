"""From HIGGS's codes to the numbers of their grid points."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt

from kvqjax.codecs.hadamard import multiplied, tiled
from kvqjax.codecs.nuq_table import look_up

__all__ = ["inverse_of", "numbers_of", "points_of"]

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
    """Transform the grid points of codes back as `transform` does, on a CPU. With y_j the j-th numbers of all points,
    H^T y = sum_j H[j::p]^T y_j: XLA for CPUs would put the numbers of a point side by side one by one."""
    others, tile = tiled(group)
    size, dim = len(tile), points.shape[1]
    codes = codes.reshape(*codes.shape[:-1], -1, size // dim)

    def product(column, rows):
        found = numbers_of(column, codes)
        return jnp.einsum("...v,vc->...c", found, jnp.asarray(rows, jnp.float32), precision="highest")

    found = sum(product(points[:, j], tile[j::dim]) for j in range(dim))
    return multiplied(found.reshape(*codes.shape[:-2], -1), others, inverse=True)
