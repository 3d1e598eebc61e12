"""`kvq.compare`: several caches side by side on one text, by bits and KL divergence, calibrated
where they need it."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvqjax._arguments import MOST_SEED, check_counts, check_integer
from kvqjax._errors import UserError
from kvqjax._files import made_folder, path_of
from kvqjax._folders import user_folder
from kvqjax._options import named_options
from kvqjax._tables import Row, Section, Table
from kvqjax._timing import Bar, silent
from kvqjax._version import __version__
from kvqjax.cache.artifacts import load_artifact
from kvqjax.data.corpora import is_name, read
from kvqjax.data.documents import Data, digest
from kvqjax.data.tokens import TextLike, data_or_ids, in_halves, token_ids
from kvqjax.eval.stamp import CONTEXT, ledger_of, stamp, stamp_line
from kvqjax.eval.windows import perplexity
from kvqjax.methods import Method, MethodLike
from kvqjax.methods.registry import parse_all
from kvqjax.model.loading import Model, load

COMPARED = (
    "exact",
    *(
        f"{name}:bits={b}"
        for name in ("uniform", "kivi", "kvquant", "higgs", "aqua")
        for b in (2, 4)
    ),
)
LEARNT = 64 * 1024  # words of our own text that are enough for every method's recipe
LONGEST_WINDOW = 1024  # default in tokens; a model with fewer positions gets shorter windows


def artifact_folder() -> Path:
    """Give the folder that keeps calibrations from one run to the next."""
    return user_folder("artifacts")


def kept_path(store: Path, model: Model, method: Method, text: str, sequences: int | None) -> Path:
    """The folder that keeps this calibration: another model, policy, text or version has another
    one."""
    dtype = str(model.params["norm"].dtype)
    about = [
        __version__,
        model.fingerprint,
        model.weights,
        dtype,
        str(method),
        digest(text),
        sequences,
    ]
    name = re.sub(r"[^a-z0-9.]+", "-", str(method).lower())
    return store / f"{name}-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]}"


def _calibrate_once(
    path: Path,
    model: Model,
    method: Method,
    texts: TextLike,
    sequences: int | None,
    update: Callable[[float], None],
) -> None:
    """Write the artifact `path` unless it is there. A run that was killed continues where it was.
    An artifact that cannot be read is written anew: the folder of these is the library's own."""
    from kvqjax.calibrate import run

    if path_of(path).exists():
        try:
            load_artifact(path)
        except UserError as error:
            warnings.warn(f"calibrated anew: {error}", stacklevel=2)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            return
    made_folder(path.parent)
    state = path.with_name(path.name + ".state.npz")

    def advance(steps, total):
        return update(steps / total)

    run(model, method, texts, count=sequences, state=state, advance=advance).save(path)
    state.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One text and how it is used: `learnt` is what methods are calibrated on, `ids` the tokens
    that are scored. `about` describes the text. The other fields are as for `compare`."""

    model: Model
    learnt: Data | np.ndarray
    ids: np.ndarray
    about: dict[str, Any]
    chunk: int
    window: int
    tokens: int
    batch: int
    context: int
    sequences: int | None
    store: Path

    @property
    def scored(self) -> int:
        """About how many tokens pass through each cache."""
        return min(self.tokens or len(self.ids), len(self.ids))

    def ready(
        self, methods: Sequence[Method], folders: Sequence[Path], bar: Bar
    ) -> list[tuple[Model, Method]]:
        """Pair every method with a model that holds its constants, and calibrate those that
        `folders` do not bring."""
        from kvqjax.calibrate import learns, with_constants

        calibrated = {load_artifact(path).method for path in folders}
        missing = [
            method
            for method in methods
            if method not in calibrated and learns(method, self.model.config)
        ]
        read = self.learnt.text if isinstance(self.learnt, Data) else self.learnt.tobytes().hex()
        stored = [
            kept_path(self.store, self.model, method, read, self.sequences) for method in missing
        ]
        for path, method in zip(stored, missing, strict=True):
            update = bar(f"calibrating {method}")
            _calibrate_once(path, self.model, method, self.learnt, self.sequences, update)
        return with_constants(self.model, methods, [*folders, *stored])

    def row(
        self, model: Model, method: Method, kernels: str, progress: Callable[[float], None]
    ) -> Row:
        """The figures of one cache. `model` holds the method's constants."""
        return perplexity(
            model,
            self.ids,
            method,
            cut="llama-perplexity",
            chunk=self.chunk,
            window=self.window,
            tokens=self.tokens,
            batch=self.batch,
            context=self.context,
            kernels=kernels,
            progress=progress,
        )


def comparison(
    model: Model,
    data: TextLike = "synthetic",
    *,
    field: str | None = None,
    split: str | None = None,
    folder: Path | None = None,
    seed: int = 0,
    chunk: int = 32,
    window: int | None = None,
    tokens: int = 8192,
    batch: int = 4,
    context: int = CONTEXT,
    sequences: int | None = None,
    store: Path | None = None,
) -> Comparison:
    """Read the text and cut it into the half that is learnt from and the half that is scored.
    Arguments are those of `compare`. Raises UserError for a text that cannot be read."""
    check_counts(chunk=chunk, window=window, batch=batch, context=context, sequences=sequences)
    check_integer("tokens", tokens, 0)
    check_integer("seed", seed, 0, MOST_SEED)
    if isinstance(data, os.PathLike) or (
        isinstance(data, str) and (is_name(data) or not re.search(r"\s", data))
    ):
        budget = 2 * max(LEARNT, tokens)
        data = read(
            data, field=field, split=split, folder=folder, model=model, tokens=budget, seed=seed
        )
    texts = data_or_ids(model, data, "data")
    about = texts.about if isinstance(texts, Data) else {"name": "token ids", "tokens": len(texts)}
    learnt, scored = in_halves(texts)
    return Comparison(
        model=model,
        learnt=learnt,
        ids=token_ids(model, scored),
        about=about,
        chunk=chunk,
        window=window or min(LONGEST_WINDOW, model.config.max_position),
        tokens=tokens,
        batch=batch,
        context=context,
        sequences=sequences,
        store=store or artifact_folder(),
    )


@named_options
def compare(
    model: str | Path | Model = "demo",
    cache: MethodLike | Sequence[MethodLike] = COMPARED,
    data: TextLike = "synthetic",
    *,
    artifact: Sequence[str | Path] = (),
    field: str | None = None,
    split: str | None = None,
    folder: str | Path | None = None,
    seed: int = 0,
    chunk: int = 32,
    window: int | None = None,
    tokens: int = 8192,
    batch: int = 4,
    context: int = CONTEXT,
    sequences: int | None = None,
    store: str | Path | None = None,
    kernels: str = "auto",
    bar: Bar = silent,
) -> Table:
    """Compare several caches on one text: bits, bytes, perplexity, KL divergence from the exact
    cache, and the share of positions at which both put the same token first. `kvqjax eval compare`
    gives the same rows.

    Methods that must be calibrated learn from the first half of the text; the calibrations are kept
    and used again. Of each window of the second half, the second half is scored: by then caches
    hold encoded tokens.

    Args:
        model: a name, folder or hub id, or a loaded model.
        cache: one policy or several, such as "kivi:bits=2"; each gives a row.
        data: the name of data as `kvqjax.data.read` takes it, such as a path, "wikitext2" or
            "synthetic" for sentences of our own; data that it gave; a text of several words, a list
            of texts, or token ids.
        artifact: folders of calibrations, for caches that are not to be calibrated here.
        field: which field of records holds text or messages.
        split: which split of a data set; by default the only one.
        folder: where wikitext2, c4 and gsm8k are; by default the hub, by `datasets`.
        seed: of the synthetic text.
        chunk: tokens that enter the cache at a time.
        window: tokens of a window; by default 1024, or the model's positions if fewer.
        tokens: about how many tokens are scored or precede them; 0 means all.
        batch: windows at a time.
        context: tokens of a row for which bits and bytes are counted.
        sequences: how many to calibrate with; by default the method's own recipe.
        store: the folder that keeps calibrations; by default the user's cache folder.
        kernels: what reads the cache, as for `init_cache`.
        bar: `bar(label)` is called before every step and gives a function that is told the step's
            progress, 0 to 1.

    Returns:
        A row for each cache. `about` of the table has the model's fingerprint, versions, seed and
        data.

    Raises:
        UserError: for a text that cannot be read or is too short, and for a wrong model or cache.
    """
    loaded = model if isinstance(model, Model) else load(model)
    name = Path(loaded.folder).name or "a model" if isinstance(model, Model) else str(model)
    methods = parse_all(cache)
    job = comparison(
        loaded,
        data,
        field=field,
        split=split,
        folder=None if folder is None else Path(folder),
        seed=seed,
        chunk=chunk,
        window=window,
        tokens=tokens,
        batch=batch,
        context=context,
        sequences=sequences,
        store=None if store is None else Path(store),
    )
    rows, roles = [], {}
    for ready_model, method in job.ready(methods, [Path(path) for path in artifact], bar):
        rows.append(job.row(ready_model, method, kernels, bar(str(method))))
        roles[str(method)] = ledger_of(ready_model, method, context).by_role()
    about = stamp(loaded, name, seed) | {
        "data": job.about,
        "ledger": {"capacity": context, "bytes": roles},
    }
    return Table(rows, [Section(f"compare, {name}", rows, stamp_line(about))], about)
