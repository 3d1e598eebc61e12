"""XQuant and XQuant-CL against KIVI* at equal bytes, every token passing through the cache.

    python -m benchmarks.xquant_ppl [--model recall] [--text FILE] [--windows 104] [--seeds 2] [--record FILE]

Data: windows that hold a random span of symbols and the same span again (kvqjax.eval.synthetic), of which the second
half, which a model can only predict from its cache, is scored; or the pieces of a text file, scored entirely. Groups of
caches have about equal stored bits per key or value channel; differences are to the group's first cache
(benchmarks/paired.py). A run that is stopped, or ends after `--minutes`, continues from its record. KIVI* protects no
layers here: these models have two or three.
"""

import argparse
import time
from pathlib import Path

import numpy as np

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
)  # fmt: skip
from kvqjax.calibrate.xquant import prepared
from kvqjax.methods.roofline import flops_per_token

STAR = "kivi_star:bits={},protected=0"
LATENT = "xquant:bits={},latent=true"
CL = "xquant_cl:bits={},base=0,protected=1"
OPEN = [CL.format(2) + option for option in (",space=residual", ",axis=channel", ",accumulator=4")]
# X takes E numbers where keys and values take 2*kv_width: half as many in recall and demo, a quarter in mha.
GROUPS = {
    2: [
        [STAR.format(2), "xquant:bits=4", CL.format(4), LATENT.format(2), LATENT.format(2) + ",outliers=1"],
        [STAR.format(3), LATENT.format(3)],
        [STAR.format(4), "xquant:bits=8", LATENT.format(4)],
        ["xquant:bits=3,protected=1", CL.format(3)],
        ["xquant:bits=2,protected=1", "xquant:bits=3", CL.format(2)],
        [STAR.format(1), "xquant:bits=2"],
    ],
    4: [
        [STAR.format(2), "xquant:bits=8"],
        [STAR.format(1), "xquant:bits=4", CL.format(4)],
        ["xquant:bits=3,protected=1", CL.format(3)],
        ["xquant:bits=2,protected=1", CL.format(2), *OPEN],
        [STAR.format(3)],
        [STAR.format(4)],
    ],
}


def groups_of(model) -> list[list[str]]:
    return GROUPS[2 * model.config.kv_width // model.config.width]


def windows_of(model, options) -> np.ndarray:
    """The scored windows of all seeds, in this order."""
    if options.text is None:
        return np.concatenate([span_windows(model, options.windows, seed) for seed in range(options.seeds)])
    ids = token_ids(model, options.text)
    return np.concatenate([text_windows(ids, options.windows, seed) for seed in range(options.seeds)])


def measure(model, options, record: dict) -> None:
    """Score what the record lacks until the time is up."""
    todo = [text for group in groups_of(model) for text in group if text not in record["rows"]]
    if not todo or not options.minutes:
        return
    end, rows = time.monotonic() + 60 * options.minutes, windows_of(model, options)
    reference = exact_logits(model, rows)
    for text in todo:
        if time.monotonic() > end:
            break
        method = kvqjax.parse(text)
        unscored = 0 if options.text else WINDOW // 2
        record["rows"][text] = score(prepared(model, method), method, rows, reference, unscored)
        save_record(options.record, record)


def show(model, record: dict) -> None:
    """The table of what the record holds, one group after the other."""
    print(
        "| cache | bits | nats | exact | against the first | KL | top-1 agreement | MFLOP per step |\n"
        + "|---" * 8
        + "|"
    )
    for group in groups_of(model):
        done = [text for text in group if text in record["rows"]]
        for text in done:
            found, method = compare(record["rows"][text], record["rows"][done[0]]), kvqjax.parse(text)
            gap = f"{found['against_first']:+.4f} +- {found['against_first_error']:.4f}" if text != done[0] else "first"
            flops = flops_per_token(method, model.config) * WINDOW / 1e6
            print(
                f"| {text} | {stored_bits(model, method):.3f} | {found['nats']:.4f} | {found['exact']:.4f} | {gap} "
                f"| {found['kl']:.4f} | {found['top1']:.4f} | {flops:.0f} |"
            )
        if done:
            print(f"| ({found['tokens']} tokens) |" + " |" * 7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="recall")
    parser.add_argument("--text", type=Path, help="a UTF-8 file; repeated spans without it")
    parser.add_argument("--windows", type=int, default=104, help="per seed, a multiple of 8")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=7.0, help="0 prints what the record holds")
    parser.add_argument("--record", type=Path, default=Path("xquant_ppl.json"))
    options = parser.parse_args()
    model = kvqjax.load(options.model)
    about = {"model": options.model, "text": digest(options.text), "windows": options.windows, "seeds": options.seeds}
    record = load_record(options.record, about)
    measure(model, options, record)
    show(model, record)


if __name__ == "__main__":
    main()
