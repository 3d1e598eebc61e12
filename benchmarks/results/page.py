"""docs/results.md from the records alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import peers
from benchmarks.results.long_page import long_section
from benchmarks.results.papers import PAPERS, Paper, disagreements
from benchmarks.results.rows import CACHES, CHUNK, CONTEXT, LEARNT, LENGTH, WINDOWS, path_of
from benchmarks.tables import standard_error, table
from kvqjax.eval.plots import draw, series, title_of

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
PICTURE = PAGE.with_name("compare.png")
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

- *bits*: per key or value channel by the codecs; *at 32K*: everything stored for one row of {CONTEXT} tokens,
  where the model's dtype is bfloat16.
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


# The curves of the picture, the five papers' first of all: rows of CACHES without their bits ->
# name. The page has all.
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
    """Draw KL divergence against bits of the methods of CURVES, as README and the home page show
    it."""
    setup = {
        "context": CONTEXT,
        "mode": f"in the loop, chunks of {CHUNK}",
        "windows": f"windows of {LENGTH} tokens",
    }
    rows = [
        {"cache": _shown(cache), "kld": _mean(row, TEXTS[0], "kld"), "bits_stored": row["bits_32k"]}
        | setup
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
    facts = [
        f"{text}: exact perplexity {np.exp(_mean(first_row, text, 'nll_exact')):.4g}"
        for text in TEXTS
    ]
    facts += [
        f"SHA-256 of {name}: {about['sha256'][:12]}"
        for name, about in first_row["about"]["data"].items()
    ]
    facts += [f"{key} {value}" for key, value in first_row["about"]["versions"].items()]
    numbers = ["ratio", "KLD", "top-1"]
    head = [
        "cache",
        "bits",
        "at 32K",
        *(f"{text}, {n}" for text in TEXTS for n in numbers),
        "calibration, minutes",
    ]
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
    """Pairs that stand the other way round than in the paper, by perplexity and by KL
    divergence."""
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

    rows = [
        [label, size, f"{value:g}", f"`{cache}`", cell(cache)]
        for label, size, value, cache in paper.rows
    ]
    head = ["paper's row", "bits or size", paper.measure, "our row", f"{TEXTS[0]}, ratio (KLD)"]
    parts = [f"### {paper.source}", f"{paper.about}.\n", table(head, rows)]
    lines = _differences(paper, ours)
    return "\n".join([*parts, *([f"{DIFFERS}\n", *lines, ""] if lines else [])])


def page_text() -> str:
    """The page of the real model."""
    engines = peers.section(stored(), _scores)
    papers = [paper_section(paper) for paper in PAPERS]
    head = "## The papers' tables beside ours\n"
    parts = [HEAD, rows_section(), long_section(), engines, head, COMPARED, *papers]
    return "\n".join(parts)


def readme_text() -> str:
    """README with its table from the records."""
    before, rest = README.read_text(encoding="utf-8").split(README_MARKS[0])
    after = rest.split(README_MARKS[1])[1]
    return (
        f"{before}{README_MARKS[0]}{peers.readme_table(stored(), _scores)}{README_MARKS[1]}{after}"
    )
