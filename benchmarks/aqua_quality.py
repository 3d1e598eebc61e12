"""AQUA-KV against HIGGS and KIVI at about equal bits, and the paper's ablations, every token passing through the cache.

    python benchmarks/aqua_quality.py --calibration FILE --text FILE [--model demo] [--tokens 50000] [--out FILE.json]

In the loop, chunks of 32 tokens, windows of 512 (DESIGN section 7). For each seed, the predictors are calibrated on
other sequences and the scored windows are others. Differences in nats per token to the first cache come with their
paired standard error (the unit of pairing is a batch of windows). All caches keep 4 sinks and 128-token buffers, KIVI
its window.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import kvqjax
from kvqjax.calibrate.aqua import calibrate
from kvqjax.calibrate.aqua_fit import Recipe
from kvqjax.eval.perplexity import score_windows
from kvqjax.ledger import ledger

WINDOW, CHUNK, BATCH = 512, 32, 8
CACHES = (
    "aqua:bits=2",
    "higgs:bits=2",
    "kivi:bits=2,group=32,window=0,sinks=4",
    "kivi:bits=2,group=128,window=0,sinks=4",
    "higgs:bits=2,sinks=4;0=higgs:bits=4",  # AQUA's own bits without predictors
    "aqua:bits=2,key_inputs=none",
    "aqua:bits=2,value_inputs=none",
    "aqua:bits=2,key_inputs=none,value_inputs=none",
    "aqua:bits=2,backbone=token",
    "aqua:bits=2,backbone=channel",
    "aqua:bits=2,predictor=int4",
    "aqua:bits=2,first_bits=16",
)


def ids_of(model, path: Path) -> np.ndarray:
    return np.asarray(model.tokenizer(path.read_text(encoding="utf-8"))["input_ids"], np.int32)


def sample(ids: np.ndarray, rows: int, length: int, seed: int) -> np.ndarray:
    """`rows` of the text's non-overlapping pieces, other ones for another seed as far as the text goes."""
    pieces = ids[: len(ids) // length * length].reshape(-1, length)
    order = np.random.default_rng(0).permutation(len(pieces))
    return pieces[np.take(order, range(seed * rows, (seed + 1) * rows), mode="wrap")]


def ready(model, name: str, tokens: np.ndarray):
    """(model with constants, method, seconds of calibration, explained variance of the last layer)."""
    method = kvqjax.parse(name)
    if not name.startswith("aqua"):
        return model, method, 0.0, None
    start = time.perf_counter()
    artifact = calibrate(model, method, tokens, recipe=Recipe())
    last = artifact.about["layers"][-1]
    explained = {source: last[source].get("explained") for source in ("k", "v")}
    return model.with_artifact(artifact), method, time.perf_counter() - start, explained


def score(model, plain, method, rows: np.ndarray) -> np.ndarray:
    """Sums of every batch of windows: [batches, 5] as kvqjax.eval.perplexity.Sums."""
    out = []
    for start in range(0, len(rows), BATCH):
        sums = score_windows(model, plain, jnp.asarray(rows[start : start + BATCH]), method, CHUNK, 0)
        out.append([float(s.sum()) for s in sums])
    return np.asarray(out)


def row_of(name: str, sums: np.ndarray, first: np.ndarray) -> dict:
    nll, exact, kld, top1, tokens = sums.T
    gap = nll / tokens - first[:, 0] / first[:, 4]
    return {
        "cache": name,
        "ppl": float(np.exp(nll.sum() / tokens.sum())),
        "ppl_exact": float(np.exp(exact.sum() / tokens.sum())),
        "kld": float(kld.sum() / tokens.sum()),
        "top1": float(top1.sum() / tokens.sum()),
        "minus_first": float(gap.mean()),
        "paired_error": float(gap.std(ddof=1) / len(gap) ** 0.5) if len(gap) > 1 else None,
        "tokens": int(tokens.sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    for name, value in (("tokens", 50000), ("seeds", 2), ("sequences", 64), ("length", 1028)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cache", action="append")
    given = parser.parse_args()
    model = kvqjax.load(given.model)
    learn, read = (ids_of(model, path) for path in (given.calibration, given.text))
    results = []
    for seed in range(given.seeds):
        first = None
        tokens = sample(learn, given.sequences, given.length, seed)
        rows = sample(read, max(BATCH, given.tokens // WINDOW // BATCH * BATCH), WINDOW, seed)
        for name in given.cache or CACHES:
            loaded, method, seconds, explained = ready(model, name, tokens)
            sums = score(loaded, model, method, rows)
            first = sums if first is None else first
            book = ledger(jax.eval_shape(lambda method=method: kvqjax.init_cache(model, method, 1, WINDOW)))
            row = {"seed": seed, **row_of(name, sums, first), "bits_method": book.bits_method}
            row |= {"calibration_seconds": round(seconds, 1), "explained": explained}
            results.append(row)
            print(json.dumps(row), flush=True)
    if given.out:
        given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
