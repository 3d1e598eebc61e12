"""Compile the TPU kernels on XQuant's latents, HIGGS bodies, CommVQ's codes, exact and AQUA-KV's bodies ahead of time
and count the bundles of their schedules, beside XLA's program for the same attention: compile-time estimates, not
speeds.

    python benchmarks/latent_bundles.py [--chips v5e,v6e] [--cases 8b-2,higgs-8b-2] [--write]

Needs libtpu, no TPU. For every chip and case: bundles of the kernel per 512 tokens (loops times their trips, branches
in full, at the tile it uses), vector spills, temporary bytes; and for the blockwise path without a kernel, `xla`: the
sum of XLA's own estimated cycles over the loop body that reads 512 tokens, of which `product` is the largest matrix
fusion, the product that makes XQuant's keys (not for exact and AQUA-KV's bodies, which a TPU reads in larger blocks).
`--write` renews benchmarks/records/latent_bundles.json for what was compiled.
"""

import dataclasses
import functools
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from tpu_bundles import count, measure_all, options_of

RECORD = Path(__file__).parent / "records" / "latent_bundles.json"
SLOTS, LAYERS, BATCH = 16384, 4, 1
# width, query heads, KV heads, head_dim, QK-norm; new tokens
MODELS = {
    "8b": (4096, 32, 8, 128, False, 1),  # Llama-3.1-8B and Mistral-7B
    "8b-norm": (4096, 32, 8, 128, True, 1),  # Qwen3-8B
    "8b-draft": (4096, 32, 8, 128, False, 2),
    "8b-norm-draft": (4096, 32, 8, 128, True, 2),
    "1b": (2048, 32, 8, 64, False, 1),  # Llama-3.2-1B
    "1b-draft": (2048, 32, 8, 64, False, 2),
}
LONG = {"8b-long": (*MODELS["8b"][:5], 16), "1b-long": (*MODELS["1b"][:5], 4)}  # of exact bodies: longer drafts
CASES = {
    f"{name}-{bits}": (name, f"xquant:bits={bits}")
    for name in MODELS
    for bits in ((2, 3, 4) if name in ("8b", "8b-draft") else (4,))
}
CASES |= {f"higgs-8b-{bits}": ("8b", f"higgs:bits={bits}") for bits in (2, 3, 4)}
CASES |= {
    f"commvq-{name}-{bits}": (name, f"commvq:bits={bits}") for name in ("8b", "8b-draft", "1b") for bits in (1, 2)
}
CASES |= {f"higgs-{name}-2": (name, "higgs:bits=2") for name in ("8b-draft", "1b")}
CASES |= {f"exact-{name}": (name, "exact") for name in ("8b", "1b", *LONG)}
CASES |= {f"aqua-{name}-2": (name, "aqua:bits=2") for name in ("8b", "8b-draft")}
CASES |= {"aqua-8b-first": ("8b", "aqua:bits=4,key_inputs=none,value_inputs=none")}


def _arguments(case, chip: str):
    """The last run of layers of a cache, and (q, cache, weights, constants, new tokens' sources, layer, positions, what
    flows from layer to layer) on the chip."""
    import jax
    import jax.numpy as jnp

    from kvqjax.cache import CacheLayout, allocate_cache, runs_of
    from kvqjax.hardware.chips import chip_devices
    from kvqjax.methods import parse
    from kvqjax.model.config import ModelConfig

    (width, heads, kv_heads, dim, normed, length), method = (MODELS | LONG)[case[0]], parse(case[1])
    shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "qk_norm": normed}
    config = ModelConfig(vocab_size=8, width=width, mlp_width=8, num_layers=LAYERS, **shape)
    layout = CacheLayout(shape=config.kv_shape, method=method, capacity=SLOTS, dtype="bfloat16")
    run, device = runs_of(layout)[-1], jax.sharding.SingleDeviceSharding(chip_devices(chip)[0])

    def shaped(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    cache = jax.tree.map(lambda x: shaped(x.dtype, *x.shape), jax.eval_shape(lambda: allocate_cache(layout, BATCH)))
    weights = {name: shaped(jnp.bfloat16, width, config.kv_width) for name in "kv"}
    weights |= {"k_norm": shaped(jnp.bfloat16, dim)} if normed else {}
    constants = jax.tree.map(lambda x: shaped(x.dtype, *x.shape), run.wiring.constants(LAYERS, "bfloat16"))
    new = {name: shaped(jnp.bfloat16, BATCH, length, n) for name, n in run.wiring.storage.sources.items()}

    q = shaped(jnp.bfloat16, BATCH, length, heads, dim)
    carry = {name: shaped(jnp.bfloat16, BATCH, run.slots, n) for name, n in run.wiring.chain.carry.items()}
    return run, (q, cache, weights, constants, new, shaped(jnp.int32), shaped(jnp.int32, BATCH, length), carry)


def _module(run, part: str = "{}"):
    """The kernel for the body of a run of layers, or the part of it whose module is called so."""
    from kvqjax.pallas_kernels.dispatch import MODULES

    form = MODULES[type(run.wiring.fast.packed.spec)]
    return importlib.import_module(f"kvqjax.pallas_kernels.tpu.{part.format(form)}")


def _through_kernel(run, chip: str):
    """Attention to the body by the kernel, whatever dispatch says of it; of latents, means of those of values. To an
    exact body with the tokens beside it, as decoding calls it."""
    import jax.numpy as jnp

    from kvqjax.cache import at_layer
    from kvqjax.cache.readers.kernel import recent_of
    from kvqjax.pallas_kernels.exact import ExactSpec, room

    def operands(q, cache, new, carry):
        if carry:
            return {"carry": carry}
        if not isinstance(run.wiring.fast.packed.spec, ExactSpec):
            return {}
        seen = jnp.ones((*q.shape[:2], room(run.ring) + room(q.shape[1])), jnp.int32)
        return {"recent": recent_of(cache.runs[0], new, seen)}

    def attend(q, cache, weights, constants, new, layer, positions, carry):
        first = jnp.arange(0, run.slots, run.block)
        body = run.wiring.fast.packed.body(weights, at_layer(constants, layer), cache.runs[-1].body, first)
        spec = dataclasses.replace(run.wiring.fast.packed.spec, target=chip)
        return _module(run).packed_attention(
            q, body, layer, jnp.zeros_like(positions), positions, spec, **operands(q, cache, new, carry)
        )

    return attend


def _compiled(attend, arguments, replaced: tuple[int, ...] = ()):
    import jax

    return jax.jit(attend, donate_argnums=replaced).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


def _tile(run, chip: str) -> int:
    """Tokens of a tile of the kernel."""
    from kvqjax.pallas_kernels.exact import ExactSpec

    if isinstance(run.wiring.fast.packed.spec, ExactSpec):
        return _module(run, "{}_plan").tile_of(dataclasses.replace(run.wiring.fast.packed.spec, target=chip), run.slots)
    return _module(run, "{}_plan").TILE


def kernel(case, chip: str, folder: Path) -> dict:
    """The kernel's bundles per 512 tokens, spills and temporary bytes."""
    run, arguments = _arguments(case, chip)
    memory = _compiled(_through_kernel(run, chip), arguments, (len(arguments) - 1,)).memory_analysis()
    figures = count(folder)
    figures["bundles"] = round(figures["bundles"] * 512 / _tile(run, chip))
    return {**figures, "temp_bytes": memory.temp_size_in_bytes}


def xla(case, chip: str) -> dict:
    """XLA's estimated cycles for 512 tokens of the path without a kernel, and those of the product alone."""
    from estimated_cycles import by_blocks, largest_body

    run, (q, cache, *inputs, _) = _arguments(case, chip)
    attend = by_blocks(run, run.wiring.fast.packed.spec.kv_heads)
    cycles = largest_body(_compiled(attend, (q, cache.runs[0], *inputs)))
    return {name: round(count * 512 / run.reading) for name, count in zip(("xla", "product"), cycles, strict=True)}


def measure(chip: str, name: str, folder: Path, *, kernel_only: bool) -> dict:
    figures = kernel(CASES[name], chip, folder)
    return figures if kernel_only or name.startswith(("exact", "aqua")) else figures | xla(CASES[name], chip)


def main() -> None:
    parser = options_of(__doc__.splitlines()[0], CASES)
    parser.add_argument("--kernel-only", action="store_true", help="leave XLA's own program out")
    options = parser.parse_args()
    measure_all(options, RECORD, functools.partial(measure, kernel_only=options.kernel_only))


if __name__ == "__main__":
    main()
