"""A decode step with XQuant against the exact cache and against KIVI at equal bytes, all in one run on this machine.

    python -m benchmarks.xquant_decode [--context 4096] [--record FILE]

Random weights and cached vectors (as `kvqjax bench`), float32. The operations that rematerialisation costs per
generated token stand beside the times, and those of Llama-3.1-8B at 131 072 tokens below.
"""

import argparse
import dataclasses
import json
import os
import platform
from pathlib import Path

import jax

import kvqjax
from benchmarks.xquant_roofline import CONTEXT, LLAMA31_8B
from kvqjax.cache.accounting import ledger
from kvqjax.calibrate.xquant import prepared
from kvqjax.cli.bench import step_milliseconds
from kvqjax.methods.roofline import flops_per_token, layer_flops
from kvqjax.model import weight_trees
from kvqjax.model.config import ModelConfig

MHA = ModelConfig(
    vocab_size=512, width=512, mlp_width=1536, num_layers=4, num_heads=8, num_kv_heads=8, head_dim=64, max_position=8192
)
GQA = dataclasses.replace(MHA, num_kv_heads=2)
KIVI = "kivi:bits={},group=128,window=0"
CASES = {
    "8 query, 2 KV heads": (GQA, ["exact", KIVI.format(2), "xquant:bits=2", "xquant_cl:bits=2,base=0,protected=1",
                                  KIVI.format(4), "xquant:bits=4"]),
    "8 query, 8 KV heads": (MHA, ["exact", KIVI.format(2), "xquant:bits=4", "xquant_cl:bits=4,base=0,protected=1",
                                  KIVI.format(4), "xquant:bits=8"]),
}  # fmt: skip


def measure(config: ModelConfig, caches: list[str], context: int, steps: int, repeats: int) -> list[dict]:
    """One row per cache; speeds against the exact cache, and against the last KIVI cache before it in the list."""
    model = kvqjax.Model(params=weight_trees.init_params(jax.random.key(0), config), constants=(), config=config)
    rows, reference = [], None
    for text in caches:
        method = kvqjax.parse(text)
        book = ledger(jax.eval_shape(lambda method=method: kvqjax.init_cache(model, method, 1, context)))
        spent = step_milliseconds(prepared(model, method), method, context, 1, steps, repeats)[1]
        reference = spent if text.startswith("kivi") else reference
        rows.append(
            {
                "cache": text,
                "bits": book.bits_method,
                "ms_per_step": spent,
                "times_exact": spent / rows[0]["ms_per_step"] if rows else 1.0,
                "times_kivi": spent / reference if reference else None,
                "gflop_per_step": flops_per_token(method, config) * context / 1e9,
            }
        )
    return rows


def show(title: str, rows: list[dict]) -> None:
    print(f"\n| {title} | bits | ms per step | times exact | times KIVI of these bits | GFLOP to rematerialise |")
    print("|---" * 6 + "|")
    for row in rows:
        kivi = f"{row['times_kivi']:.2f}" if row["times_kivi"] else ""
        print(
            f"| {row['cache']} | {row['bits']:.3f} | {row['ms_per_step']:.1f} | {row['times_exact']:.2f} | {kivi} "
            f"| {row['gflop_per_step']:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("context", 4096), ("steps", 2), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    record = {
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} core(s), jax {jax.__version__}",
        "context": options.context,
    }
    for title, (config, caches) in CASES.items():
        record[title] = measure(config, caches, options.context, options.steps, options.repeats)
        show(title, record[title])
        if options.record:  # after each model: a run that is stopped keeps what it has
            options.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"\nLlama-3.1-8B, {CONTEXT} tokens, TFLOP per generated token:")
    for text in ("xquant:bits=2", "xquant_cl:bits=2"):
        method = kvqjax.parse(text)
        total, alike = (
            flops_per_token(method, LLAMA31_8B),
            layer_flops(method.layer, LLAMA31_8B) * LLAMA31_8B.num_layers,
        )
        print(
            f"- {text}: {total * CONTEXT / 1e12:.1f} ({alike * CONTEXT / 1e12:.1f} if every layer were like the last)"
        )


if __name__ == "__main__":
    main()
