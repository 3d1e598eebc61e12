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
from kvqjax.methods import Method
from kvqjax.model.config import ModelConfig

# Tokens that are read or written where nobody says how many; a recipe may take 2 million.
UNSAID_TOKENS = 1 << 16


def _tokens_wanted(
    method: Method, config: ModelConfig, sequences: int | None, length: int | None
) -> int:
    """How many tokens the method's calibrations take together at most; 0: it learns from no text."""
    from kvqjax.calibrate.parts import fitter, needed

    counts = [0]
    for fit in needed(method, config):
        if fit.source == "text":
            recipe = fitter(fit)
            row = min(length or recipe.DEFAULT_LENGTH, config.max_position)
            counts.append(row * (sequences or recipe.DEFAULT_SEQUENCES))
    return max(counts) if sequences or length else min(max(counts), UNSAID_TOKENS)


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
        state = out.with_name(out.name + ".state.npz")
        with progress_bar() as bar:
            token_limit = _tokens_wanted(method, loaded.config, sequences, length)
            texts = None  # of a method that learns from none: the model writes nothing then
            if token_limit or data != "self":
                texts = read(
                    data,
                    field=field,
                    split=split,
                    folder=folder,
                    model=loaded,
                    tokens=token_limit or UNSAID_TOKENS,
                    seed=seed,
                    bar=bar,
                )
            update = bar(f"calibrating {method}")
            artifact = run(
                loaded,
                method,
                () if texts is None else texts,
                count=sequences,
                length=length,
                state=state,
                advance=lambda step, total: update(step / total),
                announce=lambda task, work: announce(
                    f"calibrating {method} for {model}: {task} of {data}; {at_least(work)}; if this is stopped, "
                    "the same command goes on"
                ),
            )
        if texts is not None:
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
