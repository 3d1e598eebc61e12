"""The stored words depend on the sources alone: not on chunks, neighbours, or what stood there
before; and it is written once (DESIGN ideas 6, 8, 9)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algebra import CAPACITY, body, check_row, empty, encoded, extend, fresh, same_words
from cases import CASES, FEW, GENERAL, thinned, with_nightly
from tiny import tiny

import kvqjax as kvq
from kvqjax.cache import runs_of
from kvqjax.cache.attention import attend_body
from kvqjax.cache.view import LayerView, NewTokens
from kvqjax.codecs import Exact

ROWS = [list(range(330)), list(range(100, 331)), list(range(40, 57))]


def fed(name, cache, rows, steps):
    """Feed the rows in ragged pieces: `steps[i][b]` tokens of row b in call i."""
    at = [0] * len(rows)
    for step in steps:
        cache = extend(name, cache, [r[a : a + n] for r, a, n in zip(rows, at, step, strict=True)])
        at = [min(len(r), a + n) for r, a, n in zip(rows, at, step, strict=True)]
    assert at == [len(r) for r in rows]
    return cache


def ragged_steps(seed: int):
    """Random sizes 0 to 200, other ones for each row, until every row is done."""
    random, steps, left = np.random.default_rng(seed), [], [len(r) for r in ROWS]
    while any(left):
        most = int(random.choice([3, 40, 200]))
        steps.append([min(n, int(random.integers(0, most + 1))) for n in left])
        left = [n - s for n, s in zip(left, steps[-1], strict=True)]
    return steps


@pytest.mark.parametrize("name", with_nightly(GENERAL, ["kvquant"]))
def test_words_do_not_depend_on_chunks(name):
    whole = fed(name, empty(name, 3), ROWS, [[200] * 3] * 2)
    pieces = fed(name, empty(name, 3), ROWS, ragged_steps(0))
    for row in range(3):
        tokens = same_words(whole, row, pieces, row)
        assert tokens == min(
            max(int(c[row]) for e in encoded(whole) for c in e.values()),
            runs_of(whole.layout)[-1].slots,
        )
    assert tokens < 32 < same_words(whole, 0, pieces, 0)
    jax.tree.map(np.testing.assert_array_equal, whole, pieces)
    for row, tokens in enumerate(ROWS):
        check_row(name, pieces, row, tokens)


@pytest.mark.parametrize("name", with_nightly(FEW, ["kivi2"]))
def test_words_do_not_depend_on_neighbours(name):
    together = fresh(name, ROWS)
    for row, tokens in enumerate(ROWS):
        same_words(together, row, fresh(name, [tokens]), 0)


@pytest.mark.parametrize("name", with_nightly(FEW, ["kivi-published"]))
def test_one_token_at_a_time(name):
    """A decode step writes by another path than a chunk."""
    rows = [list(range(170)), list(range(9, 100))]
    cache = empty(name, 2)
    for i in range(170):
        cache = extend(name, cache, [r[i : i + 1] for r in rows], 1)
    jax.tree.map(np.testing.assert_array_equal, cache, fresh(name, rows))


@pytest.mark.parametrize("name", with_nightly(GENERAL))
def test_encoded_once(name):
    """Stored words never change while a row grows, as long as a ring keeps them."""
    cache, tokens = fresh(name, [list(range(150))]), list(range(150))
    for size in (1, 45, 3, 100):
        before, counts = body(cache), encoded(cache)
        more = list(range(len(tokens), len(tokens) + size))
        tokens, cache = tokens + more, extend(name, cache, [more])
        for run, old, new, done, now in zip(
            runs_of(cache.layout), before, body(cache), counts, encoded(cache), strict=True
        ):
            for source, fields in old.items():
                first = max(0, int(now[source][0]) - run.slots)
                for field, x in fields.items():
                    share = run.slots // x.shape[2]
                    kept = np.arange(-(-first // share), int(done[source][0]) // share) % x.shape[2]
                    np.testing.assert_array_equal(x[:, 0, kept], new[source][field][:, 0, kept])


@pytest.mark.parametrize("name", with_nightly(GENERAL))
def test_cleared_before_written(name):
    """A row that is evicted and used again holds what it would in a new cache."""
    cache = kvq.evict(fresh(name, ROWS), jnp.asarray([True, False, True]))
    assert cache.lengths.tolist() == [0, len(ROWS[1]), 0]
    again = [list(range(300, 500)), [], list(range(130))]
    cache = extend(name, cache, again)
    check_row(name, cache, 0, again[0])
    check_row(name, cache, 1, ROWS[1])
    check_row(name, cache, 2, again[2])


@pytest.mark.parametrize("name", with_nightly(name for name in CASES if name != "exact"))
def test_no_full_precision_body(name):
    """Whatever is no packed word holds at most one number for 16 channels' worth of tokens (an
    outlier and its channel count as one); only exact layers hold vectors."""
    layout = empty(name, 1).layout
    exact = [
        isinstance(getattr(spec, "key", None), Exact) for spec in layout.method.layers(layout.shape)
    ]
    for run, state in zip(runs_of(layout), empty(name, 1).runs, strict=True):
        for source, fields in state.body.items():
            whole = run.count * run.slots * run.wiring.storage.sources[source]
            sizes = {
                n: sum(a.size for a in arrays if a.dtype != jnp.uint32)
                for n, arrays in fields.items()
            }
            sizes |= {"outliers": sizes["outliers"] // 2} if "outliers" in sizes else {}
            assert exact[run.first] or all(size * 16 <= whole for size in sizes.values())


def test_overflow_is_flagged_and_not_stored():
    cache = fresh("kivi2", [list(range(CAPACITY - 10))])
    fuller = extend("kivi2", cache, [list(range(20))])
    assert fuller.lengths.tolist() == [CAPACITY]
    assert fuller.overflow.tolist() == [True]
    check_row(
        "kivi2",
        extend("kivi2", cache, [list(range(10))]),
        0,
        list(range(CAPACITY - 10)) + list(range(10)),
    )


def _random(random, array):
    """Any codes; scales between 1 and 2 as the bits of bfloat16 numbers."""
    if array.dtype == jnp.uint16:
        return jnp.asarray(random.integers(0x3F80, 0x4000, array.shape), jnp.uint16)
    return jnp.asarray(random.integers(0, 2**32, array.shape, dtype=np.uint32))


@pytest.mark.parametrize(("capacity", "blocks"), thinned([(1536, 3), (1280, 1), (300, 2)], 3))
def test_several_blocks_read_at_once_are_the_same_tokens(capacity, blocks):
    """As many as divide the body, up to 1024 tokens; rows end within them. The sums are float32, in
    another order."""
    model, method = tiny(), kvq.parse("higgs:bits=2,sinks=0,buffer=32")
    cache = kvq.init_cache(model, method, 2, capacity)
    run, state = runs_of(cache.layout)[0], cache.runs[0]
    assert run.reading == blocks * run.block == blocks * 256
    random = np.random.default_rng(0)
    fill = {
        n: {f: tuple(_random(random, a) for a in x) for f, x in s.items()}
        for n, s in state.body.items()
    }
    state = state.replace(body=fill, flushed=(jnp.asarray([run.slots // 32, 7], jnp.int32),))
    config = model.config
    q = jnp.asarray(random.normal(size=(2, 1, config.num_heads, config.head_dim)), jnp.float32)
    new = {
        name: jnp.zeros((2, 1, width), jnp.float32)
        for name, width in run.wiring.storage.sources.items()
    }
    tokens = NewTokens(
        jnp.full((2, 1), run.slots + 32), jnp.ones(2, jnp.int32), jnp.full(2, run.slots + 32)
    )

    def attend(run):
        view = LayerView(run, state, jnp.int32(0), {}, {}, new, 0)
        return attend_body(q, view, tokens, {})[0]

    together, alone = (
        jax.jit(lambda run=r: attend(run))()
        for r in (run, run._replace(wiring=run.wiring.having(fast={"reading": 1})))
    )
    for part in ("out", "lse"):
        np.testing.assert_allclose(
            getattr(together, part), getattr(alone, part), rtol=1e-5, atol=1e-5
        )
