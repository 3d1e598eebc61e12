"""EM for CommVQ's key codebooks: isolated steps and full runs against the published code, and the
papers' trends."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvqjax.calibrate.commvq_em import EMSettings, Statistics, e_step, fit_keys, fit_round, m_step
from kvqjax.codecs.commvq_keys import CommVQKeys, centre, nearest

PAIRS, LEVELS = 32, 16


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(Path(__file__).parents[1] / "data" / "golden_commvq_em.npz"))


def from_theta(theta):
    """Rows X_l, Y_l interleaved to rows of 2g channels."""
    return jnp.asarray(np.concatenate([theta[0::2], theta[1::2]], -1))


def data(golden):
    return jnp.asarray(golden["keys"] / golden["norm"]), jnp.asarray(golden["norm"][:, 0] ** 2)


def centres(book):
    pair = np.arange(len(book) ** 2)
    a, b = np.split(book, 2, -1)
    c = a + 1j * b
    return c[pair // len(book)] + 1j * c[pair % len(book)]


def sums(soft, x):
    """Statistics of explicit weights [N, L, L]."""
    return Statistics(soft.sum(0), soft.sum(2).T @ x, soft.sum(1).T @ x, jnp.zeros((), x.dtype))


@pytest.mark.parametrize(("step", "measured"), [("T0", 5e-7), ("T1", 5e-6), ("T2", 4e-5)])
def test_one_iteration_equals_the_published_one(golden, step, measured):
    """Ten times the published float32 code's own distance from float64 (its cdist cancels)."""
    x, weight = data(golden)
    temperature = {"T0": 0.1, "T1": 0.01, "T2": 0.001}[step]
    old = from_theta(golden["s_theta_in"])
    got = jax.jit(e_step)(x, old, jnp.float32(temperature), weight)
    mass = golden[f"s_mass_{step}"].reshape(LEVELS, LEVELS)
    assert (np.abs(got.counts - mass) / (1 + mass)).max() <= 10 * measured
    np.testing.assert_allclose(got.error / x.size, golden["s_loss"], rtol=1e-5)
    # The published M-step pulls every centre to 0 with 1e-8 tokens.
    new = np.asarray(jax.jit(m_step, static_argnums=2)(got, jnp.zeros_like(old), 1e-8))
    ours, theirs = centres(new), centres(np.asarray(from_theta(golden[f"s_theta_{step}"])))
    weighted = [(mass.reshape(-1, 1) * np.abs(c) ** 2).sum() for c in (ours - theirs, theirs)]
    assert np.sqrt(weighted[0] / weighted[1]) <= 10 * {"T0": 2e-7, "T1": 5e-7, "T2": 2e-6}[step]


def test_the_hermitian_m_step_equals_the_closed_form_with_the_matrix_t():
    """Equation 33 written out, with T of 2 L^2 rows, in float64."""
    rng = np.random.default_rng(0)
    levels, pairs, count = 6, 5, 400
    soft = rng.dirichlet(np.full(levels**2, 0.05), count)
    x = rng.normal(size=(count, 2 * pairs)) + 2
    t = np.zeros((2 * levels**2, 2 * levels))
    for a in range(levels):
        for b in range(levels):
            row = 2 * (a * levels + b)
            t[row, 2 * a] += 1
            t[row, 2 * b + 1] -= 1
            t[row + 1, 2 * b] += 1
            t[row + 1, 2 * a + 1] += 1
    np.testing.assert_array_equal(t.T @ t, 2 * levels * np.eye(2 * levels))
    counts = soft.sum(0) + 1e-8
    interleaved = np.stack(np.split(x, 2, -1), -1)  # [N, pair, real or imaginary]
    means = (np.einsum("nc,npk->ckp", soft, interleaved) / counts[:, None, None]).reshape(-1, pairs)
    weighted = t.T * np.repeat(counts, 2)
    theta = np.linalg.solve(weighted @ t, weighted @ means)
    with jax.enable_x64(True):
        old = jnp.zeros((levels, 2 * pairs))
        got = m_step(
            sums(jnp.asarray(soft.reshape(count, levels, levels)), jnp.asarray(x)), old, 1e-8
        )
        assert got.dtype == jnp.float64
        assert np.abs(got - from_theta(theta)).max() <= 1e-6 * np.abs(theta).max()


def test_levels_without_tokens_stay_where_they_are():
    """Inertia: only level pairs (0, 1) and (1, 0) hold tokens, the other levels must not move."""
    old = jax.random.normal(jax.random.key(0), (4, 6))
    x = jax.random.normal(jax.random.key(1), (10, 6))
    soft = jnp.zeros((10, 4, 4)).at[:5, 0, 1].set(1.0).at[5:, 1, 0].set(1.0)
    new = m_step(sums(soft, x), old, 1e-4)
    np.testing.assert_allclose(new[2:], old[2:], atol=1e-6)
    # Two centres, two free vectors: the centres reach the means.
    np.testing.assert_allclose(
        centre(new, jnp.asarray(0), jnp.asarray(1)), x[:5].mean(0), atol=1e-3
    )


def test_greedy_codes_follow_the_published_codebooks(golden):
    x, _ = data(golden)
    for book, codes in zip(golden["run_theta"], golden["run_codes"], strict=True):
        a, b = jax.jit(nearest)(x, from_theta(book))
        assert (np.asarray(a) * LEVELS + np.asarray(b) == codes).mean() >= 0.99
        x = x - centre(
            from_theta(book), jnp.asarray(codes // LEVELS, int), jnp.asarray(codes % LEVELS, int)
        )


def test_full_runs_end_as_low_as_the_published_ones(golden):
    """Another random start may end 7 % away; 10 % above the worst published run is the vectors'
    bound."""
    errors = []
    spec = CommVQKeys(head_dim=2 * PAIRS, rounds=4, levels=LEVELS)
    fit_keys(
        jax.random.key(0),
        jnp.asarray(golden["keys"]),
        spec,
        report=lambda r, fit: errors.append(float(fit.error[0])),
    )
    worst = np.maximum(golden["run_error"], golden["run_error_other_seeds"].max(0))
    assert (np.asarray(errors) <= 1.1 * worst).all()
    assert (np.diff(errors) < 0).all()


def structured(count=2048, heads=1, head_dim=32):
    """Keys as models make them: few latent directions, offsets, noise (white noise has no structure
    to share)."""
    rng = np.random.default_rng(0)
    mix = rng.normal(size=(8, heads * head_dim))
    x = (
        rng.normal(size=(count, 8)) @ mix
        + 3 * rng.normal(size=heads * head_dim)
        + 0.5 * rng.normal(size=(count, 1))
    )
    return jnp.asarray(x + 0.35 * rng.normal(size=x.shape), jnp.float32)


def error(k, rounds, **options):
    """Mean squared error of float32 reconstructions after calibration on the same keys."""
    spec = CommVQKeys(head_dim=32, rounds=rounds, dtype="float32", **options)
    codec = spec.build(k.shape[1])
    constants = {"codebook": fit_keys(jax.random.key(1), k, spec, EMSettings(steps=16))}
    run = jax.jit(lambda k: codec.decode(constants, codec.encode(constants, k)))
    return float(jnp.mean((run(k) - k) ** 2))


def test_error_falls_with_group_and_levels_at_equal_bits():
    """Table 9: 1/4 bit a channel from (g, L) = (4, 2), (8, 4), (16, 16); the codebook grows, the
    bits do not."""
    errors = [error(structured(), 1, group=g, levels=v) for g, v in ((4, 2), (8, 4), (16, 16))]
    assert errors[0] > errors[1] > errors[2]


def test_error_falls_with_rounds_and_truncation_keeps_the_prefix():
    """Table 10's rounds; the codebooks of a longer run begin with those of a shorter one, byte for
    byte."""
    k = structured(1024)
    errors = []
    spec = CommVQKeys(head_dim=32, rounds=4, levels=8)
    long = fit_keys(
        jax.random.key(2), k, spec, report=lambda r, fit: errors.append(float(fit.error.sum()))
    )
    assert (np.diff(errors) < 0).all()
    short = fit_keys(jax.random.key(2), k, CommVQKeys(head_dim=32, rounds=2, levels=8))
    np.testing.assert_array_equal(long[:2], short)


def test_memory_is_one_minibatch_of_weights():
    """No array of the fit is larger than a minibatch's L^2 distances or the data, whatever the
    number of tokens."""
    settings = EMSettings(batch=32)
    x = jax.ShapeDtypeStruct((2048, 16), jnp.float32)
    weight = jax.ShapeDtypeStruct((2048,), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda k, x, w: fit_round(k, x, w, 64, settings))(
        jax.random.key(0), x, weight
    )
    assert max(sizes(jaxpr.jaxpr)) <= max(32 * 64 * 64, 2048 * 16)


def sizes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars)
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from sizes(inner)


def test_constant_and_zero_keys_give_a_finite_codebook():
    k = jnp.concatenate([jnp.zeros((128, 32)), jnp.ones((128, 32))])
    spec = CommVQKeys(head_dim=32, rounds=3, levels=4)
    book = fit_keys(jax.random.key(3), k, spec)
    assert np.isfinite(book).all()
    codec = spec.build(32)
    decoded = codec.decode({"codebook": book}, codec.encode({"codebook": book}, k))
    np.testing.assert_allclose(decoded, k, atol=0.02)


def test_too_few_tokens_are_refused():
    with pytest.raises(ValueError, match="20 tokens; EM needs at least one batch of 32"):
        fit_keys(jax.random.key(0), jnp.zeros((20, 32)), CommVQKeys(head_dim=32, rounds=1))


def test_e_step_grows_linearly_and_expands_no_centres():
    """Per token: four products with L vectors and a few operations on each of L^2 distances, where
    products with the centres themselves would be 2 L^2 numbers for every channel."""
    levels, width = 64, 128

    def cost(tokens: int) -> float:
        shapes = [(tokens, width), (levels, width), (), (tokens,)]
        step = jax.jit(e_step).lower(
            *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        )
        return step.compile().cost_analysis()["flops"]

    few, more, many = (cost(tokens) for tokens in (32, 64, 128))
    assert many - more == pytest.approx(2 * (more - few), rel=0.02)
    assert (
        (many - more) / 64 < 4 * 2 * levels * width + 20 * levels**2 < 0.2 * (2 * levels**2 * width)
    )
