"""RULER's eight needle tasks: numbers or identifiers of named things, hidden in repeated sentences, in an essay, or
among other needles."""

import json
import uuid
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvqjax.eval.sources import Source, find, open_text
from kvqjax.eval.synthetic import everyday, sentences_of
from kvqjax.eval.tasks.base import Sample

__all__ = ["NEEDLES", "Needle", "needles", "word"]

_NOISE = ("The river is long. ", "The wind is cold. ", "The road goes up the hill. ", "Here we rest and look around. ")
_SYLLABLES = tuple(first + second for first in "bdfgklmnprstv" for second in "aeiou")


class Needle(NamedTuple):
    """hay: noise, essay or needles; uuid_keys, uuid_values: identifiers instead of words and seven-digit numbers;
    keys, values, queries: how many."""

    hay: str
    uuid_keys: bool = False
    uuid_values: bool = False
    keys: int = 1
    values: int = 1
    queries: int = 1


NEEDLES = {
    "niah_single_1": Needle("noise"),
    "niah_single_2": Needle("essay"),
    "niah_single_3": Needle("essay", uuid_values=True),
    "niah_multikey_1": Needle("essay", keys=4),
    "niah_multikey_2": Needle("needles"),
    "niah_multikey_3": Needle("needles", uuid_keys=True, uuid_values=True),
    "niah_multivalue": Needle("essay", values=4),
    "niah_multiquery": Needle("essay", keys=4, queries=4),
}


def word(rng: np.random.Generator, syllables: int = 3) -> str:
    """A word that means nothing, of two-letter syllables."""
    return "".join(rng.choice(_SYLLABLES, syllables))


def _identifier(rng: np.random.Generator) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _key(rng: np.random.Generator, kind: Needle) -> str:
    return _identifier(rng) if kind.uuid_keys else f"{word(rng, 2)}-{word(rng, 2)}"


def _value(rng: np.random.Generator, kind: Needle) -> str:
    return _identifier(rng) if kind.uuid_values else str(rng.integers(1_000_000, 10_000_000))


def _needle(key: str, value: str) -> str:
    return f"A secret code of {key} is {value}. "


def _essay(folder: Path | None) -> Callable[[np.random.Generator], Iterator[str]]:
    """Sentences of the authors' haystack where the folder has it, else everyday ones."""
    path = find(Source("ruler", ("PaulGrahamEssays.json",), ""), folder)
    return everyday if path is None else sentences_of(json.loads(open_text(path))["text"])


def _hay(rng: np.random.Generator, kind: Needle, size: int, essay) -> list[str]:
    if kind.hay == "noise":
        return [_NOISE[i % len(_NOISE)] for i in range(size)]
    if kind.hay == "needles":
        return [_needle(_key(rng, kind), _value(rng, kind)) for _ in range(size)]
    return list(islice(essay(rng), size))


def needles(kind: Needle, folder: Path | None) -> Callable[[np.random.Generator, int], Sample]:
    """make(rng, size): a problem with `size` sentences of hay."""
    essay = _essay(folder)

    def make(rng: np.random.Generator, size: int) -> Sample:
        values = {_key(rng, kind): [_value(rng, kind) for _ in range(kind.values)] for _ in range(kind.keys)}
        hidden = [_needle(key, value) for key, some in values.items() for value in some]
        places = np.sort(rng.integers(0, size + 1, len(hidden)))
        text = _hay(rng, kind, size, essay)
        for place, needle in sorted(zip(places.tolist(), rng.permutation(hidden).tolist(), strict=True), reverse=True):
            text.insert(place, needle)
        asked = [str(key) for key in rng.permutation(list(values))[: kind.queries]]
        names = " and ".join([", ".join(asked[:-1]), asked[-1]]) if len(asked) > 1 else asked[0]
        many = kind.values * kind.queries > 1
        what, verb = ("secret codes", "are") if many else ("secret code", "is")
        question = f"\nWhich {verb} the {what} of {names} in the text above?\nThe {what} of {names} {verb}"
        head = "Secret codes are hidden in the following text. Remember them, you will be asked for them.\n"
        return Sample(head + "".join(text) + question, tuple(value for key in asked for value in values[key]))

    return make
