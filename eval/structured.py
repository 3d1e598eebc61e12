"""Structured texts of our own that are to be given back to the letter: JSON, XML, two fields of
records, a chain of calls, symbols.

A small model repeats what it has seen once with errors of its own. So a document stands in the
prompt twice, as an example of a copy, and each prompt ends behind the beginning of its answer.
Lines do not begin with blanks, and no prompt ends in two line ends: what follows would change
their tokens.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvqjax._errors import UserError
from kvqjax.eval.synthetic import OWNERS, Problem, random_digits, repeated_spans

WORDS = (
    "river", "stone", "cloud", "apple", "horse", "garden", "window", "silver", "market", "bridge",
    "candle", "forest", "harbor", "island", "kitchen", "ladder", "mirror", "needle", "orange",
    "pepper", "rabbit", "saddle", "ticket", "valley", "wagon", "yellow", "anchor", "basket",
)  # fmt: skip
EXAMPLES = 2  # records whose fields are shown before those that are asked for
ASKED = 6  # records that are asked for
SHOWN = 3  # calls of the chain that is shown
CALLS = 10  # of the chain that is asked for
SPAN = 8  # symbols that are right or wrong together
CODE, SIZE = 6, 4  # digits of a record's fields


Parts = tuple[tuple[int, int], ...]  # first character of each, and the one behind its last


class Passage(NamedTuple):
    """A problem, and the parts of its answer that are scored. What lies between them is given."""

    problem: Problem
    parts: Parts


class Record(NamedTuple):
    """An entry of a document."""

    key: str
    code: str
    owner: str
    size: str


Count = Callable[[str], int]
Generator = Callable[[np.random.Generator, int, Count], Passage]


def _keys(rng: np.random.Generator) -> Iterator[str]:
    """Distinct keys without end, of two words each, then of two words and a number."""
    for turn in itertools.count():
        for number in rng.permutation(len(WORDS) ** 2):
            first, second = divmod(int(number), len(WORDS))
            yield f"{WORDS[first]}_{WORDS[second]}" + (f"_{turn}" if turn else "")


def _numbers(rng: np.random.Generator) -> Iterator[str]:
    """Distinct numbers without end, first all of four digits in any order."""
    for size in itertools.count(4):
        least = 10 ** (size - 1)
        for number in rng.permutation(9 * least):
            yield str(least + int(number))


def _records(rng: np.random.Generator) -> Iterator[Record]:
    for key in _keys(rng):
        yield Record(
            key, random_digits(rng, CODE), str(rng.choice(OWNERS)), random_digits(rng, SIZE)
        )


def _json_line(record: Record) -> str:
    values = f'"code": "{record.code}", "owner": "{record.owner}", "size": "{record.size}"'
    return f'"{record.key}": {{{values}}}'


def _xml_line(record: Record) -> str:
    values = f'code="{record.code}" owner="{record.owner}" size="{record.size}"'
    return f'<item id="{record.key}" {values}/>\n'


def _json_lines(records: Sequence[Record]) -> list[str]:
    lines = list(map(_json_line, records))
    return [*(f"{line},\n" for line in lines[:-1]), f"{lines[-1]}\n"]


def _joined(pieces: Sequence[str], scored: Callable[[str], bool] = bool) -> tuple[str, Parts]:
    """The text of pieces as they stand, and the places of those that are `scored`."""
    ends = list(itertools.accumulate(map(len, pieces)))
    parts = tuple(
        (end - len(piece), end) for piece, end in zip(pieces, ends, strict=True) if scored(piece)
    )
    return "".join(pieces), parts


def _largest(
    items: Iterator, make: Callable[[list], Passage], least: int, length: int, count: Count
) -> Passage:
    """The passage `make(items)` of as many items as fit into `length` tokens.

    Raises UserError where not even `least` items fit."""

    def tokens(passage: Passage) -> int:
        return count(passage.problem.prompt + passage.problem.answer)

    records = list(itertools.islice(items, least))
    passage = make(records)
    shortest = size = tokens(passage)
    while size <= length:
        missing = (length - size) * len(records) // size
        records += itertools.islice(items, max(1, missing))
        passage = make(records)
        size = tokens(passage)
    while size > length and len(records) > least:
        records.pop()
        passage = make(records)
        size = tokens(passage)
    if size > length:
        raise UserError(f"length={length}; this problem needs at least {shortest} tokens")
    return passage


def document(
    rng: np.random.Generator,
    length: int,
    count: Count,
    lines_of: Callable[[Sequence[Record]], list[str]],
    head: str,
    tail: str,
) -> Passage:
    """A document twice, and its first record: the others are to follow, then the document's end."""

    def make(records: list[Record]) -> Passage:
        first, *others = lines_of(records)
        text = "".join([head, first, *others, tail])
        answer, parts = _joined([*others, tail])
        return Passage(Problem(f"{text}\n{text}\n{head}{first}", answer), parts)

    return _largest(_records(rng), make, 2, length, count)


def fields(rng: np.random.Generator, length: int, count: Count) -> Passage:
    """A JSON document, then code and owner of some of its records in any order."""
    seed = int(rng.integers(2**31))

    def line(record: Record) -> list[str]:
        return [f'"{record.key}": {{"code": "', record.code, '", "owner": "', record.owner, '"}\n']

    def make(records: list[Record]) -> Passage:
        order = np.random.default_rng(seed).permutation(len(records))[: EXAMPLES + ASKED]
        picked = [records[number] for number in order]
        shown = list(itertools.chain.from_iterable(map(line, picked[:EXAMPLES])))
        hidden = list(itertools.chain.from_iterable(map(line, picked[EXAMPLES:])))
        values = {value for record in picked for value in (record.code, record.owner)}
        answer, parts = _joined(hidden, values.__contains__)
        text = "".join(["{\n", *_json_lines(records), "}\n\n", *shown])
        return Passage(Problem(text, answer), parts)

    return _largest(_records(rng), make, EXAMPLES + ASKED, length, count)


def chain(rng: np.random.Generator, length: int, count: Count) -> Passage:
    """A log of calls and their results in any order. Then chains of calls, each with the result of
    the one before as its argument: one is shown, results and arguments of the other are asked for."""
    seed, numbers = int(rng.integers(2**31)), _numbers(rng)

    def line(call: tuple[str, str]) -> list[str]:
        return ['{"call": "', call[0], '", "result": "', call[1], '"}\n']

    def linked(calls: int) -> list[tuple[str, str]]:
        return list(itertools.pairwise(itertools.islice(numbers, calls + 1)))

    def text(calls: Sequence[tuple[str, str]]) -> str:
        return "".join(itertools.chain.from_iterable(map(line, calls)))

    shown, hidden = linked(SHOWN), linked(CALLS)
    first = hidden[0][0]

    def make(others: list[tuple[str, str]]) -> Passage:
        calls = [*shown, *hidden, *others]
        order = np.random.default_rng(seed).permutation(len(calls))
        log = text([calls[number] for number in order])
        pieces = list(itertools.chain.from_iterable(map(line, hidden)))
        answer, parts = _joined(pieces, lambda piece: piece.isdigit() and piece != first)
        return Passage(Problem(f"{log}\n{text(shown)}---\n", answer), parts)

    others = ((next(numbers), next(numbers)) for _ in itertools.count())
    return _largest(others, make, 1, length, count)


def symbols(rng: np.random.Generator, length: int, count: Count) -> Passage:
    """Symbols at random, and the same again, of which the first span is given: for tokenizers
    without the characters of JSON."""
    problem = repeated_spans(rng, length, count)
    answer = problem.answer
    pieces = [answer[start : start + SPAN] for start in range(0, len(answer), SPAN)]
    if len(pieces) < 2:
        raise UserError(f"length={length}; two spans of {SPAN} symbols do not fit twice")
    return Passage(problem, _joined(pieces)[1][1:])


KINDS: dict[str, Generator] = {
    "json": functools.partial(document, lines_of=_json_lines, head="{\n", tail="}\n"),
    "xml": functools.partial(
        document,
        lines_of=lambda records: list(map(_xml_line, records)),
        head="<items>\n",
        tail="</items>\n",
    ),
    "fields": fields,
    "chain": chain,
    "symbols": symbols,
}
STRUCTURED = ("json", "xml", "fields", "chain")
