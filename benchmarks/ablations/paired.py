"""Several caches scored on the same windows, every token passing through the cache in chunks of 32.

Sums are kept batch by batch in a JSON record, so that a stopped run continues where it was and differences between
caches can be paired: the unit of pairing is a batch of 8 windows of 512 tokens, over all seeds.
"""

import functools
import hashlib
import json
import os
import platform
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import kvqjax
from kvqjax.cache.accounting import ledger
from kvqjax.eval.scores import replay
from kvqjax.eval.synthetic import repeated_spans
from kvqjax.eval.windows import score_chunk

__all__ = [
    "BATCH",
    "WINDOW",
    "compare",
    "digest",
    "exact_logits",
    "load_record",
    "save_record",
    "score",
    "span_windows",
    "stored_bits",
    "text_windows",
    "token_ids",
]

WINDOW, CHUNK, BATCH = 512, 32, 8


def span_windows(model, count: int, seed: int) -> np.ndarray:
    """[count, WINDOW] ids: a random span of symbols and the same span again."""
    rng, tokenize = np.random.default_rng(seed), model.tokenizer
    length = lambda text: len(tokenize(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    spans = (repeated_spans(rng, 2 * WINDOW, length).prompt for _ in range(count))  # twice as long as is needed
    ids = [tokenize(span, add_special_tokens=False)["input_ids"][: WINDOW // 2] for span in spans]
    return np.asarray([half + half for half in ids], np.int32)


def token_ids(model, path: Path) -> np.ndarray:
    """A text file's ids."""
    return np.asarray(model.tokenizer(path.read_text(encoding="utf-8"))["input_ids"], np.int32)


def text_windows(ids: np.ndarray, count: int, seed: int, length: int = WINDOW) -> np.ndarray:
    """[count, length] of a text's non-overlapping pieces in random order, other ones for another seed as far as the
    text goes."""
    pieces = ids[: len(ids) // length * length].reshape(-1, length)
    order = np.random.default_rng(0).permutation(len(pieces))
    return pieces[np.take(order, range(seed * count, (seed + 1) * count), mode="wrap")]


@functools.partial(jax.jit, static_argnames="unscored")
def _sums(logits, reference, batch, unscored):
    scored = jnp.arange(batch.shape[1]) >= unscored
    valid = jnp.broadcast_to(scored.at[-1].set(False)[None], batch.shape)
    return score_chunk(logits, reference, jnp.roll(batch, -1, axis=1), valid)


def exact_logits(model, rows: np.ndarray) -> list[np.ndarray]:
    """What the exact cache gives for every batch of windows, [BATCH, WINDOW, V]."""
    batches = (jnp.asarray(rows[start : start + BATCH]) for start in range(0, len(rows), BATCH))
    return [np.asarray(replay(model, batch, kvqjax.exact(), CHUNK)) for batch in batches]


def score(model, method, rows: np.ndarray, reference: list[np.ndarray], unscored: int = 0) -> list[list[float]]:
    """Sums of every batch of windows, as kvqjax.eval.windows.Sums, without the first `unscored` tokens of
    each; reference: `exact_logits` of the same windows."""
    out = []
    for start, exact in zip(range(0, len(rows), BATCH), reference, strict=True):
        batch = jnp.asarray(rows[start : start + BATCH])
        sums = _sums(replay(model, batch, method, CHUNK), jnp.asarray(exact), batch, unscored)
        out.append([float(part) for part in sums])
    return out


def stored_bits(model, method) -> float:
    """Bits per key or value channel by the codecs alone."""
    return ledger(jax.eval_shape(lambda: kvqjax.init_cache(model, method, 1, WINDOW))).bits_method


def compare(sums: list[list[float]], first: list[list[float]]) -> dict[str, float]:
    """Means over all scored tokens; and the differences, in loss and in KL divergence (nats per token), to another
    cache on the same windows, with their paired standard errors."""
    batches, reference = np.asarray(sums), np.asarray(first)
    tokens = batches[:, 4].sum()
    names = {"nats": 0, "exact": 1, "kl": 2, "top1": 3}
    out = {name: float(batches[:, i].sum() / tokens) for name, i in names.items()} | {"tokens": int(tokens)}
    for name, i in (("against_first", 0), ("kl_against_first", 2)):
        gap = batches[:, i] / batches[:, 4] - reference[:, i] / reference[:, 4]
        out |= {name: float(gap.mean()), f"{name}_error": float(gap.std(ddof=1) / len(gap) ** 0.5)}
    return out


def load_record(path: Path, about: dict) -> dict:
    """The record at `path`, or a new one. Raises ValueError when it was made with other settings."""
    fresh = {"about": about, "machine": f"{platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}"}
    if not path.exists():
        return fresh | {"rows": {}}
    record = json.loads(path.read_text(encoding="utf-8"))
    if record["about"] != about:
        raise ValueError(f"{path} was made with {record['about']}, not {about}")
    return record


def save_record(path: Path, record: dict) -> None:
    """Write the record; a kill leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=None, separators=(",", ":")).replace(']]},"', ']]},\n"') + "\n")
    part.replace(path)


def digest(path: Path | None) -> str | None:
    """What tells one text from another in a record."""
    return path and hashlib.sha256(path.read_bytes()).hexdigest()[:16]
