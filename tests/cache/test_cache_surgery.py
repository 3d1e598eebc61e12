"""Crop, fork, gather, insert and evict, alone and in random sequences, against fresh encodes of the
same tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algebra import CAPACITY, PAD, all_finite, check_row, empty, encoded, extend, fresh
from cases import CASES, FEW, GENERAL, model_and_method, with_nightly
from hypothesis import given, settings
from hypothesis import strategies as st

import kvqjax as kvq

crop, gather, insert, evict, fork = (
    jax.jit(f) for f in (kvq.crop, kvq.gather, kvq.insert, kvq.evict, kvq.fork)
)
BROKEN = -1
ROWS = [list(range(330)), list(range(100, 331)), list(range(40, 57))]


@pytest.mark.parametrize("name", with_nightly(GENERAL, ["sliding-mixed"]))
def test_crop_inside_the_window_is_exact(name):
    """No encoded token is cut: the length is kept to the token, and other tokens follow as if
    nothing had been there."""
    cache = fresh(name, ROWS)
    top = [
        max(int(c[row]) for e in encoded(cache) for c in e.values()) + cache.layout.method.sinks
        for row in range(3)
    ]
    lengths = [max(len(r) - 5, t) for r, t in zip(ROWS, top, strict=True)]
    cut = crop(cache, jnp.asarray(lengths, jnp.int32))
    assert cut.lengths.tolist() == lengths
    other = list(range(400, 490))
    grown = extend(name, cut, [other] * 3)
    for row, tokens in enumerate(ROWS):
        check_row(name, cut, row, tokens[: lengths[row]])
        check_row(name, grown, row, tokens[: lengths[row]] + other)


@pytest.mark.parametrize("name", with_nightly(GENERAL))
def test_deep_crop_ends_on_whole_units(name):
    cache = fresh(name, ROWS)
    for wish in (0, 3, 70, 200):
        check_deep_crop(name, cache, wish)


def check_deep_crop(name: str, cache, wish: int) -> None:
    """Every row cut back to at most `wish` tokens holds whole units of them, and can be appended
    to."""
    cut = crop(cache, jnp.full((3,), wish, jnp.int32))
    kept = cut.lengths.tolist()
    unit = max(
        clock.unit for run in kvq.cache.runs_of(cache.layout) for clock in run.wiring.storage.clocks
    )
    sliding = any(run.wraps for run in kvq.cache.runs_of(cache.layout))
    for row, tokens in enumerate(ROWS):
        assert kept[row] <= min(wish, len(tokens))
        assert sliding or kept[row] > min(wish, len(tokens)) - unit
        check_row(name, cut, row, tokens[: kept[row]])
    grown = extend(name, cut, [list(range(300, 300 + PAD))] * 3)
    for row, tokens in enumerate(ROWS):
        check_row(name, grown, row, tokens[: kept[row]] + list(range(300, 300 + PAD)))


def test_fork_shares_nothing():
    cache = fresh("kivi2", ROWS)
    other = kvq.fork(cache)
    pairs = zip(jax.tree.leaves(cache), jax.tree.leaves(other), strict=True)
    assert all(a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer() for a, b in pairs if a.size)
    jax.tree.map(lambda x: x.delete(), cache)
    check_row("kivi2", other, 0, ROWS[0])


def test_insert_refuses_another_layout():
    model, _ = model_and_method("kivi2")
    cache = empty("kivi2", 2)
    with pytest.raises(kvq.UserError, match="another method: exact, wanted kivi"):
        kvq.insert(cache, 0, empty("exact", 1), 0)
    with pytest.raises(
        kvq.UserError,
        match="a larger capacity, 1024; its rows fit a cache of 512 tokens a row after",
    ):
        kvq.insert(cache, 0, kvq.init_cache(model, cache.layout.method, 1, 1024), 0)


OPERATION = st.one_of(
    st.tuples(
        st.just("append"),
        st.lists(st.integers(0, PAD), min_size=3, max_size=3),
        st.integers(0, 100),
    ),
    st.tuples(st.just("spoil"), st.integers(0, 2), st.integers(1, PAD)),
    st.tuples(st.just("crop"), st.lists(st.integers(0, CAPACITY), min_size=3, max_size=3)),
    st.tuples(st.just("trim"), st.integers(1, 40)),
    st.tuples(st.just("gather"), st.lists(st.integers(0, 2), min_size=3, max_size=3)),
    st.tuples(st.just("insert"), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.just("evict"), st.lists(st.booleans(), min_size=3, max_size=3)),
    st.tuples(st.just("fork")),
)


class Driver:
    """A cache and what its rows should hold: lists of pool tokens, BROKEN for one that is not
    finite."""

    def __init__(self, name: str):
        self.name, self.rows = name, [[], [], []]
        self.cache = self.other = empty(name, 3)
        self.other_rows = [[], [], []]
        self.room = CAPACITY - 200

    def append(self, counts, first):
        new = [
            [(first + i) % CAPACITY for i in range(min(n, self.room - len(r)))]
            for n, r in zip(counts, self.rows, strict=True)
        ]
        self.cache = extend(self.name, self.cache, new)
        self.rows = [r + n for r, n in zip(self.rows, new, strict=True)]

    def spoil(self, row, count):
        """Append tokens to one row, the middle one of them not finite."""
        new = [
            list(range(min(count, self.room - len(r)))) if i == row else []
            for i, r in enumerate(self.rows)
        ]
        broken = {row: len(new[row]) // 2} if new[row] else {}
        self.cache = extend(self.name, self.cache, new, broken=broken)
        for at, token in broken.items():
            new[at][token] = BROKEN
        self.rows = [r + n for r, n in zip(self.rows, new, strict=True)]

    def crop(self, lengths):
        self.cache = crop(self.cache, jnp.asarray(lengths, jnp.int32))
        kept = self.cache.lengths.tolist()
        assert all(k <= min(n, len(r)) for k, n, r in zip(kept, lengths, self.rows, strict=True))
        self.rows = [r[:k] for r, k in zip(self.rows, kept, strict=True)]

    def trim(self, count):
        self.crop([max(0, len(r) - count) for r in self.rows])

    def gather(self, rows):
        self.cache = gather(self.cache, jnp.asarray(rows, jnp.int32))
        self.rows = [self.rows[i] for i in rows]

    def insert(self, row, other_row):
        self.cache = insert(self.cache, jnp.int32(row), self.other, jnp.int32(other_row))
        self.rows = [self.other_rows[other_row] if i == row else r for i, r in enumerate(self.rows)]

    def evict(self, marks):
        self.cache = evict(self.cache, jnp.asarray(marks))
        self.rows = [[] if gone else r for gone, r in zip(marks, self.rows, strict=True)]

    def fork(self):
        self.other, self.other_rows = fork(self.cache), self.rows


def run_sequence(name: str, operations) -> None:
    driver = Driver(name)
    for operation, *arguments in operations:
        getattr(driver, operation)(*arguments)
    assert driver.cache.lengths.tolist() == [len(r) for r in driver.rows]
    assert not np.asarray(driver.cache.overflow).any()
    assert driver.cache.nonfinite.tolist() == [BROKEN in r for r in driver.rows]
    assert all_finite(driver.cache)
    for row, tokens in enumerate(driver.rows):
        if BROKEN in tokens:
            assert int(driver.cache.finite[row]) == tokens.index(BROKEN)
        else:
            check_row(name, driver.cache, row, tokens)


SEQUENCES = st.lists(OPERATION, min_size=3, max_size=8)


@settings(max_examples=40)
@given(operations=SEQUENCES, name=st.sampled_from(FEW))
def test_random_sequences(name, operations):
    run_sequence(name, operations)


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_nightly(CASES))
@settings(max_examples=10_000)
@given(operations=SEQUENCES)
def test_many_random_sequences(name, operations):
    run_sequence(name, operations)
