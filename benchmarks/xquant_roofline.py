"""Where rematerialisation stops hiding behind memory traffic (arXiv 2508.10395, section 3.4), and what a token costs.

    python -m benchmarks.xquant_roofline

One sequence, 16-bit weights read once per step, 2-bit codes and their scales, the accumulator of XQuant-CL at 4 bits
and loaded once per layer. Arithmetic only: nothing is timed here.
"""

import dataclasses

from kvqjax.hardware.planner import DEVICES
from kvqjax.methods import parse
from kvqjax.methods.roofline import flops_per_token, layer_cost, layer_flops, longest_memory_bound
from kvqjax.model.config import ModelConfig

CHIPS = ("v5e", "v6e", "tpu7x", "h100", "h200")
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


def main() -> None:
    print("| device | operations per byte | " + " | ".join(CASES) + " |")
    print("|---|---|" + "---|" * len(CASES))
    ridges = {"h100 PCIe (the paper's)": 378.0} | {n: 1000 * DEVICES[n].tflops / DEVICES[n].bandwidth for n in CHIPS}
    for name, ridge in ridges.items():
        cells = [f"{longest(*case, ridge):.0f}" for case in CASES.values()]
        print(f"| {name} | {ridge:.0f} | " + " | ".join(cells) + " |")
    print(f"\nOperations per generated token at {CONTEXT} tokens, rematerialisation only:")
    for name, (config, spec) in CASES.items():
        total = flops_per_token(parse(spec), config) * CONTEXT / 1e12
        every = layer_flops(parse(spec).layer, config) * config.num_layers * CONTEXT / 1e12
        print(f"- {name}: {total:.1f} TFLOP ({every:.1f} if every layer were like the last)")


if __name__ == "__main__":
    main()
