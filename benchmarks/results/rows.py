"""Rows of the results page: one cache on one bundled model, everything measured by one compiled program."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvqjax
from benchmarks.calibrated import calibrated, pair_rows, span_rows
from kvqjax.data.corpora import read_text
from kvqjax.eval.scores import Scores, exact_logits, replay, score
from kvqjax.eval.stamp import ledger_of, stamp
from kvqjax.eval.synthetic import key_value_recall, passkey_prompt
from kvqjax.eval.windows import growth
from kvqjax.model.loading import Model

FOLDER = Path(__file__).parents[1] / "records" / "results"
MODELS = ("demo", "recall")
SEED, LENGTH, CHUNK, WINDOWS, LEARNT, SPANS = 0, 512, 32, 16, (16, 516), 8
PLAN = {"length": LENGTH, "chunk": CHUNK, "windows": WINDOWS, "calibration": list(LEARNT)}
# About how many bits per key or value channel the codecs store -> caches; none keeps a window of recent tokens.
CACHES = {
    16: ("exact",),
    1: ("uniform:bits=1", "kivi:bits=1,group=128,window=0", "commvq:bits=1,window=0", "xquant:bits=2"),
    2: (
        "uniform:bits=2",
        "kivi:bits=2,group=128,window=0",
        "kivi_star:bits=2,protected=0",
        "kvquant:bits=2,outliers=0.0",
        "kvquant:bits=2",
        "higgs:bits=2",
        "higgs:bits=2,dim=4",
        "aqua:bits=2,first_bits=2",
        "aqua:bits=2",
        "commvq:bits=2,window=0",
        "xquant:bits=4",
        "xquant:bits=2,latent=true",
        "xquant_cl:bits=4,base=0,protected=1",
        "omniscale:bits=2,group=128,window=0",
        "kvarn:bits=2,sinks=4",
        "oscar:bits=2,window=0,sinks=4",
        "turboquant:bits=2,norm=unbiased,sinks=4",
        "higgs:bits=2,dim=4,group=head,rope=post,buffer=32,norm=unbiased,rotate=signs",
    ),
    3: (
        "uniform:bits=3",
        "kivi:bits=2,window=0",
        "kivi:bits=3,group=128,window=0",
        "kivi_star:bits=3,protected=0",
        "kvquant:bits=3,outliers=0.0",
        "kvquant:bits=3",
        "higgs:bits=3",
        "aqua:bits=3,first_bits=3",
        "xquant:bits=6",
        "xquant:bits=3,latent=true",
    ),
    4: (
        "uniform:bits=4",
        "kivi:bits=4,group=128,window=0",
        "kivi_star:bits=4,protected=0",
        "kvquant:bits=4,outliers=0.0",
        "kvquant:bits=4",
        "higgs:bits=4",
        "aqua:bits=4",
        "xquant:bits=8",
        "xquant:bits=4,latent=true",
    ),
}


class Data(NamedTuple):
    """`learn` [N, T] for calibration; `text` [16, LENGTH] and which of its predictions are scored; per recall task,
    rows and the places of their answers; `about` says where the text is from."""

    learn: np.ndarray
    text: np.ndarray
    scored: np.ndarray
    recall: dict[str, tuple[np.ndarray, np.ndarray]]
    about: dict[str, Any]


def _pieces(ids: np.ndarray, rows: int, length: int) -> np.ndarray:
    if len(ids) < rows * length:
        raise kvqjax.UserError(f"the text has {len(ids)} tokens in each half; {rows * length} are wanted")
    return ids[: rows * length].reshape(rows, length)


def data_of(model: Model, name: str, source: str) -> Data:
    """`demo` reads text: the first half to learn from, the second to be scored. `recall` reads spans of symbols, of
    which the second copies are scored."""
    pairs = pair_rows(model, WINDOWS, LENGTH, SEED, key_value_recall)
    if name == "recall":
        scored = np.arange(LENGTH - 1) >= LENGTH // 2 + 1
        about = {"name": "repeated spans of symbols"}
        learn = span_rows(model, *LEARNT, seed=1)
        return Data(learn, span_rows(model, WINDOWS, LENGTH, SEED), scored, {"pairs": pairs}, about)
    text, about = read_text(source, 40_000, SEED)
    ids = np.asarray(model.tokenizer(text)["input_ids"], np.int32)
    half = len(ids) // 2
    passkeys = pair_rows(model, WINDOWS, LENGTH, SEED, passkey_prompt)
    rows = _pieces(ids[half:], WINDOWS, LENGTH)
    everywhere = np.ones(LENGTH - 1, bool)
    about |= {"name": Path(about["name"]).name}
    return Data(_pieces(ids[:half], *LEARNT), rows, everywhere, {"pairs": pairs, "pass key": passkeys}, about)


def path_of(name: str, cache: str) -> Path:
    return FOLDER / f"{name}--{re.sub('[^a-z0-9.]+', '-', cache)}.json"


def about_of(model: Model, name: str, data: Data) -> dict[str, Any]:
    """What a finished row must share with a new run to be kept."""
    about = stamp(model, name, SEED) | {"plan": PLAN, "data": data.about}
    return {key: value for key, value in about.items() if key not in ("date", "weights")}  # weights are plain here


def finished(name: str, cache: str, about: dict[str, Any]) -> dict[str, Any] | None:
    """The row on disk, if it was measured under the same stamp and window by window."""
    path = path_of(name, cache)
    row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return row if row and row["about"] == about and "by_window" in row else None


def _scores(model: Model, method, rows: np.ndarray, reference) -> Scores:
    tokens = jnp.asarray(rows)
    got = score(replay(model, tokens, method, CHUNK), reference, tokens)
    return jax.tree.map(np.asarray, got)


def references(model: Model, data: Data) -> dict[str, jax.Array]:
    """Exact logits of every set of rows, made once for all caches."""
    sets = {"text": data.text} | {task: rows for task, (rows, _) in data.recall.items()}
    return {key: exact_logits(model, jnp.asarray(rows)) for key, rows in sets.items()}


def _drift(kld: np.ndarray) -> tuple[list[float], float]:
    """KL divergence in SPANS equal spans of the window, and its growth from the first in which every cache here is
    wholly encoded: units of up to 128 tokens wait (1 for the exact cache)."""
    means = [float(part.mean()) for part in np.array_split(kld, SPANS, axis=1)]
    starts = [int(part[0]) for part in np.array_split(np.arange(kld.shape[1]), SPANS)]
    return means, growth(means, starts, 128) or 1.0


def _by_window(scores: Scores, scored: np.ndarray) -> dict[str, list[float]]:
    """Means over each window's scored predictions: what standard errors of differences are made of."""
    means = {name: np.asarray(getattr(scores, name), np.float64)[:, scored].mean(1) for name in ("nll", "kld")}
    return {name: [float(f"{value:.7g}") for value in values] for name, values in means.items()}


def measure(model: Model, data: Data, reference: dict[str, jax.Array], cache: str) -> dict[str, Any]:
    """Bytes, perplexity, divergence, drift and recall of one cache, and how long its calibration took."""
    method = kvqjax.parse(cache)
    ready, seconds = calibrated(model, method, data.learn)
    got = _scores(ready, method, data.text, reference["text"])
    exact = score(reference["text"], reference["text"], jnp.asarray(data.text))
    books = [ledger_of(model, method, capacity) for capacity in (LENGTH, 32768)]
    row = {"cache": cache, "bits": books[0].bits_method, "bits_32k": books[1].bits_stored, "bytes": books[0].bytes}
    row |= {"bytes_exact": books[0].exact_bytes, "ppl": float(np.exp(got.nll[:, data.scored].mean()))}
    row |= {"ppl_exact": float(np.exp(np.asarray(exact.nll)[:, data.scored].mean()))}
    row |= {"kld": float(got.kld[:, data.scored].mean()), "top1": float(got.agree[:, data.scored].mean())}
    row |= {"by_window": _by_window(got, data.scored)}
    spans, grown = _drift(got.kld)
    row |= {"kld_by_span": spans, "growth": grown, "recall": {}, "calibration_seconds": round(seconds, 1)}
    for task, (rows, asked) in data.recall.items():
        right = _scores(ready, method, rows, reference[task]).right
        row["recall"][task] = float((right | ~asked).all(1).mean())
    return row
