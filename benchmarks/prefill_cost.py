"""A prompt against the matrix unit's peak: compiled ahead of time and counted; nothing runs.

    python -m benchmarks.prefill_cost --chip h100 --context 32768                                   a whole prompt
    python -m benchmarks.prefill_cost --chip v6e --cache kivi:bits=2 --context 32768 --chunk 2048   a chunk after it

Chips and compilers are those of benchmarks.step_cost.
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
    context: Annotated[int, typer.Option(help="tokens of the prompt, or before the chunk")] = 32768,
    chunk: Annotated[int, typer.Option(help="tokens of a chunk through the cache; 0: a whole prompt")] = 0,
    layers: Layers = "",
    dump: Dump = None,
    as_json: AsJson = False,
) -> None:
    """Compile one prompt, or a chunk of one, and print its account."""
    run(Case(chip, model, cache, context, new=chunk), layers, dump, as_json)


if __name__ == "__main__":
    app()
