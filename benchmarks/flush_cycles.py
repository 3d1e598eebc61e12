"""What encoding costs beside reading, by XLA's own estimate for a TPU: how much a kernel for encoding could save.

    python benchmarks/flush_cycles.py [--chip v6e] [--methods SPEC ...] [--context 8192] [--write]

Needs libtpu, no TPU. Llama-3.1-8B's geometry, one row, one layer: XLA's estimated cycles (in the compiled program,
loops times their trips) of encoding one tile as it leaves the window, per token; and of attention to 512 tokens of the
body block by block, without a kernel; `rows` are gathered there one by one, for which XLA has no estimate. `share` is
encoding in per cent of reading `context` tokens, what a decode step does. `--write` renews
benchmarks/records/flush_cycles.json for what was compiled. Estimates, not measurements.
"""

import argparse
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from kvqjax.cache import CacheLayout, allocate_cache, at_layer, runs_of
from kvqjax.cache.encoding import encode_tile
from kvqjax.hardware.aot import abstract_model
from kvqjax.hardware.chips import chip_devices
from kvqjax.methods import parse
from kvqjax.model.catalogue import config_of
from kvqjax.model.decoder import layer as layer_weights
from kvqjax.pallas_kernels.packed import PackedSpec

sys.path.insert(0, str(Path(__file__).parent))
from estimated_cycles import by_blocks, largest_body, total

RECORD = Path(__file__).parent / "records" / "flush_cycles.json"
METHODS = (
    "kivi:bits=2",
    "kivi_star:bits=2",
    "kvquant:bits=3",
    "kvquant:bits=3,buffer=32",
    "higgs:bits=2",
    "commvq:bits=1",
    "xquant:bits=4",
)
SLOTS = 16384


def measure(text: str, chip: str) -> dict[str, float]:
    """Cycles per token of encoding and per 512 tokens of reading one layer, the last one of the model."""
    config, method = config_of("llama-3.1-8b"), parse(text)
    layout = CacheLayout(shape=config.kv_shape, method=method, capacity=SLOTS, dtype="bfloat16")
    run, place = runs_of(layout)[-1], jax.sharding.SingleDeviceSharding(chip_devices(chip)[0])

    def placed(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)

    def vectors(*shape):
        return placed(
            {n: jax.ShapeDtypeStruct((*shape, w), jnp.bfloat16) for n, w in run.wiring.storage.sources.items()}
        )

    model = placed(abstract_model(config, layout))
    state = placed(jax.eval_shape(lambda: allocate_cache(layout, 1))).runs[-1]
    constants, clock = model.constants[-1], run.wiring.storage.clocks[0]
    index, count = (placed(jax.ShapeDtypeStruct(shape, jnp.int32)) for shape in ((), (1, 1)))

    def encode(body, constants, tile, layer, slot):
        at = layer, jnp.int32(0)
        return encode_tile(run, body, at, clock, slot * clock.unit, tile, at_layer(constants, layer), {})[0]

    def read(q, state, params, constants, new, layer, positions):
        weights = layer_weights(params, layer)
        return by_blocks(run, config.num_kv_heads)(q, state, weights, constants, new, layer, positions)

    q = placed(jax.ShapeDtypeStruct((1, 1, config.num_heads, config.head_dim), jnp.bfloat16))
    encoding = jax.jit(encode, donate_argnums=0).lower(state.body, constants, vectors(clock.unit), index, index)
    reading = jax.jit(read).lower(q, state, model.params, constants, vectors(1, 1), index, count)
    packed = run.wiring.fast.packed.spec if run.wiring.fast.packed is not None else None
    block = packed.block if isinstance(packed, PackedSpec) and packed.plain else run.reading
    (cycles, rows), per_token = largest_body(reading.compile()), total(encoding.compile()) / clock.unit
    read = {"read_per_512": round(sum(cycles) * 512 / block), "rows_per_512": rows * 512 // block}
    return {"encode_per_token": round(per_token), **read}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", default="v6e")
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for text in options.methods:
        found = measure(text, options.chip)
        reading = found["read_per_512"] * options.context / 512
        found["share"] = round(100 * found["encode_per_token"] / reading, 2)
        print(json.dumps({"chip": options.chip, "method": text, "context": options.context, **found}), flush=True)
        record.setdefault(options.chip, {})[text] = found | {"context": options.context}
        if options.write:
            RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
