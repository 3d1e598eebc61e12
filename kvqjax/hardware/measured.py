"""What was measured on chips and a plan's bounds cannot know (`python -m benchmarks.hardware`, docs/speed.md)."""

__all__ = ["ATTENTION_OVER_16_BITS", "attention_over_16_bits"]

# Method -> attention's time in one layer of Llama-3.1-8B, in times of what reading bfloat16 keys and values takes at
# the chip's bandwidth: one new token in each of 8 rows of 32768, XLA's path, an H100, jax 0.11.2
# (benchmarks/records/hardware.jsonl, block "attention"). JAX's attention by cuDNN takes 1.08.
ATTENTION_OVER_16_BITS = {
    "exact": 1.29,
    "kivi:bits=4,group=128": 0.78,
    "kivi:bits=2,group=128": 0.89,
    "kivi:bits=2": 1.52,
    "turboquant:bits=2": 3.65,
    "commvq:bits=1": 8.19,
    "higgs:bits=2": 8.57,
    "higgs:bits=4": 8.59,
    "kvquant:bits=3": 8.82,
    "klt:bits=2": 13.8,
    "commvq:bits=2": 15.3,
    "aqua:bits=2": 15.6,
}


def attention_over_16_bits(method: str, chip: str) -> float | None:
    """Return how long a method's attention takes on a chip, in times of 16-bit keys and values; None where it was not
    measured."""
    return ATTENTION_OVER_16_BITS.get(method) if chip == "h100" else None
