"""Evaluation: the same tokens for both caches, modes that mean what they say, numbers that can be
wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny

import kvqjax as kvq
from kvqjax.eval import drift, perplexity, retrieval
from kvqjax.eval.measure_retrieval import problems
from kvqjax.eval.windows import encoded_from, growth, score_chunk, windows
from kvqjax.model import decoder

IDS = np.random.default_rng(0).integers(0, 50, 700)
OPTIONS = {"window": 192, "tokens": 384, "batch": 2}


plain_logits = jax.jit(decoder.logits, static_argnums=2)


def reference_nll(model, window):
    logits = plain_logits(model.params, jnp.asarray(window[None]), model.config)[0, :-1]
    return -np.asarray(jax.nn.log_softmax(logits))[np.arange(len(window) - 1), window[1:]]


def test_exact_perplexity_equals_a_plain_forward():
    row = perplexity(tiny(), IDS, kvq.exact(), chunk=32, **OPTIONS)
    want = np.concatenate([reference_nll(tiny(), w) for w in windows(IDS, 192, 384)])
    assert row["tokens"] == len(want) == 382
    np.testing.assert_allclose(row["ppl"], np.exp(want.mean()), rtol=1e-5)
    assert row["ppl"] == row["ppl_exact"]
    assert (row["kld"], row["top1"]) == (0, 1)


def test_prefill_mode_scores_the_second_half_only():
    row = perplexity(tiny(), IDS, kvq.kivi(bits=8, window=32), mode="prefill", chunk=32, **OPTIONS)
    want = np.concatenate([reference_nll(tiny(), w)[96:] for w in windows(IDS, 192, 384)])
    assert row["tokens"] == len(want)
    np.testing.assert_allclose(row["ppl_exact"], np.exp(want.mean()), rtol=1e-5)
    assert row["mode"] == "prefill-exact-chunk32"


@pytest.mark.nightly
def test_fewer_bits_diverge_more():
    rows = [
        perplexity(tiny(), IDS, kvq.kivi(bits=b, window=32), chunk=32, **OPTIONS) for b in (8, 2)
    ]
    assert 0 < rows[0]["kld"] < 1e-3 < rows[1]["kld"]
    assert rows[0]["top1"] > rows[1]["top1"]
    assert rows[0]["bytes"] > rows[1]["bytes"]


@pytest.mark.nightly
def test_chunk_one_equals_step_by_step_decoding():
    model, method = tiny(), kvq.kivi(bits=2, window=32)
    row = perplexity(model, IDS, method, chunk=1, window=96, tokens=96)
    cache, step, total = kvq.init_cache(model, method, 1, 96), jax.jit(kvq.forward), 0.0
    for position in range(95):
        logits, cache = step(
            model, jnp.asarray(IDS[None, position : position + 1]), jnp.ones(1, jnp.int32), cache
        )
        total -= float(jax.nn.log_softmax(logits[0, 0])[IDS[position + 1]])
    np.testing.assert_allclose(row["ppl"], np.exp(total / 95), rtol=1e-5)


def test_scores_against_numpy():
    rng = np.random.default_rng(1)
    logits, reference = rng.normal(size=(2, 1, 3, 5)).astype(np.float32)
    targets, valid = np.array([[1, 2, 4]]), np.array([[True, True, False]])
    p, r = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (logits, reference))
    got = score_chunk(
        jnp.asarray(logits), jnp.asarray(reference), jnp.asarray(targets), jnp.asarray(valid)
    )
    np.testing.assert_allclose(got.nll, -np.log(p[0, [0, 1], [1, 2]]).sum(), rtol=1e-5)
    np.testing.assert_allclose(got.kld, (r * np.log(r / p)).sum(-1)[0, :2].sum(), rtol=1e-5)
    np.testing.assert_allclose(got.klds[0, :2].sum(), got.kld, rtol=1e-6)
    assert got.klds[0, 2] == -1, "it does not count"
    np.testing.assert_allclose(got.top1, (p.argmax(-1) == r.argmax(-1))[0, :2].sum())
    assert float(got.tokens) == 2


@pytest.mark.parametrize(
    "policy",
    [
        "kivi:bits=2,window=32",
        pytest.param("kivi:bits=2,group=64,window=0,sinks=3", marks=pytest.mark.nightly),
    ],
)
def test_growth_starts_where_all_is_encoded(policy):
    """One step earlier every cache is still exact; a span that begins earlier, be it by one step,
    is not the first."""
    model, method = tiny(), kvq.parse(policy)
    first = encoded_from(model, method, 192)
    row = drift(model, IDS, method, chunk=1, window=192, tokens=192, bins=192)
    assert max(np.abs(row["kld"][:first])) < 1e-6 < row["kld"][first]
    assert growth([0.5, 0.1, 0.2, 0.6], [0, 64, 128, 192], 64) == pytest.approx(6.0)
    assert growth([0.5, 0.1, 0.2, 0.6], [0, 64, 128, 192], 65) == pytest.approx(3.0)
    assert growth([0.5, 0.1, 0.2, 0.6], [0, 64, 128, 192], 129) is None  # only the last span
    assert growth([0.0, 1e-10, 2e-10], [0, 64, 128], 0) is None  # the exact cache: rounding


@pytest.mark.nightly
def test_drift_reports_that_growth():
    model, method = tiny(), kvq.kivi(bits=2, window=32)
    row = drift(model, IDS, method, chunk=32, window=192, tokens=384, bins=6)
    first = -(-encoded_from(model, method, 192) // 32)
    assert 0 < first < 5
    assert row["growth"] == pytest.approx(row["kld"][-1] / row["kld"][first])
    assert (
        drift(model, IDS, kvq.exact(), chunk=32, window=192, tokens=192, bins=3)["growth"] is None
    )


def test_bytes_are_counted_at_the_context_that_is_named():
    row = perplexity(tiny(), IDS, kvq.kivi(bits=2, window=32), chunk=32, context=4096, **OPTIONS)
    book = kvq.ledger(
        jax.eval_shape(lambda: kvq.init_cache(tiny(), kvq.kivi(bits=2, window=32), 1, 4096))
    )
    assert (row["context"], row["bytes"], row["bits_stored"]) == (
        4096,
        book.bytes,
        book.bits_stored,
    )


@pytest.mark.nightly
def test_drift_bins_add_up_to_perplexity():
    method = kvq.kivi(bits=2, window=32)
    row = drift(tiny(), IDS, method, chunk=32, window=192, tokens=384, bins=3)
    whole = perplexity(tiny(), IDS, method, chunk=32, window=192, tokens=384, batch=1)
    # Two windows, three bins of two chunks; the last token predicts nothing.
    weights = np.array([128, 128, 126])
    np.testing.assert_allclose(np.average(row["kld"], weights=weights), whole["kld"], rtol=1e-5)
    assert row["kld"][0] < row["kld"][2]


def test_recall_model_retrieves_and_too_few_bits_lose():
    model = kvq.load("recall")
    options = {"length": 256, "samples": 8}
    assert retrieval(model, kvq.exact(), **options)["accuracy"] == 1
    assert retrieval(model, kvq.uniform(bits=1), chunk=32, **options)["accuracy"] < 0.7


def test_problems_have_their_length_and_answer():
    model = kvq.load("recall")
    prompts, answers = problems(model, "kv", 256, 4, seed=0)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert 230 < len(prompt) + len(answer) <= 256
        text = model.tokenizer.decode(prompt)
        key = text.split("?")[1]
        assert key + model.tokenizer.decode(answer) in text.split("?")[0]
    with pytest.raises(kvq.UserError, match="one window"):
        windows(IDS[:10], 192, 384)
