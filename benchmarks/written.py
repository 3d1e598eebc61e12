"""Calibration on a text against calibration on what the model itself writes (`--data self`): the
table of docs/howto/calibrate.md, by `python -m benchmarks.written --book BOOK.txt --learn TEXT.txt`.

Scored are the windows of the results page. Seconds of writing are 0 where an earlier run's rows were
kept.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer

import kvqjax
from benchmarks.results.rows import MODEL, Texts, references, scores, windows_of
from kvqjax.data.corpora import read
from kvqjax.model.loading import Model

CACHE = "klt:bits=2.0"
SEQUENCES, LENGTH = 12, 1024  # of a calibration


class Line(NamedTuple):
    """One calibration: `figures` has the ratio of perplexities and the KL divergence on every text."""

    data: str
    figures: list[float]
    writing: float
    calibrating: float

    def __str__(self) -> str:
        figures = " | ".join(f"{figure:.4g}" for figure in self.figures)
        return f"| {self.data} | {figures} | {self.writing:.0f} | {self.calibrating:.0f} |"


def lines(
    model: Model, cache: str, texts: Texts, sources: dict[str, str], seed: int
) -> Iterator[Line]:
    """Calibrate on each of `sources`, name -> data, and score."""
    method, exact = kvqjax.parse(cache), references(model, texts)
    for name, source in sources.items():
        begun = time.perf_counter()
        data = read(source, model=model, tokens=SEQUENCES * LENGTH, seed=seed)
        written = time.perf_counter()
        artifact = kvqjax.calibrate.run(model, method, data, count=SEQUENCES, length=LENGTH)
        calibrated, figures = time.perf_counter(), []
        for text, windows in texts.scored.items():
            means = scores(model.with_artifact(artifact), method, windows, exact[text])
            loss = np.mean(means["nll"]) - np.mean(means["nll_exact"])
            figures += [float(np.exp(loss)), float(np.mean(means["kld"]))]
        yield Line(name, figures, written - begun, calibrated - written)


def main(
    book: Annotated[str, typer.Option(help="the second text that is scored, a file")],
    learn: Annotated[str, typer.Option(help="a text to calibrate on, other than the two")],
    wikitext: Annotated[
        str, typer.Option(help="WikiText-2's test part: name or file")
    ] = "wikitext2",
    folder: Annotated[Path | None, typer.Option(help="where wikitext2 is")] = None,
    cache: str = CACHE,
    seed: int = 0,
) -> None:
    """Print the table."""
    model = kvqjax.load(MODEL)
    data = {"WikiText-2": read(wikitext, folder=folder), "book": read(book)}
    windows = windows_of(model, data)
    texts = Texts(windows, data["book"], {})
    titles = " | ".join(f"{name}, ratio | {name}, KLD" for name in windows)
    columns = f"| calibrated on | {titles} | writing, s | calibrating, s |"
    typer.echo(columns + "\n" + "| --- " * (columns.count("|") - 1) + "|")
    for line in lines(model, cache, texts, {"a text": learn, "self": "self"}, seed):
        typer.echo(str(line))


if __name__ == "__main__":
    typer.run(main)
