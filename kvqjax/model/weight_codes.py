"""Weight-only quantisation: a matrix as symmetric integer codes with a scale per group of inputs
and output.

    w_hat = scale * code,   scale = max |w| over the group / (2^(b-1) - 1),   code = round(w / scale)       (b = 8 or 4)

Codes are computed against the scale as stored. Activations stay in the compute dtype: a layer's
matrices are decoded when the layer runs (`kvqjax.model.decoder.layer`), so one layer at a time
exists in the compute dtype.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, UInt

from kvqjax._errors import UserError

Leaf = Any  # an array, or a value that a tree map or an abstract evaluation puts in its place
WEIGHT_GROUP = 128  # inputs per scale at most
LEAST_GROUP = 8  # inputs; with fewer, scales would take more than a quarter of the codes' bytes
WORD = 8  # 4-bit codes of a 32-bit word


# --- Words of 4-bit codes ---


def pack_nibbles(codes: UInt[Array, "*L I O"]) -> UInt[Array, "*L P O"]:
    """Pack 4-bit codes of eight consecutive inputs into a 32-bit word, the first in the lowest
    bits."""
    *lead, inputs, outputs = codes.shape
    words = codes.astype(jnp.uint32).reshape(*lead, inputs // WORD, WORD, outputs)
    return (words << _shifts(len(lead))).sum(-2, dtype=jnp.uint32)


def unpack_nibbles(words: UInt[Array, "*L P O"]) -> UInt[Array, "*L I O"]:
    """Unpack what `pack_nibbles` packed."""
    *lead, rows, outputs = words.shape
    codes = (words[..., None, :] >> _shifts(len(lead))) & jnp.uint32(15)
    return codes.reshape(*lead, WORD * rows, outputs)


def _shifts(lead: int) -> UInt[Array, "*L 8 1"]:
    """The place of each code in its word, along the last axis but one."""
    return jnp.arange(0, 32, 4, dtype=jnp.uint32).reshape((1,) * (lead + 1) + (WORD, 1))


# --- Coded matrices ---


class CodedWeight(struct.PyTreeNode):
    """One stacked matrix [L, I, O].

    Attributes:
        codes: of 8 bits Int8[L, I, O]; of 4 bits UInt32[L, ceil(I/8), O], eight to a word with 8
            added to each.
        scale: Float[L, N, O] in the compute dtype. One holds for ceil(I / N) inputs, the last for
            those that remain.
        padding: how many codes at the end of the last word belong to no input.
    """

    codes: Leaf
    scale: Leaf
    padding: int = struct.field(pytree_node=False, default=0)

    @property
    def kind(self) -> str:
        return "int8" if self.codes.dtype == jnp.int8 else "int4"

    def decoded(self) -> Float[Array, "*L I O"]:
        """The matrix in the scale's dtype."""
        if self.kind == "int8":
            codes = self.codes.astype(self.scale.dtype)
        else:
            codes = unpack_nibbles(self.codes).astype(self.scale.dtype) - jnp.asarray(
                8, self.scale.dtype
            )
            codes = codes[..., : codes.shape[-2] - self.padding, :]
        *lead, inputs, outputs = codes.shape
        count = self.scale.shape[-2]
        if inputs % count:
            return codes * jnp.repeat(self.scale, -(-inputs // count), axis=-2)[..., :inputs, :]
        groups = codes.reshape(*lead, count, -1, outputs)
        return (groups * self.scale[..., None, :]).reshape(*lead, inputs, outputs)


def _group(inputs: int) -> int:
    """Choose how many inputs share a scale.

    Their number divides 128 and the inputs. Where that would be less than `LEAST_GROUP`, groups are
    equal parts of at most 128 inputs, of which the last may be shorter.
    """
    group = math.gcd(inputs, WEIGHT_GROUP)
    return group if group >= LEAST_GROUP else -(-inputs // -(-inputs // WEIGHT_GROUP))


@functools.partial(jax.jit, static_argnames="bits")
def code_weight(weight: Float[Array, "*L I O"], bits: int) -> CodedWeight:
    """Code a matrix in 8 or 4 bits.

    Args:
        weight: the matrix, of any width.
        bits: 8 or 4.

    Returns:
        Codes and scales. A group of zeros has scale 0.

    Raises:
        UserError: for other bits.
    """
    *lead, inputs, outputs = weight.shape
    if bits not in (4, 8):
        raise UserError(f"bits={bits}; weights are coded in 8 or 4 bits")
    limit, group = 2 ** (bits - 1) - 1, _group(inputs)
    padded = _pad(weight.astype(jnp.float32), -inputs % group)
    groups = padded.reshape(*lead, -1, group, outputs)
    scale = (jnp.abs(groups).max(-2) / limit).astype(weight.dtype)
    # Codes are those of the scale as it is stored, rounded to the weight's dtype.
    divisor = scale.astype(jnp.float32)[..., None, :]
    codes = jnp.round(groups / jnp.where(divisor > 0, divisor, 1.0))
    codes = jnp.clip(codes, -limit, limit).reshape(padded.shape)[..., :inputs, :]
    if bits == 8:
        return CodedWeight(codes=codes.astype(jnp.int8), scale=scale)
    padding = -inputs % WORD
    words = pack_nibbles((_pad(codes, padding) + 8).astype(jnp.uint32))
    return CodedWeight(codes=words, scale=scale, padding=padding)


def _pad(x: Float[Array, "*L I O"], inputs: int) -> Float[Array, "*L P O"]:
    """Append `inputs` inputs of zeros."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, inputs), (0, 0)]) if inputs else x


def place_codes(weight: CodedWeight, sharding: NamedSharding) -> CodedWeight:
    """Place a coded matrix as its decoded matrix would be.

    Where devices share out a group's inputs, each has its scale: the decoded matrix stays the same.

    Args:
        weight: the coded matrix.
        sharding: the placement of the decoded matrix.

    Returns:
        The coded matrix on these devices.

    Raises:
        UserError: where a device's share would cut a word of eight codes.
    """
    codes, scale = weight.codes, weight.scale
    axes = (*sharding.spec, *[None] * codes.ndim)[codes.ndim - 2]
    axes = (axes,) if isinstance(axes, str) else axes or ()
    parts = math.prod(sharding.mesh.shape[axis] for axis in axes)
    rows = codes.shape[-2]
    if rows % parts or (parts > 1 and weight.padding):
        raise UserError(
            f"{parts} devices cannot share out {rows} rows of codes of {weight.kind} weights"
        )
    if parts > 1:
        inputs = rows * (1 if weight.kind == "int8" else WORD)
        group = -(-inputs // scale.shape[-2])
        shared = math.gcd(group, inputs // parts)  # inputs of a scale that lie on one device
        scale = scale[..., np.arange(0, inputs, shared) // group, :]
    return jax.device_put(weight.replace(codes=codes, scale=scale), sharding)
