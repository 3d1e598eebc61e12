"""Compile the TPU kernels ahead of time and count the bundles of their schedules: a compile-time
estimate, not a speed.

    python benchmarks/tpu_bundles.py [--chips v5e,v6e] [--cases k4v4-g128,k2v2-g128] [--write]
    python benchmarks/tpu_bundles.py --attempt 2048:4,2048:1:0 [--chips v5e] [--cases k2v2-g128-pre]
    python benchmarks/tpu_bundles.py --page 1024 --chips v6e --cases k2v2-g32,k4v4-g128

Needs libtpu, no TPU. For every chip and case the kernel is compiled with tiles of 1024 and 2048
tokens. Bundles of a loop count as often as it runs, branches in full. `marginal` is what 512 tokens
of K and V of one KV head add, `fixed` what remains per tile and KV head, `total` both for 512
tokens in the tile that is used; head_dim is 128 and there are 8 query rows per KV head unless a
case's name says otherwise (d, r). `pre` are keys before RoPE, `nuq` KVQuant's signposts (keys
before RoPE too), `o` the outlier slots of a token's keys and of its values, `omniscale` and `kvarn`
the factors of rotated methods, `oscar` keys per token. `--write` renews
benchmarks/records/tpu_bundles.json for what was compiled. `--attempt` tries work ("tile:pieces", or
"tile:pieces:ahead" if interleaved) other than that of kvqjax/pallas_kernels/support.py: total and
spills. `--page` has bodies in pages of so many tokens beside bodies of their own, in the tile that
is used: total and spills. benchmarks/kernels.md has the record as a table (`python -m
benchmarks.figures`).
"""

import argparse
import functools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from schedule import bundles, busy

RECORD = Path(__file__).parent / "records" / "tpu_bundles.json"
CHIPS = ("v5e", "v5p", "v6e", "v7x")
TILES = (1024, 2048)
# bits of keys, bits of values, key group (0: one scale for all tokens), value group, and where they
# differ from the usual head_dim and query rows
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
    "k2v2-g128-d96-r2": (2, 2, 128, 96, 96, 2),
    "k4v4-g128-d96-r2": (4, 4, 128, 96, 96, 2),
    "k2v2-g128-d256": (2, 2, 128, 256, 256),
    "k4v4-g128-d256": (4, 4, 128, 256, 256),
    "k4v4-g128-r1": (4, 4, 128, 128, 128, 1),
    "k4v4-g128-r16": (4, 4, 128, 128, 128, 16),
    "k2v2-g128-pre": (2, 2, 128, 128),
    "k2v2-g32-pre": (2, 2, 32, 32),
    "k4v4-g32-pre": (4, 4, 32, 32),
    "k3v3-g128-pre": (3, 3, 128, 128),
    "k4v4-g128-pre": (4, 4, 128, 128),
    "k2v2-g128-d64-r4-pre": (2, 2, 128, 64, 64, 4),
    "k4v4-g128-d64-r4-pre": (4, 4, 128, 64, 64, 4),
    "k2v2-g128-omniscale": (2, 2, 128, 128),
    "k4v4-g128-omniscale": (4, 4, 128, 128),
    "k2v2-g32-omniscale": (2, 2, 32, 32),
    "k4v4-g32-omniscale": (4, 4, 32, 32),
    "k2v2-g128-kvarn": (2, 2, 128, 128),
    "k4v4-g128-kvarn": (4, 4, 128, 128),
    "k4v2-g128-kvarn": (4, 2, 128, 128),
    "k2v2-g128-oscar": (2, 2, 0, 128),
    "k4v4-g128-oscar": (4, 4, 0, 128),
    "nuq2": (2, 2, 0, 1024),
    "nuq3": (3, 3, 0, 1024),
    "nuq4": (4, 4, 0, 1024),
    "nuq2-d64-r4": (2, 2, 0, 512, 64, 4),
    "nuq3-d64-r4": (3, 3, 0, 512, 64, 4),
    "nuq4-d64-r4": (4, 4, 0, 512, 64, 4),
    "nuq2-o12": (2, 2, 0, 1024),
    "nuq3-o12": (3, 3, 0, 1024),
    "nuq4-o12": (4, 4, 0, 1024),
}
SLOTS, LAYERS, BATCH, KV_HEADS, USUAL = 16384, 4, 2, 8, (128, 8)
FACTORS = {"-omniscale": 1, "-kvarn": KV_HEADS}  # of a token's keys


def prepare(folder: str) -> None:
    """Settings that must stand before JAX is imported."""
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"


def _arguments(name: str, chip: str):
    """Shapes of one call on one device of the chip, and its spec."""
    import jax
    import jax.numpy as jnp
    from packed_bodies import shapes

    from kvqjax.hardware.chips import chip_devices
    from kvqjax.pallas_kernels.packed import PackedSpec, Rope

    case = CASES[name]
    key_bits, value_bits, key_group, value_group, head_dim, query_rows = (
        *case,
        *USUAL[len(case) - 4 :],
    )
    nuq, before_rope = name.startswith("nuq"), name.startswith("nuq") or name.endswith("-pre")
    count = int((re.findall(r"-o(\d+)", name) or [0])[0])
    spec = PackedSpec(
        key_bits=key_bits,
        value_bits=value_bits,
        key_group=key_group,
        value_group=value_group,
        kv_heads=KV_HEADS,
        head_dim=head_dim,
        target=chip,
        rope=Rope(tuple(10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)))
        if before_rope
        else None,
        datatype="nuq" if nuq else "uniform",
        key_slots=count,
        value_slots=count,
        key_factors=next((n for form, n in FACTORS.items() if name.endswith(form)), 0),
        value_factors=name.endswith("-kvarn"),
        key_channels=head_dim if name.endswith("-oscar") else 0,
    )
    shaped, place = jax.ShapeDtypeStruct, jax.sharding.SingleDeviceSharding(chip_devices(chip)[0])
    q, bounds = (
        shaped((BATCH, 1, KV_HEADS * query_rows, head_dim), jnp.bfloat16),
        shaped((BATCH, 1), jnp.int32),
    )
    arguments = (q, shapes(spec, LAYERS, BATCH, SLOTS), shaped((), jnp.int32), bounds, bounds)
    return jax.tree.map(lambda x: shaped(x.shape, x.dtype, sharding=place), arguments), spec


def count(folder: Path) -> dict:
    """Bundles of a grid step, what share of each unit's slots they fill, and vector spills, of the
    kernel last compiled; its dump is emptied."""
    listing = next(folder.glob("*packed_attention*-final_bundles.txt")).read_text()
    slots = next(
        folder.glob("*packed_attention*final_hlo-static-per-bundle-utilization.txt")
    ).read_text()
    rows = [line.split() for line in slots.split("UTILIZATION:")[1].splitlines()]
    for file in folder.iterdir():
        if file.is_file():
            file.unlink()
    spills = sum(int(row[8]) for row in rows if len(row) == 10)
    return {"bundles": bundles(listing), "busy": busy(listing, slots), "spills": spills}


def compile_case(chip: str, name: str, work, folder: Path) -> dict:
    """Compile one kernel; its bundles per tile, spills and temporary bytes."""
    import jax

    from kvqjax.pallas_kernels.tpu import packed as tpu

    arguments, spec = _arguments(name, chip)
    call = jax.jit(lambda *args: tpu.packed_attention(*args, spec, work=work))
    compiled = call.trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
    return {**count(folder), "temp_bytes": compiled.memory_analysis().temp_size_in_bytes}


def in_pages(page: int, chip: str, name: str, folder: Path) -> dict:
    """Total and spills of a body of a row's own, and of one in pages of `page` tokens."""
    import jax
    import jax.numpy as jnp
    from packed_bodies import shapes

    from kvqjax.pallas_kernels.tpu import packed as tpu
    from kvqjax.pallas_kernels.tpu.planning import make_plan

    (q, body, layer, *bounds), spec = _arguments(name, chip)
    pages_of_row = SLOTS // page
    paged = shapes(spec, LAYERS, BATCH * pages_of_row, page)._replace(positions=body.positions)
    paged, table = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=q.sharding),
        (paged, jax.ShapeDtypeStruct((BATCH, pages_of_row), jnp.int32)),
    )
    figures = {}
    for label, stored, pages in (("rows", body, None), ("pages", paged, table)):
        call = jax.jit(
            lambda q, stored, layer, bounds, pages: tpu.packed_attention(
                q, stored, layer, *bounds, spec, pages=pages
            )
        )
        call.trace(q, stored, layer, tuple(bounds), pages).lower(
            lowering_platforms=("tpu",)
        ).compile()
        counts = count(folder)
        tile = make_plan(q, stored, spec, slots=SLOTS).tile
        total = round(counts["bundles"] / KV_HEADS * 512 / tile, 1)
        figures[label] = {"total": total, "tile": tile, "spills": counts["spills"]}
    return figures


def measure(chip: str, name: str, folder: Path) -> dict:
    """Marginal and all bundles per 512 tokens and KV head, fixed ones per tile and KV head, spills
    and temporaries of the tile and pieces that the table chose; a tile of half or twice the size
    has half or twice as many pieces."""
    from kvqjax.pallas_kernels.tpu.planning import make_plan
    from kvqjax.pallas_kernels.work import Work

    (q, body, *_), spec = _arguments(name, chip)
    plan = make_plan(q, body, spec)
    figures = {}
    for tile in {*TILES, plan.tile}:
        pieces = max(1, plan.pieces * tile // plan.tile)
        figures[tile] = compile_case(chip, name, Work(tile, pieces, plan.ahead), folder)
    marginal = (
        (figures[TILES[1]]["bundles"] - figures[TILES[0]]["bundles"])
        / KV_HEADS
        * 512
        / (TILES[1] - TILES[0])
    )
    fixed = figures[TILES[1]]["bundles"] / KV_HEADS - marginal * TILES[1] / 512
    total = figures[plan.tile]["bundles"] / KV_HEADS * 512 / plan.tile
    numbers = {"marginal": round(marginal, 1), "fixed": round(fixed, 1), "total": round(total, 1)}
    numbers |= {"tile": plan.tile, "pieces": plan.pieces, "ahead": plan.ahead}
    return {
        **numbers,
        **{name: figures[plan.tile][name] for name in ("busy", "spills", "temp_bytes")},
    }


def options_of(description: str, cases) -> argparse.ArgumentParser:
    """Which chips and cases to compile, and whether to renew the record."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--cases", default=",".join(cases))
    parser.add_argument("--write", action="store_true")
    return parser


def measure_all(
    options: argparse.Namespace, path: Path, measured: Callable[[str, str, Path], dict]
) -> None:
    """Print `measured(chip, case, folder of dumps)` for every chip and case asked for; renew the
    record as asked."""
    record = json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        for chip in options.chips.split(","):
            for name in options.cases.split(","):
                figures = measured(chip, name, Path(folder))
                print(json.dumps({"chip": chip, "case": name, **figures}), flush=True)
                record.setdefault(chip, {}).setdefault(name, {}).update(figures)
                if options.write:
                    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


def attempt(choices: list[str], chip: str, name: str, folder: Path) -> dict:
    """Total and spills of every choice "tile:pieces" or "tile:pieces:ahead"."""
    from kvqjax.pallas_kernels.work import Work

    figures = {}
    for choice in choices:
        work = Work(*map(int, choice.split(":")))
        counts = compile_case(chip, name, work, folder)
        figures[choice] = {
            "total": round(counts["bundles"] / KV_HEADS * 512 / work.tile, 1),
            "spills": counts["spills"],
        }
    return figures


def main() -> None:
    parser = options_of(__doc__.splitlines()[0], CASES)
    parser.add_argument("--attempt", default="")
    parser.add_argument("--page", type=int, default=0)
    options = parser.parse_args()
    if (options.attempt or options.page) and options.write:
        parser.error("neither attempts nor pages are recorded: leave out --write")
    measured = (
        functools.partial(attempt, options.attempt.split(",")) if options.attempt else measure
    )
    if options.page:
        measured = functools.partial(in_pages, options.page)
    measure_all(options, RECORD, measured)


if __name__ == "__main__":
    main()
