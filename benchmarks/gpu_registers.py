"""Compile the GPU kernels ahead of time for Hopper and read what ptxas says of them: registers,
spills, shared memory.

    python benchmarks/gpu_registers.py [--cases kivi-4,kvquant-3] [--write]

Needs the CUDA plugin of this JAX (jax-cuda13-plugin, jax-cuda13-pjrt) and ptxas, no GPU. A
multiprocessor has 65536 registers and 227 KiB of shared memory for its programs of 128 threads
each: what a program takes says how many fit. `--write` renews benchmarks/records/gpu_registers.json
for what was compiled.
"""

import argparse
import functools
import json
import os
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

RECORD = Path(__file__).parent / "records" / "gpu_registers.json"
# Form, bits, channels of a head, and whether groups have 32; fewer than 8 query rows are padded to
# 8.
CASES = {
    f"{form}-{bits}": (form, bits, 128, False)
    for form in ("kivi", "kivi_star", "kvquant")
    for bits in (2, 3, 4)
}
CASES |= {f"kivi-{bits}-short": ("kivi", bits, 128, True) for bits in (2, 4)}
CASES |= {f"kivi-{bits}-64": ("kivi", bits, 64, False) for bits in (2, 4)}
CASES |= {f"kivi-{bits}-64-short": ("kivi", bits, 64, True) for bits in (2, 4)}
# Rotated methods: OScaR as KIVI, the others with groups of a head's channels.
CASES |= {
    name.replace("kivi", "omniscale"): ("omniscale", *shape)
    for name, (form, *shape) in CASES.items()
    if form == "kivi"
}
for method in ("oscar", "turboquant", "kvarn"):
    CASES |= {f"{method}-{bits}": (method, bits, 128, False) for bits in (2, 3, 4)}
    CASES |= {f"{method}-{bits}-64": (method, bits, 64, False) for bits in (2, 4)}
CASES |= {f"kivi-{bits}-256": ("kivi", bits, 256, False) for bits in (2, 4)}
# Coefficients by KV head at these bits a channel, heads of 128 channels.
KLT = {f"klt-{bits}": bits for bits in (2.0, 2.25, 2.375, 2.5, 3.0)}
# Exact keys and values, and a window beside them: channels of a head, and query rows of a KV head.
EXACT = {f"exact-{dim}-r{rows}": (dim, rows) for dim in (64, 128, 256) for rows in (8, 32)}
SLOTS, LAYERS, BATCH, KV_HEADS, QUERY_ROWS = 16384, 4, 2, 8, 8


def prepare(folder: str) -> None:
    """Settings that must stand before JAX is imported."""
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")
    os.environ.update(MOSAIC_GPU_DUMP_PTXAS="1", MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_TO=folder)


@functools.cache
def _device():
    import jax

    from kvqjax.hardware.chips import chip_devices

    return jax.sharding.SingleDeviceSharding(chip_devices("h100")[0])


def _spec(name: str):
    from packed_bodies import spec_of

    form, bits, head_dim, short = CASES[name]
    return spec_of(form, bits, KV_HEADS, "sm90", head_dim, short)


def _klt_spec(name: str):
    from packed_bodies import klt_spec_of

    return klt_spec_of(KLT[name], KV_HEADS, "sm90")


def _exact_spec(name: str):
    from packed_bodies import exact_spec_of

    head_dim, _ = EXACT[name]
    return exact_spec_of(KV_HEADS, "sm90", head_dim)


def _rows(name: str) -> int:
    """Query rows of a KV head."""
    return EXACT[name][1] if name in EXACT else QUERY_ROWS


def _call(name: str):
    """The function of one case, and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp
    from packed_bodies import exact_shapes, klt_shapes, recent_shapes, shapes

    from kvqjax.pallas_kernels.gpu import exact as gpu_exact
    from kvqjax.pallas_kernels.gpu import klt as gpu_klt
    from kvqjax.pallas_kernels.gpu import packed as gpu

    shaped = jax.ShapeDtypeStruct
    if name in KLT:
        spec, made, module = _klt_spec(name), klt_shapes, gpu_klt
    elif name in EXACT:
        spec, made, module = _exact_spec(name), exact_shapes, gpu_exact
    else:
        spec, made, module = _spec(name), shapes, gpu
    q = shaped((BATCH, 1, KV_HEADS * _rows(name), spec.head_dim), jnp.bfloat16)
    bounds = shaped((BATCH, 1), jnp.int32)
    arguments = q, made(spec, LAYERS, BATCH, SLOTS), shaped((), jnp.int32), bounds, bounds
    if name in EXACT:
        arguments = *arguments, recent_shapes(spec, LAYERS, BATCH)

    def call(q, body, layer, start, stop, *recent):
        return module.packed_attention(q, body, layer, start, stop, spec, *recent)

    return call, arguments


def _shared_bytes(name: str) -> int:
    """Shared memory of a program, without what the compiler adds for barriers and alignment."""
    from kvqjax.pallas_kernels.gpu import exact as gpu_exact
    from kvqjax.pallas_kernels.gpu import kernel as gpu_kernel
    from kvqjax.pallas_kernels.gpu import klt as gpu_klt
    from kvqjax.pallas_kernels.gpu import packed as gpu
    from kvqjax.pallas_kernels.gpu import parts as gpu_parts

    if name in KLT:
        memory = gpu_klt.memory(gpu_klt.Plan(_klt_spec(name), QUERY_ROWS, 1))
    elif name in EXACT:
        memory = gpu_exact.memory(gpu_exact.Plan(_exact_spec(name), _rows(name), 1))
    else:
        memory = gpu_kernel.memory(gpu.Plan(_spec(name), QUERY_ROWS, 1))
    return gpu_parts.shared_bytes(memory)


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

    function, arguments = _call(name)
    on_chip = functools.partial(jax.ShapeDtypeStruct, sharding=_device())
    arguments = jax.tree.map(lambda x: on_chip(x.shape, x.dtype), arguments)
    compiled = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()
    memory = compiled.memory_analysis()
    shared = _shared_bytes(name)
    return {
        **report(folder),
        "shared_bytes": shared,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join([*CASES, *KLT, *EXACT]))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        for name in options.cases.split(","):
            figures = record[name] = measure(name, Path(folder))
            print(json.dumps({"case": name, **figures}), flush=True)
    if options.write:
        RECORD.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
