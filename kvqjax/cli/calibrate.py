"""`kvqjax calibrate`: a method's constants as an artifact folder."""

import json
from pathlib import Path
from typing import Annotated

import typer

from kvqjax._errors import UserError
from kvqjax._files import path_of
from kvqjax._lock import held
from kvqjax.cli.common import (
    DataName,
    Dtype,
    Field,
    Folder,
    Json,
    ModelName,
    RopeLength,
    Seed,
    Split,
    TextOnly,
    Weights,
    methods_of,
    number,
    open_model,
)
from kvqjax.cli.output import announce, at_least, progress_bar, show
from kvqjax.data import read


def calibrate(
    cache: Annotated[str, typer.Option("--cache", "-c", help="a method, e.g. kvquant:bits=3")],
    out: Annotated[Path, typer.Option("--out", help="the artifact's folder; must not exist yet")],
    model: ModelName = "demo",
    data: DataName = "synthetic",
    field: Field = None,
    split: Split = None,
    folder: Folder = None,
    sequences: Annotated[int | None, number(help="how many; default: the method's recipe")] = None,
    length: Annotated[
        int | None, number(help="tokens of each; default: the method's recipe")
    ] = None,
    seed: Seed = 0,
    dtype: Dtype = None,
    weights: Weights = None,
    text_only: TextOnly = False,
    rope_length: RopeLength = None,
    as_json: Json = False,
) -> None:
    """Calibrate a method for a model. A run that is killed continues where it was when started
    again."""
    from kvqjax.calibrate import forget, run

    method = methods_of([cache])[0]
    if path_of(out).exists():
        raise UserError(f"{out} exists already; choose another folder")
    with held(out):
        loaded = open_model(model, dtype, weights, text_only=text_only, rope_length=rope_length)
        budget = (sequences or 64) * (length or 1024)
        state = out.with_name(out.name + ".state.npz")
        with progress_bar() as bar:
            texts = read(
                data,
                field=field,
                split=split,
                folder=folder,
                model=loaded,
                tokens=budget,
                seed=seed,
                bar=bar,
            )
            update = bar(f"calibrating {method}")
            artifact = run(
                loaded,
                method,
                texts,
                count=sequences,
                length=length,
                state=state,
                advance=lambda step, total: update(step / total),
                announce=lambda task, work: announce(
                    f"calibrating {method} for {model}: {task} of {data}; {at_least(work)}; if this is stopped, "
                    "the same command goes on"
                ),
            )
        artifact.about["data"] = texts.about
        artifact.save(out)
        forget(state)
    summary = {"artifact": str(out), "cache": str(method), "model": model, "about": artifact.about}
    if as_json:
        typer.echo(json.dumps(summary, indent=1))
        return
    if report := artifact.about.get("report"):
        show(report, False, "what the calibration found")
    typer.echo(f"{out}: {method} for {model}")
