"""Prompts that begin alike are read once: rows are kept as they are at the end of a chunk, and later prompts go on
from there.

Chunks stand on a grid of positions, so that a kept row is to the bit what reading the same tokens anew would give. A
row is kept when a second prompt begins with the same chunks: one that nobody repeats takes no memory.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from kvqjax.cache import Cache

__all__ = ["Prefixes"]

REMEMBERED = 4096  # beginnings of prompts of which a trace of 16 bytes is remembered


class Prefixes:
    """Rows kept for prompts that begin alike; those used least recently go first.

    Args:
        chunk: tokens of a chunk.
        most: rows that may be kept.
    """

    def __init__(self, chunk: int, most: int):
        self._chunk, self._most = chunk, most
        self._kept: OrderedDict[bytes, Cache] = OrderedDict()
        self._remembered: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, prompt: Sequence[int]) -> tuple[int, Cache | None]:
        """Find the kept row that most of a prompt begins with: (its tokens, the row), or (0, None)."""
        best: tuple[int, bytes | None] = (0, None)
        for length, trace in self._ends(prompt):
            if trace in self._kept:
                best = length, trace
        length, trace = best
        if trace is None:
            return 0, None
        self._kept.move_to_end(trace)
        return length, self._kept[trace]

    def repeated(self, prompt: Sequence[int]) -> int:
        """Remember how a prompt begins, and count the tokens with which an earlier one began too: chunks alone, and
        fewer than the prompt has. 0 where no row is kept."""
        length = 0
        for end, trace in self._ends(prompt) if self._most else ():
            if trace in self._remembered:
                length = end
            self._remembered[trace] = None
            self._remembered.move_to_end(trace)
        while len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)
        return length

    def keep(self, prompt: Sequence[int], length: int, row: Cache) -> None:
        """Keep a row that holds the first `length` tokens of a prompt."""
        trace = next(trace for end, trace in self._ends(prompt) if end == length)
        self._kept[trace] = row
        self._kept.move_to_end(trace)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def _ends(self, prompt: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Give every end of a chunk before the prompt's last token, and a trace of all tokens up to it. The last token
        is read in any case, for its logits."""
        trace = b""
        for end in range(self._chunk, len(prompt), self._chunk):
            tokens = np.asarray(prompt[end - self._chunk : end], np.int32)
            trace = hashlib.blake2b(trace + tokens.tobytes(), digest_size=16).digest()
            yield end, trace
