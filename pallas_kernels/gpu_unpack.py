"""Packed words to bfloat16 codes in the registers of a Hopper warpgroup.

A tile is 64 rows of words: two blocks of the plane layout (`kvqjax.layout`). Plane i of it, 32 tokens of either block,
is the left operand of one product. Codes become 128 + c by or-ing c into the mantissa of bfloat16 128, two at a time,
without a conversion: the 16-bit halves of two words that a thread holds are put side by side, and then every plane
costs a mask and an or (one instruction), and some planes a shift. A bfloat16 has seven bits of mantissa, so two bits
may stay where they are in three places; they come out times 1, 4 or 16.
"""

import functools
import operator

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from kvqjax.pallas_kernels.gpu_parts import ROWS

__all__ = ["HALF", "MAGIC", "codes", "halves", "interleaved", "lift", "magic_bits"]

HALF = 32  # rows of words in a block: half the rows of one product
MAGIC = 128  # as a bfloat16 it counts in ones
# [2, 32] spread over the threads as ROWS spreads [64]
TWO_BLOCKS = mgpu.TiledLayout(
    plgpu.Tiling(((2, HALF), (16,), (8,), (1,))), warp_dims=(-5, -4), lane_dims=(-2, plgpu.Replicated(4)), vector_dim=-1
)


def halves(words, parts: int, part):
    """16-bit halves of the words, [64, N] uint16: both where a tile is one part, else the one that holds the part."""
    if parts == 1:
        return [(words >> jnp.uint32(shift)).astype(jnp.uint16) for shift in (0, 16)]
    return [(words >> (16 * part).astype(jnp.uint32)).astype(jnp.uint16)]


def _place(plane: int, bits: int) -> tuple[int, int, int]:
    """Which half holds a plane of a part, by how much to shift it, and what the codes then come out times."""
    half, bit = divmod(plane * bits, 16)
    shift = bit - bit % (7 // bits * bits)
    return half, shift, 1 << (bit - shift)


def lift(plane: int, bits: int) -> int:
    """What the codes of a plane come out times."""
    return _place(plane, bits)[2]


def codes(held, plane: int, bits: int):
    """MAGIC + lift * the codes of one plane of a part, [64, N] bfloat16, from `halves`."""
    half, shift, times = _place(plane, bits)
    return _magic(held[half], shift, ((1 << bits) - 1) * times)


def magic_bits(pair, shift: int, mask: int, *, right=operator.rshift, both=operator.and_, either=operator.or_):
    """Two 16-bit halves in 32 bits to two bfloat16 numbers; what the shift moves from one into the other is masked."""
    moved = right(pair, shift) if shift else pair
    return either(both(moved, mask * 0x10001), 0x43004300)


def _magic(half, shift: int, mask: int):
    """`magic_bits` of every register."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(half.shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def apply(_, half):
        i32, numbers = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())

        def constant(op):
            return lambda x, number: op(x, mgpu.c(number, i32))

        change = functools.partial(
            magic_bits, right=constant(arith.shrui), both=constant(arith.andi), either=constant(arith.ori)
        )
        registers = np.empty_like(half.registers)
        for index, register in np.ndenumerate(half.registers):
            registers[index] = mgpu.utils.bitcast(change(mgpu.utils.bitcast(register, i32), shift, mask), numbers)
        return mgpu.FragmentedArray(_registers=registers, _layout=half.layout, _is_signed=None)

    return apply(half)


def interleaved(factors):
    """Of [2, 32] numbers in shared memory, one for each row of a plane's product: [64]."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((2 * HALF,), factors.dtype, layout=ROWS)
    )
    def load(_, ref):
        two = mgpu.FragmentedArray.load_untiled(ref, layout=TWO_BLOCKS, is_signed=False, optimized=False)
        rows = ROWS.to_mgpu()
        registers = two.registers.reshape(rows.registers_shape((2 * HALF,)))
        return mgpu.FragmentedArray(_registers=registers, _layout=rows, _is_signed=False)

    return load(factors)
