"""`kvqjax plan`: what caches would take on a device, what fits there, and how fast it can be at
best."""

from typing import Annotated

import typer

from kvqjax._tables import terminal_width
from kvqjax.cli.common import (
    Batch,
    Caches,
    Dtype,
    Json,
    Mesh,
    ModelName,
    Weights,
    number,
    token_number,
)
from kvqjax.cli.output import show
from kvqjax.hardware.devices import DEVICES
from kvqjax.hardware.plan import COMPARED
from kvqjax.hardware.plan import plan as plan_rows

DEVICE_HELP = f"{', '.join(DEVICES)}; also A100-80GB, 8xH100, v5e-16 and the like"


def plan(
    cache: Caches = [],  # noqa: B006
    model: ModelName = "demo",
    context: Annotated[
        int | None,
        token_number(
            help="tokens per row, also as 128k; default: 131072, or the model's positions if fewer"
        ),
    ] = None,
    batch: Batch = 1,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
    mesh: Mesh = "",
    memory: Annotated[
        float | None,
        number(
            least=0.001,
            most=10_000,
            help="GiB that the program gets of one device of any other kind",
        ),
    ] = None,
    memory_fraction: Annotated[
        float | None,
        number(
            least=0.01, most=1, help="share of the memory that JAX takes; default: 0.75 on GPUs"
        ),
    ] = None,
    weights: Weights = None,
    dtype: Dtype = None,
    compile_step: Annotated[
        bool, typer.Option("--compile", help="compile the decode loop for the device")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say whether a model and its cache fit a device, with how many tokens and rows, and how fast
    they can be at best.

    MODEL is a bundled or known name (llama-3.1-8b), a folder, or a config.json: no weights are
    needed. Without --cache a few methods are compared. "tight" fits with less than a twentieth of
    the program's memory to spare. Speeds are bounds, not measurements. --compile asks the device's
    own compiler for its bytes: for TPUs it needs libtpu, for GPUs JAX's CUDA plugin, for neither
    the chip. `kvq.plan` gives the same rows in Python.
    """
    rows = plan_rows(
        model,
        cache or COMPARED,
        context=context,
        batch=batch,
        device=device,
        mesh=mesh,
        memory=memory,
        memory_fraction=memory_fraction,
        weights=weights,
        dtype=dtype,
        compile_step=compile_step,
    )
    if as_json:
        show(rows, True)
    else:
        typer.echo(rows.text(terminal_width()))
