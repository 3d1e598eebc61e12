"""How many programs a generation compiles does not grow with its length, nor follow how many tokens
are wanted."""

import numpy as np
import pytest
from tiny import tiny

import kvqjax as kvq
from kvqjax.generation import beam, speculation
from kvqjax.generation import loop as generation
from kvqjax.generation.prompt_ids import padded_rows


def test_a_long_ragged_generation_compiles_a_fixed_number_of_programs():
    model, method = tiny(), kvq.parse("kivi:bits=2,window=32")
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 50, n).tolist() for n in (5, 13, 9)]
    programs = (generation.prefill_donated, generation.first_token, generation.decode_steps)
    before = [p._cache_size() for p in programs]
    out = kvq.generate(model, prompts, method, max_new_tokens=500, capacity=1024)
    assert [len(t) for t in out.tokens] == [500] * 3
    assert [p._cache_size() - b for p, b in zip(programs, before, strict=True)] == [1, 1, 1]


METHOD = "kivi:bits=2,window=32"


def programs(*functions):
    """How many programs these have been compiled to so far."""
    return [function._cache_size() for function in functions]


@pytest.mark.nightly
def test_how_many_tokens_are_wanted_is_data():
    """The same prompt and, of its bucket, another; the capacity is chosen by buckets too."""
    model, functions = (
        tiny(),
        (generation.prefill_donated, generation.first_token, generation.decode_steps),
    )
    kvq.generate(model, [[1] * 180], METHOD, max_new_tokens=65, eos_ids=())
    before = programs(*functions)
    for length, new in ((180, 66), (180, 80), (180, 100), (180, 128), (130, 20), (250, 1)):
        out = kvq.generate(model, [[1] * length], METHOD, max_new_tokens=new, eos_ids=())
        assert [len(row) for row in out.tokens] == [new]
    assert programs(*functions) == before


@pytest.mark.nightly
def test_beams_and_drafts_share_their_programs_too():
    model, functions = (
        tiny(),
        (speculation.prefill_donated, speculation._first, speculation._rounds),
    )
    kvq.speculate(model, [[1] * 20], METHOD, max_new_tokens=65, eos_ids=())
    before = programs(*functions)
    for new in (66, 80, 100):
        out = kvq.speculate(model, [[1] * 20], METHOD, max_new_tokens=new, eos_ids=())
        assert [len(row) for row in out.tokens] == [new]
    assert programs(*functions) == before
    functions = beam.prefill_donated, beam._begin, beam._search
    kvq.beam_search(model, [[1] * 20], METHOD, beams=2, max_new_tokens=33, eos_ids=())
    before = programs(*functions)
    for new in (34, 50, 64):
        out = kvq.beam_search(model, [[1] * 20], METHOD, beams=2, max_new_tokens=new, eos_ids=())
        assert [len(row) for row in out.tokens[0]] == [new, new]
    assert programs(*functions) == before


def test_a_few_short_prompts_share_a_batch():
    """Rows without a prompt raise no flag, and the cache that comes back has none of them."""
    model, functions = (
        tiny(),
        (generation.prefill_donated, generation.first_token, generation.decode_steps),
    )
    prompts = [[1, 2, 3], [4] * 9, [5], [6, 7]]
    whole = kvq.generate(model, prompts, METHOD, max_new_tokens=40, eos_ids=())
    before = programs(*functions)
    out = kvq.generate(model, prompts[:3], METHOD, max_new_tokens=40, eos_ids=())
    assert programs(*functions) == before
    assert out.tokens == whole.tokens[:3]
    assert (out.cache.batch, out.cache.lengths.tolist()) == (3, whole.cache.lengths.tolist()[:3])
    assert not out.cache.overflow.any()

    def rows(count, length, capacity):
        return padded_rows(model, [[1] * length] * count, capacity)

    assert [rows(n, 512, 4096) for n in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, 9]
    assert (rows(3, 513, 4096), rows(3, 512, 4097)) == (3, 3)
