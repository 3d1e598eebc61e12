"""Regressions from streamed moments against the released code's results (golden vectors) and
against plain fits."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kvqjax.calibrate.aqua_fit import add, gptq, low_rank, refit_bias, ridge, score
from kvqjax.methods.papers.aqua import predict, predictor_shapes, unpack_weight
from kvqjax.model.weight_codes import pack_nibbles


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parents[1] / "data" / "golden_aqua_regression.npz") as data:
        return dict(data)


@pytest.fixture(scope="module")
def moments(golden):
    total = None
    for rows in np.array_split(np.arange(len(golden["x"])), 7):
        total = add(total, golden["x"][rows], golden["y"][rows])
    return total


@pytest.mark.parametrize(
    ("name", "damping"), [("ridge0", 0.0), ("ridge1e3", 1e-3), ("ridge1e1", 1e-1)]
)
def test_ridge_equals_the_released_normal_equations(golden, moments, name, damping):
    weight, bias = ridge(moments, damping)
    exact = golden[f"{name}_exact"]
    bound = 1e-4 * np.abs(exact).max()
    np.testing.assert_allclose(weight.T, exact[:, :-1], atol=bound)
    np.testing.assert_allclose(bias, exact[:, -1], atol=bound)


def test_ridge_without_intercept(golden, moments):
    weight, bias = ridge(moments, intercept=False)
    np.testing.assert_allclose(weight.T, golden["nointercept_w"], atol=1e-4 * np.abs(weight).max())
    assert not bias.any()


def test_reduced_rank_equals_the_released_product(golden, moments):
    down, up, bias = low_rank(moments, 6, centred=False)
    exact = golden["rrr_product_exact"]
    np.testing.assert_allclose(down @ up, exact, atol=1e-4 * np.abs(exact).max())
    np.testing.assert_allclose(bias, golden["rrr_exact_b"], atol=1e-5)


def test_centring_improves_reduced_rank_when_inputs_have_an_offset(moments):
    released, ours = (low_rank(moments, 6, centred=centred) for centred in (False, True))
    full = score(moments, *ridge(moments))
    errors = [score(moments, down @ up, bias).relative_mse for down, up, bias in (released, ours)]
    assert full.relative_mse < errors[1] < errors[0]


def test_errors_come_from_the_moments_alone(golden, moments):
    weight, bias = ridge(moments)
    x, y = golden["x"].astype(np.float64), golden["y"].astype(np.float64)
    error = ((x @ weight + bias - y) ** 2).sum()
    result = score(moments, weight, bias)
    assert result.relative_mse == pytest.approx(error / (y**2).sum(), rel=1e-4)
    assert result.explained == pytest.approx(1 - error / ((y - y.mean(0)) ** 2).sum(), rel=1e-4)
    assert result.bits_saved == pytest.approx(-np.log2(result.relative_mse) / 2)


def test_rows_left_out_do_not_count(golden, moments):
    x, y = (
        np.concatenate([golden["x"], golden["x"] + 9]),
        np.concatenate([golden["y"], golden["y"] * 3]),
    )
    kept = add(None, x, y, np.arange(len(x)) < len(golden["x"]))
    for ours, wanted in zip(kept, moments, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-3)


def test_singular_moments_give_the_least_norm_fit():
    x = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    twice = np.concatenate([x, x], axis=1)
    weight, bias = ridge(add(None, twice, x), damping=0.0)
    np.testing.assert_allclose(weight, np.concatenate([np.eye(3), np.eye(3)]) / 2, atol=1e-3)
    np.testing.assert_allclose(bias, 0, atol=1e-3)


def test_gptq_beats_rounding_and_keeps_the_mean(golden, moments):
    weight, _ = ridge(moments)
    parts = gptq(moments, weight, 8)
    rounded = {
        name: jnp.asarray(a, "uint32" if name == "codes" else "bfloat16")
        for name, a in parts.items()
    }
    rounded["codes"] = pack_nibbles(rounded["codes"])
    restored = np.asarray(unpack_weight(rounded))
    scale, low = (np.repeat(parts[name], 8, axis=0) for name in ("scale", "low"))
    np.testing.assert_allclose(restored, parts["codes"] * scale + low, rtol=1e-6)
    nearest = np.clip(np.round((weight - low) / scale), 0, 15) * scale + low
    exact, ours, plain = (
        score(moments, w, refit_bias(moments, w)).relative_mse for w in (weight, restored, nearest)
    )
    assert exact <= ours < 0.9 * (plain - exact) + exact
    mean = golden["x"].mean(0) @ restored + refit_bias(moments, restored)
    np.testing.assert_allclose(mean, golden["y"].mean(0), atol=1e-3)


@pytest.mark.parametrize("kind", ["linear", "int4", "low_rank", "mlp"])
def test_predictors_have_the_shapes_they_declare(kind):
    rng = np.random.default_rng(1)
    wanted = predictor_shapes(kind, 32, 16, rank=4)
    constants = {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in wanted.items()
    }
    if kind == "int4":
        constants["codes"] = jnp.asarray(rng.integers(0, 2**32, wanted["codes"]), jnp.uint32)
    x = jnp.asarray(rng.normal(size=(5, 32)), jnp.float32)
    y = predict(kind, constants, x)
    assert y.shape == (5, 16)
    if kind == "linear":
        np.testing.assert_allclose(
            y, x @ constants["weight"] + constants["bias"][None], rtol=1e-5, atol=1e-5
        )
    with pytest.raises(ValueError, match="predictor='forest'"):
        predictor_shapes("forest", 4, 4)
