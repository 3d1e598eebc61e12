"""KL divergence of policies from the exact cache, window by window, kept in a file so that a
stopped run goes on."""

import functools
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvqjax._errors import UserError
from kvqjax.eval.scores import replay, token_scores
from kvqjax.methods import Method, exact
from kvqjax.model.loading import Model
from kvqjax.step.forward import forward
from kvqjax.step.new_cache import init_cache

# What is measured: its name in the records, the model with its constants, and the method.
Subject = tuple[str, Callable[[], Model], Method]


@functools.partial(jax.jit, static_argnames=("method", "chunk", "scored_from"))
def divergence(
    model: Model,
    tokens: Int[Array, "B T"],
    reference: Float[Array, "B T V"],
    method: Method,
    chunk: int,
    scored_from: int = 0,
) -> Float[Array, " B"]:
    """Mean KL divergence (nats) of each row's predictions from `reference`, its tokens passing
    through the cache `chunk` at a time; `chunk` divides T. Predictions before position
    `scored_from` and the last one are left out."""
    rows, length = tokens.shape

    def split(x):
        return jnp.moveaxis(x.reshape(rows, length // chunk, chunk, *x.shape[2:]), 1, 0)

    counts = jnp.full((rows,), chunk, jnp.int32)
    positions = jnp.arange(length)
    mask = ((positions >= scored_from) & (positions < length - 1)).astype(jnp.float32)

    def step(cache, piece):
        inputs, exact_logits, weight = piece
        logits, cache = forward(model, inputs, counts, cache)
        return cache, (token_scores(logits, exact_logits, inputs).kld * weight).sum(1)

    pieces = split(tokens), split(reference), split(jnp.broadcast_to(mask, tokens.shape))
    return (
        jax.lax.scan(step, init_cache(model, method, rows, length), pieces)[1].sum(0) / mask.sum()
    )


class Meter:
    """Measures subjects on `windows` [N, T], at most `batch` rows at a time (rounded up to what a
    mesh can share out), and remembers what it measured.

    Batches are of one size, so that one program serves them; where the last one lacks rows, the
    last window stands in. The exact pass over a batch is made once for all subjects of a call and
    dropped before the next batch. Each figure is appended to the file `path` (None: kept in memory)
    as soon as it is known; a meter of the same `owner`, which names model, text and settings,
    starts with what the file holds."""

    def __init__(
        self,
        model: Model,
        windows: np.ndarray,
        *,
        chunk: int,
        batch: int,
        scored_from: int,
        path: Path | None,
        owner: str,
    ):
        self.model, self.windows, self.chunk = model.replace(constants=()), windows, chunk
        self.scored_from, self.path, self.made = scored_from, path, 0
        rows = even_rows(
            len(windows), batch, 1 if model.rules is None else model.rules.size(model.rules.batch)
        )
        self.batches = [
            range(start, min(start + rows, len(windows))) for start in range(0, len(windows), rows)
        ]
        self.rows = rows
        self.known: dict[str, dict[int, list[float]]] = {}
        if path is not None:
            _open(path, f"{owner} by {rows} rows", self.known)

    def _measure(self, subject: Subject, number: int, tokens, reference) -> None:
        name, model_of, method = subject
        kld = divergence(model_of(), tokens, reference, method, self.chunk, self.scored_from)
        values = [float(x) for x in np.asarray(kld)[: len(self.batches[number])]]
        self.known.setdefault(name, {})[number] = values
        self.made += 1
        if self.path is not None:
            _append(self.path, {"of": name, "batch": number, "kld": values})

    def __call__(
        self, subjects: Sequence[Subject], progress: Callable[[float], None] = lambda fraction: None
    ) -> Float[np.ndarray, "P N"]:
        """Divergences of every subject in every window. `progress(fraction)` is told as they
        come."""

        def missing(number):
            return [s for s in subjects if number not in self.known.get(s[0], {})]

        remaining = total = sum(len(missing(number)) for number in range(len(self.batches)))
        for number, rows in enumerate(self.batches):
            todo = {subject[0]: subject for subject in missing(number)}
            if not todo:
                continue
            tokens = jnp.asarray(
                self.windows[np.minimum(rows.start + np.arange(self.rows), rows.stop - 1)]
            )
            reference = replay(self.model, tokens, exact(), self.chunk)
            for subject in todo.values():
                self._measure(subject, number, tokens, reference)
                remaining -= 1
                progress(1 - remaining / total)
        numbers = range(len(self.batches))
        return np.asarray(
            [[x for n in numbers for x in self.known[name][n]] for name, _, _ in subjects]
        )


def even_rows(count: int, most: int, share: int) -> int:
    """Rows of a batch when `count` go through in the fewest batches of at most `most` rows, a
    multiple of `share`."""
    rows = math.ceil(count / math.ceil(count / most))
    return math.ceil(rows / share) * share


def _append(path: Path, line: dict[str, Any]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def _open(path: Path, owner: str, figures: dict[str, dict[int, list[float]]]) -> None:
    """Read what an earlier run of `owner` measured, or begin a file. A last line that was cut off
    is dropped."""
    try:
        content = path.read_bytes() if path.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        if not complete:
            path.unlink(missing_ok=True)  # a run that was killed as it began it
            _append(path, {"owner": owner})
            return
        head, *rows = [json.loads(line) for line in complete.decode().splitlines()]
        if head["owner"] != owner:
            raise UserError(
                f"{path} has measurements of another model, text or settings; choose another folder"
            )
        for row in rows:
            figures.setdefault(row["of"], {})[row["batch"]] = row["kld"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: cannot be read; delete it to start anew ({error})") from error
    if complete != content:
        # Not written anew: a kill in between would lose what was measured.
        os.truncate(path, len(complete))
