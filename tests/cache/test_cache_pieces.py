"""Caches of another capacity, and caches cut and joined along tokens: equal to those that were
filled at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algebra import CAPACITY, check_row, empty, encoded, extend, fresh, same_words
from cases import GENERAL, model_and_method, thinned, with_nightly
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.cache import runs_of

ROWS = [list(range(330)), list(range(290)), list(range(57))]
MORE = [list(range(400, 490))] * 3
LEAST = 331  # of a cache that holds ROWS


def check(name: str, cache, rows=ROWS) -> None:
    for row, held in enumerate(rows):
        check_row(name, cache, row, held)


def same(cache, other) -> None:
    """Assert that two caches hold the same, to the bit: counts, words, and the window where it is
    live."""
    assert cache.layout == other.layout
    for field in ("lengths", "finite", "overflow"):
        np.testing.assert_array_equal(getattr(cache, field), getattr(other, field))
    sinks = cache.layout.method.sinks
    for run, a, b in zip(runs_of(cache.layout), cache.runs, other.runs, strict=True):
        for mine, its in zip(a.flushed, b.flushed, strict=True):
            np.testing.assert_array_equal(mine, its)
        for row, length in enumerate(np.asarray(cache.lengths)):
            done = [
                int(count[row]) * clock.unit
                for count, clock in zip(a.flushed, run.wiring.storage.clocks, strict=True)
            ]
            live = np.arange(min(done), max(int(length) - sinks, min(done))) % run.ring
            for name in a.window:
                np.testing.assert_array_equal(
                    a.window[name][:, row, live], b.window[name][:, row, live], name
                )
                few = min(sinks, int(length))
                if sinks:  # a cache without sinks has no arrays of them
                    np.testing.assert_array_equal(
                        a.sinks[name][:, row, :few], b.sinks[name][:, row, :few], name
                    )
    for row in range(cache.batch):
        same_words(cache, row, other, row)


@pytest.mark.parametrize("name", with_nightly(GENERAL, ["kivi2"]))
def test_another_capacity_and_back(name):
    """Larger, as small as rows allow, and as before: what rows hold stays, and other tokens follow
    as if nothing had been there."""
    cache = fresh(name, ROWS)
    other = kvq.resize(kvq.resize(kvq.resize(cache, 1100), LEAST), CAPACITY)
    same(other, cache)
    check(
        name, extend(name, other, MORE), [row + more for row, more in zip(ROWS, MORE, strict=True)]
    )


@pytest.mark.parametrize(
    "name",
    with_nightly(
        ["kivi3-sinks", "kivi-published", "sliding-mixed", "exact", "kvquant"],
        ["sliding-mixed"],
    ),
)
def test_a_resized_cache_is_as_one_that_was_made_so(name):
    """Down to capacities whose rows fit the window, whose rings are shorter."""
    model, method = model_and_method(name)
    few = [row[:40] for row in ROWS]
    small = extend(name, empty(name, 3, 48), few)
    assert kvq.resize(small, CAPACITY).layout == kvq.init_cache(model, method, 3, CAPACITY).layout
    same(kvq.resize(small, CAPACITY), fresh(name, few))
    same(kvq.resize(fresh(name, few), 48), small)


@pytest.mark.nightly
def test_rings_of_sliding_windows():
    """Rows that have gone round a ring, in caches whose rings are of another length or none."""
    model, forward = tiny(sliding_window=300), jax.jit(kvq.forward)
    text, counts = tokens(2, 1300), jnp.asarray([1300, 700])
    caches = [
        forward(model, text, counts, kvq.init_cache(model, "kivi:bits=2,window=32", 2, capacity))[1]
        for capacity in (1310, 4096)
    ]
    wraps = [[run.wraps for run in runs_of(cache.layout)] for cache in caches]
    assert wraps == [[True], [True]]
    wanted = [forward(model, text[:, :1], jnp.ones(2, jnp.int32), cache)[0] for cache in caches]
    for cache, capacity, logits in ((caches[0], 4096, wanted[1]), (caches[1], 1310, wanted[0])):
        other = kvq.resize(cache, capacity)
        np.testing.assert_array_equal(
            forward(model, text[:, :1], jnp.ones(2, jnp.int32), other)[0], logits
        )


@pytest.mark.nightly
def test_a_ring_that_becomes_a_plain_body():
    model, forward = tiny(sliding_window=300), jax.jit(kvq.forward)
    text, counts = tokens(2, 1300), jnp.asarray([1300, 700])
    empty_ring = kvq.init_cache(model, "kivi:bits=2,window=32", 2, 1310)
    ring = forward(model, text, counts, empty_ring)[1]
    short = kvq.gather(kvq.crop(ring, jnp.asarray([0, 700])), jnp.asarray([1]))
    plain = kvq.resize(short, 740)
    assert not runs_of(plain.layout)[0].wraps
    fresh_plain = forward(
        model, text[1:], counts[1:], kvq.init_cache(model, "kivi:bits=2,window=32", 1, 740)
    )[1]
    logits = [
        forward(model, text[:1, :1], jnp.ones(1, jnp.int32), cache)[0]
        for cache in (plain, fresh_plain)
    ]
    np.testing.assert_array_equal(*logits)


@pytest.mark.nightly
def test_long_bodies_change_their_form_with_their_capacity():
    """Uniform codes of KIVI on CPUs lie in lines and stripes from 4096 tokens on."""
    model, forward = tiny(), jax.jit(kvq.forward)
    text, counts = tokens(2, 350), jnp.asarray([350, 161])
    caches = [
        forward(model, text, counts, kvq.init_cache(model, "kivi:bits=4,window=32", 2, capacity))[1]
        for capacity in (512, 4096)
    ]
    same(kvq.resize(caches[0], 4096), caches[1])
    same(kvq.resize(caches[1], 512), caches[0])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("kivi2", marks=pytest.mark.nightly),
        pytest.param("kivi8", marks=pytest.mark.nightly),
        pytest.param("kivi-published", marks=pytest.mark.nightly),
        "uniform",
        pytest.param("exact", marks=pytest.mark.nightly),
    ],
)
def test_bodies_head_by_head(name):
    """The form of GPUs: int4, pairs of codes in a nibble, int8."""
    model, method = model_and_method(name)
    caches = [
        kvq.init_cache(model, method, 1, capacity, form="heads") for capacity in (CAPACITY, 800)
    ]
    text, counts = tokens(1, 330), jnp.asarray([330])
    first, second = (jax.jit(kvq.forward)(model, text, counts, cache)[1] for cache in caches)
    same(kvq.resize(first, 800), second)
    same(kvq.resize(second, CAPACITY), first)
    head, tail = kvq.cut(first, 200)
    assert tail.start >= 192 - 64
    same(kvq.join(head, tail), first)


def test_a_smaller_capacity_is_refused_where_rows_hold_more():
    cache = fresh("kivi2", ROWS)
    with pytest.raises(
        kvq.UserError,
        match=r"row 0 holds 330 tokens; a capacity of 300 is too small: crop it first",
    ):
        kvq.resize(cache, 300)
    for capacity in (0, -1, True):
        with pytest.raises(
            kvq.UserError, match=r"capacity=.*; it must be a whole number of at least 1"
        ):
            kvq.resize(cache, capacity)
    cut = jax.jit(kvq.resize, static_argnames="capacity")(cache, capacity=300)
    assert cut.overflow.tolist() == [True, False, False]
    assert cut.lengths.tolist()[1:] == [290, 57]
    check(
        "kivi2",
        kvq.resize(cut, CAPACITY),
        [row[: int(n)] for row, n in zip(ROWS, cut.lengths, strict=True)],
    )


@pytest.mark.parametrize("name", with_nightly(GENERAL, ["kvquant"]))
@pytest.mark.parametrize("wish", thinned([230, 70], 2))
def test_a_cache_is_what_it_was_cut_into(name, wish):
    """Head and tail, each made as small as it goes, joined; and a tail that another text has behind
    the same head."""
    cache = fresh(name, ROWS[:2])
    head, tail = kvq.cut(cache, wish)
    start = tail.start
    assert wish - 128 < start <= wish
    assert head.lengths.tolist() == [start, start]
    assert tail.lengths.tolist() == [330 - start, 290 - start]
    joined = kvq.join(kvq.resize(head, wish + 150), tail)
    same(joined, cache)
    check(
        name,
        extend(name, joined, MORE[:2]),
        [row + more for row, more in zip(ROWS[:2], MORE[:2], strict=True)],
    )
    other = [row[:wish] + list(range(350, 500)) for row in ROWS[:2]]
    other = fresh(name, other)
    same(kvq.join(head, kvq.cut(other, start)[1]), other)


@pytest.mark.nightly
def test_a_jitted_function_may_close_over_a_cache():
    """What it holds is known then: it is cut and resized as outside, and what cannot be is
    refused."""
    cache = fresh("mixed", ROWS[:1])
    resized, joined = jax.jit(lambda: (kvq.resize(cache, 340), kvq.join(*kvq.cut(cache, 200))))()
    same(resized, kvq.resize(cache, 340))
    same(joined, cache)
    with pytest.raises(kvq.UserError, match="too small: crop it first"):
        jax.jit(lambda: kvq.resize(cache, 300))()


@pytest.mark.nightly
def test_three_pieces_make_a_cache():
    """A tree of prefixes: its inner nodes are pieces of codes alone."""
    cache = fresh("mixed", ROWS[:1])
    both, last = kvq.cut(cache, 200)
    first, middle = kvq.cut(both, 80)
    assert 0 < middle.start < last.start
    assert (
        min(int(n.min()) for run in encoded(middle.cache) for n in run.values())
        == last.start - middle.start
    )
    same(kvq.join(kvq.join(first, middle), last), cache)
    same(
        kvq.join(kvq.join(first, middle, capacity=300), last, capacity=1000),
        kvq.resize(cache, 1000),
    )


@pytest.mark.nightly
def test_pieces_know_what_was_not_finite():
    cache = extend("kivi2", empty("kivi2", 3), [list(range(190))] * 3, broken={0: 20, 1: 120})
    joined = kvq.join(*kvq.cut(cache, 64))
    assert joined.finite.tolist() == cache.finite.tolist() == [20, 120, 190]


def test_what_cannot_be_cut_or_joined_is_one_line():
    cache = fresh("kivi3-sinks", ROWS)
    assert [kvq.cut(cache, wish)[1].start for wish in (5, 36, 37, 68, 69, 200)] == [
        5,
        5,
        37,
        37,
        37,
        37,
    ]
    with pytest.raises(kvq.UserError, match="tokens=4; the 5 sinks cannot be cut apart"):
        kvq.cut(cache, 4)
    with pytest.raises(kvq.UserError, match="row 1 holds 3 tokens, fewer than the 5 sinks"):
        kvq.cut(kvq.crop(cache, jnp.asarray([99, 3, 99])), 50)
    rows = kvq.gather(cache, jnp.asarray([0, 1]))
    tail = kvq.cut(rows, 69)[1]
    with pytest.raises(
        kvq.UserError, match="row 0 of the head has not encoded the 69 tokens before the piece"
    ):
        kvq.join(empty("kivi3-sinks", 2), tail)
    with pytest.raises(kvq.UserError, match="3 rows cannot be joined with 2"):
        kvq.join(cache, tail)
    with pytest.raises(
        kvq.UserError, match="row 0 would hold 330 tokens, which do not fit a capacity of 300"
    ):
        kvq.join(rows, tail, capacity=300)
    with pytest.raises(kvq.UserError, match="another method"):
        kvq.join(fresh("kivi2", ROWS[:2]), tail)
    with pytest.raises(kvq.UserError, match="sliding window"):
        kvq.cut(empty("sliding", 1, 2048), 64)
    evicting = kvq.init_cache(tiny(), "exact:window=32,keep=streaming:64", 1, CAPACITY)
    with pytest.raises(kvq.UserError, match="evicts tokens"):
        kvq.cut(evicting, 32)


def test_traced_rows_that_cannot_be_cut_or_joined_raise_their_flags():
    cache = fresh("kivi3-sinks", ROWS)
    tail = jax.jit(kvq.cut, static_argnames="tokens")(cache, tokens=69)[1]
    assert tail.cache.overflow.tolist() == [False, False, True]
    head = kvq.evict(kvq.crop(cache, jnp.full((3,), 69)), jnp.asarray([False, True, False]))
    joined = jax.jit(kvq.join)(head, tail)
    assert joined.overflow.tolist() == [False, True, True]
    assert joined.lengths.tolist() == [330, 0, 0]
    check_row("kivi3-sinks", joined, 0, ROWS[0])


def test_requests_of_smaller_caches_join_a_batch():
    """Several rows at once, in the order given, from a cache with room for the prompt alone."""
    name = "kivi3-sinks"
    batch = fresh(name, ROWS)
    few = [list(range(9, 209)), list(range(20, 60))]
    prompts = extend(name, empty(name, 2, 208), few)
    for into, other_rows, wanted in (
        ([2, 0], None, [few[1], ROWS[1], few[0]]),
        (jnp.asarray([1, 2]), 1, [ROWS[0], few[1], few[1]]),
        (jnp.int32(1), 0, [ROWS[0], few[0], ROWS[2]]),
        ([0, 0], [0, 1], [few[1], ROWS[1], ROWS[2]]),
    ):
        joined = kvq.insert(batch, into, prompts, other_rows)
        check(name, joined, wanted)
    grown = extend(name, joined, MORE)
    check(name, grown, [row + more for row, more in zip(wanted, MORE, strict=True)])
    with pytest.raises(kvq.UserError, match="2 rows are to be replaced by 3 rows"):
        kvq.insert(prompts, [0, 1], kvq.init_cache(*model_and_method(name), 3, 100))
    with pytest.raises(kvq.UserError, match=r"a larger capacity, 512; .* kvqjax.resize"):
        kvq.insert(prompts, 0, batch, 0)


@pytest.mark.nightly
def test_repeated_rows():
    name = "aqua"
    cache = kvq.repeat(fresh(name, ROWS[1:]), 2)
    check(name, cache, [ROWS[1], ROWS[1], ROWS[2], ROWS[2]])
    for n in (0, -1, True):
        with pytest.raises(kvq.UserError, match=r"n=.*; it must be a whole number of at least 1"):
            kvq.repeat(cache, n)


@pytest.mark.nightly
def test_bodies_dealt_over_a_mesh():
    """Blocks stay where they are; what would be dealt otherwise is refused."""
    method = "kivi:bits=2,window=32"
    model, forward = kvq.shard(tiny(), method, seq=2), jax.jit(kvq.forward)
    cache = kvq.init_cache(model, method, 1, 1100)
    _, cache = forward(model, tokens(1, 700), jnp.asarray([700]), cache)
    larger = kvq.resize(cache, 2000)
    assert larger.layout == kvq.init_cache(model, method, 1, 2000).layout
    next_token = tokens(1, 1), jnp.asarray([1])
    wanted = forward(model, *next_token, cache)[0]
    for other in (larger, kvq.resize(larger, 1100)):
        np.testing.assert_allclose(forward(model, *next_token, other)[0], wanted, atol=1e-5)
    refusal = "a body dealt over 2 devices cannot change from a capacity of 1100 to 10: its blocks"
    with pytest.raises(kvq.UserError, match=refusal):
        kvq.resize(kvq.init_cache(model, method, 1, 1100), 10)
    with pytest.raises(kvq.UserError, match="dealt over 2 devices cannot be cut"):
        kvq.cut(cache, 64)


@pytest.mark.parametrize(
    ("capacity", "held", "at", "later"),
    with_nightly(
        [(70, 68, 64, 70), (66, 66, 64, 200), (20, 18, 10, 512)],
        [(20, 18, 10, 512)],
    ),
)
def test_pieces_and_caches_that_are_too_short_for_a_body(capacity, held, at, later):
    """A piece of fewer tokens than a unit, near a row's end; a cache whose tokens all fit the
    window, joined to one that has a body."""
    model, forward = tiny(), jax.jit(kvq.forward)
    method = "kivi:bits=2,group=32,window=0" if capacity > 32 else "kivi:bits=2,window=32"
    cache = forward(
        model, tokens(1, held), jnp.asarray([held]), kvq.init_cache(model, method, 1, capacity)
    )[1]
    joined, wanted = kvq.join(*kvq.cut(cache, at), capacity=later), kvq.resize(cache, later)
    same(joined, wanted)
    more, one = tokens(1, 1), jnp.ones(1, jnp.int32)
    if held < later:
        np.testing.assert_array_equal(
            *(forward(model, more, one, cache)[0] for cache in (joined, wanted))
        )


def test_no_more_tokens_are_joined_than_the_rope_is_for():
    """A larger capacity is refused as `resize` refuses it: the frequencies would be those of
    another text."""
    model = tiny(rope=kvq.Rope(kind="dynamic", factor=2.0, original_max_position=400))
    pieces = kvq.cut(kvq.init_cache(model, "kivi:window=0", 1, 300), 0)
    with pytest.raises(kvq.UserError, match="401 tokens are more than the 400"):
        kvq.join(*pieces, capacity=401)
