"""HIGGS decoding for GPUs, by one matrix product. kvqjax.codecs.higgs's own form is a chain of
small products in float32, which takes fewer operations, but writes every intermediate result to
memory.

Grid numbers have 11 significant bits, so that float16 holds them. The matrix has small integers
times 2^n. So a product of float16 numbers with float32 sums rounds nothing but the sums. The sums
are written as float16, whose 11 significant bits are more than a key in bfloat16 keeps. In float32
a quarter more bytes would be read and written in all.

With y_j the j-th channels of all vectors, M^T y = sum_j M[j::p]^T y_j, as in
kvqjax.codecs.higgs_tpu.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt

from kvqjax.codecs.hadamard import transform_matrix
from kvqjax.codecs.higgs_tpu import Plan
from kvqjax.ops.xla_workarounds import kept_apart


def inverse(plan: Plan, codes: UInt[Array, "*B V"]) -> Float[Array, "*B W"]:
    """Compute M^T y of every group, y being the grid points that `codes` name. It is not divided by
    the group's width."""
    grid = np.ascontiguousarray(plan.words.T).view(np.float16)[:, : plan.dim]
    tiles = codes.reshape(*codes.shape[:-1], -1, plan.tile)
    y = jnp.concatenate([jnp.asarray(column)[tiles] for column in grid.T], axis=-1)
    matrix = _matrix(plan)
    y = y.reshape(*codes.shape[:-1], -1, len(matrix))
    x = jnp.einsum("...gv,vc->...gc", y, matrix, preferred_element_type=jnp.float32).astype(
        jnp.float16
    )
    # Without `kept_apart`, XLA would write the float32 sums.
    return kept_apart(x).astype(jnp.float32).reshape(*codes.shape[:-1], -1)


def within_heads(
    points: np.ndarray, group: int, codes: UInt[Array, "*B v"]
) -> Float[Array, "*B D"]:
    """Compute M^T y of groups of `group` channels, those of one head, y being the grid points that
    `codes` name."""
    dim = points.shape[1]
    # Small integers.
    rows = np.concatenate([transform_matrix(group)[place::dim] for place in range(dim)])
    # What grids' numbers are rounded to when they are made (higgs_grid).
    columns = points.T.astype(np.float16)
    y = jnp.concatenate([jnp.asarray(column)[codes] for column in columns], axis=-1)
    x = jnp.einsum(
        "...v,vc->...c", y, jnp.asarray(rows, jnp.float16), preferred_element_type=jnp.float32
    )
    return kept_apart(x.astype(jnp.float16)).astype(jnp.float32)


def _matrix(plan: Plan) -> Float[Array, "V W"]:
    """Make M from its two factors, for the tiles that `plan.outer` mixes. Rows come in the order of
    `y` in `inverse`, and take off the 2^raised by which `plan.words` are too large."""
    # It is made on the chip: as a constant, a program would hold all of its numbers at every place
    # where it is used. `plan.matrix` has each row twice, for the two bfloat16 pieces of a number.
    # float16 needs one.
    inner = plan.matrix.reshape(plan.dim, 2, plan.tile, -1)[:, 0].reshape(plan.dim * plan.tile, -1)
    outer, inner = (jnp.asarray(x, jnp.float16) for x in (plan.outer, inner))
    size, (rows, columns) = len(plan.outer), inner.shape
    product = (outer[:, None, :, None] * inner[None, :, None, :]).reshape(
        size * rows, size * columns
    )
    return product * jnp.float16(2.0**-plan.raised)
