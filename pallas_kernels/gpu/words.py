"""Run code on the registers of a Hopper warpgroup, where Pallas has no operation for it.

A 32-bit register of an array in WGMMA's layout holds two neighbours of a row, 16 bits each.
Functions on such registers are written once, for any values with &, |, << and >>. Here they become
instructions. In tests/gpu_simulator.py they run on numpy's uint32."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

HALF = 32  # rows of words: the tokens of a plane, half the rows of a product
# The layout of [32, N] that spreads it over the threads as WGMMA's layout spreads [64, N]. The last
# two of the four warps hold what the first two hold.
TWICE = plgpu.Layout.TILED(
    plgpu.Tiling(((HALF, 8), (16, 8), (8, 8), (2,))),
    warp_dims=(plgpu.Replicated(2), -7),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


def _i32():
    return ir.IntegerType.get_signless(32)


@dataclasses.dataclass(frozen=True)
class _Word:
    """A register of 32 bits."""

    value: Any

    def _with(self, operation, other) -> "_Word":
        other = other.value if isinstance(other, _Word) else mgpu.c(other, _i32())
        return _Word(operation(self.value, other))

    def __and__(self, other):
        return self._with(arith.andi, other)

    def __or__(self, other):
        return self._with(arith.ori, other)

    def __lshift__(self, other):
        return self._with(arith.shli, other)

    def __rshift__(self, other):
        return self._with(arith.shrui, other)


def _permute(low: _Word, high: _Word, selector) -> _Word:
    """Pick four of the eight bytes of two words: nibble i of the selector's lower half names byte i
    of the result."""
    if not isinstance(selector, _Word):
        selector = _Word(mgpu.c(selector, _i32()))
    return _Word(mgpu.utils.prmt(low.value, high.value, selector.value))


def packed(
    change: Callable, dtype, *arrays: jax.Array, scalars: tuple = ()
) -> tuple[jax.Array, ...]:
    """Apply a function of 32-bit words to every register of arrays.

    Args:
        change: `change(permute, *words, *scalars)` returns a tuple of words. `words` has a register
            of each array, with two numbers.
        dtype: The dtype of the results, uint16 or bfloat16.
        arrays: Arrays of 16-bit numbers in WGMMA's layout, all of one shape.
        scalars: uint32 numbers that all registers get.

    Returns:
        An array of that shape for each word that `change` returns."""
    layout, shape = plgpu.Layout.WGMMA, arrays[0].shape
    # The declaration below needs the number of results before any register is there.
    probe = change(_probe, *[np.zeros((), np.uint32)] * (len(arrays) + len(scalars)))
    kinds = (layout,) * len(arrays) + (plgpu.Layout.WG_SPLAT(()),) * len(scalars)

    @plgpu.inline_mgpu(
        arg_types=kinds,
        return_type=(plgpu.ShapeDtypeStruct(shape, dtype, layout=layout),) * len(probe),
    )
    def apply(_, *operands):
        i16 = ir.IntegerType.get_signless(16)
        pair = ir.VectorType.get((2,), i16 if dtype == jnp.uint16 else ir.BF16Type.get())
        operands, scalar_words = (
            operands[: len(arrays)],
            [_Word(x.registers.item()) for x in operands[len(arrays) :]],
        )
        results = [np.empty_like(operands[0].registers) for _ in probe]
        for index in np.ndindex(operands[0].registers.shape):
            words = [_Word(mgpu.utils.bitcast(x.registers[index], _i32())) for x in operands]
            for result, word in zip(results, change(_permute, *words, *scalar_words), strict=True):
                result[index] = mgpu.utils.bitcast(word.value, pair)
        signed = False if dtype == jnp.uint16 else None
        return tuple(
            mgpu.FragmentedArray(_registers=x, _layout=operands[0].layout, _is_signed=signed)
            for x in results
        )

    return apply(*arrays, *scalars)


def _probe(low, high, selector):
    """Stand in for `_permute` where only the number of results matters."""
    del high, selector
    return low


def half(words: jax.Array, upper, layout) -> jax.Array:
    """Take the lower or the upper halves of 32-bit words, by one permutation for two words.

    Args:
        upper: 0 for the lower halves, 1 for the upper ones; may be a number in a register.

    Returns:
        The halves, uint16, in the same layout."""

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct(words.shape, jnp.uint16, layout=layout),
    )
    def narrow(_, words, selector):
        i64, pair = (
            ir.IntegerType.get_signless(64),
            ir.VectorType.get((2,), ir.IntegerType.get_signless(16)),
        )
        selector, registers = _Word(selector.registers.item()), np.empty_like(words.registers)
        for index, register in np.ndenumerate(words.registers):
            bits64 = mgpu.utils.bitcast(register, i64)
            first, second = (
                _Word(arith.trunci(_i32(), x))
                for x in (bits64, arith.shrui(bits64, mgpu.c(32, i64)))
            )
            registers[index] = mgpu.utils.bitcast(_permute(first, second, selector).value, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=False)

    # 0x5410 picks bytes 0 and 1 of both words, 0x7632 bytes 2 and 3.
    return narrow(words, (0x5410 + 0x2222 * jnp.asarray(upper)).astype(jnp.uint32))


def twice(halves: jax.Array, bits: int, first=0) -> jax.Array:
    """Put numbers and the same numbers shifted further one below the other. No number moves between
    threads.

    Args:
        halves: 16-bit numbers [32, N] in the layout TWICE.
        bits: By how many bits the second ones are shifted to the right, more than the first ones.
        first: By how many bits the first ones are shifted; may be a number in a register.

    Returns:
        The first numbers, then the second ones, [64, N] uint16 in WGMMA's layout. A shift moves
        bits of the neighbour in the register to the upper bits of a number."""
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(TWICE, plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((2 * HALF, halves.shape[1]), jnp.uint16, layout=layout),
    )
    def rename(_, halves, first):
        # 1 in the threads of the last two of a warpgroup's four warps, which hold the last 32 of 64
        # rows.
        in_second_half = arith.divui(
            arith.remui(mgpu.utils.thread_idx(), mgpu.c(128, _i32())), mgpu.c(64, _i32())
        )
        further = arith.muli(in_second_half, mgpu.c(bits, _i32()))
        shift = _Word(arith.addi(first.registers.item(), further))
        registers = np.empty_like(halves.registers)
        for index, register in np.ndenumerate(halves.registers):
            shifted_word = _Word(mgpu.utils.bitcast(register, _i32())) >> shift
            registers[index] = mgpu.utils.bitcast(shifted_word.value, register.type)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=layout.to_mgpu(), _is_signed=False
        )

    return rename(halves, jnp.asarray(first).astype(jnp.uint32))


def beside(*arrays: jax.Array) -> jax.Array:
    """Put arrays side by side, which renames registers and moves nothing.

    Args:
        arrays: [M, N] each in WGMMA's layout, of one dtype.

    Returns:
        [M, the sum of all N] in WGMMA's layout."""
    layout = plgpu.Layout.WGMMA
    shape = arrays[0].shape[0], sum(x.shape[1] for x in arrays)

    @plgpu.inline_mgpu(
        arg_types=(layout,) * len(arrays),
        return_type=plgpu.ShapeDtypeStruct(shape, arrays[0].dtype, layout=layout),
    )
    def join(_, *parts):
        registers = np.concatenate([x.registers for x in parts], axis=1)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=parts[0].layout, _is_signed=parts[0].is_signed
        )

    return join(*arrays)
