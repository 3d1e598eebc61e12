"""RULER's questions over documents: qa_1 needs one document, qa_2 two; all others distract."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvqjax.eval.sources import Source, find, open_text
from kvqjax.eval.tasks.base import Sample
from kvqjax.eval.tasks.ruler_needles import word

__all__ = ["questions"]

_FILES = {"squad": ("squad.json", "dev-v2.0.json"), "hotpotqa": ("hotpotqa.json", "hotpot_dev_distractor_v1.json")}
_TRADES = ("a baker", "a sailor", "a teacher", "a painter", "a judge", "a gardener", "a weaver", "a printer")

Made = tuple[str, tuple[str, ...], list[str], list[str]]  # question, answers, its documents, others


class _Item(NamedTuple):
    """A question of a data set, its answers, and the numbers of its documents."""

    question: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]


def _own(rng: np.random.Generator, size: int, hops: int) -> Made:
    """Facts about people who do not exist: where one lives, and what the people of that town are."""
    people = [(word(rng).title(), word(rng).title(), str(rng.choice(_TRADES))) for _ in range(size + 1)]
    homes = [f"{name} lives in the town of {town}." for name, town, _ in people]
    trades = [f"The mayor of {town} is {trade}." for _, town, trade in people]
    name, town, trade = people[0]
    if hops == 1:
        return f"In which town does {name} live?", (town,), homes[:1], homes[1:]
    question = f"What is the mayor of the town in which {name} lives?"
    return question, (trade,), [homes[0], trades[0]], homes[1:] + trades[1:]


def _squad(data: dict[str, Any]) -> tuple[list[_Item], list[str]]:
    """SQuAD's answerable questions and paragraphs."""
    items, documents = [], []
    for paragraph in (part for article in data["data"] for part in article["paragraphs"]):
        for asked in paragraph["qas"]:
            if not asked.get("is_impossible"):
                answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                items.append(_Item(asked["question"], answers, (len(documents),)))
        documents.append(paragraph["context"])
    return items, documents


def _hotpotqa(data: list[dict[str, Any]]) -> tuple[list[_Item], list[str]]:
    """HotpotQA's questions with all their paragraphs (the distracting ones are theirs too), a title before each."""
    items, documents = [], {}
    for row in data:
        texts = [f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]]
        places = tuple(documents.setdefault(text, len(documents)) for text in texts)
        items.append(_Item(row["question"], (row["answer"],), places))
    return items, list(documents)


def _from_set(items: list[_Item], documents: list[str], rng: np.random.Generator) -> Made:
    item = items[rng.integers(len(items))]
    others = [documents[i] for i in rng.permutation(len(documents)).tolist() if i not in item.documents]
    return item.question, item.answers, [documents[i] for i in item.documents], others


def questions(name: str, folder: Path | None) -> Callable[[np.random.Generator, int], Sample]:
    """make(rng, size): a question with `size` distracting documents, of the data set's file where the folder has it."""
    path = find(Source("ruler", _FILES[name], ""), folder)
    read = {"squad": _squad, "hotpotqa": _hotpotqa}[name]
    known = None if path is None else read(json.loads(open_text(path)))

    def make(rng: np.random.Generator, size: int) -> Sample:
        hops = 1 if name == "squad" else 2
        question, answers, own, others = _own(rng, size, hops) if known is None else _from_set(*known, rng)
        more = [others[i % len(others)] for i in range(size)] if others else []
        listed = [f"Document {n}:\n{text}\n" for n, text in enumerate(rng.permutation([*own, *more]).tolist(), 1)]
        head = "Answer the question from these documents, with the answer alone.\n\n"
        return Sample(f"{head}{''.join(listed)}\nQuestion: {question}\nAnswer:", answers)

    return make
