"""`kvqjax serve` as clients see it: the openai package, and plain HTTP for what it never sends."""

import asyncio
import contextlib
import http.client
import itertools
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from commands import run
from served import KEY, NAME, Running, answer, settled
from starlette.requests import ClientDisconnect

import kvqjax as kvq
from kvqjax.serving.app import make_app

TEXT = "The baker came home after the rain."
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
GREEDY = {"model": NAME, "temperature": 0}
# One row, whose programs several tests share.
LONG = {"rows": 1, "capacity": 2048, "chunk": 64, "prefixes": 0}


@pytest.fixture(scope="module")
def engine():
    model = kvq.load("demo")
    before, model.tokenizer.chat_template = model.tokenizer.chat_template, TEMPLATE
    yield kvq.Engine(
        model, "kivi:bits=4,window=32", rows=3, capacity=256, chunk=64, stride=4, queue=4
    )
    model.tokenizer.chat_template = before  # models of one folder share its tokenizer


@pytest.fixture(scope="module")
def port(engine):
    with Running(engine, warm=True, api_key=KEY, most_bytes=10_000) as port:
        yield port


@pytest.fixture(scope="module")
def client(port):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0
    ) as client:
        yield client


def test_completions(client, engine):
    wanted = engine.submit(TEXT, max_new_tokens=12).result()
    made = client.completions.create(prompt=TEXT, max_tokens=12, **GREEDY)
    assert (made.choices[0].text, made.choices[0].finish_reason) == (wanted.text, "length")
    assert made.usage.prompt_tokens == wanted.prompt_tokens
    assert made.usage.completion_tokens == 12
    ids = engine.model.encode(TEXT)
    several = client.completions.create(prompt=[ids, ids[:4]], max_tokens=12, **GREEDY)
    assert several.choices[0].text == wanted.text
    assert [choice.index for choice in several.choices] == [0, 1]


def test_a_stream_is_the_answer_piece_by_piece(client):
    whole = client.completions.create(prompt=TEXT, max_tokens=20, **GREEDY)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(prompt=TEXT, max_tokens=20, **GREEDY, **options))
    assert len(chunks) > 4
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])


def test_chat(client, engine):
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "The baker came"},
                {"type": "text", "text": " home."},
            ],
        }
    ]
    wanted = engine.submit(
        [{"role": "user", "content": "The baker came home."}], chat=True, max_new_tokens=10
    ).result()
    made = client.chat.completions.create(messages=messages, max_completion_tokens=10, **GREEDY)
    assert made.choices[0].message.content == wanted.text
    stream = client.chat.completions.create(messages=messages, max_tokens=10, stream=True, **GREEDY)
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    unlimited = client.chat.completions.create(messages=messages, stop=[wanted.text[4:8]], **GREEDY)
    assert (
        unlimited.choices[0].message.content == wanted.text[: wanted.text.index(wanted.text[4:8])]
    )
    assert unlimited.choices[0].finish_reason == "stop"


def test_every_option_of_the_engine_comes_through(client, engine):
    """The answer is that of the engine, and another one than without the option."""
    ids = engine.model.encode(TEXT)
    plain = engine.submit(ids, max_new_tokens=16).result().tokens
    served = {
        "presence_penalty": 1.5,
        "frequency_penalty": 1.9,
        "repetition_penalty": 1.8,
        "logit_bias": {str(plain[2]): -100},
        "stop_token_ids": [plain[3]],
    }
    for name, value in served.items():
        option = {name: value}
        made = client.completions.create(
            prompt=ids, max_tokens=16, extra_body=option, **GREEDY
        ).choices[0]
        wanted = engine.submit(ids, max_new_tokens=16, **option).result()
        assert (made.text, made.finish_reason) == (
            wanted.text,
            "stop" if name == "stop_token_ids" else "length",
        )
        assert wanted.tokens != plain
    ended = {"stop_token_ids": [plain[3]], "min_tokens": 6}
    longer = client.completions.create(prompt=ids, max_tokens=16, extra_body=ended, **GREEDY)
    assert longer.usage.completion_tokens >= 6
    drawn = [
        client.completions.create(model=NAME, prompt=ids, max_tokens=16, seed=-1) for _ in range(2)
    ]
    assert drawn[0].choices[0].text != drawn[1].choices[0].text
    everything = client.completions.create(
        model=NAME, prompt=ids, max_tokens=16, seed=5, extra_body={"top_k": -1, "ignore_eos": True}
    )
    assert everything.usage.completion_tokens == 16


def test_an_assistant_s_message_may_be_without_content(client):
    def asked(content):
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
        talk.append({"role": "user", "content": "b"})
        return (
            client.chat.completions.create(messages=talk, max_tokens=4, **GREEDY)
            .choices[0]
            .message.content
        )

    assert asked(None) == asked("")
    with pytest.raises(openai.BadRequestError, match="the content of message 0 is null"):
        client.chat.completions.create(messages=[{"role": "user", "content": None}], **GREEDY)


def test_choices_draw_for_themselves_and_a_seed_repeats(client):
    options = {"model": NAME, "prompt": TEXT, "max_tokens": 12, "n": 3, "seed": 5}
    first, second = (client.completions.create(**options) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.text for choice in second.choices]
    # Of 32 bits, as JAX's.
    larger = client.completions.create(**options | {"seed": 5 + 2**32, "n": 1})
    assert larger.choices[0].text == texts[0]
    client.completions.create(model=NAME, prompt=TEXT, max_tokens=1, seed=2**32 - 1, n=2)
    for seed in (2**31, 2**63 - 1):
        assert client.completions.create(**(options | {"seed": seed})).choices
    unseeded = {
        client.completions.create(model=NAME, prompt=TEXT, max_tokens=12).choices[0].text
        for _ in range(2)
    }
    assert len(unseeded) == 2


def test_log_probabilities_of_a_prompt_are_those_that_lm_eval_asks_for(client, engine):
    ids = engine.model.encode(TEXT)
    made = client.completions.create(
        prompt=[ids], max_tokens=1, logprobs=1, echo=True, **GREEDY
    ).choices[0]
    scores = made.logprobs
    assert len(scores.tokens) == len(ids) + 1
    assert (scores.token_logprobs[0], scores.top_logprobs[0]) == (None, None)
    assert all(
        value <= max(top.values())
        for value, top in zip(scores.token_logprobs[1:], scores.top_logprobs[1:], strict=True)
    )
    assert made.text.startswith(TEXT)
    lengths = [0, *map(len, scores.tokens[1:-1])]  # the text lacks "<s>"
    assert scores.text_offset == [0, *itertools.accumulate(lengths)]
    prompt = (
        client.completions.create(prompt=[ids], max_tokens=0, logprobs=1, echo=True, **GREEDY)
        .choices[0]
        .logprobs
    )
    assert prompt.token_logprobs == scores.token_logprobs[:-1]
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": TEXT}],
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
        **GREEDY,
    )
    content = chat.choices[0].logprobs.content
    assert [len(token.top_logprobs) for token in content] == [2, 2, 2]
    assert content[0].logprob == content[0].top_logprobs[0].logprob


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", b"{", 400, "no JSON"),
        ("/v1/completions", b"[1]", 400, "wanted an object"),
        ("/v1/completions", b"\xff\xfe", 400, "no JSON"),
        ("/v1/completions", b"[" * 9000, 400, "no JSON"),
        ("/v1/completions", {}, 400, "prompt is missing"),
        ("/v1/completions", {"prompt": 3}, 400, "prompt is a whole number; wanted a string"),
        ("/v1/completions", {"prompt": TEXT, "n": 1.5}, 400, "n is a number with a fraction; wanted a whole number"),
        ("/v1/completions", b"null", 400, "the body is null; wanted an object"),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 1000}, 400, "do not fit a row of 256"),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": -3}, 400, "max_tokens=-3; wanted 0"),
        ("/v1/completions", {"prompt": TEXT, "temperature": "hot"}, 400, "temperature is a string; wanted a number"),
        ("/v1/completions", {"prompt": TEXT, "temperature": True}, 400, "temperature is true; wanted a number"),
        ("/v1/completions", {"prompt": TEXT, "temprature": 1}, 400, "did you mean 'temperature'"),
        ("/v1/completions", {"prompt": TEXT, "presence_penalty": 3}, 400, "it must be from -2 to 2"),
        ("/v1/completions", {"prompt": TEXT, "logit_bias": {"a": 3}}, 400, "wanted the id of a token"),
        ("/v1/completions", {"prompt": TEXT, "logit_bias": {"3": "a"}}, 400, "logit_bias of token 3 is no number"),
        ("/v1/completions", {"prompt": TEXT, "stop_token_ids": ["a"]}, 400, "wanted a list of token ids"),
        ("/v1/completions", {"prompt": TEXT, "stop_token_ids": list(range(9))}, 400, "a request may have 8"),
        ("/v1/completions", {"prompt": TEXT, "min_tokens": 17}, 400, "more than the 16 new tokens asked for"),
        ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt mixes types"),
        ("/v1/completions", {"prompt": [10**6]}, 400, "token id outside"),
        ("/v1/completions", {"prompt": TEXT, "model": "gpt"}, 404, "not served here"),
        ("/v1/completions", {"prompt": "x" * 20_000}, 413, "more than 10000 bytes"),
        ("/v1/completions", {"prompt": TEXT, "stream": True, "echo": True}, 400, "echo"),
        ("/v1/completions", {"prompt": TEXT, "stream": True, "max_tokens": 0}, 400, "max_tokens=0 is not served"),
        ("/v1/completions", {"prompt": TEXT, "n": 0}, 400, "wanted 1 to 128"),
        ("/v1/completions", {"prompt": [TEXT] * 3, "n": 2}, 400, "6 answers are asked for at once; at most 4 may wait"),
        ("/v1/completions", {"prompt": TEXT, "logprobs": 30}, 400, "logprobs=30; wanted 0 to 20"),
        ("/v1/completions", {"prompt": [1] * 3000, "max_tokens": 1}, 400, "do not fit a row of 256"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, 400, "wanted 1"),
        ("/v1/embeddings", {"input": TEXT}, 404, "POST /v1/embeddings is not served here"),
        ("/v1/models", {}, 405, "POST /v1/models is not served here"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages is missing"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "no role"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "only text is served",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, 400, "tool 0 is no"),
    ],
)  # fmt: skip
def test_garbage_is_one_line(port, path, body, status, message):
    got, answered = answer(port, path, body)
    assert got == status
    assert message in answered["error"]["message"]
    assert "\n" not in answered["error"]["message"]


def test_the_key_is_asked_for(port):
    assert answer(port, "/v1/models", key=None)[0] == 401
    assert answer(port, "/v1/completions", {"prompt": TEXT}, key="another")[0] == 401
    status, listed = answer(port, "/v1/models")
    assert (status, listed["data"][0]["id"], listed["data"][0]["max_model_len"]) == (200, NAME, 256)
    assert answer(port, "/v1/models/another")[0] == 404
    assert answer(port, "/v1/nothing")[0] == 404


def test_a_full_queue_is_429(port, client, engine):
    settled(engine, running=0, waiting=0)
    options = {"max_new_tokens": 200, "eos_ids": ()}
    running = [engine.submit(TEXT, **options) for _ in range(3)]
    for handle in running:
        next(iter(handle))
    waiting = [engine.submit(TEXT, **options) for _ in range(4)]
    with pytest.raises(openai.RateLimitError):
        client.completions.create(prompt=TEXT, **GREEDY)
    for handle in running + waiting:
        handle.abort()
    settled(engine, running=0, waiting=0)


def test_who_goes_away_is_not_waited_for(client, port, engine):
    aborted = settled(engine, running=0, waiting=0).aborted
    stream = client.completions.create(
        prompt=TEXT, max_tokens=200, stream=True, **GREEDY, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    settled(engine, running=0, aborted=aborted + 1)
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = {"prompt": TEXT, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Authorization": f"Bearer {KEY}"}
    )
    settled(engine, running=1)
    connection.close()
    settled(engine, running=0, aborted=aborted + 2)


def events(engine, body: dict, failing: bool = False) -> list[bytes]:
    """The parts of a stream's answer, without a server between; `failing`: the client has gone
    before the first."""
    parts, request = (
        [],
        [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}],
    )

    async def receive():
        if request:
            return request.pop()
        await asyncio.sleep(600)

    async def send(message):
        if failing:
            raise OSError("the client has gone")
        parts.append(message.get("body", b""))

    about = {
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "scheme": "http",
    }
    about |= {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [],
    }
    with contextlib.suppress(ClientDisconnect, ZeroDivisionError):  # for the server's log
        asyncio.run(asyncio.wait_for(make_app(engine, NAME)(about, receive, send), 60))
    return parts


def test_a_stream_that_nobody_reads_is_not_made(engine):
    aborted = settled(engine, running=0, waiting=0).aborted
    events(
        engine,
        {"prompt": TEXT, "max_tokens": 200, "ignore_eos": True, "stream": True},
        failing=True,
    )
    settled(engine, running=0, waiting=0, aborted=aborted + 1)


def test_a_stream_ends_where_the_engine_fails():
    engine = kvq.Engine(kvq.load("recall"), "exact", rows=1, capacity=128, chunk=64)
    engine._batch.step = lambda *_: 1 / 0
    *_, last = events(
        engine, {"prompt": "ab12,?ab", "max_tokens": 20, "ignore_eos": True, "stream": True}
    )
    assert (
        json.loads(last.removeprefix(b"data: "))["error"]["message"]
        == "the server failed: ZeroDivisionError"
    )
    engine.close()


def warmed(port):
    """Wait until every program is compiled."""
    for _ in range(600):
        if answer(port, "/ready", key=None)[0] == 200:
            break
        time.sleep(0.05)
    assert answer(port, "/ready", key=None) == (200, {"status": "ready"})


@pytest.mark.nightly
def test_an_answer_goes_on_in_a_full_row(engine):
    """Beyond the capacity; a prompt has to fit."""
    options = {"rows": 2, "capacity": 256, "chunk": 64, "stride": 4, "context_shift": True}
    words = "Once upon a time there was a town by the sea."
    messages = [{"role": "system", "content": words}, {"role": "user", "content": TEXT}]
    body = GREEDY | {"messages": messages, "max_tokens": 300, "ignore_eos": True}
    with kvq.Engine(engine.model, "exact", **options) as shifting, Running(shifting) as port:
        ids = shifting.model.encode(f"{words}\n{TEXT}\n", add_special_tokens=False)
        system = shifting.model.encode(f"{words}\n", add_special_tokens=False)
        assert shifting.first_tokens(messages, ids) == len(system)
        status, made = answer(port, "/v1/chat/completions", body)
        assert (status, made["usage"]["completion_tokens"]) == (200, 300)
        assert made["choices"][0]["finish_reason"] == "length"
        figures = answer(port, "/metrics")[1]
        assert float(re.search(r"^kvqjax_shifts_total (.+)$", figures, re.M)[1]) >= 1
        body = body | {"messages": [{"role": "user", "content": TEXT * 60}]}
        status, made = answer(port, "/v1/chat/completions", body)
        assert (status, made["error"]["code"]) == (400, "context_length_exceeded")


def test_health_metrics_and_the_page(port, engine):
    assert answer(port, "/health", key=None) == (200, {"status": "ok"})
    warmed(port)
    figures = dict(
        line.split(" ")
        for line in answer(port, "/metrics", key=None)[1].splitlines()
        if not line.startswith("#")
    )
    now = engine.stats()
    assert float(figures["kvqjax_rows"]) == 3
    assert float(figures["kvqjax_cache_bytes"]) == now.cache_bytes
    assert float(figures["kvqjax_tokens_total"]) == now.tokens
    page = answer(port, "/", key=None)[1]
    for path in ("v1/chat/completions", "v1/models", "metrics"):
        assert f'"{path}"' in page


def test_without_a_template_chat_is_plain_text_and_a_shutdown_ends_requests():
    """As `kvqjax chat` writes a conversation: the model goes on with it."""
    engine = kvq.Engine(kvq.load("recall"), "exact", **LONG)
    draw = {"max_tokens": 2, "temperature": 0}
    with Running(engine) as port:
        body = {"messages": [{"role": "user", "content": "ab12,cd34,?cd"}]}
        status, made = answer(port, "/v1/chat/completions", body | draw, key=None)
        assert (status, made["choices"][0]["message"]["content"]) == (200, "34")
    with pytest.raises(kvq.UserError, match="closed"):
        engine.submit("x")


def test_a_shutdown_says_which_answers_it_cut():
    """In words of the protocol: "length" of what is incomplete, an error of what has not begun."""
    engine = kvq.Engine(kvq.load("recall"), "exact", **LONG)
    body = {"prompt": TEXT, "max_tokens": 1900, "temperature": 0, "ignore_eos": True}
    with Running(engine) as port, ThreadPoolExecutor() as threads:

        def ask(stream):
            return threads.submit(answer, port, "/v1/completions", body | {"stream": stream}, None)

        # Its programs are those of the answers that follow.
        assert answer(port, "/v1/completions", body | {"max_tokens": 20}, None)[0] == 200
        whole = ask(False)
        settled(engine, running=1)
        late, late_stream = ask(False), ask(True)
        settled(engine, running=1, waiting=2)
        engine.close()
        status, made = whole.result()
        assert (status, made["choices"][0]["finish_reason"]) == (200, "length")
        assert 0 < made["usage"]["completion_tokens"] < 1900
        status, refused = late.result()
        assert (status, refused["error"]["type"]) == (503, "server_error")
        *_, last = late_stream.result()[1].strip().split("\n\n")
        assert json.loads(last.removeprefix("data: ")) == refused


def test_the_command_serves_until_it_is_told_to_end(tmp_path, capsys, monkeypatch):
    """A process of its own: its first lines say where and what, SIGTERM ends it, a mistake is one
    line."""
    words = [
        "serve",
        "-m",
        "recall",
        "-c",
        "kivi:bits=4,window=32",
        "--pool",
        "1M",
        "--capacity",
        "128",
        "--port",
        "0",
        "--prefix-folder",
        "prefixes",
        "--json",
    ]
    command = [sys.executable, "-P", "-m", "kvqjax", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, cwd=tmp_path) as process:
        about = json.loads(process.stdout.readline())
        first, second, third = (process.stderr.readline() for _ in range(3))
        port = int(re.search(r"http://127.0.0.1:(\d+)/v1", second)[1])
        assert re.match(
            r"recall through kivi:bits=4,window=32: \d+ rows of 128 tokens, .* bits a number", first
        )
        assert "no chat template: turns are plain text" in third
        assert (about["address"], about["capacity"]) == (f"http://127.0.0.1:{port}/v1", 128)
        status, made = answer(
            port, "/v1/completions", {"prompt": "ab12,cd34,?cd", "max_tokens": 2, "temperature": 0}
        )
        process.terminate()
        assert process.stderr.readline().startswith("ending: answers get 10 seconds")
        # uvicorn ends by the signal once all is closed.
        assert process.wait(timeout=60) in (
            0,
            -signal.SIGTERM,
        )
    assert (status, made["choices"][0]["text"]) == (200, "34")
    assert (tmp_path / "prefixes" / "prefixes-1" / "description.json").exists()
    code, _, err = run(capsys, monkeypatch, *words, "--pool", "1K")
    assert (code, err.count("\n")) == (2, 1)
    assert re.search(
        r"need \d+ bytes at least; 1024 are given; give --pool \d+, .* by --prefixes 0", err
    )


@pytest.mark.nightly
def test_a_second_ctrl_c_ends_the_command_at_once():
    """An answer is under way, which the first one waits for."""
    words = [sys.executable, "-P", "-m", "kvqjax", "serve", "-m", "recall", "--port", "0", "--json"]
    words += ["--capacity", "2048", "--rows", "1", "--prefixes", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    body = {"prompt": TEXT, "max_tokens": 1900, "stream": True, "ignore_eos": True}
    with subprocess.Popen(words, **pipes) as process:
        address = json.loads(process.stdout.readline())["address"]
        said = [process.stderr.readline() for _ in range(3)]
        request = urllib.request.Request(f"{address}/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=120) as stream:
            stream.readline()
            process.send_signal(signal.SIGINT)
            said.append(process.stderr.readline())
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
        said.append(process.stderr.read())
    assert said[3].startswith("ending: ")
    assert said[4] == "stopped\n"


@pytest.mark.nightly
def test_a_shutdown_ends_a_long_answer_and_logs_no_traceback():
    script = """
import sys
from kvqjax.cli import main, serve
serve.GRACE = 0.1
sys.argv = "kvqjax serve -m recall --capacity 2048 --rows 1 --prefixes 0 --port 0 --json --log-requests".split()
main()
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:
        address = json.loads(process.stdout.readline())["address"]
        body = {"prompt": TEXT, "max_tokens": 1900, "stream": True, "ignore_eos": True}
        request = urllib.request.Request(f"{address}/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=120) as stream:
            stream.readline()
            process.terminate()
            rest = stream.read().decode()
        errors = process.stderr.read()
        assert process.wait(timeout=60) in (0, -signal.SIGTERM)
    assert rest.endswith("data: [DONE]\n\n")
    assert rest.count("data: ") < 200
    assert "Traceback" not in errors
    assert re.search(
        r'^\d{4}-\S+ \S+ 127.0.0.1:\d+ "POST /v1/completions HTTP/1.1" 200', errors, re.MULTILINE
    )
