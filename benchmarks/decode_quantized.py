"""A decode step of `demo` with our caches and with transformers' QuantizedCache (quanto, hqq), in one run on the CPU.

    pip install torch==2.13.0 optimum-quanto hqq    # in an environment of its own: hqq makes imports warn
    python benchmarks/decode_quantized.py [--context 8192] [--threads 2] [--out FILE]

Every cache first gets `context` random keys and values (normal, with an offset per channel) a layer. float32 weights,
one row, greedy steps of one token; medians of several timings after a warm-up. transformers quantises anew when its 128
recent tokens are full: no such step falls into its timings here, while ours flush as they do. The last rows are one
layer's attention at 32 times 1024 tokens: KIVI at 2 bits through its blockwise reference against our exact cache.
"""

import argparse
import json
import os
import statistics
import time
import warnings
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import kvqjax as kvq
from kvqjax.cli.bench import step_milliseconds
from kvqjax.config import ModelConfig
from kvqjax.decoder import init_params
from kvqjax.model import locate
from kvqjax.timing import machine

# KIVI's groups of 32, and of 64 as transformers' caches have by default.
OURS = ("exact", "kivi:bits=4", "kivi:bits=2", "kivi:bits=4,group=64", "kivi:bits=2,group=64")
THEIRS = (("quanto", 4), ("quanto", 2), ("hqq", 4), ("hqq", 2))
# Little else than attention: one layer, 32 query and 8 KV heads of 128.
ATTENTION = ModelConfig(
    vocab_size=128, width=256, mlp_width=128, num_layers=1, num_heads=32, num_kv_heads=8, head_dim=128
)


def their_milliseconds(backend: str, bits: int, context: int, steps: int, repeats: int) -> float:
    """Median milliseconds of a step of transformers' torch model on its own quantised cache."""
    import torch
    from transformers import AutoModelForCausalLM, QuantizedCache

    model = AutoModelForCausalLM.from_pretrained(str(locate("demo")), dtype=torch.float32)
    config, rng = model.config, np.random.default_rng(0)
    cache = QuantizedCache(backend, config, nbits=bits)
    dim = config.head_dim
    for layer in range(config.num_hidden_layers):
        offset = rng.normal(size=(config.num_key_value_heads, 1, dim))
        filled = (rng.normal(size=(1, config.num_key_value_heads, context, dim)) + offset for _ in range(2))
        cache.update(*(torch.tensor(x, dtype=torch.float32) for x in filled), layer)
    times, token = [], torch.ones((1, 1), dtype=torch.long)
    with torch.no_grad():
        for _ in range(repeats + 1):
            start = time.perf_counter()
            for _ in range(steps):
                model(token, past_key_values=cache, use_cache=True)
            times.append((time.perf_counter() - start) / steps)
    return 1e3 * statistics.median(times[1:])


def attention_rows(options) -> list[dict]:
    model = kvq.Model(params=init_params(jax.random.key(0), ATTENTION), constants=(), config=ATTENTION)
    rows = []
    for text in ("exact", "kivi:bits=2,group=128,window=0"):
        spent = step_milliseconds(model, kvq.parse(text), 4 * options.context, 1, options.steps, options.repeats)[1]
        rows.append({"cache": f"one layer, {4 * options.context} tokens: {text}", "ms_per_step": spent})
    return [row | {"speed_against_exact": rows[0]["ms_per_step"] / row["ms_per_step"]} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("context", 8192), ("steps", 16), ("repeats", 5), ("threads", os.cpu_count())):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(options.threads)
    loaded, rows = kvq.load("demo", dtype="f32"), []
    for text in OURS:
        spent = step_milliseconds(loaded, kvq.parse(text), options.context, 1, options.steps, options.repeats)[1]
        rows.append({"cache": text, "ms_per_step": spent})
    for backend, bits in THEIRS:
        spent = their_milliseconds(backend, bits, options.context, options.steps, options.repeats)
        ours = {row["cache"]: row["ms_per_step"] for row in rows}
        faster = {"ours_faster": spent / ours[f"kivi:bits={bits}"]}
        faster["ours_faster_groups_of_64"] = spent / ours[f"kivi:bits={bits},group=64"]
        rows.append({"cache": f"transformers, {backend} {bits} bits", "ms_per_step": spent, **faster})
    rows += attention_rows(options)
    table = Table("cache", "ms per step", "KIVI at its bits faster by", "in groups of 64", "speed against exact")
    for row in rows:
        keys = ("ours_faster", "ours_faster_groups_of_64", "speed_against_exact")
        cells = (f"{row[key]:.2f}" if key in row else "" for key in keys)
        table.add_row(row["cache"], f"{row['ms_per_step']:.2f}", *cells)
    Console(width=120).print(table)
    if options.out:
        options.out.write_text(
            json.dumps({"machine": machine(), "context": options.context, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
