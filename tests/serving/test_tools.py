"""Tools and thoughts over HTTP: what a model reads of them, calls that are bound and calls that are
read, and requests that are refused."""

import json
import re

import openai
import pytest
from served import KEY, NAME, Running, answer
from spelled import byte_level, write_model

import kvqjax as kvq
from kvqjax.generation.bound import allowed_tokens, bind, read_grammar
from kvqjax.generation.text import Detokenizer
from kvqjax.serving.tool_forms import HERMES, THOUGHTS, AnswerReader, form_of
from kvqjax.serving.tools import (
    answer_options,
    answer_reader,
    chat_ids,
    ids_before_turns,
    read_tools,
    with_calls,
)

CHAT = "/v1/chat/completions"
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["old", 7]}}, "required": ["a"]}
SCHEMAS = {"house": SCHEMA, "ARGUMENTS": {"type": "object", "properties": {}}}


def tool(name, parameters=SCHEMA, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool(name, schema) for name, schema in SCHEMAS.items()]
ASKED = [{"role": "user", "content": "the"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "house", "arguments": '{"a": 7}'}}
TALK = [
    *ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "old"},
]
CALLED = '<tool_call>\n{"name": "house", "arguments": {"a": 7}}\n</tool_call>'
THOUGHT = "the old</think>\n\nhouse"
LINES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
HISTORY = (
    "{% for m in messages %}{{ m.role }}:{% for c in m.tool_calls %} MARK{{ c.function | tojson }}"
    "{% endfor %}{{ m.tool_call_id }} {{ m.content }}\n{% endfor %}"
)
QWEN = "{{ tools | tojson }}{{ mode }}" + HISTORY.replace("MARK", "<tool_call>")
THINKING = QWEN + "{# </think> #}{% if thought %}a: <think>\n{% endif %}"
MISTRAL = "{{ tools | tojson }}" + HISTORY.replace("MARK", "[TOOL_CALLS] [")
LLAMA = '{{ tools | tojson }}Environment: ipython "parameters": ' + HISTORY.replace("MARK", "")
ARGS = MISTRAL.replace("[TOOL_CALLS] [", "[TOOL_CALLS]") + "{# [ARGS] #}"
FAMILIES = {
    "qwen": (QWEN, CALLED),
    "none": (LINES, CALLED),
    "mistral": (MISTRAL, '[TOOL_CALLS] [{"name": "house", "arguments": {"a": 7}}]'),
    "mistral, names": (ARGS, '[TOOL_CALLS]house[ARGS]{"a": 7}'),
    "llama": (LLAMA, '{"name": "house", "parameters": {"a": 7}}'),
}


def loaded(folder, template):
    """A random model. Two of its tokens are whole texts, for answers that are known beforehand."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([CALLED, THOUGHT])
    return kvq.load(write_model(folder, tokenizer, chat_template=template))


def biased(model, text, **more):
    """Fields of a request whose answer is a token's text."""
    token = model.tokenizer.get_vocab()[text]
    return {"logit_bias": {str(token): 100}, "max_tokens": 1, **more}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    model = loaded(tmp_path_factory.mktemp("model"), THINKING)
    return kvq.Engine(model, "exact", rows=2, capacity=2048, chunk=256, stride=4)


@pytest.fixture(scope="module")
def port(engine):
    with Running(engine, api_key=KEY, beyond_trained=True) as port:
        yield port


@pytest.fixture(scope="module")
def client(port):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0
    ) as client:
        yield client


# --- Over HTTP ---


def thoughtless(model):
    """Fields that keep a random model from thinking, which it would do for ever."""
    known = model.tokenizer.get_vocab()
    return {"logit_bias": {str(known[token]): -100 for token in ("h", "th")}}


def test_required_calls_are_bound(client, engine):
    for choice, names in (
        ("required", set(SCHEMAS)),
        ({"type": "function", "function": {"name": "ARGUMENTS"}}, {"ARGUMENTS"}),
    ):
        made = client.chat.completions.create(
            model=NAME,
            messages=ASKED,
            tools=TOOLS,
            tool_choice=choice,
            seed=3,
            extra_body=thoughtless(engine.model),
        ).choices[0]
        assert (made.finish_reason, made.message.content) == ("tool_calls", None)
        calls = made.message.tool_calls
        assert {call.function.name for call in calls} <= names
        assert len({call.id for call in calls}) == len(calls)
        for call in calls:
            arguments = json.loads(call.function.arguments)
            assert arguments in (
                [{"a": "old"}, {"a": 7}] if call.function.name == "house" else [{}]
            )


def test_a_client_s_helpers_read_calls_of_a_stream(client, engine):
    more = {"extra_body": thoughtless(engine.model)}
    asked = {"model": NAME, "messages": ASKED, "seed": 5, **more}
    strict = [tool("house", SCHEMA | {"additionalProperties": False}, strict=True)]
    with client.chat.completions.stream(
        tools=strict, tool_choice="required", parallel_tool_calls=False, **asked
    ) as stream:
        kinds = {event.type for event in stream}
        made = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = made.message.tool_calls
    assert call.function.parsed_arguments in ({"a": "old"}, {"a": 7})
    assert (made.finish_reason, made.message.content) == ("tool_calls", None)


def test_a_free_answer_may_be_a_call_or_a_text(client, engine):
    forced = biased(engine.model, CALLED)
    fields = {"model": NAME, "messages": TALK, "tools": TOOLS, "max_tokens": 1}
    bias = {"extra_body": {"logit_bias": forced["logit_bias"]}}
    made = client.chat.completions.create(**fields, **bias).choices[0]
    (call,) = made.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("house", '{"a": 7}')
    assert made.message.content is None
    free = client.chat.completions.create(**fields, temperature=0).choices[0]
    assert (free.finish_reason, free.message.tool_calls) == ("length", None)
    unoffered = client.chat.completions.create(**fields, **bias, tool_choice="none").choices[0]
    assert (unoffered.message.content, unoffered.message.tool_calls) == (CALLED, None)
    either = {"type": "json_object"}
    for tools in (TOOLS, [tool("house", strict=True)]):
        bound = client.chat.completions.create(
            **fields | {"tools": tools}, **bias, response_format=either
        ).choices[0]
        assert bound.message.tool_calls[0].function.name == "house"


def test_thoughts_are_no_content(port, engine):
    opened = {"chat_template_kwargs": {"thought": True}}
    body = {"model": NAME, "messages": ASKED, **biased(engine.model, THOUGHT), **opened}
    _, made = answer(port, CHAT, body)
    message = made["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("the old", "house")
    _, lines = answer(port, CHAT, body | {"stream": True})
    events = [json.loads(line) for line in re.findall("data: ({.*})", lines)]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert {"reasoning_content": "the old"} in deltas
    assert {"content": "house"} in deltas
    _, bound = answer(port, CHAT, body | {"grammar": 'lark:start: "the"', "max_tokens": 9})
    message = bound["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == ("the", None)


LONG = {"type": "object", "description": "x" * 100_000}
ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
REFUSED = [
    ({"tools": 3}, "tools", "tools is a whole number; wanted a list"),
    ({"tools": [{}]}, "tools", "tool 0 is no"),
    ({"tools": [{"type": "function", "function": 3}]}, "tools", "tool 0 is no"),
    ({"tools": [tool("a b")]}, "tools", "tool 0 has the name 'a b'; wanted 1 to 64 letters"),
    ({"tools": [tool("x" * 65)]}, "tools", "wanted 1 to 64 letters"),
    ({"tools": [tool("f"), tool("f")]}, "tools", "two tools have the name 'f'"),
    ({"tools": [tool(f"f{n}") for n in range(129)]}, "tools", "129 tools; at most 128"),
    ({"tools": [tool("f", [])]}, "tools", "parameters of tool 'f' are no JSON schema of an object"),
    ({"tools": [tool("f", {"type": "string"})]}, "tools", "no JSON schema of an object"),
    ({"tools": [tool("f", description=3)]}, "tools", "the description of tool 'f' is no text"),
    ({"tools": [tool("f", strict="yes")]}, "tools", "neither true nor false"),
    ({"tools": [tool("f", LONG)]}, "tools", "tool 'f': a grammar of"),
    ({"tools": [tool("f", ENDLESS)]}, "tools", "tool 'f': no answer can meet this schema"),
    ({"tools": [tool("f", {"$ref": "http://a/b"})]}, "tools", "nothing outside it is fetched"),
    ({"tools": [tool("f", {"not": {}})], "tool_choice": "required"}, "tools", "tool 'f': the grammar"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "tool_choice='any'; wanted none"),
    ({"tools": TOOLS, "tool_choice": "function"}, "tool_choice", "wanted none"),
    ({"tools": TOOLS, "tool_choice": {"type": "x"}}, "tool_choice", "wanted none"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "lacks function.name"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "names 'f', which is none of the tools",
    ),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
    ({"tools": TOOLS, "grammar": "json"}, "grammar", "grammar and tools exclude each other"),
    ({"functions": [{}]}, "functions", "functions is not served here"),
    ({"function_call": "auto"}, "function_call", "function_call is not served here"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "may not have 'tools'"),
    ({"chat_template_kwargs": 3}, "chat_template_kwargs", "wanted an object"),
    ({"messages": [TALK[0], TALK[2]]}, "messages", "answers the call 'call_1', which no message"),
    ({"messages": [*TALK[:2], {"role": "tool", "content": "x"}]}, "messages", "lacks tool_call_id"),
    ({"messages": [{**TALK[1], "tool_calls": 3}]}, "messages", "are no list"),
    ({"messages": [{**TALK[1], "tool_calls": [3]}]}, "messages", "lacks id or function.name"),
    (
        {"messages": [{**TALK[1], "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[]"}}]}]},
        "messages",
        "the arguments of call '1' are no JSON object in a string",
    ),
    ({"messages": [{**TALK[1], "function_call": {}}]}, "messages", "tool_calls are"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_what_cannot_be_is_one_line(port, fields, param, message):
    body = {"model": NAME, "messages": ASKED, "max_tokens": 1, **fields}
    status, refused = answer(port, CHAT, body)
    assert (status, refused["error"]["param"]) == (400, param)
    assert message in refused["error"]["message"]
    assert "\n" not in refused["error"]["message"]
    assert len(refused["error"]["message"]) < 400


def test_the_server_goes_on_behind_what_it_refuses(port):
    fields = {"parallel_tool_calls": None, "tools": [], "tool_choice": "auto"}
    body = {"model": NAME, "messages": ASKED, "max_tokens": 1, **fields}
    assert answer(port, CHAT, body)[0] == 200


# --- What models of a family read and write ---


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_reads_tools_and_is_bound_in_its_form(family, tmp_path):
    template, wanted = FAMILIES[family]
    model = loaded(tmp_path, template)
    tokenizer = model.tokenizer
    use = read_tools(TOOLS, "required", False, {})
    ids = chat_ids(model, with_calls(TALK), use, "answer", None)
    text = tokenizer.decode(ids)
    assert text.count('"house"') >= 2  # the tool and the call
    assert "{'a': 7}" not in text
    assert re.search(r'"a": 7|"arguments": {"a": 7}', text)
    kept = ids_before_turns(model, with_calls(TALK), use, "answer", ids)
    assert tokenizer.decode(ids[:kept]).count('"house"') == 1  # the tool, and no turn

    options = answer_options(model, use, {}, ids)
    row = bind(model, read_grammar(options["grammar"]), [2])
    tokens = spelled(model, row, wanted)
    assert row.error is None
    detokenizer = Detokenizer(tokenizer, ids, shown=options["shown_tokens"])
    reader = answer_reader(model, use, {}, ids)
    parts = [*reader.feed(detokenizer.extend(tokens)), *reader.finish()]
    assert parts == [("call", '{"a": 7}', "house")]


def spelled(model, row, text):
    """Draw the tokens of a text, each of them one that the row may have; the longest ones."""
    texts = {token: model.tokenizer.decode([token]) for token in range(model.config.vocab_size)}
    tokens = []
    while text:
        words = allowed_tokens([row], model.config.vocab_size)[0]
        fit = [
            token
            for token, spelling in texts.items()
            if words[token // 32] >> (token % 32) & 1
            and text.startswith(spelling)
            and spelling != CALLED
        ]
        tokens.append(max(fit, key=lambda token: len(texts[token])))
        row.take(tokens[-1])
        text = text.removeprefix(texts[tokens[-1]])
    return tokens


def test_a_template_s_own_variables_come_through(port):
    asked = {"model": NAME, "messages": ASKED, "max_tokens": 1}
    plain, more = (
        answer(port, CHAT, asked | fields)[1]["usage"]["prompt_tokens"]
        for fields in ({}, {"chat_template_kwargs": {"mode": "abc"}})
    )
    assert more == plain + 3
    fields = {"model": NAME, "messages": TALK, "tools": TOOLS}
    _, counted = answer(port, "/tokenize", fields)
    _, made = answer(port, CHAT, fields | {"max_tokens": 1})
    assert counted["count"] == made["usage"]["prompt_tokens"]


# --- Answers that nothing binds ---

BROKEN = (
    "<tool_call>{</tool_call>",
    '<tool_call>{"name": "roof"}</tool_call> the',
    '<tool_call>{"name": "house", "arguments": 3}</tool_call>',
    '<tool_call>{"name": "house", "arguments": {"a": 1e999}}</tool_call>',
    "<tool_call>" + "[" * 5000 + "</tool_call>",
    "old <tool_call>",
    " <tool_cal",
)
READ = [
    ("old\n" + CALLED + "\n" + CALLED, ["old", "house", "house"]),
    ('<tool_call>{"name": "ARGUMENTS"}', ["ARGUMENTS"]),
    (
        "<tool_call>\n<function=house>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>",
        ["house"],
    ),
    *((text, [text]) for text in BROKEN),
]


@pytest.mark.parametrize(("text", "wanted"), READ)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_an_answer_is_taken_apart_in_whatever_pieces_it_comes(text, wanted, size):
    reader = AnswerReader(HERMES, SCHEMAS)
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.finish()
    content = "".join(part.text for part in parts if part.kind == "content")
    calls = [part.name for part in parts if part.kind == "call"]
    assert ([content] if content else []) + calls == wanted
    assert reader.calls == len(calls)
    assert all(json.loads(part.text) in ({}, {"a": 7}) for part in parts if part.kind == "call")


@pytest.mark.parametrize(
    ("family", "text", "names"),
    [
        ("llama", '<|python_tag|>{"name": "ARGUMENTS", "parameters": {}}; {"name": "house"}', 2),
        ("llama", '{"name": "Ann", "parameters": {}}', 0),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "ARGUMENTS", "id": "123456789"}, {"name": "house"}]',
            2,
        ),
        ("mistral, names", "[TOOL_CALLS]ARGUMENTS[CALL_ID]123456789[ARGS]{}[TOOL_CALLS]house{}", 2),
    ],
)
def test_calls_of_other_forms_are_read(family, text, names):
    reader = AnswerReader(form_of(FAMILIES[family][0]), SCHEMAS)
    parts = [part for letter in text for part in reader.feed(letter)] + reader.finish()
    assert reader.calls == names
    assert names or "".join(part.text for part in parts) == text


def test_a_thought_comes_first_or_is_content():
    def read(text, **options):
        reader = AnswerReader(HERMES, SCHEMAS, thoughts=THOUGHTS[0], **options)
        parts = [part for letter in text for part in reader.feed(letter)] + reader.finish()
        kinds = dict.fromkeys(part.kind for part in parts)
        return {k: "".join(part.text for part in parts if part.kind == k) for k in kinds}

    assert read("<think>\na b\n</think>\n\nc ") == {"reasoning": "a b", "content": "c "}
    assert read("a</think>b", in_thought=True) == {"reasoning": "a", "content": "b"}
    assert read("a <tool_call>", in_thought=True) == {"reasoning": "a <tool_call>"}
    assert read("a <think>b</think>") == {"content": "a <think>b</think>"}
    assert read("<think>a</think>" + CALLED) == {"reasoning": "a", "call": '{"a": 7}'}
