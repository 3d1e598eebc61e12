"""Train a bundled model: `python -m benchmarks.train recall`; run again to go on after a stop.

`demo` also needs --books and --valid, text files (.xz or plain) of public-domain prose.
"""

import os
from pathlib import Path
from typing import Annotated

import jax
import typer

if jax.config.jax_platforms == "cpu":
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)  # one shard of the batch per core

import flax.serialization
import numpy as np

from benchmarks.train import corpus as corpora
from benchmarks.train.evaluate import figures
from benchmarks.train.export import export
from benchmarks.train.loop import train
from benchmarks.train.recipes import RECIPES
from kvqjax.model.weight_trees import init_params

app = typer.Typer(add_completion=False)
ROOT = Path(__file__).parents[2]


def _data(name: str, books: Path | None, valid: Path | None, work: Path):
    if RECIPES[name].config.vocab_size == 64:
        return corpora.symbols()
    if books is None or valid is None:
        raise typer.BadParameter(f"{name} is trained on text: give --books and --valid")
    return corpora.books(books, valid, work, RECIPES[name].config.vocab_size)


@app.command()
def main(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(RECIPES)}")],
    work: Annotated[
        Path, typer.Option(help="checkpoint, log and token streams; made if missing")
    ] = Path("train"),
    books: Annotated[Path | None, typer.Option(help="training text")] = None,
    valid: Annotated[Path | None, typer.Option(help="held-out text")] = None,
    only_export: Annotated[
        bool, typer.Option(help="write the model of the last checkpoint, train no further")
    ] = False,
    problems: Annotated[int, typer.Option(help="recall problems per figure of the card")] = 64,
) -> None:
    """Train to the end of the recipe and write the model where the package looks for it."""
    if name not in RECIPES:
        raise typer.BadParameter(f"model {name!r} is unknown; known: {', '.join(RECIPES)}")
    recipe, work = RECIPES[name], work / name
    corpus, tokenizer = _data(name, books, valid, work)

    def report(params: dict, step: int) -> str:
        return str(
            {k: round(v, 3) for k, v in figures(params, recipe.config, corpus, (256,), 8).items()}
        )

    if not only_export:
        train(recipe, corpus, work, report)
    state = flax.serialization.msgpack_restore((work / "checkpoint.msgpack").read_bytes())
    template = init_params(jax.random.key(0), recipe.config)
    params = flax.serialization.from_state_dict(template, state["params"])
    stored = jax.tree.map(lambda leaf: np.asarray(leaf, np.float16).astype(np.float32), params)
    lengths = (256,) if recipe.config.windows[0] else (256, 512, 1024)
    measured = figures(stored, recipe.config, corpus, lengths, problems)
    folder = (
        ROOT / ("kvqjax/assets" if name in ("demo", "recall") else "tests/assets_models") / name
    )
    progress = {field: int(state[field]) for field in ("step", "tokens")}
    export(folder, name, params, recipe, tokenizer, progress, measured)
    typer.echo(f"{folder}: step {progress['step']} of {recipe.steps}")
    for name_of_figure, value in measured.items():
        typer.echo(f"  {name_of_figure}: {value:.4g}")


if __name__ == "__main__":
    app()
