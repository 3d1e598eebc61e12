"""The GPU kernels' code on 32-bit registers, run on numpy's integers, against what it is to
compute."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from gpu_simulator import packed, permute
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvqjax.pallas_kernels.gpu import lookup as gpu_lookup
from kvqjax.pallas_kernels.gpu import unpack as gpu_unpack


def words(seed: int, *shape: int) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(seed).integers(0, 2**16, shape, np.uint16))


def of_step(nibbles, step: int, bits: int) -> np.ndarray:
    """The codes of one step."""
    return np.asarray(nibbles) >> 4 * gpu_unpack.ORDER[bits][step] & (1 << bits) - 1


@pytest.mark.parametrize("later", [0, 1])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_nibbles_hold_every_other_plane(bits, later):
    """Step i of a quad is plane 2i, or `later` plane 2i + 1, of the eight planes that the halves
    hold."""
    first, second = words(0, 4, 64), words(1, 4, 64)
    halves = {2: [first], 3: [first, second], 4: [first, second]}[bits]
    change = functools.partial(gpu_unpack.to_nibbles, bits=bits, later=later)
    begin = 8 if bits == 3 else 0
    (nibbles,) = packed(change, jnp.uint16, *halves, scalars=(begin,) if begin else ())
    for step in range(gpu_unpack.STEPS):
        plane = 2 * step + later
        if bits == 4:
            want = np.asarray(halves[plane // 4]) >> 4 * (plane % 4) & 15
        else:
            want = np.asarray(first) >> 2 * plane & 3
        if bits == 3:
            want = want | (np.asarray(second) >> begin + plane & 1) << 2
        np.testing.assert_array_equal(of_step(nibbles, step, bits), want)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_come_out_as_numbers(monkeypatch, bits):
    monkeypatch.setattr(gpu_unpack, "packed", packed)
    nibbles = words(2, 4, 64)
    for step in range(gpu_unpack.STEPS):
        numbers = gpu_unpack.codes(nibbles, step, bits).astype(jnp.float32) - gpu_unpack.base(
            step, bits
        )
        np.testing.assert_array_equal(numbers, of_step(nibbles, step, bits))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_signposts_are_looked_up(monkeypatch, bits):
    monkeypatch.setattr(gpu_lookup, "packed", packed)
    signposts = jnp.asarray(np.sort(np.random.default_rng(3).normal(size=2**bits)), jnp.bfloat16)
    table, nibbles = gpu_lookup.table_words(signposts.astype(jnp.float32)), words(4, 4, 64)
    for step, found in enumerate(gpu_lookup.look_up(nibbles, table, bits)):
        np.testing.assert_array_equal(found, signposts[of_step(nibbles, step, bits)])


class Counted:
    """A word that counts what is done to it, and to what comes of it."""

    def __init__(self, log: list):
        self.log = log

    def __and__(self, other):
        return permuted(self, other, 0)

    __or__ = __lshift__ = __rshift__ = __and__


def permuted(word: Counted, *_):
    word.log.append(1)
    return Counted(word.log)


@pytest.mark.parametrize(("bits", "count"), [(2, 14), (3, 14), (4, 26)])
def test_operations_of_a_look_up(bits, count):
    """For eight numbers."""
    log: list = []
    word = Counted(log)
    assert len(gpu_lookup.to_signposts(permuted, word, *[word] * gpu_lookup.TABLE, bits=bits)) == 4
    assert len(log) == count


def test_permutation_takes_bytes():
    low, high = np.uint32(0x33221100), np.uint32(0x77665544)
    assert permute(low, high, 0x0426) == 0x00442266
    with pytest.raises(AssertionError, match="sign"):
        permute(low, high, 0x8000)


def test_a_register_holds_neighbours():
    """Functions on registers take the two numbers of one for neighbours in a row."""
    layout = plgpu.Layout.WGMMA.to_mgpu()
    assert (layout.vector_length, layout.tiling.tiles[-1]) == (2, (2,))
