"""A server under fire for minutes: does anything grow?

    nice python -m benchmarks.soak [--minutes 10] [--cache kivi:bits=4,window=32] [--seed 0] [--out FILE.json]

The bundled model `demo` behind the HTTP server in this process, few rows over a small pool of pages. Clients ask at
random: whole answers and streams, prompts with common beginnings, garbage, streams that are left, answers that nobody
waits for, slow readers, requests that are aborted in the queue. About twice a minute all clients rest, and what the
process holds is counted: memory, live arrays, pages that neither the pool nor a kept prefix has, open files, threads,
and programs compiled since the first count. One request is repeated at every rest: its text may not change.

The exit code is 1 where a figure grows: where its least value in the last third of the run is more than its largest one
in the third before. Processes' memory moves with the allocator, so that a hundredth more of it is no growth.
"""

import argparse
import asyncio
import gc
import http.client
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import jax
import jax.monitoring
import numpy as np
import uvicorn

import kvqjax as kvq
from benchmarks.tables import table
from kvqjax._timing import machine
from kvqjax.cache.accounting import array_bytes
from kvqjax.serving.app import make_app

CACHE = "kivi:bits=4,window=32"
ROWS, CAPACITY, CHUNK = 6, 1024, 64
POOL = 4  # full rows' memory, the prompt's and the prefixes' included: requests make way for others
CLIENTS = 8
BEGINNINGS = 3  # that prompts have in common
REST = 30.0  # seconds between two rests, or a twelfth of a short run
SLACK = {"resident_bytes": 0.01}  # share of a figure that is no growth
COMPILED = "/jax/core/compile/backend_compile_duration"  # an event of JAX
NAME = "demo"
PROBE = {"model": NAME, "prompt": "The baker came home after the rain.", "max_tokens": 24, "temperature": 0}

GARBAGE = (
    b"{",
    b"\xff\xfe",
    b"[" * 9000,
    b'{"prompt": "x", "max_tokens": 1e400}',
    b'{"prompt": "x", "max_tokens": -9}',
    b'{"prompt": [99999999999999999999]}',
    b'{"prompt": {"a": 1}, "stream": "no"}',
    b'{"prompt": "x", "unheard_of": 1}',
    b'{"prompt": "x", "seed": "seven", "n": 4000}',
    b'{"prompt": "' + b"x" * 5 * 2**20 + b'"}',
)


class Client:
    """One of many: asks until it is told to end."""

    def __init__(self, port: int, vocabulary: int, seed: int, counts: Counter):
        self._port, self._vocabulary, self._counts = port, vocabulary, counts
        self._random = np.random.default_rng(seed)
        common = np.random.default_rng(0)
        self._beginnings = [common.integers(0, vocabulary, 400).tolist() for _ in range(BEGINNINGS)]
        self._kinds = (self.whole, self.stream, self.garbage, self.leaves, self.waits_for_nothing, self.reads_slowly)

    def ask(self) -> None:
        """Do one thing, drawn at random."""
        kind = self._kinds[self._random.integers(len(self._kinds))]
        try:
            kind()
            self._counts[kind.__name__] += 1
        except (OSError, http.client.HTTPException):
            self._counts["connections lost"] += 1

    def body(self, **options) -> bytes:
        random = self._random
        prompt = random.integers(0, self._vocabulary, random.integers(1, 300)).tolist()
        if random.random() < 0.5:
            prompt = [*self._beginnings[random.integers(BEGINNINGS)], *prompt[:60]]
        fields = {"model": NAME, "prompt": prompt, "max_tokens": int(random.integers(1, 500)), "ignore_eos": True}
        fields |= {"temperature": float(random.choice([0.0, 0.9])), "priority": int(random.integers(3))}
        if random.random() < 0.2:
            fields |= {"logprobs": 2}
        return json.dumps(fields | options).encode()

    def post(self, body: bytes) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        return connection

    def whole(self) -> None:
        connection = self.post(self.body())
        connection.getresponse().read()
        connection.close()

    def stream(self) -> None:
        connection = self.post(self.body(stream=True))
        connection.getresponse().read()
        connection.close()

    def garbage(self) -> None:
        body = GARBAGE[self._random.integers(len(GARBAGE))]
        connection = self.post(body)
        if not 400 <= connection.getresponse().status < 500:
            self._counts["garbage that was answered"] += 1
        connection.close()

    def leaves(self) -> None:
        """Go away in the middle of a stream."""
        connection = self.post(self.body(stream=True, max_tokens=500))
        connection.getresponse().read(int(self._random.integers(1, 2000)))
        connection.close()

    def waits_for_nothing(self) -> None:
        connection = self.post(self.body())
        time.sleep(float(self._random.random()))
        connection.close()

    def reads_slowly(self) -> None:
        connection = self.post(self.body(stream=True, max_tokens=40))
        response = connection.getresponse()
        while response.read(1000):
            time.sleep(0.02)
        connection.close()


def at_rest(engine: kvq.Engine) -> None:
    """Wait until no request runs or waits."""
    while True:
        stats = engine.stats()
        if stats.running + stats.waiting == 0:
            return
        time.sleep(0.05)


def probe(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(PROBE).encode())
    text = json.loads(connection.getresponse().read())["choices"][0]["text"]
    connection.close()
    return text


def figures(engine: kvq.Engine, compiled: Counter) -> dict[str, int]:
    """Count what the process holds."""
    gc.collect()
    arrays = jax.live_arrays()
    stats = engine.stats()
    kept_pages = {page for prefix in engine._prefixes._kept.values() for page in prefix.pages}
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "resident_bytes": resident,
        "arrays": len(arrays),
        "array_bytes": array_bytes(arrays),
        "pages_lost": stats.pages - stats.pages_free - len(kept_pages),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "programs": compiled.total(),
    }


def growing(rests: list[dict[str, int]]) -> list[str]:
    """Name the figures that grow."""
    third = len(rests) // 3
    middle, last = rests[-2 * third : -third], rests[-third:]
    names = [
        name
        for name in rests[0]
        if third and min(rest[name] for rest in last) > max(rest[name] for rest in middle) * (1 + SLACK.get(name, 0))
    ]
    return names + ["pages_lost"] * (rests[-1]["pages_lost"] > 0 and "pages_lost" not in names)


def soak(port: int, engine: kvq.Engine, options: argparse.Namespace) -> tuple[list[dict[str, int]], Counter, bool]:
    """Let clients ask, with rests: the figures of every rest, what was asked, and whether a text changed."""
    compiled: Counter = Counter()

    def listen(event: str, _: float, **about) -> None:
        if event == COMPILED:
            compiled[about.get("fun_name", "a program")] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    counts: Counter = Counter()
    vocabulary = engine.model.config.vocab_size
    clients = [Client(port, vocabulary, options.seed * CLIENTS + number, counts) for number in range(CLIENTS)]
    begun, probe_text, changed, rests = time.monotonic(), probe(port), False, []
    pause = min(REST, options.minutes * 60 / 12)
    compiled.clear()
    while time.monotonic() - begun < options.minutes * 60:
        until = time.monotonic() + pause

        def asks(client: Client, until: float = until) -> None:
            while time.monotonic() < until:
                client.ask()

        threads = [threading.Thread(target=asks, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        at_rest(engine)
        changed |= probe(port) != probe_text
        at_rest(engine)
        rests.append(figures(engine, compiled))
        stats = engine.stats()
        line = {"seconds": round(time.monotonic() - begun), "requests": stats.requests, "made_way": stats.preempted}
        print(json.dumps(line | rests[-1]), flush=True)
    print(f"compiled after the first answer: {dict(compiled) or 'nothing'}")
    return rests, counts, changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--cache", default=CACHE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a record")
    options = parser.parse_args()
    model = kvq.load("demo")
    row = kvq.ledger(kvq.init_cache(model, options.cache, 1, CAPACITY)).bytes
    engine = kvq.Engine(model, options.cache, rows=ROWS, capacity=CAPACITY, chunk=CHUNK, pool_bytes=POOL * row)
    server = uvicorn.Server(uvicorn.Config(make_app(engine, NAME), port=0, log_level="error"))
    thread = threading.Thread(target=asyncio.run, args=(server.serve(),))
    thread.start()
    while not server.started:
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    engine.warm()
    rests, counts, changed = soak(port, engine, options)
    stats = engine.stats()
    server.should_exit = True
    thread.join()
    grows = growing(rests)
    names = list(rests[0])
    chosen = sorted({0, len(rests) // 3, 2 * len(rests) // 3, len(rests) - 1})
    print(table(["rest", *names], [[str(place + 1), *(str(rests[place][name]) for name in names)] for place in chosen]))
    print(f"asked: {dict(counts)}")
    print(f"ended: {stats.requests}, aborted: {stats.aborted}, made way: {stats.preempted}, failed: {stats.failed}")
    print(f"grows: {', '.join(grows) or 'nothing'}; the repeated answer {'changed' if changed else 'never changed'}")
    if options.out:
        about = {"cache": options.cache, "minutes": options.minutes, "rows": ROWS, "pages": stats.pages}
        ended = {name: getattr(stats, name) for name in ("requests", "aborted", "failed", "preempted", "tokens")}
        record = {"machine": machine(), "about": about, "asked": dict(counts), "engine": ended, "grows": grows}
        options.out.write_text(json.dumps(record | {"rests": rests}, indent=1) + "\n")
    sys.exit(bool(grows or changed or stats.failed or counts["garbage that was answered"] or engine.fault is not None))


if __name__ == "__main__":
    main()
