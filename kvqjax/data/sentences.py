"""Everyday sentences of our own: a corpus that needs no download."""

import numpy as np

_WHO = (
    "The baker",
    "My aunt",
    "A sailor",
    "The old clerk",
    "Our neighbour",
    "The miller",
    "A nurse",
    "The guard",
)
_DID = (
    "walked to",
    "looked at",
    "wrote about",
    "painted",
    "remembered",
    "left",
    "came back to",
    "dreamed of",
)
_WHERE = (
    "the river",
    "a small church",
    "the market",
    "her garden",
    "the green hill",
    "an empty road",
    "the harbour",
)
_WHEN = (
    "in the morning",
    "before dinner",
    "after the rain",
    "at night",
    "on a cold day",
    "last summer",
    "once more",
)


def everyday_sentence(rng: np.random.Generator) -> str:
    """Draw a sentence of at least six words, with a blank behind it."""
    return " ".join(str(rng.choice(words)) for words in (_WHO, _DID, _WHERE, _WHEN)) + ". "


def filler(rng: np.random.Generator, words: int) -> str:
    """Make at least `words` words of everyday sentences."""
    # A sentence has at least six words.
    return "".join(everyday_sentence(rng) for _ in range(words // 6 + 1))
