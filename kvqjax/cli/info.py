"""`kvqjax methods`, `kvqjax inspect` and `kvqjax plan`: what there is, what a folder holds, what a cache would take."""

import inspect as introspect
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvqjax.artifacts import read_arrays, read_description
from kvqjax.catalogue import config_of
from kvqjax.cli.common import Batch, Caches, Json, Mesh, ModelName, methods_of, number
from kvqjax.cli.tables import show, size
from kvqjax.errors import UserError
from kvqjax.methods import METHODS
from kvqjax.methods.roofline import longest_memory_bound, step_cost
from kvqjax.planner import DEVICES, GIB, Device, largest, plan_memory, step_bounds
from kvqjax.sharding import MeshSize

__all__ = ["inspect", "methods", "plan"]


def methods(model: ModelName = "demo", as_json: Json = False) -> None:
    """List the methods: bits per key or value number of a model with every option at its default, what must be given
    to calibrate them, options and defaults."""
    from kvqjax.calibrate import CALIBRATIONS, FROM_WEIGHTS

    config = config_of(model)
    rows: list[dict[str, Any]] = []
    for name, factory in METHODS.items():
        options = {p.name: p.default for p in introspect.signature(factory).parameters.values()}
        about = " ".join((introspect.getdoc(factory) or "").split("\n\n")[0].split())
        needs = "text" if name in CALIBRATIONS else "weights" if name in FROM_WEIGHTS else "nothing"
        bits = plan_memory(config, factory(), 1024, 1, MeshSize()).book.bits_method
        row = {"method": name, "bits": bits, "needs": needs}
        rows.append(row | {"about": about, "options": options})
    if not as_json:
        rows = [r | {"options": ", ".join(f"{k}={v}" for k, v in r["options"].items())} for r in rows]
    show(rows, as_json)


def inspect(folder: Path, as_json: Json = False) -> None:
    """Show what a calibration artifact or a saved cache holds."""
    try:
        kind = json.loads((folder / "description.json").read_text(encoding="utf-8")).get("kind", "")
    except (OSError, ValueError, AttributeError):
        raise UserError(f"{folder}: no readable description.json; not a kvqjax folder") from None
    about = read_description(folder, kind)
    arrays = read_arrays(folder)
    rows = [{"array": n, "shape": list(a.shape), "dtype": str(a.dtype), "bytes": a.nbytes} for n, a in arrays.items()]
    if as_json:
        typer.echo(json.dumps({"description": about, "arrays": rows}, indent=1))
        return
    for key, value in about.items():
        typer.echo(f"{key}: {value}")
    show(rows, False)


def _row(config, method, context: int, batch: int, device: Device | None, mesh: MeshSize) -> dict[str, Any]:
    found = plan_memory(config, method, context, batch, mesh)
    row: dict[str, Any] = {"cache": str(method), "bytes": found.book.bytes, "bytes_exact": found.book.exact_bytes}
    row["bits_stored"] = found.book.bits_stored
    if mesh.devices > 1:
        row["bytes_cache_per_device"] = found.cache
    row |= {"bytes_weights": found.weights, "bytes_constants": found.constants, "bytes_workspace": found.workspace}
    if device is not None:
        memory = device.memory * GIB
        fits = lambda context, batch: plan_memory(config, method, context, batch, mesh).total <= memory  # noqa: E731
        reading, computing = step_bounds(found, config, context, batch, device, mesh)
        row["fits"] = f"{'yes' if found.total <= memory else 'no'} ({size(found.total)} of {device.memory} GiB)"
        row["largest_context"] = largest(lambda n: fits(n, batch), step=1024)
        row["largest_batch"] = largest(lambda n: fits(context, n), most=2**16)
        row["tokens_per_second"] = batch / max(reading, computing)
        hidden = longest_memory_bound(step_cost(method, config), 1e3 * device.tflops / device.bandwidth)
        row["recomputing_hidden_until"] = "always" if hidden == float("inf") else int(hidden)
        row["bound_by"] = "bandwidth" if reading >= computing else "compute"
    return row | {"classes": found.book.by_role()}


def _compiled(config, method, context: int, batch: int, chip: str, mesh: MeshSize) -> dict[str, Any]:
    """The compiler's account of the same decode loop, per device."""
    from kvqjax.aot import compile_decode

    found, made = (
        plan_memory(config, method, context, batch, mesh),
        compile_decode(config, method, context, batch, chip, mesh),
    )
    row: dict[str, Any] = {"bytes_arguments_compiled": made.arguments}
    row["compiled_to_planned"] = made.arguments / (found.weights + found.constants + found.cache)
    row |= {"bytes_temporaries_compiled": made.temporaries, "bytes_cache_copied": made.cache_copied}
    return row | {"compile_seconds": made.seconds}


def plan(
    cache: Caches,
    model: ModelName = "demo",
    context: Annotated[int, number(help="tokens per row")] = 131072,
    batch: Batch = 1,
    device: Annotated[str | None, typer.Option(help=f"one of {', '.join(DEVICES)}")] = None,
    mesh: Mesh = "",
    compile_step: Annotated[bool, typer.Option("--compile", help="compile the decode loop for the device")] = False,
    as_json: Json = False,
) -> None:
    """Bytes of caches, bf16 weights and a decode step's workspace per device; what fits, and time bounds there.

    MODEL is a bundled or known name (llama-3.1-8b), a folder, or a config.json. Tokens per second are bounds: every
    byte read once and every operation at the peak. --compile sets the compiler's bytes beside the plan's: for TPUs it
    needs libtpu, for GPUs JAX's CUDA plugin, and neither chip.
    """
    if device is not None and device not in DEVICES:
        raise UserError(f"--device {device}; known: {', '.join(DEVICES)}")
    if compile_step and device is None:
        raise UserError("--compile needs a --device")
    config, chip, sizes = config_of(model), DEVICES[device] if device else None, MeshSize.parse(mesh)
    rows = [_row(config, method, context, batch, chip, sizes) for method in methods_of(cache)]
    if compile_step and device:
        made = [_compiled(config, method, context, batch, device, sizes) for method in methods_of(cache)]
        rows = [row | more for row, more in zip(rows, made, strict=True)]
    if as_json:
        show(rows, True)
        return
    _print_plan(
        rows,
        f"{model}, {context} tokens x {batch}" + (f", {device}" if device else "") + (f", mesh {mesh}" if mesh else ""),
    )


def _print_plan(rows: list[dict[str, Any]], title: str) -> None:
    """One column per cache: there are more figures than fit a line."""
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name, value in row.items():
            if name == "classes":
                for role, count in value.items():
                    table.setdefault(f"  {role}", {})[row["cache"]] = size(count)
            elif name != "cache":
                table.setdefault(name, {})[row["cache"]] = size(value) if name.startswith("bytes") else value
    names = [row["cache"] for row in rows]
    show([{"": label} | {name: cells.get(name, "") for name in names} for label, cells in table.items()], False, title)
