"""The results page by one command: `python -m benchmarks.results [--data TEXT.txt]`, or `make results`.

Rows that are finished under the same stamp (model, versions, seed, plan, data) are not run again; each is written as it
is done, so a stopped run goes on where it was. Without --data `demo` reads everyday sentences of our own.
"""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import kvqjax
from benchmarks.results.page import PAGE, PICTURE, draw_picture, page_text
from benchmarks.results.papers import PAPERS
from benchmarks.results.rows import CACHES, FOLDER, MODELS, about_of, data_of, finished, measure, path_of, references

app = typer.Typer(add_completion=False)
CONSOLE = Console(stderr=True)


def run_model(name: str, source: str, caches: list[str], bar) -> None:
    """Measure every row of one model that is not finished yet."""
    model = kvqjax.load(name)
    data = data_of(model, name, source)
    about = about_of(model, name, data)
    todo = [cache for cache in caches if finished(name, cache, about) is None]
    task = bar.add_task(name, total=len(caches), completed=len(caches) - len(todo))
    exact = references(model, data) if todo else {}
    for cache in todo:
        bar.update(task, description=f"{name} {cache}")
        row = measure(model, data, exact, cache) | {"about": about}
        path_of(name, cache).write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
        bar.advance(task)


@app.command()
def main(
    data: Annotated[str, typer.Option(help="UTF-8 text for demo, or 'synthetic'")] = "synthetic",
    model: Annotated[list[str], typer.Option(help="repeatable")] = list(MODELS),  # noqa: B006
    cache: Annotated[list[str], typer.Option(help="only these rows; repeatable")] = [],  # noqa: B006
    page_only: Annotated[bool, typer.Option(help="write the page from the records, run nothing")] = False,
) -> None:
    """Run what is missing and write the page and its picture."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = cache or [text for bits in (16, 2, 3, 4, 1) for text in CACHES[bits]]
    # The papers' rows first; CommVQ last: its training takes longer than all other rows.
    compared = {cache for paper in PAPERS for *_, cache in paper.rows}
    wanted.sort(key=lambda text: (text.startswith("commvq"), text not in compared))
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    if not page_only:
        with Progress(*columns, console=CONSOLE) as bar:
            for name in model:
                run_model(name, data, wanted, bar)
    PAGE.write_text(page_text(), encoding="utf-8")
    draw_picture()
    typer.echo(f"{PAGE} {PICTURE}")


if __name__ == "__main__":
    app()
