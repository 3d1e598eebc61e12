"""Compile the TPU kernels ahead of time and count the bundles of their schedules: a compile-time estimate, not a speed.

    python benchmarks/tpu_bundles.py [--chips v5e,v6e] [--cases k4-g128,k2-g128] [--write]

Needs libtpu, no TPU. For every chip and case the kernel is compiled with tiles of 1024 and 2048 tokens. Bundles of
a loop count once per turn, those outside the loops once per tile, branches in full.
`marginal` is what 512 tokens of K and V of one KV head add, `fixed` what remains per tile and KV head; head_dim is 128
and there are 8 query rows per KV head unless a case's name says otherwise (d, r). `pre` are keys before RoPE, `nuq`
KVQuant's signposts (keys before RoPE too), `o` the outlier slots of a token's keys and of its values. `--write` renews
benchmarks/records/tpu_bundles.json for what was compiled.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

RECORD = Path(__file__).parent / "records" / "tpu_bundles.json"
CHIPS = {"v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "v7x": "tpu7x"}  # a kernel's target -> the chip's name
TILES = (1024, 2048)
# bits of keys, bits of values, key group (0: one scale for all tokens), value group, and where they differ from the
# usual head_dim and query rows
CASES = {
    "k2v2-g128": (2, 2, 128, 128),
    "k3v3-g128": (3, 3, 128, 128),
    "k4v4-g128": (4, 4, 128, 128),
    "k8v8-g128": (8, 8, 128, 128),
    "k2v2-g32": (2, 2, 32, 32),
    "k4v4-g32": (4, 4, 32, 32),
    "k4v2-g32": (4, 2, 32, 32),
    "k2v2-g32-d64": (2, 2, 32, 32, 64),
    "k4v4-g32-d64": (4, 4, 32, 32, 64),
    "k4v2-g128": (4, 2, 128, 128),
    "k3v2-g128": (3, 2, 128, 128),
    "k2v2-g128-d64": (2, 2, 128, 64, 64),
    "k4v4-g128-d64": (4, 4, 128, 64, 64),
    "k4v4-g128-d96": (4, 4, 128, 96, 96),
    "k4v4-g128-d256": (4, 4, 128, 256, 256),
    "k4v4-g128-r1": (4, 4, 128, 128, 128, 1),
    "k4v4-g128-r16": (4, 4, 128, 128, 128, 16),
    "k2v2-g128-pre": (2, 2, 128, 128),
    "k2v2-g32-pre": (2, 2, 32, 32),
    "k3v3-g128-pre": (3, 3, 128, 128),
    "k4v4-g128-pre": (4, 4, 128, 128),
    "nuq2": (2, 2, 0, 1024),
    "nuq3": (3, 3, 0, 1024),
    "nuq4": (4, 4, 0, 1024),
    "nuq2-o12": (2, 2, 0, 1024),
    "nuq3-o12": (3, 3, 0, 1024),
    "nuq4-o12": (4, 4, 0, 1024),
}
SLOTS, LAYERS, BATCH, KV_HEADS, USUAL = 16384, 4, 2, 8, (128, 8)


def prepare(folder: str) -> None:
    """Settings that must stand before JAX is imported."""
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"


def _arguments(name: str, chip: str):
    """Shapes of one call on one device of the chip, and its spec."""
    import jax
    import jax.numpy as jnp
    from packed_bodies import STRETCH, shapes

    from kvqjax.chips import chip_devices
    from kvqjax.pallas_kernels.packed import PackedSpec, Rope

    case = CASES[name]
    key_bits, value_bits, key_group, value_group, head_dim, query_rows = (*case, *USUAL[len(case) - 4 :])
    nuq, before = name.startswith("nuq"), name.startswith("nuq") or name.endswith("-pre")
    count = int(name.partition("-o")[2] or 0)
    spec = PackedSpec(
        key_bits=key_bits,
        value_bits=value_bits,
        key_group=key_group,
        value_group=value_group,
        kv_heads=KV_HEADS,
        head_dim=head_dim,
        block=STRETCH,
        target=chip,
        rope=Rope(tuple(10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2))) if before else None,
        datatype="nuq" if nuq else "uniform",
        key_slots=count,
        value_slots=count,
    )
    shaped, place = jax.ShapeDtypeStruct, jax.sharding.SingleDeviceSharding(chip_devices(CHIPS[chip])[0])
    q, bounds = shaped((BATCH, 1, KV_HEADS * query_rows, head_dim), jnp.bfloat16), shaped((BATCH, 1), jnp.int32)
    arguments = (q, shapes(spec, LAYERS, BATCH, SLOTS), shaped((), jnp.int32), bounds, bounds)
    return jax.tree.map(lambda x: shaped(x.shape, x.dtype, sharding=place), arguments), spec


def dumped(folder: Path) -> tuple[str, int]:
    """The listing of the kernel last compiled, and its vector spills; the dump is emptied."""
    listing = next(folder.glob("*packed_attention*-final_bundles.txt")).read_text()
    slots = next(folder.glob("*packed_attention*final_hlo-static-per-bundle-utilization.txt")).read_text()
    rows = [line.split() for line in slots.split("UTILIZATION:")[1].splitlines()]
    for file in folder.iterdir():
        if file.is_file():
            file.unlink()
    return listing, sum(int(row[8]) for row in rows if len(row) == 10)


def count(folder: Path, turns: list[int]) -> dict:
    """Bundles of a tile, its loops being run `turns` times in their order, and vector spills of the kernel last dumped;
    the dump is emptied."""
    listing, spills = dumped(folder)
    # One ">" for every loop a bundle lies in, the outermost being the grid; LB where a loop begins.
    found = re.findall(r"(?m)^ *(?:0x[0-9a-f]+|0) *([A-Z]*) *: *([> ]*)\{", listing)
    inside = [(label == "LB", marks.count(">") > 1) for label, marks in found]
    loops = [0] * (len(turns) + 1)  # before any loop there are no bundles inside one
    number = 0
    for begins, within in inside:
        number += begins and within
        loops[number] += within
    if number != len(turns):
        raise ValueError(f"{number} loops in the kernel, {len(turns)} expected")
    outside = sum(marks.count(">") == 1 for _, marks in found)
    bundles = outside + sum(turn * size for turn, size in zip(turns, loops[1:], strict=True))
    return {"bundles": bundles, "spills": spills}


def compile_case(chip: str, name: str, tile: int, folder: Path) -> dict:
    """Compile one kernel; its bundles per tile, spills and temporary bytes."""
    import jax

    from kvqjax.pallas_kernels import tpu, tpu_plan

    arguments, spec = _arguments(name, chip)
    call = jax.jit(lambda *args: tpu.packed_attention(*args, spec, tile=tile))
    compiled = call.trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
    q, body = arguments[:2]
    found = count(folder, tpu_plan.make_plan(q, body, spec, None, tile, 1).turns)
    return {**found, "temp_bytes": compiled.memory_analysis().temp_size_in_bytes}


def measure(chip: str, name: str, folder: Path) -> dict:
    """Marginal bundles per 512 tokens and KV head, fixed ones per tile and KV head; spills and temporaries at the
    default tile."""
    from kvqjax.pallas_kernels import tpu_plan

    small, large = (compile_case(chip, name, tile, folder) for tile in TILES)
    marginal = (large["bundles"] - small["bundles"]) / KV_HEADS * 512 / (TILES[1] - TILES[0])
    fixed = large["bundles"] / KV_HEADS - marginal * TILES[1] / 512
    (q, *_), spec = _arguments(name, chip)
    tile = tpu_plan.default_tile(spec, q.shape[2] // KV_HEADS)
    used = small if tile == TILES[0] else large
    numbers = {"marginal": round(marginal, 1), "fixed": round(fixed, 1), "tile": tile}
    return {**numbers, "spills": used["spills"], "temp_bytes": used["temp_bytes"]}


def options_of(description: str, cases) -> argparse.ArgumentParser:
    """Which chips and cases to compile, and whether to renew the record."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--cases", default=",".join(cases))
    parser.add_argument("--write", action="store_true")
    return parser


def measure_all(options: argparse.Namespace, path: Path, measured: Callable[[str, str, Path], dict]) -> None:
    """Print `measured(chip, case, folder of dumps)` for every chip and case asked for; renew the record as asked."""
    record = json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        for chip in options.chips.split(","):
            for name in options.cases.split(","):
                found = measured(chip, name, Path(folder))
                print(json.dumps({"chip": chip, "case": name, **found}), flush=True)
                record.setdefault(chip, {})[name] = found
                if options.write:
                    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


def main() -> None:
    measure_all(options_of(__doc__.splitlines()[0], CASES).parse_args(), RECORD, measure)


if __name__ == "__main__":
    main()
