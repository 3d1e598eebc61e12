"""Tuning: scores that say what a cache says, the allotment, a run that was stopped, bad input."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.eval.scores import exact_logits, replay, token_scores
from kvqjax.eval.stamp import ledger_of
from kvqjax.eval.tune.allotment import allotted, stretches
from kvqjax.eval.tune.candidates import candidates_of
from kvqjax.eval.tune.scoring import scored

LENGTH, UNIT = 128, 32


@pytest.fixture(scope="module")
def model() -> kvq.Model:
    """Random weights that are sharp enough for caches to differ."""
    whole = tiny()
    return whole.replace(params=jax.tree.map(lambda x: 2 * x, whole.params))


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.asarray(tokens(5, LENGTH, 1), np.int32)


def run(model, ids, texts, state=None, advance=lambda steps, total: None):
    methods = tuple(map(kvq.parse, texts))
    return scored(model, methods, 0, ids[:3], ids[3:], state=state, advance=advance)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("kivi:bits=2,window=0", marks=pytest.mark.nightly),
        "higgs:bits=2,buffer=32,sinks=0",
    ],
)
def test_a_layers_divergence_is_that_of_a_cache_with_this_layer_coded(model, ids, text):
    """Chunks of a unit: a query of the cache sees its own chunk exactly, and what came before
    coded, as a score has it. A number between two codes may be rounded the other way."""
    scores, held = run(model, ids, [text]), jnp.asarray(ids[3:])
    exact = exact_logits(model, held)
    for layer, divergence in enumerate(scores.divergences):
        cache = kvq.policy("exact", {layer: text})
        kld = token_scores(replay(model, held, cache, UNIT), exact, held).kld.mean()
        assert divergence == pytest.approx(float(kld), rel=2e-2)


@pytest.mark.nightly
def test_a_stopped_pass_goes_on(model, ids, tmp_path):
    """Calibrated candidates too. Every layer is scored once."""
    texts, seen = ["klt:bits=2.0,buffer=32", "klt:bits=4.0,buffer=32"], []

    def stop(steps, total):
        seen.append(steps)
        if len(seen) == 1:
            raise KeyboardInterrupt

    whole = run(model, ids, texts)
    with pytest.raises(KeyboardInterrupt):
        run(model, ids, texts, tmp_path / "state.npz", stop)
    again = run(model, ids, texts, tmp_path / "state.npz", stop)
    assert seen == [1, 2]
    np.testing.assert_array_equal(again.errors, whole.errors)
    np.testing.assert_array_equal(again.divergences, whole.divergences)
    losses = again.losses(0)
    assert (losses[:, 1] < losses[:, 0]).all()


def best_by_hand(losses, sizes, limit, runs, kinds):
    layers, count = losses.shape
    at, best = np.arange(layers), np.inf
    for choice in map(np.asarray, itertools.product(range(count), repeat=layers)):
        few = len(stretches(choice)) <= runs and len(set(choice)) <= kinds
        if few and sizes[at, choice].sum() <= limit:
            best = min(best, losses[at, choice].sum())
    return best


@pytest.mark.parametrize("seed", range(4))
def test_the_allotment_is_the_best_in_few_runs(seed):
    random = np.random.default_rng(seed)
    losses = -np.sort(-random.random((6, 4)), 1)
    sizes = np.broadcast_to(np.sort(random.random(4)), losses.shape)
    at, limit = np.arange(6), sizes.sum(0).mean()
    chosen = allotted(losses, sizes, limit, 3, 2)
    assert len(stretches(chosen)) <= 3
    assert len(set(chosen)) <= 2
    assert sizes[at, chosen].sum() <= limit
    assert losses[at, chosen].sum() <= 1.02 * best_by_hand(losses, sizes, limit, 3, 2)


def test_a_budget_that_nothing_meets_has_no_allotment():
    assert allotted(np.ones((3, 2)), np.ones((3, 2)), 2.0) is None


def test_candidates_are_what_the_model_admits(model):
    whole = candidates_of(kvq.parse("kivi:window=0"), model.config, 2.5)
    assert {kvq.kivi(bits=2, window=0), kvq.kivi(key_bits=3, value_bits=2, window=0)} <= set(whole)
    parts = candidates_of(kvq.parse("klt:heads=own"), model.config, 2.5)
    assert kvq.klt(heads="own", bits=2.25) in parts


def test_a_policy_within_its_budget(model, tmp_path):
    text = np.asarray(tokens(16, LENGTH, 2))
    options = {"method": "higgs:buffer=32", "bits": 5, "context": 1024, "length": LENGTH}
    found = kvq.tune(model, text, **options, sequences=1, out=tmp_path)
    kinds = {row["kind"]: row for row in found.rows}
    assert set(kinds) == {"tuned", "uniform"}
    assert str(found.method) in {row["cache"] for row in found.rows}
    for row in found.rows:
        stored = ledger_of(model, row["cache"], 1024).bits_stored
        assert row["bits_stored"] == pytest.approx(stored)
        assert stored <= 5
        assert row["kld"] > 1e-3
    assert kvq.parse(kvq.to_dict(found.method)) == found.method
    assert [layer["layer"] for layer in found.about["layers"]] == [0, 1]


@pytest.mark.parametrize(
    ("method", "bits", "message"),
    [
        ("exact", 3, "has no bits to choose"),
        ("kivi;0=exact", 3, "one method for all layers"),
        ("aqua", 3, "its layers feed each other"),
        ("higgs", 0.2, "is below what higgs reaches"),
        ("higgs", 0, "bits=0; wanted a number above 0"),
        ("klt", 3, "end before klt.* reads what it has encoded; wanted more than"),
    ],
)
def test_what_cannot_be_tuned_is_refused(model, method, bits, message):
    with pytest.raises(kvq.UserError, match=message):
        kvq.tune(model, np.arange(4000) % 50, method=method, bits=bits, length=64)
