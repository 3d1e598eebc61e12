"""An engine gives every request what `generate` gives it alone, whoever else is served."""

import asyncio
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny

import kvqjax as kvq
from kvqjax import PagePool
from kvqjax.generation import loop
from kvqjax.serving import batch
from kvqjax.serving.engine import EngineClosed, EngineFull, RequestFailed
from kvqjax.serving.prefixes import Prefixes

CAPACITY, CHUNK, NEW = 192, 32, 20
SAMPLED = {"temperature": 0.9, "top_k": 20, "repetition_penalty": 1.2}
# Greedy and drawn requests with every option that changes logits, each for itself.
DRAWS = (
    {},
    SAMPLED | {"seed": 1},
    {"presence_penalty": 0.8, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 3, "logit_bias": {5: 3.0, 6: -100.0}},
    {"min_tokens": 5, "stop_token_ids": list(range(8))},
    SAMPLED | {"seed": 5, "frequency_penalty": -0.5, "min_tokens": 3, "stop_token_ids": [3, 9]},
)
PROMPTS = [[1, 2, 3], [4] * 40, [5, 6], [7, 8, 9, 10], [11, 12] * 40, [3, 1] * 16]


@pytest.fixture(scope="module")
def model():
    return tiny()


def alone(model, prompt, method, **options):
    """What `generate` makes of one prompt in the engine's mode: chunks on the same grid."""
    return kvq.generate(
        model, [prompt], method, chunk=CHUNK, capacity=CAPACITY, eos_ids=(), **options
    )


def engine_of(model, method, rows=3, **options):
    return kvq.Engine(model, method, rows=rows, capacity=CAPACITY, chunk=CHUNK, **options)


@pytest.mark.parametrize(
    "method", [pytest.param("exact", marks=pytest.mark.nightly), "kivi:bits=2,window=32"]
)
def test_every_request_gets_what_it_gets_alone(model, method):
    """More requests than rows, drawn and greedy ones side by side, of different lengths."""
    lengths = [NEW - 3 * number for number in range(len(PROMPTS))]
    with engine_of(model, method) as engine:
        handles = [
            engine.submit(prompt, max_new_tokens=length, eos_ids=(), **draw)
            for prompt, length, draw in zip(PROMPTS, lengths, DRAWS, strict=True)
        ]
        answers = [handle.result() for handle in handles]
    for answer, prompt, length, draw in zip(answers, PROMPTS, lengths, DRAWS, strict=True):
        wanted = alone(model, prompt, method, max_new_tokens=length, **draw)
        assert (answer.tokens, answer.finish_reason) == (wanted.tokens[0], wanted.finish_reasons[0])
        assert answer.prompt_tokens == len(prompt)
        assert 0 < answer.seconds_to_first_token <= answer.seconds


def test_scores_are_log_probabilities_of_the_model(model):
    prompt = PROMPTS[4]
    with engine_of(model, "exact") as engine:
        neighbour = engine.submit(PROMPTS[1], max_new_tokens=NEW, eos_ids=())
        answer = engine.submit(
            prompt, max_new_tokens=5, eos_ids=(), scores=3, prompt_scores=True
        ).result()
        plain = engine.submit(prompt, max_new_tokens=5, eos_ids=()).result()
        assert neighbour.result().scores == []
    assert plain.tokens == answer.tokens
    text = [*prompt, *answer.tokens]
    cache = kvq.init_cache(model, "exact", 1, CAPACITY)
    logits, _ = jax.jit(kvq.forward)(model, jnp.asarray([text]), jnp.asarray([len(text)]), cache)
    wanted = np.asarray(jax.nn.log_softmax(logits[0], axis=-1))
    scores = [*answer.prompt_scores, *answer.scores]
    assert [score.token for score in scores] == text[1:]
    for place, score in enumerate(scores):
        assert score.logprob == pytest.approx(wanted[place, score.token], abs=2e-4)
        assert len(score.likeliest) == 3
        assert max(score.likeliest.values()) == pytest.approx(wanted[place].max(), abs=2e-4)
    assert all(next(iter(score.likeliest)) == score.token for score in answer.scores)  # greedy


def test_pieces_come_as_they_are_made(model):
    """In a loop, in a coroutine, and again after the end: the same pieces."""

    async def collected(handle):
        return [piece async for piece in handle]

    with engine_of(model, "exact", rows=1, stride=2) as engine:
        handle = engine.submit(PROMPTS[0], max_new_tokens=NEW, eos_ids=())
        pieces = asyncio.run(collected(handle))
        assert len(pieces) > 3
        assert list(handle) == pieces
    assert [token for piece in pieces for token in piece.tokens] == handle.result().tokens


@pytest.mark.nightly
def test_a_stop_string_and_an_end_token_end_an_answer():
    model = kvq.load("demo")
    text = "The baker came home after the rain."
    with kvq.Engine(model, "exact", rows=2, capacity=256, chunk=64) as engine:
        whole = engine.submit(text, max_new_tokens=24, eos_ids=()).result()
        middle = whole.text[len(whole.text) // 2 :][:6]
        stopped = engine.submit(text, max_new_tokens=24, eos_ids=(), stop=middle).result()
        end = whole.tokens[7]
        ended = engine.submit(text, max_new_tokens=24, eos_ids=[end]).result()
    assert (stopped.text, stopped.finish_reason) == (whole.text[: whole.text.index(middle)], "stop")
    assert (ended.tokens, ended.finish_reason) == (whole.tokens[: whole.tokens.index(end)], "eos")
    assert whole.text == kvq.generate(model, text, max_new_tokens=24, eos_ids=()).text[0]


@pytest.mark.parametrize(
    ("method", "capacity", "chunk", "length", "start", "stop"),
    [
        pytest.param("exact", CAPACITY, CHUNK, 80, 32, 64, id="turned"),
        pytest.param(
            "higgs:bits=2,dim=4,centre=block,sinks=2",
            1024,
            128,
            600,
            258,
            514,
            id="pages",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_an_answer_goes_on_in_a_full_row(model, method, capacity, chunk, length, start, stop):
    """As `generate` goes on from a cache from which `drop` took the oldest text. Requests beside it
    and behind it, which share its pages, get what they get alone."""
    prompt, stride = (list(range(50)) * 12)[:length], 8
    first = (capacity - length - 1) // stride * stride + 1  # tokens until the row is full
    new = first + stop - start  # and until it is full again
    options = {"max_new_tokens": new, "eos_ids": ()}
    alone = kvq.generate(
        model, [prompt], method, chunk=chunk, capacity=capacity, max_new_tokens=first, eos_ids=()
    )
    wanted, held = alone.tokens[0], length + first
    cache = kvq.drop(kvq.crop(alone.cache, jnp.asarray([held - 1])), start, stop)
    assert int(cache.lengths[0]) == held - 1 - (stop - start)
    more = kvq.generate(model, [wanted[-1:]], cache=cache, max_new_tokens=stop - start, eos_ids=())
    with kvq.Engine(
        model, method, rows=3, capacity=capacity, chunk=chunk, stride=stride, context_shift=True
    ) as engine:
        begun = engine.submit(prompt, max_new_tokens=3, eos_ids=()).result()
        answers = [engine.submit(prompt, **options) for _ in range(2)]
        answers = [handle.result() for handle in answers]
        later = engine.submit(prompt, max_new_tokens=3, eos_ids=()).result()
        stats = engine.stats()
        with pytest.raises(kvq.UserError, match="new ones do not fit a row"):
            engine.submit([1] * capacity, max_new_tokens=1)
    for answer in answers:
        assert answer.tokens == [*wanted, *more.tokens[0]]
        assert (answer.finish_reason, answer.dropped_tokens) == ("length", stop - start)
    assert begun.tokens == later.tokens == wanted[:3]
    assert (stats.shifts, stats.dropped_tokens) == (2, 2 * (stop - start))
    if stats.pages:
        assert later.reused_tokens == 512  # of which 256 are a page that the rows shared
        assert stats.pages - stats.pages_free <= 4  # those of the kept prefixes


def test_rows_that_cannot_shift_are_refused(model):
    for method, capacity, line in (
        ("kivi:bits=2", 192, "context_shift: kivi.* stores codes of keys after RoPE"),
        ("kivi:bits=2,rope=pre", 192, "leaves these rows .* tokens at a time; capacity=192 is too"),
    ):
        with pytest.raises(kvq.UserError, match=line):
            kvq.Engine(model, method, rows=2, capacity=capacity, context_shift=True)


def test_requests_are_given_up(model):
    """One that runs and one that waits. Their rows serve others, whose text does not change."""
    with engine_of(model, "exact", rows=1, stride=2) as engine:
        running = engine.submit(PROMPTS[0], max_new_tokens=150, eos_ids=())
        waiting = engine.submit(PROMPTS[1], max_new_tokens=5)
        later = engine.submit(PROMPTS[4], max_new_tokens=5, eos_ids=())
        next(iter(running))
        waiting.abort()
        running.abort()
        assert running.result().finish_reason == "aborted"
        assert len(running.result().tokens) < 150
        assert waiting.result().tokens == []
        wanted = alone(model, PROMPTS[4], "exact", max_new_tokens=5).tokens[0]
        assert later.result().tokens == wanted
        stats = engine.stats()
    assert (stats.requests, stats.aborted, stats.running, stats.waiting) == (3, 2, 0, 0)


def test_urgent_requests_come_first_and_a_full_queue_refuses(model):
    # Answers so long that none ends by itself while this thread is kept from the processor.
    options = {"max_new_tokens": 4000, "eos_ids": (), "beyond_trained": True}
    with kvq.Engine(
        model, "exact", rows=1, capacity=4096, chunk=CHUNK, stride=2, queue=3
    ) as engine:
        running = engine.submit(PROMPTS[0], **options)
        next(iter(running))  # its row is taken
        handles = {
            priority: engine.submit(PROMPTS[2], priority=priority, **options)
            for priority in (5, 1, 3)
        }
        with pytest.raises(EngineFull, match="3 requests wait already"):
            engine.submit(PROMPTS[2])
        for priority in (1, 3, 5):
            running.abort()
            running = handles.pop(priority)
            next(iter(running))  # it has the row now, and 2000 strides to go
            assert not any(handle.ended for handle in handles.values())
        running.abort()


def test_a_closed_engine_has_no_request_left(model):
    engine = engine_of(model, "exact", rows=1, stride=2)
    handles = [engine.submit(prompt, max_new_tokens=60, eos_ids=()) for prompt in PROMPTS[:3]]
    next(iter(handles[0]))
    engine.close()
    assert {handle.result().finish_reason for handle in handles} == {"aborted"}
    with pytest.raises(EngineClosed, match="closed"):
        engine.submit(PROMPTS[0])
    engine = engine_of(model, "exact", rows=1, stride=2)
    handle = engine.submit(PROMPTS[0], max_new_tokens=6, eos_ids=())
    engine.close(finish=True)
    assert len(handle.result().tokens) == 6


def test_numbers_that_are_not_finite_end_their_request_alone(model):
    broken = model.replace(
        params={**model.params, "embed": model.params["embed"].at[9].set(np.nan)}
    )
    with engine_of(broken, "exact") as engine:
        good, bad = (engine.submit([1, 2, token], max_new_tokens=6, eos_ids=()) for token in (3, 9))
        with pytest.raises(RequestFailed, match="NaN or infinite"):
            bad.result()
        assert len(good.result().tokens) == 6
        assert engine.stats().failed == 1


def test_a_fault_of_the_device_s_thread_leaves_nobody_waiting(model, monkeypatch):
    engine = engine_of(model, "exact", rows=1, stride=2)
    running = engine.submit(PROMPTS[0], max_new_tokens=150, eos_ids=())
    waiting = engine.submit(PROMPTS[1], max_new_tokens=5)
    next(iter(running))
    monkeypatch.setattr(engine._batch, "step", lambda *_: 1 / 0)
    for handle in (running, waiting):
        with pytest.raises(ZeroDivisionError):
            handle.result()
    assert isinstance(engine.fault, ZeroDivisionError)
    with pytest.raises(EngineClosed):
        engine.submit(PROMPTS[0])
    engine.close()


@pytest.mark.nightly
def test_warming_waits_for_room_in_the_queue(model, monkeypatch):
    """A server may be asked before it is ready."""
    with engine_of(model, "exact", rows=1, stride=2, queue=1) as engine:
        monkeypatch.setattr(engine._batch, "warm", lambda: None)  # takes long, and no request
        handles = [engine.submit(PROMPTS[0], max_new_tokens=100, eos_ids=())]
        next(iter(handles[0]))  # its row is taken
        handles.append(engine.submit(PROMPTS[0], max_new_tokens=5, eos_ids=()))
        engine.warm()
        assert [len(handle.result().tokens) for handle in handles] == [100, 5]
        assert engine.stats().requests == 2


@pytest.mark.nightly
def test_a_client_whose_event_loop_is_closed_harms_no_other(model):
    with engine_of(model, "exact", rows=2, stride=2) as engine:
        left, stays = (engine.submit(PROMPTS[0], max_new_tokens=150, eos_ids=()) for _ in range(2))

        async def read_one():
            pieces = left.__aiter__()
            await anext(pieces)
            return pieces  # neither taken to its end nor closed

        loop = asyncio.new_event_loop()
        pieces = loop.run_until_complete(read_one())
        loop.close()
        assert len(stays.result(timeout=120.0).tokens) == 150
        assert engine.fault is None
        del pieces


@pytest.mark.nightly
def test_a_prompt_that_made_way_counts_what_it_reused_at_last(model):
    """It goes on from a prefix, makes way for an earlier request, and finds the prefix gone when it
    begins anew."""
    one, two = (
        kvq.ledger(kvq.init_cache(model, "exact", 1, 1024, pages=pages)).bytes for pages in (1, 2)
    )
    # Pages of 256 tokens, and what rows and snapshots have besides.
    room = 7 * (two - one) + 12 * (2 * one - two)
    system = [token % 49 for token in range(645)]
    with kvq.Engine(
        model, "exact", rows=3, pool_bytes=room, prefixes=1, stride=2, **LONG
    ) as engine:
        assert engine.stats().pages == 7
        engine.submit([*system, 1], max_new_tokens=2, eos_ids=()).result()
        # Both need a second page, for 288 tokens, while the last prompt is fed. One gets a page of
        # the prefix.
        early = [
            engine.submit(prompt, max_new_tokens=60, eos_ids=())
            for prompt in ([7] * 270, [8] * 280)
        ]
        last = engine.submit([*system, *[3] * 370], max_new_tokens=4, eos_ids=())
        answers = [handle.result() for handle in (*early, last)]
        stats = engine.stats()
    assert stats.preempted > 0
    assert stats.reused_tokens == sum(answer.reused_tokens for answer in answers) == 0


def test_what_cannot_be_is_one_line(model, unchecked):
    with engine_of(model, "exact", rows=1) as engine:
        for options, message in (
            ({"max_new_tokens": CAPACITY}, "do not fit a row of 192"),
            ({"max_new_tokens": 0}, "max_new_tokens"),
            ({"scores": 21}, "at most 20"),
            ({"scores": 1.5}, "scores=1.5; it must be a whole number"),
            ({"priority": "high"}, "priority='high'; it must be a whole number"),
            ({"seed": 2**32}, "from -1 to 4294967295"),
            ({"eos_ids": range(9)}, "9 end tokens"),
            ({"temperature": -1.0}, "temperature"),
            ({"do_sample": True}, "temperature is above 0"),
            ({"stop": "x"}, "tokenizer"),
        ):
            with pytest.raises(kvq.UserError, match=message):
                engine.submit(PROMPTS[0], **options)
        with pytest.raises(kvq.UserError, match="no answer within"):
            engine.submit(PROMPTS[0], max_new_tokens=100, eos_ids=()).result(timeout=0.0)
    for options, message in (
        ({"capacity": 1}, "capacity=1; it must be a whole number of at least 2"),
        ({"stride": 10**9}, "stride=1000000000; it must be a whole number from 1 to 1024"),
        ({"pool_bytes": 2**51}, "pool_bytes=.* from 1 to 1125899906842624"),
        ({"pool_bytes": 2**50}, "a cache takes 1024.00 TiB; there are"),
        ({"rows": 10**9}, "rows=1000000000 of capacity=192 with prefixes=2: a cache takes"),
        ({"prefixes": 10**9}, "with prefixes=1000000000: a cache takes"),
        ({"rows": 2, "capacity": 2**31 - 1}, "rows=2 of capacity=2147483647 .*: a cache takes"),
    ):
        with pytest.raises(kvq.UserError, match=message):
            kvq.Engine(model, "exact", **({"capacity": CAPACITY} | options))


@pytest.mark.nightly
def test_a_chunk_longer_than_any_prompt_is_one_of_a_row_s_length(model):
    with kvq.Engine(model, "exact", rows=2, capacity=64, chunk=10**9) as engine:
        made = engine.submit(PROMPTS[1], max_new_tokens=4, eos_ids=()).result().tokens
    assert (
        made
        == kvq.generate(
            model, [PROMPTS[1]], "exact", capacity=64, max_new_tokens=4, eos_ids=()
        ).tokens[0]
    )


def test_the_smallest_row_is_warmed_and_gives_a_token(model):
    with kvq.Engine(model, "exact", rows=1, capacity=2) as engine:
        engine.warm()
        assert len(engine.submit(PROMPTS[0][:1], max_new_tokens=1, eos_ids=()).result().tokens) == 1


@pytest.mark.parametrize(
    "method",
    [
        "exact",
        "kivi:bits=2,window=32",
        pytest.param("higgs:bits=2,window=16", marks=pytest.mark.nightly),
    ],
)
def test_what_prompts_begin_with_is_read_once(model, method):
    """The second prompt that begins so keeps a row at the end of the last shared chunk, later ones
    go on from there."""
    begins = [token % 50 for token in range(70)]
    prompts = [[*begins, *tail] for tail in ([1] * 40, [2, 3], [4] * 30, [5])] + [
        begins[:64],
        begins[:65],
    ]
    with engine_of(model, method, prefixes=2) as engine:
        answers = [
            engine.submit(prompt, max_new_tokens=8, eos_ids=()).result() for prompt in prompts
        ]
        stats = engine.stats()
    # A prompt of 64 tokens reads its last chunk again: its last token's logits are wanted.
    assert [answer.reused_tokens for answer in answers] == [0, 0, 64, 64, 0, 64]
    assert stats.reused_tokens == 3 * 64
    assert stats.prompt_tokens == sum(map(len, prompts))
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer.tokens == alone(model, prompt, method, max_new_tokens=8).tokens[0]


def test_prefixes_used_least_recently_go_first(model):
    """The next prompt that begins so goes on from the last one's end; the memory of one row holds
    two prefixes."""
    begins = [[number] * 40 for number in (3, 7, 9)]
    with engine_of(model, "exact", prefixes=1) as engine:
        reused = [
            engine.submit([*begins[number], 1], max_new_tokens=2, eos_ids=()).result().reused_tokens
            for number in (0, 0, 1, 0, 1, 2, 2, 1, 0)
        ]
        assert engine.stats().prefixes == 2
    assert reused == [0, 32, 0, 32, 32, 0, 32, 32, 0]
    with engine_of(model, "exact", prefixes=0) as engine:
        answers = [engine.submit([3] * 41, max_new_tokens=2, eos_ids=()).result() for _ in range(3)]
    assert {answer.reused_tokens for answer in answers} == {0}


@pytest.mark.nightly
def test_a_common_prefix_outlives_the_prompts_between(model):
    """Half of all requests begin alike. Where there is a place for one prefix, the others do not
    displace theirs, but a prefix that nobody has begun with for long goes."""
    common, wanted = [5] * 33, []
    with engine_of(model, "kivi:bits=2,window=32", prefixes=1) as engine:
        for number in range(8):
            for prompt in ([*common, number], [number + 10] * 40):
                wanted.append(
                    engine.submit(prompt, max_new_tokens=2, eos_ids=()).result().reused_tokens
                )
        assert engine.stats().prefixes == 1
        assert wanted == [0, 0, 0, 0] + [32, 0] * 6
        for number in range(20, 40):
            engine.submit([number] * 40, max_new_tokens=2, eos_ids=()).result()
        again = [
            engine.submit(prompt, max_new_tokens=2, eos_ids=()).result()
            for prompt in ([39] * 41, [*common, 1])
        ]
    assert [answer.reused_tokens for answer in again] == [32, 0]


def test_a_prefix_whose_pages_rows_use_is_kept_when_pages_run_out(model):
    """To drop it would free no page."""
    pool, cache = PagePool(6), kvq.init_cache(model, "exact", 1, 64)
    prefixes = Prefixes(4, 3, pool)
    row, other = pool.take(2), pool.take(2)
    prefixes.worth_keeping(range(9))
    prefixes.keep(range(9), 8, cache, row)
    assert not prefixes.drop()
    prefixes.worth_keeping(range(20, 29))
    prefixes.keep(range(20, 29), 4, cache, other[:1])
    prefixes.keep(range(20, 29), 8, cache, other)
    pool.drop(other)  # the row has ended: both prefixes have its first page
    assert [prefixes.drop(), pool.free, prefixes.drop(), pool.free, prefixes.drop()] == [
        True,
        2,
        True,
        4,
        False,
    ]
    pool.drop(row)
    assert prefixes.drop()
    assert (pool.free, len(prefixes)) == (6, 0)


LONG = {"capacity": 1024, "chunk": 64}


def alone_long(model, prompt, method, **options):
    return kvq.generate(model, [prompt], method, **LONG, eos_ids=(), **options).tokens[0]


@pytest.mark.parametrize(
    "method", [pytest.param("exact", marks=pytest.mark.nightly), "kivi:bits=2,window=32,sinks=4"]
)
def test_prompts_that_begin_alike_share_pages(model, method):
    """Each goes on in pages of its own; the last page of what they share is copied, for all write
    there."""
    begins = [token % 49 for token in range(645)]
    prompts = [[*begins, *tail] for tail in ([1] * 10, [2, 3] * 20, [4], [5] * 70)]
    with kvq.Engine(model, method, rows=3, prefixes=1, **LONG) as engine:
        engine.submit(prompts[0], max_new_tokens=4, eos_ids=()).result()
        handles = [engine.submit(prompt, max_new_tokens=100, eos_ids=()) for prompt in prompts[1:]]
        for handle in handles:
            next(iter(handle))
        assert engine.stats().pages_shared >= 1
        answers = [handle.result() for handle in handles]
        kept = {page for prefix in engine._prefixes._kept.values() for page in prefix.pages}
        stats = engine.stats()
    assert stats.pages_free + len(kept) == stats.pages
    assert [answer.reused_tokens for answer in answers] == [640] * 3
    for answer, prompt in zip(answers, prompts[1:], strict=True):
        assert answer.tokens == alone_long(model, prompt, method, max_new_tokens=100)


@pytest.mark.nightly
def test_requests_make_way_when_pages_run_out(model):
    """More rows than pages: those that came last wait in the host's memory. All get what they get
    alone, drawn too."""
    method, rows = "exact", 4
    cache = jax.eval_shape(lambda: kvq.init_cache(model, method, rows, 1024, pages=2))
    room = kvq.ledger(cache).bytes + 4 * kvq.ledger(kvq.init_cache(model, method, 1, 64)).bytes
    prompts = [[number] * (200 + 50 * number) for number in range(1, 6)]
    penalties = {"frequency_penalty": 0.3, "logit_bias": {3: 1.0}}
    draws = [
        SAMPLED | {"seed": number} if number % 2 else penalties for number in range(len(prompts))
    ]
    with kvq.Engine(model, method, rows=rows, pool_bytes=room, prefixes=1, **LONG) as engine:
        assert 4 <= engine.stats().pages <= 7
        handles = [
            engine.submit(
                prompt, max_new_tokens=300, eos_ids=(), priority=int(number == 1), scores=0, **draw
            )
            for number, (prompt, draw) in enumerate(zip(prompts, draws, strict=True))
        ]
        given_up = engine.submit([7] * 500, max_new_tokens=400, eos_ids=())
        next(iter(handles[0]))
        given_up.abort()
        answers = [handle.result() for handle in handles]
        stats = engine.stats()
    assert stats.preempted > 0
    assert (stats.requests, stats.aborted, stats.failed) == (6, 1, 0)
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.tokens == 5 * 300
    for answer, prompt, draw in zip(answers, prompts, draws, strict=True):
        assert answer.tokens == alone_long(model, prompt, method, max_new_tokens=300, **draw)
        assert len(answer.scores) == 300


def test_memory_says_how_many_rows_there_are(model):
    row = kvq.ledger(kvq.init_cache(model, "exact", 1, CAPACITY)).bytes
    with kvq.Engine(model, "exact", pool_bytes=5 * row, capacity=CAPACITY, chunk=CHUNK) as engine:
        stats = engine.stats()
    # One takes prompts, two are kept for what prompts begin with.
    assert (stats.rows, stats.capacity) == (
        2,
        CAPACITY,
    )
    assert stats.cache_bytes <= 5 * row
    one, two = (
        kvq.ledger(kvq.init_cache(model, "exact", 1, CAPACITY, pages=pages)).bytes
        for pages in (1, 2)
    )
    least = (two - one) + 11 * (2 * one - two)
    # More rows than are full: one row's page, and what nine rows, the prompt and a prefix have
    # beside pages.
    with kvq.Engine(
        model, "exact", pool_bytes=least, rows=9, prefixes=1, capacity=CAPACITY, chunk=CHUNK
    ) as engine:
        stats = engine.stats()
    assert (stats.rows, stats.pages) == (9, 1)
    assert stats.cache_bytes <= least


@pytest.mark.parametrize("options", [{"rows": 6, "prefixes": 0}, {"rows": 6}, {}, {"prefixes": 0}])
@pytest.mark.parametrize("method", ["exact", "kivi:bits=4,window=32"])
def test_too_little_memory_is_told_how_much_is_needed(model, method, options):
    """Given that, the engine begins."""
    options = options | {"capacity": CAPACITY, "chunk": CHUNK}
    with pytest.raises(kvq.UserError, match="are given; give pool_bytes=") as raised:
        kvq.Engine(model, method, pool_bytes=5000, **options)
    least = int(re.search(r"give pool_bytes=(\d+)", str(raised.value))[1])
    with pytest.raises(kvq.UserError, match=f"need {least} bytes at least; {least - 1} are given"):
        kvq.Engine(model, method, pool_bytes=least - 1, **options)
    with kvq.Engine(model, method, pool_bytes=least, **options) as engine:
        assert engine.stats().rows == options.get("rows", 1)
        assert engine.stats().cache_bytes <= least


def test_a_warm_engine_compiles_nothing_for_a_request(model):
    """Of any length, greedy or drawn, with scores or without; nor for what pages need."""
    programs = (
        loop.feed,
        loop.first_token,
        loop.decode_steps,
        batch._joined,
        batch._scored_feed,
        batch._emptied,
        batch._copied_row,
        batch._read_page,
        batch._write_page,
        batch.copied_page,
    )

    def compiled():
        return [program._cache_size() for program in programs]

    one, two = (
        kvq.ledger(kvq.init_cache(model, "exact", 1, CAPACITY, pages=pages)).bytes
        for pages in (1, 2)
    )
    # One page, in which one row is full: a request that comes first sends the other to the host and
    # back.
    room = (two - one) + 3 * (2 * one - two)
    with engine_of(model, "exact", rows=2, pool_bytes=room, prefixes=0, stride=2) as engine:
        engine.warm()
        before = compiled()
        assert engine.stats().requests == 0
        for length in (1, 15, 33, 90):
            later = engine.submit(
                [3] * length, max_new_tokens=CAPACITY - length, eos_ids=(), **SAMPLED
            )
            next(iter(later))
            engine.submit(
                [3] * length, max_new_tokens=4, scores=2, prompt_scores=length == 33, priority=-1
            ).result()
            later.result()
        assert compiled() == before
        assert engine.stats().preempted > 0


def test_a_model_on_a_mesh_answers_as_on_one_device(model):
    """KV heads are shared out over two devices; rows cannot be, for a prompt is fed as one row."""
    method = "kivi:bits=4,window=32"
    wanted = [alone(model, prompt, method, max_new_tokens=8).tokens[0] for prompt in PROMPTS[:3]]
    with engine_of(kvq.shard(model, method, model=2), method) as engine:
        handles = [
            engine.submit(prompt, max_new_tokens=8, eos_ids=(), scores=1) for prompt in PROMPTS[:3]
        ]
        assert [handle.result().tokens for handle in handles] == wanted
    with pytest.raises(
        kvq.UserError, match="no rows are shared out among devices; this mesh has 2 along data"
    ):
        engine_of(kvq.shard(model, method, data=2), method)
