"""Stress changes what a cache must hold and not what the model computes."""

import importlib
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from cases import with_nightly

import kvqjax as kvq
from kvqjax.model import decoder
from kvqjax.model.rope import rotate

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ("qwen2", "qwen3", "mistral", "mha")
TOKENS = jnp.asarray(np.random.default_rng(0).integers(2, 64, (1, 96)), jnp.int32)


@pytest.fixture
def stress(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    return importlib.import_module("benchmarks.stress")


def shape(name):
    return kvq.load(ROOT / "tests" / "assets_models" / name)


def projected(model, params):
    """Queries (rotated) and keys before RoPE of layer 0, [T, heads, D]."""
    positions = jnp.arange(TOKENS.shape[1])[None]
    got = decoder.project(
        decoder.layer(params, 0), decoder.embed(params, TOKENS), positions, model.config
    )
    return got.q[0], got.k[0], rotate(got.k, positions, model.config)[0]


@pytest.mark.parametrize("name", with_nightly(SHAPES, ["qwen2"]))
def test_powers_of_two_change_keys_and_no_bit_of_the_logits(stress, name):
    model = shape(name)
    hard = stress.stressed(model, keys=8.0)
    wanted = np.asarray(decoder.logits(model.params, TOKENS, model.config))
    np.testing.assert_array_equal(decoder.logits(hard.params, TOKENS, model.config), wanted)
    before, after = (
        np.abs(np.asarray(projected(model, p)[1])).max(0) for p in (model.params, hard.params)
    )
    ratio = (after / before).round(6)
    assert set(np.unique(ratio)) == {1.0, 8.0}
    assert ((ratio == 8).sum(-1) == 4).all()  # two pairs of every head
    assert hard.fingerprint != model.fingerprint


def test_other_factors_change_the_logits_by_rounding_only(stress):
    """Every weight and its inverse are rounded once (relative 2^-24 each), so a score of n terms
    moves by a few 2^-24 * sum |q k| and the logits by far less than what one unit of a wrong factor
    would do."""
    model = shape("qwen2")
    c = model.config
    params = stress.scale_key_pairs(
        model.params, c, stress.outlier_factors(c, count=3, factor=11.0)
    )
    (q, _, k), (q2, _, k2) = projected(model, model.params), projected(model, params)
    terms = np.einsum("thd,skd->hkts", np.abs(q), np.abs(k))
    scores, moved = (
        np.einsum("thd,skd->hkts", np.asarray(a, np.float64), b) for a, b in ((q, k), (q2, k2))
    )
    # Terms of one query head belong to its own KV head.
    for head in range(c.num_heads):
        own = head * c.num_kv_heads // c.num_heads
        # Each factor costs one rounding per weight, and the sums over E inputs of q and k half an
        # ulp per addition.
        bound = 2 * (c.width + 4) * 2.0**-24 * terms[head, own].max()
        assert np.abs(scores[head, own] - moved[head, own]).max() <= bound
    wanted = np.asarray(decoder.logits(model.params, TOKENS, c))
    np.testing.assert_allclose(decoder.logits(params, TOKENS, c), wanted, atol=2e-3)


def test_what_cannot_be_put_in_is_refused(stress):
    model = shape("qwen3")
    c = model.config
    with pytest.raises(kvq.UserError, match="differ by head"):
        stress.scale_key_pairs(model.params, c, stress.outlier_factors(c, count=1, factor=2.0))
