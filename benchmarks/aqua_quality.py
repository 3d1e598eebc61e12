"""AQUA-KV against HIGGS and KIVI at equal bits, and the paper's ablations, every token passing through the cache.

    python -m benchmarks.aqua_quality --calibration FILE [--text FILE] [--model demo] [--minutes 7] [--record FILE]

Scored: pieces of a text file, or, without one, repeated spans of symbols (kvqjax.eval.synthetic), of which the second
half, which a model can only predict from its cache, counts. For each seed the predictors are calibrated on other
sequences and other windows are scored; see benchmarks/paired.py for windows, pairing and resuming. Every cache keeps 4
sinks (one ablation: none) and encodes 128 tokens at a time, KIVI with groups of 32 so many.
"""

import argparse
import time
from pathlib import Path

import kvqjax
from benchmarks.paired import (
    WINDOW,
    compare,
    digest,
    exact_logits,
    load_record,
    save_record,
    score,
    span_windows,
    stored_bits,
    text_windows,
    token_ids,
)
from kvqjax.calibrate.aqua import calibrate
from kvqjax.calibrate.aqua_fit import Recipe

CLEAN = " fitted on exact inputs"  # the paper's quantiser-agnostic ablation: a recipe, not a cache
GROUPS = [
    # Equal bits: the first layer at 2 bits too.
    [
        "aqua:bits=2,first_bits=2",
        "higgs:bits=2",
        "kivi:bits=2,group=128,window=0,sinks=4",
        "kivi:bits=2,group=32,window=0,sinks=4",
    ],
    # The paper's setting, and its Table 1.
    [
        "aqua:bits=2",
        "higgs:bits=2,sinks=4;0=higgs:bits=4",
        "aqua:bits=2,key_inputs=none",
        "aqua:bits=2,value_inputs=none",
        "aqua:bits=2,sinks=0",
        "aqua:bits=2,rope=post",
        "aqua:bits=2" + CLEAN,
        "aqua:bits=2,predictor=int4",
        "aqua:bits=2,predictor=low_rank,rank=64",
        "aqua:bits=2,first_bits=16",
    ],
    ["aqua:bits=2,backbone=token", "aqua:bits=2,backbone=token,key_inputs=none,value_inputs=none"],
    ["aqua:bits=2,backbone=channel", "aqua:bits=2,backbone=channel,key_inputs=none,value_inputs=none"],
    ["aqua:bits=3", "higgs:bits=3,sinks=4;0=higgs:bits=4"],
    # The paper's Table 3: at most 256 tokens in the body, chosen by H2O.
    [
        "exact:sinks=4,keep=h2o:256",
        "aqua:bits=2,keep=h2o:256",
        "higgs:bits=2,sinks=4,keep=h2o:256;0=higgs:bits=4",
        "kivi:bits=2,group=128,window=0,sinks=4,keep=h2o:256",
    ],
]


def needs_predictors(name: str) -> bool:
    return name.startswith("aqua") and "key_inputs=none,value_inputs=none" not in name


def ready(model, name: str, tokens):
    """(model with constants, method, what the calibration found)."""
    method = kvqjax.parse(name.removesuffix(CLEAN))
    if not needs_predictors(name):
        return model, method, None
    start = time.perf_counter()
    artifact = calibrate(model, method, tokens, recipe=Recipe(clean=name.endswith(CLEAN)))
    seconds = round(time.perf_counter() - start, 1)
    return model.with_artifact(artifact), method, {"seconds": seconds, "report": artifact.about["report"]}


def measure(model, options, record: dict) -> None:
    """Score what the record lacks until the time is up; rows are named "seed cache"."""
    if not options.minutes:
        return
    end, spans = time.monotonic() + 60 * options.minutes, options.text is None
    learn, read = (path and token_ids(model, path) for path in (options.calibration, options.text))
    draw = span_windows if spans else lambda model, *how: text_windows(read, *how)
    windows = [draw(model, options.windows, seed) for seed in range(options.seeds)]
    exact = [exact_logits(model, rows) for rows in windows]
    for name in (name for group in GROUPS for name in group):
        for seed, (rows, reference) in enumerate(zip(windows, exact, strict=True)):
            key = f"{seed} {name}"
            if key in record["rows"] or time.monotonic() > end:
                continue
            loaded, method, found = ready(model, name, text_windows(learn, options.sequences, seed, options.length))
            record["rows"][key] = score(loaded, method, rows, reference, WINDOW // 2 if spans else 0)
            record.setdefault("calibration", {})[key] = found
            save_record(options.record, record)


def show(model, record: dict, seeds: int) -> None:
    """The table of what the record holds for all seeds."""
    names = ("cache", "bits", "nats", "exact", "against the first", "KL", "against the first", "top-1 agreement")
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    sums = {}
    for name in (name for group in GROUPS for name in group):
        parts = [record["rows"].get(f"{seed} {name}") for seed in range(seeds)]
        if all(parts):
            sums[name] = [batch for part in parts for batch in part]
    for group in GROUPS:
        done = [name for name in group if name in sums]
        for name in done:
            found = compare(sums[name], sums[done[0]])
            keys = ("against_first", "kl_against_first")
            gaps = [f"{found[key]:+.4f} +- {found[key + '_error']:.4f}" for key in keys]
            gaps = gaps if name != done[0] else ["first", "first"]
            bits = stored_bits(model, kvqjax.parse(name.removesuffix(CLEAN)))
            print(
                f"| {name} | {bits:.3f} | {found['nats']:.4f} | {found['exact']:.4f} | {gaps[0]} | {found['kl']:.4f} "
                f"| {gaps[1]} | {found['top1']:.4f} |"
            )
        if done:
            print(f"| ({found['tokens']} tokens) |" + " |" * 7)


def show_predictors(record: dict, seeds: int) -> None:
    """What the predictors of the paper's setting explain, layer by layer."""
    names = ("explained", "equivalent_bits", "held_out_mse", "reconstruction_mse")
    print("\n| seed | layer | source | " + " | ".join(names) + " |\n" + "|---" * 7 + "|")
    for seed in range(seeds):
        found = record.get("calibration", {}).get(f"{seed} aqua:bits=2") or {"report": []}
        for row in found["report"][2:]:  # the first layer has no predictors
            cells = " | ".join(f"{row[name]:.4f}" for name in names)
            print(f"| {seed} | {row['layer']} | {row['source']} | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calibration", type=Path, required=True, help="a UTF-8 file")
    parser.add_argument("--text", type=Path, help="a UTF-8 file to score; repeated spans without it")
    for name, value in (("windows", 56), ("seeds", 2), ("sequences", 32), ("length", 1028)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--minutes", type=float, default=7.0, help="0 prints what the record holds")
    parser.add_argument("--record", type=Path, default=Path("aqua_quality.json"))
    options = parser.parse_args()
    model = kvqjax.load(options.model)
    about = {name: getattr(options, name) for name in ("model", "windows", "seeds", "sequences", "length")}
    about |= {name: digest(getattr(options, name)) for name in ("calibration", "text")}
    record = load_record(options.record, about)
    measure(model, options, record)
    show(model, record, options.seeds)
    show_predictors(record, options.seeds)


if __name__ == "__main__":
    main()
