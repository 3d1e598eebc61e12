"""A decode step and a prompt on the CPU beside llama.cpp with the same float32 weights.

    pip install llama-cpp-python gguf    # in an environment of its own, built for this machine's processor
    python -m benchmarks.llamacpp [--model smollm2] [--tokens 8192 --tokens 32768] [--prompt 8192]
    [--only CACHE]
        [--out FILE]
    python -m benchmarks.figures    # the tables of benchmarks/peers.md

Of SmolLM2-135M-Instruct, or of a Llama of 8 layers: width 768, MLP 2048, 12 query and 4 KV heads of
64, random weights. Both give the same logits for a short text, which is checked first. Then each
cache takes turns with the exact one and with llama.cpp's three, round after round; medians of the
rounds. A row of the record is one such run, and stands by
itself: rows that FILE has are kept, but for those of caches that are named, so a run that was cut
off goes on. Steps are of one token behind a cache of `tokens` random codes; ours flush as they go.
`--prompt` times a prompt up to its first new token: at once, and in chunks through the cache.
Nothing else may run on the machine:
llama.cpp's threads spin while they wait for each other, and lose much when one is taken off its
core.
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
from benchmarks.figures.peers import llamacpp
from benchmarks.llamacpp.filled import filled, random
from benchmarks.llamacpp.peer import TYPES, Peer, write_model
from kvqjax._timing import alternating_seconds, machine
from kvqjax.cache.accounting import array_bytes
from kvqjax.cache.layout import CacheLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cli.bench import stepping
from kvqjax.cli.output import announce
from kvqjax.model.config import ModelConfig
from kvqjax.model.weight_trees import init_params, switched
from kvqjax.step.forward import forward
from kvqjax.step.prompt import prefill

CONFIG = ModelConfig(
    vocab_size=1024, width=768, mlp_width=2048, num_layers=8, num_heads=12, num_kv_heads=4, head_dim=64,
    max_position=2**17,
)  # fmt: skip
MODELS = ("random", "smollm2")
CACHES = (
    "exact",
    "kivi:bits=4,group=128",
    "kivi:bits=2,group=128",
    "higgs:bits=2",
    "kvquant:bits=3,outliers=0.0",
    "commvq:bits=1",
    "xquant:bits=2",
)
# 192 channels: groups of 64 at most
REAL = (
    "exact",
    "kivi:bits=4,group=64",
    "kivi:bits=2,group=64",
    "higgs:bits=2",
    "klt:bits=2.0",
    "klt:bits=2.25,heads=own",
)
PROMPTED = ("exact", "kivi:bits=2,group=128", "kivi:bits=2,group=64")
CHUNK = 512
STEPS = 8


def opened(name: str) -> kvq.Model:
    """The model, its layers as a CPU has them by default."""
    if name == "smollm2":
        return kvq.load(name, dtype="float32")
    return kvq.Model(
        params=switched(init_params(jax.random.key(0), CONFIG)), constants=(), config=CONFIG
    )


def agree(model: kvq.Model, peer: Peer) -> float:
    """The largest difference of both logits behind a short text, over the largest logit."""
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, 24)
    peer.feed(ids, 0)
    peer_logits = peer.logits(model.config.vocab_size)
    our_logits, _ = prefill(
        model, jnp.asarray(ids[None]), jnp.array([len(ids)]), kvq.init_cache(model, "exact", 1, 32)
    )
    return float(
        np.abs(np.asarray(our_logits[0], np.float32) - peer_logits).max()
        / np.abs(peer_logits).max()
    )


def models(model: kvq.Model, caches: tuple[str, ...]) -> dict[str, kvq.Model]:
    """The model for each cache. The method's constants are random: no step's time depends on
    them."""
    model_of = {}
    for text in caches:
        layout = CacheLayout(
            shape=model.config.kv_shape, method=kvq.parse(text), capacity=1024, dtype="float32"
        )
        shapes = tuple(run.wiring.constants(run.count, layout.dtype) for run in runs_of(layout))
        model_of[text] = model.replace(constants=jax.tree.map(random, shapes))
    return model_of


def reading(params: dict) -> Callable:
    """Make a function that reads all weights STEPS times and only adds them up."""
    total = jax.jit(lambda tree: sum(x.sum() for x in jax.tree.leaves(tree)))
    return lambda: [total(params) for _ in range(STEPS)]


def in_turn(calls: dict[str, Callable], rounds: int, inner: int = 1) -> dict[str, float]:
    """Median milliseconds of each call in the rounds."""
    spent = alternating_seconds(list(calls.values()), rounds)
    return {
        name: 1e3 * float(np.median(times)) / inner
        for name, times in zip(calls, spent, strict=True)
    }


def row_of(times: dict[str, float], **about) -> dict:
    """A row of the record: a cache's milliseconds, the exact cache's and llama.cpp's in the same
    rounds."""
    return about | {
        "ms": times["own"],
        "exact": times["exact"],
        "peers": {n: times[n] for n in TYPES if n in times},
    }


def step_rows(model_of: dict, caches: list[str], path: Path, tokens: int, options):
    """Decode steps behind `tokens` cached ones, cache by cache."""
    peers = {
        kind: Peer(path, kind, tokens + 512, options.threads, tokens // 512 + 1) for kind in TYPES
    }
    peer_calls = {kind: peer.steps(tokens, STEPS) for kind, peer in peers.items()}
    for name in caches:
        announce(f"steps behind {tokens} tokens: {name}")
        calls, room = {}, STEPS * (options.rounds + 1)
        for kind, text in {"exact": "exact", "own": name}.items():
            cache = filled(model_of[text], text, tokens, room)
            size = array_bytes(cache)
            calls[kind] = stepping(model_of[text], cache, STEPS)
        times = in_turn(
            calls | peer_calls | {"weights": reading(model_of[name].params)}, options.rounds, STEPS
        )
        yield row_of(
            times, kind="step", tokens=tokens, cache=name, bytes=size, read=times["weights"]
        )
    for peer in peers.values():
        peer.close()


def prompt_rows(model_of: dict, caches: list[str], path: Path, tokens: int, options):
    """A whole prompt up to the first new token: at once, in chunks through the cache, and
    llama.cpp's."""
    ids = np.random.default_rng(2).integers(0, model_of["exact"].config.vocab_size, tokens)
    prefill_once, counts = (
        jax.jit(prefill, donate_argnames="cache"),
        jnp.full((1,), tokens, jnp.int32),
    )
    through = jax.jit(lambda *options: forward(*options, last=True), donate_argnums=3)

    def at_once(name):
        model = model_of[name]
        return lambda: prefill_once(
            model, jnp.asarray(ids[None]), counts, kvq.init_cache(model, name, 1, tokens)
        )[0]

    def in_chunks(name):
        def run():
            cache, counts_of_chunk = (
                kvq.init_cache(model_of[name], name, 1, tokens),
                jnp.full((1,), CHUNK, jnp.int32),
            )
            for start in range(0, tokens, CHUNK):
                out, cache = through(
                    model_of[name],
                    jnp.asarray(ids[None, start : start + CHUNK]),
                    counts_of_chunk,
                    cache,
                )
            return out

        return run

    peer = Peer(path, "f16", tokens + 512, options.threads)
    for name in caches:
        for kind, make_call in {
            "prompt": at_once,
            f"prompt in chunks of {CHUNK}": in_chunks,
        }.items():
            announce(f"{kind}, {tokens} tokens: {name}")
            calls = {"exact": make_call("exact"), "own": make_call(name), "f16": peer.prompt(ids)}
            yield row_of(
                in_turn(calls, max(1, options.rounds // 3)), kind=kind, tokens=tokens, cache=name
            )
    peer.close()


def missing(
    record: dict, kind: str, tokens: int, caches: tuple[str, ...], named: list[str] | None
) -> list[str]:
    """Those of the caches that are named, else those that the record lacks."""
    recorded = {
        row["cache"]
        for row in record["rows"]
        if row["tokens"] == tokens and row["kind"].startswith(kind)
    }
    return [name for name in caches if (name in named if named else name not in recorded)]


def merged(record: dict, row: dict) -> dict:
    """The record with this row, in the place of the one that measured the same."""

    def is_replaced(old_row):
        return all(old_row[name] == row[name] for name in ("kind", "tokens", "cache"))

    rows = [old_row for old_row in record["rows"] if not is_replaced(old_row)] + [row]
    order = ("step", "prompt", f"prompt in chunks of {CHUNK}")
    names = (*CACHES, *REAL)

    def place(row):
        return (order.index(row["kind"]), row["tokens"], names.index(row["cache"]))

    return record | {"rows": sorted(rows, key=place)}


def begun(out: Path | None, model: kvq.Model, difference: float) -> dict:
    """The record of this machine so far."""
    version = importlib.metadata.version("llama-cpp-python")
    about = {"machine": machine(), "llama-cpp-python": version, "logits": difference, "rows": []}
    about |= {"weights": array_bytes(model.params)}
    if out is None or not out.exists():
        return about
    record = json.loads(out.read_text(encoding="utf-8"))
    if (
        record["machine"]["processor"] != about["machine"]["processor"]
        or record["llama-cpp-python"] != version
    ):
        raise SystemExit(f"{out} is another machine's or version's: move it away")
    return record


def checked(path: Path, model: kvq.Model, threads: int) -> float:
    """How far both logits differ. Raises SystemExit where the models are not the same."""
    peer = Peer(path, "f16", 512, threads)
    difference = agree(model, peer)
    peer.close()
    print(f"logits differ by {difference:.1e} of the largest", flush=True)
    if difference > 0.01:  # llama.cpp keeps keys and values in 16 bits
        raise SystemExit("llama.cpp computes something else")
    return difference


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--only", action="append", help="measure this cache (anew); repeatable")
    parser.add_argument(
        "--tokens", type=int, action="append", help="cached tokens; repeatable; multiples of 512"
    )
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the prompt; 0: none")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, caches = opened(options.model), CACHES if options.model == "random" else REAL
    if options.only and not set(options.only) <= set(caches):
        parser.error(f"--only is one of {', '.join(caches)}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, model.params, model.config)
        record, model_of = (
            begun(options.out, model, checked(path, model, options.threads)),
            models(model, caches),
        )
        groups = [(step_rows, "step", tokens, caches) for tokens in options.tokens or (8192, 32768)]
        prompted = tuple(name for name in caches if name in PROMPTED)
        groups += [(prompt_rows, "prompt", options.prompt, prompted)] if options.prompt else []
        for measure, kind, tokens, names in groups:
            missing_caches = missing(record, kind, tokens, names, options.only)
            for row in (
                measure(model_of, missing_caches, path, tokens, options) if missing_caches else ()
            ):
                record = merged(record, row)
                if options.out:
                    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(llamacpp(record))


if __name__ == "__main__":
    main()
