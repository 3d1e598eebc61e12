"""A decode step or a prompt against the bound: compiled ahead of time and counted; nothing runs.

    python -m benchmarks.step_cost --chip h100 --cache kivi:bits=2,group=128 --context 131072
    python -m benchmarks.step_cost --chip h100 --context 32768 --chunk 0                          a whole prompt
    python -m benchmarks.step_cost --chip v6e --cache kivi:bits=2 --context 32768 --chunk 2048    a chunk after it

A step's bound is what an ideal cache of 16-bit numbers takes: weights once, and every row's keys
and values once, at the chip's bandwidth. `--held 8192` counts rows that hold fewer tokens than fit,
by the static length that `generate` would choose then. A prompt's bound is the matrix unit's peak.
GPUs need JAX's CUDA plugin and ptxas, TPUs libtpu; `make aot` makes environments with both.
"""

import os
from typing import Annotated

import typer

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.compiled_cost.case import AsJson, CacheText, Case, Chip, Dump, Layers, Model, run

app = typer.Typer(add_completion=False)


@app.command()
def main(
    chip: Chip = "h100",
    model: Model = "llama-3.1-8b",
    cache: CacheText = "exact",
    context: Annotated[
        int,
        typer.Option(help="tokens of a row or a prompt, or before a chunk"),
    ] = 131072,
    held: Annotated[
        int | None, typer.Option(min=1, help="tokens that a row holds, if fewer")
    ] = None,
    batch: int = 1,
    chunk: Annotated[
        int | None,
        typer.Option(min=0, help="count a prompt's chunk of so many tokens; 0: a whole prompt"),
    ] = None,
    layers: Layers = "",
    dump: Dump = None,
    as_json: AsJson = False,
) -> None:
    """Compile one decode step, or a prompt, and print its account."""
    if chunk is not None and held is not None:
        raise typer.BadParameter("a prompt has no rows that hold fewer tokens", param_hint="--held")
    run(Case(chip, model, cache, context, batch, filled=held, new=chunk), layers, dump, as_json)


if __name__ == "__main__":
    app()
