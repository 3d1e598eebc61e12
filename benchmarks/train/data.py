"""Training sequences: each source maps (rng, length) to tokens [length+1] and loss weights
[length].

The random state of a step is a function of (seed, step), so a resumed run sees the sequences it
would have seen.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks.train.recipes import Phase
from kvqjax.eval.synthetic import DIGITS, LETTERS, passkey_prompt

# Weight of random symbols: enough to learn their frequencies, too little to drown recall.
UNPREDICTABLE = 0.1
Encode = Callable[[str], list[int]]


class Corpus(NamedTuple):
    """The material of the sources. `symbols` are the token ids of random spans, `text` one long
    token stream."""

    encode: Encode
    bos: int
    symbols: np.ndarray
    text: np.ndarray | None = None
    valid: np.ndarray | None = None


def _fit(corpus: Corpus, tokens: np.ndarray, weights: np.ndarray, length: int):
    """Put <s> in front and cut to length; weights[i] is the weight of predicting tokens[i]."""
    tokens = np.concatenate([[corpus.bos], tokens])[: length + 1]
    return tokens.astype(np.int32), weights[:length].astype(np.float32)


def text(rng: np.random.Generator, length: int, corpus: Corpus):
    """A cut of the text, from a random place on."""
    start = rng.integers(0, len(corpus.text) - length)
    return _fit(corpus, corpus.text[start : start + length], np.ones(length), length)


def distinct(rng: np.random.Generator, length: int, corpus: Corpus):
    """Spans without a symbol twice, repeated: the last symbol alone tells the next, the easiest
    form of recall."""
    alphabet = np.unique(corpus.symbols)
    size = int(rng.integers(8, min(len(alphabet), length // 2)))
    noise = rng.permutation(alphabet)[:size]
    return _repeated(noise, 0, size, length, corpus)


def spans(rng: np.random.Generator, length: int, corpus: Corpus):
    """Random symbols, then a span of them again and again: the longer context tells the place."""
    size = int(rng.integers(min(16, length // 4), length // 2 + 1))
    lead = int(rng.integers(0, length - 2 * size + 1))
    return _repeated(rng.choice(corpus.symbols, lead + size), lead, size, length, corpus)


def _repeated(noise: np.ndarray, lead: int, size: int, length: int, corpus: Corpus):
    """noise[lead:] again and again until the sequence is full, full weight from its first repeat
    on."""
    tokens = np.concatenate([noise, np.resize(noise[lead:], length - lead - size)])
    weights = np.full(length, UNPREDICTABLE)
    weights[lead + size + 1 :] = 1  # the first symbol of a repeat cannot be known
    return _fit(corpus, tokens, weights, length)


def pairs(rng: np.random.Generator, length: int, corpus: Corpus):
    """Stored pairs `ab12,`, a question mark, and the same pairs asked in another order."""
    room = length // 5  # an item is about five tokens: two letters, two digits, a comma
    # At most nine tenths, so that some questions fit behind the items.
    stored = int(rng.integers(min(4, room // 2), int(0.9 * room)))
    keys = rng.choice(len(LETTERS) ** 2, stored, replace=False)
    items = [
        LETTERS[k // 26] + LETTERS[k % 26] + "".join(rng.choice(list(DIGITS), 2)) for k in keys
    ]
    tokens = corpus.encode(",".join(items) + ",?")
    weights = [UNPREDICTABLE] * len(tokens)
    while len(tokens) < length:
        for i in rng.permutation(stored):
            for part, weight in (
                (items[i][:2], UNPREDICTABLE),
                (items[i][2:], 1.0),
                (",", UNPREDICTABLE),
            ):
                ids = corpus.encode(part)
                tokens += ids
                weights += [weight] * len(ids)
    return _fit(corpus, np.asarray(tokens), np.asarray(weights), length)


def passkey(rng: np.random.Generator, length: int, corpus: Corpus):
    """A pass-key problem that fills the sequence; filler counts as text of low weight."""
    problem = passkey_prompt(
        rng, length, lambda s: len(corpus.encode(s)), digits=int(rng.integers(4, 7))
    )
    prompt, answer = corpus.encode(problem.prompt), corpus.encode(problem.answer)
    filler = corpus.encode(". ") + list(corpus.text[:length])
    # The answer counts. What fills the row behind it is no part of the problem.
    weights = np.concatenate(
        [np.full(len(prompt), 0.05), np.ones(len(answer)), np.zeros(len(filler))]
    )
    return _fit(corpus, np.asarray(prompt + answer + filler), weights, length)


SOURCES = {"text": text, "distinct": distinct, "spans": spans, "pairs": pairs, "passkey": passkey}


def _row(rng: np.random.Generator, source: Callable, length: int, piece: int, corpus: Corpus):
    """One problem over the whole row, or independent ones of `piece` tokens in a row (for sliding
    windows)."""
    if piece >= length:
        return source(rng, length, corpus)
    parts = [source(rng, piece - 1, corpus) for _ in range(length // piece + 1)]
    tokens = np.concatenate([tokens for tokens, _ in parts])
    # 0: the next <s>
    weights = np.concatenate([np.append(weights, np.float32(0)) for _, weights in parts])
    return tokens[: length + 1], weights[:length]


def batch(seed: int, step: int, phase: Phase, corpus: Corpus):
    """Tokens [size, length+1] and weights [size, length]; the mix is kept in every batch, not only
    on average."""
    rng = np.random.default_rng((seed, step))
    names, shares = list(phase.mix), np.asarray(list(phase.mix.values()))
    # Places of equal distance on the line from 0 to 1, of which each source has its share. One
    # random shift of all of them makes every source's rows right on average.
    chosen = np.searchsorted(
        np.cumsum(shares) / shares.sum(), (np.arange(phase.size) + rng.random()) / phase.size
    )
    sources = [SOURCES[names[min(i, len(names) - 1)]] for i in chosen]
    rows = [
        _row(rng, source, phase.length, phase.piece or phase.length, corpus) for source in sources
    ]
    return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])
