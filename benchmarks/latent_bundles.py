"""Compile XQuant's TPU kernel ahead of time and count the bundles of its schedule, beside XLA's program for the same
attention: compile-time estimates, not speeds.

    python -m benchmarks.latent_bundles [--chips v5e,v6e] [--cases 8b-2,1b-4] [--write]

Needs libtpu, no TPU. For every chip and case: bundles of the kernel per 512 tokens (loops times their trips, branches
in full, at the tile it uses), vector spills, temporary bytes; and for the blockwise path without a kernel, `xla`: the
sum of XLA's own estimated cycles over the loop body that reads 512 tokens, of which `product` is the largest fusion,
the product that makes the keys. `--write` renews benchmarks/records/latent_bundles.json for what was compiled.
"""

import argparse
import dataclasses
import json
import math
import re
import tempfile
from pathlib import Path

from benchmarks.tpu_bundles import CHIPS, prepare

RECORD = Path(__file__).parent / "records" / "latent_bundles.json"
SLOTS, LAYERS, BATCH = 16384, 4, 1
# width, query heads, KV heads, head_dim, QK-norm; new tokens
MODELS = {
    "8b": (4096, 32, 8, 128, False, 1),  # Llama-3.1-8B and Mistral-7B
    "8b-norm": (4096, 32, 8, 128, True, 1),  # Qwen3-8B
    "8b-draft": (4096, 32, 8, 128, False, 2),
    "1b": (2048, 32, 8, 64, False, 1),  # Llama-3.2-1B
}
CASES = {f"{name}-{bits}": (name, bits) for name in MODELS for bits in ((2, 3, 4) if name == "8b" else (4,))}
BUNDLE = re.compile(r"(?m)^ *(?:0x[0-9a-f]+|0) *([A-Z]*) *: *([> ]*)\{")


def bundles(listing: str) -> int:
    """Bundles of one grid step: those of a loop count as often as its exit test says, nested ones as the product."""
    found, open_loops, trips, total = list(BUNDLE.finditer(listing)), [], [], []
    for match, after in zip(found, [*found[1:], None], strict=True):
        depth = match[2].count(">")
        if not depth:  # outside the grid, or empty and without its mark
            continue
        open_loops = [loop for loop in open_loops if loop[0] <= depth - (match[1] == "LB")]
        if match[1] == "LB":
            open_loops.append((depth, len(trips)))
            trips.append(0)
        text = listing[match.end() : after.start() if after else None]
        for count in re.findall(r"scmp\.ge[^;]*, (\d+) /\* loop exit test", text):
            waiting = [number for _, number in open_loops if not trips[number]]
            if waiting:
                trips[waiting[-1]] = int(count)
        total.append([number for _, number in open_loops])
    return sum(math.prod(trips[number] for number in inside[1:]) for inside in total)


def _arguments(case, chip: str):
    """The run of layers of a cache, and (q, cache, weights, constants, new tokens' sources, layer, positions) on the
    chip."""
    import jax
    import jax.numpy as jnp

    from kvqjax.cache import CacheLayout, allocate_cache, plan
    from kvqjax.chips import chip_devices
    from kvqjax.config import ModelConfig
    from kvqjax.methods import parse

    (width, heads, kv_heads, dim, normed, length), bits = MODELS[case[0]], case[1]
    shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "qk_norm": normed}
    config = ModelConfig(vocab_size=8, width=width, mlp_width=8, num_layers=LAYERS, **shape)
    method = parse(f"xquant:bits={bits}")
    layout = CacheLayout(config=config, method=method, capacity=SLOTS, dtype="bfloat16")
    run, device = plan(layout)[0], jax.sharding.SingleDeviceSharding(chip_devices(CHIPS[chip])[0])

    def shaped(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    cache = jax.tree.map(lambda x: shaped(x.dtype, *x.shape), jax.eval_shape(lambda: allocate_cache(layout, BATCH)))
    weights = {name: shaped(jnp.bfloat16, width, config.kv_width) for name in "kv"}
    weights |= {"k_norm": shaped(jnp.bfloat16, dim)} if normed else {}
    wanted = run.wiring.wanted()
    constants = {g: {n: shaped(jnp.float32, LAYERS, *s) for n, s in names.items()} for g, names in wanted.items()}
    new = {name: shaped(jnp.bfloat16, BATCH, length, n) for name, n in run.wiring.sources.items()}

    q = shaped(jnp.bfloat16, BATCH, length, heads, dim)
    return run, (q, cache, weights, constants, new, shaped(jnp.int32), shaped(jnp.int32, BATCH, length))


def _through_kernel(run, chip: str):
    """Means of the value latents by the kernel, whatever dispatch says of it."""
    import jax.numpy as jnp

    from kvqjax.cache import pick
    from kvqjax.pallas_kernels import tpu_latents

    def attend(q, cache, weights, constants, new, layer, positions):
        first = jnp.arange(0, run.slots, run.block)
        body = run.wiring.packed.body(weights, pick(constants, layer), cache.runs[0].body, first)
        spec = dataclasses.replace(run.wiring.packed.spec, target=chip)
        return tpu_latents.packed_attention(q, body, layer, jnp.zeros_like(positions), positions, spec)

    return attend


def _by_blocks(run):
    """The path that any chip can take: the run is that of a cache for CPUs."""
    import jax.numpy as jnp

    from kvqjax.cache import pick
    from kvqjax.segments import LayerView, NewTokens, attend_body

    def attend(q, cache, weights, constants, new, layer, positions):
        view = LayerView(run, cache.runs[0], layer, weights, pick(constants, layer), new, 0)
        tokens = NewTokens(positions, jnp.full(positions.shape[:1], positions.shape[1]), positions[:, 0])
        return attend_body(q, run.wiring.packed.spec.kv_heads, view, tokens, {})[0]

    return attend


def _compiled(attend, arguments):
    import jax

    return jax.jit(attend).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


def kernel(case, chip: str, folder: Path) -> dict:
    """The kernel's bundles per 512 tokens, spills and temporary bytes."""
    from kvqjax.pallas_kernels.tpu_latents_plan import TILE

    run, arguments = _arguments(case, chip)
    memory = _compiled(_through_kernel(run, chip), arguments).memory_analysis()
    listing = next(folder.glob("*packed_attention*-final_bundles.txt")).read_text()
    slots = next(folder.glob("*packed_attention*final_hlo-static-per-bundle-utilization.txt")).read_text()
    rows = [line.split() for line in slots.split("UTILIZATION:")[1].splitlines()]
    spills = sum(int(row[8]) for row in rows if len(row) == 10)
    return {
        "bundles": round(bundles(listing) * 512 / TILE),
        "spills": spills,
        "temp_bytes": memory.temp_size_in_bytes,
    }


def xla(case, chip: str) -> dict:
    """XLA's estimated cycles for 512 tokens of the path without a kernel, and those of the product alone."""
    run, arguments = _arguments(case, chip)
    text = _compiled(_by_blocks(run), arguments).as_text()
    body = re.search(r"\bwhile\(.*body=%?([\w.\-]+)", text)[1]
    computation = text[text.index(f"\n%{body} ") :].split("\n}")[0]
    cycles = [int(n) for n in re.findall(r'"estimated_cycles":"(\d+)"', computation)]
    cycles = [n for n in cycles if n < 2**40]  # what has no estimate says so with a huge number
    share = 512 / run.block
    outputs = [int(n) for n in re.findall(r'kind=kOutput.*"estimated_cycles":"(\d+)"', computation)]
    return {"xla": round(sum(cycles) * share), "product": round(max(outputs) * share)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--kernel-only", action="store_true", help="leave XLA's own program out")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        for chip in options.chips.split(","):
            for name in options.cases.split(","):
                found = kernel(CASES[name], chip, Path(folder))
                found |= {} if options.kernel_only else xla(CASES[name], chip)
                print(json.dumps({"chip": chip, "case": name, **found}), flush=True)
                for file in Path(folder).iterdir():
                    if file.is_file():
                        file.unlink()
                record.setdefault(chip, {})[name] = found
                if options.write:
                    RECORD.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
