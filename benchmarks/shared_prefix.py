"""One system prompt, many requests: what it costs to compute and to store the prompt once instead
of once a request.

    python -m benchmarks.shared_prefix [--cache exact --cache kivi:bits=2] [--prefix 1024] [--own
    32] [--requests 8]

The bundled model `demo`. Compute is processor time on a CPU, of all cores together, the least of a
few runs after
compilation: other programs on the machine change it little. Bytes are those of the arrays.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import kvqjax as kvq
from benchmarks.tables import table

RUNS = 3
CACHES = ("exact", "kivi:bits=2", "turboquant:bits=3")

prefill, forward = jax.jit(kvq.prefill), jax.jit(kvq.forward, static_argnames="last")


def seconds(call: Callable) -> float:
    """The least processor time of a call."""
    jax.block_until_ready(call())
    times = []
    for _ in range(RUNS):
        start = time.process_time()
        jax.block_until_ready(call())
        times.append(time.process_time() - start)
    return min(times)


def size(*caches: kvq.cache.Cache) -> int:
    return sum(kvq.ledger(cache).bytes for cache in caches)


def measure(
    model: kvq.Model, method: str, prefix: int, tail_length: int, requests: int
) -> list[str]:
    """One row of the table."""
    random = np.random.default_rng(0)
    system = random.integers(0, model.config.vocab_size, (1, prefix))
    tails = random.integers(0, model.config.vocab_size, (requests, tail_length))
    texts = jnp.asarray(
        np.concatenate([np.broadcast_to(system, (requests, prefix)), tails], 1), jnp.int32
    )
    system, tails = jnp.asarray(system, jnp.int32), jnp.asarray(tails, jnp.int32)
    capacity, tail_counts = prefix + 2 * tail_length, jnp.full((requests,), tail_length)
    blank, blank_rows = (kvq.init_cache(model, method, rows, capacity) for rows in (1, requests))

    def prefill_all():
        return prefill(model, texts, jnp.full((requests,), prefix + tail_length), blank_rows)

    def prefill_prefix():
        return prefill(model, system, jnp.asarray([prefix]), blank)[1]

    shared = prefill_prefix()

    def forward_tails():
        return forward(model, tails, tail_counts, kvq.repeat(shared, requests), last=True)

    cache = forward_tails()[1]
    head, pieces = kvq.cut(cache, prefix)
    head = kvq.gather(head, jnp.asarray([0]))

    def joined():
        return kvq.join(kvq.repeat(head, requests), pieces)

    joined_bytes = size(kvq.resize(head, pieces.start + max_window(cache))) + size(pieces.cache)
    times = [
        f"{seconds(call):.3f}" for call in (prefill_all, prefill_prefix, forward_tails, joined)
    ]
    return [
        method,
        *times,
        f"{size(cache) / 2**20:.2f}",
        f"{joined_bytes / 2**20:.2f}",
        str(pieces.start),
    ]


def max_window(cache: kvq.cache.Cache) -> int:
    """The most tokens that stay exact behind what is encoded."""
    return max(
        clock.window
        for run in kvq.cache.runs_of(cache.layout)
        for clock in run.wiring.storage.clocks
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", action="append")
    for name, count in (("prefix", 1024), ("own", 32), ("requests", 8)):
        parser.add_argument(f"--{name}", type=int, default=count)
    options = parser.parse_args()
    sizes = options.prefix, options.own, options.requests
    print(
        f"a prompt of {sizes[0]} tokens, {sizes[2]} requests of {sizes[1]} tokens behind it; seconds, MiB"
    )
    head = [
        "cache",
        "all prefilled",
        "prompt once",
        "repeat + own",
        "join",
        "all stored",
        "head + tails",
        "head's tokens",
    ]
    model = kvq.load("demo")
    print(table(head, [measure(model, method, *sizes) for method in options.cache or CACHES]))


if __name__ == "__main__":
    main()
