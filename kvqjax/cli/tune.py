"""`kvqjax tune`: the mixture of methods and bits of least divergence within a budget."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from kvqjax._errors import UserError
from kvqjax._files import made_folder
from kvqjax.cli.common import (
    Batch,
    DataName,
    Dtype,
    Field,
    Folder,
    Json,
    Mesh,
    ModelName,
    Seed,
    Split,
    Weights,
    number,
    open_model,
)
from kvqjax.cli.evaluate import Chunk, Context
from kvqjax.cli.output import announce, duration, progress_bar, show
from kvqjax.data import read
from kvqjax.eval.plots import check_picture
from kvqjax.eval.tune import Settings
from kvqjax.eval.tune import tune as search
from kvqjax.eval.tune.candidates import named, sorted_out
from kvqjax.eval.tune.report import commands, write_report
from kvqjax.eval.tune.run import estimated
from kvqjax.eval.tune.search import read_budget
from kvqjax.eval.tune.trials import choice_of
from kvqjax.hardware.devices import DEVICES, find_device
from kvqjax.model.hf_config import read_config
from kvqjax.model.loading import Model, config_of, locate

MOST_WORDS = 1 << 16  # about how many tokens of a text are read


def tune(
    budget: Annotated[
        str,
        typer.Option(help="average bits of all that is stored (2.5), bytes (8GiB), or kld=0.01"),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="the folder of policy, artifact, report and records"),
    ] = None,
    model: ModelName = "demo",
    data: DataName = "synthetic",
    field: Field = None,
    split: Split = None,
    folder: Folder = None,
    methods: Annotated[
        str,
        typer.Option(
            help="data-free, all, or a list: kivi,higgs:window=32; without bits, at all widths"
        ),
    ] = "data-free",
    context: Context = 32768,
    device: Annotated[
        str | None,
        typer.Option(help=f"leave out methods that are slow on this device: {', '.join(DEVICES)}"),
    ] = None,
    slowdown: Annotated[
        float,
        typer.Option(
            min=0.01, max=1e6, help="with --device: longest step, in steps of the exact cache"
        ),
    ] = 1.0,
    window: Annotated[int, number(least=32, help="tokens that are scored together")] = 512,
    chunk: Chunk = 32,
    batch: Batch = 8,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="only say how long the search would take on --device")
    ] = False,
    mesh: Mesh = "",
    seed: Seed = 0,
    dtype: Dtype = None,
    weights: Weights = None,
    as_json: Json = False,
) -> None:
    """Find the cache of least KL divergence within a budget: a method and a number of bits for each
    layer's keys and values.

    The search uses the first half of the text; the report is made on the second half. If the
    command is stopped, the same command continues."""
    settings = Settings(context=context, window=window, chunk=chunk, batch=batch, seed=seed)
    read_budget(budget)  # says now what is wrong with it
    if estimate:
        if device is None:
            raise UserError("--estimate needs a --device")
        figures = estimated(config_of(model), methods, device, mesh, settings)
        show([figures], as_json, f"tuning {model} on {device} {mesh}")
        return
    if out is None:
        raise UserError("--out is missing: the folder of policy, artifact and report")
    if device is not None:
        find_device(device)
    named(methods, config_of(model))
    loaded, start = _loaded(model, methods, mesh, dtype, weights), time.monotonic()
    texts = read(
        data, field=field, split=split, folder=folder, model=loaded, tokens=MOST_WORDS, seed=seed
    )
    check_picture(made_folder(out) / "front.png")
    with progress_bar() as bar:
        announce(
            f"tuning {model} to {budget} with {methods}; if this is stopped, the same command goes on"
        )
        options = {"methods": methods, "device": device, "slowdown": slowdown, "settings": settings}
        result = search(loaded, texts, budget=budget, out=out, bar=bar, **options)
    result = result._replace(about=result.about | {"model": model, "data": texts.about})
    write_report(*result, out)
    lines = commands(result.method, result.artifact, out, model)
    if as_json:
        typer.echo(
            json.dumps(
                {"policy": str(result.method), "rows": result.rows, "about": result.about}, indent=1
            )
        )
        return
    columns = ("kind", "cache", "bits_stored", "kld", "kld_error")
    show(
        [{name: row[name] for name in columns} for row in result.rows],
        False,
        f"{model} at {budget}, held-out text",
    )
    typer.echo(
        "\n".join(
            [
                f"{out}: {result.method}, after {duration(time.monotonic() - start)}. To use it:",
                *lines,
            ]
        )
    )


def _loaded(name: str, methods: str, mesh: str, dtype: str | None, weights: str | None) -> Model:
    """The model, on a mesh that any candidate's cache can be dealt over."""
    if not mesh:
        return open_model(name, dtype, weights)
    config = read_config(locate(name))
    return open_model(
        name, dtype, weights, choice_of(sorted_out(named(methods, config), config)), mesh
    )
