"""Does a cache's error grow with time, or does the model grow more sensitive? KL divergence against the decoding step.

    python -m benchmarks.drift [--model recall] [--rows 2] [--record FILE]

The long decode of benchmarks/gate.py (2048 steps of one token, problems of 255 tokens after each other), in spans of
256 steps: the exact cache's own loss, and KL(exact || cache) for caches and for constant noise (benchmarks/noise.py),
which cannot drift.
"""

import argparse
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from benchmarks.calibrated import calibrated, span_rows
from benchmarks.gate import STEPS, open_shape
from benchmarks.noise import method_of
from benchmarks.tables import table
from kvqjax.eval.scores import exact_logits, replay, score

RECORD = Path(__file__).parent / "records" / "drift_recall.json"
SPAN = 256
NOISE = ("noise of 0.03", "noise of 0.1")
CACHES = (*NOISE, "xquant:bits=6", "kvquant:bits=3,outliers=0.0", "kivi:bits=3,group=128,window=0")


def by_span(scores: np.ndarray) -> list[float]:
    """Means over rows and SPAN steps."""
    return [float(part.mean()) for part in np.split(np.asarray(scores, np.float64), scores.shape[1] // SPAN, axis=1)]


def measure(name: str, rows: int) -> dict[str, list[float]]:
    model, tokens = open_shape(name), jnp.asarray(span_rows(open_shape(name), rows, STEPS + 1, seed=2, span=255))
    exact, learn = exact_logits(model, tokens), span_rows(model, 8, 388, seed=1)
    spans = {"loss of the exact cache": by_span(score(exact, exact, tokens).nll)}
    for method in map(method_of, CACHES):
        calibrated_model, _ = calibrated(model, method, learn)
        spans[method.name] = by_span(score(replay(calibrated_model, tokens, method, 1), exact, tokens).kld)
        print(method.name, [f"{x:.3g}" for x in spans[method.name]], flush=True)
    return spans


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="recall")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    spans = measure(options.model, options.rows)
    ends = [f"to {SPAN * (i + 1)}" for i in range(STEPS // SPAN)]
    rows = []
    for name, values in spans.items():
        ratio = np.mean(values[len(values) // 2 :]) / np.mean(values[: len(values) // 2])
        rows.append([name, *(f"{x:.3g}" for x in values), f"{ratio:.2f}"])
    print(table(["", *ends, "last / first half"], rows))
    if options.record:
        options.record.write_text(json.dumps({"model": options.model, "rows": options.rows, "spans": spans}, indent=1))


if __name__ == "__main__":
    main()
