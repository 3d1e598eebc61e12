"""RULER's 13 tasks (arXiv 2404.06654) with our own text: needles of eight kinds, variable tracking, common and frequent
words, questions over documents.

A problem fills the prompt's length. A folder may hold what the authors' scripts use: `PaulGrahamEssays.json` as the
haystack of the "essay" tasks, `squad.json` and `hotpotqa.json` for the questions, or the samples themselves
(`niah_single_1.jsonl` or `niah_single_1/validation.jsonl`, fields input and outputs). Without them the text is ours.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvqjax._errors import UserError
from kvqjax.eval.sources import Source, find, records
from kvqjax.eval.tasks.base import Options, Sample, Task, best, every
from kvqjax.eval.tasks.metrics import contains
from kvqjax.eval.tasks.ruler_needles import NEEDLES, needles
from kvqjax.eval.tasks.ruler_questions import questions
from kvqjax.eval.tasks.ruler_words import common_words, frequent_words, variables

__all__ = ["AVERAGES", "NAMES", "load"]

_MOST = 2**22  # sentences, words or documents: more than any prompt holds
Make = Callable[[np.random.Generator, int], Sample]  # a problem of a given size from a random state


class _Kind(NamedTuple):
    """build(options) -> make(rng, size); new: most tokens of the answer; part: whether one answer of several is
    enough."""

    build: Callable[[Options], Make]
    new: int
    part: bool = False


_KINDS = {name: _Kind(lambda options, kind=kind: needles(kind, options.folder), 128) for name, kind in NEEDLES.items()}
_KINDS |= {
    "vt": _Kind(lambda options: variables, 30),
    "cwe": _Kind(lambda options: lambda rng, size: common_words(rng, size, options.limit), 120),
    "fwe": _Kind(lambda options: lambda rng, size: frequent_words(rng, size, options.limit), 50),
    "qa_1": _Kind(lambda options: questions("squad", options.folder), 32, part=True),
    "qa_2": _Kind(lambda options: questions("hotpotqa", options.folder), 32, part=True),
}
NAMES = tuple(_KINDS)
AVERAGES = {"13": NAMES}


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest size that fits, found by doubling and halving; 0 when not even 1 does."""
    high = 1
    while high < _MOST and fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _official(name: str, options: Options) -> list[Sample]:
    """The folder's own samples of this task, if it holds them. The start of the answer may stand in a field of its
    own."""
    source = Source(f"ruler/{name}", (f"{name}.jsonl", f"{name}/validation.jsonl"), "")
    if find(source, options.folder) is None:
        return []
    rows = records(source, options.folder)
    return [Sample(row["input"] + row.get("answer_prefix", ""), tuple(row["outputs"])) for row in rows]


def load(name: str, options: Options) -> Task:
    """A task whose prompts and answers together take at most `options.limit` tokens."""
    kind = _KINDS[name]
    score = (best if kind.part else every)(contains)
    samples = _official(name, options)
    if samples:
        samples = samples[: options.samples or None]
        return Task(f"ruler/{name}", "contains", score, kind.new, samples, prompts="official")
    make = kind.build(options)
    room = options.limit - kind.new

    def fits(size: int, seed: tuple[int, ...]) -> bool:
        return options.count(make(np.random.default_rng(seed), size).prompt) <= room

    for number in range(options.samples or 500):
        seed = (options.seed, NAMES.index(name), number)
        size = _largest(functools.partial(fits, seed=seed))
        if size == 0:
            raise UserError(f"ruler/{name}: not even the smallest problem fits into {room} tokens of prompt")
        samples.append(make(np.random.default_rng(seed), size))
    return Task(f"ruler/{name}", "contains", score, kind.new, samples)
