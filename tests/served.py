"""An engine behind HTTP in this process, and plain requests to it."""

import asyncio
import http.client
import json
import threading
import time

import uvicorn

from kvqjax.serving.app import make_app
from kvqjax.serving.deadlines import ImpatientProtocol

KEY, NAME = "a key", "small"


class Running:
    """A server in a thread, and its address. A program is compiled when a request first needs it,
    or all of them at the start if `warm` says so."""

    def __init__(self, engine, warm=False, **options):
        if not warm:
            engine.warm = lambda: None
        app = make_app(engine, NAME, **options)
        settings = uvicorn.Config(app, port=0, log_level="error", http=ImpatientProtocol)
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._server.serve(),), daemon=True
        )

    def __enter__(self) -> int:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self._server.servers[0].sockets[0].getsockname()[1]

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join()


def answer(port: int, path: str, body=None, key: str | None = KEY):
    """Status and body of a plain request; bytes are sent as they are."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    connection.request("GET" if body is None else "POST", path, raw, headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, json.loads(text) if response.headers[
        "Content-Type"
    ] == "application/json" else text


def settled(engine, **wanted):
    """Wait until the engine's figures are these."""
    for _ in range(600):
        now = engine.stats()
        if all(getattr(now, name) == value for name, value in wanted.items()):
            return now
        time.sleep(0.05)
    raise AssertionError(f"{now}; wanted {wanted}")
