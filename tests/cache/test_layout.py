"""Packed storage: what is written is read back, words are cleared first, planes follow the stated
layout."""

import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned

from kvqjax.ops.layout import Field, block_tokens
from kvqjax.ops.packing.base import split_bits, unpack

CODES = [*((bits, "planes") for bits in (1, 2, 3, 4, 6, 8, 12)), (6, "columns")]
FOR_CPUS = [(bits, form) for form in ("stripes", "lines") for bits in (1, 2, 3, 4, 8)]


def field_of(form: str, bits: int) -> Field:
    """One of 64 channels where a word holds several, else of 8."""
    shape = {"width": 64 if form == "lines" else 8, "heads": 2 if form in ("lines", "heads") else 0}
    return Field(
        kind="codes" if bits else "plain",
        role="payload",
        bits=bits,
        dtype="float32",
        form=form,
        **shape,
    )


@pytest.mark.smoke
@pytest.mark.parametrize(("bits", "form"), thinned([*CODES, *FOR_CPUS], 8))
def test_codes_come_back_after_overwriting(bits, form):
    rng = np.random.default_rng(bits)
    field = field_of(form, bits)
    packing = field.packing
    slots, width = block_tokens([field]), field.width
    stored, want = packing.allocate((2, 2), slots), np.zeros((2, 2, slots, width), np.uint32)
    for size in (1, 32, 64, 128, 1, 32, 128):
        layer, row, token = rng.integers(2), rng.integers(2), rng.integers(slots // size) * size
        tile = rng.integers(0, 2**bits, (size, width)).astype(np.uint32)
        want[layer, row, token : token + size] = tile
        at = jnp.int32(layer), jnp.int32(row)
        stored = packing.write(stored, at, jnp.int32(token), jnp.asarray(tile))
    for layer in range(2):
        np.testing.assert_array_equal(packing.read(stored, layer, 0, slots), want[layer])
    assert sum(a.size for a in stored) * 32 == 2 * 2 * slots * width * bits, (
        "packed words hold exactly the stated bits"
    )


def test_a_plane_is_32_consecutive_tokens():
    packing = Field(kind="codes", width=1, role="payload", bits=2).packing
    stored = packing.allocate((1, 1), 512)
    at = jnp.int32(0), jnp.int32(0)
    tile = jnp.full((32, 1), 3, jnp.uint32)
    (words,) = packing.write(stored, at, jnp.int32(64), tile)
    np.testing.assert_array_equal(words[0, 0, :32, 0], np.full(32, 3 << 4))
    assert int(unpack(words, 2).sum()) == 96


def test_a_stripe_is_a_channel_of_1024_tokens():
    """Of 4 bits, 128 tokens side by side; the next ones are the next bits of the same words."""
    packing = Field(kind="codes", form="stripes", width=2, role="payload", bits=4).packing
    tile = jnp.asarray([[3, 9]] * 32, jnp.uint32)
    token = jnp.int32(1024 + 128 + 96)
    (words,) = packing.write(
        packing.allocate((1, 1), 2048), (jnp.int32(0), jnp.int32(0)), token, tile
    )
    assert words.shape == (1, 1, 2, 2, 128)
    np.testing.assert_array_equal(words[0, 0, 1, :, 96:], np.repeat([[3 << 4], [9 << 4]], 32, 1))
    assert np.count_nonzero(words) == 2 * 32


def test_a_line_is_32_tokens_of_a_word_of_channels():
    """Of 4 bits and 16 channels of a head, the second word has the channels 8 to 15."""
    packing = Field(kind="codes", form="lines", width=32, heads=2, role="payload", bits=4).packing
    tile = jnp.zeros((1, 32), jnp.uint32).at[0, 16 + 9].set(5)
    (words,) = packing.write(
        packing.allocate((1, 1), 256), (jnp.int32(0), jnp.int32(0)), jnp.int32(64 + 7), tile
    )
    assert words.shape == (1, 1, 2, 8, 2, 32)
    assert words[0, 0, 1, 2, 1, 7] == 5 << 4
    assert np.count_nonzero(words) == 1


@pytest.mark.parametrize(
    ("kind", "tile"), [("group", (2, 6)), ("token", (6, 64)), ("plain", (64, 6))]
)
def test_unpacked_kinds_come_back(kind, tile):
    field = Field(
        kind=kind, width=6, role="scales", group=32 if kind == "group" else 1, dtype="float32"
    )
    packing = field.packing
    x = jnp.asarray(np.random.default_rng(0).normal(size=tile), jnp.float32)
    stored = packing.write(
        packing.allocate((1, 3), 256), (jnp.int32(0), jnp.int32(2)), jnp.int32(128), x
    )
    whole = np.asarray(packing.read(stored, 0, 0, 256))
    span = (
        (slice(None), slice(128, 192))
        if kind == "token"
        else slice(4, 6)
        if kind == "group"
        else slice(128, 192)
    )
    np.testing.assert_array_equal(whole[2][span], x)
    assert np.count_nonzero(whole) == x.size


def test_bits_and_refusals():
    assert [split_bits(b) for b in (1, 3, 6, 12)] == [(1,), (2, 1), (4, 2), (8, 4)]
    assert (
        Field(kind="group", width=10, role="scales", group=32, dtype="bfloat16").packing.token_bits
        == 5
    )
    with pytest.raises(ValueError, match="17 bits"):
        Field(kind="codes", width=1, role="payload", bits=17)


MANY = [("planes", 1), ("planes", 2), ("planes", 3), ("columns", 2), ("stripes", 3), ("stripes", 4), ("lines", 3),
        ("rows", 0), ("heads", 1), ("heads", 2), ("heads", 3), ("heads", 4), ("heads", 0)]  # fmt: skip


@pytest.mark.parametrize(("form", "bits"), thinned(MANY, 12))
def test_many_tokens_at_once_are_written_as_plane_by_plane(form, bits):
    """From any multiple of 32 on, up to the body's end, over what stood there; or not, where it is
    not wanted."""
    field = field_of(form, bits)
    packing = field.packing
    rng, slots, at = np.random.default_rng(bits), 2048, (0, 1)

    def tile(count):
        shape = count, field.width
        return jnp.asarray(
            rng.integers(0, 2**bits, shape) if bits else rng.normal(size=shape), jnp.float32
        )

    def plain(stored):
        return [np.asarray(x.astype(jnp.int8) if x.dtype == jnp.int4 else x) for x in stored]

    old = packing.allocate((1, 2), slots)
    for token, part in enumerate(jnp.split(tile(slots), slots // 32)):
        old = packing.write(old, at, token * 32, part)
    for count, token in ((512, 32), (1024, 992), (288, slots - 288), (slots, 0)):
        new, one = tile(count), old
        for number, part in enumerate(jnp.split(new, count // 32)):
            one = packing.write(one, at, token + number * 32, part)
        for wanted, expected in ((None, one), (jnp.asarray(True), one), (jnp.asarray(False), old)):
            many = packing.write(old, at, jnp.int32(token), new, wanted)
            for a, b in zip(plain(many), plain(expected), strict=True):
                np.testing.assert_array_equal(a, b)
