"""A prompt against the matrix unit's peak: compiled ahead of time and counted; nothing runs.

    python -m benchmarks.prefill_cost --chip h100 --context 32768                            a whole prompt, exactly
    python -m benchmarks.prefill_cost --chip v6e --cache kivi:bits=2 --context 32768 --chunk 2048       a chunk after it

Chips and compilers are those of benchmarks.step_cost.
"""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.prefill_cost.account import ASSUMPTIONS, FLASH, shared
from benchmarks.prefill_cost.row import Row, measure
from benchmarks.step_cost.listings import listings
from benchmarks.step_cost.row import CHIPS

app = typer.Typer(add_completion=False)


def report(row: Row, found: dict) -> str:
    """A row's account as lines of text."""
    what = f"a chunk of {row.chunk} after {row.context} tokens" if row.chunk else f"{row.context} tokens at once"
    lines = [f"{row.chip} {row.model} {row.cache}: {what}"]
    lines.append(f"{found['launches']:.0f} launches, {found['syncs']:.0f} host synchronisations")
    for part, moved in found["gigabytes"].items():
        cycles = f", {found['work'][part]:.4g} cycles" if found["kind"] == "tpu" else f", {moved:.1f} GB"
        lines.append(f"{part:9} {1e3 * found['seconds'][part]:9.1f} ms{cycles}")
    if found["kind"] == "gpu":
        times = found["gigabytes"]["attention"] / found["flash_gigabytes"]
        lines.append(f"attention moves {times:.1f} times what flash attention in blocks of {FLASH} queries moves")
    lines += [f"{name:24} {shared(one, row.chip)}" for name, one in found["products"].items()]
    lines.append(
        f"estimated {found['estimated_s']:.3f} s, bound {found['bound_s']:.3f} s: {found['share_of_peak']:.1%} of peak"
    )
    lines.append(f"beside the arguments {found['peak_gb']:.2f} GB, compiled in {found['compile_s']:.0f} s")
    lines += [f"not computed, so counted once or at its costliest: {name}" for name in found["unsure"]]
    return "\n".join(lines + [f"assumed: {text}" for text in ASSUMPTIONS[found["kind"]]])


@app.command()
def main(
    chip: Annotated[str, typer.Option(help="h100, h200, a100-80, v5e, v6e or v7x")] = "h100",
    model: Annotated[str, typer.Option(help="a name, folder or config.json")] = "llama-3.1-8b",
    cache: Annotated[str, typer.Option(help="a method, as everywhere")] = "exact",
    context: Annotated[int, typer.Option(help="tokens of the prompt, or before the chunk")] = 32768,
    chunk: Annotated[int, typer.Option(help="tokens of a chunk through the cache; 0: a whole prompt")] = 0,
    layers: Annotated[str, typer.Option(help="two depths: compile those and extrapolate")] = "",
    dump: Annotated[Path | None, typer.Option(help="write the compiled program here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one line of JSON")] = False,
) -> None:
    """Compile one row and print its account."""
    if chip not in CHIPS:
        raise typer.BadParameter(f"{chip}; known: {', '.join(CHIPS)}", param_hint="--chip")
    row, depths = Row(chip, model, cache, context, chunk), tuple(int(n) for n in layers.split(",") if n)
    with listings(row.step.is_tpu) as folder:
        found = measure(row, folder, depths, dump)
    typer.echo(json.dumps(row._asdict() | found) if as_json else report(row, found))


if __name__ == "__main__":
    app()
