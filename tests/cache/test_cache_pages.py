"""Bodies in pages hold and give what rows of their own do, wherever the pages lie; the pool loses
none."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algebra import check_row, empty, extend, same_words
from cases import CORE, GENERAL, model_and_method, with_nightly
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.cache.pages import PoolExhausted
from kvqjax.ops.packing.base import array_bytes

CAPACITY, ROWS = 2100, 2  # tokens of a row: three pages of the longest blocks


def paged_like(name, pages=12):
    """An empty cache of pages for one of the cases."""
    return kvq.init_cache(*model_and_method(name), ROWS, CAPACITY, pages=pages)


def shuffled(cache, lengths):
    """Give every row the pages that so many tokens need, in no order."""
    numbers = np.random.default_rng(0).permutation(cache.layout.pool.pages)
    table, used = np.full(cache.pages.shape, -1, np.int32), 0
    for row, length in enumerate(lengths):
        needed = kvq.pages_needed(cache.layout, length)
        assert used + needed <= len(numbers)
        table[row, :needed] = numbers[used : used + needed]
        used += needed
    return kvq.with_pages(cache, table)


@pytest.mark.parametrize(
    "name",
    with_nightly(GENERAL, ["kvquant"]),
)
def test_pages_hold_the_words_of_rows_of_their_own(name):
    """Ragged rows of the same sources, in chunks of any size and single tokens."""
    rows = [list(range(512)), list(range(100, 257))]
    plain, paged = empty(name, ROWS, CAPACITY), shuffled(paged_like(name), (512, 157))
    at = [0, 0]
    for counts in ((200, 100), (200, 0), (3, 56), (109, 1)):
        pieces = [row[a : a + n] for row, a, n in zip(rows, at, counts, strict=True)]
        plain, paged = extend(name, plain, pieces), extend(name, paged, pieces)
        at = [a + n for a, n in zip(at, counts, strict=True)]
    assert not np.asarray(paged.overflow).any()
    alone = kvq.without_pages(paged)
    assert alone.layout == plain.layout
    jax.tree.map(np.testing.assert_array_equal, [(r.sinks, r.window, r.flushed) for r in plain.runs], [
        (r.sinks, r.window, r.flushed) for r in alone.runs
    ])  # fmt: skip
    assert same_words(plain, 0, alone, 0) > 300
    for row, numbers in enumerate(rows):
        same_words(plain, row, alone, row)
        check_row(name, alone, row, numbers)


@pytest.mark.parametrize("name", with_nightly(CORE, ["kivi2"]))
def test_queries_see_through_pages_what_they_see_in_rows(name):
    """Chunks, then single tokens, of rows of different lengths; some longer than a page."""
    model, method = model_and_method(name)
    plain = kvq.init_cache(model, method, ROWS, CAPACITY)
    paged = shuffled(paged_like(name), (1203, 452))
    text, step = tokens(ROWS, 1203), jax.jit(kvq.forward)
    for start, counts in (
        (0, (600, 250)),
        (600, (600, 200)),
        (1200, (1, 1)),
        (1201, (1, 0)),
        (1202, (1, 1)),
    ):
        new = text[:, start : start + max(counts)], jnp.asarray(counts)
        wanted, plain = step(model, *new, plain)
        got, paged = step(model, *new, paged)
        live = np.arange(max(counts))[None] < np.asarray(counts)[:, None]
        np.testing.assert_allclose(np.asarray(got)[live], np.asarray(wanted)[live], atol=2e-5)
    assert not np.asarray(paged.overflow).any()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "form", "target"),
    [
        pytest.param("kivi2", "stripes", "cpu", marks=pytest.mark.nightly),
        pytest.param("klt-own", "stripes", "cpu", marks=pytest.mark.nightly),
        pytest.param("kivi2", "planes", "v5e", marks=pytest.mark.nightly),
        ("kivi2", "heads", "sm90"),
    ],
)
def test_forms_of_all_chips_lie_in_pages(name, form, target):
    """As CPUs store long bodies, and TPUs and GPUs; the readers of these two want pages side by
    side."""
    model, method = model_and_method(name)
    options = {"form": form, "target": target, "kernels": "off"}
    capacity = 5000 if form == "stripes" else CAPACITY  # stripes are of long bodies
    plain = kvq.init_cache(model, method, ROWS, capacity, **options)
    paged = kvq.init_cache(model, method, ROWS, capacity, pages=20, **options)
    paged = shuffled(paged, (603, 252))
    text, step = tokens(ROWS, 603), jax.jit(kvq.forward)
    for start, counts in ((0, (600, 250)), (600, (1, 1)), (601, (1, 1)), (602, (1, 0))):
        new = text[:, start : start + max(counts)], jnp.asarray(counts)
        wanted, plain = step(model, *new, plain)
        got, paged = step(model, *new, paged)
        live = np.arange(max(counts))[None] < np.asarray(counts)[:, None]
        np.testing.assert_allclose(np.asarray(got)[live], np.asarray(wanted)[live], atol=2e-5)


def test_rows_share_pages_and_go_on_apart():
    """The second row begins with the first one's full pages and a copy of its last one."""
    name = "kivi3-sinks"
    first, second = list(range(512)), [*range(400), *range(100, 200)]
    cache = kvq.init_cache(*model_and_method(name), ROWS, CAPACITY, pages=4)
    page, pool = cache.layout.pool.tokens, kvq.PagePool(4)
    assert page > 400  # so that the shared page is the one that is copied
    table = np.full(cache.pages.shape, -1, np.int32)
    table[0, :1] = pool.take(1)
    cache = kvq.with_pages(cache, table)
    for start in (0, 200):
        cache = extend(name, cache, [first[start : start + 200], []])
    row = kvq.without_pages(cache)
    table[1, :1] = pool.take(1)
    cache = kvq.with_pages(kvq.copy_page(cache, int(table[0, 0]), int(table[1, 0])), table)

    def put(x, axis):
        return jnp.moveaxis(
            jnp.moveaxis(x, axis, 0).at[1].set(jnp.moveaxis(x, axis, 0)[0]), 0, axis
        )

    runs = tuple(
        state.replace(
            sinks=jax.tree.map(lambda x: put(x, 1), state.sinks),
            window=jax.tree.map(lambda x: put(x, 1), state.window),
            flushed=jax.tree.map(lambda x: put(x, 0), state.flushed),
        )
        for state in cache.runs
    )
    cache = cache.replace(runs=runs, lengths=put(cache.lengths, 0), finite=put(cache.finite, 0))
    cache = extend(name, cache, [first[400:], second[400:]])
    check_row(name, row, 0, first[:400])
    for number, numbers in enumerate((first, second)):
        check_row(name, kvq.without_pages(cache), number, numbers)


def test_a_row_without_a_page_takes_no_more_tokens():
    """Outside jit one line; inside, its flag, and what it holds stays. Its neighbour goes on."""
    model, method = tiny(), "kivi:bits=2,window=32"
    cache = kvq.init_cache(model, method, ROWS, CAPACITY, pages=3)
    page = cache.layout.pool.tokens
    assert [kvq.pages_needed(cache.layout, n) for n in (0, 63, 64, page + 63, page + 64)] == [
        0,
        0,
        1,
        1,
        2,
    ]
    cache = kvq.with_pages(cache, np.asarray([[0, -1, -1, -1], [2, 1, -1, -1]]))
    text, counts = tokens(ROWS, page + 100), jnp.asarray([page + 60, page + 60])
    step = jax.jit(kvq.forward)
    _, cache = step(model, text, counts, cache)
    more = tokens(ROWS, 20), jnp.asarray([20, 20])
    with pytest.raises(
        kvq.UserError,
        match=f"row 0 would hold {page + 80} tokens, which take 2 pages, and it has 1",
    ):
        kvq.forward(model, *more, cache)
    _, after = step(model, *more, cache)
    assert after.lengths.tolist() == [page + 63, page + 80]
    assert after.overflow.tolist() == [True, False]


def test_doors_say_what_they_want():
    cache = kvq.init_cache(tiny(), "kivi:bits=2", ROWS, CAPACITY, pages=3)
    for name, call in (
        ("gather", lambda: kvq.gather(cache, jnp.asarray([0]))),
        ("repeat", lambda: kvq.repeat(cache, 2)),
        ("insert", lambda: kvq.insert(cache, 0, cache)),
        ("resize", lambda: kvq.resize(cache, 4000)),
        ("save_cache", lambda: kvq.save_cache("nowhere", cache, tiny())),
    ):
        with pytest.raises(kvq.UserError, match=f"{name} wants rows with bodies of their own"):
            call()
    with pytest.raises(kvq.UserError, match="take pages of a pool"):
        kvq.cut(cache, 10)
    kvq.gather(kvq.without_pages(cache), jnp.asarray([1]))
    for table, message in (
        (np.zeros((1, 3), int), "pages of every row"),
        (np.asarray([[0, 3, -1, -1]] * 2), "the pool's pages"),
        (np.asarray([[1, 1, -1, -1]] * 2), "stands twice in row 0"),
    ):
        with pytest.raises(kvq.UserError, match=message):
            kvq.with_pages(cache, table)
    with pytest.raises(kvq.UserError, match="no pages"):
        kvq.with_pages(kvq.init_cache(tiny(), "exact", 1, 64), np.zeros((1, 1), int))
    for options, message in (({"pages": 0}, "pages"), ({"page_tokens": 64}, "pages= says"), (
        {"pages": 2, "page_tokens": 100}, "multiple of"
    )):  # fmt: skip
        with pytest.raises(kvq.UserError, match=message):
            kvq.init_cache(tiny(), "kivi:bits=2", 1, 640, **options)


def test_the_pool_keeps_its_books():
    """Two thousand operations against a dictionary: none leaked, none freed twice, none given to
    two."""
    dice, pool, users = random.Random(0), kvq.PagePool(17), {}
    lists: list[list[int]] = []
    for _ in range(2_000):
        kind = dice.choice(("take", "take", "share", "drop", "drop", "wrong"))
        if kind == "take":
            count = dice.randint(0, 5)
            if count > 17 - len(users):
                with pytest.raises(PoolExhausted, match=f"{17 - len(users)} of 17 are free"):
                    pool.take(count)
                continue
            taken = pool.take(count)
            assert len(set(taken)) == count
            assert not users.keys() & set(taken)
            users.update(dict.fromkeys(taken, 1))
            lists.append(taken)
        elif kind == "share" and lists:
            part = dice.choice(lists)
            part = part[: dice.randint(0, len(part))]
            assert pool.share(part) == part
            for page in part:
                users[page] += 1
            lists.append(part)
        elif kind == "drop" and lists:
            gone = lists.pop(dice.randrange(len(lists)))
            pool.drop(gone)
            for page in gone:
                users[page] -= 1
                if not users[page]:
                    del users[page]
        elif kind == "wrong" and len(users) < 17:
            free = next(page for page in range(17) if page not in users)
            with pytest.raises(kvq.UserError, match=f"page {free} is in use by nobody"):
                dice.choice((pool.drop, pool.share))([*users, free])
        assert pool.free == 17 - len(users)
        assert pool.shared == sum(count > 1 for count in users.values())
        assert all(pool.users(page) == users.get(page, 0) for page in range(17))


def test_the_ledger_counts_what_pages_have_room_for():
    """Bits a number are those of the tokens that fit, not of rows that nobody could fill."""
    rows = kvq.ledger(kvq.init_cache(tiny(), "exact", 4, 2048))
    cache = kvq.init_cache(tiny(), "exact", 4, 2048, pages=8, page_tokens=256)
    paged = kvq.ledger(cache)
    assert (rows.tokens, paged.tokens) == (4 * 2048, 8 * 256 + 4 * 31)
    assert paged.bytes < 0.3 * rows.bytes
    assert paged.bits_stored == pytest.approx(rows.bits_stored, rel=0.02)
    assert "2172 in all" in str(paged)
    assert paged.bytes == array_bytes(cache)  # the rows' table of pages too


def test_a_pool_that_no_memory_holds_is_one_line():
    with pytest.raises(
        kvq.UserError, match="pages=2147483647; it must be a whole number from 1 to 16777216"
    ):
        kvq.PagePool(2**31 - 1)
