"""Recall problems of our own text with a known answer: pass key, key-value recall, repeated spans.

Every generator takes a numpy Generator (the seed is the caller's) and a `count` function, text -> tokens, that sets the
length. Plain text, so any tokenizer can read it. The bundled models were trained on exactly these formats:

    pass key     filler. ... The pass key is 58213. ... filler. What is the pass key? The pass key is |58213
    key-value    qx47,rt05,ab31, ... ?rt|05                      (two letters name two digits)
    span         W.X.Y. ... |W.X.Y. ...                           (symbols at random, then the same again)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvqjax.errors import UserError

__all__ = ["DIGITS", "LETTERS", "SYMBOLS", "Problem", "filler", "key_value_recall", "passkey_prompt", "repeated_spans"]

DIGITS = "0123456789"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SYMBOLS = DIGITS + LETTERS + LETTERS[:24].upper()  # with ",", "?" and two specials: the 64 symbols of `recall`

_WHO = ("The baker", "My aunt", "A sailor", "The old clerk", "Our neighbour", "The miller", "A nurse", "The guard")
_DID = ("walked to", "looked at", "wrote about", "painted", "remembered", "left", "came back to", "dreamed of")
_WHERE = ("the river", "a small church", "the market", "her garden", "the green hill", "an empty road", "the harbour")
_WHEN = ("in the morning", "before dinner", "after the rain", "at night", "on a cold day", "last summer", "once more")


class Problem(NamedTuple):
    """A prompt and the text that must follow it."""

    prompt: str
    answer: str


def _sentence(rng: np.random.Generator) -> str:
    return " ".join(str(rng.choice(words)) for words in (_WHO, _DID, _WHERE, _WHEN)) + ". "


def _digits(rng: np.random.Generator, number: int) -> str:
    return "".join(rng.choice(list(DIGITS), number))


def passkey_prompt(
    rng: np.random.Generator, length: int, count: Callable[[str], int], depth: float | None = None, digits: int = 5
) -> Problem:
    """A number hidden at `depth` (0 first, 1 last, None at random) of everyday sentences; at most `length` tokens.

    Raises UserError when not even the needle and the question fit.
    """
    key = _digits(rng, digits)
    needle, question = f"The pass key is {key}. ", "What is the pass key? The pass key is "
    room = length - (least := count(needle + question + key))
    if room < 0:
        raise UserError(f"length={length}; a pass-key problem needs at least {least} tokens")
    hay: list[str] = []
    while (room := room - count(sentence := _sentence(rng))) >= 0:
        hay.append(sentence)
    place = round((rng.random() if depth is None else depth) * len(hay))
    return Problem("".join([*hay[:place], needle, *hay[place:], question]), key)


def _pairs(rng: np.random.Generator, number: int) -> list[tuple[str, str]]:
    """`number` pairs with distinct keys."""
    keys = rng.choice(len(LETTERS) ** 2, number, replace=False)
    return [(LETTERS[k // 26] + LETTERS[k % 26], _digits(rng, 2)) for k in keys]


def key_value_recall(
    rng: np.random.Generator, length: int, count: Callable[[str], int], depth: float | None = None
) -> Problem:
    """As many stored pairs as fit in `length` tokens, then one key whose value is asked (the pair at `depth`)."""
    number = max(1, min((length - count("?ab00")) * 16 // count("ab00," * 16), len(LETTERS) ** 2))
    pairs = _pairs(rng, number)
    while count(store := ",".join(k + v for k, v in pairs) + ",") + count("?ab00") > length and len(pairs) > 1:
        pairs.pop()
    asked = round((rng.random() if depth is None else depth) * (len(pairs) - 1))
    return Problem(f"{store}?{pairs[asked][0]}", pairs[asked][1])


def repeated_spans(
    rng: np.random.Generator, length: int, count: Callable[[str], int], symbols: Sequence[str] = tuple(SYMBOLS)
) -> Problem:
    """A span of random symbols (the prompt) and the same span again (the answer), together at most `length` tokens."""
    span = "".join(rng.choice(list(symbols), max(1, length // 2)))
    while 2 * count(span) > length and len(span) > 1:
        span = span[: max(1, len(span) * length // (2 * count(span) + 1))]
    return Problem(span, span)


def filler(rng: np.random.Generator, words: int) -> str:
    """At least `words` words of everyday sentences: a corpus that needs no download."""
    return "".join(_sentence(rng) for _ in range(words // 6 + 1))  # a sentence has at least six words
