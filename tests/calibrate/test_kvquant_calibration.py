"""KVQuant's calibration: Fisher weights, streamed thresholds, weighted histograms, resuming."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import with_nightly

from kvqjax import Model, UserError, kivi, kvquant, parse
from kvqjax.calibrate import kmeans
from kvqjax.calibrate import kvquant as passes
from kvqjax.calibrate.activations import _perturbed_loss, activations, loss
from kvqjax.calibrate.kvquant import Recipe, calibrate
from kvqjax.model import decoder, weight_trees
from kvqjax.model.config import ModelConfig
from kvqjax.model.rope import rotate

DATA = Path(__file__).parents[1] / "data" / "golden_kvquant_calibration.npz"
CONFIG = ModelConfig(
    vocab_size=32,
    width=32,
    mlp_width=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qkv_bias=True,
)


def biased_model(seed=0):
    params = weight_trees.init_params(jax.random.key(seed), CONFIG)
    bias = 3 * jax.random.normal(jax.random.key(seed + 1), params["layers"]["k_bias"].shape)
    return Model({**params, "layers": params["layers"] | {"k_bias": bias}}, config=CONFIG)


MODEL = biased_model()
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (3, 24))


@pytest.fixture(scope="module")
def golden():
    with np.load(DATA) as data:
        return dict(data)


@pytest.mark.parametrize(("mode", "fraction"), [("sparse", 0.01), ("dense", 0.0)])
def test_streamed_thresholds_are_the_released_percentiles(golden, mode, fraction):
    x = jnp.asarray(golden["k_x"])[None]
    extremes = passes.empty_extremes(1, x.shape[-1], passes.rank(x.shape[1], fraction))
    for start in range(0, x.shape[1], 32):
        extremes = passes.observe(extremes, x[:, start : start + 32])
    upper, lower = passes.thresholds(extremes, x.shape[1], fraction)
    np.testing.assert_allclose(upper, golden[f"k_{mode}_upper"], rtol=1e-6)
    np.testing.assert_allclose(lower, golden[f"k_{mode}_lower"], rtol=1e-6)


def test_streamed_histograms_give_the_released_objectives(golden):
    """Two halves of the golden keys, tallied one after the other, for the paper's weights and the
    released code's."""
    x, fisher = (jnp.asarray(golden[f"k_{name}"])[None] for name in ("x", "fisher"))
    bounds = {name: jnp.asarray(golden[f"k_sparse_{name}"]) for name in ("upper", "lower")}
    options = {"key_slots": 2, "value_slots": 2, "dtype": "bfloat16"}
    for objective, column in (("fisher", 1), ("fisher_s2", 2)):
        total = None
        for half in (slice(0, 112), slice(112, 224)):
            cached = (x[:, half], x[:, half], fisher[:, half], fisher[:, half])
            new = passes.tally(cached, bounds, **options, objective=objective)
            total = new if total is None else jax.tree.map(jnp.add, total, new)
        found = kmeans.objective(total.k, kmeans.weighted_kmeans(total.k, 8))
        assert found[0] == pytest.approx(golden["k_sparse_objective_optimum"][1, column], rel=1e-3)
    mask = np.unpackbits(golden["k_sparse_mask"], axis=1)[:, : x.shape[-1]].astype(int)
    assert float(total.outliers[0]) == mask.sum()
    assert float(total.clipped[0]) == np.maximum(mask.sum(1) - 2, 0).sum()


@pytest.mark.nightly
def test_loss_is_the_models():
    logits = decoder.logits(MODEL.params, jnp.asarray(TOKENS), CONFIG)[:, :-1]
    wanted = -jnp.take_along_axis(
        jax.nn.log_softmax(logits), jnp.asarray(TOKENS)[:, 1:, None], -1
    ).mean()
    assert loss(MODEL.params, jnp.asarray(TOKENS), CONFIG) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("rope", with_nightly(["pre", "post"], ["pre"]))
def test_fisher_is_the_squared_slope_of_the_loss(rope):
    tokens = jnp.asarray(TOKENS[:1])
    cached = activations(MODEL.params, tokens, CONFIG, rope=rope)
    shape = (CONFIG.num_layers, 1, tokens.shape[1], CONFIG.num_kv_heads, CONFIG.head_dim)
    evaluate = jax.jit(_perturbed_loss, static_argnums=(3, 4))
    for source, fisher in enumerate((cached.k_fisher, cached.v_fisher)):
        place = (1, 0, 3, 1, 2)  # layer 1, token 3, head 1, channel 2
        step = 0.05

        def nudged(size, source=source, place=place):
            zeros = [jnp.zeros(shape), jnp.zeros(shape)]
            zeros[source] = zeros[source].at[place].set(size)
            return float(evaluate(tuple(zeros), MODEL.params, tokens, CONFIG, rope)[0])

        slope = (nudged(step) - nudged(-step)) / (2 * step)
        # Central differences: loss rounding 1e-7 over the step, curvature far below.
        found = float(fisher.reshape(shape)[place]) ** 0.5
        assert found == pytest.approx(abs(slope), rel=0.02, abs=1e-5)
        assert found > 1e-4  # or nothing was checked


def test_activations_are_what_a_cache_holds():
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1])[None], TOKENS.shape)
    h = decoder.embed(MODEL.params, jnp.asarray(TOKENS))
    projected = decoder.project(decoder.layer(MODEL.params, 0), h, positions, CONFIG)
    wanted = {"pre": projected.k, "post": rotate(projected.k, positions, CONFIG)}
    for rope, k in wanted.items():
        cached = activations(MODEL.params, jnp.asarray(TOKENS), CONFIG, rope=rope, gradients=False)
        np.testing.assert_allclose(cached.k[0], k.reshape(cached.k[0].shape), atol=1e-5)
        np.testing.assert_allclose(cached.v[0], projected.v.reshape(cached.v[0].shape), atol=1e-5)
        assert cached.k_fisher is None


@pytest.mark.parametrize("kept", [False, True])
def test_sinks_are_left_out_of_thresholds_unless_asked_for(kept):
    method = kvquant(bits=2, outliers=0.2, sinks=2)
    artifact = calibrate(
        MODEL, method, TOKENS, recipe=Recipe(objective="none", sinks_in_thresholds=kept)
    )
    k = np.asarray(activations(MODEL.params, jnp.asarray(TOKENS), CONFIG, gradients=False).k)
    rows = k[:, :, 0 if kept else 2 :].reshape(CONFIG.num_layers, -1, CONFIG.kv_width)
    np.testing.assert_allclose(
        artifact.constants[0]["k"]["upper"], np.percentile(rows, 90, axis=1), rtol=2e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        artifact.constants[0]["k"]["lower"], np.percentile(rows, 10, axis=1), rtol=2e-5, atol=1e-6
    )
    counted = sum(artifact.about["runs"][0]["key_outliers"]) / CONFIG.num_layers
    assert 0.05 < counted < 0.3


@pytest.mark.nightly
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path):
    method = kvquant(bits=2, outliers=0.1, q_norm=True)
    whole = calibrate(MODEL, method, TOKENS)

    class Killed(Exception):
        pass

    def kill_at(wanted):
        def advance(done, total):
            assert total == 2 * len(TOKENS)
            if done == wanted:
                raise Killed

        return advance

    state = tmp_path / "new" / "state.npz"
    for step in (1, 4):
        with pytest.raises(Killed):
            calibrate(MODEL, method, TOKENS, state=state, advance=kill_at(step))
    resumed = calibrate(MODEL, method, TOKENS, state=state)
    ours, wanted = (jax.tree.leaves(artifact.constants) for artifact in (resumed, whole))
    assert [np.asarray(a).tobytes() for a in ours] == [np.asarray(a).tobytes() for a in wanted]
    with pytest.raises(UserError, match="another model"):
        calibrate(MODEL, method, TOKENS[::-1], state=state)
    state.write_bytes(b"torn")
    with pytest.raises(UserError, match="cannot be read"):
        calibrate(MODEL, method, TOKENS, state=state)


@pytest.mark.nightly
def test_layers_of_other_methods_are_passed_over():
    method = parse("kvquant:bits=2;0=exact")
    first, second = calibrate(MODEL, method, TOKENS, recipe=Recipe(objective="none")).constants
    assert first == {}
    assert {name: a.shape for name, a in second["k"].items()} == {
        "upper": (1, 16),
        "lower": (1, 16),
        "signposts": (1, 4),
    }
    baseline = calibrate(
        MODEL, kvquant(datatype="int"), TOKENS, recipe=Recipe(objective="none")
    ).constants
    assert set(baseline[0]["k"]) == {"upper", "lower"}
    assert baseline[0]["v"] == {}


def test_bad_input_is_named():
    with pytest.raises(UserError, match="no layer of KVQuant"):
        calibrate(MODEL, kivi(), TOKENS)
    with pytest.raises(UserError, match="objective"):
        Recipe(objective="fishy")
    with pytest.raises(UserError, match="calibration tokens"):
        calibrate(MODEL, kvquant(), TOKENS[:, :2])


def test_q_norm_restores_mean_and_deviation():
    u = np.clip(np.random.default_rng(1).normal(0.1, 0.4, 4000), -1, 1).astype(np.float32)
    ones = jnp.ones(u.shape)
    hist = jax.tree.map(lambda a: a[None], kmeans.histogram(jnp.asarray(u), ones, ones > 0))
    table = jnp.asarray([[-0.6, -0.2, 0.3, 0.7]])
    scale, offset = np.asarray(kmeans.q_norm(hist, table))[0]
    read = (
        np.asarray(table)[0][np.abs(u[:, None] - np.asarray(table)[0]).argmin(1)] * scale + offset
    )
    assert read.mean() == pytest.approx(u.mean(), abs=2e-3)
    assert read.std() == pytest.approx(u.std(), abs=2e-3)
