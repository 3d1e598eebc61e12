"""Compile the GPU kernels ahead of time for Hopper and read what ptxas says of them: registers, spills, shared memory.

    python benchmarks/gpu_registers.py [--cases k4v4-g128,exact] [--write]

Needs the CUDA plugin of this JAX (jax-cuda13-plugin, jax-cuda13-pjrt) and ptxas, no GPU. A multiprocessor has 65536
registers and 227 KiB of shared memory for its programs of 128 threads each: what a program takes says how many fit.
`--write` renews benchmarks/records/gpu_registers.json for what was compiled.
"""

import argparse
import json
import os
import re
import tempfile
from pathlib import Path

RECORD = Path(__file__).parent / "records" / "gpu_registers.json"
CASES = {"k4v4-g128": 4, "k2v2-g128": 2, "exact": 16}  # bits; fewer than 8 query rows are padded to 8
SLOTS, LAYERS, BATCH, KV_HEADS, HEAD_DIM, QUERY_ROWS, GROUP = 16384, 4, 2, 8, 128, 8, 128


def prepare(folder: str) -> None:
    """Settings that must stand before JAX is imported."""
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")
    os.environ.update(MOSAIC_GPU_DUMP_PTXAS="1", MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_TO=folder)


def _call(bits: int):
    """The function of one case, and the shapes of its arguments on one device of the chip."""
    import jax
    import jax.numpy as jnp

    from kvqjax.chips import chip_devices
    from kvqjax.pallas_kernels import gpu, gpu_exact
    from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec

    sharding, width = jax.sharding.SingleDeviceSharding(chip_devices("h100")[0]), KV_HEADS * HEAD_DIM

    def shaped(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    q, bounds = shaped(jnp.bfloat16, BATCH, 1, KV_HEADS * QUERY_ROWS, HEAD_DIM), shaped(jnp.int32, BATCH, 1)
    last = (shaped(jnp.int32), bounds, bounds)
    if bits == 16:
        exact = shaped(jnp.bfloat16, LAYERS, BATCH, SLOTS, width)
        return gpu_exact.exact_attention, (q, exact, exact, *last)
    words = shaped(jnp.uint32, LAYERS, BATCH, SLOTS * bits // 32, width)
    group = shaped(jnp.uint16, LAYERS, BATCH, SLOTS // GROUP, width)
    token = shaped(jnp.uint16, LAYERS, BATCH, KV_HEADS, SLOTS)
    body = PackedBody((words,), group, group, (words,), token, token)
    groups = {"key_group": GROUP, "value_group": GROUP, "block": 1024, "target": "sm90"}
    spec = PackedSpec(key_bits=bits, value_bits=bits, kv_heads=KV_HEADS, head_dim=HEAD_DIM, **groups)
    return lambda *args: gpu.packed_attention(*args, spec), (q, body, *last)


def report(folder: Path) -> dict:
    """What ptxas said of the kernel last compiled; the dump is emptied."""
    text = next(folder.glob("*.ptxas")).read_text()
    code = next(folder.glob("*.ptx")).read_text()
    for file in folder.iterdir():
        file.unlink()
    stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text).groups()
    return {
        "registers": int(re.search(r"Used (\d+) registers", text)[1]),
        "spill_bytes": int(stores) + int(loads),
        "target": re.search(r"\.target (\w+)", code)[1],
        "wgmma": len(re.findall(r"wgmma\.mma_async", code)),
    }


def measure(name: str, folder: Path) -> dict:
    """Compile one case; what ptxas says and the temporary bytes beside arguments and results."""
    import jax

    function, arguments = _call(CASES[name])
    compiled = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()
    memory = compiled.memory_analysis()
    return {**report(folder), "temp_bytes": memory.temp_size_in_bytes, "argument_bytes": memory.argument_size_in_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        for name in options.cases.split(","):
            found = record[name] = measure(name, Path(folder))
            print(json.dumps({"case": name, **found}), flush=True)
    if options.write:
        RECORD.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
