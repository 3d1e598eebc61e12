"""A decode step of `demo` with our caches and with transformers' QuantizedCache (quanto, hqq), in
one run on the CPU.

    pip install torch==2.13.0 optimum-quanto hqq    # in an environment of its own: hqq makes imports warn
    python benchmarks/decode_quantized.py [--context 8192] [--threads 2] [--out FILE]

Every cache first gets `context` random keys and values (normal, with an offset per channel) a
layer. float32 weights, one row, greedy steps of one token. After a warm-up all caches are timed in
turn, round after round: medians of the rounds, and of each round's ratios. transformers quantises
anew when its 128 recent tokens are full: no such step falls into its timings here, while ours flush
as they do. The last rows are one layer's attention at 32 times 1024 tokens: KIVI at 2 bits through
its blockwise reference against our exact cache.
"""

import argparse
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import kvqjax as kvq
from kvqjax._timing import alternating_seconds, machine
from kvqjax.cli.bench import decoding
from kvqjax.model.config import ModelConfig
from kvqjax.model.loading import locate
from kvqjax.model.weight_trees import init_params

# KIVI's groups of 32, and of 64 as transformers' caches have by default.
OURS = ("exact", "kivi:bits=4", "kivi:bits=2", "kivi:bits=4,group=64", "kivi:bits=2,group=64")
THEIRS = (("quanto", 4), ("quanto", 2), ("hqq", 4), ("hqq", 2))
# Little else than attention: one layer, 32 query and 8 KV heads of 128.
ATTENTION = ModelConfig(
    vocab_size=128,
    width=256,
    mlp_width=128,
    num_layers=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)


def transformers_steps(backend: str, bits: int, context: int, steps: int) -> Callable[[], None]:
    """Make a function that decodes `steps` tokens with transformers' torch model on its own
    quantised cache."""
    import torch
    from transformers import AutoModelForCausalLM, QuantizedCache

    model = AutoModelForCausalLM.from_pretrained(str(locate("demo")), dtype=torch.float32)
    config, rng = model.config, np.random.default_rng(0)
    cache = QuantizedCache(backend, config, nbits=bits)
    dim = config.head_dim
    for layer in range(config.num_hidden_layers):
        offset = rng.normal(size=(config.num_key_value_heads, 1, dim))
        filled = (
            rng.normal(size=(1, config.num_key_value_heads, context, dim)) + offset
            for _ in range(2)
        )
        cache.update(*(torch.tensor(x, dtype=torch.float32) for x in filled), layer)
    token = torch.ones((1, 1), dtype=torch.long)

    @torch.no_grad()
    def run():
        for _ in range(steps):
            model(token, past_key_values=cache, use_cache=True)

    return run


def timed(calls: dict[str, Callable], options) -> dict[str, np.ndarray]:
    """Milliseconds of a step in every round."""
    rounds = alternating_seconds(list(calls.values()), options.repeats)
    return {
        name: 1e3 * np.asarray(spent) / options.steps
        for name, spent in zip(calls, rounds, strict=True)
    }


def decode_rows(options) -> list[dict]:
    loaded = kvq.load("demo", dtype="f32")
    shape = (options.context, 1, options.steps, options.repeats + 1)
    calls = {text: decoding(loaded, kvq.parse(text), *shape)[1] for text in OURS}
    calls |= {pair: transformers_steps(*pair, options.context, options.steps) for pair in THEIRS}
    spent = timed(calls, options)
    rows = [{"cache": text, "ms_per_step": float(np.median(spent[text]))} for text in OURS]
    for backend, bits in THEIRS:
        times = spent[backend, bits]
        row = {
            "cache": f"transformers, {backend} {bits} bits",
            "ms_per_step": float(np.median(times)),
        }
        for name, group in (("ours_faster", ""), ("ours_faster_groups_of_64", ",group=64")):
            row[name] = float(np.median(times / spent[f"kivi:bits={bits}{group}"]))
        rows.append(row)
    return rows


def attention_rows(options) -> list[dict]:
    model = kvq.Model(
        params=init_params(jax.random.key(0), ATTENTION), constants=(), config=ATTENTION
    )
    shape = (4 * options.context, 1, options.steps, options.repeats + 1)
    texts = ("exact", "kivi:bits=2,group=128,window=0")
    spent = timed({text: decoding(model, kvq.parse(text), *shape)[1] for text in texts}, options)
    return [
        {
            "cache": f"one layer, {4 * options.context} tokens: {text}",
            "ms_per_step": float(np.median(spent[text])),
            "speed_against_exact": float(np.median(spent["exact"] / spent[text])),
        }
        for text in texts
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (
        ("context", 8192),
        ("steps", 8),
        ("repeats", 11),
        ("threads", os.cpu_count()),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(options.threads)
    rows = decode_rows(options) + attention_rows(options)
    table = Table(
        "cache",
        "ms per step",
        "KIVI at its bits faster by",
        "in groups of 64",
        "speed against exact",
    )
    for row in rows:
        keys = ("ours_faster", "ours_faster_groups_of_64", "speed_against_exact")
        cells = (f"{row[key]:.2f}" if key in row else "" for key in keys)
        table.add_row(row["cache"], f"{row['ms_per_step']:.2f}", *cells)
    Console(width=120).print(table)
    if options.out:
        options.out.write_text(
            json.dumps({"machine": machine(), "context": options.context, "rows": rows}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
