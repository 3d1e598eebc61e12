"""Where rematerialisation stops hiding behind memory traffic (arXiv 2508.10395, section 3.4), and what a token costs.

    python -m benchmarks.xquant_roofline

One sequence, 16-bit weights read once per step, 2-bit codes; bytes as the paper counts them (no scales; the accumulator
of XQuant-CL at 4 bits, loaded once per layer). Arithmetic only: nothing is timed here.
"""

import dataclasses

from kvqjax.cli.info import DEVICES
from kvqjax.config import ModelConfig
from kvqjax.methods import parse
from kvqjax.methods.xquant_cost import flops_per_token, layer_flops, longest_memory_bound, weight_bytes

# Dense 16-bit TFLOP/s of one chip as the vendors state them; bandwidths are the planner's.
PEAK = {"v5e": 197, "v6e": 918, "tpu7x": 2307, "h100": 989, "h200": 989}
LLAMA2_7B = ModelConfig(
    vocab_size=32000, width=4096, mlp_width=11008, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128
)
LLAMA31_8B = dataclasses.replace(LLAMA2_7B, mlp_width=14336, num_kv_heads=8)
WIDTH, KV = LLAMA31_8B.width, LLAMA31_8B.kv_width
CASES = {  # model, cache, bytes per token and layer, bytes of weights per layer
    "Llama-2-7B, X": (LLAMA2_7B, "xquant:bits=2", WIDTH / 4, weight_bytes(LLAMA2_7B, latent=False)),
    "Llama-3.1-8B, latents": (LLAMA31_8B, "xquant:bits=2", KV / 2, weight_bytes(LLAMA31_8B, latent=True)),
    # U of [W_k | W_v] beside W_k and W_v themselves.
    "Llama-3.1-8B, differences": (
        LLAMA31_8B,
        "xquant_cl:bits=2",
        KV / 2 + WIDTH / 2,
        weight_bytes(LLAMA31_8B, latent=False) + 2 * WIDTH * 2 * KV,
    ),
}
CONTEXT = 131072


def longest(config: ModelConfig, spec: str, cached: float, weights: int, ridge: float) -> float:
    return longest_memory_bound(layer_flops(parse(spec).layer, config), cached, weights, ridge)


def main() -> None:
    print("| device | operations per byte | " + " | ".join(CASES) + " |")
    print("|---|---|" + "---|" * len(CASES))
    ridges = {"h100 PCIe (the paper's)": 378.0} | {n: 1000 * PEAK[n] / DEVICES[n][1] for n in PEAK}
    for name, ridge in ridges.items():
        cells = [f"{longest(*case, ridge):.0f}" for case in CASES.values()]
        print(f"| {name} | {ridge:.0f} | " + " | ".join(cells) + " |")
    print(f"\nOperations per generated token at {CONTEXT} tokens, rematerialisation only:")
    for name, (config, spec, *_) in CASES.items():
        total = flops_per_token(parse(spec), config) * CONTEXT / 1e12
        every = layer_flops(parse(spec).layer, config) * config.num_layers * CONTEXT / 1e12
        print(f"- {name}: {total:.1f} TFLOP ({every:.1f} if every layer were like the last)")


if __name__ == "__main__":
    main()
