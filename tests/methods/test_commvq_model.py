"""CommVQ inside a model: calibrated on text, saved, loaded, and used as a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_commvq import METHOD, QUICK

from kvqjax import (
    Model,
    UserError,
    attend,
    commvq,
    evict,
    forward,
    init_cache,
    kivi,
    load_artifact,
    parse,
    prefill,
)
from kvqjax.cache import runs_of
from kvqjax.calibrate.commvq import REPORTS, calibrate
from kvqjax.model import decoder, weight_trees
from kvqjax.model.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=40,
    width=32,
    mlp_width=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm=True,
)
TOKENS = np.random.default_rng(0).integers(0, 40, (6, 64))
PROMPT = jnp.asarray(np.random.default_rng(1).integers(0, 40, (2, 144)))


@pytest.fixture(scope="module")
def model():
    return Model(
        weight_trees.init_params(jax.random.key(0), CONFIG), config=CONFIG, fingerprint="weights=0"
    )


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def artifact(model, told):
    return calibrate(
        model,
        METHOD,
        TOKENS,
        recipe=QUICK,
        advance=lambda *step: told.append(step),
        note=lambda t: told.append(t),
    )


def through_cache(model, method, chunk):
    cache, step, parts = init_cache(model, method, 2, 160), jax.jit(forward), []
    for first in range(0, PROMPT.shape[1], chunk):
        piece = PROMPT[:, first : first + chunk]
        out, cache = step(model, piece, jnp.full(2, piece.shape[1]), cache)
        parts.append(out)
    return jnp.concatenate(parts, 1), cache


def words(cache):
    return [np.asarray(leaf) for run in cache.runs for leaf in jax.tree.leaves(run.body)]


def test_calibration_reports_progress_and_losses(artifact, told):
    steps = [entry for entry in told if isinstance(entry, tuple)]
    assert steps == [(i + 1, 2 * (4 + REPORTS)) for i in range(2 * (4 + REPORTS))]
    assert any("round 4: error" in entry for entry in told if isinstance(entry, str))
    for layer in artifact.about["layers"]:
        errors = np.asarray(layer["keys"])[:, 0]
        assert (np.diff(errors) < 0).all()
        assert layer["values"][-1][0] < layer["values"][0][0]


def test_the_artifact_survives_saving_and_fits_the_model(model, artifact, tmp_path):
    artifact.save(tmp_path / "artifact")
    ready = model.with_artifact(load_artifact(tmp_path / "artifact"))
    exact = decoder.logits(model.params, PROMPT, CONFIG)
    got, cache = through_cache(ready, METHOD, 16)
    # 144 - 1 sink - 32 window = 111 tokens: 3 units
    assert int(cache.runs[0].flushed[0].min()) == 3
    # While nothing is encoded the cache is exact; afterwards it is lossy but near.
    np.testing.assert_allclose(got[:, :64], exact[:, :64], atol=1e-4)
    late, signal = (float(jnp.mean(x[:, 80:] ** 2)) for x in (got - exact, exact))
    assert 1e-4 * signal < late < 0.5 * signal


def test_every_way_of_filling_the_cache_stores_the_same_words(model, artifact):
    ready = model.with_artifact(artifact)
    _, steps = through_cache(ready, METHOD, 16)
    _, chunks = through_cache(ready, METHOD, 72)
    _, exact = jax.jit(prefill)(ready, PROMPT, jnp.full(2, 144), init_cache(ready, METHOD, 2, 160))
    # Layer 0 sees equal sources in all three; the hidden states above differ by what was compressed
    # when.
    for other in (chunks, exact):
        for a, b in zip(words(steps), words(other), strict=True):
            np.testing.assert_array_equal(a[0], b[0])


def test_values_summed_as_bits_equal_decoded_values(model, artifact):
    """One new token sums bits, a chunk decodes: the chunk's first token sees the same cache."""
    ready = model.with_artifact(artifact)
    _, cache = through_cache(ready, METHOD, 72)
    assert 1 <= runs_of(cache.layout)[0].wiring.fast.shared.most < 8
    step = jax.jit(attend)
    chunk, _ = step(ready, PROMPT[:, :8], jnp.full(2, 8), cache)
    single, _ = step(ready, PROMPT[:, :1], jnp.full(2, 1), cache)
    np.testing.assert_allclose(single[:, 0], chunk[:, 0], atol=2e-5)
    nothing, _ = step(ready, PROMPT[:, :1], jnp.full(2, 1), evict(cache, jnp.ones(2, bool)))
    assert np.abs(nothing - single).max() > 1e-2  # the cache matters here


def test_a_killed_calibration_resumes_with_the_same_bytes(model, artifact, tmp_path):
    path = tmp_path / "state.npz"

    def kill(done, total):
        if done == total - 2:  # inside the last layer
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(model, METHOD, TOKENS, recipe=QUICK, state=path, advance=kill)
    seen = []
    resumed = calibrate(
        model, METHOD, TOKENS, recipe=QUICK, state=path, advance=lambda done, _: seen.append(done)
    )
    assert seen[0] == 4 + REPORTS + 1
    for a, b in zip(
        jax.tree.leaves(artifact.constants), jax.tree.leaves(resumed.constants), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert resumed.about == artifact.about


def test_codebooks_are_nested(model, artifact):
    """Of the same keys the code of fewer rounds is a prefix of the longer one: the first rows of
    the same packed words."""
    method = commvq(bits=2, rounds=2, levels=8, hidden=32, window=32, unit=32, sinks=1)
    cut = tuple(
        {**own, "k": {"codebook": own["k"]["codebook"][..., :2, :, :, :]}}
        for own in artifact.constants
    )
    fewer = model.with_artifact(dataclasses.replace(artifact, method=method, constants=cut))
    _, short = through_cache(fewer, method, 72)
    _, long = through_cache(model.with_artifact(artifact), METHOD, 72)
    for a, b in zip(short.runs[0].body["k"]["codes"], long.runs[0].body["k"]["codes"], strict=True):
        assert a[0].any()
        np.testing.assert_array_equal(a[0], b[0][:, : a.shape[2]])


def test_rounds_follow_from_bits_and_head_dimension():
    for head_dim, rounds in ((128, (11, 21)), (64, (5, 11)), (32, (3, 5))):
        config = dataclasses.replace(CONFIG, head_dim=head_dim)
        assert tuple(commvq(bits=b).layer.key(config).rounds for b in (1, 2)) == rounds


def test_the_spec_string_names_the_method():
    assert parse("commvq:bits=2,window=0") == commvq(bits=2, window=0)
    with pytest.raises(ValueError, match="unit=48"):
        commvq(unit=48)


def test_other_methods_and_too_little_text_are_refused(model):
    with pytest.raises(UserError, match="no layer of CommVQ"):
        calibrate(model, kivi(), TOKENS)
    with pytest.raises(UserError, match=r"\(1, 64\); wanted \[N, T\] with 64 tokens"):
        calibrate(model, METHOD, TOKENS[:1], recipe=QUICK)
