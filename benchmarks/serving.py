"""Many users at equal memory: a workload of requests through one engine a cache, all with the same cache bytes.

    python -m benchmarks.serving [--model smollm2] [--cache exact --cache kivi:bits=2] [--pool 512M] [--requests 64]

Requests arrive at random times (Poisson, `--rate` a second; 0: all at once). Half of them begin with one prefix of
`--prefix` tokens. Prompts have 100 to `--longest` tokens beside it and answers 50 to `--answer`, drawn evenly on a
logarithmic scale; no answer ends early. Programs are compiled before the clock runs. Caches take turns, and every turn
gets the same requests.
"""

import argparse
import json
import threading
import time

import numpy as np

import kvqjax as kvq
from benchmarks.tables import table
from kvqjax._options import byte_count

CACHES = ("exact", "kivi:bits=4", "kivi:bits=2", "higgs:bits=2")
HEAD = [
    "cache",
    "bits",
    "rows",
    "tokens/s",
    "requests/s",
    "first token, median s",
    "95 % s",
    "reused prompt tokens",
    "made way",
]


def workload(vocabulary: int, options: argparse.Namespace) -> list[tuple[float, list[int], int]]:
    """Draw the requests: (seconds after the start, prompt, tokens of the answer)."""
    random = np.random.default_rng(options.seed)
    waits = random.exponential(1 / options.rate, options.requests) if options.rate else np.zeros(options.requests)
    prefix = random.integers(0, vocabulary, options.prefix).tolist()

    def length(least: int, most: int) -> int:
        return int(np.exp(random.uniform(np.log(least), np.log(most))))

    requests = []
    for number, start in enumerate(np.cumsum(waits)):
        text = random.integers(0, vocabulary, length(100, options.longest)).tolist()
        requests.append((float(start), [*prefix, *text] if number % 2 else text, length(50, options.answer)))
    return requests


def measure(model: kvq.Model, method: str, requests, options: argparse.Namespace) -> dict[str, float | int | str]:
    """Serve the workload once."""
    memory = {"pool_bytes": options.pool, "rows": options.rows, "prefixes": 1}
    with kvq.Engine(model, method, capacity=options.capacity, chunk=options.chunk, **memory) as engine:
        engine.warm()
        handles: list = []

        def submit():
            for start, prompt, answer in requests:
                time.sleep(max(0.0, begun + start - time.perf_counter()))
                handles.append(engine.submit(prompt, max_new_tokens=answer, eos_ids=(), beyond_trained=True))

        begun = time.perf_counter()
        clients = threading.Thread(target=submit)
        clients.start()
        clients.join()
        answers = [handle.result() for handle in handles]
        seconds = time.perf_counter() - begun
        stats = engine.stats()
    first = np.asarray([answer.seconds_to_first_token for answer in answers])
    return {
        "cache": method,
        "bits": round(stats.bits, 2),
        "rows": stats.rows,
        "tokens_per_second": round(stats.tokens / seconds, 1),
        "requests_per_second": round(len(answers) / seconds, 3),
        "first_token_median_s": round(float(np.median(first)), 2),
        "first_token_95_s": round(float(np.quantile(first, 0.95)), 2),
        "reused_tokens": stats.reused_tokens,
        "preempted": stats.preempted,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cache", action="append")
    parser.add_argument("--pool", type=byte_count, default=byte_count("512M"), help="bytes of each cache")
    parser.add_argument("--rows", type=int, help="requests at a time; default: as many as are full rows")
    parser.add_argument("--capacity", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--answer", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print a line of JSON a turn as it ends")
    options = parser.parse_args()
    model = kvq.load(options.model)
    requests = workload(model.config.vocab_size, options)
    rows = []
    for _ in range(options.turns):
        for method in options.cache or CACHES:
            row = measure(model, method, requests, options)
            rows.append([str(value) for name, value in row.items() if name != "seconds"])
            if options.json:
                print(json.dumps(row), flush=True)
    if not options.json:
        print(table(HEAD, rows))


if __name__ == "__main__":
    main()
