"""Bits per cached key or value number and bytes of a cache, for two published geometries: the table
in docs/methods.

    python -m benchmarks.bits

Arithmetic of the ledger on abstract caches (bfloat16, one row): no weights, no device memory.
"""

import dataclasses

import jax

from kvqjax.cache.accounting import ledger
from kvqjax.cache.layout import CacheLayout
from kvqjax.cache.state import allocate_cache
from kvqjax.methods import parse
from kvqjax.model.config import ModelConfig

CONTEXT = 131072
LLAMA2_7B = ModelConfig(
    vocab_size=32000,
    width=4096,
    mlp_width=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
)
LLAMA31_8B = dataclasses.replace(LLAMA2_7B, mlp_width=14336, num_kv_heads=8)
GEOMETRIES = {"Llama-3.1-8B": LLAMA31_8B, "Llama-2-7B": LLAMA2_7B}
SPECS = (
    "exact", "uniform:bits=4", "kivi:bits=4", "kivi:bits=2", "kivi:bits=2,group=128", "kvquant:bits=3",
    "kvquant:bits=3,outliers=0.0", "commvq:bits=2", "commvq:bits=1", "higgs:bits=2", "klt:bits=2", "aqua:bits=2",
    "xquant:bits=4", "xquant:bits=2", "xquant_cl:bits=3", "xquant_cl:bits=2",
    "omniscale:bits=2", "omniscale:bits=2,group=128", "kvarn:bits=2", "kvarn:bits=4", "oscar:bits=2",
    "turboquant:bits=2", "turboquant:bits=4", "turboquant:bits=4,form=vllm",
)  # fmt: skip


def cell(config, spec: str) -> str:
    layout = CacheLayout(
        shape=config.kv_shape, method=parse(spec), capacity=CONTEXT, dtype="bfloat16"
    )
    book = ledger(jax.eval_shape(lambda: allocate_cache(layout, 1)))
    return f"{book.bits_method:.3f} | {book.bits_stored:.3f} | {book.bytes / 2**30:.2f}"


def main() -> None:
    print("| cache | " + " | ".join(f"{name}: method | stored | GiB" for name in GEOMETRIES) + " |")
    print("|---|" + "---|" * 3 * len(GEOMETRIES))
    for spec in SPECS:
        print(
            f"| `{spec}` | "
            + " | ".join(cell(config, spec) for config in GEOMETRIES.values())
            + " |"
        )


if __name__ == "__main__":
    main()
