"""Transform coding: bits by rank, the error that its spectrum lets expect, and transforms from
second moments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned
from tiny import tiny

import kvqjax as kvq
from kvqjax.calibrate import klt
from kvqjax.codecs.klt import (
    BEND,
    ERRORS,
    REACH,
    Klt,
    _times_in_bfloat16,
    bits_of_ranks,
    codes_of,
    points_of,
)
from kvqjax.model.rope import rotate

WIDTH, TOKENS = 64, 4096


@pytest.mark.parametrize("slope", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("bits", [0.5, 1.0, 2.0, 2.25, 3.0])
def test_bits_fall_with_the_rank_and_are_all_given(bits, slope):
    given = bits_of_ranks(WIDTH, bits, slope)
    assert len(given) == WIDTH
    assert list(given) == sorted(given, reverse=True)
    # What is left is less than any coefficient can take.
    assert bits - 2 / WIDTH <= sum(given) / WIDTH <= bits
    if slope == 0 and bits in (1.0, 2.0, 3.0):
        assert set(given) == {int(bits)}


@pytest.mark.parametrize("bits", [1.5, 2.0, 2.25, 3.0])
def test_heads_that_a_kernel_reads_get_bits_eight_ranks_at_a_time(bits):
    spec = Klt(bits=bits, heads=1).for_heads(8, 128)
    levels = spec.levels(8 * 128)
    assert all(count % 8 == 0 for _, _, count in levels)
    spent = sum(bits * count for bits, _, count in levels) / 128
    assert bits - 2 * 8 / 128 <= spent <= bits
    # What this costs by the spectrum that bits are given by: a tenth of the error at most.
    together, apart = spec.ranks(8 * 128), bits_of_ranks(128, bits, 1.0)
    variance = 4.0 ** -np.log2(1 + BEND * np.arange(128) / 128)
    error, least = (sum(variance * [ERRORS[b] for b in given]) for given in (together, apart))
    assert error <= 1.1 * least


def test_a_steeper_spectrum_takes_bits_from_the_last_coefficients():
    flat, steep = (np.array(bits_of_ranks(192, 2.0, slope)) for slope in (0.5, 1.0))
    assert steep[0] > flat[0]
    assert (steep == 0).sum() > (flat == 0).sum()


@pytest.mark.parametrize("bits", sorted(set(ERRORS) - {0}))
def test_points_have_the_error_that_bits_are_given_by(bits):
    y = np.random.default_rng(0).normal(size=1 << 15).astype(np.float32)
    codes = codes_of(jnp.asarray(y), bits)
    assert int(codes.max()) < 1 << bits
    error = np.square(y - np.asarray(points_of(codes, bits))).mean()
    # Of 32768 numbers: 2 % of a square's mean are its error.
    assert error == pytest.approx(ERRORS[bits], rel=0.05)


def _correlated(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a normal distribution whose deviations fall from 30 to 0.1 in a basis of their own,
    and its M."""
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))
    x = (
        rng.normal(size=(TOKENS, WIDTH)) * np.geomspace(30, 0.1, WIDTH) @ basis
        + rng.normal(size=WIDTH) * 5
    )
    return x.astype(np.float32), np.diag(np.geomspace(1, 4, WIDTH))


def _coded(spec: Klt, x: np.ndarray, costs: np.ndarray) -> tuple[np.ndarray, dict]:
    codec = spec.build(WIDTH)
    mean, covariance = klt.covariance_of(jnp.asarray(x)[None])
    into, back = klt.transform_of(covariance, costs, codec.needs["into"][2])
    constants = {"mean": mean, "into": into[None], "back": back[None]}
    constants = {name: jnp.asarray(array, jnp.float32) for name, array in constants.items()}
    return np.asarray(codec.decode(constants, codec.encode(constants, jnp.asarray(x)))), constants


@pytest.mark.parametrize("slope", thinned([0.0, 1.0], 2))
def test_the_error_is_what_the_spectrum_and_the_bits_say(slope):
    x, costs = _correlated()
    found, constants = _coded(Klt(bits=2.0, slope=slope, scale="none"), x, costs)
    back, bits = np.asarray(constants["back"][0], np.float64), bits_of_ranks(WIDTH, 2.0, slope)
    variance = np.einsum("ri,ij,rj->r", back, costs, back)
    whole = np.trace(costs @ np.cov(x.T))
    expected = (
        sum(v * ERRORS[b] for v, b in zip(variance, bits, strict=False)) + whole - variance.sum()
    )
    error = x - found
    assert np.einsum("ni,ij,nj->n", error, costs, error).mean() == pytest.approx(expected, rel=0.05)


def test_bits_by_rank_beat_equal_bits_by_what_theory_says():
    """Of log2 deviations that fall evenly over 8 bits, equal bits cost more than a third of all
    bits more."""
    x, costs = _correlated()
    flat, ranked = (_coded(Klt(bits=2.0, slope=slope), x, costs)[0] for slope in (0.0, 1.5))
    loss = [np.einsum("ni,ij,nj->", x - found, costs, x - found) for found in (flat, ranked)]
    assert loss[1] < loss[0] / 4


@pytest.mark.nightly
def test_one_token_far_out_is_not_clipped():
    """A token 12 deviations out along the first coefficient keeps its place within half a step of
    that coefficient's points, which are evenly spaced in asinh x. The other coefficients are 0 and
    get the points next to 0."""
    x, costs = _correlated()
    covariance = np.cov(x.T)
    first = np.linalg.eigh(np.sqrt(costs) @ covariance @ np.sqrt(costs))[1][:, -1] / np.sqrt(
        np.diag(costs)
    )
    far = x.mean(0) + 12 * first * np.sqrt(
        np.linalg.eigvalsh(np.sqrt(costs) @ covariance @ np.sqrt(costs))[-1]
    )
    _, constants = _coded(Klt(bits=2.0, slope=1.0), x, costs)
    codec = Klt(bits=2.0, slope=1.0).build(WIDTH)
    found = np.asarray(
        codec.decode(constants, codec.encode(constants, jnp.asarray(far[None], jnp.float32)))
    )[0]
    # What an error e costs is e^T M e, to which coefficient i adds its square times sigma_i^2.
    back = np.asarray(constants["back"][0], np.float64)
    sigma = np.sqrt(np.einsum("ri,ij,rj->r", back, costs, back))
    scale = 12 / np.sqrt(len(back)) * 2 ** (1 / 32)  # of the token, rounded up by half a step
    ranks = bits_of_ranks(WIDTH, 2.0, 1.0)[: len(back)]
    half_step = 12 * np.arcsinh(REACH) / (2 ** ranks[0] - 1)
    near_zero = [float(abs(points_of(codes_of(jnp.zeros(()), bits), bits))) for bits in ranks]
    errors = np.array([half_step, *(scale * np.array(near_zero[1:]))])
    error = found - far
    assert error @ costs @ error < 1.01 * np.square(errors * sigma).sum()
    assert ranks[0] == 8


def test_all_coefficients_give_the_vector_back():
    x, costs = _correlated()
    _, constants = _coded(Klt(bits=6.0, slope=0.0), x, costs)
    into, back = (np.asarray(constants[name][0], np.float64) for name in ("into", "back"))
    whole = into @ back
    np.testing.assert_allclose(whole, np.eye(WIDTH), atol=1e-3)


@pytest.mark.nightly
def test_means_of_coefficients_are_turned_back_to_means_of_vectors():
    """A mean of 64 tokens; each sum of 64 float32 numbers errs by 64 * 2^-24 of their size, and
    both do so twice."""
    x, costs = _correlated()
    spec = Klt(bits=2.0, slope=1.0)
    found, constants = _coded(spec, x[:64], costs)
    codec, (size, read, finish) = spec.build(WIDTH), spec.summed_form(WIDTH)
    tile = jax.tree.map(lambda part: part[None], codec.encode(constants, jnp.asarray(x[:64])))
    numbers = read(tile)
    assert numbers.shape == (1, 64, size)
    weights = np.random.default_rng(2).dirichlet(np.ones(64), 5).astype(np.float32)
    means = finish(constants, jnp.asarray(weights) @ numbers[0])
    np.testing.assert_allclose(
        means, weights @ found, rtol=0, atol=64 * 2.0**-22 * np.abs(found).max()
    )


def test_vectors_as_gpus_turn_them_back_round_coefficients_and_matrix_to_bfloat16():
    """Both factors of a term are off by at most 2^-9 of it, and W + 1 float32 additions round."""
    z = np.random.default_rng(3).normal(size=(64, WIDTH)).astype(np.float32)
    _, constants = _coded(Klt(bits=2.0, slope=1.0), *_correlated())
    back = np.asarray(constants["back"][0], np.float64)
    z = z[:, : len(back)]
    found = _times_in_bfloat16(jnp.asarray(z)[:, None], constants["back"])
    found = np.asarray(found, np.float64)[:, 0]
    bound = (2.0**-8 + 2.0**-18 + WIDTH * 2.0**-23) * (np.abs(z) @ np.abs(back))
    assert (np.abs(found - z @ back) <= bound).all()


def test_costs_of_keys_are_those_of_scores_at_many_distances():
    """An error of keys, rotated to their place, against queries at theirs: what scores lose."""
    model = tiny()
    shape = model.config.kv_shape.layer(0)
    heads, dim, length = shape.num_kv_heads, shape.head_dim, 9
    rng = np.random.default_rng(4)
    bare = rng.normal(size=(1, shape.num_heads, dim)).astype(np.float32)
    # The same query at every position, so that every pair of positions of one distance is alike.
    q = rotate(
        jnp.broadcast_to(jnp.asarray(bare), (length, *bare.shape[1:])), jnp.arange(length), shape
    )
    costs = klt.key_costs(np.asarray(klt.query_moments(q, shape), np.float64), shape, length)
    error = rng.normal(size=(1, heads, dim)).astype(np.float32)
    turned = rotate(jnp.asarray(error), jnp.zeros(1, int), shape)[0]
    by_head = np.asarray(q).reshape(length, heads, -1, dim)
    scores = np.einsum("tkgd,kd->tkg", by_head, np.asarray(turned))
    wanted = np.square(scores[1:]).sum((1, 2)).mean()  # distances 1 to 8, each once
    flat = error.reshape(-1).astype(np.float64)
    assert flat @ costs @ flat == pytest.approx(wanted, rel=1e-4)


def test_costs_of_values_are_those_of_the_attention_output():
    model = tiny()
    shape, outputs = model.config.kv_shape, np.asarray(model.params["layers"]["o"][0], np.float64)
    error = np.random.default_rng(1).normal(size=shape.kv_width)
    heads = np.repeat(
        error.reshape(shape.num_kv_heads, shape.head_dim), shape.num_heads // shape.num_kv_heads, 0
    )
    # Each query head by itself: what several of them do to the output together depends on their
    # weights.
    wanted = sum(
        np.square(head @ outputs[n * shape.head_dim : (n + 1) * shape.head_dim]).sum()
        for n, head in enumerate(heads)
    )
    assert error @ klt.value_costs(outputs, shape) @ error == pytest.approx(wanted, rel=1e-9)


@pytest.mark.nightly
def test_a_cache_of_a_calibrated_model_is_nearer_to_exact_than_higgs_of_as_many_bits(tmp_path):
    caches = ["klt:bits=2,buffer=32", "higgs:bits=2,buffer=32"]
    options = {"tokens": 512, "window": 128, "sequences": 4, "store": tmp_path}
    klt_row, higgs_row = kvq.compare("demo", caches, "synthetic", **options)
    assert klt_row["bits_method"] <= higgs_row["bits_method"]
    assert klt_row["kld"] < higgs_row["kld"] / 2


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("klt:bits=0", "bits=0.0; wanted 0.125 to 6"),
        ("klt:bits=7", "bits=7.0; wanted 0.125 to 6"),
        ("klt:key_slope=-1", "slope=-1.0; wanted 0 to 4"),
        ("klt:scale=head", "scale='head'; known: token, none"),
        ("klt:heads=some", "heads=some; known: own, all, or a number"),
        ("klt:heads=0", "heads=0; known: own, all, or a number"),
        ("klt:values=both", "values='both'; known: keys, alone"),
        ("aqua:key_inputs=none,value_inputs=k", "klt:values=keys predicts values"),
    ],
)
def test_what_is_refused(spec, said):
    with pytest.raises(kvq.UserError, match=said):
        kvq.parse(spec)
