"""What `generate` returns beside text: a cache that goes on as if nothing had been cut, why rows
ended, counts; and token ids without a tokenizer."""

import itertools

import jax
import numpy as np
import pytest
from cases import model_and_method, with_nightly
from tiny import tiny

import kvqjax as kvq
from kvqjax.cache import runs_of
from kvqjax.generation import loop
from kvqjax.generation.driver import steps_until_encoded
from kvqjax.model import locate

PROMPTS = [[7, 3, 9, 4] * 8, list(range(45))]
MORE = [[5, 11, 2], [30]]
NEW = 60  # units of 32 and 64 tokens become due on the way
# One of each way to become due: windows of none and some, units of one and many, sinks, rings, two
# clocks, eviction.
WAYS = ("exact", "kivi2", "kivi3-sinks", "kivi-published", "kvquant", "sliding")
AS_FED = {"chunk": 1, "eos_ids": ()}  # every token by itself, as decoding does it


def spelling(model: kvq.Model) -> kvq.Model:
    """The model with a tokenizer whose tokens are characters."""
    return model.replace(folder=str(locate("recall")))


def kept(model, method, prompts, new: int, **options):
    return kvq.generate(
        model, prompts, method, max_new_tokens=new, capacity=256, **AS_FED, **options
    )


def joined(pieces) -> list[list[int]]:
    """The token ids of every row, of all pieces."""
    return [
        list(itertools.chain(*row)) for row in zip(*(piece.tokens for piece in pieces), strict=True)
    ]


def assert_continues(model, method, prompts, made: kvq.Generated) -> None:
    """The cache holds prompts and tokens, and goes on as one that was fed all of them one by
    one."""
    whole = [[*prompt, *tokens] for prompt, tokens in zip(prompts, made.tokens, strict=True)]
    assert made.cache.lengths.tolist() == [len(row) for row in whole]
    further = kvq.generate(model, MORE, cache=made.cache, max_new_tokens=20, **AS_FED)
    at_once = kept(
        model, method, [[*row, *more] for row, more in zip(whole, MORE, strict=True)], 20
    )
    assert further.tokens == at_once.tokens
    flushed = [
        jax.tree.map(np.asarray, [run.flushed for run in out.cache.runs])
        for out in (further, at_once)
    ]
    jax.tree.map(np.testing.assert_array_equal, *flushed)


@pytest.mark.parametrize("name", with_nightly(WAYS, ["kivi-published"]))
def test_a_cache_goes_on_as_if_it_had_been_one_call(name):
    model, method = model_and_method(name)
    assert_continues(model, method, PROMPTS, kept(model, method, PROMPTS, NEW))


@pytest.mark.parametrize("name", with_nightly(WAYS, ["kivi-published"]))
def test_a_stop_string_leaves_no_token_behind_it(name):
    """A row ends within a stride: what was computed past the end is not in the cache, encoded or
    not."""
    model, method = model_and_method(name)
    model = spelling(model)
    free = kept(model, method, PROMPTS, NEW).tokens
    letters = model.tokenizer.convert_ids_to_tokens
    found = {token: free[0].index(token) for token in free[0] if free[0].index(token) > 8}
    end = min(found, key=lambda token: abs(found[token] - 30))
    out = kept(model, method, PROMPTS, NEW, stop=letters([end]), stride=16)
    for row, whole, reason in zip(out.tokens, free, out.finish_reasons, strict=True):
        assert row == (whole[: whole.index(end) + 1] if end in whole else whole)
        assert reason == ("stop" if end in whole else "length")
    assert_continues(model, method, PROMPTS, out)


def test_strides_end_before_anything_that_a_stop_string_may_take_back_is_encoded():
    layout = kvq.init_cache(
        *model_and_method("kivi2"), 1, 256
    ).layout  # a window of 32 tokens, units of 32
    assert [steps_until_encoded(layout, [n]) for n in (0, 62, 63, 64, 94, 95, 96)] == [
        63,
        1,
        32,
        31,
        1,
        32,
        31,
    ]
    assert steps_until_encoded(layout, [64, 90]) == 5
    sinks = kvq.init_cache(*model_and_method("kivi3-sinks"), 1, 256).layout  # no window, 5 sinks
    assert [steps_until_encoded(sinks, [n]) for n in (0, 35, 36, 37)] == [36, 1, 32, 31]
    assert (
        steps_until_encoded(kvq.init_cache(*model_and_method("kvquant"), 1, 256).layout, [5])
        is None
    )
    short = kvq.init_cache(tiny(), "kivi:bits=2,window=512", 1, 256).layout
    assert (runs_of(short)[0].slots, steps_until_encoded(short, [5])) == (0, None)


@pytest.mark.nightly
def test_evicting_caches_continue():
    for keep in ("streaming:32",):
        method = kvq.parse(f"exact:sinks=2,window=32,keep={keep}")
        out = kept(spelling(tiny()), method, PROMPTS, NEW, stop=["a"])
        assert_continues(spelling(tiny()), method, PROMPTS, out)


@pytest.mark.nightly
def test_a_given_cache_stays_as_it_is():
    model, method = model_and_method("kivi2")
    first = kvq.generate(model, PROMPTS, method, max_new_tokens=8, eos_ids=())
    before = jax.tree.map(np.array, first.cache)
    one, other = (
        kvq.generate(model, MORE, cache=first.cache, max_new_tokens=8, eos_ids=()) for _ in range(2)
    )
    assert one.tokens == other.tokens
    jax.tree.map(np.testing.assert_array_equal, first.cache, before)
    assert one.cache.lengths.tolist() == [
        len(p) + 8 + len(m) + 8 for p, m in zip(PROMPTS, MORE, strict=True)
    ]
    parts = kvq.stream(model, MORE, method, cache=first.cache, max_new_tokens=8, eos_ids=())
    assert joined(parts) == one.tokens == parts.result.tokens


def test_an_empty_cache_is_prefilled_exactly():
    model, method = model_and_method("kivi2")
    cache = kvq.init_cache(model, method, 2, 256)
    out = kvq.generate(model, PROMPTS, cache=cache, max_new_tokens=24)
    assert (
        out.tokens == kvq.generate(model, PROMPTS, method, max_new_tokens=24, capacity=256).tokens
    )


def test_a_continuing_text_does_not_begin_again():
    """The recall model's tokenizer begins a text with <s>; a text that goes on has none."""
    model = kvq.load("recall")
    first = kvq.generate(model, "ab12,cd34", max_new_tokens=2)
    assert first.prompt_tokens == [10]
    assert kvq.generate(model, ",?ab", cache=first.cache, max_new_tokens=2).prompt_tokens == [4]
    again = kvq.generate(
        model, ",?ab", cache=first.cache, max_new_tokens=2, add_special_tokens=True
    )
    assert again.prompt_tokens == [5]
    assert kvq.generate(
        model, "ab12", max_new_tokens=2, add_special_tokens=False
    ).prompt_tokens == [4]


def test_reasons_counts_and_bytes():
    model = spelling(tiny())
    free = kvq.generate(model, PROMPTS, max_new_tokens=24, eos_ids=()).tokens
    place = max(free[0].index(token) for token in free[0])
    counts = [row.index(free[0][place]) if free[0][place] in row else 24 for row in free]
    out = kvq.generate(model, PROMPTS, max_new_tokens=24, eos_ids=[free[0][place]])
    assert out.finish_reasons == ["length" if count == 24 else "eos" for count in counts]
    assert out.finish_reasons[0] == "eos"
    assert out.cache.lengths.tolist() == [32 + counts[0], 45 + counts[1]]
    assert out.prompt_tokens == [32, 45]
    book = kvq.ledger(out.cache)
    assert (out.cache_bytes, out.bits, out.cache.batch) == (book.bytes, book.bits_stored, 2)
    assert out.seconds_to_first_token > 0
    assert out.tokens_per_second > 0
    assert kvq.generate(model, PROMPTS, max_new_tokens=1).tokens_per_second == 0
    with pytest.raises(AttributeError):
        out.text = []


def test_pieces_are_what_is_new():
    model = spelling(tiny())
    options = {"max_new_tokens": 24, "eos_ids": (), "stop": ["b"], "stride": 5}
    whole, parts = kvq.generate(model, PROMPTS, **options), kvq.stream(model, PROMPTS, **options)
    first = next(parts)
    assert [len(tokens) for tokens in first.tokens] == [1, 1]
    with pytest.raises(kvq.UserError, match="take all of its pieces"):
        _ = parts.result
    pieces = [first, *parts]
    assert next(parts, None) is None
    assert joined(pieces) == whole.tokens == parts.result.tokens
    assert (
        ["".join(p.text[row] for p in pieces) for row in range(2)]
        == whole.text
        == parts.result.text
    )
    assert parts.result.finish_reasons == whole.finish_reasons
    assert parts.result.cache.lengths.tolist() == whole.cache.lengths.tolist()


def test_a_stream_closed_before_its_first_piece_has_a_row_for_each_prompt():
    """Its cache was made with a fourth one."""
    parts = kvq.stream(tiny(), [[1], [2, 3], [4]], max_new_tokens=3)
    parts.close()
    assert parts.result.cache.batch == 3
    assert parts.result.cache.lengths.tolist() == [0, 0, 0]


def test_a_closed_stream_has_made_what_it_gave():
    model, method = model_and_method("kivi2")
    parts = kvq.stream(model, PROMPTS, method, max_new_tokens=40, stride=5, capacity=256, **AS_FED)
    given = [next(parts), next(parts)]
    parts.close()
    assert next(parts, None) is None
    assert parts.result.tokens == [given[0].tokens[row] + given[1].tokens[row] for row in range(2)]
    assert parts.result.finish_reasons == ["closed", "closed"]
    assert_continues(model, method, PROMPTS, parts.result)


WRONG = {
    "one of kivi:bits=2,window=32, not of exact": {"method": "exact"},
    "a capacity of 256 tokens a row, not 512": {"capacity": 512},
    "kernels='off' is said where a cache is made": {"kernels": "off"},
    "kvqjax.Session goes on with one": {"chat": True},
    "3 prompts for the 2 rows": {"prompts": [[1], [2], [3]]},
    "row 1 holds 53 tokens; 1 more and 203 new ones do not fit the cache's capacity of 256": {
        "max_new_tokens": 203
    },
    "made for a model of another config": {"model": tiny(num_layers=1)},
}


@pytest.fixture(scope="module")
def held():
    model, method = model_and_method("kivi2")
    return model, kvq.generate(model, PROMPTS, method, max_new_tokens=8, eos_ids=()).cache


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_go_with_a_cache_is_said(held, message):
    given = {"model": held[0], "prompts": MORE, "cache": held[1]} | WRONG[message]
    for function in (kvq.generate, kvq.stream):
        with pytest.raises(kvq.UserError, match=message.replace("(", r"\(")):
            function(**given)


def test_a_row_that_lacks_tokens_is_not_continued(held):
    model, cache = held
    with pytest.raises(kvq.UserError, match="row 1 of cache= was given more tokens than fit"):
        kvq.generate(model, MORE, cache=cache.replace(overflow=cache.overflow.at[1].set(True)))


@pytest.mark.nightly
def test_token_ids_need_no_tokenizer(tmp_path, monkeypatch):
    """A folder without one: ids work at every door; what needs it says so before anything is
    compiled."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(locate("recall") / name)
    model, ids = kvq.load(tmp_path), [[14, 4, 5, 2, 3, 14]]
    wanted = kvq.generate(kvq.load("recall"), ids, max_new_tokens=4)
    out = kvq.generate(model, ids, max_new_tokens=4)
    assert (out.tokens, out.text) == (wanted.tokens, [""])
    assert [piece.text for piece in kvq.stream(model, ids, max_new_tokens=4)] == [[""], [""]]
    assert kvq.speculate(model, ids, max_new_tokens=4).tokens == wanted.tokens
    assert kvq.beam_search(model, ids, beams=1, max_new_tokens=4).tokens[0] == wanted.tokens
    monkeypatch.setattr(loop, "prefill_donated", None)  # nothing may run
    for given in (
        {"prompts": ids, "stop": ["a"]},
        {"prompts": "ab"},
        {"prompts": ["ab"], "chat": True},
    ):
        for function in (kvq.generate, kvq.stream):
            with pytest.raises(kvq.UserError, match=r"no tokenizer|this model has none"):
                function(model, **given)
