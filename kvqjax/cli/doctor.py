"""`kvqjax doctor`: whether this installation and this chip do what they should."""

import json
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

from kvqjax._tables import size
from kvqjax.cli.common import Json
from kvqjax.cli.output import announce, show
from kvqjax.hardware.install import Finding, Machine, findings, this_machine
from kvqjax.kernel_checks import report, store
from kvqjax.kernel_checks.check import verdict_folder
from kvqjax.pallas_kernels.chips import target_of


def _rows(machine: Machine, full: bool) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Check what can be checked here: the plain decoders, and this chip's kernels.

    Args:
        full: check all shapes and methods.

    Returns:
        (a row for each check, what was noticed on the way)."""
    target = target_of(jnp.zeros(()))
    if target == "cpu" and machine.platform != "cpu":
        return [], [Finding(False, f"no kernels for {machine.devices[0]}; the plain path serves")]
    methods = report.PLAIN if full else report.FEW_PLAIN
    plain = list(report.plain_rows(methods, target))
    if target == "cpu":
        return plain, []
    messages: list[Finding] = []

    def tell(line: str) -> None:
        messages.append(Finding(False, line))

    shapes = report.FULL if full else report.SHAPES
    device_kind = jax.local_devices()[0].device_kind
    checked = list(report.kernel_rows(target, device_kind, shapes, verdict_folder(), tell))
    # A table's rows have equal keys. Kernels have more figures than plain decoders.
    columns: dict[str, Any] = {}
    for row in checked:
        columns |= dict.fromkeys(row)
    return [*checked, *(columns | row for row in plain)], messages


def _is_sound(noticed: list[Finding], rows: list[dict[str, Any]]) -> bool:
    """Say whether nothing is wrong. A kernel that is slower than the plain form is not used, but
    sound."""
    if any(finding.bad for finding in noticed):
        return False
    return all(row["verdict"] in ("sound", "faster", "slower") for row in rows)


def _print(
    machine: Machine, noticed: list[Finding], rows: list[dict[str, Any]], sound: bool
) -> None:
    """Print the machine, what was noticed, and a table of the checks."""
    versions = [f"{package} {version}" for package, version in machine.packages.items()]
    typer.echo(" ".join(versions))
    memory = ""
    if machine.memory is not None:
        memory = f", {size(machine.memory)} each"
    typer.echo(f"{len(machine.devices)} x {machine.devices[0]} ({machine.platform}){memory}")
    if machine.driver:
        typer.echo(f"NVIDIA driver {machine.driver}")
    for finding in noticed:
        label = "wrong" if finding.bad else "note"
        typer.echo(f"{label}: {finding.text}")
    if rows:
        show(rows, False)
    typer.echo(report.unchecked(machine.platform))
    typer.echo(f"verdicts: {verdict_folder()}")
    typer.echo("all is sound" if sound else "something is wrong")


def doctor(
    full: Annotated[
        bool, typer.Option("--full", help="check all shapes and methods, which takes minutes")
    ] = False,
    reset: Annotated[
        bool, typer.Option("--reset", help="forget the results of earlier checks first")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check this installation, every kernel that concerns this chip, and what decodes without one,
    against float64.

    Ends with exit code 0 when all is sound and with 1 when something is wrong."""
    if reset:
        announce(f"{store.reset(verdict_folder())} files of verdicts deleted")
    machine = this_machine()
    announce(f"checking {machine.devices[0]}")
    rows, messages = _rows(machine, full)
    noticed = [*findings(machine), *messages]
    sound = _is_sound(noticed, rows)
    if as_json:
        answer = {
            "sound": sound,
            "machine": machine._asdict() | {"verdicts": str(verdict_folder())},
            "findings": [finding._asdict() for finding in noticed],
            "rows": rows,
            "unchecked": report.unchecked(machine.platform),
        }
        typer.echo(json.dumps(answer, indent=1))
    else:
        _print(machine, noticed, rows, sound)
    if not sound:
        raise typer.Exit(1)
