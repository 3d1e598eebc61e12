"""Speculative decoding gives plain greedy decoding's tokens, whatever is drafted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import model_and_method
from tiny import tiny

import kvqjax as kvq
from kvqjax.generation import speculation
from kvqjax.generation.speculation import lookup

PROMPTS = [[7, 3, 9] * 20, list(range(40))]
NEW = 60  # more than a window of 32 and a unit of 32: flushes fall inside drafts


def plain(model, method, new=NEW, **options):
    return kvq.generate(model, PROMPTS, method, max_new_tokens=new, **options).tokens


@pytest.mark.parametrize(
    "name", ["kivi2", pytest.param("kivi-published", marks=pytest.mark.nightly)]
)
def test_equals_greedy_with_lookup(name):
    model, method = model_and_method(name)
    out = kvq.speculate(model, PROMPTS, method, max_new_tokens=NEW, draft=5)
    assert out.tokens == plain(model, method)
    assert out.rounds < NEW, "no draft was ever accepted: the test shows nothing"
    assert 0 < out.accepted < out.drafted


@pytest.mark.nightly
def test_a_model_that_drafts_for_itself_is_always_right():
    """All tokens accepted: a row takes 6 a round. Its cache flushes inside drafts, in drafter and
    target."""
    model, method = model_and_method("kivi2")
    out = kvq.speculate(
        model, PROMPTS, method, max_new_tokens=NEW, draft=5, drafter=model, drafter_method=method
    )
    assert out.tokens == plain(model, method)
    assert out.rounds == -(-(NEW - 1) // 6)


@pytest.mark.nightly
def test_a_drafter_that_is_always_wrong():
    """None accepted: its favourite token is one that the target never chooses."""
    model, method = model_and_method("kivi2")
    wanted = plain(model, method)
    never = next(t for t in range(50) if t not in {t for row in wanted for t in row})
    # One channel of the last norm carries the favourite: the embedding is 0 but there, whatever the
    # context.
    params = jax.tree.map(jnp.zeros_like, model.params) | {
        "norm": jnp.ones_like(model.params["norm"])
    }
    params["embed"] = params["embed"].at[:, 0].set(1.0)
    params["head"] = params["head"].at[0, never].set(1.0)
    wrong = kvq.Model(params=params, constants=(), config=model.config)
    out = kvq.speculate(model, PROMPTS, method, max_new_tokens=NEW, draft=3, drafter=wrong)
    assert out.tokens == wanted
    assert (out.rounds, out.accepted) == (NEW - 1, 0)


@pytest.mark.nightly
def test_end_token_and_other_lengths_compile_nothing_new():
    model, method = model_and_method("kivi2")
    wanted = plain(model, method)
    end = wanted[0][20]
    out = kvq.speculate(model, PROMPTS, method, max_new_tokens=NEW, draft=5, eos_ids=[end])
    assert out.tokens == plain(model, method, eos_ids=[end])
    compiled = speculation._rounds._cache_size()
    shorter = [p[:-3] for p in PROMPTS]
    kvq.speculate(model, shorter, method, max_new_tokens=NEW - 9, draft=5, eos_ids=[end])
    assert speculation._rounds._cache_size() == compiled


def test_lookup_finds_the_latest_longest_match():
    known = jnp.asarray(
        [[1, 2, 3, 4, 1, 2, 9, 1, 2, 0, 0, 0], [5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0]]
    )
    drafted = np.asarray(lookup(known, jnp.asarray([9, 4]), 3, 2))
    assert drafted[0].tolist() == [9, 1, 2]
    longer = jnp.asarray([[3, 1, 2, 8, 4, 1, 2, 9, 3, 1, 2, 0]])
    assert np.asarray(lookup(longer, jnp.asarray([11]), 2, 3)).tolist() == [[8, 4]]


def test_bad_input():
    model, method = model_and_method("kivi2")
    with pytest.raises(kvq.UserError, match="vocabulary of 40 tokens"):
        kvq.speculate(model, PROMPTS, method, drafter=tiny(vocab_size=40))
    with pytest.raises(kvq.UserError, match="draft=0"):
        kvq.speculate(model, PROMPTS, method, draft=0)


def test_a_draft_longer_than_the_answer_is_as_long_as_it():
    """At its full length XLA ends the process."""
    model, method = model_and_method("kivi2")
    out = kvq.speculate(model, PROMPTS, method, max_new_tokens=5, draft=10**9)
    assert out.tokens == plain(model, method, 5)
    with pytest.raises(
        kvq.UserError, match="ngram=1000000000; it must be a whole number from 1 to 64"
    ):
        kvq.speculate(model, PROMPTS, method, ngram=10**9)
