"""How many programs a generation compiles does not grow with its length."""

import numpy as np
from tiny import tiny

import kvqjax as kvq
from kvqjax.generation import loop as generation


def test_a_long_ragged_generation_compiles_a_fixed_number_of_programs():
    model, method = tiny(), kvq.parse("kivi:bits=2,window=32")
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 50, n).tolist() for n in (5, 13, 9)]
    programs = (generation._prefill, generation._first, generation.decode_steps)
    before = [p._cache_size() for p in programs]
    out = kvq.generate(model, prompts, method, max_new_tokens=500, capacity=1024)
    assert [len(t) for t in out.tokens] == [500] * 3
    assert [p._cache_size() - b for p, b in zip(programs, before, strict=True)] == [1, 1, 1]


def test_prompts_of_one_bucket_share_a_program():
    model, method = tiny(), kvq.parse("kivi:bits=2,window=32")
    sizes = []
    for length in (17, 25, 32, 33, 40):
        kvq.generate(model, [[1] * length], method, max_new_tokens=2, capacity=256)
        sizes.append(generation._prefill._cache_size())
    assert sizes[0] == sizes[1] == sizes[2] == sizes[3] - 1 == sizes[4] - 1
