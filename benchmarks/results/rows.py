"""Rows of the results page: one cache on SmolLM2-135M-Instruct, two texts scored against the exact
cache.

A row's file holds means by window, of which standard errors are made. What a method learns from
text is kept in the user's cache folder, so that a run that was stopped does not calibrate again.
"""

import json
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvqjax
from benchmarks.calibrated import learnt
from kvqjax.cache.accounting import Ledger
from kvqjax.calibrate import forget, learns, sequences, with_constants
from kvqjax.data.corpora import read
from kvqjax.data.documents import Data
from kvqjax.eval.comparison import artifact_folder, kept_path
from kvqjax.eval.scores import replay, score
from kvqjax.eval.stamp import ledger_of, stamp
from kvqjax.methods import Method
from kvqjax.model.loading import Model

FOLDER = Path(__file__).parents[1] / "records" / "results"
MODEL = "smollm2"
# Six windows keep a row at half a minute on two cores; four at a time need 0.8 GB for their logits.
LENGTH, CHUNK, BATCH, CONTEXT = 1024, 128, 4, 32768
WINDOWS = {"WikiText-2": 4, "book": 2}
# Sequences and tokens of each: AQUA-KV's own recipe reads 2 million tokens, hours on two cores.
LEARNT = (
    24,
    1024,
)
PLAN = {"length": LENGTH, "chunk": CHUNK, "windows": WINDOWS, "calibration": list(LEARNT)}
NUMBERS = ("nll", "kld", "agree")
# Bits of a code -> caches. None keeps a window of recent tokens beyond what waits to be encoded: in
# windows of 1024 tokens it would hold much more than its share of a long row. SmolLM2 has 3 KV
# heads of 64, so that the longest group of its 192 channels is 64.
CACHES = {
    16: ("exact",),
    1: (
        "kivi:bits=1,window=0",
        "klt:bits=1.0",
        "klt:bits=1.3",
        "aqua:bits=1,backbone=klt",
        "commvq:bits=1,window=0",
        "xquant:bits=1",
    ),
    2: (
        "uniform:bits=2",
        "kivi:bits=2,window=0",
        "kivi:bits=2,group=64,window=0",
        "kivi_star:bits=2,protected=0",
        "kvquant:bits=2,outliers=0.0",
        "kvquant:bits=2",
        "higgs:bits=2",
        "higgs:bits=2,dim=4",
        "higgs:bits=2,dim=4,centre=block,norm=unbiased",
        "smollm2-2.5-free.json",
        "klt:bits=2.0",
        "klt:bits=2.2",
        "smollm2-2.3.json",
        "klt:bits=2.375,heads=own",
        "aqua:bits=2,first_bits=2",
        "aqua:bits=2",
        "aqua:bits=2,backbone=klt",
        "aqua:bits=2.2,backbone=klt",
        "commvq:bits=2,window=0",
        "xquant:bits=2",
        "xquant_cl:bits=2",
        "omniscale:bits=2,group=64,window=0",
        "kvarn:bits=2,sinks=4",
        "oscar:bits=2,window=0,sinks=4",
        "turboquant:bits=2,sinks=4",
    ),
    3: (
        "uniform:bits=3",
        "kivi:bits=3,group=64,window=0",
        "kivi_star:bits=3,protected=0",
        "kvquant:bits=3,outliers=0.0",
        "kvquant:bits=3",
        "higgs:bits=3",
        "klt:bits=3.0",
        "aqua:bits=3",
        "aqua:bits=2.9,backbone=klt",
        "xquant:bits=3",
        "xquant_cl:bits=3",
        "omniscale:bits=3,group=64,window=0",
        "kvarn:bits=3,sinks=4",
        "turboquant:bits=3,sinks=4",
    ),
    4: (
        "uniform:bits=4",
        "kivi:bits=4,group=64,window=0",
        "kivi_star:bits=4,protected=0",
        "kvquant:bits=4,outliers=0.0",
        "kvquant:bits=4",
        "higgs:bits=4",
        "klt:bits=4.0",
        "aqua:bits=4",
        "xquant:bits=4",
        "xquant_cl:bits=4",
        "omniscale:bits=4,group=64,window=0",
        "kvarn:bits=4,sinks=4",
        "turboquant:bits=4,sinks=4",
    ),
}


class Texts(NamedTuple):
    """`scored`: name -> windows [WINDOWS[name], LENGTH] of token ids; `learnt` is what methods are
    calibrated on; `about` describes all of them."""

    scored: dict[str, np.ndarray]
    learnt: Data
    about: dict[str, Any]


def texts_of(model: Model, wikitext: str, book: str, learn: str, folder: Path | None) -> Texts:
    """WikiText-2's test part, a book, and what methods learn from. Raises UserError for what cannot
    be read or is too short."""
    data = {
        "WikiText-2": read(wikitext, folder=folder),
        "book": read(book),
        "learnt": read(learn, tokens=1 << 17),
    }
    return Texts(windows_of(model, data), data["learnt"], sha256_of(data))


def sha256_of(data: dict[str, Data]) -> dict[str, Any]:
    """Give the digests of the texts, without their paths."""
    return {
        name: {key: text.about[key] for key in ("sha256", "characters")}
        for name, text in data.items()
    }


def windows_of(model: Model, data: dict[str, Data]) -> dict[str, np.ndarray]:
    """The windows [WINDOWS[name], LENGTH] of token ids that are scored. Raises UserError for a text
    that is too short."""
    pieces = {name: sequences(model, data[name], count, LENGTH) for name, count in WINDOWS.items()}
    for name, rows in pieces.items():
        if len(rows) < WINDOWS[name]:
            tokens = WINDOWS[name] * LENGTH
            raise kvqjax.UserError(
                f"{name} has {rows.size} tokens in whole windows; {tokens} are wanted"
            )
    return pieces


def named(folder: Path, cache: str) -> Path:
    """The file of a cache in a folder."""
    return folder / f"{re.sub('[^a-z0-9.]+', '-', cache)}.json"


def path_of(cache: str) -> Path:
    """The file of a row."""
    return named(FOLDER, cache)


def about_of(model: Model, texts: Texts) -> dict[str, Any]:
    """Give the stamp that a finished row must share with a new run to be kept."""
    about = stamp(model, MODEL, 0) | {"plan": PLAN, "data": texts.about}
    return {key: value for key, value in about.items() if key not in ("date", "seed")}


def finished(cache: str, about: dict[str, Any]) -> dict[str, Any] | None:
    """The row on disk, if it was measured under the same stamp."""
    return kept(path_of(cache), about)


def kept(path: Path, about: dict[str, Any]) -> dict[str, Any] | None:
    """The record at a path, if it was made under the same stamp."""
    row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return row if row and row["about"] == about else None


def calibrated(model: Model, method: Method, texts: Texts) -> tuple[Model, float]:
    """The model with what `method` needs, learnt from `LEARNT` of the text, and the processor
    seconds that it took once. Calibrations are kept where `kvq.compare` keeps its own."""
    if not learns(method, model.config):
        ((calibrated_model, _),) = with_constants(model, [method], [])
        return calibrated_model, 0.0
    folder = kept_path(
        artifact_folder(), model, method, f"{texts.about['learnt']['sha256']} {LEARNT}", LEARNT[0]
    )
    seconds = folder.with_name(f"{folder.name}.seconds.json")
    if not seconds.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        begun, state = time.process_time(), folder.with_name(f"{folder.name}.state.npz")
        learnt(model, method, sequences(model, texts.learnt, *LEARNT), state=state).save(folder)
        forget(state)
        seconds.write_text(json.dumps(time.process_time() - begun), encoding="utf-8")
    ((calibrated_model, _),) = with_constants(model, [method], [folder])
    return calibrated_model, json.loads(seconds.read_text(encoding="utf-8"))


def references(model: Model, texts: Texts) -> dict[str, list[jax.Array]]:
    """The exact cache's logits of every text, a batch of windows each, made once for all rows: 1.2
    GB. They pass through the cache in the same chunks, so that the exact row has a divergence of
    zero."""
    plain, exact = model.replace(constants=()), kvqjax.parse("exact")
    return {
        name: [
            replay(plain, jnp.asarray(rows[i : i + BATCH]), exact, CHUNK)
            for i in range(0, len(rows), BATCH)
        ]
        for name, rows in texts.scored.items()
    }


def scores(
    model: Model, method: Method, rows: np.ndarray, reference: list[jax.Array]
) -> dict[str, list[float]]:
    """Means over each window's predictions, and those of the exact cache's loss."""
    means: dict[str, list[float]] = {name: [] for name in (*NUMBERS, "nll_exact")}
    for number, exact in enumerate(reference):
        tokens = jnp.asarray(rows[number * BATCH : (number + 1) * BATCH])
        for name, values in window_means(
            replay(model, tokens, method, CHUNK), exact, tokens
        ).items():
            means[name] += values
    return means


def window_means(logits: jax.Array, exact: jax.Array, tokens: jax.Array) -> dict[str, list[float]]:
    """Means over the predictions of each of a batch of windows [B, LENGTH], of logits [B, LENGTH,
    V] against those of the exact cache."""
    through_cache = score(logits, exact, tokens)
    values = {name: getattr(through_cache, name) for name in NUMBERS} | {
        "nll_exact": score(exact, exact, tokens).nll
    }
    return {
        name: [float(f"{mean:.7g}") for mean in np.asarray(x, np.float64).mean(1)]
        for name, x in values.items()
    }


def book_of(model: Model, method: Method, capacity: int) -> Ledger:
    """What a row of `capacity` tokens stores where the model has 16 bits, as chips serve it. Sinks
    and the newest tokens, which are stored exactly, then take half of what they take in float32, in
    which rows are measured."""

    def halved(x):
        return x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x

    params = jax.eval_shape(lambda: jax.tree.map(halved, model.params))
    return ledger_of(model.replace(params=params), method, capacity)


def measure(
    model: Model, texts: Texts, reference: dict[str, list[jax.Array]], cache: str
) -> dict[str, Any]:
    """Bits, bytes and scores of one cache, and how long its calibration took."""
    method = kvqjax.parse(cache)
    calibrated_model, seconds = calibrated(model, method, texts)
    book = book_of(model, method, CONTEXT)
    row = {
        "cache": cache,
        "bits": book.bits_method,
        "bits_32k": book.bits_stored,
        "bytes_32k": book.bytes,
    }
    row |= {"calibration_seconds": round(seconds)}
    windows = {
        name: scores(calibrated_model, method, rows, reference[name])
        for name, rows in texts.scored.items()
    }
    return row | {"by_window": windows}
