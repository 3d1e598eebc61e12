"""Ablations of every method, every token passing through the cache: measure what is missing, write the page.

    python -m benchmarks.ablations --data scored.txt --calibration other.txt [--only kvquant] [--minutes 30]
    python -m benchmarks.ablations --page-only

The bundled model `demo` reads two UTF-8 files; the other models read symbols that are made here. Records are kept case
by case: a stopped run goes on.
"""

import argparse
import functools
import time
from pathlib import Path

import numpy as np

import kvqjax as kvq
from benchmarks.ablations import page
from benchmarks.ablations.cases import GROUPS, SETS, Case, Set
from benchmarks.ablations.paired import (
    WINDOW,
    digest,
    exact_logits,
    load_record,
    save_record,
    score,
    span_windows,
    text_windows,
    token_ids,
)
from benchmarks.calibrated import calibrated
from kvqjax.data.corpora import read_text

SEEDS, SEQUENCES, LENGTH = 2, 32, 1028


def learnt_from(model, path: Path, case: Case, seed: int) -> np.ndarray:
    """[SEQUENCES, LENGTH] ids to calibrate on."""
    if case.note != "made-up text":
        return text_windows(token_ids(model, path), SEQUENCES, seed, LENGTH)
    text, _ = read_text("synthetic", SEQUENCES * LENGTH, seed)
    return text_windows(np.asarray(model.encode(text), np.int32), SEQUENCES, seed, LENGTH)


def scored_windows(model, kind: Set, path: Path | None, seed: int) -> np.ndarray:
    if kind.data == "spans":
        return span_windows(model, kind.windows, seed)
    return text_windows(token_ids(model, path), kind.windows, seed)


@functools.cache
def _scored(kind: Set, path: Path | None, seed: int):
    """A seed's windows, and what the exact cache of the model as it is gives for them."""
    model = kvq.load(kind.model)
    rows = scored_windows(model, kind, path, seed)
    return rows, exact_logits(model, rows)


def measured(case: Case, kind: Set, options) -> dict:
    """Sums of every batch of windows, by seed, and the digest of the text that the case was calibrated on."""
    out, method = [], kvq.parse(case.cache)
    plain, model = kvq.load(kind.model), kvq.load(kind.model, weights=case.weights)
    for seed in range(SEEDS):
        books = kind.data == "books"
        texts = learnt_from(plain, options.calibration, case, seed) if books else np.zeros((0, 0), np.int32)
        calibrated_model = calibrated(model, method, texts, case.recipe)[0]
        out.append(score(calibrated_model, method, *_scored(kind, options.data, seed), 0 if books else WINDOW // 2))
    return {"learnt_from": digest(options.calibration), "sums": out}


def measure(options) -> None:
    """Add what the records lack until the time is up."""
    end = time.monotonic() + 60 * options.minutes
    for name, kind in SETS.items():
        about = {"model": kind.model, "windows": kind.windows, "seeds": SEEDS}
        if kind.data == "books":
            if options.data is None or options.calibration is None:
                print(f"{name}: --data and --calibration are needed to measure what is missing")
                continue
            about |= {"text": digest(options.data), "sequences": SEQUENCES, "length": LENGTH}
        record = load_record(page.path_of(name), about)
        cases = {case.name: case for group in GROUPS if group.data == name for case in group.cases}
        missing = {key: case for key, case in cases.items() if key not in record["rows"]}
        for number, (key, case) in enumerate(missing.items(), 1):
            if options.only in key and time.monotonic() < end:
                print(f"{name}, {number} of {len(missing)} missing: {key}", flush=True)
                record["rows"][key] = measured(case, kind, options)
                save_record(page.path_of(name), record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a UTF-8 file that `demo` is scored on")
    parser.add_argument("--calibration", type=Path, help="a UTF-8 file that caches of `demo` are calibrated on")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--page-only", action="store_true")
    options = parser.parse_args()
    if not options.page_only:
        measure(options)
    page.PAGE.write_text(page.text(), encoding="utf-8")


if __name__ == "__main__":
    main()
