"""Where rematerialisation stops hiding behind memory traffic (arXiv 2508.10395, section 3.4), and what a token costs
(benchmarks/scale.md).

One sequence, 16-bit weights read once per step, 2-bit codes and their scales, the accumulator of XQuant-CL at 4 bits
and loaded once per layer. Arithmetic only: nothing is timed here.
"""

import dataclasses

from kvqjax.hardware.planner import DEVICES
from kvqjax.methods import parse
from kvqjax.methods.roofline import flops_per_token, layer_cost, longest_memory_bound
from kvqjax.model.config import ModelConfig

CHIPS = ("v5e", "v6e", "v7x", "h100", "h200")
LLAMA2_7B = ModelConfig(
    vocab_size=32000, width=4096, mlp_width=11008, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128
)
LLAMA31_8B = dataclasses.replace(LLAMA2_7B, mlp_width=14336, num_kv_heads=8)
CASES = {
    "Llama-2-7B, X": (LLAMA2_7B, "xquant:bits=2"),
    "Llama-3.1-8B, latents": (LLAMA31_8B, "xquant:bits=2"),
    "Llama-3.1-8B, differences": (LLAMA31_8B, "xquant_cl:bits=2,accumulator=4"),
}
CONTEXT = 131072


def longest(config: ModelConfig, spec: str, ridge: float) -> float:
    return longest_memory_bound(layer_cost(parse(spec).layer, config), ridge)


def borders() -> list[list[str]]:
    """By chip: operations a byte, and the longest context of every case."""
    ridges = {"h100 PCIe (the paper's)": 378.0} | {n: 1000 * DEVICES[n].tflops / DEVICES[n].bandwidth for n in CHIPS}
    return [
        [name, f"{ridge:.0f}", *(f"{longest(*case, ridge):.0f}" for case in CASES.values())]
        for name, ridge in ridges.items()
    ]


def operations() -> dict[str, float]:
    """10^12 operations of rematerialisation for one generated token at CONTEXT tokens, by case."""
    return {name: flops_per_token(parse(spec), config) * CONTEXT / 1e12 for name, (config, spec) in CASES.items()}
