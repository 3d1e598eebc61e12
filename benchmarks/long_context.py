"""Decode steps at a long context, in a real model's geometry with random weights: the cache is filled by appending
random keys and values (no prompt attention), then steps are timed and the device's peak of bytes is read.

    python benchmarks/long_context.py [--model llama-3.1-8b] [--layers 32] [--tokens 1048576] [--cache kivi:bits=2]
        [--dtype bfloat16] [--out benchmarks/records/long_context.json]

The defaults fit a GPU of 80 GB; on two CPU cores take `--layers 2 --dtype float32`. `planned` is what `kvqjax plan`
promises for weights, cache and workspace. Where a device does not tell its peak, the process's own stands in for it
(`peak_of` says which).
"""

import argparse
import dataclasses
import functools
import json
import resource
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import kvqjax as kvq
from kvqjax._timing import machine, median_seconds
from kvqjax.cli.bench import decoding
from kvqjax.hardware.planner import parameter_shapes, plan_memory
from kvqjax.model.catalogue import config_of


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _weight(key, shape: tuple[int, ...], dtype) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * shape[-2] ** -0.5


def random_model(name: str, layers: int, dtype: str) -> kvq.Model:
    """The first `layers` layers of a known geometry with random weights, made one array after the other: all at once
    would need room for several."""
    config = config_of(name)
    config = dataclasses.replace(config, num_layers=layers)
    keys = iter(jax.random.split(jax.random.key(0), 64))

    def array(path, shaped):
        norm = "norm" in jax.tree_util.keystr(path)
        made = jnp.ones(shaped.shape, shaped.dtype) if norm else _weight(next(keys), shaped.shape, shaped.dtype)
        return jax.block_until_ready(made)

    params = jax.tree_util.tree_map_with_path(array, parameter_shapes(config, dtype))
    return kvq.Model(params=params, constants=(), config=config)


def peak_bytes() -> tuple[int, str]:
    """The most bytes that were in use so far, and of what."""
    found = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in found:
        return found["peak_bytes_in_use"], "device"
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "process"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--cache", default="kivi:bits=2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, method = random_model(options.model, options.layers, options.dtype), kvq.parse(options.cache)
    begun = time.perf_counter()
    size, run = decoding(model, method, options.tokens, 1, options.steps, options.repeats + 2)
    jax.block_until_ready(run())  # nothing waits for the fill before a step does
    filled = time.perf_counter() - begun
    seconds = median_seconds(run, options.repeats) / options.steps
    peak, of = peak_bytes()
    planned = plan_memory(model.config, method, options.tokens, 1, dtype=options.dtype)
    row = {
        "model": f"{options.model}, {options.layers} layers, random weights in {options.dtype}",
        "cache": str(method),
        "tokens": options.tokens,
        "weight_bytes": sum(x.nbytes for x in jax.tree.leaves(model.params)),
        "cache_bytes": size,
        "planned_bytes": planned.total,
        "peak_bytes": peak,
        "peak_of": of,
        "fill_seconds": round(filled, 1),
        "ms_per_step": round(1e3 * seconds, 2),
        "about": machine(),
    }
    text = json.dumps(row, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
