"""`kvqjax methods` and `kvqjax inspect`: what there is, and what a folder holds."""

import inspect as introspect
import json
import textwrap
from pathlib import Path
from typing import Any

import typer

from kvqjax._errors import UserError
from kvqjax._files import path_of, read_object
from kvqjax.cache.accounting import array_bytes
from kvqjax.cache.artifacts import read_arrays, read_description
from kvqjax.cli.common import Json, ModelName
from kvqjax.cli.output import show
from kvqjax.hardware.devices import measured_text
from kvqjax.hardware.planner import plan_memory
from kvqjax.methods import METHODS
from kvqjax.model.loading import config_of
from kvqjax.parallel.mesh_size import MeshSize

NOTE = (
    "\nbits counts codes and what is stored beside them. KIVI's codes of 2 bits take 3:\n"
    "every 32 numbers share a scale and a minimum of 16 bits each, 1 bit a number.\n"
    "Groups of 64 take 2.5 bits and groups of 128 take 2.25 (kivi:group=128), for\n"
    "less precision."
)


def methods(model: ModelName = "demo", as_json: Json = False) -> None:
    """List the methods: bits per key or value number with all options at their defaults, what they
    must be calibrated with (text, weights or nothing), and their options.

    The bits are more than `bits`, since scales and minima are stored beside the codes: with groups
    of 32 numbers KIVI stores 1 bit more per number, with group=128 a quarter of a bit."""
    from kvqjax.calibrate import needed

    config = config_of(model)
    rows: list[dict[str, Any]] = []
    for name, factory in METHODS.items():
        parameters = introspect.signature(factory).parameters.values()
        options = {parameter.name: parameter.default for parameter in parameters}
        first_paragraph = (introspect.getdoc(factory) or "").split("\n\n")[0]
        about = " ".join(first_paragraph.split())  # on one line
        method = factory()
        bits = plan_memory(config, method, 1024, 1, MeshSize()).book.bits_method
        sources = [fit.source for fit in needed(method, config)]
        needs = "nothing"
        if sources:
            needs = "text" if "text" in sources else "weights"
        row = {"method": name, "bits": bits, "needs": needs}
        rows.append(row | {"about": about, "options": options})
    if as_json:
        show(rows, True)
        return
    for row in rows:
        written = [f"{option}={value}" for option, value in row["options"].items()]
        row["options"] = ", ".join(written)
    show(rows, False)
    typer.echo(NOTE)
    typer.echo("\n" + textwrap.fill(measured_text(), 80, break_on_hyphens=False))


def inspect(folder: Path, as_json: Json = False) -> None:
    """Show what a calibration artifact or a saved cache holds."""
    file = path_of(folder / "description.json")
    if not file.exists():
        raise UserError(f"{folder}: no readable description.json; not a kvqjax folder")
    kind = read_object(file).get("kind", "")
    about = read_description(folder, kind)
    arrays = read_arrays(folder, about)
    rows = []
    for name, array in arrays.items():
        row = {"array": name, "shape": list(array.shape), "dtype": str(array.dtype)}
        rows.append(row | {"bytes": array_bytes(array)})
    if as_json:
        typer.echo(json.dumps({"description": about, "arrays": rows}, indent=1))
        return
    for key, value in about.items():
        if key != "files":  # their checksums; --json prints them
            typer.echo(f"{key}: {value}")
    show(rows, False)
