"""The comparison of rotated methods: what a row of it must be, who beats whom, and the bias of its stress."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.eval.scores import exact_logits


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def row(cache: str, kld: float, bits: float, **more) -> dict:
    named = {"shape": "mha", "stress": "none", "mode": "copy", "ratio": 1.0, "new": cache.startswith("new")}
    return {"cache": cache, "kld": kld, "bits_stored": bits} | named | more


def test_losses_are_to_older_methods_of_no_more_bits(bench, monkeypatch):
    rotations = bench("rotations")
    monkeypatch.setattr(rotations, "bits_at_128", {"new": 2.2, "old": 2.2, "wide": 2.2, "wider": 3.0, "new 4": 4.2}.get)
    rows = [
        row("new", 0.2, 2.3),
        row("new", 0.1, 2.3, stress="keys x8"),
        row("old", 0.15, 2.34),
        row("old", 0.3, 2.3, stress="keys x8"),
        row("wide", 0.01, 2.5),
        row("wider", 0.01, 2.3),
        row("new 4", 0.9, 4.2),
    ]
    assert rotations.losses(rows) == [["`new`", "mha, none", "0.2000", "`old`", "0.1500"]]


def test_the_bound_is_said_as_it_came_out(bench):
    said = bench("rotations")._said
    lines = [["a", "", "", "", "perplexity held and KLD held"], ["b", "", "", "", "perplexity **missed** and KLD held"]]
    assert said(lines).startswith("Both parts are held on 1 of 2 shapes (a), that on the divergence on 2. **Elsewhere")


def test_every_row_of_the_comparison_can_be_read_and_is_asked_for_once(bench):
    rotations = bench("rotations")
    for shape in rotations.SHAPES:
        keys = [rotations.key_of(row) for row in rotations.rows_of(shape)]
        assert len(set(keys)) == len(keys)
        for _, cache, *_ in keys:
            kvq.parse(cache)


def test_a_key_bias_hardly_changes_what_a_model_says(bench):
    """Softmax ignores what all scores share; the slowest pair hardly turns within so few tokens."""
    stress, model, text = bench("stress"), tiny(head_dim=64), tokens(2, 64)
    biased = stress.under(model, "key bias")
    size = np.linalg.norm(np.asarray(biased.params["layers"]["k_bias"]), axis=-1)
    np.testing.assert_allclose(size, stress.BIAS * model.config.num_kv_heads**0.5, rtol=1e-5)
    plain, found = (np.asarray(exact_logits(x, text)) for x in (model, biased))
    assert 1e-5 < np.abs(found - plain).max() < 0.05 * plain.std()
    with pytest.raises(kvq.UserError, match="without QK-norm"):
        stress.under(tiny(qk_norm=True), "key bias")
