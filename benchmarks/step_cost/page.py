"""docs/speed.md by one command: `python -m benchmarks.step_cost.page [--chip h100 ...] [--cache SPEC ...]`.

Each row has a record of its own in benchmarks/records/step_cost. A row is computed if its program or this counter has
changed since, or if it was never; so a stopped run goes on where it was. `--page-only` writes the page alone.

Listing makes libtpu's bundle packer search a v7x's whole program, in a time that grows faster than the program: 32 rows
of KIVI compile in half a minute, but not in 25 with listings. `--kernel` has it list their attention kernel alone. It
lists one by name: a row with two kernels, both of which must be named, is compiled once for each.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import tempfile
from pathlib import Path
from typing import Annotated

import jax
import typer

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.step_cost import tpu
from benchmarks.step_cost.row import ALIKE, CHIPS, SAME, Row, about, layout_of, measure, programs
from benchmarks.step_cost.tables import page_text
from kvqjax.hardware.aot import lower_decode
from kvqjax.methods import parse as parse_method
from kvqjax.model.catalogue import config_of

app = typer.Typer(add_completion=False)
HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "speed.md"
RECORDS = HERE.parent / "records" / "step_cost"
MODEL = "llama-3.1-8b"
CACHES = (
    "exact",
    "kivi:bits=2,group=128",
    "kivi:bits=4,group=128",
    "kvquant:bits=3",
    "higgs:bits=2",
    "kivi_star:bits=2",
    "xquant:bits=2",
    "commvq:bits=1",
    "aqua:bits=2",
    "xquant_cl:bits=2",
)
CONTEXTS = (131072, 32768, 8192)
MANY = tuple(cache for cache in CACHES if cache.startswith(("exact", "kivi:")))  # whose rows of batch 32 are computed
SPAWN = multiprocessing.get_context("spawn")  # libtpu reads once a process what it shall list
COUNTER = ("hlo", "arrays", "values", "walk", "gpu", "bound", "account", "row")


def rows_of(chip: str, caches: tuple[str, ...] = CACHES) -> list[Row]:
    """All rows of a chip, the most wanted first."""
    return [
        Row(chip, MODEL, cache, context, batch)
        for batch in (1, 8, 32)
        for cache in caches
        for context in CONTEXTS
        if batch < 32 or cache in MANY
    ]


def path_of(row: Row) -> Path:
    return RECORDS / (re.sub(r"[^\w.\-]+", "-", "-".join(map(str, row))) + ".json")


def read(row: Row) -> dict | None:
    path = path_of(row)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def stamp(row: Row) -> str:
    """A digest of a row's program before it is compiled, of what compiles it and of what counts it. Kernels in the
    program would name the lines of our files that they stem from."""
    digest, config = hashlib.sha256(), config_of(row.model)
    jax.config.update("jax_traceback_in_locations_limit", 0)
    for lengths in programs(row, layout_of(row, config)):
        parts = config, parse_method(row.cache), row.context, row.batch, row.compiled_for
        digest.update(lower_decode(*parts, held=lengths).as_text().encode())
    digest.update(json.dumps(about(row)).encode())
    for name in (*COUNTER, *(("tpu", "../schedule") if row.is_tpu else ())):
        digest.update((HERE / f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


def compute(row: Row, depths: tuple[int, ...], folder: Path) -> dict[str, dict]:
    """A row's record for its chip and for those that share its program; of one that the compiler refuses for want of
    memory, that."""
    try:
        return measure(row, folder, depths)
    except Exception as error:  # XLA's own error class is not public; anything but a lack of memory is raised again
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {row.chip: {"refused": str(error).splitlines()[0][:200]} | about(row)}


def list_kernel(row: Row, depths: tuple[int, ...], folder: Path, kernel: str) -> None:
    """Compile a row for the schedule of one kernel, which libtpu writes into a folder."""
    tpu.prepare(str(folder), kernel)
    with contextlib.suppress(ValueError):  # the account misses the row's other kernels
        measure(row, folder, depths)


def renew(row: Row, depths: tuple[int, ...], folder: Path, kernels: list[str]) -> bool:
    """Compute a row unless its record and those of chips that share its program are of it; whether it was computed.
    libtpu lists `kernels` alone, if any is named."""
    if row.is_tpu:
        tpu.prepare(str(folder), *kernels[:1])  # before the stamp, which loads libtpu
    mark = stamp(row)
    known = [read(row._replace(chip=chip)) for chip in CHIPS if (SAME | ALIKE).get(chip, chip) == row.chip]
    if all(one is not None and one["stamp"] == mark for one in known):
        return False
    RECORDS.mkdir(parents=True, exist_ok=True)
    for kernel in kernels[1:]:
        own = tpu.others(folder) / kernel
        own.mkdir(parents=True, exist_ok=True)
        child = SPAWN.Process(target=list_kernel, args=(row, depths, own, kernel))
        child.start()
        child.join()
    for chip, found in compute(row, depths, folder).items():
        one = row._replace(chip=chip)
        path_of(one).write_text(json.dumps(one._asdict() | found | {"stamp": mark}, indent=1) + "\n", encoding="utf-8")
    return True


@app.command()
def main(
    chip: Annotated[list[str], typer.Option(help="repeatable; TPUs and GPUs have compilers of their own")] = [],  # noqa: B006
    cache: Annotated[list[str], typer.Option(help="only these; repeatable")] = [],  # noqa: B006
    batch: Annotated[list[int], typer.Option(help="only these; repeatable")] = [],  # noqa: B006
    context: Annotated[list[int], typer.Option(help="only these; repeatable")] = [],  # noqa: B006
    layers: Annotated[str, typer.Option(help="two depths: compile those and extrapolate")] = "",
    kernel: Annotated[
        list[str], typer.Option(help="list only these of libtpu's; a wrong name's error has the right; repeatable")
    ] = [],  # noqa: B006
    page_only: Annotated[bool, typer.Option(help="write the page from the records")] = False,
) -> None:
    """Compute what is missing, and write the page."""
    depths = tuple(int(n) for n in layers.split(",") if n)
    wanted = [row for name in chip for row in rows_of(name, tuple(cache) or CACHES) if name not in SAME | ALIKE]
    wanted = [row for row in wanted if row.batch in (batch or (1, 8, 32)) and row.context in (context or CONTEXTS)]
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "listings"
        folder.mkdir()
        for row in [] if page_only else wanted:
            done = "computed" if renew(row, depths, folder, kernel) else "known"
            typer.echo(f"{done}: {' '.join(map(str, row))}")
    found = {row: read(row) for name in CHIPS for row in rows_of(name)}
    PAGE.write_text(page_text(found), encoding="utf-8")
    typer.echo(PAGE)


if __name__ == "__main__":
    app()
