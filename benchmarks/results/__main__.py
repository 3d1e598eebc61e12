"""The results page by one command: `python -m benchmarks.results --book BOOK.txt --learn TEXT.txt`,
or `make results`.

Rows that are finished under the same stamp (model, versions, plan, texts) are not run again; each
is written as it is done, so a stopped run goes on where it was. Long contexts
(benchmarks/results/long.py) follow the rows.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import kvqjax
from benchmarks.results.long import CACHES as LONG
from benchmarks.results.long import passages_of, run_long
from benchmarks.results.page import PAGE, PICTURE, README, draw_picture, page_text, readme_text
from benchmarks.results.papers import PAPERS
from benchmarks.results.rows import (
    CACHES,
    FOLDER,
    MODEL,
    Texts,
    about_of,
    finished,
    measure,
    path_of,
    references,
    texts_of,
)
from kvqjax.model.loading import Model

app = typer.Typer(add_completion=False)
CONSOLE = Console(stderr=True)


def run_rows(model: Model, texts: Texts, caches: list[str], bar: Progress) -> None:
    """Measure every row that is not finished yet."""
    about = about_of(model, texts)
    todo = [cache for cache in caches if finished(cache, about) is None]
    task = bar.add_task(MODEL, total=len(caches), completed=len(caches) - len(todo))
    exact = references(model, texts) if todo else {}
    for cache in todo:
        bar.update(task, description=cache)
        row = measure(model, texts, exact, cache) | {"about": about}
        path_of(cache).write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
        bar.advance(task)


@app.command()
def main(
    wikitext: Annotated[
        str, typer.Option(help="WikiText-2's test part: its name, or a file")
    ] = "wikitext2",
    folder: Annotated[
        Path | None, typer.Option(help="where wikitext2 is, if not on the hub")
    ] = None,
    book: Annotated[str, typer.Option(help="the second text, a file")] = "",
    learn: Annotated[str, typer.Option(help="a text to calibrate on, other than the two")] = "",
    cache: Annotated[list[str], typer.Option(help="only these rows; repeatable")] = [],  # noqa: B006
    long_only: Annotated[bool, typer.Option(help="measure long contexts alone")] = False,
    page_only: Annotated[
        bool, typer.Option(help="write the pages from the records, run nothing")
    ] = False,
) -> None:
    """Run what is missing and write the pages and the picture."""
    if not page_only and not (book and learn):
        raise typer.BadParameter("--book FILE and --learn FILE are wanted, or --page-only")
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = cache or [text for bits in (16, 2, 4, 3, 1) for text in CACHES[bits]]
    # The papers' rows first; CommVQ last: its training takes longer than all other rows.
    compared = {cache for paper in PAPERS for *_, cache in paper.rows}
    rows.sort(key=lambda text: (text.startswith("commvq"), text not in compared))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    if not page_only:
        model = kvqjax.load(MODEL)
        texts, passages = (
            texts_of(model, wikitext, book, learn, folder),
            passages_of(model, wikitext, book, folder),
        )
        with Progress(*columns, console=CONSOLE) as bar:
            if not long_only:
                run_rows(model, texts, rows, bar)
            run_long(
                model, texts, passages, [text for text in LONG if not cache or text in cache], bar
            )
    PAGE.write_text(page_text(), encoding="utf-8")
    README.write_text(readme_text(), encoding="utf-8")
    draw_picture()
    typer.echo(f"{PAGE} {README} {PICTURE}")


if __name__ == "__main__":
    app()
