"""Seconds to compile decode and prefill programs of every method: Llama-3.1-8B's geometry, bfloat16.

    python -m benchmarks.compile_times [--chip v5p|cpu] [--layers 80] [--methods SPEC ...] [--context 131072] [--write]

`decode` is the loop of `generate`, `prefill` the exact prefill of 4096 tokens. Wall and processor seconds are those of
XLA alone, without tracing. For TPU chips libtpu compiles ahead of time. `--write` renews
benchmarks/records/compile_times.json.
"""

import argparse
import dataclasses
import json
import os
import time
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp

from kvqjax.generation.loop import decode_steps
from kvqjax.hardware.aot import decode_arguments
from kvqjax.hardware.chips import chip_devices
from kvqjax.hardware.planner import ALONE
from kvqjax.methods import parse
from kvqjax.model.loading import config_of
from kvqjax.parallel.sharding import rules_for
from kvqjax.step.prompt import prefill

RECORD = Path(__file__).parent / "records" / "compile_times.json"
METHODS = (
    "exact",
    "kivi:bits=2",
    "kvquant:bits=2",
    "higgs:bits=2",
    "aqua:bits=2",
    "commvq:bits=1",
    "xquant:bits=2",
    "xquant_cl:bits=2",
)
PROMPT = 4096
LAYERS = 32  # of the model itself


def timed(lowered) -> dict[str, float]:
    wall, processor = time.perf_counter(), time.process_time()
    lowered.compile()
    return {"wall": round(time.perf_counter() - wall, 1), "processor": round(time.process_time() - processor, 1)}


def measure(spec: str, chip: str, context: int, layers: int) -> dict:
    config, method = dataclasses.replace(config_of("llama-3.1-8b"), num_layers=layers), parse(spec)
    devices = jax.devices()[:1] if chip == "cpu" else chip_devices(chip)
    rules = rules_for(config, method, ALONE, devices)
    model, state, *arguments = decode_arguments(config, method, context, 1, rules, chip)
    tokens, counts = (jax.ShapeDtypeStruct(s, jnp.int32, sharding=rules.everywhere) for s in ((1, PROMPT), (1,)))
    filling = jax.jit(prefill, donate_argnames="cache").lower(model, tokens, counts, state.cache)
    return {"decode": timed(decode_steps.lower(model, state, *arguments)), "prefill": timed(filling)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", default="v5p")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for spec in options.methods:
        times = measure(spec, options.chip, options.context, options.layers)
        times |= {"cores": len(os.sched_getaffinity(0)), "jax": metadata.version("jax")}
        key = options.chip if options.layers == LAYERS else f"{options.chip}, {options.layers} layers"
        print(json.dumps({"chip": key, "method": spec, **times}), flush=True)
        record.setdefault(key, {})[spec] = times
        if options.write:
            RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
