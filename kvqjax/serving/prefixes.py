"""Prompts that begin alike are read once: what a row holds at the end of a chunk is kept, and later prompts go on from
there.

Chunks stand on a grid of positions, so that what is kept is to the bit what reading the same tokens anew would give. A
prefix is kept as the numbers of its pages, which other rows go on using, and a snapshot of what is a row's own. The
prefixes form a tree: each is named by a trace of all its tokens, made from the trace of the chunk before.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from kvqjax.cache import Cache
from kvqjax.cache.pages import PagePool
from kvqjax.serving.batch import RunningBatch

__all__ = ["Contents", "Prefix", "Prefixes", "SavedPrefix"]

Contents = dict[int, tuple[dict, ...]]  # by a page's number, what it holds of every run of layers

TRACE = 16  # bytes of a trace: two of 2^32 prefixes share one with a chance of 1 in 2^65
REMEMBERED = 4096  # beginnings of prompts of which a trace is remembered
# Prompts that may begin before a prefix which several have begun with counts as no better than the end of the newest
# prompt. Where there is room for one prefix, a system prompt of half of all requests would else be displaced by every
# request between.
PROVEN = 16


class Prefix(NamedTuple):
    """The first `length` tokens of some prompts: what a row holds beside its pages, and the pages."""

    length: int
    row: Cache
    pages: list[int]


class SavedPrefix(NamedTuple):
    """A prefix on the host: its trace, how many tokens it has, what its row has beside pages, and its pages' numbers.
    What a page holds stands apart, under its number, since several prefixes may share it."""

    trace: bytes
    length: int
    row: Cache
    pages: list[int]


class Prefixes:
    """What is kept of prompts that begin alike. Those go first that one prompt alone has begun with of late, and of
    equal ones those used least recently.

    Args:
        chunk: tokens of a chunk.
        most: prefixes that may be kept.
        pool: of the pages, of which each prefix is a user; None where rows have none.
    """

    def __init__(self, chunk: int, most: int, pool: PagePool | None = None):
        self._chunk, self._most, self._pool = chunk, most, pool
        self._kept: OrderedDict[bytes, Prefix] = OrderedDict()
        self._remembered: OrderedDict[bytes, None] = OrderedDict()
        self._begun = 0  # prompts
        self._proven: dict[bytes, int] = {}  # by trace, the number of the last prompt that began as others had

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, prompt: Sequence[int]) -> Prefix | None:
        """Find the longest kept prefix that a prompt begins with."""
        best = None
        for _, trace in self._ends(prompt):
            if trace in self._kept:
                best = trace
        if best is None:
            return None
        self._kept.move_to_end(best)
        self._proven[best] = self._begun
        return self._kept[best]

    def worth_keeping(self, prompt: Sequence[int]) -> set[int]:
        """Remember how a prompt begins, and choose the ends of chunks at which it is worth keeping: where an earlier
        prompt that began alike went on otherwise, and the last one, from which the next turn of a conversation goes
        on."""
        ends = list(self._ends(prompt)) if self._most else []
        repeated, common = 0, b""
        self._begun += 1
        for end, trace in ends:
            if trace in self._remembered:
                repeated, common = end, trace
            self._remembered[trace] = None
            self._remembered.move_to_end(trace)
        if repeated:
            self._proven[common] = self._begun
        while len(self._remembered) > REMEMBERED:
            self._proven.pop(self._remembered.popitem(last=False)[0], None)
        return {end for end in (repeated, ends[-1][0] if ends else 0) if end}

    def keep(self, prompt: Sequence[int], length: int, row: Cache, pages: Sequence[int]) -> None:
        """Keep the first `length` tokens of a prompt, which lie in `pages`, unless there is one place and what has it
        is worth more."""
        trace = next(trace for end, trace in self._ends(prompt) if end == length)
        if trace in self._kept:
            self._kept.move_to_end(trace)
            return
        if len(self._kept) >= self._most:
            worst = self._worst_first()[0]
            # Of several places one is always for the newest prompt, whose conversation may go on.
            if self._most == 1 and self._is_proven(worst) and not self._is_proven(trace):
                return
            self._let_go(worst)
        shared = [] if self._pool is None else self._pool.share(pages)
        self._kept[trace] = Prefix(length, row, shared)

    def saved(self, batch: RunningBatch) -> tuple[list[SavedPrefix], Contents]:
        """Copy all to the host: the prefixes, the one used least recently first, and each of their pages once."""
        prefixes = [
            SavedPrefix(trace, kept.length, jax.device_get(kept.row), kept.pages) for trace, kept in self._kept.items()
        ]
        numbers = dict.fromkeys(page for prefix in prefixes for page in prefix.pages)
        return prefixes, {number: batch.page_content(number) for number in numbers}

    def keep_saved(self, saved: Sequence[SavedPrefix], contents: Contents, batch: RunningBatch) -> int:
        """Keep saved prefixes beside those that are there: as many as there is room for, those used last first. They
        take free pages, and no request makes way for them.

        Returns:
            How many are kept now that were not before.
        """
        chosen: list[SavedPrefix] = []
        wanted: set[int] = set()
        room, free = self._most - len(self._kept), 0 if self._pool is None else self._pool.free
        for prefix in reversed(saved):
            fits = len(chosen) < room and len(wanted | set(prefix.pages)) <= free
            if fits and prefix.trace not in self._kept:
                chosen.append(prefix)
                wanted |= set(prefix.pages)
        numbers = sorted(wanted)
        pages = dict(zip(numbers, [] if self._pool is None else self._pool.take(len(numbers)), strict=True))
        for number, page in pages.items():
            batch.fill_page(page, contents[number])
        for prefix in reversed(chosen):
            here = [pages[number] for number in prefix.pages]
            if self._pool is not None:
                self._pool.share(here)
            self._kept[prefix.trace] = Prefix(prefix.length, batch.row_from_host(prefix.row), here)
            self._remembered[prefix.trace] = None
        if self._pool is not None:
            self._pool.drop(pages.values())  # from now on the prefixes alone use them
        return len(chosen)

    def drop(self) -> bool:
        """Let go of the prefix that is worth least among those of which a page becomes free, at once or when further
        ones go. False where there is none: pages that rows use too stay in use."""
        users = Counter(page for prefix in self._kept.values() for page in prefix.pages)
        for trace in self._worst_first():
            pages = self._kept[trace].pages
            if self._pool is not None and any(self._pool.users(page) == users[page] for page in pages):
                self._let_go(trace)
                return True
        return False

    def _worst_first(self) -> list[bytes]:
        """Give the traces of all, those first that go first."""
        return sorted(self._kept, key=self._is_proven)  # a stable sort of what lies in the order of use

    def _is_proven(self, trace: bytes) -> bool:
        """Say whether several prompts have begun so, the last of them not long ago."""
        return trace in self._proven and self._begun - self._proven[trace] <= PROVEN

    def _let_go(self, trace: bytes) -> None:
        prefix = self._kept.pop(trace)
        if self._pool is not None:
            self._pool.drop(prefix.pages)

    def _ends(self, prompt: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Give every end of a chunk before the prompt's last token, and a trace of all tokens up to it. The last token
        is read in any case, for its logits."""
        trace = b""
        for end in range(self._chunk, len(prompt), self._chunk):
            tokens = np.asarray(prompt[end - self._chunk : end], np.int32)
            trace = hashlib.blake2b(trace + tokens.tobytes(), digest_size=TRACE).digest()
            yield end, trace
