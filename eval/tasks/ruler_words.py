"""RULER's variable tracking (vt), common words (cwe) and frequent words (fwe)."""

import itertools

import numpy as np

from kvqjax.eval.synthetic import LETTERS
from kvqjax.eval.tasks.base import Sample
from kvqjax.eval.tasks.ruler_needles import word

__all__ = ["common_words", "frequent_words", "variables"]

_HOPS = 4
_COMMON = 10
_NOISE = ("The clock stands on the shelf. ", "It is warm in the room. ", "Nobody is at the door. ")
_ALPHA = 2.0  # exponent of the word frequencies


def _chain(rng: np.random.Generator, size: int) -> tuple[str, str, tuple[str, ...]]:
    """Text of `size` sentences with a chain of assignments in order; its number; the variables that hold it."""
    names = ["".join(rng.choice(list(LETTERS.upper()), 5)) for _ in range(_HOPS + 1)]
    value = str(rng.integers(10_000, 100_000))
    steps = [f"VAR {names[0]} = {value}. "]
    steps += [f"VAR {new} = VAR {old}. " for old, new in itertools.pairwise(names)]
    text = [_NOISE[i % len(_NOISE)] for i in range(size)]
    places = np.sort(rng.integers(0, size + 1, len(steps))).tolist()
    for place, step in reversed(list(zip(places, steps, strict=True))):
        text.insert(place, step)
    return "".join(text), value, tuple(names)


def variables(rng: np.random.Generator, size: int) -> Sample:
    """One solved example, then a chain of four hops: which variables hold the number?"""

    def pose(text: str, value: str) -> str:
        head = "Follow the assignments of variables in this text.\n" + text
        return f"{head}\nQuestion: which variables have the value {value}?\nAnswer: the {_HOPS + 1} variables are"

    example, value, names = _chain(rng, 3)
    text, asked, wanted = _chain(rng, size)
    return Sample(f"{pose(example, value)} {' '.join(names)}\n\n{pose(text, asked)}", wanted)


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {name}" for number, name in enumerate(words, 1))


def _different(rng: np.random.Generator, number: int) -> list[str]:
    """Words that all differ; more draws do not change the first ones."""
    found: dict[str, None] = {}
    while len(found) < number:
        found[word(rng)] = None
    return list(found)


def common_words(rng: np.random.Generator, size: int, limit: int) -> Sample:
    """A numbered list in which ten words stand 30 times and `size` others three times (6 and 1 below 4096 tokens, as
    the authors have it), after a smaller solved one."""
    often, seldom = (30, 3) if limit >= 4096 else (6, 1)
    shown, rare = (10, 3) if limit >= 4096 else (3, 1)

    def pose(many: int, few: int, others: int) -> tuple[str, list[str]]:
        words = _different(rng, _COMMON + others)
        common = words[:_COMMON]
        listed = rng.permutation(common * many + words[_COMMON:] * few).tolist()
        head = f"Some words of this list stand in it more often than the others.\n{_numbered(listed)}"
        return f"{head}\nQuestion: which are the {_COMMON} most common words?\nAnswer: they are", common

    example, solution = pose(shown, rare, _COMMON)
    text, common = pose(often, seldom, size)
    return Sample(f"{example} {_numbered(solution)}\n\n{text}", tuple(common))


def frequent_words(rng: np.random.Generator, size: int, limit: int) -> Sample:
    """About ten times `size` words whose frequencies fall with the square of their rank; the first rank is noise
    ("..."), the next three are asked for."""
    ranks = np.arange(1, max(limit // 50, 8) + 1)
    shares = ranks**-_ALPHA / (ranks**-_ALPHA).sum()
    least = [5, 4, 3, 2, *[0] * (len(ranks) - 4)]  # the order of the first three is clear in the shortest text too
    counts = np.maximum((10 * size * shares).astype(int), least)
    names = ["...", *_different(rng, len(ranks) - 1)]
    text = rng.permutation([name for name, count in zip(names, counts, strict=True) for _ in range(count)])
    question = "Question: which three coded words stand most often in the text above, the dots aside?\nAnswer: they are"
    return Sample(f"Count the coded words of this text.\n{' '.join(text.tolist())}\n{question}", tuple(names[1:4]))
