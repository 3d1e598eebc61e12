"""How many files a reader opens to follow one decode step, those that tracing it passes through;
and how many functions a plan calls."""

import dataclasses
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from tiny import tiny

import kvqjax as kvq
from kvqjax.model.loading import config_of


def calls_in(call) -> Counter[str]:
    """How many functions of each of the library's files are called while `call` runs."""
    found: Counter[str] = Counter()

    def note(frame, event, _):
        module, file = frame.f_globals.get("__name__", ""), frame.f_globals.get("__file__")
        if (
            event == "call"
            and module.split(".")[0] == "kvqjax"
            and frame.f_code.co_filename == file
        ):
            found[module] += 1

    old = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(old)
    return found


def files_of(call, spec: str, length: int) -> set[str]:
    """The library's files of which a function is called while `call` is traced for `length` new
    tokens; planning was done before."""
    model = tiny()
    cache = kvq.init_cache(model, spec, 2, 1024)
    counts = jnp.full(2, length, jnp.int32)
    arguments = model, jnp.zeros((2, length), jnp.int32), counts, cache

    def trace():
        return jax.eval_shape(lambda *x: call(*x), *arguments)

    trace()
    return set(calls_in(trace))


# These numbers may only fall.
@pytest.mark.parametrize(("spec", "most"), [("exact", 21), ("kivi:bits=2,window=32", 24)])
def test_a_decode_step_passes_through_few_files(spec, most):
    found = files_of(kvq.forward, spec, 1)
    assert {"kvqjax.step.forward", "kvqjax.cache.attention", "kvqjax.cache.append"} <= found
    assert len(found) <= most, "\n".join(sorted(found))


def test_a_prompt_passes_through_few_files():
    found = files_of(kvq.prefill, "kivi:bits=2,window=32", 200)
    assert {"kvqjax.step.prompt", "kvqjax.cache.append"} <= found
    assert len(found) <= 21, "\n".join(sorted(found))


def test_a_new_cache_passes_through_few_files():
    model = tiny()
    kvq.init_cache(model, "kivi:bits=2,window=32", 2, 512)  # the choice of kernels is kept
    calls = calls_in(lambda: kvq.init_cache(model, "kivi:bits=2,window=32", 2, 1024))
    assert {"kvqjax.step.new_cache", "kvqjax.cache.runs", "kvqjax.cache.state"} <= set(calls)
    assert len(calls) <= 27, "\n".join(sorted(calls))


def test_a_plan_passes_through_few_files_and_makes_few_calls():
    """A search for the longest context plans some twenty lengths: what depends on no length is
    computed once."""
    # A vocabulary that no other test plans, so that nothing of it was kept.
    config = dataclasses.replace(config_of("llama-3.1-8b"), vocab_size=128_002)
    first = calls_in(lambda: kvq.plan(config, "kivi:bits=2", context=131_072, device="h100"))
    assert sum(first.values()) <= 6_300, first.most_common(5)
    # What holds for every plan was kept: one for another chip passes the files that compute its
    # figures.
    second = calls_in(lambda: kvq.plan(config, "kivi:bits=2", context=65_536, device="v5e"))
    assert len(second) <= 33, "\n".join(sorted(second))
