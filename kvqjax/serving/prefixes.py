"""Prompts that begin with the same tokens are read once: what a row holds at the end of a chunk is
kept, and later prompts go on from there.

Chunks begin at multiples of their length, so that a kept prefix is to the bit what reading the same
tokens again would give. A prefix is kept as the numbers of its pages, which other rows go on using,
and a snapshot of what the row has beside them. The prefixes form a tree: each is named by a trace
of all its tokens, a hash of the chunk's tokens and of the trace of the chunk before.
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

Contents = dict[int, tuple[dict, ...]]  # a page's number -> its body of every run of layers

TRACE = 16  # bytes of a trace: two of 2^32 prefixes share one with a chance of 1 in 2^65
REMEMBERED = 4096  # beginnings of prompts of which a trace is remembered
# A prefix that several prompts began with is worth more than the end of the newest prompt, until
# this number of prompts have come without it. Otherwise, where there is room for one prefix, every
# request in between would displace a system prompt of half of all requests.
PROVEN = 16


class Prefix(NamedTuple):
    """The first `length` tokens of some prompts: what a row holds beside its pages, and the
    pages."""

    length: int
    row: Cache
    pages: list[int]


class SavedPrefix(NamedTuple):
    """A prefix on the host: its trace, how many tokens it has, what its row has beside pages, and
    its pages' numbers. `Contents` has what a page holds, once, since several prefixes may share
    it."""

    trace: bytes
    length: int
    row: Cache
    pages: list[int]


class Prefixes:
    """The kept prefixes. Where room is needed, prefixes that only one of the latest prompts began
    with go first, and among those the least recently used.

    Args:
        chunk: tokens of a chunk.
        most: prefixes that may be kept.
        pool: of the pages, which count each prefix as a user; None where rows have no pages.
    """

    def __init__(self, chunk: int, most: int, pool: PagePool | None = None):
        self._chunk = chunk
        self._most = most
        self._pool = pool
        self._kept: OrderedDict[bytes, Prefix] = OrderedDict()
        self._remembered: OrderedDict[bytes, None] = OrderedDict()
        self._begun = 0  # prompts
        # By trace, the number of the last prompt that began as others had.
        self._proven: dict[bytes, int] = {}

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
        """Remember how a prompt begins, and choose the ends of chunks at which it is worth keeping.
        One is the last end that an earlier prompt shares, behind which the two differ. The other is
        the prompt's last end, from which the next turn of a conversation goes on."""
        self._begun += 1
        if not self._most:
            return set()
        repeated = 0
        repeated_trace = b""
        last = 0
        for end, trace in self._ends(prompt):
            if trace in self._remembered:
                repeated = end
                repeated_trace = trace
            self._remembered[trace] = None
            self._remembered.move_to_end(trace)
            last = end
        if repeated:
            self._proven[repeated_trace] = self._begun
        while len(self._remembered) > REMEMBERED:
            oldest, _ = self._remembered.popitem(last=False)
            self._proven.pop(oldest, None)
        return {end for end in (repeated, last) if end}  # 0 is no end of a chunk

    def keep(self, prompt: Sequence[int], length: int, row: Cache, pages: Sequence[int]) -> None:
        """Keep the first `length` tokens of a prompt, which lie in `pages`. With room for one
        prefix alone, it is kept unless the present one is worth more."""
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
        """Copy all to the host: the prefixes, the one used least recently first, and each of their
        pages once."""
        prefixes = []
        contents: Contents = {}
        for trace, kept in self._kept.items():
            row = jax.device_get(kept.row)
            prefixes.append(SavedPrefix(trace, kept.length, row, kept.pages))
            for page in kept.pages:
                if page not in contents:
                    contents[page] = batch.page_content(page)
        return prefixes, contents

    def keep_saved(
        self, saved: Sequence[SavedPrefix], contents: Contents, batch: RunningBatch
    ) -> int:
        """Add saved prefixes to those that are kept: as many as there is room for, from the most
        recently used on. They take free pages; no request makes way for them.

        Returns:
            How many were added.
        """
        chosen: list[SavedPrefix] = []
        page_numbers: set[int] = set()
        room = self._most - len(self._kept)
        free = 0 if self._pool is None else self._pool.free
        for prefix in reversed(saved):
            fits = len(chosen) < room and len(page_numbers | set(prefix.pages)) <= free
            if fits and prefix.trace not in self._kept:
                chosen.append(prefix)
                page_numbers |= set(prefix.pages)
        # Number of a page in `contents` -> its page here.
        pages: dict[int, int] = {}
        if self._pool is not None:
            taken = self._pool.take(len(page_numbers))
            pages = dict(zip(sorted(page_numbers), taken, strict=True))
        for number, page in pages.items():
            batch.fill_page(page, contents[number])
        for prefix in reversed(chosen):
            row_pages = [pages[number] for number in prefix.pages]
            if self._pool is not None:
                self._pool.share(row_pages)
            row = batch.row_from_host(prefix.row)
            self._kept[prefix.trace] = Prefix(prefix.length, row, row_pages)
            self._remembered[prefix.trace] = None
        if self._pool is not None:
            self._pool.drop(pages.values())  # from now on the prefixes alone use them
        return len(chosen)

    def drop(self) -> bool:
        """Drop one prefix, the one worth least among those with a page that only prefixes use: it
        becomes free now, or when further prefixes are dropped. Return False where there is
        none, since pages that rows use stay in use."""
        if self._pool is None:
            return False
        prefix_users: Counter[int] = Counter()
        for prefix in self._kept.values():
            prefix_users.update(prefix.pages)
        for trace in self._worst_first():
            for page in self._kept[trace].pages:
                if self._pool.users(page) == prefix_users[page]:
                    self._let_go(trace)
                    return True
        return False

    def _worst_first(self) -> list[bytes]:
        """Sort the traces of all prefixes by their worth, the least first."""
        # `_kept` is in the order of use, and a stable sort keeps it among equals.
        return sorted(self._kept, key=self._is_proven)

    def _is_proven(self, trace: bytes) -> bool:
        """Say whether several prompts began with this prefix, the last of them one of the latest
        `PROVEN`."""
        return trace in self._proven and self._begun - self._proven[trace] <= PROVEN

    def _let_go(self, trace: bytes) -> None:
        prefix = self._kept.pop(trace)
        if self._pool is not None:
            self._pool.drop(prefix.pages)

    def _ends(self, prompt: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yield every end of a chunk before the prompt's last token, and a trace of all tokens up
        to it. No prefix holds the last token, which is always read for its logits."""
        trace = b""
        for end in range(self._chunk, len(prompt), self._chunk):
            tokens = np.asarray(prompt[end - self._chunk : end], np.int32)
            trace = hashlib.blake2b(trace + tokens.tobytes(), digest_size=TRACE).digest()
            yield end, trace
