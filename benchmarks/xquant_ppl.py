"""XQuant and XQuant-CL against KIVI* at equal bytes, every token passing through the cache.

    python -m benchmarks.xquant_ppl [--model recall] [--windows 200] [--seeds 2] [--out FILE.json]

Data: windows that hold a random span of symbols and the same span again (kvqjax.eval.synthetic). The second half, which
a model can only predict from its cache, is scored. Groups of caches have about equal stored bits per key or value
channel; within a group, the difference in nats per token to the group's first cache is given with its paired standard
error (the unit of pairing is a batch of windows). KIVI* protects no layers here: these models have two or three.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import kvqjax
from kvqjax.calibrate.xquant import prepared
from kvqjax.eval.perplexity import score_windows
from kvqjax.eval.synthetic import repeated_spans
from kvqjax.ledger import ledger
from kvqjax.methods.xquant_cost import flops_per_token

WINDOW, CHUNK, BATCH = 512, 32, 8
STAR = "kivi_star:bits={},protected=0"
LATENT = "xquant:bits={},latent=true"
CL = "xquant_cl:bits={},base=0,protected=1"
# X takes E numbers where keys and values take 2*kv_width: half as many in recall and demo, a quarter in mha.
GROUPS = {
    2: [
        [STAR.format(2), "xquant:bits=4", CL.format(4), LATENT.format(2), LATENT.format(2) + ",outliers=1"],
        ["xquant:bits=3", CL.format(2), CL.format(2) + ",space=residual", CL.format(2) + ",axis=channel",
         CL.format(2) + ",accumulator=4"],
        [STAR.format(4), "xquant:bits=8", LATENT.format(4), LATENT.format(4) + ",outliers=1"],
        [STAR.format(3), LATENT.format(3), LATENT.format(3) + ",outliers=1"],
    ],
    4: [
        [STAR.format(2), "xquant:bits=8"],
        ["xquant:bits=4", CL.format(4)],
        ["xquant:bits=3", CL.format(2), CL.format(2) + ",space=residual", CL.format(2) + ",axis=channel",
         CL.format(2) + ",accumulator=4"],
    ],
}  # fmt: skip


def span_windows(model, count: int, seed: int) -> np.ndarray:
    """[count, WINDOW] ids."""
    rng, tokenize = np.random.default_rng(seed), model.tokenizer
    length = lambda text: len(tokenize(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    texts = (problem.prompt + problem.answer for problem in (repeated_spans(rng, WINDOW, length) for _ in range(count)))
    rows = [tokenize(text, add_special_tokens=False)["input_ids"] for text in texts]
    return np.asarray([row[:WINDOW] for row in rows], np.int32)


def evaluate(model, method, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Mean nats per token of every batch of windows, through the cache and exact; KL and agreement with exact."""
    ready, plain = prepared(model, method), model.replace(constants=())
    half = WINDOW // 2 // CHUNK
    out = []
    for start in range(0, len(rows), BATCH):
        sums = score_windows(ready, plain, jnp.asarray(rows[start : start + BATCH]), method, CHUNK, 0)
        out.append([float(s[half:].sum()) for s in sums])
    nll, exact, kld, top1, tokens = np.asarray(out).T
    return {"nll": nll / tokens, "exact": exact / tokens, "kld": kld / tokens, "top1": top1 / tokens, "tokens": tokens}


def stored_bits(model, method) -> float:
    book = ledger(jax.eval_shape(lambda: kvqjax.init_cache(model, method, 1, WINDOW)))
    return book.bits_method


def row(model, method, got, first) -> dict:
    """One line of the table; `first` is the group's first cache."""
    gap = got["nll"] - first["nll"]
    return {
        "cache": str(method),
        "bits": round(stored_bits(model, method), 3),
        "nats": round(float(got["nll"].mean()), 4),
        "exact": round(float(got["exact"].mean()), 4),
        "against_first": round(float(gap.mean()), 4),
        "standard_error": round(float(gap.std(ddof=1) / len(gap) ** 0.5), 4),
        "kl": round(float(got["kld"].mean()), 4),
        "top1": round(float(got["top1"].mean()), 4),
        "tokens": int(got["tokens"].sum()),
        "mflop_per_512_tokens": round(flops_per_token(method, model.config) * 512 / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="recall")
    parser.add_argument("--windows", type=int, default=200, help="per seed; half of each window is scored")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = kvqjax.load(options.model)
    rows = np.concatenate(
        [span_windows(model, options.windows // BATCH * BATCH, seed) for seed in range(options.seeds)]
    )
    ratio = 2 * model.config.kv_width // model.config.width
    lines = []
    for group in GROUPS[ratio]:
        first = None
        for text in group:
            method = kvqjax.parse(text)
            got = evaluate(model, method, rows)
            first = first or got
            lines.append(row(model, method, got, first))
            print(json.dumps(lines[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"model": options.model, "rows": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
