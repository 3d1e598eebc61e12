"""docs/results.md and docs/stress.md from the records alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drift import RECORD as DRIFT
from benchmarks.gate import RECORD as GATE
from benchmarks.gate import SHAPES, plan
from benchmarks.gate_bounds import Verdict, defaults, verdicts, without_x
from benchmarks.rate_distortion import RECORD as DISTORTION
from benchmarks.rate_distortion import markdown as distortion_table
from benchmarks.results import peers
from benchmarks.results.long_page import long_section
from benchmarks.results.papers import PAPERS, Paper, disagreements
from benchmarks.results.rows import CACHES, CHUNK, CONTEXT, LEARNT, LENGTH, WINDOWS, path_of
from benchmarks.tables import standard_error, table
from kvqjax.eval.plots import draw, series, title_of

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
STRESS_PAGE, PICTURE = PAGE.with_name("stress.md"), PAGE.with_name("compare.png")
README = Path(__file__).parents[2] / "README.md"
README_MARKS = "<!-- quality -->\n", "<!-- end of quality -->\n"  # around its table
TEXTS = tuple(WINDOWS)
HEAD = f"""---
hide: [navigation, toc]
---
# Results on a real model

![KL divergence from the exact cache against bits per number, by method](compare.png)

SmolLM2-135M-Instruct (`kvqjax fetch smollm2`; 30 layers, 9 query and 3 KV heads of 64 channels), float32 on a CPU.
Written by `python -m benchmarks.results` (`make results`) from the records under `benchmarks/records/results`.

Mode: in the loop. Every token passes through the cache in chunks of {CHUNK}; windows of {LENGTH} tokens,
{WINDOWS["WikiText-2"]} of WikiText-2's test part and {WINDOWS["book"]} of a book. No cache keeps a window of recent
tokens beyond what waits to be encoded, so figures are worse than with the defaults.

- *bits*: per key or value channel by the codecs; *at 32K*: everything stored for one row of {CONTEXT} tokens.
- *ratio*: perplexity over that of the exact cache. *KLD*: mean nats from the exact cache's distribution. *top-1*: share
  of predictions at which both put the same token first. Behind ± is the standard error over windows, paired with the
  exact cache's.
- *calibration*: processor minutes, once, on two cores that other jobs used too: {LEARNT[0]} sequences of {LEARNT[1]}
  tokens of other books; CommVQ's keys of half its recipe's tokens.
"""
COMPARED = """\
Other models, texts and tasks: only the order can be compared. Listed are pairs of rows that stand the
other way round on the windows of both texts by more than twice the standard error of their difference, windows being
paired.
"""
DIFFERS = "Pairs whose order differs from the paper's by more than two standard errors:"
METHODS_PAGES = """
## More
Each method with a part left out or exchanged: [ablations](../benchmarks/ablations.md). Small trained models under
stress, long decodes, the distance to the rate-distortion limit: [stress](stress.md).
"""
STRESS_HEAD = """# Small models under stress

Models that were trained for these tests, with outlier key channels and key biases put in on purpose. They show what
breaks a method; what a method costs on a real model is in the [results](results.md). Written by
`python -m benchmarks.results` from the records under `benchmarks/records`.
"""


# The curves of the picture, the five papers' first of all: rows of CACHES without their bits -> name. The page has all.
CURVES = {
    "kivi:group=64,window=0": "kivi",
    "kvquant": "kvquant",
    "higgs": "higgs",
    "klt": "klt",
    "aqua": "aqua",
    "aqua:backbone=klt": "aqua with klt",
    "xquant": "xquant",
    "commvq:window=0": "commvq",
}


def _shown(cache: str) -> str | None:
    """The curve that a row belongs to, None for a row that the picture leaves out."""
    return "exact" if cache == "exact" else CURVES.get(series(cache))


def _mean(row: dict[str, Any], text: str, name: str) -> float:
    return float(np.mean(row["by_window"][text][name]))


def draw_picture() -> None:
    """Draw KL divergence against bits of the methods of CURVES, as README and the home page show it."""
    setup = {"context": CONTEXT, "mode": f"in the loop, chunks of {CHUNK}", "windows": f"windows of {LENGTH} tokens"}
    rows = [
        {"cache": _shown(cache), "kld": _mean(row, TEXTS[0], "kld"), "bits_stored": row["bits_32k"]} | setup
        for cache, row in stored().items()
        if _shown(cache)
    ]
    draw("compare", rows, title_of("compare", "SmolLM2-135M-Instruct", TEXTS[0]), PICTURE)


def stored() -> dict[str, dict[str, Any]]:
    """Cache -> row on disk."""
    paths = [path_of(cache) for caches in CACHES.values() for cache in caches]
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    return {row["cache"]: row for row in rows}


def _scores(row: dict[str, Any], text: str) -> list[str]:
    """Ratio, KL divergence and agreement on one text, with the errors of the first two."""
    part = {name: np.asarray(values) for name, values in row["by_window"][text].items()}
    loss = part["nll"] - part["nll_exact"]
    ratio = float(np.exp(loss.mean()))
    return [
        f"{ratio:.4g} ± {ratio * standard_error(loss):.1g}",
        f"{part['kld'].mean():.2g} ± {standard_error(part['kld']):.1g}",
        f"{part['agree'].mean():.3f}",
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [f"`{row['cache']}`", f"{row['bits']:.2f}", f"{row['bits_32k']:.2f}"]
    for text in TEXTS:
        cells += _scores(row, text)
    return [*cells, f"{row['calibration_seconds'] / 60:.1f}" if row["calibration_seconds"] else ""]


def rows_section() -> str:
    """All rows by width, and what they were measured on."""
    rows = stored()
    if not rows:
        return "Not run yet.\n"
    first_row = next(iter(rows.values()))
    facts = [f"{text}: exact perplexity {np.exp(_mean(first_row, text, 'nll_exact')):.4g}" for text in TEXTS]
    facts += [f"SHA-256 of {name}: {about['sha256'][:12]}" for name, about in first_row["about"]["data"].items()]
    facts += [f"{key} {value}" for key, value in first_row["about"]["versions"].items()]
    numbers = ["ratio", "KLD", "top-1"]
    head = ["cache", "bits", "at 32K", *(f"{text}, {n}" for text in TEXTS for n in numbers), "calibration, minutes"]
    parts = ["; ".join(facts) + ".\n"]
    for bits, caches in CACHES.items():
        lines = [_cells(rows[cache]) for cache in caches if cache in rows and bits != 16]
        missing = [f"`{cache}`" for cache in caches if cache not in rows]
        if lines or missing:
            parts.append(f"## Codes of {bits} bit" + ("" if bits == 1 else "s"))
        parts += [table(head, lines)] if lines else []
        parts += [f"Not run: {', '.join(missing)}.\n"] if missing else []
    return "\n".join(parts)


def by_window(row: dict[str, Any], name: str) -> list[float]:
    """Means over the windows of both texts."""
    return [value for text in TEXTS for value in row["by_window"][text][name]]


def _differences(paper: Paper, ours: dict[str, dict[str, Any]]) -> list[str]:
    """Pairs that stand the other way round than in the paper, by perplexity and by KL divergence."""
    lines, count = [], sum(cache in ours for *_, cache in paper.rows)
    for key, what in (("nll", "perplexity"), ("kld", "KLD")):
        differ = disagreements(paper, {cache: by_window(row, key) for cache, row in ours.items()})
        said = "; ".join(f"{a} before {b}" for a, b in differ) or "none"
        lines.append(f"- {count} of {len(paper.rows)} rows, by {what}: {said}.")
    return lines if count > 1 else []


def paper_section(paper: Paper) -> str:
    """A published table with our figures beside it, and the pairs whose order differs."""
    ours = stored()

    def cell(cache: str) -> str:
        row = ours.get(cache)
        return f"{_scores(row, TEXTS[0])[0]} ({_mean(row, TEXTS[0], 'kld'):.2g})" if row else "-"

    rows = [[label, size, f"{value:g}", f"`{cache}`", cell(cache)] for label, size, value, cache in paper.rows]
    head = ["paper's row", "bits or size", paper.measure, "our row", f"{TEXTS[0]}, ratio (KLD)"]
    parts = [f"### {paper.source}", f"{paper.about}.\n", table(head, rows)]
    lines = _differences(paper, ours)
    return "\n".join([*parts, *([f"{DIFFERS}\n", *lines, ""] if lines else [])])


def _read(path: Path):
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _verdict_table(verdict_list: list[Verdict]) -> str:
    said = lambda v: "held" if v.held else "**missed**" + f": {v.reason}" * bool(v.reason)  # noqa: E731
    lines = [[v.name, f"{v.bound:g}", v.measured, said(v), v.by] for v in verdict_list]
    return table(["bound", "value", "measured", "", "by"], lines)


def _has(rows: list[dict], fields: dict) -> bool:
    return any(all(row[key] == value for key, value in fields.items()) for row in rows)


def gate_section(rows: list[dict]) -> str:
    """Bounds written before the run, and what was measured."""
    run = sorted({(r["shape"], r["mode"]) for r in rows})
    missing = [row for row in plan(SHAPES) if not _has(rows, row)]
    about = (
        "Small trained shapes, as they are and with outlier key channels (`python -m benchmarks.gate`; `make gate`\n"
    )
    about += "measures the rows again). Run: "
    about += ", ".join(f"{shape} ({mode})" for shape, mode in run) + f". {len(missing)} planned rows are not run yet.\n"
    note = (
        "The best method is XQuant's X itself, which in these shapes is half as large as keys and values (a quarter\n"
        "in `mha`) and in Llama-3.1-8B twice as large. Among methods that cache keys and values or their latents:\n"
    )
    return "\n".join(["## The gate", about, _verdict_table(verdicts(rows)), note, _verdict_table(without_x(rows))])


def drift_section(record: dict | None) -> str:
    """KL divergence of a long decode beside that of noise which cannot drift."""
    if not record:
        return ""
    spans = record["spans"]
    ends = [f"to {256 * (i + 1)}" for i in range(len(next(iter(spans.values()))))]
    rows = []
    for name, values in spans.items():
        half = len(values) // 2
        growth = sum(values[half:]) / sum(values[:half])
        rows.append([name, *(f"{x:.2g}" for x in values), f"{growth:.2f}"])
    about = (
        f"`{record['model']}`, one token at a time (`python -m benchmarks.drift`): mean over spans of 256 steps of\n"
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
            variants = [pick.get((cache + centre, stress)) for centre in ("", ",centre=none", ",centre=mean")]
            cells = [f"{r['ratio']:.4g} (KLD {r['kld']:.2g})" if r else "" for r in variants]
            lines.append([f"`{cache}`", f"{pick[cache, stress]['bits']:.2f}", stress, *cells])
    about = (
        "Qwen2 shape, whose key bias is at least 25 times the keys' spread: perplexity over the exact one. HIGGS,\n"
        "`uniform`, AQUA-KV and CommVQ keep keys without the bias by default (`centre=auto`). That needs no\n"
        "calibration: the bias is known from the weights, and after RoPE from a token's position too.\n"
    )
    head = ["cache", "bits", "stress", "by default", "centre=none", "centre=mean"]
    return "\n".join(["## Qwen2's key bias", about, table(head, lines), _verdict_table(defaults(rows))])


def page_text() -> str:
    """The page of the real model."""
    engines = peers.section(stored(), _scores)
    papers = [paper_section(paper) for paper in PAPERS]
    head = "## The papers' tables beside ours\n"
    parts = [HEAD, rows_section(), long_section(), engines, head, COMPARED, *papers]
    return "\n".join([*parts, METHODS_PAGES])


def readme_text() -> str:
    """README with its table from the records."""
    before, rest = README.read_text(encoding="utf-8").split(README_MARKS[0])
    after = rest.split(README_MARKS[1])[1]
    return f"{before}{README_MARKS[0]}{peers.readme_table(stored(), _scores)}{README_MARKS[1]}{after}"


def stress_text() -> str:
    """The page of the small models."""
    rows = _read(GATE) or []
    parts = [STRESS_HEAD, gate_section(rows), drift_section(_read(DRIFT)), bias_section(rows)]
    return "\n".join([*parts, "## Distance to the limit\n" + distortion_table(_read(DISTORTION) or [])])
