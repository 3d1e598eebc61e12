"""docs/prefill.md by one command: `python -m benchmarks.prefill_cost.page [--chip h100 ...]`.

Each row has a record of its own in benchmarks/records/prefill_cost; rows that have one are not computed again without
`--again`. `--page-only` writes the page alone.
"""

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Annotated

import typer

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.prefill_cost.account import ASSUMPTIONS, shared
from benchmarks.prefill_cost.row import Row, measure
from benchmarks.step_cost import tpu
from benchmarks.step_cost.page import CACHES as METHODS
from benchmarks.step_cost.page import MODEL
from benchmarks.step_cost.row import CHIPS, SAME

app = typer.Typer(add_completion=False)
PAGE = Path(__file__).parents[2] / "docs" / "prefill.md"
RECORDS = Path(__file__).parents[1] / "records" / "prefill_cost"
CONTEXTS, MIDDLE, CHUNK = (8192, 32768, 131072), 32768, 2048
CACHES = (*METHODS, "kivi:bits=2,group=128,rotate=hadamard")
EVERYWHERE = CACHES[:2]  # at all contexts, the others at the middle one
INTRO = f"""# Prompts against the peak

What the prompt of {MODEL} in bfloat16 costs on chips that are not here, estimated: its program is compiled ahead of
time for each chip, and the work in it is counted. **Nothing on this page was measured on a chip.**

The **bound** is the least number of operations at the chip's dense 16-bit peak as its vendor states it: every weight
for each token, the head for the last one, scores and weighted sums over the tokens that each one sees. A row without a
chunk is an exact prefill of the whole context; one with a chunk is that many tokens after the context, through the
cache; "over exact" sets it beside the same chunk on an exact cache, by bytes on a GPU and by the estimate on a TPU.

**Memory** is what the compiler allots at the peak beside the arguments (weights and cache): hidden states of the prompt
and temporaries. On TPUs XLA's sum of temporaries says more, up to 1.5 times, but libtpu compiles a program that this
sum would not let fit (tests/aot/test_memory.py). Chunks on TPUs have no figure yet. For a v7x the whole prompt of 128K
tokens is missing: libtpu takes too long to compile it.

With `keep=h2o` an exact prefill runs all layers twice, the first time on the plain path in blocks of 512 tokens, where
each score is computed once more for what every token received: twice the products with weights, and five products of
attention where another prefill has two. A chunk through such a cache decodes the body's keys and computes its scores
once more.

GPUs use no kernel for prompts and chunks. Both attend in large tiles of plain products
(kvqjax/ops/large_tiles.py); what flash attention in blocks of 128 queries would move stands beside each row's account.
cuDNN's attention would be sooner, but JAX's public function rounds its log-sum-exp to the cache's 16 bits: at 10 that
is 3 % of a segment's weight. Only a private one (`jax._src.cudnn`, with `return_residual`) gives it in float32, and no
chip was there to check it on; so `kernels="cudnn"` is refused. An A100's programs are not an H100's (the launches of
equal rows differ), so its rows are compiled for it.

## What is assumed
"""
HEADS = ("cache", "tokens", "chunk", "launches", "syncs", "attention, ms", "weights, ms", "rest, ms")
HEADS = (*HEADS, "estimate, ms", "bound, ms", "of the peak", "over exact", "memory, GB")
REMADE = "bne,ef->bnf"  # keys and values made anew of what XQuant stores (kvqjax/methods/rematerialise.py)


def rows_of(chip: str) -> list[Row]:
    """A chip's rows: whole prompts, then chunks."""
    chunks = [(context, cache) for context in CONTEXTS for cache in (CACHES if context == MIDDLE else EVERYWHERE)]
    whole = [Row(chip, MODEL, "exact", context) for context in CONTEXTS]
    return whole + [Row(chip, MODEL, cache, context, CHUNK) for context, cache in chunks]


def path_of(row: Row) -> Path:
    return RECORDS / (re.sub(r"[^\w.\-]+", "-", "-".join(map(str, row))) + ".json")


def read(row: Row) -> dict | None:
    path = path_of(row)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def over_exact(row: Row, found: dict[Row, dict | None]) -> str:
    """What a chunk costs over the same chunk on an exact cache: bytes on a GPU, the estimate on a TPU."""
    own, exact = found[row], found.get(row._replace(cache="exact"))
    if not row.chunk or own is None or exact is None:
        return ""
    cost = lambda one: one["estimated_s"] if one["kind"] == "tpu" else sum(one["gigabytes"].values())  # noqa: E731
    return f"{cost(own) / cost(exact):.2f}"


def beside(found: dict) -> str:
    """What a row needs beside its arguments. GPUs' older records have XLA's sum of temporaries, which is the peak
    there; on TPUs it is not, and records of chunks have that sum alone, or no more than a line through two depths."""
    return "" if found["kind"] == "tpu" and found["chunk"] else f"{found.get('peak_gb', found['temp_gb']):.2f}"


def line(row: Row, rows: dict[Row, dict | None]) -> str:
    """A row of a chip's table."""
    found = rows[row]
    seconds = [found["seconds"][part] for part in ("attention", "weights", "rest")]
    times = [f"{1e3 * x:.1f}" for x in (*seconds, found["estimated_s"], found["bound_s"])]
    marks = f" (from {' and '.join(map(str, found['layers']))} layers)" if "layers" in found else ""
    cells = [f"`{row.cache}`{marks}", f"{row.context // 1024}K", str(row.chunk or ""), f"{found['launches']:.0f}"]
    cells += [f"{found['syncs']:.0f}", *times, f"{found['share_of_peak']:.1%}"]
    return f"| {' | '.join([*cells, over_exact(row, rows), beside(found)])} |"


def remade(rows: dict[Row, dict]) -> list[str]:
    """What XQuant's own products reach, of the rows that have them."""
    own = {row: one["products"][REMADE] for row, one in rows.items() if REMADE in one.get("products", {})}
    return [
        f"`{row.cache}` makes keys and values of {row.context // 1024}K tokens anew in products of "
        f"{shared(one, row.chip)}, which is all of it where operations take longer than bytes.\n"
        for row, one in own.items()
    ]


def page_text(found: dict[Row, dict | None]) -> str:
    """The page: what is counted, what is assumed, a table for each chip."""
    lines = [INTRO, *(f"- {kind.upper()}s: {text}." for kind, texts in ASSUMPTIONS.items() for text in texts), ""]
    lines += [
        "Written by `python -m benchmarks.prefill_cost.page`; one row by `python -m benchmarks.prefill_cost`.",
        "",
    ]
    for chip in dict.fromkeys(row.chip for row in found):
        rows = {row: one for row, one in found.items() if row.chip == chip}
        known = {row: one for row, one in rows.items() if one is not None}
        lines += [f"## {chip}", ""]
        if known:
            lines += [f"| {' | '.join(HEADS)} |", "|---" * 3 + "|---:" * (len(HEADS) - 3) + "|"]
            lines += [line(row, rows) for row in known]
            lines += ["", *remade(known)]
            if len(known) < len(rows):
                lines += [f"Not computed: {len(rows) - len(known)} of {len(rows)}.\n"]
        else:
            lines += ["Not computed yet.\n"]
    return "\n".join(lines).rstrip() + "\n"


@app.command()
def main(
    chip: Annotated[list[str], typer.Option(help="repeatable; TPUs and GPUs have compilers of their own")] = [],  # noqa: B006
    cache: Annotated[list[str], typer.Option(help="only these; repeatable")] = [],  # noqa: B006
    context: Annotated[list[int], typer.Option(help="only these; repeatable")] = [],  # noqa: B006
    kind: Annotated[str, typer.Option(help="only whole prompts (whole) or chunks (chunk)")] = "",
    layers: Annotated[str, typer.Option(help="two depths: compile those and extrapolate")] = "",
    again: Annotated[bool, typer.Option(help="compute rows that have a record, too")] = False,
    page_only: Annotated[bool, typer.Option(help="write the page from the records")] = False,
) -> None:
    """Compute what is missing, and write the page."""
    depths = tuple(int(n) for n in layers.split(",") if n)
    wanted = [row for name in chip if name not in SAME for row in rows_of(name) if again or read(row) is None]
    wanted = [row for row in wanted if row.cache in (cache or CACHES) and row.context in (context or CONTEXTS)]
    wanted = [row for row in wanted if kind in ("", "chunk" if row.chunk else "whole")]
    RECORDS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for row in [] if page_only else wanted:
            if row.step.is_tpu:
                tpu.prepare(folder)
            found = row._asdict() | measure(row, Path(folder), depths)
            path_of(row).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            typer.echo(f"computed: {' '.join(map(str, row))}")
    chips = [name for name in CHIPS if name not in SAME]
    PAGE.write_text(page_text({row: read(row) for name in chips for row in rows_of(name)}), encoding="utf-8")
    typer.echo(PAGE)


if __name__ == "__main__":
    app()
