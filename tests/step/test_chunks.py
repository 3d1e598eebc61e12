"""Texts that were read alone stand behind each other: their codes stay as they are, exact keys are
turned to their new places, and what is read anew sees all that comes before."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algebra import encoded, extend, fresh, same_words, turned_by_hand
from cases import model_and_method, with_constants, with_nightly
from meshes import pending
from recurrent import hybrid
from tiny import tiny, tokens

import kvqjax as kvq

# Rows that end within a unit, at the edge of one, and within the sinks.
HEADS = [list(range(105)), list(range(64)), [7]]
# Longer than a window, and hardly anything.
CHUNKS = [list(range(200, 345)), list(range(300, 397)), list(range(40, 43))]
MORE = [list(range(400, 490))] * 3
forward, prefill = jax.jit(kvq.forward), jax.jit(kvq.prefill)
LOCAL, GLOBAL = kvq.Rope(theta=100.0), kvq.Rope(kind="linear", factor=8.0)  # of layers


@pytest.mark.parametrize(
    "name",
    with_nightly(
        ["kvquant", "klt-own", "aqua-klt", "commvq", "xquant-cl"],
        ["klt-own"],
    ),
)
def test_words_are_those_of_a_cache_that_got_all_tokens(name):
    model, _ = model_and_method(name)
    joined = kvq.concatenate([fresh(name, HEADS), fresh(name, CHUNKS)], model=model)
    rows = [head + chunk for head, chunk in zip(HEADS, CHUNKS, strict=True)]
    assert joined.lengths.tolist() == list(map(len, rows))
    assert joined.finite.tolist() == list(map(len, rows))
    for row, held in enumerate(rows):
        most = max(int(counts[row]) for run in encoded(joined) for counts in run.values())
        # Behind them come tokens that let the other cache encode as much.
        assert same_words(joined, row, fresh(name, [held + MORE[0]]), 0) == most
    # A third text behind the second one, and then more tokens: sinks and window stand right.
    again = kvq.concatenate([joined, fresh(name, CHUNKS)], model=model, capacity=600)
    assert again.lengths.tolist() == [
        len(held) + len(more) for held, more in zip(rows, CHUNKS, strict=True)
    ]
    longer = extend(name, joined, MORE)
    assert longer.lengths.tolist() == [len(held) + 90 for held in rows]


def cached(model, spec: str, ids: np.ndarray, capacity: int = 256):
    """A cache of one row that holds a text."""
    counts = jnp.asarray([ids.shape[1]], jnp.int32)
    return prefill(model, jnp.asarray(ids), counts, kvq.init_cache(model, spec, 1, capacity))[1]


def test_keys_are_turned_and_first_tokens_read_anew():
    model, text = tiny(rope=(LOCAL, GLOBAL)), np.asarray(tokens(1, 180))
    head, chunk = text[:, :100], text[:, 100:]
    caches = [cached(model, "exact", head), cached(model, "exact", chunk, 96)]
    joined = kvq.concatenate(caches, model=model, tokens=[chunk], recompute=16)
    read = cached(model, "exact", text)
    assert int(joined.lengths[0]) == 180
    for layer in range(model.config.num_layers):
        shape = dataclasses.replace(model.config, rope=model.config.rope[layer])
        k, v, valid = (np.asarray(x[0]) for x in kvq.dense(joined, layer, model))
        all_k, all_v, _ = (np.asarray(x[0]) for x in kvq.dense(read, layer, model))
        alone_k, alone_v, _ = (np.asarray(x[0]) for x in kvq.dense(caches[1], layer, model))
        assert valid.sum() == 180
        np.testing.assert_allclose(k[:116], all_k[:116], atol=2e-5)
        np.testing.assert_allclose(v[:116], all_v[:116], atol=2e-5)
        np.testing.assert_array_equal(v[116:180], alone_v[16:80])
        np.testing.assert_allclose(
            k[116:180], turned_by_hand(alone_k[16:80], -100, shape), atol=2e-5
        )
    # A text that is read anew to its end is read as one text.
    anew = kvq.concatenate(caches, model=model, tokens=[chunk], recompute=80)
    step = jnp.asarray([[7]], jnp.int32), jnp.ones(1, jnp.int32)
    logits = [np.asarray(forward(model, *step, cache)[0]) for cache in (anew, read)]
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("rope", with_nightly(["pre", "post"], ["pre"]))
def test_one_layer_cannot_tell_texts_apart(rope):
    """In a model of one layer what is cached depends on the token and its place alone."""
    spec = "kivi:bits=4,value_group=16,window=32,rope=pre,sinks=4" if rope == "pre" else "exact"
    model, text = tiny(num_layers=1), np.asarray(tokens(1, 200))
    caches = [cached(model, spec, text[:, :96]), cached(model, spec, text[:, 96:])]
    step = jnp.asarray([[7]], jnp.int32), jnp.ones(1, jnp.int32)
    logits = [
        np.asarray(forward(model, *step, cache)[0])
        for cache in (kvq.concatenate(caches), cached(model, spec, text))
    ]
    # The chunk's sinks are coded, and its last unit is decoded and waits in the window.
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-4 if rope == "post" else 0.05)


@pytest.mark.parametrize(
    "spec", with_nightly(["klt:bits=3,heads=own,buffer=32", "exact"], ["exact"])
)
def test_a_mesh_puts_them_together_as_one_device_does(spec):
    model = with_constants(tiny(), kvq.parse(spec))
    results = []
    for place in (model, kvq.shard(model, spec, model=2)):
        caches = []
        for lengths in ((300, 70), (90, 101)):
            cache = kvq.init_cache(place, spec, 2, 512)
            caches.append(jax.jit(kvq.commit)(place, cache, pending(cache), jnp.asarray(lengths)))
        joined = kvq.concatenate(caches, model=place)
        for before, after in zip(jax.tree.leaves(caches[0]), jax.tree.leaves(joined), strict=True):
            assert after.sharding.is_equivalent_to(before.sharding, before.ndim)
        results.append(joined)
    for got, wanted in zip(*map(jax.tree.leaves, results), strict=True):
        # Codes are equal. What is decoded was summed in another order.
        rounding = 1e-5 if got.dtype == jnp.float32 else 0
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rounding, rounding)


def test_what_cannot_be_put_together_is_refused(unchecked):
    def refused(caches, line, **options):
        with pytest.raises(kvq.UserError, match=line):
            kvq.concatenate(caches, **options)

    def empty(spec="exact", model=None, rows=1, capacity=256, **options):
        return kvq.init_cache(model or tiny(), spec, rows, capacity, **options)

    held = cached(tiny(), "exact", np.asarray(tokens(1, 200)))
    refused(held, "caches is a Cache; wanted a list of at least two")
    refused([held], "at least two caches")
    refused([held, held], "row 0 would hold 400 tokens.*capacity of 256; pass capacity=")
    refused([empty("kivi:bits=2"), empty("kivi:bits=2")], "concatenate: .*codes of keys after RoPE")
    refused([empty(model=hybrid())] * 2, "concatenate: recurrent layers")
    refused([held, empty("kivi:bits=2,rope=pre")], "the other cache has another method")
    refused([held, empty(capacity=512)], "has a larger capacity, 512")
    refused([held, empty(rows=2)], "a cache of 2 rows cannot stand behind one of 1")
    refused([empty(pages=2, capacity=512)] * 2, "keys after RoPE, and pages")
    refused([held, empty()], r"recompute=4 reads tokens anew; pass model=", recompute=4)
    refused([held, empty()], "wants a list of the ids of 1 chunk", recompute=4, model=tiny())
    few = {"model": tiny(), "recompute": 4, "tokens": [np.zeros((1, 3), np.int32)]}
    refused([held, empty()], "tokens have 3 ids a row; recompute=4 wants as many", **few)
    beyond = few | {"tokens": [np.full((1, 4), 10**6, np.int32)]}
    refused([held, empty()], "tokens=.*the model's token ids", **beyond)
