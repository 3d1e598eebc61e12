"""One decode step against the bound: `generate`'s decode loop compiled ahead of time and counted; nothing runs.

    python -m benchmarks.step_cost --chip h100 --cache kivi:bits=2,group=128 --context 131072

The bound is what an ideal cache of 16-bit numbers takes: weights once, and every row's keys and values once, at the
chip's bandwidth. GPUs need JAX's CUDA plugin and ptxas, TPUs libtpu; `make aot` makes environments with both.
"""

import os

import typer

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.compiled_cost.case import AsJson, CacheText, Case, Chip, Dump, Layers, Model, run

app = typer.Typer(add_completion=False)


@app.command()
def main(
    chip: Chip = "h100",
    model: Model = "llama-3.1-8b",
    cache: CacheText = "exact",
    context: int = 131072,
    batch: int = 1,
    layers: Layers = "",
    dump: Dump = None,
    as_json: AsJson = False,
) -> None:
    """Compile one decode step of full rows and print its account."""
    run(Case(chip, model, cache, context, batch), layers, dump, as_json)


if __name__ == "__main__":
    app()
