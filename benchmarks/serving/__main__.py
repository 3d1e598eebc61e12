"""Many users at equal memory: a workload of requests through one engine a cache, all with the same
cache bytes.

    python -m benchmarks.serving [--model smollm2] [--cache exact --cache kivi:bits=2] [--pool 256M]
    [--requests 24]
    python -m benchmarks.serving --peer llama.cpp:f16 --peer transformers --out FILE    # in an environment with both
    python -m benchmarks.figures    # the tables of benchmarks/peers.md

Requests arrive at random times (Poisson, `--rate` a second; 0: all at once). Half of them begin
with one prefix of `--prefix` tokens. Prompts have 100 to `--longest` tokens beside it and answers
50 to `--answer`; `--skew` says how much rarer long ones are. No answer ends early. A cache that the
engine refuses is noted with its reason. Programs are compiled before the clock runs. Every engine
gets the same requests, one engine after the other. `--out` keeps rows that FILE has, so that a run
that was cut off goes on. Nothing else may run on the machine.
"""

import argparse
import importlib.metadata
import json
import math
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import kvqjax as kvq
from benchmarks.figures.peers import served_table
from benchmarks.serving.peers import by_llamacpp, by_transformers
from benchmarks.serving.workload import Request, Served, prefix_of, requests_of
from kvqjax._options import byte_count
from kvqjax._timing import machine
from kvqjax.cli.output import announce
from kvqjax.serving.memory import memory_for

CACHES = ("exact", "kivi:bits=4", "kivi:bits=2", "higgs:bits=2")
PREFIXES = 1  # the memory for what prompts begin with, in full rows
LOOKS = 0.25  # seconds between two looks at how many rows run


def rows_for(
    model: kvq.Model, method: str, requests: list[Request], options: argparse.Namespace
) -> int:
    """Choose the rows of a cache: the number of requests of mean length that its pages hold beside
    a prompt, at most `options.rows`. A step computes all rows, also those that wait for pages."""
    tokens = float(np.mean([len(request.prompt) + request.answer for request in requests]))

    def fits(rows: int) -> bool:
        try:
            memory = memory_for(
                model, method, options.capacity, rows, options.pool, PREFIXES, "auto"
            )
        except kvq.UserError:
            return False
        return memory.pages >= (rows + 1) * math.ceil(tokens * memory.row_pages / options.capacity)

    return next((rows for rows in range(options.rows, 1, -1) if fits(rows)), 1)


def engine_for(
    model: kvq.Model, method: str, requests: list[Request], options: argparse.Namespace
) -> kvq.Engine:
    """Make the engine that serves the workload with a cache of `options.pool` bytes."""
    memory = {
        "pool_bytes": options.pool,
        "rows": rows_for(model, method, requests, options),
        "prefixes": PREFIXES,
    }
    return kvq.Engine(model, method, capacity=options.capacity, chunk=options.chunk, **memory)


def by_engine(engine: kvq.Engine, requests: list[Request]) -> tuple[Served, float]:
    """Serve the workload by an engine, which is closed then: what it took, and the bits of a full
    row."""
    with engine:
        engine.warm()
        handles: list = []
        looks: list = []
        ended = threading.Event()

        def submit():
            for request in requests:
                time.sleep(max(0.0, begun + request.seconds - time.perf_counter()))
                handles.append(
                    engine.submit(
                        request.prompt,
                        max_new_tokens=request.answer,
                        eos_ids=(),
                        beyond_trained=True,
                    )
                )

        def look():
            while not ended.wait(LOOKS):
                looks.append(engine.stats())

        begun = time.perf_counter()
        clients = [threading.Thread(target=target) for target in (submit, look)]
        for client in clients:
            client.start()
        clients[0].join()
        answers = [handle.result() for handle in handles]
        seconds = time.perf_counter() - begun
        ended.set()
        clients[1].join()
        stats = engine.stats()
    first = [answer.seconds_to_first_token for answer in answers]
    pace = [
        (answer.seconds - answer.seconds_to_first_token) / (len(answer.tokens) - 1)
        for answer in answers
    ]
    running = float(np.mean([look.running for look in looks or [stats]]))
    shared = max(look.pages_shared for look in looks or [stats])
    return Served(
        seconds, first, pace, stats.rows, running, stats.reused_tokens, stats.preempted, shared
    ), stats.bits


def row_of(name: str, served: Served, bits: float, requests: list[Request]) -> dict:
    """A row of the record."""
    return {
        "cache": name,
        "bits": round(bits, 2),
        "rows": served.rows,
        "running": None if served.running is None else round(served.running, 1),
        "tokens_per_second": round(sum(request.answer for request in requests) / served.seconds, 1),
        "requests_per_second": round(len(requests) / served.seconds, 3),
        "first_token_median_s": round(float(np.median(served.first)), 2),
        "first_token_95_s": round(float(np.quantile(served.first, 0.95)), 2),
        "token_median_ms": round(1e3 * float(np.median(served.pace)), 1),
        "reused_tokens": served.reused,
        "pages_shared": served.pages_shared,
        "preempted": served.preempted,
        "seconds": round(served.seconds, 1),
    }


def measure(
    model: kvq.Model, name: str, requests: list[Request], folder: Path, options: argparse.Namespace
) -> dict:
    """Serve the workload once by the engine that `name` says: a cache of ours, "llama.cpp:f16" or
    "transformers"."""
    vocabulary = model.config.vocab_size
    if name == "transformers":
        served, bits = by_transformers(model.config, requests, options)
    elif name.startswith("llama.cpp:"):
        kind, prefix = name.partition(":")[2], prefix_of(vocabulary, options)
        served, bits = by_llamacpp(
            model.params, model.config, kind, requests, prefix, folder, options
        )
    else:
        try:
            engine = engine_for(model, name, requests, options)
        except kvq.UserError as error:
            return {"cache": name, "refused": str(error)}
        served, bits = by_engine(engine, requests)
    return row_of(name, served, bits, requests)


def about(options: argparse.Namespace) -> dict:
    """Give the options that rows must share to be compared."""
    lengths = ("prefix", "longest", "answer", "skew")
    names = ("model", "pool", "rows", "capacity", "chunk", "requests", "rate", *lengths, "seed")
    return {name: getattr(options, name) for name in names}


def versions() -> dict[str, str]:
    """The versions of the peers that are installed."""
    installed = {}
    for name in ("llama-cpp-python", "transformers", "torch"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cache", action="append")
    parser.add_argument(
        "--peer", action="append", help="llama.cpp:f16, :q8_0 or :q4_0, transformers"
    )
    parser.add_argument(
        "--pool", type=byte_count, default=byte_count("256M"), help="bytes of each cache"
    )
    parser.add_argument(
        "--rows", type=int, default=16, help="requests that make tokens at a time, at most"
    )
    parser.add_argument("--capacity", type=int, default=2560, help="tokens of a row")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--answer", type=int, default=500)
    parser.add_argument(
        "--skew", type=float, default=1.0, help="1: lengths even on a logarithmic scale"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="of the peers")
    parser.add_argument("--out", type=Path, help="a record, to which rows are added")
    options = parser.parse_args()
    model = kvq.load(options.model)
    requests = requests_of(model.config.vocab_size, options)
    record = {"machine": machine(), "versions": versions(), "runs": []}
    if options.out and options.out.exists():
        record = json.loads(options.out.read_text())
        record["versions"] |= versions()
    run = next((run for run in record["runs"] if run["about"] == about(options)), None)
    if run is None:
        run = {"about": about(options), "rows": []}
        record["runs"].append(run)
    measured = {row["cache"] for row in run["rows"]}
    names = [*(options.cache or ([] if options.peer else CACHES)), *(options.peer or [])]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if name in measured:
                continue
            announce(f"{name}: {len(requests)} requests")
            run["rows"].append(measure(model, name, requests, Path(folder), options))
            print(json.dumps(run["rows"][-1]), flush=True)
            if options.out:
                options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(served_table(run["rows"]))


if __name__ == "__main__":
    main()
