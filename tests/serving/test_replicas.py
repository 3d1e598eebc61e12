"""`examples/replicas.py`: two servers behind one address, by what prompts begin with."""

import asyncio
import importlib.util
import json
import socket
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn

import kvqjax as kvq
from kvqjax.serving.app import make_app

ROOT = Path(__file__).parents[2]
TEXTS = [
    f"{name} came home after the rain, and"
    for name in ("Anna", "Ben", "Cara", "Dan", "Ella", "Finn")
]


class Server:
    """An application in a thread, and its address."""

    def __init__(self, app):
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        self.thread = threading.Thread(target=asyncio.run, args=(self.server.serve(),), daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.address = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def close(self):
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture(scope="module")
def replicas():
    spec = importlib.util.spec_from_file_location("replicas", ROOT / "examples" / "replicas.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def engines():
    """The programs of test_server.py."""
    model, method = kvq.load("demo"), "kivi:bits=4,window=32"
    options = {"rows": 3, "capacity": 256, "chunk": 64, "stride": 4, "queue": 8}
    with kvq.Engine(model, method, **options) as one, kvq.Engine(model, method, **options) as other:
        yield one, other


@pytest.fixture(scope="module")
def served(engines, replicas):
    for engine in engines:
        engine.warm = lambda: (
            None
        )  # the few programs of this file are compiled when they are needed
    servers = [Server(make_app(engine, "demo")) for engine in engines]
    router = Server(replicas.make_app([server.address for server in servers]))
    with client_of(router) as client:
        yield client, servers, router
    for server in (router, *servers):
        server.close()


def client_of(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


def counts(engines) -> list[int]:
    return [engine.stats().requests for engine in engines]


def ask(client, text: str, **options):
    return client.completions.create(
        model="demo", prompt=text, max_tokens=4, temperature=0, **options
    )


def test_prompts_that_begin_alike_meet_and_others_spread(served, engines, replicas, monkeypatch):
    client, *_ = served
    monkeypatch.setattr(replicas, "SHARED", 20)
    places = []
    for text in TEXTS:
        before = counts(engines)
        for end in (" he slept", " she ate", ""):
            assert ask(client, text + end).choices[0].text
        moved = [after - now for after, now in zip(counts(engines), before, strict=True)]
        assert sorted(moved) == [0, 3], "one server got all three"
        places.append(moved.index(3))
    assert len(set(places)) == 2


def test_answers_and_streams_are_those_of_the_server(served, engines):
    client, servers, router = served
    whole = ask(client, TEXTS[0])
    pieces = [piece.choices[0].text for piece in ask(client, TEXTS[0], stream=True)]
    assert "".join(pieces) == whole.choices[0].text
    with httpx.Client() as plain:
        assert (
            plain.get(f"{router.address}/v1/models").json()
            == plain.get(f"{servers[0].address}/v1/models").json()
        )
        wrong = plain.post(f"{router.address}/v1/completions", content=b"no JSON")
        assert wrong.status_code == 400
        assert "error" in wrong.json()


def test_a_server_that_is_gone_is_passed_over(served, replicas):
    _, servers, _ = served
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{unused.getsockname()[1]}"  # nobody listens there
        for addresses, fine in (((gone, servers[0].address), True), ((gone,), False)):
            router = Server(replicas.make_app(addresses))
            with client_of(router) as client:
                if fine:
                    assert all(ask(client, text).choices[0].text for text in TEXTS)
                else:
                    with pytest.raises(openai.InternalServerError, match="no server answers"):
                        ask(client, TEXTS[0])
            router.close()


def test_a_prompt_moves_where_its_server_has_far_more_to_do(replicas):
    router = replicas.Router(["a", "b", "c"])
    first, *others = router.order("once")
    assert router.order("once") == [first, *others]
    router.under_way[first] = 20
    assert router.order("once") == [*others, first]
    without = replicas.Router(others)
    assert without.order("once") == others, "the others' order does not depend on it"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"prompt": "x" * 5000}, "x" * 1024),
        ({"prompt": [1, 2, 3]}, "[1, 2, 3]"),
        ({"messages": [{"role": "user", "content": "hi"}]}, '[{"role": "user", "content": "hi"}]'),
        ([1], ""),
    ],
    ids=["text", "tokens", "messages", "neither"],
)
def test_what_chooses_a_server(replicas, body, found):
    assert replicas.beginning(json.dumps(body).encode()) == found
