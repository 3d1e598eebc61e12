"""The section on long contexts of docs/results.md, from the records alone."""

import json
from typing import Any

import numpy as np

from benchmarks.results.long import (
    CACHES,
    CONTEXTS,
    DECODED_FROM,
    EXACT,
    LENGTHS,
    QUESTIONS,
    SPAN,
    SPANS,
    STEP,
    TASKS,
    WINDOWS,
    decode_name,
    path_of_long,
)
from benchmarks.results.rows import CONTEXT
from benchmarks.tables import standard_error, table

Row = dict[str, Any]
CONTINUED = [f"{text} {number}" for text, count in WINDOWS.items() for number in range(count)]
DECODED = [decode_name(text) for text in WINDOWS]
HEAD = f"""## Long contexts
The prompt attends to itself exactly and is encoded (*prefill-exact*). The tokens behind it attend to its codes. They
pass {STEP} at a time, and each sees what it would see if they were decoded one by one. Every cache has its own window
here, 128 tokens for most. *bits*: everything stored for one row of that length, for each key or value channel
of a model of bfloat16.
"""
RETRIEVED = f"""### Retrieval
A text has {QUESTIONS} lines such as "river: 4821" in a book (*needle*), or is all such lines (*pairs*). The question
is a line's beginning, asked once the text is encoded. An answer is right if a greedy decode gives all its digits. Only
questions that the exact cache answers count, and how many of {QUESTIONS} these are stands behind the length. Shares of
so few are rough: the standard error of a half is 0.13 with 14 questions, 0.2 with 6.
"""


def size(tokens: int) -> str:
    """A number of tokens as people say it."""
    return f"{tokens / 1024:g}K"


def long_rows() -> dict[str, Row]:
    """Cache -> row on disk, in the order of CACHES."""
    paths = [path_of_long(cache) for cache in CACHES]
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    return {row["cache"]: row for row in rows}


def _windows(row: Row, names: list[str], context: int) -> list[dict[str, list[float]]]:
    """Means by span behind `context` tokens, of every passage that was measured."""
    return [row["parts"][name][str(context)] for name in names if name in row["parts"]]


def _with_error(values: np.ndarray) -> str:
    """A mean, and its standard error where there are several values."""
    return f"{values.mean():.2g}" + (f" ± {standard_error(values):.1g}" if len(values) > 1 else "")


def _continued_cells(row: Row, context: int) -> list[str]:
    """Bits, ratio, KL divergence and agreement of the span behind one context."""
    windows = _windows(row, CONTINUED, context)
    bits = f"{row['bits_at'][str(context)]:.2f}"
    if not windows:
        return [bits, "-", "-", "-"]
    nll, exact, kld, agree = (
        np.asarray([part[name][0] for part in windows])
        for name in ("nll", "nll_exact", "kld", "agree")
    )
    ratio = float(np.exp((nll - exact).mean()))
    error = f" ± {ratio * standard_error(nll - exact):.1g}" if len(windows) > 1 else ""
    return [bits, f"{ratio:.4g}{error}", _with_error(kld), f"{agree.mean():.3f}"]


def continued_section(rows: dict[str, Row]) -> str:
    """Write the table of the loss of the next tokens after prompts of several lengths."""
    names = [name for name in CONTINUED if any(name in row["parts"] for row in rows.values())]
    if not names:
        return ""
    head = ["cache", f"bits at {size(CONTEXT)}"]
    head += [f"{size(n)}, {what}" for n in CONTEXTS for what in ("bits", "ratio", "KLD", "top-1")]
    lines = []
    for cache, row in rows.items():
        if cache != EXACT:
            cells = [cell for context in CONTEXTS for cell in _continued_cells(row, context)]
            lines.append([f"`{cache}`", f"{row['bits_at'][str(CONTEXT)]:.2f}", *cells])
    counts = {text: sum(name.startswith(text) for name in names) for text in WINDOWS}
    windows = " and ".join(f"{count} of {text}" for text, count in counts.items() if count)
    about = f"The {SPAN} tokens behind a prompt. Windows: {windows}."
    about += " Behind ± is the standard error over windows.\n" if len(names) > 1 else "\n"
    return "\n".join([f"### The next {SPAN} tokens", about, table(head, lines)])


def retrieval_section(rows: dict[str, Row]) -> str:
    """The share of the exact cache's answers that each cache gives too."""
    answers = {
        name: np.asarray(answers)
        for name, answers in rows.get(EXACT, {"parts": {}})["parts"].items()
    }
    # A text counts once the exact cache and another one were asked about it.
    texts = {name for cache, row in rows.items() if cache != EXACT for name in row["parts"]} & set(
        answers
    )
    names = [(task, n, f"{task} {n}") for task in TASKS for n in LENGTHS if f"{task} {n}" in texts]
    exact = {name: answers[name] for *_, name in names}
    head = [
        "cache",
        *(f"{task} {size(length)} ({int(np.sum(exact[name]))})" for task, length, name in names),
    ]
    lines = []
    for cache, row in rows.items():
        cells = []
        for *_, name in names:
            answers = np.asarray(row["parts"].get(name, []))
            cells.append(f"{answers[exact[name]].mean():.2f}" if len(answers) else "-")
        if cache != EXACT:
            lines.append([f"`{cache}`", *cells])
    return "\n".join([RETRIEVED, table(head, lines)])


def decode_section(rows: dict[str, Row]) -> str:
    """KL divergence along a long decode."""
    texts = [
        text for text in WINDOWS if any(decode_name(text) in row["parts"] for row in rows.values())
    ]
    if not texts:
        return ""
    ends = [DECODED_FROM + SPAN * (number + 1) for number in range(SPANS)]
    lines = []
    for cache, row in rows.items():
        kld = np.asarray([part["kld"] for part in _windows(row, DECODED, DECODED_FROM)])
        if not len(kld):
            continue
        half = SPANS // 2
        growth = kld[:, half:].sum(1) / kld[:, :half].sum(1)
        lines.append([f"`{cache}`", *(f"{x:.2g}" for x in kld.mean(0)), _with_error(growth)])
    about = (
        f"{SPAN * SPANS} tokens of a text behind {DECODED_FROM}, as they stand: mean KLD by spans of {SPAN} steps.\n"
        f"Texts: {' and '.join(texts)}. The last column is the second half's KLD over that of the first. A text has\n"
        "parts that are easy or hard for all caches. A cache drifts if its last column is above the others'.\n"
    )
    head = ["cache", *(f"to {end}" for end in ends), "second / first half"]
    return "\n".join(["### A long decode", about, table(head, lines)])


def long_section() -> str:
    """All of it; nothing before the first row is measured."""
    rows = long_rows()
    if not rows:
        return ""
    missing = [f"`{cache}`" for cache in CACHES if cache not in rows]
    parts = [HEAD, continued_section(rows), retrieval_section(rows), decode_section(rows)]
    return "\n".join([*parts, *([f"Not run: {', '.join(missing)}.\n"] if missing else [])])
