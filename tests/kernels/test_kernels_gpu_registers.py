"""Assumptions of the GPU kernels about registers: the order of `prmt`'s operands, and every place
that gives registers another meaning (`gpu.words`). Layouts are followed here by hand, thread by
thread."""

import itertools
import re

import numpy as np
import pytest
from gpu_simulator import permute
from jax._src.interpreters import mlir
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from kvqjax.pallas_kernels.gpu import words as gpu_words

pytestmark = pytest.mark.smoke  # what a newer JAX may change

THREADS = 128
WGMMA = plgpu.Layout.WGMMA


def emitted(*names: str) -> tuple[str, list[str]]:
    """The instruction that `_permute` emits for its arguments so named, and the names in the order
    of its operands."""
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            words = {
                name: gpu_words.mgpu.c(number, gpu_words._i32())
                for number, name in enumerate(names, 70)
            }
            gpu_words._permute(*(gpu_words._Word(words[name]) for name in names))
        text = str(module)
    values = {
        value: names[int(number) - 70]
        for value, number in re.findall(r"(%\w+) = arith.constant (\d+) :", text)
    }
    (asm, operands) = re.search(
        r'llvm.inline_asm[^"]*"([^"]*)", "[^"]*" (%[\w, %]+)', text
    ).groups()
    return asm, [values[operand.strip()] for operand in operands.split(",")]


def test_prmt_takes_the_low_word_first():
    """PTX numbers the bytes of its first source 0 to 3 and of its second 4 to 7. JAX's helper calls
    its first parameter
    `high`: should it ever follow that name, this fails."""
    asm, operands = emitted("low", "high", "selector")
    assert re.fullmatch(r"prmt\.b32 \$0, \$1, \$2, \$3;", asm)
    assert operands == ["low", "high", "selector"]
    low, high = np.uint32(0x33221100), np.uint32(0x77665544)
    assert permute(low, high, 0x7654) == high
    assert permute(low, high, 0x3210) == low


@pytest.mark.parametrize("upper", [0, 1])
def test_half_picks_the_same_half_of_both_words(upper):
    """As `half` does: a register of two words is taken for one of 64 bits, whose lower half is the
    first word."""
    words = np.asarray([0xAAAA1111, 0xBBBB2222], np.uint32)
    (both,) = words.view(np.uint64)
    first, second = np.uint32(both & np.uint64(0xFFFFFFFF)), np.uint32(both >> np.uint64(32))
    found = np.asarray([permute(first, second, 0x5410 + 0x2222 * upper)], np.uint32).view(np.uint16)
    np.testing.assert_array_equal(found, words >> np.uint32(16 * upper) & np.uint32(0xFFFF))


def tiled(x: np.ndarray, tiles) -> np.ndarray:
    """An array cut into tiles, and these into smaller ones: the last axes become numbers of tiles,
    then a tile."""
    for tile in tiles:
        lead, cut = x.shape[: -len(tile)], x.shape[-len(tile) :]
        split = list(
            itertools.chain.from_iterable((n // t, t) for n, t in zip(cut, tile, strict=True))
        )
        x = x.reshape(*lead, *split)
        begin, count = len(lead), len(tile)
        order = [begin + 2 * i for i in range(count)] + [begin + 2 * i + 1 for i in range(count)]
        x = x.transpose(*range(begin), *order)
    return x


def indices(number: int, sizes: list[int]) -> list[int]:
    """A number's digits, the last of `sizes` changing fastest."""
    return [int(i) for i in np.unravel_index(number, sizes)]


def held(layout, shape: tuple[int, int]) -> np.ndarray:
    """[threads, registers.., 2]: which element of an array lies where."""
    layout = layout.to_mgpu()
    x = tiled(np.arange(np.prod(shape)).reshape(shape), layout.tiling.tiles)
    rows = []
    for thread in range(THREADS):
        warp, lane = divmod(thread, 32)
        place: dict[int, int] = {}
        for dims, number in ((layout.warp_dims, warp), (layout.lane_dims, lane)):
            sizes = [d.times if hasattr(d, "times") else x.shape[d] for d in dims]
            place |= {
                d: i
                for d, i in zip(dims, indices(number, sizes), strict=True)
                if not hasattr(d, "times")
            }
        axes = [place.get(axis - x.ndim) for axis in range(x.ndim)]
        rows.append(x[tuple(slice(None) if i is None else slice(i, i + 1) for i in axes)])
    return np.stack(rows)


def test_layouts_followed_by_hand_are_wgmmas():
    """Thread 0 begins with row 0, columns 0 and 1; a row has four threads; a warp 16 rows."""
    found = held(WGMMA, (64, 8)).reshape(THREADS, -1, 2)
    assert sorted(found.reshape(-1)) == list(range(512))
    assert found[0].tolist() == [[0, 1], [64, 65]]
    assert found[1][0].tolist() == [2, 3]
    assert found[32][0].tolist() == [128, 129]


@pytest.mark.parametrize("columns", [64, 128])
def test_twice_gives_the_upper_warps_the_second_plane(columns):
    """`twice` takes registers of [32, N] in TWICE for those of [64, N]: rows 0 to 31 in the first
    two warps, and again as rows 32 to 63 in the last two, where it shifts them."""
    source, target = held(gpu_words.TWICE, (32, columns)), held(WGMMA, (64, columns))
    source, target = (x.reshape(THREADS, -1, 2) for x in (source, target))
    second = (np.arange(THREADS) // 64)[:, None, None]
    np.testing.assert_array_equal(target, source + 32 * columns * second)
    shapes = (
        gpu_words.TWICE.to_mgpu().registers_shape((32, columns)),
        WGMMA.to_mgpu().registers_shape((64, columns)),
    )
    assert np.prod(shapes[0]) == np.prod(shapes[1])


@pytest.mark.parametrize("widths", [(64, 64), (8, 24, 96)])
def test_beside_joins_registers_along_columns(widths):
    """[64, 64] and [64, 64] as [64, 128]: registers of the left, then of the right, at axis 1."""
    total, first, parts = sum(widths), 0, []
    for width in widths:
        row, column = np.divmod(held(WGMMA, (64, width)), width)
        parts.append(total * row + first + column)
        first += width
    np.testing.assert_array_equal(np.concatenate(parts, axis=2), held(WGMMA, (64, total)))
    shapes = [WGMMA.to_mgpu().registers_shape((64, columns)) for columns in (*widths, total)]
    assert shapes[-1][1] == sum(shape[1] for shape in shapes[:-1])
    assert len({(shape[0], *shape[2:]) for shape in shapes}) == 1


def test_numbers_of_16_bits_share_a_register():
    """`packed` takes a register for 32 bits whatever 16-bit type it holds, and gives it back as
    another."""
    layout = WGMMA.to_mgpu()
    with mlir.make_ir_context(), ir.Location.unknown():
        i16, bf16 = ir.IntegerType.get_signless(16), ir.BF16Type.get()
        widths = {
            gpu_words.mgpu.utils.bitwidth(ir.VectorType.get((layout.vector_length,), t))
            for t in (i16, bf16)
        }
    assert widths == {32}
