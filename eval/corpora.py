"""Running text for perplexity: a file, our own sentences, or WikiText-2, C4 and GSM8K as the papers join them."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np

from kvqjax._errors import UserError
from kvqjax.eval.sources import Source, find, open_text, records
from kvqjax.eval.stamp import digest
from kvqjax.eval.synthetic import filler

__all__ = ["CORPORA", "GSM8K", "halves", "read_text"]

_C4 = "c4-validation.00000-of-00008.json"
_C4_DOCUMENTS = 1100  # of the first validation shard, as GPTQ joins them

WIKITEXT2 = Source(
    "wikitext2",
    ("wiki.test.raw", "wikitext-2-raw/wiki.test.raw", "wikitext2_test_raw.txt"),
    "the WikiText-2 raw archive, or Salesforce/wikitext on the Hugging Face hub",
    {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1", "split": "test"},
)
C4 = Source(
    "c4",
    (_C4 + ".gz", _C4, f"en/{_C4}.gz"),
    "allenai/c4 on the Hugging Face hub, folder en",
    {"path": "allenai/c4", "data_files": {"validation": f"en/{_C4}.gz"}, "split": "validation"},
)
GSM8K = Source(
    "gsm8k",
    ("test.jsonl", "gsm8k_test.jsonl"),
    "openai/grade-school-math on GitHub, or openai/gsm8k on the Hugging Face hub",
    {"path": "openai/gsm8k", "name": "main", "split": "test"},
)


def _wikitext(folder: Path | None) -> str:
    """Rows (lines of the raw file, blank ones empty) joined by blank lines, as GPTQ's script joins them."""
    path = find(WIKITEXT2, folder)
    if path is None:
        return "\n\n".join(row["text"] for row in records(WIKITEXT2, folder))
    lines = open_text(path).splitlines(keepends=True)
    return "\n\n".join(line if line.strip() else "" for line in lines)


def _c4(folder: Path | None) -> str:
    return " ".join(row["text"] for row in itertools.islice(records(C4, folder), _C4_DOCUMENTS))


def _gsm8k(folder: Path | None) -> str:
    return "\n\n".join(f"{row['question']}\n{row['answer']}" for row in records(GSM8K, folder))


CORPORA = {"wikitext2": _wikitext, "c4": _c4, "gsm8k": _gsm8k}


def read_text(data: str, tokens: int, seed: int, folder: Path | None = None) -> tuple[str, dict[str, Any]]:
    """A text and its description. data: a corpus by name (from `folder` or the hub), "synthetic" for at least `tokens`
    words of our own, or a UTF-8 file."""
    if data == "synthetic":
        text = filler(np.random.default_rng(seed), tokens or 8192)
    elif data in CORPORA:
        text = CORPORA[data](folder)
    else:
        text = open_text(Path(data))
    if not text.strip():
        raise UserError(f"{data}: no text")
    return text, {"name": data, "sha256": digest(text), "characters": len(text)}


def halves(text: str) -> tuple[str, str]:
    """A text cut at the blank nearest after its middle: to learn from, and to be scored."""
    middle = re.compile(r"\s").search(text, len(text) // 2)
    cut = middle.start() if middle else len(text) // 2
    return text[:cut], text[cut:]
