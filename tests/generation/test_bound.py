"""Answers that a grammar binds: what they are, which grammars are refused, and requests beside
them."""

import json
import re

import numpy as np
import pytest
from cases import with_nightly
from served import NAME, Running, answer
from spelled import byte_level, sentencepiece, write_model

import kvqjax as kvq
from kvqjax.generation.bound import allowed_tokens, bind, read_grammar

SCHEMA = {
    "type": "object",
    "properties": {"old": {"enum": ["house", "model"]}, "a": {"type": "boolean"}},
    "required": ["old", "a"],
    "additionalProperties": False,
}
# A random model writes as many blanks as the form allows.
OPTIONS = {"max_new_tokens": 200, "temperature": 1.0, "seed": 3}
KINDS = {"sentencepiece": sentencepiece, "byte level": byte_level}
BY_DAY = pytest.mark.parametrize("model", with_nightly(KINDS, ["byte level"]), indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    """A random model: what it says without a grammar is no JSON."""
    return kvq.load(write_model(tmp_path_factory.mktemp("model"), KINDS[request.param]()))


def said(model, grammar, **options):
    return kvq.generate(model, ["the old", "a"], "exact", grammar=grammar, **OPTIONS | options)


def test_every_row_is_what_its_grammar_allows(model):
    made = said(model, SCHEMA)
    for text in made.text:
        found = json.loads(text)
        assert found.keys() == {"old", "a"}
        assert found["old"] in ("house", "model")
    assert made.finish_reasons == ["eos", "eos"]
    for grammar, pattern in (
        ("regex:(the|old){2,3}!", r"(the|old){2,3}!"),
        ('lark:start: "a"~4', "aaaa"),
    ):
        for text in said(model, grammar).text:
            assert re.fullmatch(pattern, text)


@BY_DAY
def test_a_cut_answer_says_so(model):
    made = said(model, "regex:(the ){50}", max_new_tokens=4)
    assert made.finish_reasons == ["length", "length"]


def test_an_end_token_may_come_where_the_grammar_may_end_alone(model):
    (end,) = {model.tokenizer.convert_tokens_to_ids("</s>")}
    row = bind(model, read_grammar("regex:a+"), [end])

    def may_end():
        words = allowed_tokens([row], model.config.vocab_size)[0]
        return bool(words[end // 32] >> np.uint32(end % 32) & 1)

    assert not may_end()
    row.take(model.tokenizer.convert_tokens_to_ids("a"))
    assert may_end()


def deep(depth: int) -> dict:
    return {"type": "object", "properties": {"x": deep(depth - 1)}} if depth else {}


ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
REFUSED = {
    "remote": {"$ref": "https://example.org/schema"},
    "endless": ENDLESS,
    "contradiction": {"type": "string", "minLength": 5, "maxLength": 2},
    "large": {"type": "string", "description": "x" * 100_000},
    "unknown keyword": {"not": {"type": "string"}},
    "no type": {"type": "nothing"},
    "broken": "schema:{",
    "no schema": "schema:3",
    "no regex": "regex:(",
    "a loop": "lark:start: start",
    "no lark": "lark:",
    "no kind": "json!",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_nothing_can_meet_is_one_line(name, model):
    with pytest.raises(kvq.UserError) as error:
        said(model, REFUSED[name])
    line = str(error.value)
    assert "\n" not in line
    assert len(line) < 400


def test_recursive_and_nested_schemas_are_taken(model):
    tree = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert bind(model, read_grammar(tree), [2]) is not None
    assert bind(model, read_grammar(deep(30)), [2]) is not None


@BY_DAY
def test_a_stream_is_bound(model):
    parts = kvq.stream(model, "the", "exact", grammar=SCHEMA, **OPTIONS)
    text = "".join(piece.text[0] for piece in parts)
    assert json.loads(text) == json.loads(parts.result.text[0])


@pytest.mark.nightly
@BY_DAY
def test_free_requests_beside_bound_ones_stay_as_they_are(model):
    with kvq.Engine(model, "exact", rows=3, capacity=256, chunk=32, stride=4) as engine:
        options = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
        alone = engine.submit("the old", seed=5, **options).result()
        bound = engine.submit("a", grammar=SCHEMA, seed=1, max_new_tokens=200, temperature=1.0)
        free = engine.submit("the old", seed=5, **options)
        with pytest.raises(kvq.UserError):
            engine.submit("a", grammar=ENDLESS, max_new_tokens=4)
        assert free.result().tokens == alone.tokens
        assert json.loads(bound.result().text).keys() == {"old", "a"}


@pytest.mark.nightly
@BY_DAY
def test_a_server_takes_forms(model):
    """And goes on behind those that it refuses."""
    body = {"model": NAME, "messages": [{"role": "user", "content": "the"}], "max_tokens": 200}
    with (
        kvq.Engine(model, "exact", rows=3, capacity=256, chunk=32, stride=4) as engine,
        Running(engine) as port,
    ):

        def asked(form, **more):
            path = "/v1/chat/completions"
            return answer(port, path, {**body, "response_format": form, **more})

        def schema(given):
            return {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}

        for form in (
            {"type": "xml"},
            {"type": "json_schema"},
            schema(ENDLESS),
            schema({"not": {}}),
            schema({"$ref": "file:///etc/passwd"}),
        ):
            status, refused = asked(form)
            assert (status, "\n" in refused["error"]["message"]) == (400, False), form
        status, refused = asked({"type": "json_object"}, grammar="json")
        assert (status, refused["error"]["param"]) == (400, "response_format")
        for form, more in (
            (schema(SCHEMA), {}),
            ({"type": "text"}, {"grammar": SCHEMA}),
        ):
            status, made = asked(form, **more)
            assert status == 200
            assert json.loads(made["choices"][0]["message"]["content"]).keys() == {"old", "a"}
