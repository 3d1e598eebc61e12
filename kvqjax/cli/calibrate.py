"""`kvqjax calibrate`: a method's constants as an artifact folder."""

from pathlib import Path
from typing import Annotated

import typer

from kvqjax.cli.common import Dtype, ModelName, Seed, Weights, methods_of, number, open_model
from kvqjax.cli.progress import progress_bar
from kvqjax.cli.tables import show
from kvqjax.errors import UserError
from kvqjax.eval.corpora import read_text
from kvqjax.lock import held

__all__ = ["calibrate"]


def calibrate(
    cache: Annotated[str, typer.Option("--cache", "-c", help="a method, e.g. kvquant:bits=3")],
    out: Annotated[Path, typer.Option("--out", help="the artifact's folder; must not exist yet")],
    model: ModelName = "demo",
    data: Annotated[str, typer.Option("--data", help="a UTF-8 file, wikitext2, c4, or 'synthetic'")] = "synthetic",
    folder: Annotated[Path | None, typer.Option(help="holds that data set; default: the hub, by `datasets`")] = None,
    sequences: Annotated[int | None, number(help="how many; default: the method's recipe")] = None,
    length: Annotated[int | None, number(help="tokens of each; default: the method's recipe")] = None,
    seed: Seed = 0,
    dtype: Dtype = None,
    weights: Weights = None,
) -> None:
    """Calibrate a method for a model. A run that is killed continues where it was when started again."""
    from kvqjax.calibrate import run

    method = methods_of([cache])[0]
    if out.exists():
        raise UserError(f"{out} exists already; choose another folder")
    with held(out):
        loaded = open_model(model, dtype, weights)
        text, source = read_text(data, (sequences or 64) * (length or 1024), seed, folder)
        state = out.with_name(out.name + ".state.npz")
        with progress_bar() as bar:
            update = bar(f"calibrating {method}")
            options = {"count": sequences, "length": length, "state": state}
            artifact = run(loaded, method, [text], advance=lambda done, total: update(done / total), **options)
        artifact.about["data"] = source
        artifact.save(out)
        state.unlink(missing_ok=True)
    if report := artifact.about.get("report"):
        show(report, False, "what the calibration found")
    typer.echo(f"{out}: {method} for {model}")
