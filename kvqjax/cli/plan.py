"""`kvqjax plan`: what caches would take on a device, what fits there, and how fast it can be at best."""

import functools
from typing import Annotated, Any

import typer

from kvqjax._errors import UserError
from kvqjax.cache.cache_layout import stored_form
from kvqjax.cli.common import Batch, Caches, Json, Mesh, ModelName, methods_of, number
from kvqjax.cli.tables import cell, fits, show, size, table, terminal_width
from kvqjax.hardware.chips import target_name
from kvqjax.hardware.planner import (
    DEVICES,
    GIB,
    Device,
    Plan,
    headroom,
    largest,
    plan_memory,
    step_bounds,
)
from kvqjax.hardware.prompts import estimated_seconds, prompt_operations
from kvqjax.methods import Method
from kvqjax.methods.roofline import longest_memory_bound, step_cost
from kvqjax.model.catalogue import config_of
from kvqjax.model.config import ModelConfig
from kvqjax.parallel.mesh_size import MeshSize

__all__ = ["plan"]

COMPARED = ("exact", "kivi:bits=4", "kivi:bits=2", "kvquant:bits=3")  # where no --cache is named

# What a figure is called in the table; in JSON it keeps its name.
WORDS = {
    "fits": "fits",
    "bytes": "whole cache",
    "bytes_exact": "exact cache",
    "bits_stored": "bits per number",
    "bytes_cache_per_device": "cache on each device",
    "bytes_weights": "weights",
    "bytes_constants": "constants",
    "bytes_workspace": "workspace",
    "reason": "why",
    "largest_context": "longest context",
    "context_limited_by": "limited by",
    "largest_batch": "most rows",
    "tokens_per_second": "tokens a second, at most",
    "seconds_to_first_token": "seconds to the first token, at least",
    "seconds_to_first_token_estimated": "seconds to the first token, estimated",
    "recomputing_hidden_until": "recomputing costs no time up to",
    "bound_by": "speed limited by",
    "bytes_arguments_compiled": "compiled: arguments",
    "compiled_to_planned": "compiled to planned",
    "bytes_temporaries_compiled": "compiled: temporaries",
    "bytes_cache_copied": "compiled: cache copied",
    "compile_seconds": "seconds to compile",
    "kernels": "compiled with",
}


def _fit(total: int, device: Device) -> dict[str, Any]:
    """Whether a plan fits, and why."""
    verdict, spare = headroom(total, device), device.memory * GIB - total
    room = f"{size(total)} of {device.memory} GiB"
    if verdict == "no":
        return {"fits": False, "reason": f"{room}: {size(-spare)} too much"}
    return {"fits": True, "reason": f"{'tight: ' if verdict == 'tight' else ''}{room}, {size(spare)} to spare"}


def _limits(config: ModelConfig, context: int, batch: int, device: Device, planned) -> dict[str, Any]:
    """The longest context that fits, no longer than the model can see; and the most rows. `planned(context, batch)` is
    a Plan."""
    enough = lambda context, batch: headroom(planned(context, batch).total, device) != "no"  # noqa: E731
    whole = enough(config.max_position, batch)
    longest = config.max_position if whole else largest(lambda n: enough(n, batch), 1024, config.max_position)
    limits = {"largest_context": longest, "context_limited_by": "the model" if whole else "memory"}
    return limits | {"largest_batch": largest(lambda n: enough(context, n), most=2**16)}


def _speed(found: Plan, config, method: Method, context: int, batch: int, device: Device, mesh) -> dict[str, Any]:
    """Bounds on the speed, and up to which context it costs no time to compute keys and values anew."""
    reading, computing = step_bounds(found, config, context, batch, device, mesh)
    hidden = longest_memory_bound(step_cost(method, config), 1e3 * device.tflops / device.bandwidth)
    return {
        "tokens_per_second": batch / max(reading, computing),
        "recomputing_hidden_until": "always" if hidden == float("inf") else int(hidden),
        "bound_by": "bandwidth" if reading >= computing else "compute",
    }


def _first_token(config: ModelConfig, context: int, batch: int, chip: str, mesh: MeshSize) -> dict[str, float]:
    """What prompts of a whole context take: at least, every operation once at the peak of all devices; and on one chip
    as compiled prompts were counted."""
    least = batch * prompt_operations(config, 0, context) / (DEVICES[chip].tflops * 1e12 * mesh.devices)
    estimated = estimated_seconds(config, context, batch, chip) if mesh.devices == 1 else None
    more = {} if estimated is None else {"seconds_to_first_token_estimated": estimated}
    return {"seconds_to_first_token": least} | more


def _form(chip: str | None) -> str:
    """How bodies are stored on a chip of `DEVICES`."""
    return stored_form(target_name(chip)) if chip else "planes"


def _row(config, method: Method, context: int, batch: int, chip: str | None, mesh: MeshSize) -> dict[str, Any]:
    planned = functools.partial(plan_memory, config, method, mesh=mesh, form=_form(chip))
    found = planned(context, batch)
    row: dict[str, Any] = {"cache": str(method), "bytes": found.book.bytes, "bytes_exact": found.book.exact_bytes}
    row["bits_stored"] = found.book.bits_stored
    if mesh.devices > 1:
        row["bytes_cache_per_device"] = found.cache
    row |= {"bytes_weights": found.weights, "bytes_constants": found.constants, "bytes_workspace": found.workspace}
    if chip is not None:
        device = DEVICES[chip]
        row |= _fit(found.total, device) | _limits(config, context, batch, device, planned)
        row |= _speed(found, config, method, context, batch, device, mesh)
        row |= _first_token(config, context, batch, chip, mesh)
    return row | {"beyond_model": context > config.max_position, "classes": found.book.by_role()}


def _compiled(config, method, context: int, batch: int, chip: str, mesh: MeshSize) -> dict[str, Any]:
    """The compiler's account of the same decode loop, per device."""
    from kvqjax.hardware.aot import compile_decode, layout_for

    found = plan_memory(config, method, context, batch, mesh, form=_form(chip))
    made = compile_decode(config, method, context, batch, chip, mesh)
    row: dict[str, Any] = {"bytes_arguments_compiled": made.arguments}
    row["compiled_to_planned"] = made.arguments / (found.weights + found.constants + found.cache)
    row |= {"bytes_temporaries_compiled": made.temporaries, "bytes_cache_copied": made.cache_copied}
    layout = layout_for(config, method, context, chip)
    return row | {"compile_seconds": made.seconds, "kernels": layout.kernels.text(layout.target)}


def plan(
    cache: Caches = [],  # noqa: B006
    model: ModelName = "demo",
    context: Annotated[int, number(help="tokens per row")] = 131072,
    batch: Batch = 1,
    device: Annotated[str | None, typer.Option(help=f"one of {', '.join(DEVICES)}")] = None,
    mesh: Mesh = "",
    compile_step: Annotated[bool, typer.Option("--compile", help="compile the decode loop for the device")] = False,
    as_json: Json = False,
) -> None:
    """Memory of caches, bf16 weights and one decode step on each device; what fits, and how fast it can be at best.

    MODEL is a bundled or known name (llama-3.1-8b), a folder, or a config.json. Without --cache a few methods are
    compared. "tight" fits with less than a twentieth of the device to spare. Tokens a second are bounds: every byte
    read once and every operation at the peak. So are seconds to the first token; chips whose programs were
    compiled have an estimate beside them. --compile sets the compiler's bytes beside the plan's: for TPUs it needs
    libtpu, for GPUs JAX's CUDA plugin, and neither chip.
    """
    if device is not None and device not in DEVICES:
        raise UserError(f"--device {device}; known: {', '.join(DEVICES)}")
    if compile_step and device is None:
        raise UserError("--compile needs a --device")
    config, sizes = config_of(model), MeshSize.parse(mesh)
    chosen = methods_of(cache or COMPARED)
    rows = [_row(config, method, context, batch, device, sizes) for method in chosen]
    if compile_step and device:
        made = [_compiled(config, method, context, batch, device, sizes) for method in chosen]
        rows = [row | more for row, more in zip(rows, made, strict=True)]
    if as_json:
        show(rows, True)
        return
    parts = [model, f"{batch} row{'s' * (batch > 1)} of {context} tokens", device or "", f"mesh {mesh}" if mesh else ""]
    beyond = f"{context} tokens are beyond the {config.max_position} that this model was made for."
    _print_plan(rows, ", ".join(filter(None, parts)), beyond if context > config.max_position else "")


def _print_plan(rows: list[dict[str, Any]], title: str, note: str) -> None:
    """A column for each cache, or each cache by itself where they are too many for that."""
    hidden = {"recomputing_hidden_until"} if all(r.get("recomputing_hidden_until") == "always" for r in rows) else ()
    plain = []
    for row in rows:
        shown = {word: cell(name, row[name]) for name, word in WORDS.items() if name in row and name not in hidden}
        plain.append({"cache": row["cache"]} | shown | {f"cache: {r}": size(n) for r, n in row["classes"].items()})
    labels = dict.fromkeys(label for row in plain for label in row)
    across = [{"": label} | {row["cache"]: row.get(label, "") for row in plain} for label in [*labels][1:]]
    width = terminal_width()
    typer.echo("\n".join(table(across if fits(across, width) else plain, width, title, note)))
