"""The requests of a serving benchmark, and what is counted of the answers."""

import argparse
from typing import NamedTuple

import numpy as np

SHORTEST_PROMPT, SHORTEST_ANSWER = 100, 50  # tokens


class Request(NamedTuple):
    """One request: when it comes, its prompt, how many tokens its answer has, and how many tokens
    of the prompt are the prefix that half of the requests share."""

    seconds: float
    prompt: list[int]
    answer: int
    shared: int


class Served(NamedTuple):
    """Times of serving all requests: seconds until the last token, and for each request the seconds
    until its first token (`first`) and then per further token (`pace`).

    - `running`: the mean number of rows that made tokens, over time or over steps; None if the
      engine does not say.
    - `reused`: prompt tokens that were not computed, since an earlier prompt began with them.
    - `preempted`: how often a request made way for another.
    - `pages_shared`: the most pages that several rows or kept prefixes had at a time; None if the
      engine does not say."""

    seconds: float
    first: list[float]
    pace: list[float]
    rows: int
    running: float | None
    reused: int
    preempted: int = 0
    pages_shared: int | None = None


def prefix_of(vocabulary: int, options: argparse.Namespace) -> list[int]:
    """Draw the prefix that half of the requests share."""
    return np.random.default_rng(options.seed).integers(0, vocabulary, options.prefix).tolist()


def requests_of(vocabulary: int, options: argparse.Namespace) -> list[Request]:
    """Draw the requests, those that come first first.

    Prompts have 100 to `longest` tokens beside the prefix and answers 50 to `answer`: least * (most
    / least) ** u, u a number drawn evenly from 0 to 1 to the power of `skew`. With 1, lengths are
    even on a logarithmic scale; above 1, long ones are rarer. The waits between two requests are
    exponential (Poisson arrivals) with `rate` requests a second; 0: none.
    """
    random = np.random.default_rng(options.seed + 1)
    waits = (
        random.exponential(1 / options.rate, options.requests)
        if options.rate
        else np.zeros(options.requests)
    )
    prefix = prefix_of(vocabulary, options)

    def length(least: int, most: int) -> int:
        return int(least * (most / least) ** (random.uniform() ** options.skew))

    requests = []
    for number, start in enumerate(np.cumsum(waits)):
        text = random.integers(0, vocabulary, length(SHORTEST_PROMPT, options.longest)).tolist()
        shared = len(prefix) if number % 2 else 0
        requests.append(
            Request(
                float(start),
                prefix[:shared] + text,
                length(SHORTEST_ANSWER, options.answer),
                shared,
            )
        )
    return requests
