"""GSM8K (arXiv 2110.14168): grade-school word problems, worked examples from the training file, exact match of the
number."""

from kvqjax.eval.corpora import GSM8K
from kvqjax.eval.sources import Source, records
from kvqjax.eval.tasks.base import Options, Sample, Task, best
from kvqjax.eval.tasks.metrics import last_number

__all__ = ["AVERAGES", "NAMES", "load"]

NAMES = ("5-shot", "0-shot")
AVERAGES: dict[str, tuple[str, ...]] = {}

_SHOTS = Source(
    "gsm8k",
    ("train.jsonl", "gsm8k_train.jsonl"),
    "openai/grade-school-math on GitHub, or openai/gsm8k on the Hugging Face hub",
    {"path": "openai/gsm8k", "name": "main", "split": "train"},
)


def _match(prediction: str, target: str) -> float:
    return float(last_number(prediction) == target)


def _pose(row: dict, answer: str = "") -> str:
    return f"Question: {row['question']}\nAnswer:{' ' + answer if answer else ''}"


def _take(source: Source, options: Options, number: int) -> list[dict]:
    rows = []
    for row in records(source, options.folder):
        rows.append(row)
        if len(rows) == number:
            break
    return rows


def load(name: str, options: Options) -> Task:
    """The test problems; before each, "5-shot" puts the first five training problems with their solutions."""
    shots = _take(_SHOTS, options, 5) if name == "5-shot" else []
    head = "".join(_pose(row, row["answer"]) + "\n\n" for row in shots)
    samples = [
        Sample(head + _pose(row), (last_number(row["answer"]),)) for row in _take(GSM8K, options, options.samples)
    ]
    return Task(f"gsm8k/{name}", "exact match", best(_match), 256, samples, stop=("Question:",))
