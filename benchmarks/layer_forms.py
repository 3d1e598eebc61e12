"""A decode step with the layers in each of their forms: `python -m benchmarks.layer_forms [--model smollm2]`.

Milliseconds of a step of one row, and the seconds until its program has compiled and run for the first time. The forms
are those of `kvqjax.load(layers=)` (kvqjax/model/weight_trees.py). Nothing else may run on the machine.
"""

import argparse
import time

import kvqjax as kvq
from benchmarks.tables import table
from kvqjax._timing import median_seconds
from kvqjax.cli.bench import decoding
from kvqjax.model.weight_trees import FORMS

CACHES = ("exact", "kivi:bits=4,group=64")
STEPS, REPEATS = 8, 5  # steps of a call, and timed calls


def measure(model: kvq.Model, cache: str, tokens: int) -> tuple[float, float]:
    """Seconds of the first call, which compiles, and milliseconds of a step behind `tokens` cached tokens."""
    _, run = decoding(model, kvq.parse(cache), tokens, 1, STEPS, REPEATS + 2)
    begun = time.perf_counter()
    run().block_until_ready()
    first = time.perf_counter() - begun
    return first, 1e3 * median_seconds(run, REPEATS) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=512, help="cached tokens; a multiple of 512")
    options, rows = parser.parse_args(), []
    for form in FORMS:
        model = kvq.load(options.model, layers=form)
        for cache in CACHES:
            first, step = measure(model, cache, options.tokens)
            rows.append([form, f"`{cache}`", f"{step:.1f}", f"{first:.1f}"])
    print(table(["layers", "cache", "ms a step", "first call, s"], rows))


if __name__ == "__main__":
    main()
