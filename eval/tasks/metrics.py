"""Scores of one answer, 0 to 1, as the benchmarks define them; every function takes (prediction, target).

Two differences from the official scripts are known: ROUGE-L comes from the rouge-score package (LongBench uses another
one, with another tokenisation), and edit similarity is difflib's (what fuzzywuzzy computes without its C extension).
"""

import difflib
import re
import string
from collections import Counter
from collections.abc import Sequence

from kvqjax._errors import UserError

__all__ = [
    "classification",
    "contains",
    "edit_similarity",
    "first_line",
    "number_share",
    "rouge_l",
    "token_f1",
    "words_of",
]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _normal(text: str) -> list[str]:
    """Words in lower case without punctuation and articles (SQuAD's normalisation)."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def token_f1(prediction: str, target: str) -> float:
    """Harmonic mean of precision and recall over normalised words."""
    got, want = _normal(prediction), _normal(target)
    shared = sum((Counter(got) & Counter(want)).values())
    return 2 * shared / (len(got) + len(want)) if shared else 0.0


def rouge_l(prediction: str, target: str, kind: str = "rougeL") -> float:
    """F-measure of the longest common subsequence of words; `kind="rougeLsum"` takes it line by line."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise UserError("ROUGE needs rouge-score: pip install 'kvqjax[eval]'") from error
    return RougeScorer([kind], use_stemmer=False).score(target, prediction)[kind].fmeasure


def classification(prediction: str, target: str, classes: Sequence[str]) -> float:
    """One over the number of classes named in the prediction, if the right one is among them. A class whose name is
    part of the right one's is not counted."""
    named = [name for name in classes if name in prediction and (name == target or name not in target)]
    return 1 / len(named) if target in named else 0.0


def edit_similarity(prediction: str, target: str) -> float:
    """Similarity of the prediction's first line of code (not a comment, no code fence) to the target, in hundredths."""
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, code, target).ratio()) / 100


def number_share(prediction: str, target: str) -> float:
    """Share of the prediction's whole numbers that equal the first number of the target."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(re.findall(r"\d+", target)[0]) / len(numbers) if numbers else 0.0


def contains(prediction: str, target: str) -> float:
    """Whether the target's letters stand in the prediction, whatever their case."""
    return float(target.lower() in prediction.lower())


def first_line(text: str) -> str:
    """The first line that is not empty."""
    return text.lstrip("\n").split("\n")[0]


def words_of(text: str) -> list[str]:
    """Words between white space, quotes, brackets and the marks that end a clause."""
    return re.sub(r"[\n:\"'.,?!{}]", " ", text).split()
