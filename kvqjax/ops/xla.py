"""What XLA must be told so that it leaves arrays where and as they are."""

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Shaped

__all__ = ["row_major"]


def row_major(x: Shaped[Array, "*S"]) -> Shaped[Array, "*S"]:
    """`x`, kept in row-major order. What is cut from or put into a stored array must keep the array's order: otherwise
    a user that wants another one (a transpose, a head split) makes XLA re-order the whole array, not the piece.

    XLA's partitioner gathers around a layout constraint, so under a mesh (`jax.set_mesh`) it only stands in
    shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    if not (mesh.empty or mesh.are_all_axes_manual):
        return x
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
