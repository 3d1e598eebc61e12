"""The GPU kernels' bodies, simulated on the CPU, against decoding everything and attending exactly.

Bound: as for the TPU kernel (`kernel_cases.near`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_simulator import install
from kernel_cases import Case, agree, make_body, make_query, near, oracle

from kvqjax.pallas_kernels import dispatch, gpu, gpu_call, gpu_exact, gpu_kernel, gpu_parts, gpu_unpack, support

# A last tile that is moved back into the body, and two query tokens; a tile in two steps, and columns of padding.
GROUPS = {"key_group": 128, "value_group": 128, "kv_heads": 1, "head_dim": 128, "group": 4}
FOUR = Case(key_bits=4, value_bits=4, length=2, slots=768, **GROUPS)
TWO = Case(key_bits=2, value_bits=2, slots=1024, **GROUPS)


def magic(half, shift: int, mask: int):
    """What `magic_bits` does to a register, on every number by itself."""
    moved = (half >> jnp.uint16(shift)) & jnp.uint16(mask)
    return jax.lax.bitcast_convert_type(moved | jnp.uint16(0x4300), jnp.bfloat16)


@pytest.fixture
def simulated(monkeypatch):
    install(monkeypatch, gpu_call, gpu_exact, gpu_kernel, gpu_parts)
    monkeypatch.setattr(gpu_unpack, "interleaved", lambda factors: factors[...].reshape(64))
    monkeypatch.setattr(gpu_unpack, "_magic", magic)


def inputs(case: Case):
    body, key, value = make_body(case)
    q, start, stop = make_query(case)
    return q.astype(jnp.bfloat16).astype(jnp.float32), body, key, value, start, stop


@pytest.mark.parametrize(("case", "splits"), [(FOUR, 2), (TWO, 1)], ids=str)
def test_kernel_equals_the_oracle(simulated, case, splits):
    q, body, key, value, start, stop = inputs(case)
    want = oracle(q, key, value, start, stop)
    with jax.disable_jit():
        got = gpu.packed_attention(q, body, 1, start, stop, case.spec, splits=splits)
    near(got, want, key, value, q)


def test_exact_kernel_equals_the_oracle(simulated):
    q, _, key, value, start, stop = inputs(FOUR)
    key, value = (x[:, :320].astype(jnp.bfloat16) for x in (key, value))
    stop = jnp.minimum(stop, 317).at[1].set(0)  # row 1 sees nothing
    want = oracle(q, *(x.astype(jnp.float32) for x in (key, value)), start, stop)
    stacked = (jnp.stack([jnp.zeros_like(x), x]).reshape(2, 2, 320, 128) for x in (key, value))
    with jax.disable_jit():
        got = gpu_exact.exact_attention(q.astype(jnp.bfloat16), *stacked, 1, start, stop, splits=3)
    near(got, want, key.astype(jnp.float32), value, q)
    np.testing.assert_array_equal(got.out[1], 0)


@pytest.mark.parametrize("bits", [2, 4])
def test_registers_hold_what_the_numbers_say(bits):
    """The arithmetic on 32-bit registers equals that on their two halves, which the simulator runs."""
    halves = np.random.default_rng(0).integers(0, 2**16, 64, np.uint16)
    for plane in range(16 // bits):
        half, shift, times = gpu_unpack._place(plane, bits)
        mask = ((1 << bits) - 1) * times
        numbers = magic(jnp.asarray(halves), shift, mask)
        registers = gpu_unpack.magic_bits(halves.view(np.uint32), shift, mask)
        np.testing.assert_array_equal(registers.view(np.uint16), np.asarray(numbers).view(np.uint16))
        codes = (np.asarray(numbers, np.float32) - gpu_unpack.MAGIC) / times
        np.testing.assert_array_equal(codes, halves >> plane * bits & (1 << bits) - 1)
        assert half == 0


def threads(layout, array):
    """What every warp and lane holds of an array in a tiled layout: [4, lanes that differ, registers]."""
    for tile in layout.tiling.tiles:
        lead, body = array.shape[: -len(tile)], array.shape[-len(tile) :]
        split = array.reshape(*lead, *(n for size, t in zip(body, tile, strict=True) for n in (size // t, t)))
        axes = range(len(lead), split.ndim)
        array = split.transpose(*range(len(lead)), *axes[::2], *axes[1::2])
    apart = [axis for axis in (*layout.warp_dims, *layout.lane_dims) if isinstance(axis, int)]
    return np.moveaxis(array, apart, range(len(apart))).reshape(4, 8, -1)


def test_two_blocks_lie_in_the_registers_of_rows():
    """`interleaved` only renames registers: thread by thread both layouts hold the same tokens in the same order."""
    token = np.arange(64)
    rows, two = gpu_parts.ROWS.to_mgpu(), gpu_unpack.TWO_BLOCKS
    assert (rows.lane_dims[1:], rows.vector_dim) == (two.lane_dims[1:], two.vector_dim)
    np.testing.assert_array_equal(threads(two, token.reshape(2, 32)), threads(rows, token))


def test_refuses_what_it_does_not_read():
    q, body, _, _, start, stop = inputs(FOUR)
    short = jax.tree.map(lambda x: x[:, :, : x.shape[2] // 3], body)
    short = short._replace(value_scale=body.value_scale[..., :256], value_low=body.value_low[..., :256])
    with pytest.raises(ValueError, match="256 slots; this kernel reads 512"):
        gpu.packed_attention(q, short, 1, start, stop, FOUR.spec)
    case = Case(**{**vars(FOUR), "key_bits": 8, "value_bits": 8})
    q, body, _, _, start, stop = inputs(case)
    with pytest.raises(ValueError, match="2 or 4 for both"):
        gpu.packed_attention(q, body, 1, start, stop, case.spec)


def test_dispatch_waits_for_results_and_guards_by_platform(monkeypatch):
    """A kernel that has not run is not taken; one that has is, behind a guard that gives a CPU the reference. Lowering
    for CUDA needs no GPU, plugin or ptxas, and checks layouts, swizzles and the shapes of products."""
    case = Case(**{**vars(TWO), "target": "sm90"})
    assert support.lookup("kivi 2 bits", "sm90") == "compiled"
    assert dispatch.path(case.spec, 8, case.slots) == "reference"
    monkeypatch.setitem(support.ROWS["kivi 2 bits"], "sm90", "correct")
    assert dispatch.path(case.spec, 8, case.slots) == "gpu"
    assert dispatch.path(case.spec, 16, case.slots) == "reference"
    assert dispatch.path(case.spec, 8, gpu.tile_tokens(2) - 512) == "reference"
    q, body, key, value, start, stop = inputs(case)
    call = jax.jit(lambda *args: dispatch.packed_attention(*args, case.spec))
    arguments = q, body, jnp.int32(1), start, stop
    agree(call(*arguments), oracle(q, key, value, start, stop), key, value, q)
    assert "mosaic_gpu" in call.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
