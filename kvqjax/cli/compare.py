"""`kvqjax eval compare`: several methods in one table and one picture, calibrated where they need it."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvqjax._errors import UserError
from kvqjax._folders import user_folder
from kvqjax._version import __version__
from kvqjax.cache.artifacts import load_artifact
from kvqjax.cli.common import Batch, calibrated, number
from kvqjax.cli.evaluate import Chunk, Context, Data, Folder, app
from kvqjax.cli.report import Job, add_command
from kvqjax.eval.corpora import halves, read_text
from kvqjax.eval.stamp import CONTEXT, digest
from kvqjax.methods import Method
from kvqjax.model.loading import Model

__all__ = ["app", "artifact_folder"]

CACHES = ["exact", *(f"{name}:bits={b}" for name in ("uniform", "kivi", "kvquant", "higgs", "aqua") for b in (2, 4))]
LEARNT = 64 * 1024  # words of our own text that are enough for every method's recipe


def artifact_folder() -> Path:
    """Where calibrations are kept from one run to the next."""
    return user_folder("artifacts")


def kept_path(store: Path, model: Model, method: Method, text: str, sequences: int | None) -> Path:
    """The folder that keeps this calibration: another model, policy, text or version has another one."""
    dtype = str(model.params["norm"].dtype)
    about = [__version__, model.fingerprint, model.weights, dtype, str(method), digest(text), sequences]
    name = re.sub(r"[^a-z0-9.]+", "-", str(method).lower())
    return store / f"{name}-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]}"


def calibrate_once(
    path: Path, model: Model, method: Method, text: str, sequences: int | None, update: Callable[[float], None]
) -> None:
    """Write the artifact `path` unless it is there. A run that was killed continues where it was."""
    from kvqjax.calibrate import run

    if path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be written: {error.strerror}") from error
    state = path.with_name(path.name + ".state.npz")
    advance = lambda done, total: update(done / total)  # noqa: E731
    run(model, method, [text], count=sequences, state=state, advance=advance).save(path)
    state.unlink(missing_ok=True)


@add_command(app, "demo", cache=CACHES, plot=Path("compare.png"))
def compare(
    loaded: Model,
    seed: int,
    data: Data = "synthetic",
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
    """Several methods by bits and KL divergence, as a table and a picture; calibrates those that need it.

    Methods learn from the first half of the text. Of each window of the second half, the second half is scored: by then
    caches hold more than what stays exact."""
    from kvqjax.calibrate import learns
    from kvqjax.eval.measure_perplexity import perplexity

    text, about = read_text(data, 2 * max(LEARNT, tokens), seed, folder)
    learnt, scored = halves(text)
    ids, home = np.asarray(loaded.encode(scored), np.int32), store or artifact_folder()
    length = window or min(1024, loaded.config.max_position)
    fixed: dict[str, Any] = {"cut": "llama-perplexity", "chunk": chunk, "window": length, "tokens": tokens}

    def ready(model, methods, folders, bar):
        given = {load_artifact(path).method for path in folders}
        missing = [method for method in methods if method not in given and learns(method, model.config)]
        made = [kept_path(home, model, method, learnt, sequences) for method in missing]
        for path, method in zip(made, missing, strict=True):
            calibrate_once(path, model, method, learnt, sequences, bar(f"calibrating {method}"))
        return calibrated(model, methods, [*folders, *made])

    def evaluate(model, method, bar, kernels):
        given = fixed | {"batch": batch, "context": context, "kernels": kernels}
        return [perplexity(model, ids, method, progress=bar(str(method)), **given)]

    return Job(context, evaluate, {"data": about}, min(tokens or len(ids), len(ids)), ready, length)
