"""HIGGS decoding for GPUs: one product instead of a chain of float32 ones. Equal to kvqjax.codecs.higgs's own form but
for the order of its sums.

Grid numbers have 11 significant bits, so that float16 holds them, and the matrix has small integers times 2^n: products
of float16 with float32 sums round nothing but the sums. Those are written as float16, whose 11 bits are more than a key
in bfloat16 keeps of them: float32 would be a quarter more of all that is read and written. A chain of small products
does fewer operations, and writes what is between them to memory in float32, which takes longer. With y_j the j-th
channels of all vectors, M^T y = sum_j M[j::p]^T y_j, as in kvqjax.codecs.higgs_tpu.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt

from kvqjax.codecs.hadamard import transform_matrix
from kvqjax.codecs.higgs_tpu import Plan
from kvqjax.ops.xla_workarounds import kept_apart

__all__ = ["inverse", "within_heads"]


def inverse(plan: Plan, codes: UInt[Array, "*B V"]) -> Float[Array, "*B W"]:
    """M^T y of every group, y being the grid points that `codes` name; not divided by the group's width."""
    grid = np.ascontiguousarray(plan.words.T).view(np.float16)[:, : plan.dim]
    tiles = codes.reshape(*codes.shape[:-1], -1, plan.tile)
    y = jnp.concatenate([jnp.asarray(column)[tiles] for column in grid.T], axis=-1)
    matrix = _matrix(plan)
    y = y.reshape(*codes.shape[:-1], -1, len(matrix))
    x = jnp.einsum("...gv,vc->...gc", y, matrix, preferred_element_type=jnp.float32).astype(jnp.float16)
    return kept_apart(x).astype(jnp.float32).reshape(*codes.shape[:-1], -1)  # or XLA would write the float32 sums


def within_heads(points: np.ndarray, group: int, codes: UInt[Array, "*B v"]) -> Float[Array, "*B D"]:
    """M^T y of groups as small as a head, y being the grid points that `codes` name."""
    dim = points.shape[1]
    rows = np.concatenate([transform_matrix(group)[place::dim] for place in range(dim)])  # small integers
    columns = points.T.astype(np.float16)  # what grids' numbers are rounded to when they are made (higgs_grid)
    y = jnp.concatenate([jnp.asarray(column)[codes] for column in columns], axis=-1)
    x = jnp.einsum("...v,vc->...c", y, jnp.asarray(rows, jnp.float16), preferred_element_type=jnp.float32)
    return kept_apart(x.astype(jnp.float16)).astype(jnp.float32)


def _matrix(plan: Plan) -> Float[Array, "V W"]:
    """The matrix of as many tiles as the outer one mixes; made on the chip, for a program would hold all its numbers
    wherever it is used."""
    inner = plan.matrix.reshape(plan.dim, 2, plan.tile, -1)[:, 0].reshape(plan.dim * plan.tile, -1)  # one of two pieces
    outer, inner = (jnp.asarray(x, jnp.float16) for x in (plan.outer, inner))
    size, (rows, columns) = len(plan.outer), inner.shape
    product = (outer[:, None, :, None] * inner[None, :, None, :]).reshape(size * rows, size * columns)
    return product * jnp.float16(2.0**-plan.raised)
