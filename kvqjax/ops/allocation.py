"""How much a body's fields take: their blocks, bits and bytes, and the empty arrays."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvqjax.ops import head_major, lines
from kvqjax.ops.layout import Field, Stored, is_half, split_bits
from kvqjax.ops.xla import cut_at, floor_divide

__all__ = ["allocate", "array_bytes", "block_tokens", "leading_slots", "logical_bits", "number_bits", "spans_of"]


def block_tokens(fields: list[Field]) -> int:
    """Tokens after which every field starts a fresh block: what a body is allocated and read in multiples of."""
    sizes = [f.plane(part) * 32 // part for f in fields if f.packed for part in split_bits(f.bits)]
    return math.lcm(256, *sizes, *(f.group for f in fields))


def logical_bits(field: Field) -> float:
    """Stored bits per token of this field, without padding; the compute dtype counts as 16 bits until it is known."""
    if field.packed:
        return float((head_major.stored_bits(field.bits) if field.head_major else field.bits) * field.width)
    dtype = "bfloat16" if field.dtype == "compute" else field.dtype
    return 8 * jnp.dtype(dtype).itemsize * field.width / field.group


def number_bits(dtype) -> int:
    """Bits of one stored number. XLA packs numbers that are narrower than a byte; `itemsize` counts a byte for each."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 8 * dtype.itemsize


def array_bytes(tree) -> int:
    """Count the bytes of an array, or of all arrays of a pytree, live or abstract, on all devices together.

    Two int4 numbers share a byte, whatever an array's `nbytes` says: this is what the device's memory holds."""
    return sum(-(-math.prod(x.shape) * number_bits(x.dtype) // 8) for x in jax.tree.leaves(tree))


def allocate(field: Field, lead: tuple[int, ...], slots: int) -> Stored:
    """Zeroed arrays for `slots` tokens, with `lead` = (L, B) in front."""
    if field.head_major:
        return head_major.allocate(field, lead, slots)
    if field.packed:
        return tuple(jnp.zeros((*lead, *_words(field, slots, part)), jnp.uint32) for part in split_bits(field.bits))
    dtype = "uint16" if is_half(field.dtype) else field.dtype
    if field.kind == "token":
        return (jnp.zeros((*lead, field.width, slots), dtype),)
    return (jnp.zeros((*lead, slots // field.group, field.width), dtype),)


def _words(field: Field, slots: int, bits: int) -> tuple[int, ...]:
    """The shape of one row's words of one plane set."""
    if field.kind == "lines":
        return lines.shape(field.heads, field.width // field.heads, bits, slots)
    plane = field.plane(bits)
    if field.kind == "stripes":
        return slots * bits // (32 * plane), field.width, plane
    return (field.width, slots * bits // 32) if field.along_lanes else (slots * bits // 32, field.width)


def leading_slots(field: Field, stored: Stored, slots: int, count: int) -> Stored:
    """The first `count` of a body's `slots` slots, both static and `count` whole blocks, as they are stored."""
    axis = field.slots_axis
    return tuple(jax.lax.slice_in_dim(x, 0, x.shape[axis] * count // slots, axis=axis) for x in stored)


def spans_of(
    field: Field, stored: Stored, slots: int, layer, rows: Int[Array, " n"], first: Int[Array, " n"], size: int
) -> Stored:
    """Cut `size` of a body's `slots` slots out of each of `rows`, from slot `first` on, both whole blocks: arrays as
    they are stored, [1, n, ...]."""
    axis = field.slots_axis

    def cut(x):
        each = slots // x.shape[axis]  # slots of an entry
        shape, start = [1, 1, *x.shape[2:]], [layer, 0, *[0] * (x.ndim - 2)]
        shape[axis] = size // each

        def one(row, slot):
            begin = list(start)
            begin[1], begin[axis] = row, floor_divide(slot, each)
            return cut_at(x, tuple(begin), tuple(shape))

        return jax.vmap(one, out_axes=1)(rows, first)[:, :, 0]

    return tuple(map(cut, stored))
