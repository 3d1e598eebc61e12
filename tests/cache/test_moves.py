"""Tokens leave the middle of rows: what stays equals a cache that never had them, and keys whose
tokens were turned to their new places by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algebra import check_row, encoded, extend, fresh, turned_by_hand
from cases import model_and_method, with_constants, with_nightly
from meshes import CAPACITY, LENGTHS, pending
from recurrent import drawn, hybrid
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.cache import runs_of
from kvqjax.model.config import LatentHeads, RopeConfig

ROWS = [list(range(330)), list(range(290)), list(range(57))]
# From the body into the body, into the window, and within a row that is hardly longer than its
# window.
START, STOP = (70, 75, 3), (262, 287, 50)
LOCAL, GLOBAL = RopeConfig(theta=100.0), RopeConfig(kind="linear", factor=8.0)  # of layers
LATENTS = {
    "num_kv_heads": 1,
    "head_dim": 40,
    "latent": 32,
    "latent_heads": LatentHeads(query_rank=20, key_dim=24, value_dim=16),
    "rope": RopeConfig(theta=500.0, fraction=8 / 40),
}
MORE = [list(range(400, 490))] * 3


def places(cache, row: int) -> tuple[int, int]:
    """What leaves of a row, by the rule for layers of one clock: within encoded tokens, whole
    units."""
    sinks = cache.layout.method.sinks
    unit = math.lcm(*(run.wiring.storage.clocks[0].unit for run in runs_of(cache.layout)))
    done = int(next(iter(encoded(cache)[0].values()))[row])
    held = int(cache.lengths[row]) - sinks
    first, last = max(START[row] - sinks, 0), min(STOP[row] - sinks, held)
    first = first if first >= done else -(-first // unit) * unit
    last = last if last >= done else last // unit * unit
    return sinks + first, sinks + max(first, last)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    with_nightly(
        [
            "kivi-pre",
            "kvquant",
            "higgs-block",
            "klt",
            "aqua",
            "commvq",
            "xquant-latents",
            "xquant-cl",
        ],
        ["klt"],
    ),
)
def test_words_are_those_of_a_cache_that_never_had_the_tokens(name):
    cache = fresh(name, ROWS)
    moved = kvq.drop(cache, jnp.asarray(START), jnp.asarray(STOP))
    rows = []
    for row, held in enumerate(ROWS):
        first, last = places(cache, row)
        rows.append(held[:first] + held[last:])
    assert [len(held) < len(whole) for held, whole in zip(rows, ROWS, strict=True)] == [True] * 3
    for row, held in enumerate(rows):
        check_row(name, moved, row, held)
    longer = extend(name, moved, MORE)
    for row, held in enumerate(rows):
        check_row(name, longer, row, held + MORE[row])


def test_whole_pages_leave_the_table():
    """What stays in pages is where it was; what is not encoded yet leaves to the token, and a row
    goes on in the pages that it has."""
    name, rows = "higgs-block", [[*range(512), *range(88)], list(range(300))]
    cache = kvq.init_cache(*model_and_method(name), 2, 700, pages=5)
    page, sinks = cache.layout.pool.tokens, cache.layout.method.sinks
    assert page == 256
    cache = kvq.with_pages(cache, np.asarray([[3, 0, 4], [1, 2, -1]], np.int32))
    for start in (0, 200, 400):
        cache = extend(name, cache, [row[start : start + 200] for row in rows])
    moved = kvq.drop(cache, jnp.asarray([0, 2]), jnp.asarray([500, 290]))
    assert moved.pages.tolist() == [[0, 4, -1], [2, -1, -1]]
    for before, after in zip(cache.runs, moved.runs, strict=True):
        jax.tree.map(lambda a, b: a is b or pytest.fail("words moved"), before.body, after.body)
    # Row 0 keeps the page that ends behind token 500, and row 1 has not encoded token 290.
    rows = [rows[0][:sinks] + rows[0][sinks + page :], rows[1][:sinks] + rows[1][290:]]
    for _ in range(2):
        alone = kvq.without_pages(moved)
        for row, held in enumerate(rows):
            check_row(name, alone, row, held)
        moved = extend(name, moved, MORE[:2])
        rows = [held + more for held, more in zip(rows, MORE, strict=False)]
    with pytest.raises(kvq.UserError, match="keys after RoPE, and pages that rows share"):
        kvq.drop(kvq.init_cache(tiny(), "exact", 1, 512, pages=2), 0, 32)


@pytest.mark.parametrize(
    ("spec", "changes", "dtype", "bounds", "exact"),
    [
        ("exact", {"rope": (LOCAL, GLOBAL)}, "float32", (96, 160), 2e-5),
        pytest.param("exact", {}, "bfloat16", (96, 160), 2**-7, marks=pytest.mark.nightly),
        pytest.param(
            "kivi:bits=2,window=32,rope=pre,sinks=4",
            {"num_layers": 1},
            "float32",
            (68, 164),
            2e-5,
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["turned", "bfloat16", "stored before RoPE"],
)
def test_keys_stand_at_their_new_places(spec, changes, dtype, bounds, exact):
    """Keys and values of the tokens that stay, against keys that were turned in float64; in one
    layer the next logits are those of a text that never had the tokens."""
    model, (first, last) = tiny(**changes), bounds
    model = model.replace(params=jax.tree.map(lambda x: x.astype(dtype), model.params))
    forward, text = jax.jit(kvq.forward), np.asarray(tokens(1, 300))
    counts, empty = jnp.asarray([300], jnp.int32), kvq.init_cache(model, spec, 1, 512)
    cache = forward(model, jnp.asarray(text), counts, empty)[1]
    moved = kvq.drop(cache, 68, 164)  # units of 32 tokens behind the sinks
    gone = last - first
    assert int(moved.lengths[0]) == 300 - gone
    for layer in range(model.config.num_layers):
        k, v, _ = (np.asarray(x[0], np.float32) for x in kvq.dense(cache, layer, model))
        new_k, new_v, valid = (np.asarray(x[0], np.float32) for x in kvq.dense(moved, layer, model))
        assert valid.sum() == 300 - gone
        np.testing.assert_array_equal(new_v[: 300 - gone], np.delete(v[:300], np.s_[first:last], 0))
        np.testing.assert_array_equal(new_k[:first], k[:first])
        rope = model.config.rope
        shape = dataclasses.replace(
            model.config, rope=rope[layer] if isinstance(rope, tuple) else rope
        )
        wanted = turned_by_hand(k[last:300], gone, shape)
        atol = exact * max(1.0, np.abs(wanted).max())
        np.testing.assert_allclose(new_k[first : 300 - gone], wanted, atol=atol)
    if model.config.num_layers == 1:
        rest = np.zeros_like(text)
        rest[:, : 300 - gone] = np.delete(text, np.s_[first:last], 1)
        other = forward(model, jnp.asarray(rest), jnp.asarray([300 - gone], jnp.int32), empty)[1]
        step = jnp.asarray([[7]], jnp.int32), jnp.ones(1, jnp.int32)
        logits = [np.asarray(forward(model, *step, held)[0]) for held in (moved, other)]
        np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
def test_the_turned_part_of_a_latent_stands_at_its_new_place():
    """In the first layer what is cached depends on the token and its place alone."""
    model, text = drawn(tiny(**LATENTS)), np.asarray(tokens(1, 300))
    forward, empty = jax.jit(kvq.forward), kvq.init_cache(model, "exact", 1, 512)
    cache = forward(model, jnp.asarray(text), jnp.asarray([300], jnp.int32), empty)[1]
    moved = kvq.drop(cache, 96, 160)
    rest = np.zeros_like(text)
    rest[:, :236] = np.delete(text, np.s_[96:160], 1)
    fed = forward(model, jnp.asarray(rest), jnp.asarray([236], jnp.int32), empty)[1]
    for got, wanted in zip(kvq.dense(moved, 0, model), kvq.dense(fed, 0, model), strict=True):
        np.testing.assert_allclose(np.asarray(got)[0, :236], np.asarray(wanted)[0, :236], atol=2e-5)
    assert np.abs(np.asarray(kvq.dense(cache, 0, model)[0] - kvq.dense(fed, 0, model)[0])).max() > 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    "spec", with_nightly(["exact", "kivi:bits=2,value_group=16,window=32,rope=pre"], ["exact"])
)
def test_rows_on_a_mesh_of_heads_move_as_on_one_device(spec):
    model = with_constants(tiny(), kvq.parse(spec))
    caches = []
    for place in (model, kvq.shard(model, spec, model=2)):
        cache = kvq.init_cache(place, spec, 2, CAPACITY)
        cache = jax.jit(kvq.commit)(place, cache, pending(cache), jnp.asarray(LENGTHS))
        moved = kvq.drop(cache, jnp.asarray([70, 0]), jnp.asarray([900, 650]))
        for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(moved), strict=True):
            assert after.sharding.is_equivalent_to(before.sharding, before.ndim)
        caches.append(moved)
    for got, wanted in zip(*map(jax.tree.leaves, caches), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


def test_what_cannot_move_is_refused():
    def refused(model, spec, line):
        with pytest.raises(kvq.UserError, match=line):
            kvq.drop(kvq.init_cache(model, spec, 1, 1310), 0, 32)

    refused(tiny(), "kivi:bits=2,window=32", "codes of keys after RoPE.*these can: kivi_star")
    refused(tiny(), "kivi:bits=2,window=32,rope=pre,keep=streaming:64", "has evicted tokens")
    refused(tiny(sliding_window=300), "kivi:bits=2,window=32,rope=pre", "sliding window")
    refused(hybrid(), "exact", "recurrent layers remember")
    cache = fresh("kivi-pre", ROWS)
    with pytest.raises(kvq.UserError, match=r"row 1: stop=10 lies before start=75"):
        kvq.drop(cache, jnp.asarray(START), jnp.asarray([200, 10, 50]))
    with pytest.raises(kvq.UserError, match="start="):
        kvq.drop(cache, -1, 10)
    hidden = jax.jit(kvq.drop)(cache, jnp.asarray(START), jnp.asarray([200, 10, 50]))
    assert hidden.overflow.tolist() == [False, True, False]
    assert int(hidden.lengths[1]) == 290
