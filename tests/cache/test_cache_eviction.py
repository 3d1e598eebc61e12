"""Token eviction against the oracle of evicted.py, and with every method."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algebra import body, extend, fresh
from cases import CASES, model_and_method, with_nightly
from evicted import (
    BOUND,
    BUDGET,
    CAPACITY,
    LENGTH,
    SPEC,
    UNIT,
    ByHand,
    begin,
    check,
    forward,
    prefill,
    sharp,
    steps,
)
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.cache import CacheLayout, runs_of
from kvqjax.methods import Keep
from kvqjax.parallel.rules import Rules

attend = jax.jit(kvq.attend, static_argnames=("within", "last"))
commit = jax.jit(kvq.commit)


def test_queries_see_the_kept_tokens_at_their_positions():
    """Prefill, then decoding through several evictions, ragged; then a crop below evicted tokens,
    and on from there."""
    rows, cache = begin()
    first = np.asarray(cache.kept["positions"])
    assert (first[0] != first[1]).any(), "rows choose by themselves"
    before = np.asarray(cache.runs[0].flushed[0])
    cache = steps(rows, cache, 30)
    assert (np.asarray(cache.runs[0].flushed[0]) > before).all(), (
        "nothing left the window: the test shows nothing"
    )
    moved = (np.asarray(cache.kept["positions"]) != first).any(1)
    assert moved.tolist() == [True, True]
    lengths = [rows[0].length - 70, rows[1].length - 3]
    cache = kvq.crop(cache, jnp.asarray(lengths, jnp.int32))
    assert lengths[0] - UNIT < cache.lengths[0] <= lengths[0]
    assert cache.lengths[1] == lengths[1]
    for row, length in zip(rows, cache.lengths.tolist(), strict=True):
        row.crop(length)
    check(rows, cache)
    steps(rows, cache, 28)


def test_chunks_evict_whole_groups():
    """Through the cache 60 tokens at a time: two groups can fall due in one call, and the oldest
    make room."""
    text = tokens(1, LENGTH)
    row, cache = ByHand(text[0]), kvq.init_cache(sharp(), kvq.parse(SPEC), 1, CAPACITY)
    for start in range(0, 240, 60):
        logits, cache = forward(sharp(), text[:, start : start + 60], jnp.asarray([60]), cache)
        np.testing.assert_allclose(logits[0], row.query(60), atol=BOUND)
        check([row], cache)
    groups = np.asarray(cache.kept["positions"]).reshape(-1, UNIT)
    assert (np.diff(groups, axis=1) == 1).all()


@pytest.mark.nightly
def test_another_capacity_keeps_what_is_kept():
    """As large a body in a larger cache, and back; a smaller body, whose groups come first, and
    back."""
    rows, cache = begin()
    cache = steps(rows, kvq.resize(kvq.resize(cache, 700), CAPACITY), 3)
    counts, method = jnp.asarray([90, 70]), kvq.parse(SPEC)
    few, many = (
        prefill(sharp(), tokens(2, 128), counts, kvq.init_cache(sharp(), method, 2, capacity))[1]
        for capacity in (98, CAPACITY)
    )
    assert (few.kept["positions"].shape, many.kept["positions"].shape) == ((2, 32), (2, BUDGET))
    for cache, wanted in ((kvq.resize(few, CAPACITY), many), (kvq.resize(many, 98), few)):
        assert cache.layout == wanted.layout
        jax.tree.map(np.testing.assert_array_equal, cache.kept, wanted.kept)
        one = tokens(2, 1), jnp.ones(2, jnp.int32)
        np.testing.assert_array_equal(
            forward(sharp(), *one, cache)[0], forward(sharp(), *one, wanted)[0]
        )
    with pytest.raises(kvq.UserError, match="holds 90 tokens"):
        kvq.resize(few, 80)


def test_surgery_carries_what_is_kept(tmp_path):
    rows, cache = begin()
    kvq.save_cache(tmp_path / "cache", cache, sharp())
    back = kvq.load_cache(tmp_path / "cache", sharp())
    assert back.layout == cache.layout
    jax.tree.map(np.testing.assert_array_equal, cache, back)
    swapped = kvq.gather(kvq.fork(cache), jnp.asarray([1, 0]))
    check(rows[::-1], swapped)
    both = kvq.insert(swapped, 0, back, 0)
    np.testing.assert_array_equal(
        both.kept["positions"], cache.kept["positions"][jnp.asarray([0, 0])]
    )
    gone = kvq.evict(both, jnp.asarray([False, True]))
    check([rows[0], ByHand(rows[1].text)], gone)
    check([rows[0]], kvq.gather(gone, jnp.asarray([0])))
    steps(rows[::-1], swapped, 2)


def test_a_row_in_a_batch_chooses_as_alone():
    _, cache = begin()
    alone = kvq.init_cache(sharp(), cache.layout.method, 1, CAPACITY)
    _, alone = prefill(sharp(), tokens(2, LENGTH)[1:, :256], jnp.asarray([141]), alone)
    np.testing.assert_array_equal(cache.kept["positions"][1], alone.kept["positions"][0])


@pytest.mark.nightly
def test_drafts_see_what_single_steps_see():
    """Verified in pieces of 9, groups leave and others are given up in the middle of a piece."""
    model, method, text = sharp(), kvq.parse(SPEC), tokens(2, LENGTH)
    out = []
    for size in (1, 9):
        cache, logits = kvq.init_cache(model, method, 2, CAPACITY), []
        for start in range(0, 225, size):
            counts = jnp.asarray([size, size])
            got, pending = attend(
                model, text[:, start : start + size], counts, cache, within="step"
            )
            cache = commit(model, cache, pending, counts)
            logits.append(np.asarray(got))
        out.append(np.concatenate(logits, 1))
    np.testing.assert_allclose(out[1], out[0], atol=BOUND)


ONE_CLOCK = ("exact", "kivi2", "kivi3-sinks", "sliding-mixed", "kvquant", "commvq")
ONE_CLOCK += tuple(name for name in ("higgs", "aqua", "xquant", "xquant_cl") if name in CASES)


@pytest.mark.parametrize("name", with_nightly(ONE_CLOCK, ["kivi3-sinks", "commvq"]))
def test_every_method_stores_a_kept_token_as_it_would_without_eviction(name):
    """Filled from sources without attention: the newest groups are kept, and their words are those
    of the whole row."""
    model, method = model_and_method(name)
    unit = max(32, runs_of(fresh(name, [[0]]).layout)[0].wiring.storage.clocks[0].unit)
    kept = dataclasses.replace(method, keep=Keep("streaming", 2 * unit))
    row, sinks = list(range(CAPACITY - 30)), method.sinks
    whole, small = fresh(name, [row]), kvq.init_cache(model, kept, 1, CAPACITY)
    for start in range(0, len(row), 150):
        small = extend(name, small, [row[start : start + 150]], 150)
    positions = np.asarray(small.kept["positions"]).reshape(2, unit)
    end = int(small.runs[0].flushed[0][0]) * unit
    assert sorted(positions[:, 0]) == [end - 2 * unit + sinks, end - unit + sinks]
    for run, ours, theirs in zip(runs_of(small.layout), body(small), body(whole), strict=True):
        for source, fields in ours.items():
            for field, x in fields.items():
                share = run.slots // x.shape[2]
                other = theirs[source][field]
                for slot, first in enumerate(positions[:, 0] - sinks):
                    at = np.arange(first // share, (first + unit) // share) % other.shape[2]
                    mine = x[:, 0, slot * unit // share : (slot + 1) * unit // share]
                    np.testing.assert_array_equal(mine, other[:, 0, at], f"{source}.{field}")


@pytest.mark.parametrize("spec", ["kivi:bits=2,window=32", "aqua", "exact"])
def test_bytes_are_those_of_the_budget(spec):
    """A hundred times the budget costs no more than the budget, and positions are counted."""
    model = tiny()
    options = spec + ("," if ":" in spec else ":") + "keep=streaming:512"
    method, most = kvq.parse(options), 51200
    clock = runs_of(jax.eval_shape(lambda: kvq.init_cache(model, method, 1, 512)).layout)[
        0
    ].wiring.storage.clocks[0]
    fits = 512 + method.sinks + clock.window
    kept, whole = (
        kvq.ledger(jax.eval_shape(lambda m=m, c=c: kvq.init_cache(model, m, 2, c)))
        for m, c in ((method, most), (kvq.parse(spec), fits))
    )
    more = 2 * 4 * 512
    assert kept.bytes == whole.bytes + more
    small = kvq.init_cache(model, method, 2, most)
    live = sum(array.addressable_data(0).nbytes for array in jax.tree.leaves(small))
    assert abs(kvq.ledger(small).bytes - live) <= 0.02 * live


def test_a_decode_step_updates_the_cache_in_place():
    """Temporaries stay below a tenth of it, beyond a few numbers for every token of the body."""
    model, method = tiny(), kvq.parse("kivi:bits=4,window=32,keep=streaming:16384")
    cache = jax.eval_shape(lambda: kvq.init_cache(model, method, 2, 65536))
    new = jax.ShapeDtypeStruct((2, 1), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    memory = (
        jax.jit(kvq.forward, donate_argnums=3).lower(model, *new, cache).compile().memory_analysis()
    )
    size = kvq.ledger(cache).bytes
    assert memory.alias_size_in_bytes >= 0.99 * size
    assert memory.temp_size_in_bytes < 0.1 * size + 2 * 16384 * 16


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("kivi:window=64,rule=published,keep=streaming:64", "cannot be evicted"),
        ("kivi:keep=streaming:16", "leave the body 32 at a time"),
        ("kivi:window=32,keep=streaming:64;0=exact", "one window and unit for all layers"),
    ],
)
def test_what_cannot_be_evicted_is_refused(spec, words):
    with pytest.raises(kvq.UserError, match=words):
        kvq.init_cache(tiny(), kvq.parse(spec), 1, CAPACITY)


def test_a_mesh_is_refused():
    rules = Rules(mesh=jax.sharding.AbstractMesh((2, 1, 1, 1), ("data", "seq", "kv", "group")))
    layout = CacheLayout(
        shape=tiny().config.kv_shape,
        method=kvq.parse("kivi:keep=streaming:64"),
        capacity=CAPACITY,
        dtype="float32",
    )
    with pytest.raises(kvq.UserError, match="on one device only"):
        rules.cache_layout(layout, 2)
