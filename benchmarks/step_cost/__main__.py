"""One decode step against the bound: `generate`'s decode loop compiled ahead of time and counted; nothing runs.

    python -m benchmarks.step_cost --chip h100 --model llama-3.1-8b --cache kivi:bits=2,group=128 --context 131072

GPUs (h100, h200, a100-80, l4 and t4) need JAX's CUDA plugin, TPUs (v5e, v6e, v7x)
libtpu; `make aot` makes environments with both.
`--held 8192` counts rows that hold fewer tokens than fit, through the static length that `generate` would choose then.
benchmarks/records/compiled_costs.csv has what one day's programs cost, as history; no command reads it.
"""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.step_cost.account import ASSUMPTIONS, PARTS
from benchmarks.step_cost.listings import listings
from benchmarks.step_cost.row import CHIPS, Row, measure

app = typer.Typer(add_completion=False)
SMALL = ("l4", "t4")  # chips whose memory is too small for most cases


def report(row: Row, found: dict) -> str:
    """A case's account as lines of text."""
    full, lines = found["full"], [f"{row.chip} {row.model} {row.cache} {row.context} tokens x {row.batch}"]
    named = f"launches, {full['syncs']} host synchronisations" if found["kind"] == "gpu" else "operations"
    lines.append(f"{full['launches']} {named} a step")
    for part in PARTS:
        moved = full["bytes"][part]
        line = f"{part:9} {moved['read'] / 1e9:9.3f} GB read {moved['written'] / 1e9:9.3f} GB written"
        cycles = f", {full['cycles'][part]:.4g} cycles" if "cycles" in full else ""
        least = full["bound_bytes"].get(part)
        beside = f" (bound {least / 1e9:.3f} GB)" if least else " (of the whole bound)"
        lines.append(f"{line}{cycles}, {full[f'{part}_over_bound']:.3f} x{beside}")
    lines.append(f"bytes {full['bytes_over_bound']:.3f} x the bound")
    for name in [name for name in ("full", "ragged") if name in found]:
        one = found[name]
        times = (
            f"{one['estimated_ms']:.3f} ms, of which encoding {one['encoding_ms']:.3f}; bound {one['bound_ms']:.3f} ms"
        )
        lines.append(f"rows {name}: estimated {times}: {one['time_over_bound']:.2f} x")
    lines.append(f"cache {found['cache_gb']} GB, temporaries {found['temp_gb']} GB, compiled in {found['compile_s']} s")
    lines += [f"not computed, so counted once or at its costliest: {name}" for name in full["unsure"]]
    lines += [f"assumed: {text}" for text in (*ASSUMPTIONS[found["kind"]], *ASSUMPTIONS["both"])]
    return "\n".join(lines)


@app.command()
def main(
    chip: Annotated[str, typer.Option(help="h100, h200, a100-80, l4, t4, v5e, v6e or v7x")] = "h100",
    model: Annotated[str, typer.Option(help="a name, folder or config.json")] = "llama-3.1-8b",
    cache: Annotated[str, typer.Option(help="a method, as everywhere")] = "exact",
    context: Annotated[int, typer.Option(help="tokens a row holds, which is its capacity too")] = 131072,
    held: Annotated[int | None, typer.Option(min=1, help="tokens a row holds, if fewer than the context")] = None,
    batch: int = 1,
    layers: Annotated[str, typer.Option(help="two depths: compile those and extrapolate")] = "",
    dump: Annotated[Path | None, typer.Option(help="write the compiled program here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one line of JSON")] = False,
) -> None:
    """Compile one case and print its account."""
    if chip not in (*CHIPS, *SMALL):
        raise typer.BadParameter(f"{chip}; known: {', '.join((*CHIPS, *SMALL))}", param_hint="--chip")
    if held is not None and held > context:
        raise typer.BadParameter(f"{held} is more than the context, {context}", param_hint="--held")
    row = Row(chip, model, cache, context, batch)
    depths = tuple(int(n) for n in layers.split(",") if n)
    with listings(row.is_tpu) as folder:
        found = measure(row, folder, depths, dump, held)
    typer.echo(json.dumps(row._asdict() | found["full"] | found) if as_json else report(row, found))


if __name__ == "__main__":
    app()
