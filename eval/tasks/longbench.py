"""LongBench's 16 English tasks (arXiv 2308.14508) and the papers' averages over 8 and 14 of them.

The folder holds the official files: `qasper.jsonl` and so on with the fields input, context, answers, all_classes; and,
if the official wording is wanted, `dataset2prompt.json` and `dataset2maxlen.json` (there or in `config/`). Without
these two the prompts are our own, which the report says.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvqjax._errors import UserError
from kvqjax.eval.sources import Source, find, open_text, records
from kvqjax.eval.tasks.base import Options, Sample, Task, best
from kvqjax.eval.tasks.metrics import classification, edit_similarity, first_line, number_share, rouge_l, token_f1

__all__ = ["AVERAGES", "NAMES", "load"]

_HUB = "zip://data/{name}.jsonl::hf://datasets/THUDM/LongBench/data.zip"
_WHERE = "data.zip of THUDM/LongBench on the Hugging Face hub, and config/ of THUDM/LongBench on GitHub"

# Our own wording, used where the official one is not at hand.
_ANSWER = "Read the text and answer the question as briefly as you can.\n\n{context}\n\nQuestion: {input}\nAnswer:"
_SUMMARY = "Read the text and write a summary of it.\n\n{context}\n\nSummary:"
_QUERY = "Read the transcript of the meeting and answer the query.\n\n{context}\n\nQuery: {input}\nAnswer:"
_SHOTS = "Continue after these examples in the same manner.\n\n{context}\n{input}"
_COUNT = "Some of these paragraphs stand here twice. How many different ones are there?\n\n{context}\n\nNumber:"
_FIND = "Which of these paragraphs does the abstract summarise?\n\n{context}\n\nAbstract: {input}\n\nAnswer: Paragraph"
_CODE = "Write the next line of this code.\n{context}{input}"


class _Kind(NamedTuple):
    """How a task is scored (metric, score), its longest answer in tokens, and our own wording."""

    metric: str
    score: Callable[[str, Sample], float]
    new: int
    prompt: str
    chat: bool = True  # the few-shot and code tasks are given to the model without a chat template


def _classes(prediction: str, sample: Sample) -> float:
    line = first_line(prediction)
    return max(classification(line, answer, sample.classes) for answer in sample.answers)


def _line(score: Callable[[str, str], float]) -> Callable[[str, Sample], float]:
    return lambda prediction, sample: best(score)(first_line(prediction), sample)


_F1, _ROUGE, _NUMBER, _EDIT = best(token_f1), best(rouge_l), best(number_share), best(edit_similarity)
_KINDS = {
    "narrativeqa": _Kind("F1", _F1, 128, _ANSWER),
    "qasper": _Kind("F1", _F1, 128, _ANSWER),
    "multifieldqa_en": _Kind("F1", _F1, 64, _ANSWER),
    "hotpotqa": _Kind("F1", _F1, 32, _ANSWER),
    "2wikimqa": _Kind("F1", _F1, 32, _ANSWER),
    "musique": _Kind("F1", _F1, 32, _ANSWER),
    "gov_report": _Kind("ROUGE-L", _ROUGE, 512, _SUMMARY),
    "qmsum": _Kind("ROUGE-L", _ROUGE, 512, _QUERY),
    "multi_news": _Kind("ROUGE-L", _ROUGE, 512, _SUMMARY),
    "trec": _Kind("accuracy", _classes, 64, _SHOTS, chat=False),
    "triviaqa": _Kind("F1", _line(token_f1), 32, _SHOTS, chat=False),
    "samsum": _Kind("ROUGE-L", _line(rouge_l), 128, _SHOTS, chat=False),
    "passage_count": _Kind("accuracy", _NUMBER, 32, _COUNT),
    "passage_retrieval_en": _Kind("accuracy", _NUMBER, 32, _FIND),
    "lcc": _Kind("edit similarity", _EDIT, 64, _CODE, chat=False),
    "repobench-p": _Kind("edit similarity", _EDIT, 64, _CODE, chat=False),
}
NAMES = tuple(_KINDS)
_EIGHT = ("qasper", "qmsum", "multi_news", "trec", "triviaqa", "samsum", "lcc", "repobench-p")
AVERAGES = {
    "8": _EIGHT,  # KIVI (arXiv 2402.02750, Table 4) and CommVQ (arXiv 2506.18879, Table 1)
    "14": tuple(name for name in NAMES if name not in ("lcc", "repobench-p")),  # AQUA-KV (arXiv 2501.19392, Table 2)
    "16": NAMES,
}


def _config(file: str, name: str, folder: Path | None):
    """The task's entry in one of the official configuration files, or None where that file is not at hand."""
    path = find(Source("longbench", (file, f"config/{file}", f"LongBench/config/{file}"), _WHERE), folder)
    if path is None:
        return None
    try:
        return json.loads(open_text(path))[name]
    except (json.JSONDecodeError, KeyError) as error:
        raise UserError(f"{path}: no entry {name!r}") from error


def load(name: str, options: Options) -> Task:
    """A task of LongBench with the official wording and lengths where the folder has them."""
    kind = _KINDS[name]
    hub = {"path": "json", "data_files": _HUB.format(name=name), "split": "train"}
    source = Source(f"longbench/{name}", (f"{name}.jsonl",), _WHERE, hub)
    wording, new = (_config(file, name, options.folder) for file in ("dataset2prompt.json", "dataset2maxlen.json"))
    samples = []
    for row in records(source, options.folder):
        fields = {key: str(row.get(key) or "") for key in ("context", "input")}
        prompt = (wording or kind.prompt).format(**fields)
        samples.append(Sample(prompt, tuple(row["answers"]), tuple(row.get("all_classes") or ())))
        if len(samples) == options.samples:
            break
    whose = "own" if wording is None else "official"
    return Task(f"longbench/{name}", kind.metric, kind.score, new or kind.new, samples, kind.chat, prompts=whose)
