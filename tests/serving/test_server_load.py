"""A server under clients that send garbage, vanish, come all at once or read slowly."""

import gc
import json
import socket
import struct
import threading
from collections import Counter

import pytest
from cases import thinned
from served import NAME, Running, answer, settled

import kvqjax as kvq

PROMPT = [3, 14, 15, 92, 65]
WHOLE = {"model": NAME, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LONG = WHOLE | {"max_tokens": 200}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def engine():
    model = kvq.load("demo")
    before, model.tokenizer.chat_template = (
        model.tokenizer.chat_template,
        "{{ messages[0].content }}",
    )
    # The programs of test_server.py. Prompts are too short to leave a prefix that would hold pages.
    yield kvq.Engine(
        model, "kivi:bits=4,window=32", rows=3, capacity=256, chunk=64, stride=4, queue=20
    )
    model.tokenizer.chat_template = before  # models of one folder share its tokenizer


@pytest.fixture(scope="module")
def port(engine):
    with Running(engine, most_bytes=20_000) as port:
        yield port


@pytest.fixture(scope="module")
def wanted(port):
    return answer(port, "/v1/completions", WHOLE)[1]["choices"][0]["text"]


@pytest.fixture(autouse=True)
def at_rest(port, engine, wanted, caplog):
    """After every test the next request is answered as the first one was, no page is lost, and
    nothing was logged."""
    yield
    stats = settled(engine, running=0, waiting=0)
    assert stats.pages_free == stats.pages
    assert stats.failed == 0
    assert answer(port, "/v1/completions", WHOLE)[1]["choices"][0]["text"] == wanted
    gc.collect(1)  # what the test made; asyncio logs an error that nobody took when its future goes
    records = [*caplog.get_records("call"), *caplog.records]
    assert not [
        record.getMessage() for record in records if record.levelname in ("ERROR", "CRITICAL")
    ]


def opened(port: int, body: dict, length: int | None = None) -> socket.socket:
    """A connection on which a request was sent, or its first bytes."""
    raw = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    client.sendall((head + raw)[:length])
    return client


def reset(client: socket.socket) -> None:
    """Vanish without a word: a reset instead of the end of a connection."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


FIELDS = (
    *(
        "prompt",
        "max_tokens",
        "logprobs",
        "echo",
        "model",
        "n",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
    ),
    *(
        "top_k",
        "min_p",
        "repetition_penalty",
        "seed",
        "stop",
        "ignore_eos",
        "priority",
        "suffix",
        "user",
        "tools",
    ),
    *("presence_penalty", "frequency_penalty", "stop_token_ids", "min_tokens"),
    *("logit_bias", "response_format", "messages", "top_logprobs", "max_completion_tokens"),
)
VALUES = (
    *(
        "null",
        "true",
        "-1",
        "0",
        "2.5",
        "1e308",
        "1e999",
        "-1e999",
        "NaN",
        "9" * 400,
        "-" + "9" * 400,
        "9" * 5000,
    ),
    *(
        '"x"',
        '""',
        r'"\ud800"',
        r'"\u0000"',
        "[]",
        "[[]]",
        "[null]",
        '["x", 1]',
        "{}",
        '{"x": [{}]}',
    ),
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("path", "base"), [("completions", WHOLE | {"max_tokens": 1}), ("chat/completions", CHAT)]
)
def test_no_value_of_a_field_is_the_server_s_fault(port, path, base):
    """Every field with values of every type and size: an answer, or one line that says what is
    wrong."""
    statuses, faults = Counter(), []
    for field in FIELDS:
        for value in VALUES:
            rest = {name: given for name, given in base.items() if name != field}
            body = json.dumps(rest)[:-1] + f', "{field}": {value}}}'
            status, answered = answer(port, f"/v1/{path}", body.encode())
            statuses[status] += 1
            said = answered["error"]["message"] if "error" in answered else "an answer"
            if status not in (200, 400, 404) or "\n" in said or not 0 < len(said) < 500:
                faults.append((field, value[:20], status, said))
    assert not faults
    assert statuses[200] > 50
    assert statuses[400] > 200


@pytest.mark.parametrize(
    "raw",
    [
        b"no HTTP at all\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        bytes(range(256)) * 40,
    ],
    ids=lambda raw: repr(raw[:20]),
)
def test_what_is_no_request_is_refused(port, raw):
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(raw)
        got = client.recv(1000)
    assert got == b"" or got.split(b" ")[1][:1] == b"4"


@pytest.mark.parametrize(
    "coding", thinned(["Content-Length: 10000000", "Transfer-Encoding: chunked"], 2)
)
def test_a_large_body_is_refused_before_it_is_read(port, coding):
    """10 MB are announced, or come without an end: the answer comes while most of them are
    missing."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: here\r\n{coding}\r\n\r\n".encode())
        part = b"x" * 15_000
        for _ in range(2):
            client.sendall(part if "Length" in coding else b"%x\r\n%s\r\n" % (len(part), part))
        assert client.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_hundred_at_once(port, wanted):
    """Those for whom there is no place are told so; the others get what each gets alone."""
    answers = []
    clients = [
        threading.Thread(target=lambda: answers.append(answer(port, "/v1/completions", WHOLE)))
        for _ in range(100)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    statuses = Counter(status for status, _ in answers)
    assert statuses.keys() <= {200, 429}
    assert statuses.total() == 100
    assert statuses[200] >= 20  # as many as may wait
    assert {made["choices"][0]["text"] for status, made in answers if status == 200} == {wanted}


def test_those_who_vanish_leave_nothing_behind(port, engine):
    """In the middle of a stream, before the answer, and in the middle of the request."""
    before = settled(engine, running=0, waiting=0)
    streams = [opened(port, LONG | {"stream": True}) for _ in range(6)]
    for client in streams[:3]:  # as many as there are rows
        assert client.recv(100)
    silent = [opened(port, LONG) for _ in range(6)]
    settled(engine, running=3, waiting=9)
    partial = [opened(port, LONG, length) for length in (1, 30, 90)]
    for number, client in enumerate(streams + silent + partial):
        (reset if number % 2 else socket.socket.close)(client)
    after = settled(engine, running=0, waiting=0)
    assert after.aborted == before.aborted + 12


def test_a_slow_reader_holds_nobody_up(port, wanted):
    """It gets its text, byte by byte, and others are answered meanwhile."""
    slow = opened(port, LONG | {"stream": True})
    first = slow.recv(10)
    for _ in range(3):
        assert answer(port, "/v1/completions", WHOLE)[1]["choices"][0]["text"] == wanted
    parts = [first]
    while not b"".join(parts[-40:]).endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
        parts.append(slow.recv(100))
        assert parts[-1]
    slow.close()
    lines = [line for line in b"".join(parts).decode().splitlines() if line.startswith("data: {")]
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)
    assert text == answer(port, "/v1/completions", LONG)[1]["choices"][0]["text"]
