"""CommVQ's value codec: equal to the published encoder with the noise off, bits as stated, defined
at the edges."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvqjax.codecs import bits_per_value
from kvqjax.codecs.commvq_values import CommVQValues, choice_bits, fold, logits, normalise

DATA = Path(__file__).parents[1] / "data"


def published(bits):
    """Golden arrays and the codec's constants made of them."""
    golden = dict(np.load(DATA / f"golden_commvq_values_{bits}bit.npz"))
    constants = {name: jnp.asarray(golden[name]) for name in ("scale", "b1", "b2")}
    constants |= {
        "norm_weight": jnp.asarray(golden["norm_w"]),
        "norm_bias": jnp.asarray(golden["norm_b"]),
    }
    constants |= {name: jnp.asarray(golden[name].T) for name in ("w1", "w2")}
    constants["codebook"] = fold(jnp.asarray(golden["codebook"]), constants["scale"])
    return golden, constants


def codec_for(bits, golden, dtype="float32"):
    return CommVQValues(bits=bits, hidden=golden["b1"].shape[0], dtype=dtype).build(
        golden["v"].shape[-1]
    )


@pytest.mark.parametrize("bits", [1, 2])
def test_bits_and_decoded_values_equal_the_published_ones(bits):
    golden, constants = published(bits)
    codec = codec_for(bits, golden)
    assert {name: x.shape for name, x in constants.items()} == codec.needs
    tile = codec.encode(constants, jnp.asarray(golden["v"][0]))
    np.testing.assert_array_equal(tile["bits"], golden["bits"][0])
    decoded = np.asarray(codec.decode(constants, {name: x[None] for name, x in tile.items()}))
    assert np.abs(decoded - golden["decoded"]).max() <= 1e-5 * np.abs(golden["decoded"]).max()
    if "logits" in golden:
        unit, norm = normalise(jnp.asarray(golden["v"]), constants["scale"])
        assert np.allclose(norm, golden["prescale"][..., 0], rtol=1e-5)
        z = np.asarray(logits(constants, unit))
        assert np.abs(z - golden["logits"]).max() <= 2e-5 * np.abs(golden["logits"]).max()


@pytest.mark.parametrize("bits", [1, 2])
def test_stored_bits_are_the_stated_bits(bits):
    codec = CommVQValues(bits=bits).build(1024)
    assert codec.fields["bits"].packing.token_bits == bits * 1024
    assert bits_per_value(codec) == bits + 16 / 1024


@pytest.mark.parametrize(("bits", "megabytes", "millions"), [(1, 2, 6.30), (2, 4, 20.98)])
def test_codebook_sizes_of_table_8_and_encoder_sizes(bits, megabytes, millions):
    shapes = CommVQValues(bits=bits).build(1024).needs
    assert np.prod(shapes["codebook"]) * 2 / 2**20 == megabytes
    encoder = sum(
        np.prod(shapes[name]) for name in ("norm_weight", "norm_bias", "w1", "b1", "w2", "b2")
    )
    assert round(encoder / 1e6, 2) == millions


def test_equal_values_give_equal_words_through_the_tile_shape():
    """Encoding is a function of the [unit, W] tile alone: the same rows elsewhere in a batch of
    tiles, jitted or looped over as a flush and a prefill do, give the same bits and gains."""
    golden, constants = published(2)
    codec = codec_for(2, golden)
    x = jax.random.normal(jax.random.key(0), (4, 32, 48)) * 3 + 1
    one = jax.jit(lambda tile: codec.encode(constants, tile))
    many = jax.jit(lambda tiles: jax.lax.map(lambda tile: codec.encode(constants, tile), tiles))(x)
    for index, tile in enumerate(x):
        for name, value in one(tile).items():
            np.testing.assert_array_equal(value, many[name][index])


def test_gain_restores_the_norm_of_the_scaled_value():
    """|v_hat / (s + eps)| = |v / (s + eps)|, to the gain's bfloat16 rounding."""
    golden, constants = published(1)
    codec = codec_for(1, golden, dtype="bfloat16")
    v = jnp.asarray(golden["v"][0])
    decoded = codec.decode(constants, codec.encode(constants, v))
    lengths = [
        np.linalg.norm(np.asarray(x) / (golden["scale"] + 1e-6), axis=-1) for x in (v, decoded)
    ]
    np.testing.assert_allclose(lengths[1], lengths[0], rtol=2**-8)


def test_zero_and_infinite_values_are_defined_and_leave_their_neighbours_alone():
    golden, constants = published(1)
    codec = codec_for(1, golden)
    v = jnp.asarray(golden["v"][0])
    tile = codec.encode(constants, v.at[2].set(0.0).at[5, 1].set(jnp.inf))
    decoded, clean = (
        codec.decode(constants, tile),
        codec.decode(constants, codec.encode(constants, v)),
    )
    assert np.abs(decoded[2]).max() <= 1e-5 * golden["scale"].max()
    others = np.setdiff1d(np.arange(len(v)), [2, 5])
    np.testing.assert_array_equal(decoded[others], clean[others])


def test_choices_map_to_the_published_bits():
    np.testing.assert_array_equal(choice_bits(jnp.eye(4)), [1, 0, 0, 1, 1, 1, 0, 0])


@pytest.mark.parametrize(
    ("options", "message"), [({"bits": 5}, "bits=5"), ({"bits": 1, "dtype": "int8"}, "dtype")]
)
def test_bad_specs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CommVQValues(**options)
