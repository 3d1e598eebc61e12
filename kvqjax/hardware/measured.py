"""Measured times that a plan's bounds cannot know (`python -m benchmarks.hardware`, docs/speed.md).

`measured.json` has for a chip and a method attention's time in one layer of Llama-3.1-8B, in times
of what reading bfloat16 keys and values takes at the chip's bandwidth: one new token in each of 8
rows of 32768, by the path that `kernels="auto"` takes there. The H100's are of jax 0.11.2
(benchmarks/records/hardware.jsonl, blocks "attention" and "kernels"); JAX's attention by cuDNN
takes 1.08 there.
"""

import functools
import json
from pathlib import Path


@functools.cache
def _measured() -> dict[str, dict[str, float]]:
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def measured_text() -> str:
    """Say for every chip how long attention takes with each method that was measured there, a line
    a chip."""
    lines = []
    for chip, factors in _measured().items():
        times = ", ".join(
            f"{method} {times:g}"
            for method, times in sorted(factors.items(), key=lambda pair: pair[1])
        )
        lines.append(
            f"Attention of a decode step on an {chip}, in times of 16-bit keys and values (measured): {times}."
        )
    return "\n".join(lines)


def attention_over_16_bits(method: str, chip: str) -> float | None:
    """Return how long a method's attention takes on a chip, in times of 16-bit keys and values;
    None where it was not measured."""
    return _measured().get(chip, {}).get(method)
