"""Weights that some layers have and others lack, or that are read expert by expert, in a stack of layers.

    {"q": [L, E, H*D], "gate": Rows([2, E, F], layers=(0, 3)), "experts_gate": Rows([L-2, X, E, F], layers=(1, 2, ...))}

A loop over stacked layers knows its layer only as data. A `Row` is therefore a promise: which row of the stack, and
whether this layer has one at all. What is read of it is cut out of the whole stack where it is used, inside a branch
or a loop over experts. Cut out before, all experts of the layer would be copied.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from kvqjax.model.weight_codes import CodedWeight

__all__ = ["Row", "Rows", "whole"]

Leaf = Any  # an array, a CodedWeight, or whatever a tree map puts in its place


def _decoded(x: Leaf) -> Leaf:
    return x.decoded() if isinstance(x, CodedWeight) else x


class Row(struct.PyTreeNode):
    """One layer's row of a stack. `here` says whether the layer has one; if not, `number` is that of any row."""

    stack: Leaf  # [N, ...]
    number: Leaf  # Int[]
    here: Leaf  # Bool[]

    def whole(self) -> Leaf:
        """All of the row, in the compute dtype."""
        cut = lambda a: jax.lax.dynamic_index_in_dim(a, self.number, keepdims=False)  # noqa: E731
        return _decoded(jax.tree.map(cut, self.stack))

    @property
    def experts(self) -> int:
        """How many experts this device holds."""
        return jax.tree.leaves(self.stack)[0].shape[1]

    def expert(self, number: Int[Array, ""] | int) -> Leaf:
        """One expert's matrix [I, O], in the compute dtype."""

        def cut(a):
            starts = (self.number, number, *[0] * (a.ndim - 2))
            return jax.lax.dynamic_slice(a, starts, (1, 1, *a.shape[2:]))[0, 0]

        return _decoded(jax.tree.map(cut, self.stack))


class Rows(struct.PyTreeNode):
    """Row i of `stack` belongs to layer `layers[i]`."""

    stack: Leaf
    layers: tuple[int, ...] = struct.field(pytree_node=False)

    def row(self, layer: Int[Array, ""] | int) -> Row | None:
        """The row of a layer; None where a plain number says that it has none."""
        if not isinstance(layer, jax.core.Tracer):
            return Row(self.stack, self.layers.index(int(layer)), True) if int(layer) in self.layers else None
        known = np.arange(self.layers[-1] + 1)
        numbers, here = np.searchsorted(self.layers, known).astype(np.int32), np.isin(known, self.layers)
        inside = jnp.clip(layer, 0, len(known) - 1)
        return Row(self.stack, jnp.asarray(numbers)[inside], jnp.asarray(here)[inside] & (layer < len(known)))


def whole(weight: Row | Leaf) -> Leaf:
    """A layer's weight, in the compute dtype, whether or not it is a row still to be read."""
    return weight.whole() if isinstance(weight, Row) else _decoded(weight)
