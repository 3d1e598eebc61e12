"""A decode step and a prompt on the CPU beside llama.cpp with the same float32 weights, in one run.

    pip install llama-cpp-python gguf    # in an environment of its own, built for this machine's processor
    python -m benchmarks.llamacpp [--tokens 8192 --tokens 32768] [--prompt 8192] [--out FILE]

A Llama of 8 layers: width 768, MLP 2048, 12 query and 4 KV heads of 64, random weights. Both give the same logits for a
short text, which is checked first. Then all take turns, round after round; medians of the rounds. Steps are of one
token behind a cache of `tokens`; ours flush as they go. `--prompt` times a prompt up to its first new token: at once,
and in chunks through the cache. Nothing else may run on the machine: llama.cpp's threads spin while they wait for each
other, and lose much when one is taken off its core.
"""

import argparse
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import kvqjax as kvq
from benchmarks.llamacpp.peer import TYPES, Peer, write_model
from benchmarks.tables import table
from kvqjax._timing import alternating_seconds, machine
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cli.bench import decoding
from kvqjax.cli.progress import announce
from kvqjax.model.config import ModelConfig
from kvqjax.model.weight_trees import init_params, unrolled
from kvqjax.step.forward import forward
from kvqjax.step.prefill import prefill

CONFIG = ModelConfig(
    vocab_size=1024, width=768, mlp_width=2048, num_layers=8, num_heads=12, num_kv_heads=4, head_dim=64,
    max_position=2**17,
)  # fmt: skip
CACHES = (
    "exact",
    "kivi:bits=4,group=128",
    "kivi:bits=2,group=128",
    "higgs:bits=2",
    "kvquant:bits=3,outliers=0.0",
    "commvq:bits=1",
    "xquant:bits=2",
)
PROMPTED = ("exact", "kivi:bits=2,group=128")
CHUNK = 512
STEPS = 8


def agree(params: dict, peer: Peer) -> float:
    """The largest difference of both logits behind a short text, over the largest logit."""
    ids = np.random.default_rng(1).integers(0, CONFIG.vocab_size, 24)
    peer.feed(ids, 0)
    theirs = peer.logits(CONFIG.vocab_size)
    model = kvq.Model(params=params, constants=(), config=CONFIG)
    ours, _ = prefill(model, jnp.asarray(ids[None]), jnp.array([len(ids)]), kvq.init_cache(model, "exact", 1, 32))
    return float(np.abs(np.asarray(ours[0], np.float32) - theirs).max() / np.abs(theirs).max())


def models(params: dict, caches: tuple[str, ...]) -> dict[str, kvq.Model]:
    """A model for each cache. Its layers are each by itself, and the method's constants random: no step's time depends
    on them."""
    ready = {}
    for text in caches:
        layout = CacheLayout(shape=CONFIG.kv_shape, method=kvq.parse(text), capacity=1024, dtype="float32")
        shapes = tuple(run.wiring.constants(run.count, layout.dtype) for run in runs_of(layout))
        ready[text] = kvq.Model(params=unrolled(params), constants=jax.tree.map(_random, shapes), config=CONFIG)
    return ready


def _random(of: jax.ShapeDtypeStruct) -> jax.Array:
    floating = jnp.issubdtype(of.dtype, jnp.floating)
    return 0.1 * jax.random.normal(jax.random.key(0), of.shape, of.dtype) if floating else jnp.zeros(of.shape, of.dtype)


def in_turn(calls: dict[str, Callable], rounds: int, inner: int = 1) -> dict[str, dict[str, float]]:
    """Median milliseconds of each call in the rounds, and the least."""
    spent = alternating_seconds(list(calls.values()), rounds)
    return {
        name: {"ms": 1e3 * float(np.median(own)) / inner, "least_ms": 1e3 * min(own) / inner}
        for name, own in zip(calls, spent, strict=True)
    }


def step_rows(ready: dict, path: Path, tokens: int, rounds: int, threads: int) -> list[dict]:
    """A decode step behind `tokens` cached ones."""
    calls = {}
    for name, model in ready.items():
        announce(f"filling {name} with {tokens} tokens")
        calls[name] = decoding(model, kvq.parse(name), tokens, 1, STEPS, rounds + 1)[1]
    peers = {kind: Peer(path, kind, tokens + 512, threads, tokens // 512 + 1) for kind in TYPES}
    calls |= {f"llama.cpp {kind}": peer.steps(tokens, STEPS) for kind, peer in peers.items()}
    found = in_turn(calls, rounds, STEPS)
    for peer in peers.values():
        peer.close()
    return [{"kind": "step", "tokens": tokens, "cache": name} | own for name, own in found.items()]


def prompt_rows(ready: dict, path: Path, tokens: int, rounds: int, threads: int) -> list[dict]:
    """A whole prompt up to the first new token: at once, in chunks through the cache, and llama.cpp's."""
    ids = np.random.default_rng(2).integers(0, CONFIG.vocab_size, tokens)
    whole, counts = jax.jit(prefill, donate_argnames="cache"), jnp.full((1,), tokens, jnp.int32)
    through = jax.jit(lambda *given: forward(*given, last=True), donate_argnums=3)

    def at_once(model, name):
        return lambda: whole(model, jnp.asarray(ids[None]), counts, kvq.init_cache(model, name, 1, tokens))[0]

    def in_chunks(model, name):
        def run():
            cache, full = kvq.init_cache(model, name, 1, tokens), jnp.full((1,), CHUNK, jnp.int32)
            for start in range(0, tokens, CHUNK):
                out, cache = through(model, jnp.asarray(ids[None, start : start + CHUNK]), full, cache)
            return out

        return run

    asked = [name for name in PROMPTED if name in ready]
    calls = {name: at_once(ready[name], name) for name in asked}
    calls |= {f"{name} in chunks of {CHUNK}": in_chunks(ready[name], name) for name in asked}
    peer = Peer(path, "f16", tokens + 512, threads)
    calls["llama.cpp f16"] = peer.prompt(ids)
    found = in_turn(calls, rounds)
    peer.close()
    return [{"kind": "prompt", "tokens": tokens, "cache": name} | own for name, own in found.items()]


def shown(rows: list[dict]) -> str:
    """The rows as Markdown, each beside the fastest of llama.cpp's in its group."""
    lines = []
    for row in rows:
        peers = [
            r for r in rows if r["cache"].startswith("llama.cpp") and all(r[n] == row[n] for n in ("kind", "tokens"))
        ]
        q4 = next((r["ms"] for r in peers if r["cache"].endswith("q4_0")), None)
        ratios = (min(r["ms"] for r in peers) / row["ms"], q4 / row["ms"] if q4 else None)
        cells = [f"{x:.2f}" if x is not None else "" for x in ratios]
        lines.append([row["kind"], str(row["tokens"]), f"`{row['cache']}`", f"{row['ms']:.1f}", *cells])
    return table(["", "tokens", "cache", "ms", "faster than llama.cpp's fastest by", "than its q4_0 by"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", action="append", help="only these beside the exact one; repeatable")
    parser.add_argument("--tokens", type=int, action="append", help="cached tokens; repeatable; multiples of 512")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the prompt; 0: none")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows, params = [], init_params(jax.random.key(0), CONFIG)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, params, CONFIG)
        peer = Peer(path, "f16", 512, given.threads)
        difference = agree(params, peer)
        peer.close()
        print(f"logits differ by {difference:.1e} of the largest", flush=True)
        if difference > 0.01:  # llama.cpp keeps keys and values in 16 bits
            raise SystemExit("llama.cpp computes something else")
        ready = models(params, ("exact", *given.cache) if given.cache else CACHES)
        for tokens in given.tokens or (8192, 32768):
            rows += step_rows(ready, path, tokens, given.rounds, given.threads)
        if given.prompt:
            rows += prompt_rows(ready, path, given.prompt, max(1, given.rounds // 3), given.threads)
    print(shown(rows))
    if given.out:
        version = importlib.metadata.version("llama-cpp-python")
        record = {"machine": machine(), "llama-cpp-python": version, "logits": difference, "rows": rows}
        given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
