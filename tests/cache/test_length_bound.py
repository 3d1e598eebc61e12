"""Static lengths (kvqjax/cache/runs.py): what is read follows the longest row, results stay the
same but for rounding, and programs are few."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import model_and_method, thinned, with_nightly
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.cache import runs as length_bound
from kvqjax.cache.layout import LengthBound
from kvqjax.cache.readers import decoded
from kvqjax.cache.runs import bound_for
from kvqjax.cache.state import bounded
from kvqjax.generation import decoding, loop
from kvqjax.methods.direct import slots_read

CAPACITY = 8192
forward = jax.jit(kvq.forward, static_argnames="last")
SPECS = ("exact", "kivi:bits=2,group=32,window=32", "kivi:bits=4,group=32,window=32,sinks=4")


@functools.cache
def held(spec: str, form: str = "heads", dtype: str = "f32"):
    """A model and a cache of two rows of 700 and 90 tokens."""
    kind = {"f32": jnp.float32, "bf16": jnp.bfloat16}[dtype]
    model = tiny()
    model = model.replace(params=jax.tree.map(lambda x: x.astype(kind), model.params))
    cache = kvq.init_cache(model, spec, 2, CAPACITY, form=form)
    _, cache = jax.jit(kvq.prefill)(model, tokens(2, 700), jnp.asarray([700, 90]), cache)
    return model, cache


@pytest.mark.nightly
@pytest.mark.parametrize("length", thinned([1, 5], 2))
@pytest.mark.parametrize("spec", with_nightly(SPECS, SPECS[-1:]))
def test_equal_but_for_rounding(spec, length):
    """A product over all tokens of the body sums in another order than one over a part of them, in
    loops that XLA:CPU chooses by length and processor. Codes are equal to the last bit."""
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
    model, cache = held(spec)
    new, counts = tokens(2, 710)[:, 700 : 700 + length], jnp.asarray([length, 1])
    whole, after = forward(model, new, counts, cache)
    assert np.isfinite(np.asarray(whole)[:, 0]).all()
    for few in (1024, 5000):
        got, own = forward(model, new, counts, bounded(cache, LengthBound(few)))
        same(got[0], whole[0])
        same(got[1, :1], whole[1, :1])
        for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(after), strict=True):
            same(a, b)


@pytest.mark.nightly
def test_equal_in_bfloat16():
    model, cache = held(SPECS[1], dtype="bf16")
    one = tokens(2, 701)[:, 700:], jnp.asarray([1, 1])
    whole, few = (forward(model, *one, bounded(cache, n))[0] for n in (None, LengthBound(1024)))
    np.testing.assert_array_equal(few, whole)


@pytest.mark.nightly
def test_a_row_that_is_longer_than_promised_gets_nan():
    model, cache = held("exact")
    logits, _ = forward(
        model, tokens(2, 1), jnp.asarray([1, 1]), bounded(cache, LengthBound(600)), last=True
    )
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()


@pytest.mark.nightly
def test_on_a_mesh():
    spec, text = SPECS[1], tokens(2, 321)
    model = kvq.shard(tiny(), spec, data=2, seq=2, model=2)
    cache = kvq.init_cache(model, spec, 2, 2048, form="heads")
    _, cache = forward(model, text[:, :320], jnp.asarray([320, 190]), cache)
    token = text[:, 320:], jnp.asarray([1, 1])
    found = [forward(model, *token, bounded(cache, bound))[0] for bound in (None, LengthBound(512))]
    # One row and head a device: XLA:CPU chooses loops by the length.
    np.testing.assert_allclose(*found, atol=1e-5)


def test_lengths_are_few_and_hold_what_they_must():
    layout = dataclasses.replace(held("exact")[1].layout, capacity=131072)
    found = [bound_for(layout, [n]) for n in range(1, 131073, 997)]
    assert {n.row for n in found if n} == {4096, 8192, 16384, 32768, 65536}
    for n, one in zip(range(1, 131073, 997), found, strict=True):
        assert n <= (one.row if one else 131072) <= max(2 * n, length_bound.LEAST)
    assert bound_for(held("exact", "planes")[1].layout, [1]) is None
    assert bound_for(dataclasses.replace(layout, capacity=100), [1]) is None
    assert slots_read(8192, 256, 131072) == (8192, True)
    assert slots_read(60000, 256, 131072) == (61440, False)
    assert slots_read(131072, 256, 131072) == (131072, False)


def test_bytes_read_follow_the_length():
    """What the compiler says of one step on rows of 2048 tokens in a cache of 65536: temporaries of
    a body's scores."""
    model = tiny()
    one = jax.ShapeDtypeStruct((2, 1), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    cache = jax.eval_shape(
        functools.partial(kvq.init_cache, model, "exact", 2, 65536, form="heads")
    )
    step = jax.jit(kvq.forward, donate_argnames="cache")
    lengths = LengthBound(2048), LengthBound(4096), None
    flops = [
        step.lower(model, *one, bounded(cache, n)).compile().cost_analysis()["flops"]
        for n in lengths
    ]
    assert flops[0] < 0.6 * flops[1]
    assert flops[1] < 0.1 * flops[2]


def test_generation_chooses_and_changes_no_token(monkeypatch):
    """A row grows past a static length while it is generated: two programs, and the tokens of
    one."""
    monkeypatch.setattr(length_bound, "LEAST", 64)
    original = decoding.init_cache
    monkeypatch.setattr(decoding, "init_cache", functools.partial(original, form="heads"))
    prompt, options = [tokens(1, 100)[0].tolist()], {"max_new_tokens": 60, "capacity": 256}
    loop.decode_steps.clear_cache()
    found = kvq.generate(tiny(), prompt, "exact", **options).tokens
    assert loop.decode_steps._cache_size() == 2
    monkeypatch.setattr(length_bound, "LEAST", 4096)
    assert kvq.generate(tiny(), prompt, "exact", **options).tokens == found
    assert loop.decode_steps._cache_size() == 2  # the whole capacity is one of them


SPANS = ("kvquant", "klt-own", "commvq", "xquant-latents", "higgs:bits=2,buffer=32")
ROWS = (700, 90, 0, 301)


@functools.cache
def ragged(spec: str):
    """A model and a cache of four rows, whose bodies are decoded."""
    model, method = (tiny(), kvq.parse(spec)) if ":" in spec else model_and_method(spec)
    cache = kvq.init_cache(model, method, len(ROWS), 4096, form="heads")
    _, cache = jax.jit(kvq.prefill)(model, tokens(len(ROWS), max(ROWS)), jnp.asarray(ROWS), cache)
    return model, cache


@pytest.mark.parametrize("length", thinned([1, 5], 2))
@pytest.mark.parametrize("spec", with_nightly(SPANS, SPANS[-1:]))
def test_spans_of_rows_give_what_all_slots_do(spec, length, monkeypatch):
    """Rows that together hold fewer tokens than the longest would make them: as many spans as they
    hold, in two parts; no row has another's tokens, and a row without any has the new ones
    alone."""
    model, cache = ragged(spec)
    monkeypatch.setattr(decoded, "MOST_SPAN", 256)
    monkeypatch.setattr(decoded, "SMALLEST_PART", 1024)
    monkeypatch.setattr(decoded, "LARGEST_PART", 1024)
    new, counts = tokens(4, 710)[:, 700 : 700 + length], jnp.asarray([length, 1, length, 1])

    def step(bound):
        return jax.jit(kvq.forward)(model, new, counts, bounded(cache, bound))

    whole, used = step(None)[0], []
    by_rows = decoded._by_rows
    monkeypatch.setattr(
        decoded, "_by_rows", lambda *x: (used.append(x[1].parts.mask.shape[0]), by_rows(*x))[1]
    )
    found = step(LengthBound(4096, 1100))[0]
    assert min(used) > 1
    for row, count in enumerate(counts):
        np.testing.assert_allclose(found[row, :count], whole[row, :count], rtol=0, atol=1e-5)
    assert np.isfinite(np.asarray(whole)[:, 0]).all()
    assert np.isnan(step(LengthBound(4096, 1000))[0]).all()  # less than they hold


@pytest.mark.nightly
@pytest.mark.parametrize("blocks", thinned([1, 3], 2))
@pytest.mark.parametrize("spec", with_nightly(SPANS, SPANS[-1:]))
def test_parts_of_a_body_give_what_all_of_it_does(spec, blocks, monkeypatch):
    """Of five blocks, five parts in a loop, or two, of which the last begins in the one before it:
    tokens 512 to 700 of a row lie in both."""
    model, cache = ragged(spec)
    new, counts = tokens(4, 710)[:, 700:701], jnp.ones(4, jnp.int32)
    short = bounded(cache, LengthBound(1280))

    def step():
        return jax.jit(lambda *x: kvq.forward(*x))(model, new, counts, short)[0]

    whole = step()
    monkeypatch.setattr(decoded, "SMALLEST_PART", 4 * blocks * 256)
    monkeypatch.setattr(decoded, "LARGEST_PART", 4 * blocks * 256)
    np.testing.assert_allclose(step(), whole, rtol=0, atol=1e-5)


def test_totals_are_few_and_for_bodies_that_are_decoded():
    layout = dataclasses.replace(ragged(SPANS[-1])[1].layout, capacity=131072)
    evenly = [131072 * (row + 1) // 8 for row in range(8)]
    assert bound_for(layout, evenly) == LengthBound(131072, 8 * 131072 * 9 // 16)
    assert bound_for(layout, [131072] * 8) is None
    assert bound_for(layout, [5000, 100]) == LengthBound(8192, 5 * 1024)
    assert bound_for(dataclasses.replace(held("exact")[1].layout, capacity=131072), evenly) is None
    some = {bound_for(layout, [131072, n]) for n in range(1, 131073, 997)}
    assert len(some) <= length_bound.PROMISED_TOTALS
