"""The options that all doors share: which token comes next, and where a row ends."""

import dataclasses
import inspect
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny

import kvqjax as kvq
from kvqjax.generation.options import GenerateFields, GenerateOptions
from kvqjax.generation.sampling import History, adjusted, make_sampling

VOCAB = 50  # of `tiny`
NEW = 24


@pytest.fixture(scope="module")
def model():
    return tiny()


def generated(model, prompts=([1, 2, 3],), **options):
    options = {"max_new_tokens": NEW, "eos_ids": ()} | options
    return kvq.generate(model, list(prompts), "exact", **options)


def test_every_door_has_every_option():
    names = {field.name for field in dataclasses.fields(GenerateOptions)}
    types = {field.name: field.type for field in dataclasses.fields(GenerateOptions)}
    assert types == typing.get_type_hints(GenerateFields)
    for function in (kvq.generate, kvq.stream, kvq.Session.__init__, kvq.Engine.submit):
        assert names <= set(inspect.signature(function).parameters)


@pytest.mark.parametrize("function", [kvq.speculate, kvq.beam_search])
@pytest.mark.parametrize(
    "option", ["temperature", "logit_bias", "min_tokens", "stop", "stop_token_ids"]
)
def test_loops_without_an_option_say_who_has_it(model, function, option):
    with pytest.raises(
        kvq.UserError, match=f"has no option '{option}': it is an option of generate and stream"
    ):
        function(model, [[1]], **{option: 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": -2}, "top_k=-2; it must be a whole number of at least -1"),
        ({"top_p": 0.0}, "top_p=0.0; it must be above 0"),
        ({"min_p": 1.1}, "min_p=1.1; it must be from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0; it must be above 0"),
        ({"presence_penalty": 2.1}, "presence_penalty=2.1; it must be from -2 to 2"),
        ({"logit_bias": {"a": 1}}, "logit_bias has 'a'; wanted the id of a token"),
        ({"logit_bias": {1: 101}}, "logit_bias of token 1 is 101.0; it must be from -100 to 100"),
        (
            {"logit_bias": {VOCAB: 1}},
            f"a token of logit_bias={VOCAB}; it must be a whole number from 0 to {VOCAB - 1}",
        ),
        (
            {"stop_token_ids": [VOCAB]},
            f"stop_token_ids={VOCAB}; it must be a whole number from 0 to {VOCAB - 1}",
        ),
        (
            {"min_tokens": 9, "max_new_tokens": 8},
            "min_tokens=9 is more than the 8 new tokens asked for",
        ),
        ({"min_tokens": 1, "eos_ids": range(VOCAB)}, "every token of the model is an end token"),
        ({"ignore_eos": True, "eos_ids": [1]}, "ignore_eos and eos_ids exclude each other"),
        ({"seed": -2}, "seed=-2; it must be a whole number from -1"),
        ({"stop": "a"}, "stop strings need a tokenizer"),
    ],
)
def test_options_that_cannot_be_are_one_line(model, options, message):
    with pytest.raises(kvq.UserError) as error:
        generated(model, **options)
    assert message in str(error.value)


def test_penalties_and_bias_are_those_of_the_formulas():
    """Presence and frequency by OpenAI's, over the answer; repetition by transformers', over prompt
    and answer."""
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = np.random.default_rng(0).normal(size=(2, VOCAB)).astype(np.float32) * 3
    prompts, answers = [[1, 5, 5], [2, 2, 7]], [[5, 9, 9, 9], [3, 3, 1, 40]]
    prompt, made = np.zeros(logits.shape, bool), np.zeros(logits.shape, np.int32)
    for row in range(2):
        prompt[row, prompts[row]] = True
        np.add.at(made[row], answers[row], 1)
    options = GenerateOptions(
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=-0.7,
        logit_bias={5: 4.0, "9": -2.5},
    )
    bias = options.bias(tiny())
    ours = jax.jit(adjusted)(logits, History(prompt, made), make_sampling(options, bias))
    biased = logits.copy()
    biased[:, 5] += 4.0
    biased[:, 9] -= 2.5
    texts = torch.tensor([prompts[row] + answers[row] for row in range(2)])
    wanted = processors.RepetitionPenaltyLogitsProcessor(1.3)(
        texts, torch.from_numpy(biased)
    ).numpy()
    wanted = wanted + 0.7 * made - 0.5 * (made > 0)
    np.testing.assert_allclose(ours, wanted, rtol=1e-6, atol=1e-6)


def test_a_penalty_of_frequency_counts_the_answer_and_not_the_prompt(model):
    """Greedy decoding by hand: the most likely token after OpenAI's formula."""
    prompt, answer = [4] * 8, []
    empty = kvq.init_cache(model, "exact", 1, 64)
    for made in range(8):
        text = prompt + answer
        padded = jnp.asarray([text + [0] * (8 - made)])  # one length, one program
        logits = np.asarray(
            kvq.forward(model, padded, jnp.asarray([len(text)]), empty, last=True)[0]
        )[0]
        counts = np.bincount(answer, minlength=VOCAB)
        answer.append(int((logits - 1.5 * counts - 0.5 * (counts > 0)).argmax()))
    options = {"presence_penalty": 0.5, "frequency_penalty": 1.5, "max_new_tokens": 8}
    assert generated(model, [prompt], **options).tokens[0] == answer
    assert generated(model, [prompt], max_new_tokens=8).tokens[0] != answer


def test_a_bias_bans_and_forces(model):
    plain = generated(model).tokens[0]
    assert plain[0] not in generated(model, logit_bias={plain[0]: -100}).tokens[0]
    assert generated(model, logit_bias={7: 100}).tokens[0] == [7] * NEW
    drawn = generated(model, logit_bias={7: 100, 9: 100}, temperature=1.0).tokens[0]
    assert set(drawn) <= {7, 9}


@pytest.mark.nightly
def test_end_tokens_end_a_row_and_min_tokens_holds_them_off(model):
    """Before `min_tokens` the row is that of a model which cannot draw the end token."""
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    plain = generated(model, stop_token_ids=()).tokens[0]
    end = plain[3]
    place = plain.index(end)
    ended = generated(model, stop_token_ids=[end])
    assert (ended.tokens[0], ended.finish_reasons) == (plain[:place], ["eos"])
    held = generated(model, eos_ids=[end], min_tokens=place + 4)
    assert len(held.tokens[0]) >= place + 4
    assert end not in held.tokens[0]
    rule = processors.MinNewTokensLengthLogitsProcessor(3, place + 4, [end])
    text, answer = [1, 2, 3], []
    empty = kvq.init_cache(model, "exact", 1, 64)
    for made in range(place + 4):
        padded = jnp.asarray([text + answer + [0] * (place + 4 - made)])  # one length, one program
        count = jnp.asarray([len(text) + made])
        logits = kvq.forward(model, padded, count, empty, last=True)[0]
        allowed = rule(torch.tensor([text + answer]), torch.from_numpy(np.asarray(logits).copy()))
        answer.append(int(allowed[0].argmax()))
    assert held.tokens[0][: place + 4] == answer


def test_ignored_end_tokens_belong_to_the_row():
    plain = generated(tiny()).tokens[0]
    model = tiny(eos_ids=(plain[3],))
    options = {"max_new_tokens": NEW, "eos_ids": None}
    assert generated(model, **options).tokens[0] == plain[: plain.index(plain[3])]
    assert generated(model, ignore_eos=True, **options).tokens[0] == plain


def test_no_stop_string_counts_before_min_tokens():
    model = kvq.load("demo")
    text = "The baker came home after the rain."
    whole = kvq.generate(model, text, max_new_tokens=24, ignore_eos=True)
    first = kvq.generate(model, text, max_new_tokens=24, ignore_eos=True, stop=" ")
    later = kvq.generate(model, text, max_new_tokens=24, ignore_eos=True, stop=" ", min_tokens=10)
    assert (first.finish_reasons, later.finish_reasons) == (["stop"], ["stop"])
    assert len(first.tokens[0]) <= 10 < len(later.tokens[0])
    assert whole.text[0].startswith(later.text[0])


def test_switches_of_other_programs(model):
    assert (
        generated(model, temperature=1.0, top_k=-1).tokens
        == generated(model, temperature=1.0, top_k=0).tokens
    )
    drawn = {tuple(generated(model, temperature=1.0, seed=-1).tokens[0]) for _ in range(3)}
    assert len(drawn) > 1


@pytest.mark.nightly
def test_a_row_with_penalties_does_not_depend_on_its_neighbours(model):
    options = {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "logit_bias": {3: 2.0},
        "min_tokens": 4,
    }
    prompts = [[1, 2, 3], [4] * 20, [5, 6]]
    together = generated(model, prompts, **options).tokens
    assert together == [generated(model, [prompt], **options).tokens[0] for prompt in prompts]


@pytest.mark.nightly
def test_an_assistant_s_message_without_content_is_empty():
    model = kvq.load("demo")
    before, model.tokenizer.chat_template = (
        model.tokenizer.chat_template,
        "{% for m in messages %}{{ m.content + '|' }}{% endfor %}",
    )
    try:
        said = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None},
            {"role": "user", "content": "b"},
        ]
        empty = [said[0], {"role": "assistant", "content": ""}, said[2]]
        texts = [
            kvq.generate(model, [talk], chat=True, max_new_tokens=4).text for talk in (said, empty)
        ]
        session = kvq.Session(model, max_new_tokens=4)
        assert "".join(session.send(said)) == texts[1][0]
    finally:
        model.tokenizer.chat_template = before  # models of one folder share its tokenizer
    assert texts[0] == texts[1]
