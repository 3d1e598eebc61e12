"""`kvqjax eval ppl|retrieval|drift`: several caches side by side."""

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvqjax.cli.common import (
    Artifacts,
    Caches,
    Dtype,
    Json,
    ModelName,
    Weights,
    calibrated,
    methods_of,
    open_model,
    progress_bar,
    show,
)
from kvqjax.errors import UserError
from kvqjax.eval.stamp import read_text, stamp

__all__ = ["app"]

app = typer.Typer(
    help="Evaluate caches with the tokens really passing through them.", no_args_is_help=True, add_completion=False
)

Data = Annotated[str, typer.Option("--data", help="a UTF-8 text file, or 'synthetic' for sentences of our own")]
Out = Annotated[Path | None, typer.Option("--out", help="also write the report to this folder")]
Chunk = Annotated[int, typer.Option("--chunk", help="tokens that enter the cache at a time")]
Seed = Annotated[int, typer.Option("--seed")]


def _finish(rows: list[dict], about: dict, as_json: bool, out: Path | None, name: str) -> None:
    show(rows, as_json, f"{name}, {about['model']}")
    if out is None:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"about": about, "rows": rows}, indent=1)
        (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror}") from error


def _tokens(model, data: str, tokens: int, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    text, about = read_text(data, tokens, seed)
    return np.asarray(model.tokenizer(text)["input_ids"], np.int32), about


@app.command()
def ppl(
    cache: Caches,
    model: ModelName = "demo",
    data: Data = "synthetic",
    mode: Annotated[str, typer.Option(help="loop: all through the cache; prefill: first half exact")] = "loop",
    chunk: Chunk = 32,
    window: Annotated[int, typer.Option(help="tokens per window")] = 512,
    tokens: Annotated[int, typer.Option(help="about how many tokens in all")] = 8192,
    batch: int = 4,
    artifact: Artifacts = [],  # noqa: B006
    seed: Seed = 0,
    dtype: Dtype = None,
    weights: Weights = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Perplexity, KL divergence to the exact cache, and top-1 agreement."""
    from kvqjax.eval import perplexity

    methods = methods_of(cache)
    loaded = open_model(model, dtype, weights)
    ids, source = _tokens(loaded, data, tokens, seed)
    rows = []
    with progress_bar() as bar:
        for ready, method in calibrated(loaded, methods, artifact):
            options = {"mode": mode, "chunk": chunk, "window": window, "tokens": tokens, "batch": batch}
            rows.append(perplexity(ready, ids, method, progress=bar(str(method)), **options))
    _finish(rows, stamp(loaded, model, seed) | {"data": source}, as_json, out, "ppl")


@app.command()
def retrieval(
    cache: Caches,
    model: ModelName = "recall",
    task: Annotated[str, typer.Option(help="kv: stored pairs; passkey: a number in everyday sentences")] = "kv",
    length: Annotated[list[int], typer.Option(help="prompt tokens; repeatable")] = [256, 512],  # noqa: B006
    samples: int = 16,
    chunk: Annotated[int | None, typer.Option(help="feed the prompt through the cache; default: exact prefill")] = None,
    artifact: Artifacts = [],  # noqa: B006
    seed: Seed = 0,
    dtype: Dtype = None,
    weights: Weights = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Share of stored values and pass keys that are answered right."""
    from kvqjax.eval import retrieval as run_retrieval

    methods = methods_of(cache)
    loaded = open_model(model, dtype, weights)
    rows = []
    with progress_bar() as bar:
        for ready, method in calibrated(loaded, methods, artifact):
            for tokens in length:
                options = {"task": task, "length": tokens, "samples": samples, "chunk": chunk, "seed": seed}
                rows.append(run_retrieval(ready, method, progress=bar(f"{method} {tokens}"), **options))
    _finish(rows, stamp(loaded, model, seed), as_json, out, "retrieval")


@app.command()
def drift(
    cache: Caches,
    model: ModelName = "demo",
    data: Data = "synthetic",
    chunk: Chunk = 1,
    window: Annotated[int, typer.Option(help="decode steps")] = 512,
    tokens: Annotated[int, typer.Option(help="about how many tokens in all")] = 2048,
    artifact: Artifacts = [],  # noqa: B006
    seed: Seed = 0,
    dtype: Dtype = None,
    weights: Weights = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """KL divergence against the number of decoding steps."""
    from kvqjax.eval import drift as run_drift

    methods = methods_of(cache)
    loaded = open_model(model, dtype, weights)
    ids, source = _tokens(loaded, data, tokens, seed)
    rows = []
    with progress_bar() as bar:
        for ready, method in calibrated(loaded, methods, artifact):
            options = {"chunk": chunk, "window": window, "tokens": tokens}
            rows.append(run_drift(ready, ids, method, progress=bar(str(method)), **options))
    _finish(rows, stamp(loaded, model, seed) | {"data": source}, as_json, out, "drift")
