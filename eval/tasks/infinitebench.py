"""InfiniteBench's English tasks without long calculation (arXiv 2402.13718), in our own wording.

The folder holds the official files `passkey.jsonl`, `kv_retrieval.jsonl` and so on, with the fields context, input,
answer, options. The authors cut prompts in the middle to 127,000 tokens: `--limit 127000`.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from kvqjax.eval.sources import Source, records
from kvqjax.eval.tasks.base import Options, Sample, Task, best
from kvqjax.eval.tasks.metrics import rouge_l, token_f1, words_of

__all__ = ["AVERAGES", "NAMES", "load"]

_CHOICE = re.compile(r"(?:answer|option)(?:\s+is)?\s*:?\s*\(?([A-D])\b")

_FIND = "Somewhere in this text there is a piece of information. Find it and remember it.\n\n{context}\n\n{input}"
_PAIR = "Look up a value in this JSON object.\n\n{context}\n\n{input}"
_BOOK = "Read the book and answer the question in a few words.\n\n{context}\n\nQuestion: {input}\nAnswer:"
_SUM = "Read the book and summarise it.\n\n{context}\n\nSummary:"
_PICK = "Read the book and choose the letter of the right option.\n\n{context}\n\nQuestion: {input}\n{options}\nAnswer:"
_TALK = "Read the dialogue, in which one name is replaced by $$MASK$$. Whose name is it?\n\n{context}\n\nThe name is"
_MATH = "{input}\n\n{context}\n\nThe number is"
_RUN = "Read the code and compute the value asked for.\n\n{context}\n\n{input}\nThe value is"
_BUG = "One of these functions has an obvious error. Answer with its letter.\n\n{context}\n\n{options}\nAnswer:"


def _first_whole(prediction: str, target: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return float(bool(numbers) and numbers[0] == target)


def _first_number(prediction: str, target: str) -> float:
    numbers = re.findall(r"\d+\.\d+|\d+", prediction)
    return float(bool(numbers) and float(numbers[0]) == float(target))


def _last_word(prediction: str, target: str) -> float:
    """The last word as a whole number (the value that a chain of calls returns)."""
    words = prediction.replace("`", " ").replace(".", " ").split()
    return float(bool(words) and words[-1] == target)


def _word(prediction: str, target: str) -> float:
    return float(target in words_of(prediction))


def _capital_word(prediction: str, target: str) -> float:
    return float(target in [word.upper() for word in words_of(prediction)])


def _letter(prediction: str, target: str) -> float:
    """The letter in front, or after "answer is" or the like, or the first that stands alone."""
    text = prediction.strip()
    found = _CHOICE.search(text)
    alone = next((word for word in words_of(text) if word in ("A", "B", "C", "D")), "")
    front = text[:1] if text[:1] in ("A", "B", "C", "D") and not text[1:2].isalpha() else ""
    return float((front or (found.group(1) if found else "") or alone) == target)


def _long_rouge(prediction: str, target: str) -> float:
    return rouge_l(prediction, target, "rougeLsum")


class _Kind(NamedTuple):
    metric: str
    score: Callable[[str, str], float]
    new: int
    prompt: str


_KINDS = {
    "passkey": _Kind("accuracy", _first_whole, 6, _FIND),
    "number_string": _Kind("accuracy", _first_whole, 12, _FIND),
    "kv_retrieval": _Kind("accuracy", _word, 50, _PAIR),
    "longbook_sum_eng": _Kind("ROUGE-Lsum", _long_rouge, 1200, _SUM),
    "longbook_qa_eng": _Kind("F1", token_f1, 40, _BOOK),
    "longbook_choice_eng": _Kind("accuracy", _letter, 40, _PICK),
    "longdialogue_qa_eng": _Kind("accuracy", _capital_word, 40, _TALK),
    "math_find": _Kind("accuracy", _first_number, 3, _MATH),
    "code_run": _Kind("accuracy", _last_word, 5, _RUN),
    "code_debug": _Kind("accuracy", _letter, 5, _BUG),
}
NAMES = tuple(_KINDS)
AVERAGES = {"10": NAMES}


def _answers(row: dict[str, Any], options: list[str], letters: bool) -> tuple[str, ...]:
    """The answers as text; with `letters` the letter of the right option."""
    given = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    if not letters:
        return tuple(str(answer) for answer in given)
    known = [answer for answer in given if answer in options]
    return ("ABCD"[options.index(known[0])],) if known else (str(given[-1]),)


def load(name: str, options: Options) -> Task:
    """A task of InfiniteBench from its official file."""
    kind, file = _KINDS[name], f"{name}.jsonl"
    hub = {"path": "xinrongzhang2022/InfiniteBench", "data_files": file, "split": "train"}
    source = Source(f"infinitebench/{name}", (file,), "xinrongzhang2022/InfiniteBench on the Hugging Face hub", hub)
    samples = []
    for row in records(source, options.folder):
        choices = [str(choice) for choice in row.get("options") or []]
        lines = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=False))
        fields = {"context": row.get("context") or row.get("content") or "", "input": row.get("input") or ""}
        answers = _answers(row, choices, kind.score is _letter)
        samples.append(Sample(kind.prompt.format(options=lines, **fields), answers))
        if len(samples) == options.samples:
            break
    return Task(f"infinitebench/{name}", kind.metric, best(kind.score), kind.new, samples, chat=True)
