"""The rows of a running batch: which request has which row and which pages, and whose prompt is
being fed. Only the thread that owns the device calls this (kvqjax/serving/engine.py).

A request goes this way:

    waits (engine) -> its prompt is fed, chunk by chunk -> its row makes tokens -> it ends
                                                           |               ^
                                                           v               |
                                                           parked in the host's memory

A prompt that is complete moves into a row of the batch. Where pages run out, the request that came
last is parked. A prompt that is being fed starts anew instead.
"""

import itertools
from collections.abc import Callable

import numpy as np

from kvqjax._errors import UserError
from kvqjax.cache.pages import PagePool
from kvqjax.cache.runs import pages_complete, pages_needed
from kvqjax.generation.driver import read_row
from kvqjax.serving.batch import Parked, RowOutput, RunningBatch
from kvqjax.serving.prefixes import Prefix, Prefixes
from kvqjax.serving.request import Handle, ServedPiece, TokenScore

# Chunks of prompts between two strides, at most. A stride computes all rows, so it pays to fill
# idle rows first: 24 requests at once took 124 s with one chunk a turn, while 7 of 16 rows ran
# (SmolLM2-135M, 2 cores).
MOST_CHUNKS = 4


class RequestFailed(UserError):
    """The numbers of this request are not finite. Other requests go on."""


class Feeding:
    """A request whose prompt is being fed.

    Attributes:
        row: the row of the batch that it will have.
        start: how many tokens of the prompt were read, or taken from a prefix.
        keep_at: the lengths at which the prompt's beginning is kept for later prompts.
        pages: those that hold what was read.
        begun: whether a prefix was looked for.
    """

    def __init__(self, handle: Handle, row: int):
        self.handle = handle
        self.row = row
        self.start = 0
        self.keep_at: set[int] = set()
        self.pages: list[int] = []
        self.begun = False


class Rows:
    """Share out a batch's rows, and the pages of its pool, among requests.

    Args:
        batch: computes what the rows get.
        prefixes: what is kept of prompts that begin alike.
        pool: the pages that all rows share; None where every row has a body of its own.
        context_shift: a full row goes on: its oldest text leaves.
        count: adds numbers to what the engine counts, by name.
        next_prompt: chooses whose prompt is fed next, and sets `feeding`.

    Attributes:
        handles: the request of every row; None for an empty row.
        feeding: the request whose prompt is being fed.
        parked: the requests that made way, each with its row in the host's memory.
    """

    def __init__(
        self,
        batch: RunningBatch,
        prefixes: Prefixes,
        pool: PagePool | None,
        *,
        context_shift: bool,
        count: Callable[..., None],
        next_prompt: Callable[[], None],
    ):
        self._batch = batch
        self._prefixes = prefixes
        self._pool = pool
        self._layout = batch.cache.layout
        self._context_shift = context_shift
        self._count = count
        self._next_prompt = next_prompt
        self.handles: list[Handle | None] = [None] * batch.cache.batch
        self._pages: list[list[int]] = [[] for _ in self.handles]  # of every row
        self.parked: list[tuple[Handle, Parked]] = []
        self.feeding: Feeding | None = None

    @property
    def running(self) -> int:
        """Count the rows that make tokens."""
        return len(self._occupied())

    def _occupied(self) -> list[tuple[int, Handle]]:
        """List the rows that have a request, with it."""
        return [(row, handle) for row, handle in enumerate(self.handles) if handle is not None]

    @property
    def free(self) -> int | None:
        """Give the number of the first row without a request; None where every row has one."""
        if None not in self.handles:
            return None
        return self.handles.index(None)

    @property
    def busy(self) -> bool:
        """Say whether any request has a row, is parked, or has its prompt fed."""
        return self.feeding is not None or bool(self.parked) or self.running > 0

    def requests(self) -> list[Handle]:
        """List the requests that run, are parked, or whose prompt is being fed."""
        running = [handle for _, handle in self._occupied()]
        parked = [handle for handle, _ in self.parked]
        feeding = [] if self.feeding is None else [self.feeding.handle]
        return [*running, *parked, *feeding]

    def end(self, handle: Handle, reason: str, piece: ServedPiece | None = None) -> None:
        """Tell a request that it has ended, and why.

        Args:
            reason: as answers have it, or "aborted".
            piece: the last piece of its text."""
        self._count(requests=1, aborted=int(reason == "aborted"))
        handle.told(piece or ServedPiece("", [], []), reason)

    def drop_aborted(self) -> None:
        """End the requests that were given up, and empty their rows."""
        if self.feeding is not None and self.feeding.handle.aborted:
            self.end(self.feeding.handle, "aborted")
            self._stop_feeding()
        for handle, _ in self.parked:
            if handle.aborted:
                self.end(handle, "aborted")
        self.parked = [entry for entry in self.parked if not entry[0].aborted]
        for row, handle in self._occupied():
            if handle.aborted:
                self.end(handle, "aborted")
                self._empty(row)

    def feed(self) -> None:
        """Feed about one chunk of prompts, or several while few rows run. A prompt that is complete
        joins the batch."""
        turns = len(self.handles) // (2 * max(1, self.running))
        budget = self._batch.chunk * min(MOST_CHUNKS, max(1, turns))
        while self.feeding is not None and budget > 0:
            feeding = self.feeding
            request = feeding.handle.request
            if not feeding.begun and not self._begin(feeding):
                return
            count = min(self._batch.chunk, len(request.prompt) - feeding.start)
            if not self._grow(feeding.pages, feeding.start + count, feeding.handle):
                return
            logits, scores = self._batch.feed(
                request.prompt, feeding.start, request.prompt_scores, feeding.pages
            )
            feeding.handle.prompt_scores += _at_most(scores, request.likeliest)
            feeding.start += count
            budget -= count
            self._count(prompt_tokens=count)
            if feeding.start in feeding.keep_at:
                self._prefixes.keep(
                    request.prompt, feeding.start, self._batch.prompt_row(), feeding.pages
                )
            if feeding.start == len(request.prompt):
                output = self._batch.join(feeding.row, request, logits, feeding.pages)
                self.feeding = None
                self.handles[feeding.row] = feeding.handle
                self._pages[feeding.row] = feeding.pages
                self._tell(feeding.row, output)
                self._next_prompt()  # while the turn's budget lasts

    def _begin(self, feeding: Feeding) -> bool:
        """Go on from the longest kept prefix that the prompt begins with, and choose where to keep
        one. A prompt whose tokens are to be scored is read from its first token on.

        Returns:
            False while there are no pages for the whole prompt. To begin it anyway would be of no
            use: it would soon have to make way.
        """
        request = feeding.handle.request
        prefix = None if request.prompt_scores else self._prefixes.longest(request.prompt)
        shared = 0 if prefix is None else pages_complete(self._layout, prefix.length)
        needed = self._needed(len(request.prompt) + self._batch.stride) - shared
        if self.running and not self._spare(needed, feeding.handle):
            return False
        feeding.begun = True
        if request.prompt_scores:
            return True
        # Looked up again, because `_spare` may have dropped this prefix.
        prefix = self._prefixes.longest(request.prompt)
        if prefix is not None and self._take_over(prefix, feeding):
            feeding.start = prefix.length
            feeding.handle.reused_tokens = prefix.length
            self._count(prompt_tokens=prefix.length, reused_tokens=prefix.length)
        ends = self._prefixes.worth_keeping(request.prompt)
        feeding.keep_at = {end for end in ends if end > feeding.start}
        return True

    def _take_over(self, prefix: Prefix, feeding: Feeding) -> bool:
        """Let the prompt's row go on from a prefix. The prefix's complete pages are shared, the
        last ones are copied, because the row writes into them. False where there is no page for the
        copies."""
        if self._pool is not None:
            complete = pages_complete(self._layout, prefix.length)
            shared = self._pool.share(prefix.pages)  # first, so that `_spare` cannot free them
            if not self._spare(len(shared) - complete, feeding.handle):
                self._pool.drop(shared)
                return False
            copies = self._pool.take(len(shared) - complete)
            for source, target in zip(shared[complete:], copies, strict=True):
                self._batch.copy_page(source, target)
            self._pool.drop(shared[complete:])
            feeding.pages = [*shared[:complete], *copies]
        self._batch.go_on_from(prefix.row)
        return True

    # --- Pages ---

    def _needed(self, tokens: int) -> int:
        """Count the pages that a row of so many tokens takes."""
        return pages_needed(self._layout, min(tokens, self._layout.capacity))

    def _spare(self, count: int, handle: Handle) -> bool:
        """Make `count` pages free for a request: prefixes go first, then requests that came after
        it. False where that is not enough."""
        while self._pool is not None and self._pool.free < count:
            if not self._prefixes.drop() and not self._make_way(handle):
                return False
        return True

    def _grow(self, pages: list[int], tokens: int, handle: Handle) -> bool:
        """Give a request the pages for `tokens` tokens. False where it has to wait for them."""
        count = self._needed(tokens) - len(pages)
        if count <= 0 or self._pool is None:
            return True
        if not self._spare(count, handle):
            return False
        pages += self._pool.take(count)
        return True

    def _make_way(self, handle: Handle) -> bool:
        """Take the pages of the request that came last. False where none came after this one."""
        # The greatest rank came last. No two requests have the same.
        ranks = {occupant.rank: row for row, occupant in self._occupied()}
        last = max(ranks, default=handle.rank)
        feeding = self.feeding
        if feeding is not None and feeding.pages and feeding.handle.rank > max(last, handle.rank):
            self._feed_anew(feeding)
            return True
        if last <= handle.rank:
            return False
        self._park(ranks[last])
        return True

    def _feed_anew(self, feeding: Feeding) -> None:
        """Take the pages of the prompt that is being fed, which begins again later."""
        handle = feeding.handle
        self._count(preempted=1, prompt_tokens=-feeding.start, reused_tokens=-handle.reused_tokens)
        handle.prompt_scores.clear()
        handle.reused_tokens = 0  # the prefix may be gone when the prompt is read anew
        self._stop_feeding()
        self.feeding = Feeding(handle, feeding.row)

    def _park(self, row: int) -> None:
        """Move a running request to the host's memory."""
        handle = self.handles[row]
        assert handle is not None
        self._count(preempted=1)
        self.parked.append((handle, self._batch.leave(row, self._pages[row])))
        self._give_back(row)

    def bring_back(self) -> None:
        """Let requests that made way go on, in the order of their ranks, as long as there are rows,
        and pages for one more stride."""
        self.parked.sort(key=lambda entry: entry[0].rank)
        while self.parked and None in self.handles:
            handle, parked = self.parked[0]
            count = max(len(parked.pages), self._needed(parked.held + self._batch.stride))
            if self.feeding is not None and self.handles.count(None) == 1:
                return  # the prompt that is being fed has that row
            if self._pool is not None and not self._spare(count, handle):
                return
            empty = [row for row, occupant in enumerate(self.handles) if occupant is None]
            if self.feeding is not None:
                empty.remove(self.feeding.row)
            row = empty[0]
            self._pages[row] = [] if self._pool is None else self._pool.take(count)
            self._batch.come_back(row, parked, self._pages[row])
            self.handles[row] = handle
            self.parked.pop(0)

    def _empty(self, row: int) -> None:
        """Empty a row whose request has ended."""
        self._batch.drop_row(row)
        self._give_back(row)

    def _give_back(self, row: int) -> None:
        """Take the pages of an empty row back."""
        if self._pool is not None:
            self._pool.drop(self._pages[row])
        self.handles[row] = None
        self._pages[row] = []

    def _stop_feeding(self) -> None:
        """Empty the row into which prompts are fed."""
        assert self.feeding is not None
        self._batch.drop_prompt()
        if self._pool is not None:
            self._pool.drop(self.feeding.pages)
        self.feeding = None

    def _page_rows(self) -> None:
        """Give the rows pages for the next stride, the requests that came first before the
        others."""
        if self._pool is None:
            return
        for row, handle in sorted(self._occupied(), key=lambda entry: entry[1].rank):
            if self.handles[row] is None:  # it made way for an earlier row of this loop
                continue
            tokens = self._batch.row_length(row) + self._batch.stride
            if self._grow(self._pages[row], tokens, handle):
                self._batch.give_pages(row, self._pages[row])
            else:
                self._park(row)

    def _shift_rows(self) -> None:
        """Let the oldest text leave the rows that have no room for the next stride. A row that has
        nothing to leave ends."""
        for row, handle in self._occupied():
            request = handle.request
            length = self._batch.row_length(row)
            least = min(self._batch.stride, request.max_new_tokens - len(handle.detokenizer.ids))
            if length + least <= self._layout.capacity:
                continue
            behind = length - request.keep_first
            # About half of what may leave; three quarters where that is not enough.
            stops = [request.keep_first + behind * part // 4 for part in (2, 3)]
            count, pages = self._batch.drop(row, request.keep_first, stops, least)
            if self._pool is not None:
                self._pool.drop(set(self._pages[row]) - set(pages))
                self._pages[row] = pages
            self._count(shifts=int(count > 0), dropped_tokens=count)
            handle.dropped_tokens += count
            if count < least:
                piece = ServedPiece(handle.detokenizer.finish(), [], [])
                self._empty(row)
                self.end(handle, "length", piece)

    def step(self) -> None:
        """Let every row make a stride of tokens, and tell the requests what they got."""
        if self._context_shift:
            self._shift_rows()
            if not self.running:
                return
        self._page_rows()
        running = np.asarray([handle is not None for handle in self.handles])
        scored = any(handle.request.likeliest is not None for _, handle in self._occupied())
        bound = [None if handle is None else handle.request.bound for handle in self.handles]
        for row, output in enumerate(self._batch.step(running, scored, bound)):
            if running[row]:
                self._tell(row, output)

    def _tell(self, row: int, output: RowOutput) -> None:
        """Hand on what a row got, and free it where the answer ends."""
        handle = self.handles[row]
        assert handle is not None  # a row that ran has a request
        if output.broken:
            hint = "check the model's weights, or try {dtype}"
            self._count(requests=1, failed=1)
            self._empty(row)
            handle.failed(RequestFailed("a key or value is NaN or infinite", hint, dtype="f32"))
            return
        request = handle.request
        if request.bound is not None and request.bound.error is not None:
            self._count(requests=1, failed=1)
            self._empty(row)
            handle.failed(request.bound.error)
            return
        text, tokens, reason = read_row(
            handle.detokenizer, output.tokens, output.done, request.max_new_tokens, request.bound
        )
        scores = _at_most(output.scores[: len(tokens)], request.likeliest)
        piece = ServedPiece(text, tokens, scores)
        self._count(tokens=len(tokens))
        if reason is None:
            handle.told(piece, None)
            return
        self._empty(row)
        self.end(handle, reason, piece)


def _at_most(scores: list[TokenScore], likeliest: int | None) -> list[TokenScore]:
    """Give as many likeliest tokens with each score as the request asked for."""
    if likeliest is None:
        return []
    cut = []
    for score in scores:
        first = itertools.islice(score.likeliest.items(), likeliest)  # the likeliest come first
        cut.append(score._replace(likeliest=dict(first)))
    return cut
