"""docs/results.md from the records alone."""

import json
from pathlib import Path
from typing import Any

from benchmarks.drift import RECORD as DRIFT
from benchmarks.gate import RECORD as GATE
from benchmarks.gate import SHAPES, plan
from benchmarks.gate_bounds import Verdict, defaults, verdicts, without_x
from benchmarks.rate_distortion import RECORD as DISTORTION
from benchmarks.rate_distortion import markdown as distortion_table
from benchmarks.results.papers import PAPERS, Paper, disagreements
from benchmarks.results.rows import CACHES, CHUNK, LENGTH, MODELS, WINDOWS, path_of
from benchmarks.tables import table
from kvqjax.eval.plots import draw, series, title_of

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
PICTURE = PAGE.with_name("compare.png")
HEAD = f"""---
hide: [navigation, toc]
---
# Results on the bundled models

![KL divergence from the exact cache against bits per number, by method](compare.png)

Written by `python -m benchmarks.results` (`make results`) from the records under `benchmarks/records`; every row there
carries the model's fingerprint, versions, seed and data. Mode: in the loop, every token through the cache in chunks of
{CHUNK}; {WINDOWS} windows of {LENGTH} tokens; float32 on CPU. No cache keeps a window of recent tokens beyond what
waits to be encoded, so figures are worse than with the defaults.

- *bits*: per key or value channel by the codecs; *at 32K*: everything stored for one row of 32768 tokens.
- *bytes*: one row of {LENGTH} tokens as stored, buffers and padding included, against float32 keys and values.
- *perplexity*, *KLD* (mean nats from the exact cache), *top-1* agreement with it. `recall`: on repeated spans.
- *growth*: KLD of the last eighth of the window over that of the third, the first that is wholly compressed.
- *pairs*, *pass key*: share of answers right in every token, the prompt itself passing through the cache.
- *calibration*: seconds of wall time on a machine that other jobs used too; CommVQ by a quarter of its default recipe.
"""
COMPARED = """\
Other models, texts and tasks: only the order can be compared. Perplexities of `demo` differ by noise: caches below
the exact perplexity are no better than it. KLD, which compares with the exact cache token by token, tells them
apart. Listed are pairs of rows measured window by window that stand the other way round by more than twice the
standard error of their difference, windows being paired.
"""
DIFFERS = "Pairs whose order differs from the paper's by more than two standard errors:"
METHODS_PAGES = """
## More
Each method with a part left out or exchanged: [ablations](../benchmarks/ablations.md).
"""


# The curves of the picture: name -> options of its rows in CACHES, beside the bits.
CURVES = {
    "uniform": "",
    "kivi": "group=128,window=0",
    "kvquant": "",
    "higgs": "",
    "aqua": "",
    "commvq": "window=0",
    "xquant": "",
}


def _shown(cache: str) -> str | None:
    """The curve that a row belongs to, None for a row that the picture leaves out."""
    name, _, options = series(cache).partition(":")
    return name if CURVES.get(name) == options or cache == "exact" else None


def draw_picture() -> None:
    """Draw KL divergence against bits of the methods of CURVES on `demo`, as README and the home page show it."""
    setup = {"context": 32768, "mode": f"in the loop, chunks of {CHUNK}", "windows": f"windows of {LENGTH} tokens"}
    rows = [
        {"cache": _shown(cache), "kld": row["kld"], "bits_stored": row["bits_32k"]} | setup
        for cache, row in stored("demo").items()
        if _shown(cache)
    ]
    draw("compare", rows, title_of("compare", "Bundled model demo", "books"), PICTURE)


def stored(name: str) -> dict[str, dict[str, Any]]:
    """Cache -> row on disk of one model."""
    paths = [path_of(name, cache) for caches in CACHES.values() for cache in caches]
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    return {row["cache"]: row for row in rows}


def _cells(row: dict[str, Any], tasks: list[str]) -> list[str]:
    numbers = [f"{row['bits']:.2f}", f"{row['bits_32k']:.2f}", f"{row['bytes']:,}", f"{row['ppl']:.4g}"]
    numbers += [f"{row['kld']:.2g}", f"{row['top1']:.3f}", f"{row['growth']:.2f}"]
    return [
        f"`{row['cache']}`",
        *numbers,
        *(f"{row['recall'][t]:.2f}" for t in tasks),
        f"{row['calibration_seconds']:g}",
    ]


def model_section(name: str) -> str:
    """One model's rows by width, and what it was measured on."""
    rows = stored(name)
    if not rows:
        return f"## {name}\nNot run yet.\n"
    some = next(iter(rows.values()))
    tasks = list(some["recall"])
    head = ["cache", "bits", "at 32K", "bytes", "perplexity", "KLD", "top-1", "growth", *tasks, "calibration, s"]
    data = some["about"]["data"]
    text = data["name"] + (f" (SHA-256 {data['sha256'][:12]})" if "sha256" in data else "")
    versions = ", ".join(f"{key} {value}" for key, value in some["about"]["versions"].items())
    parts = [
        f"## {name}",
        f"Data: {text}. Exact perplexity {some['ppl_exact']:.5g}; exact bytes {some['bytes_exact']:,}. {versions}.",
    ]
    for bits, caches in CACHES.items():
        found = [_cells(rows[cache], tasks) for cache in caches if cache in rows]
        missing = [f"`{cache}`" for cache in caches if cache not in rows]
        parts.append(f"### About {bits} bit" + ("" if bits == 1 else "s"))
        parts += [table(head, found)] if found else []
        parts += [f"Not run: {', '.join(missing)}.\n"] if missing else []
    return "\n".join(parts)


def _differences(paper: Paper, name: str, ours: dict[str, dict[str, Any]]) -> list[str]:
    """Pairs that stand the other way round than in the paper, by perplexity and by KL divergence."""
    known = {cache: row["by_window"] for cache, row in ours.items() if "by_window" in row}
    lines, count = [], sum(cache in known for *_, cache in paper.rows)
    for key, what in (("nll", "perplexity"), ("kld", "KLD")):
        differ = disagreements(paper, {cache: values[key] for cache, values in known.items()})
        said = "; ".join(f"{a} before {b}" for a, b in differ) or "none"
        lines.append(f"- {name}, {count} of {len(paper.rows)} rows, by {what}: {said}.")
    return lines if count > 1 else []


def paper_section(paper: Paper) -> str:
    """A published table with our figures beside it, and the pairs whose order differs."""
    ours = {name: stored(name) for name in MODELS}

    def cell(name: str, cache: str) -> str:
        row = ours[name].get(cache)
        return f"{row['ppl']:.4g} ({row['kld']:.2g})" if row else "-"

    rows = [
        [label, size, f"{value:g}", f"`{cache}`", *(cell(name, cache) for name in MODELS)]
        for label, size, value, cache in paper.rows
    ]
    head = ["paper's row", "bits or size", paper.measure, "our row", *(f"{name}, perplexity (KLD)" for name in MODELS)]
    parts = [f"### {paper.source}", f"{paper.about}.\n", table(head, rows)]
    found = [line for name in MODELS for line in _differences(paper, name, ours[name])]
    return "\n".join([*parts, *([f"{DIFFERS}\n", *found, ""] if found else [])])


def _read(path: Path):
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _verdict_table(found: list[Verdict]) -> str:
    said = lambda v: "held" if v.held else "**missed**" + f": {v.reason}" * bool(v.reason)  # noqa: E731
    lines = [[v.name, f"{v.bound:g}", v.measured, said(v), v.by] for v in found]
    return table(["bound", "value", "measured", "", "by"], lines)


def _has(rows: list[dict], wanted: dict) -> bool:
    return any(all(row[key] == value for key, value in wanted.items()) for row in rows)


def gate_section(rows: list[dict]) -> str:
    """Bounds written before the run, and what was measured."""
    run = sorted({(r["shape"], r["mode"]) for r in rows})
    missing = [row for row in plan(SHAPES) if not _has(rows, row)]
    about = (
        "Small trained shapes, as they are and with outlier key channels (`python -m benchmarks.gate`; `make gate`\n"
    )
    about += "measures a sample of the rows again). Run: "
    about += ", ".join(f"{shape} ({mode})" for shape, mode in run) + f". {len(missing)} planned rows are not run yet.\n"
    more = (
        "The best method is XQuant's X itself, which in these shapes is half as large as keys and values (a quarter\n"
        "in `mha`) and in Llama-3.1-8B twice as large. Among methods that cache keys and values or their latents:\n"
    )
    return "\n".join(["## The gate", about, _verdict_table(verdicts(rows)), more, _verdict_table(without_x(rows))])


def drift_section(found: dict | None) -> str:
    """KL divergence of a long decode beside that of noise which cannot drift."""
    if not found:
        return ""
    spans = found["spans"]
    ends = [f"to {256 * (i + 1)}" for i in range(len(next(iter(spans.values()))))]
    rows = []
    for name, values in spans.items():
        half = len(values) // 2
        growth = sum(values[half:]) / sum(values[:half])
        rows.append([name, *(f"{x:.2g}" for x in values), f"{growth:.2f}"])
    about = (
        f"`{found['model']}`, one token at a time (`python -m benchmarks.drift`): mean over spans of 256 steps of\n"
        "the exact cache's loss and of KL(exact || cache). The noise has one size wherever a token stands: its growth\n"
        "is that of the model's sensitivity with the tokens it chooses among. Growth beyond is the cache's own.\n"
    )
    return "\n".join(["## Does a cache drift?", about, table(["", *ends, "last / first half"], rows)])


def bias_section(rows: list[dict]) -> str:
    """Qwen2 shape: every method by default, with the bias in its codes, and with a calibrated mean taken off."""
    pick = {(r["cache"], r["stress"]): r for r in rows if r["shape"] == "qwen2" and r["mode"] == "copy"}
    lines = []
    for cache, stress in pick:
        if ",centre=" not in cache:
            found = [pick.get((cache + centre, stress)) for centre in ("", ",centre=none", ",centre=mean")]
            cells = [f"{r['ratio']:.4g} (KLD {r['kld']:.2g})" if r else "" for r in found]
            lines.append([f"`{cache}`", f"{pick[cache, stress]['bits']:.2f}", stress, *cells])
    about = (
        "Qwen2 shape, whose key bias is at least 25 times the keys' spread: perplexity over the exact one. HIGGS,\n"
        "`uniform`, AQUA-KV and CommVQ keep keys without the bias by default (`centre=auto`). That needs no\n"
        "calibration: the bias is known from the weights, and after RoPE from a token's position too.\n"
    )
    head = ["cache", "bits", "stress", "by default", "centre=none", "centre=mean"]
    return "\n".join(["## Qwen2's key bias", about, table(head, lines), _verdict_table(defaults(rows))])


def page_text() -> str:
    """The whole page."""
    parts = [HEAD, *(model_section(name) for name in MODELS), "## The papers' tables beside ours\n"]
    parts.append(COMPARED)
    parts += [paper_section(paper) for paper in PAPERS]
    rows = _read(GATE) or []
    parts += [gate_section(rows), drift_section(_read(DRIFT)), bias_section(rows)]
    parts.append("## Distance to the limit\n" + distortion_table(_read(DISTORTION) or []))
    return "\n".join([*parts, METHODS_PAGES])
