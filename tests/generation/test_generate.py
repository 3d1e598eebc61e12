"""Generation: greedy equals the plain forward, rows are independent, options work, programs are
bounded."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from cases import with_nightly
from greedy import reference
from tiny import tiny

import kvqjax as kvq
from kvqjax.generation import loop as generation
from kvqjax.generation.options import GenerateOptions
from kvqjax.generation.prompt_ids import bucket
from kvqjax.generation.sampling import History, make_sampling, sample

PROMPTS = [[1, 2, 3, 4, 5], list(range(20))]


@pytest.mark.smoke
@pytest.mark.parametrize("chunk", [None, 16])
def test_greedy_equals_the_plain_forward_for_ragged_prompts(chunk):
    model = tiny()
    made = kvq.generate(model, PROMPTS, max_new_tokens=24, chunk=chunk).tokens
    for prompt, tokens in zip(PROMPTS, made, strict=True):
        want, margin = reference(model, prompt, 24)
        assert margin > 1e-4, "a tie would make this comparison meaningless"
        assert tokens == want


@pytest.mark.nightly
@pytest.mark.smoke
def test_eight_bits_give_the_same_tokens_and_a_row_alone_too():
    method = kvq.kivi(bits=8, window=32)
    together = kvq.generate(tiny(), PROMPTS, method, max_new_tokens=24).tokens
    assert together == kvq.generate(tiny(), PROMPTS, max_new_tokens=24).tokens
    assert kvq.generate(tiny(), PROMPTS[:1], method, max_new_tokens=24).tokens == together[:1]


def test_end_tokens_end_a_row_and_are_not_kept():
    plain = kvq.generate(tiny(), PROMPTS, max_new_tokens=24).tokens
    end = plain[1][10]
    made = kvq.generate(tiny(), PROMPTS, max_new_tokens=24, eos_ids=[end]).tokens
    for row, whole in zip(made, plain, strict=True):
        assert row == (whole[: whole.index(end)] if end in whole else whole)


def test_seeds_repeat_and_differ():
    options = {"max_new_tokens": 16, "temperature": 1.5}
    first = kvq.generate(tiny(), PROMPTS, seed=1, **options).tokens
    assert first == kvq.generate(tiny(), PROMPTS, seed=1, **options).tokens
    assert first != kvq.generate(tiny(), PROMPTS, seed=2, **options).tokens


def test_stride_does_not_change_the_answer():
    whole = kvq.generate(tiny(), PROMPTS, max_new_tokens=24).tokens
    pieces = [piece.tokens for piece in kvq.stream(tiny(), PROMPTS, max_new_tokens=24, stride=5)]
    assert [list(itertools.chain(*row)) for row in zip(*pieces, strict=True)] == whole
    assert [len(piece[0]) for piece in pieces] == [1, 5, 5, 5, 5, 3]


@pytest.mark.nightly
def test_programs_are_one_per_bucket_and_none_per_step():
    generation.prefill_donated.clear_cache()
    generation.decode_steps.clear_cache()
    for length in (3, 9, 16):
        kvq.generate(tiny(), [list(range(length))], max_new_tokens=8, capacity=256)
    assert generation.prefill_donated._cache_size() == 1
    kvq.generate(tiny(), [list(range(17))], max_new_tokens=8, capacity=256)
    assert generation.prefill_donated._cache_size() == 2
    assert generation.decode_steps._cache_size() == 1
    assert [bucket(n) for n in (1, 16, 17, 512, 513, 1025)] == [16, 16, 32, 512, 1024, 1536]


def test_bad_input_is_named():
    for options, message in [
        ({"capacity": 8}, "do not fit a capacity of 8"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ]:
        with pytest.raises(kvq.UserError, match=message):
            kvq.generate(tiny(), PROMPTS, **options)
    with pytest.raises(kvq.UserError, match="prompt 1 is empty"):
        kvq.generate(tiny(), [[1], []])
    with pytest.raises(kvq.UserError, match=r"outside 0 \.\. 49"):
        kvq.generate(tiny(), [[50]])


CALLS = {
    "generate": kvq.generate,
    "stream": lambda *given, **options: list(kvq.stream(*given, **options)),
    "speculate": kvq.speculate,
    "beam_search": kvq.beam_search,
}


@pytest.mark.parametrize("name", with_nightly(CALLS, ["generate"]))
def test_texts_beyond_what_the_model_was_trained_for_are_asked_for(name):
    model, prompts = tiny(max_position=24), [[1, 2, 3], list(range(20))]
    with pytest.raises(
        kvq.UserError, match=r"20 tokens and 5 new ones go beyond the 24 .* beyond_trained=True"
    ):
        CALLS[name](model, prompts, max_new_tokens=5)
    # Up to its last position nothing is to be asked, and a greater capacity is room, not text.
    CALLS[name](model, prompts, max_new_tokens=4)
    CALLS[name](model, prompts, max_new_tokens=5, beyond_trained=True)
    with pytest.raises(kvq.UserError, match="64 new ones go beyond"):
        CALLS[name](model, [[1]])
    with pytest.raises(kvq.UserError, match="eos_ids=50; it must be a whole number from 0 to 49"):
        CALLS[name](model, prompts, max_new_tokens=4, eos_ids=[1, 50])


LOGITS = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.06, 0.04]]))


def test_repetition_penalty_lowers_seen_tokens_only():
    sampling = make_sampling(GenerateOptions(repetition_penalty=1.5))
    seen = jnp.asarray([[True, False, False, False, False]])
    none = jnp.zeros(seen.shape, jnp.int32)
    assert int(sample(jax.random.key(0), LOGITS, History(seen, none), sampling)[0]) == 1
    assert int(sample(jax.random.key(0), LOGITS, History(~seen, none), sampling)[0]) == 0


@pytest.mark.nightly
def test_a_chunk_or_a_stride_beyond_any_text_is_as_long_as_the_text():
    """At their full length XLA ends the process."""
    plain = kvq.generate(tiny(), PROMPTS, max_new_tokens=4).tokens
    assert kvq.generate(tiny(), PROMPTS, max_new_tokens=4, chunk=10**9).tokens == plain
    assert kvq.generate(tiny(), PROMPTS, max_new_tokens=4, stride=2**31 - 1).tokens == plain


def test_a_cache_that_no_memory_holds_is_one_line():
    with pytest.raises(
        kvq.UserError, match="exact: not enough memory for a cache of 2 rows of 2147483647 tokens"
    ) as caught:
        kvq.generate(tiny(), PROMPTS, max_new_tokens=4, capacity=2**31 - 1)
    assert "\n" not in str(caught.value)
