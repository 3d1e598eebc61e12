"""What the planner promises, compiled ahead of time for real chips: bytes per device of `generate`'s decode loop.

    python benchmarks/compiled_plans.py [--cases NAME,...] [--write]

Needs libtpu for the TPU cases and JAX's CUDA plugin for the H100's (an environment of its own, as `make aot` makes it),
but no chip. A case states what one device may hold; `fits` compares the compiler's arguments and temporaries
with it, and a program that the compiler itself refuses for want of memory is recorded by its message. `--write` renews
benchmarks/records/compiled_plans.json for what was compiled.
"""

import argparse
import json
from importlib import metadata
from pathlib import Path

from kvqjax.cache.layout import stored_form
from kvqjax.hardware.aot import compile_decode
from kvqjax.hardware.chips import slice_of, target_name
from kvqjax.hardware.planner import DEVICES, GIB, plan_memory
from kvqjax.methods import parse
from kvqjax.model.loading import config_of
from kvqjax.parallel.mesh_size import MeshSize

RECORD = Path(__file__).parent / "records" / "compiled_plans.json"
NUQ2 = "kvquant:bits=2,outliers=0,sinks=0"
# name -> model, cache, context, batch, chip, mesh, bytes that one device may hold (None: the chip's)
CASES = {
    "8b-128k-commvq1-24gb": ("llama-3.1-8b", "commvq:bits=1", 131072, 1, "v6e", "", 24e9),
    "8b-128k-kivi2-24gb": ("llama-3.1-8b", "kivi:bits=2", 131072, 1, "v6e", "", 24e9),
    "8b-32k-exact-v7x": ("llama-3.1-8b", "exact", 32768, 8, "v7x", "", None),
    "8b-32k-kivi2-v7x": ("llama-3.1-8b", "kivi:bits=2,group=128", 32768, 8, "v7x", "", None),
    "7b-1m-nuq2-80gb": ("llama-7b", NUQ2, 2**20, 1, "h100", "", None),
    "7b-10m-nuq2-8x80gb": ("llama-7b", NUQ2, 10**7, 1, "h100", "model=8", None),
    "70b-128k-kivi2-v5e16": ("llama-3.1-70b", "kivi:bits=2", 131072, 8, "v5e", "model=16", None),
    "70b-128k-kivi2-v6e8": ("llama-3.1-70b", "kivi:bits=2", 131072, 8, "v6e", "model=8", None),
    "70b-128k-exact-v5e16": ("llama-3.1-70b", "exact", 131072, 8, "v5e", "model=16", None),
    "70b-128k-exact-v6e8": ("llama-3.1-70b", "exact", 131072, 8, "v6e", "model=8", None),
}


def measure(name: str) -> dict:
    """Planned and compiled bytes per device of one case."""
    model, spec, context, batch, chip, mesh, limit = CASES[name]
    config, method, size = config_of(model), parse(spec), MeshSize.parse(mesh)
    plan = plan_memory(config, method, context, batch, size, form=stored_form(target_name(chip)))
    limit = limit or DEVICES[chip].memory * GIB
    case = {"model": model, "cache": spec, "context": context, "batch": batch, "mesh": mesh}
    case |= {"slice": slice_of(chip, size.devices), "limit": int(limit)}
    planned = {"weights": plan.weights, "constants": plan.constants, "cache": plan.cache, "workspace": plan.workspace}
    planned |= {"total": plan.total, "fits": plan.total <= limit, "bits_stored": round(plan.book.bits_stored, 4)}
    try:
        program = compile_decode(config, method, context, batch, chip, size)
    except Exception as error:  # XLA's own error class is not public; anything but a lack of memory is raised again
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return case | {"planned": planned, "compiled": {"fits": False, "refused": str(error).splitlines()[0][:300]}}
    total = program.arguments + program.temporaries + program.cache_copied
    compiled = program._asdict() | {"total": total, "fits": total <= limit, "seconds": round(program.seconds, 1)}
    return case | {"planned": planned, "compiled": compiled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    versions = {package: metadata.version(package) for package in ("jax", "libtpu")}
    for name in options.cases.split(","):
        row = measure(name) | {"versions": versions}
        print(json.dumps({name: row}), flush=True)
        record[name] = row
        if options.write:
            RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
