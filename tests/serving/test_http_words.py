"""What a server says: errors in the protocol's words and fields, and what a request's fields
mean."""

import asyncio
import dataclasses
import itertools
import json
import re
import socket

import pytest
from served import NAME, Running, answer, settled

import kvqjax as kvq
from kvqjax.serving import app, deadlines
from kvqjax.serving.app import make_app

TEXT = "The baker came home after the rain."
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
GREEDY = {"prompt": TEXT, "max_tokens": 12, "temperature": 0}
TURNS = [
    {"role": "user", "content": "The baker came home."},
    {"role": "assistant", "content": "After the rain"},
]
PAGE = "https://example.org"


@pytest.fixture(scope="module")
def engine():
    """The programs of test_server.py."""
    model = kvq.load("demo")
    before, model.tokenizer.chat_template = model.tokenizer.chat_template, TEMPLATE
    options = {"rows": 3, "capacity": 256, "chunk": 64, "stride": 4, "queue": 8}
    yield kvq.Engine(model, "kivi:bits=4,window=32", **options)
    model.tokenizer.chat_template = before  # models of one folder share its tokenizer


@pytest.fixture(scope="module")
def port(engine):
    with Running(engine, origins=[PAGE], most_bytes=50_000) as port:
        yield port


def completed(port, **fields):
    status, made = answer(port, "/v1/completions", GREEDY | fields)
    assert status == 200, made
    return made


def texts(made):
    return [choice["text"] for choice in made["choices"]]


def error_of(port, path, body):
    status, refused = answer(port, path, body)
    return status, refused["error"]


# --- Seeds and counts ---


def test_equal_prompts_draw_for_themselves_unless_a_seed_is_given(port, monkeypatch):
    numbers = itertools.count(11)
    monkeypatch.setattr("secrets.randbits", lambda _: next(numbers))
    drawn = completed(port, prompt=[TEXT] * 3, temperature=1)
    assert len(set(texts(drawn))) == 3
    alone = [completed(port, temperature=1, seed=seed) for seed in (11, 12, 13)]
    assert texts(drawn) == [text for made in alone for text in texts(made)]
    seeded = texts(completed(port, prompt=[TEXT] * 2, temperature=1, seed=11, n=2))
    assert seeded[:2] == seeded[2:] == texts(drawn)[:2]


def test_a_prompt_counts_once_for_all_its_choices(port, engine):
    once = completed(port)["usage"]
    several = completed(port, n=3)["usage"]
    assert several["prompt_tokens"] == once["prompt_tokens"] == len(engine.model.encode(TEXT))
    assert several["completion_tokens"] == 3 * once["completion_tokens"]
    assert (
        completed(port, prompt=[TEXT] * 2, n=2)["usage"]["prompt_tokens"]
        == 2 * once["prompt_tokens"]
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"stream": True, "stream_options": {"include_usage": "no"}},
            "include_usage is a string; wanted true or false",
        ),
        (
            {"stream": True, "stream_options": {"usage": True}},
            "unknown field 'usage' of stream_options",
        ),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "continuous_usage_stats .* not served",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options is for streams"),
    ],
)
def test_stream_options_are_checked(port, fields, message):
    status, error = error_of(port, "/v1/completions", GREEDY | fields)
    assert status == 400
    assert re.search(message, error["message"])
    assert error["param"] in ("stream_options", "include_usage")


# --- The end of a conversation ---


def test_an_answer_goes_on_with_the_last_message(port, engine):
    def ids(text):
        return engine.model.encode(text, add_special_tokens=False)

    said = {"messages": TURNS, "max_tokens": 12, "temperature": 0}

    def chat(**fields):
        return answer(port, "/v1/chat/completions", said | fields)

    status, made = chat(continue_final_message=True, add_generation_prompt=False)
    open_end = texts(completed(port, prompt=ids("The baker came home.\nAfter the rain")))
    assert (status, [made["choices"][0]["message"]["content"]]) == (200, open_end)
    assert chat(continue_final_message=True)[1]["choices"] == made["choices"]
    behind = texts(completed(port, prompt=ids("The baker came home.\nAfter the rain\n")))
    assert [chat()[1]["choices"][0]["message"]["content"]] == behind
    status, refused = chat(continue_final_message=True, add_generation_prompt=True)
    assert (status, refused["error"]["param"]) == (400, "continue_final_message")
    status, refused = chat(
        messages=[*TURNS, {"role": "user", "content": " "}], continue_final_message=True
    )
    assert (status, "cannot go on" in refused["error"]["message"]) == (400, True)


# --- Errors ---


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"prompt": TEXT, "max_tokens": 1000}, "max_tokens"),
        ("completions", {"prompt": [1] * 300, "max_tokens": 5}, "prompt"),
        ("chat/completions", {"messages": TURNS, "max_tokens": 1000}, "max_tokens"),
        (
            "chat/completions",
            {"messages": TURNS, "max_completion_tokens": 1000},
            "max_completion_tokens",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "rain " * 400}]},
            "messages",
        ),
    ],
)
def test_what_is_too_long_has_the_fields_that_clients_look_for(port, path, fields, param):
    status, error = error_of(port, f"/v1/{path}", fields)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert error["message"].startswith(
        "This model's maximum context length is 256 tokens: a prompt of "
    )
    assert error["message"].endswith(" (context_length_exceeded)")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 7}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 100}, "n"),
        ({"seed": -3}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"priority": 2**40}, "priority"),
        ({"logprobs": 99}, "logprobs"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"tools": [{}]}, "tools"),
        ({"temprature": 1}, "temprature"),
        ({"model": "gpt"}, "model"),
    ],
)
def test_an_error_names_its_field(port, fields, param):
    """No word of it is Python's: a client writes JSON."""
    status, error = error_of(port, "/v1/completions", GREEDY | fields)
    assert status in (400, 404)
    assert error["param"] == param
    assert not re.search(
        r"NoneType|\bstr\b|\bint\b|True|argument|=\.\.\.|eos_ids", error["message"]
    )


def test_a_request_that_the_model_was_not_trained_for_is_refused_or_allowed_for_all():
    """And the list of models says how many tokens will be served."""
    model = kvq.load("recall")
    shorter = dataclasses.replace(model.config, max_position=64)
    engine = kvq.Engine(model.replace(config=shorter), "exact", rows=1, capacity=128, chunk=64)
    body = {"prompt": [3] * 60, "max_tokens": 10, "temperature": 0}
    for allowed, most in ((False, 64), (True, 128)):
        status, listed = asked(make_app(engine, NAME, beyond_trained=allowed), "/v1/models")
        assert (status, listed["data"][0]["max_model_len"]) == (200, most)
        status, made = asked(
            make_app(engine, NAME, beyond_trained=allowed), "/v1/completions", body
        )
        assert status == (200 if allowed else 400)
        if not allowed:
            assert made["error"]["code"] == "context_length_exceeded"
            assert "that this model was trained for (" in made["error"]["message"]
    engine.close()


def asked(served, path, body=None):
    """Status and body of a request to an application, without a server between."""
    parts = []
    content = json.dumps(body).encode()
    requests = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive():
        if requests:
            return requests.pop()
        await asyncio.sleep(600)

    async def send(message):
        parts.append(message)

    about = {
        "type": "http",
        "method": "GET" if body is None else "POST",
        "path": path,
        "headers": [],
    }
    about |= {
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "query_string": b"",
    }
    asyncio.run(asyncio.wait_for(served(about, receive, send), 60))
    return parts[0]["status"], json.loads(b"".join(part.get("body", b"") for part in parts))


def test_an_error_is_written_once_and_said_at_every_door():
    error = kvq.UserError("too long", "{beyond_trained} allows it", beyond_trained=True)
    assert str(error) == "too long; beyond_trained=True allows it"
    assert error.said(lambda name, _: f"--{name}") == "too long; --beyond_trained allows it"
    assert error.said(lambda *_: None) == "too long"
    assert (
        str(kvq.UserError("a {brace} in a name", "try again")) == "a {brace} in a name; try again"
    )


# --- What browsers and operators ask for ---


def raw(port, text):
    """The bytes of an answer to a request that is written out."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(text.encode())
        parts = []
        while part := client.recv(2000):
            parts.append(part)
    return b"".join(parts).decode()


def test_pages_of_allowed_origins_may_use_the_server(port):
    wanted = (
        "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization\r\n"
    )
    line = "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: here\r\nConnection: close\r\n" + wanted
    allowed = raw(port, f"{line}Origin: {PAGE}\r\n\r\n").lower()
    assert allowed.startswith("http/1.1 200")
    assert f"access-control-allow-origin: {PAGE}" in allowed
    assert (
        "access-control-allow-origin"
        not in raw(port, f"{line}Origin: https://elsewhere.org\r\n\r\n").lower()
    )


def test_metrics_tell_how_long_tokens_took(port, engine):
    settled(engine, running=0, waiting=0)

    def counted():
        page = answer(port, "/metrics")[1]
        names = ("time_to_first_token", "time_per_output_token")
        return [float(re.search(rf"kvqjax_{name}_seconds_count (\S+)", page)[1]) for name in names]

    first, later = counted()
    completed(port, max_tokens=1)
    completed(port)
    assert answer(port, "/v1/completions", GREEDY | {"stream": True})[0] == 200
    assert counted() == [first + 3, later + 2]


def test_the_page_s_icon(port):
    assert answer(port, "/favicon.ico")[0] == 200


# --- Requests that never come whole ---


def test_a_body_that_does_not_come_is_not_waited_for(port, monkeypatch):
    monkeypatch.setattr(app, "BODY_SECONDS", 0.05)
    head = "POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\n"
    assert raw(port, head + "{").startswith("HTTP/1.1 408")


@pytest.mark.parametrize(
    "text", ["", "GET /health HTTP/1.1\r\nHost: he", "GET /health HTTP/1.1\r\n\r\nGET /he"]
)
def test_headers_that_do_not_end_close_the_connection(port, monkeypatch, text):
    """Of a first request and of a later one. The connection ends, or `raw` would wait."""
    monkeypatch.setattr(deadlines, "HEAD_SECONDS", 0.05)
    said = raw(port, text)
    assert said == "" or said.startswith("HTTP/1.1 ")


def test_a_quick_request_is_not_cut(port, monkeypatch):
    """An answer may take longer than headers may."""
    monkeypatch.setattr(deadlines, "HEAD_SECONDS", 0.01)
    assert len(completed(port, max_tokens=200, ignore_eos=True)["choices"]) == 1
