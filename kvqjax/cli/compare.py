"""`kvqjax eval compare`: several methods in one table and one picture, calibrated where they need it."""

from pathlib import Path
from typing import Annotated

import typer

from kvqjax.cli.common import Batch, DataName, Field, Folder, Split, number
from kvqjax.cli.evaluate import Chunk, Context, app
from kvqjax.cli.report import Job, add_command
from kvqjax.eval.comparison import COMPARED, comparison
from kvqjax.eval.stamp import CONTEXT
from kvqjax.model.loading import Model

__all__ = ["app"]


@add_command(app, "demo", cache=list(COMPARED), plot=Path("compare.png"))
def compare(
    loaded: Model,
    seed: int,
    data: DataName = "synthetic",
    field: Field = None,
    split: Split = None,
    folder: Folder = None,
    chunk: Chunk = 32,
    window: Annotated[
        int | None, number(least=2, help="tokens per window; default: 1024, or the model's positions")
    ] = None,
    tokens: Annotated[int, number(least=0, help="about how many tokens are scored or precede them; 0: all")] = 8192,
    batch: Batch = 4,
    context: Context = CONTEXT,
    sequences: Annotated[int | None, number(help="to calibrate with; default: the method's recipe")] = None,
    store: Annotated[Path | None, typer.Option(help="keeps calibrations; default: the user's cache folder")] = None,
) -> Job:
    """Compare several methods by bits and KL divergence, as a table and a picture; calibrates those that need it.

    Methods learn from the first half of the text. Of each window of the second half, the second half is scored: by then
    caches hold more than what stays exact. `kvq.compare` gives the same rows in Python."""
    job = comparison(
        loaded,
        data,
        field=field,
        split=split,
        folder=folder,
        seed=seed,
        chunk=chunk,
        window=window,
        tokens=tokens,
        batch=batch,
        context=context,
        sequences=sequences,
        store=store,
    )
    evaluate = lambda model, method, bar, kernels: [job.row(model, method, kernels, bar(str(method)))]  # noqa: E731
    ready = lambda model, methods, folders, bar: job.ready(methods, folders, bar)  # noqa: E731
    return Job(context, evaluate, {"data": job.about}, job.scored, ready, length=job.window)
