"""CommVQ's key codec: equal to the published codes, bits as stated, defined at the edges."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvqjax.codecs import bits_per_value
from kvqjax.codecs.commvq_keys import (
    CommVQKeys,
    _at_once,
    _gathered,
    centre,
    group_pairs,
    nearest,
    ungroup_pairs,
)
from kvqjax.codecs.commvq_tpu import CHUNK, columns, summed_columns

GOLDEN = Path(__file__).parents[1] / "data" / "golden_commvq_keys.npz"


def from_theta(theta):
    """Published theta [C, R, 2L, g] (rows X_l, Y_l) to codebooks [R, C, L, 2g]."""
    theta = np.moveaxis(theta, 0, 1)
    return jnp.asarray(np.concatenate([theta[:, :, 0::2], theta[:, :, 1::2]], -1))


def random_book(seed, rounds=3, groups=2, levels=8, pairs=8):
    scale = 0.5 ** np.arange(rounds).reshape(-1, 1, 1, 1)
    book = np.random.default_rng(seed).normal(size=(rounds, groups, levels, 2 * pairs)) * scale
    return {"codebook": jnp.asarray(book / (2 * pairs), jnp.float32)}


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDEN))


def test_codes_and_decoded_keys_equal_the_published_ones(golden):
    codec = CommVQKeys(head_dim=128, rounds=4, dtype="float32").build(256)
    constants = {"codebook": from_theta(golden["theta"])}
    tile = codec.encode(constants, jnp.asarray(golden["k"][0]))
    assert np.allclose(tile["prescale"][0], golden["prescale"][0, :, 0], rtol=1e-6)
    codes = np.asarray(tile["codes"]).reshape(48, 4, 2, 2).astype(int)  # [n, R, A or B, head]
    codes = np.moveaxis(codes[:, :, 0] * 64 + codes[:, :, 1], 0, -1)
    clear = np.minimum.accumulate(golden["margin"], 0) > 2e-6
    assert clear.mean() > 0.95
    assert (codes == golden["codes"])[clear].all()
    same = (codes == golden["codes"]).all((0, 1))
    published = golden["decoded"][0].reshape(48, 2, 64, 2).swapaxes(-1, -2).reshape(48, 256)
    decoded = np.asarray(codec.decode(constants, {name: x[None] for name, x in tile.items()}))[0]
    assert np.abs(decoded - published)[same].max() <= 2e-6 * np.abs(published).max()


def test_the_factorised_search_finds_the_nearest_of_all_expanded_centres():
    rng = np.random.default_rng(1)
    book = rng.normal(size=(8, 12)).astype(np.float32)
    x = rng.normal(size=(200, 12)).astype(np.float32) * 2
    pairs = np.arange(64)
    expanded = np.asarray(
        centre(jnp.asarray(book), jnp.asarray(pairs // 8), jnp.asarray(pairs % 8))
    )
    real, imag = np.split(book, 2, axis=-1)
    block = real[3] + 1j * imag[3] + 1j * (real[5] + 1j * imag[5])
    np.testing.assert_allclose(
        expanded[3 * 8 + 5], np.concatenate([block.real, block.imag]), atol=1e-6
    )
    distance = ((x[:, None].astype(np.float64) - expanded[None]) ** 2).sum(-1)
    a, b = nearest(jnp.asarray(x), jnp.asarray(book))
    assert (np.asarray(a) * 8 + np.asarray(b) == distance.argmin(-1)).all()


@pytest.mark.parametrize(
    ("head_dim", "rounds", "stated"), [(128, 11, 66 / 64), (128, 21, 126 / 64), (64, 5, 30 / 32)]
)
def test_stored_bits_are_the_stated_bits(head_dim, rounds, stated):
    """Table 8's 1.03 and 1.97 bits at head_dim 128, plus 16 bits of prescale for a token."""
    codec = CommVQKeys(head_dim=head_dim, rounds=rounds).build(8 * head_dim)
    assert codec.fields["codes"].packing.token_bits / codec.width == stated
    assert bits_per_value(codec) == stated + 16 / codec.width


@pytest.mark.parametrize(("rounds", "megabytes"), [(11, 2.75), (21, 5.25)])
def test_codebooks_are_half_of_table_8(rounds, megabytes):
    """Table 8 counts full 2x2 blocks in 16 bits; real and imaginary parts are half of their
    entries."""
    shape = CommVQKeys(head_dim=128, rounds=rounds).build(1024).needs["codebook"]
    assert np.prod(shape) * 2 / 2**20 == megabytes / 2


@pytest.mark.parametrize("group", [2, 4, 8])
def test_groups_of_pairs_are_an_exact_rearrangement(group):
    x = jnp.arange(3 * 32.0).reshape(3, 32)  # two heads of 8 pairs
    grouped = group_pairs(x, 16, group)
    assert grouped.shape == (3, 16 // group, 2 * group)
    # The second group of the first head holds pairs group.. of that head: channels i and i + 8.
    if group < 8:
        expected = np.concatenate([np.arange(group, 2 * group), np.arange(group, 2 * group) + 8])
        np.testing.assert_array_equal(grouped[0, 1], expected)
    np.testing.assert_array_equal(ungroup_pairs(grouped, 16, group), x)


@pytest.mark.nightly
def test_codes_are_computed_against_the_stored_prescale():
    """The first round searches x over the bfloat16 prescale; x over its float32 norm has other
    nearest centres."""
    codec = CommVQKeys(head_dim=16, rounds=1, levels=64).build(16)
    constants = random_book(0, rounds=1, groups=1, levels=64)
    x = jax.random.normal(jax.random.key(0), (4096, 16)) * 7 + 3
    tile = codec.encode(constants, x)
    stored = tile["prescale"][0].astype(jnp.float32)[:, None]
    for divisor, agree in ((stored, True), (jnp.linalg.norm(x, axis=-1, keepdims=True), False)):
        levels = jnp.stack(nearest(x / divisor, constants["codebook"][0, 0]), -1)
        assert bool((tile["codes"].astype(jnp.int32) == levels).all()) is agree


def test_zero_and_infinite_keys_are_defined_and_leave_their_neighbours_alone():
    codec = CommVQKeys(head_dim=16, rounds=3, levels=8).build(32)
    constants = random_book(2)
    x = jax.random.normal(jax.random.key(1), (32, 32)) * 5
    odd = x.at[3].set(0.0).at[7, 5].set(jnp.inf)
    tile, clean = (codec.encode(constants, rows) for rows in (odd, x))
    decoded = codec.decode(constants, tile)
    assert (decoded[3] == 0).all()
    assert (tile["codes"] < 8).all()
    others = np.setdiff1d(np.arange(32), [3, 7])
    np.testing.assert_array_equal(tile["codes"][others], clean["codes"][others])
    assert np.isfinite(decoded[others]).all()


def test_fewer_rounds_are_a_prefix_of_the_codes_and_of_the_codebook():
    constants = random_book(4, rounds=4)
    x = jax.random.normal(jax.random.key(2), (32, 32))
    full, half = (CommVQKeys(head_dim=16, rounds=r, levels=8).build(32) for r in (4, 2))
    cut = {"codebook": constants["codebook"][..., :2, :, :, :]}
    np.testing.assert_array_equal(
        half.encode(cut, x)["codes"], full.encode(constants, x)["codes"][:, : 2 * 2 * 2]
    )


@pytest.mark.nightly
def test_decoding_does_not_depend_on_batch_or_block():
    codec = CommVQKeys(head_dim=16, rounds=3, levels=8).build(32)
    constants = random_book(5)
    tile = codec.encode(constants, jax.random.normal(jax.random.key(3), (64, 32)))
    whole = codec.decode(constants, tile)
    rows = {
        "codes": tile["codes"].reshape(2, 32, -1),
        "prescale": tile["prescale"].reshape(1, 2, 32).swapaxes(0, 1),
    }
    np.testing.assert_array_equal(codec.decode(constants, rows).reshape(64, 32), whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": 48}, "levels=48"),
        ({"rounds": 0}, "rounds=0"),
        ({"group": 5}, "group=5 does not divide the 8 pairs"),
        ({"dtype": "float16"}, "dtype='float16'"),
    ],
)
def test_bad_specs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CommVQKeys(**({"head_dim": 16, "rounds": 2} | options))


@pytest.mark.parametrize(
    ("rounds", "groups", "levels", "pairs"), [(5, 2, 64, 8), (CHUNK, 3, 8, 2), (1, 1, 256, 4)]
)
def test_the_form_for_tpus_sums_the_same_rows(rounds, groups, levels, pairs):
    """A number as two bfloat16 numbers is off by 2^-16 of itself at most; sums are float32."""
    book = np.asarray(random_book(5, rounds, groups, levels, pairs)["codebook"]) * 40
    codes = np.random.default_rng(6).integers(0, levels, (2, 3, rounds, 2, groups))
    rows = book[np.arange(rounds)[:, None, None], np.arange(groups), codes].astype(np.float64)
    real, imag = np.split(rows[:, :, :, 1], 2, -1)
    parts = rows[:, :, :, 0], np.concatenate([-imag, real], -1)
    both = jax.jit(lambda book, codes: summed_columns(columns(book), codes))
    found = both(jnp.asarray(book), jnp.asarray(codes.reshape(2, 3, -1), jnp.uint32))
    bound = (2.0**-16 + 4 * rounds * 2.0**-24) * sum(np.abs(part).sum(2) for part in parts)
    assert (np.abs(np.asarray(found) - sum(part.sum(2) for part in parts)) <= bound).all()


def test_the_form_for_gpus_sums_in_the_same_order():
    book, codes = (
        random_book(8, rounds=5)["codebook"],
        np.random.default_rng(9).integers(0, 8, (3, 7, 20)),
    )
    loop, one = (jax.jit(form)(book, jnp.asarray(codes)) for form in (_gathered, _at_once))
    np.testing.assert_array_equal(one, loop)


def test_decoding_gathers_on_other_chips_than_tpus():
    codec, constants = CommVQKeys(head_dim=16, rounds=3, levels=8).build(32), random_book(7)
    shapes = jax.eval_shape(codec.encode, constants, jax.ShapeDtypeStruct((32, 32), jnp.float32))
    for more in ({}, {"columns": columns(constants["codebook"])}):
        traced = jax.jit(codec.decode).trace(constants | more, shapes)
        assert "gather" not in traced.lower(lowering_platforms=("tpu",)).as_text()
        assert "gather" in traced.lower(lowering_platforms=("cpu",)).as_text()
