"""Replay gives what perplexity's stream gives, token by token."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny

import kvqjax as kvq
from kvqjax.eval import perplexity
from kvqjax.eval.scores import exact_logits, replay, score

IDS = np.random.default_rng(0).integers(0, 50, 384)


@pytest.mark.nightly
def test_token_scores_add_up_to_the_streamed_perplexity():
    model, method = tiny(), kvq.kivi(bits=2, window=32)
    rows = jnp.asarray(IDS.reshape(2, 192), jnp.int32)
    got = score(replay(model, rows, method, 32), exact_logits(model, rows), rows)
    row = perplexity(model, IDS, method, chunk=32, window=192, tokens=384, batch=2)
    assert got.nll.shape == (2, 191)
    np.testing.assert_allclose(np.exp(np.mean(got.nll)), row["ppl"], rtol=1e-5)
    np.testing.assert_allclose(np.mean(got.kld), row["kld"], rtol=1e-3)
    np.testing.assert_allclose(np.quantile(got.kld, 0.999), row["kld_p999"], rtol=1e-3)
    np.testing.assert_allclose(np.mean(got.agree), row["top1"], atol=1e-6)
    # 64 tokens at least are exact
    assert np.asarray(got.kld)[:, :60].max() < 1e-5 < np.asarray(got.kld)[:, 96:].min()
    best = np.asarray(replay(model, rows, method, 32))[:, :-1].argmax(-1)
    np.testing.assert_array_equal(got.right, best == np.asarray(rows)[:, 1:])


def test_a_chunk_that_does_not_fit_is_refused():
    with pytest.raises(kvq.UserError, match="chunk=33 does not divide 192"):
        replay(tiny(), jnp.zeros((1, 192), jnp.int32), kvq.exact(), 33)
