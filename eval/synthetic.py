"""Problems of our own text with a known answer: pass keys, needles, variables, key-value recall,
repeated spans.

Every generator takes a numpy Generator (the seed is the caller's) and a `count` function, text ->
tokens, that sets the length. Plain text, so any tokenizer can read it. The bundled models were
trained on exactly these three formats:

    pass key     filler. ... The pass key is 58213. ... filler. What is the pass key? The pass key is |58213
    key-value    qx47,rt05,ab31, ... ?rt|05                      (two letters name two digits)
    span         W.X.Y. ... |W.X.Y. ...                           (symbols at random, then the same again)
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvqjax._errors import UserError
from kvqjax.data.sentences import everyday_sentence

DIGITS = "0123456789"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
# With ",", "?" and two specials: the 64 symbols of `recall`.
SYMBOLS = DIGITS + LETTERS + LETTERS[:24].upper()

OWNERS = (
    "Anna",
    "Boris",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Greta",
    "Henry",
    "Irene",
    "Jonas",
    "Karin",
    "Leo",
)
_THINGS = ("silver key", "old map", "red box", "small bell", "letter", "blue coat", "lamp", "book")
_PLACES = (
    "the stone bridge",
    "the kitchen floor",
    "an apple tree",
    "the church stairs",
    "a fishing boat",
    "the bed",
)


class Problem(NamedTuple):
    """A prompt and the text that must follow it."""

    prompt: str
    answer: str


def random_digits(rng: np.random.Generator, number: int) -> str:
    """Draw `number` digits; the first may be 0."""
    return "".join(rng.choice(list(DIGITS), number))


Sentences = Callable[[np.random.Generator], Iterator[str]]


def everyday(rng: np.random.Generator) -> Iterator[str]:
    """Everyday sentences without end."""
    while True:
        yield everyday_sentence(rng)


def sentences_of(text: str) -> Sentences:
    """The sentences of a text in its order, again and again, from a place drawn at random."""
    parts = [part + " " for part in re.split(r"(?<=[.!?])\s+", " ".join(text.split())) if part]

    def endless(rng: np.random.Generator) -> Iterator[str]:
        start = int(rng.integers(len(parts)))
        return itertools.cycle(parts[start:] + parts[:start])

    return endless


def bury(
    rng: np.random.Generator,
    needles: Sequence[str],
    question: str,
    answer: str,
    length: int,
    count: Callable[[str], int],
    depth: float | None,
    sentences: Sentences = everyday,
) -> Problem:
    """Sentences with needles, then the question; answer included, at most `length` tokens. The
    first needle is at `depth` of the sentences (0 first, 1 last, None at random). The others are in
    order at random places behind it.

    Raises UserError when not even the needles and the question fit.
    """
    room = length - (least := count("".join(needles) + question + answer))
    if room < 0:
        raise UserError(f"length={length}; this problem needs at least {least} tokens")
    hay: list[str] = []
    for text in sentences(rng):
        if (room := room - count(text)) < 0:
            break
        hay.append(text)
    place = round((rng.random() if depth is None else depth) * len(hay))
    positions = (
        sorted(int(p) for p in rng.integers(place, len(hay) + 1, len(needles) - 1))
        if len(needles) > 1
        else []
    )
    for position, needle in reversed(list(zip([place, *positions], needles, strict=True))):
        hay.insert(position, needle)
    return Problem("".join([*hay, question]), answer)


def passkey_prompt(
    rng: np.random.Generator,
    length: int,
    count: Callable[[str], int],
    depth: float | None = None,
    sentences: Sentences = everyday,
    digits: int = 5,
) -> Problem:
    """A number hidden in everyday sentences (`bury`)."""
    key = random_digits(rng, digits)
    question = "What is the pass key? The pass key is "
    return bury(rng, [f"The pass key is {key}. "], question, key, length, count, depth, sentences)


def multikey_prompt(
    rng: np.random.Generator,
    length: int,
    count: Callable[[str], int],
    depth: float | None = None,
    sentences: Sentences = everyday,
    keys: int = 4,
) -> Problem:
    """Pass keys of several owners. The question asks for one of them, at `depth`; the others come
    after it."""
    owners = [OWNERS[i] for i in rng.permutation(len(OWNERS))[:keys]]
    values = [random_digits(rng, 5) for _ in owners]
    needles = [
        f"The pass key of {owner} is {value}. " for owner, value in zip(owners, values, strict=True)
    ]
    question = f"What is the pass key of {owners[0]}? The pass key of {owners[0]} is "
    return bury(rng, needles, question, values[0], length, count, depth, sentences)


def variable_tracking(
    rng: np.random.Generator,
    length: int,
    count: Callable[[str], int],
    depth: float | None = None,
    sentences: Sentences = everyday,
    hops: int = 3,
) -> Problem:
    """A number given to one variable and handed on `hops` times; the last variable's value is asked
    for."""
    names = [
        f"{letter}{digit}"
        for letter, digit in zip(
            rng.permutation(list(LETTERS)), random_digits(rng, 26), strict=True
        )
    ]
    value = random_digits(rng, 5)
    chain = [
        f"Let {names[0]} be {value}. ",
        *(f"Let {names[i + 1]} be {names[i]}. " for i in range(hops)),
    ]
    question = f"What is {names[hops]}? The value of {names[hops]} is "
    return bury(rng, chain, question, value, length, count, depth, sentences)


def needle_prompt(
    rng: np.random.Generator,
    length: int,
    count: Callable[[str], int],
    depth: float | None = None,
    sentences: Sentences = everyday,
) -> Problem:
    """A sentence with a fact in words: the needle in a haystack."""
    owner, thing, place = (str(rng.choice(words)) for words in (OWNERS, _THINGS, _PLACES))
    needle = f"The {thing} of {owner} is hidden under {place}. "
    question = f"Where is the {thing} of {owner} hidden? The {thing} of {owner} is hidden under"
    return bury(rng, [needle], question, f" {place}", length, count, depth, sentences)


def _pairs(rng: np.random.Generator, number: int) -> list[tuple[str, str]]:
    """`number` pairs with distinct keys."""
    keys = rng.choice(len(LETTERS) ** 2, number, replace=False)
    return [(LETTERS[k // 26] + LETTERS[k % 26], random_digits(rng, 2)) for k in keys]


def key_value_recall(
    rng: np.random.Generator, length: int, count: Callable[[str], int], depth: float | None = None
) -> Problem:
    """Fill `length` tokens with stored pairs, then ask for the value of one key (the pair at
    `depth`)."""
    number = max(1, min((length - count("?ab00")) * 16 // count("ab00," * 16), len(LETTERS) ** 2))
    pairs = _pairs(rng, number)
    while (
        count(store := ",".join(k + v for k, v in pairs) + ",") + count("?ab00") > length
        and len(pairs) > 1
    ):
        pairs.pop()
    target = round((rng.random() if depth is None else depth) * (len(pairs) - 1))
    return Problem(f"{store}?{pairs[target][0]}", pairs[target][1])


def repeated_spans(rng: np.random.Generator, length: int, count: Callable[[str], int]) -> Problem:
    """A span of random symbols (the prompt) and the same span again (the answer), together at most
    `length` tokens."""
    span = "".join(rng.choice(list(SYMBOLS), max(1, length // 2)))
    while 2 * count(span) > length and len(span) > 1:
        span = span[: max(1, len(span) * length // (2 * count(span) + 1))]
    return Problem(span, span)
