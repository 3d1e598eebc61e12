"""Continuous batching: requests come and go, and one thread owns the device.

Between two strides of tokens for the rows that run, the thread feeds about one chunk of the prompts that wait, so that
nobody waits for a long prompt. A request's text depends on its own prompt, options and seed alone.
"""

import heapq
import itertools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from kvqjax._arguments import check_counts, check_integer
from kvqjax._errors import UserError
from kvqjax._options import named_options
from kvqjax.cache.accounting import array_bytes, ledger
from kvqjax.generation.driver import read_row
from kvqjax.generation.prompt_ids import encode_prompts, end_ids, require_trained
from kvqjax.generation.sampling import make_sampling
from kvqjax.generation.text import Detokenizer, stop_strings
from kvqjax.methods import MethodLike, parse
from kvqjax.model.loading import Model
from kvqjax.model.rope import longest_text
from kvqjax.serving.batch import Made, RunningBatch, check_request
from kvqjax.serving.prefixes import Prefixes
from kvqjax.serving.request import Handle, Request, ServedPiece, TokenScore
from kvqjax.step.new_cache import init_cache

__all__ = ["Engine", "EngineClosed", "EngineFull", "RequestFailed", "Stats"]

CAPACITY = 4096  # tokens of a row where nobody says; less where the model was trained for less
ROWS = 8
CHUNK = 512  # tokens of a prompt between two strides: about what keeps a core or a chip busy for a stride's time
STRIDE = 8  # tokens of a row between two looks at the text: a piece of a stream
QUEUE = 1024  # requests that wait
PREFIXES = 2  # rows kept for prompts that begin alike: a system prompt, and the newest conversation


class EngineFull(UserError):
    """So many requests wait already that a further one is refused."""


class EngineClosed(UserError):
    """The engine takes no requests any more: it was closed, or its thread has failed."""


class RequestFailed(UserError):
    """A request whose numbers are not finite. Others go on."""


class Stats(NamedTuple):
    """What an engine does now, and what it has done since it began."""

    running: int  # rows that make tokens
    waiting: int  # requests that wait for a row, or whose prompt is being fed
    rows: int
    capacity: int  # tokens of a row
    cache_bytes: (
        int  # of the rows, of the row into which prompts are fed and of those kept for prompts that begin alike
    )
    bits: float  # per number of a key or value, with all that a row keeps beside its codes
    requests: int  # ended ones
    aborted: int  # of these, those that were given up
    failed: int  # of these, those that ended with an error
    prompt_tokens: int  # of prompts that were fed
    reused_tokens: int  # of these, those that a kept row held already
    tokens: int  # made


class _Feeding:
    """A request whose prompt is being fed for a row."""

    def __init__(self, handle: Handle, row: int):
        self.handle, self.row = handle, row
        self.start = self.keep_at = 0
        self.begun = False


class Engine:
    """Serve requests through one running batch whose rows share a compressed cache.

        with kvq.Engine(model, "kivi:bits=2", rows=16, capacity=4096) as engine:
            handles = [engine.submit(text, max_new_tokens=64) for text in texts]
            answers = [handle.result().text for handle in handles]

    Every row reserves `capacity` tokens. Prompts enter the cache chunk by chunk, so that later chunks see earlier ones
    compressed: the answer to one is that of `kvqjax.generate` with its options and the engine's `chunk` and `capacity`.

    Args:
        model: what `kvqjax.load` gives, with the constants of a calibrated method. On a mesh, one without a data axis.
        method: of the cache, such as "kivi:bits=2"; None: exact.
        rows: requests that make tokens at a time; default 8, or as many as `pool_bytes` holds.
        capacity: tokens of a row, prompt and answer together; default 4096, or what the model was trained for.
        pool_bytes: memory for the cache in bytes, in place of `rows`.
        chunk: tokens of a prompt that are fed between two strides.
        stride: tokens of a row between two looks at the text.
        queue: requests that may wait; a further one is refused.
        prefixes: rows kept for prompts that begin with the same chunks, which are then not read again. They take memory
            as other rows do; 0: none.
        kernels: as in `kvqjax.init_cache`.

    Raises:
        UserError: a method, a capacity or a mesh that cannot be; memory for less than two rows.
    """

    @named_options
    def __init__(
        self,
        model: Model,
        method: MethodLike | None = None,
        *,
        rows: int | None = None,
        capacity: int | None = None,
        pool_bytes: int | None = None,
        chunk: int = CHUNK,
        stride: int = STRIDE,
        queue: int = QUEUE,
        prefixes: int = PREFIXES,
        kernels: str = "auto",
    ):
        check_integer("prefixes", prefixes, 0)
        check_counts(rows=rows, capacity=capacity, pool_bytes=pool_bytes, chunk=chunk, stride=stride, queue=queue)
        self.model, self.method = model, parse("exact" if method is None else method)
        self.capacity = capacity or _capacity_of(model)
        self._queue = queue
        beside = 1 + prefixes  # rows that make no tokens
        rows = _rows_of(model, self.method, rows, self.capacity, pool_bytes, beside, kernels)
        self._batch = RunningBatch(
            model, self.method, rows, self.capacity, chunk=chunk, stride=stride, kernels=kernels
        )  # fmt: skip
        book = ledger(self._batch.cache)
        self._bytes, self._bits = book.bytes + beside * (book.bytes // rows), book.bits_stored
        self._rows: list[Handle | None] = [None] * rows
        self._feeding: _Feeding | None = None
        self._prefixes = Prefixes(chunk, prefixes)
        self._waiting: list[tuple[int, int, Handle]] = []  # a heap: priority, number, handle
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closing = False
        self._fault: BaseException | None = None
        self._counts = dict.fromkeys(("requests", "aborted", "failed", "prompt_tokens", "reused_tokens", "tokens"), 0)
        self._thread = threading.Thread(target=self._run, name="kvqjax-engine", daemon=True)
        self._thread.start()

    # --- For those who ask ---

    @named_options
    def submit(
        self,
        prompt: str | Sequence[int] | Sequence[dict[str, Any]],
        *,
        max_new_tokens: int = 64,
        chat: bool = False,
        add_special_tokens: bool | None = None,
        stop: str | Sequence[str] = (),
        eos_ids: Sequence[int] | None = None,
        seed: int = 0,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        scores: int | None = None,
        prompt_scores: bool = False,
        priority: int = 0,
        beyond_trained: bool = False,
    ) -> Handle:
        """Hand in a request. From any thread; it returns at once.

        Args:
            prompt: a string, token ids or, with `chat`, messages.
            max_new_tokens: of the answer.
            chat: put the prompt through the tokenizer's chat template.
            add_special_tokens: as in `kvqjax.generate`.
            stop: strings that end the answer and are kept out of it.
            eos_ids: tokens that end it, at most 8; default: the model's.
            seed: of the draws. Equal requests with equal seeds have equal answers, whatever else runs.
            temperature: 0 is greedy; this and the next four are those of `kvqjax.generate`.
            top_k: draw from so many; 0: all.
            top_p: draw from the likeliest that have this probability together.
            min_p: leave out tokens less likely than this share of the likeliest.
            repetition_penalty: above 1, tokens that occurred become less likely.
            scores: give the log probability of every new token and of so many likeliest ones, at most 20.
            prompt_scores: score the prompt's tokens too (with `scores`).
            priority: requests of a smaller number come first, of equal ones those that came first.
            beyond_trained: as in `kvqjax.generate`.

        Returns:
            The handle by which the answer is read.

        Raises:
            UserError: options that cannot be, or a prompt that does not fit.
            EngineFull: too many requests wait.
            EngineClosed: the engine takes no requests any more.
        """
        check_counts(max_new_tokens=max_new_tokens)
        check_integer("seed", seed, 0)
        ids = encode_prompts(self.model, [prompt], chat, add_special_tokens=add_special_tokens)[0]
        require_trained(self.model, [len(ids)], max_new_tokens, beyond_trained)
        draw = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        request = Request(
            prompt=ids,
            max_new_tokens=max_new_tokens,
            sampling=make_sampling(**draw, repetition_penalty=repetition_penalty),
            eos=end_ids(self.model, eos_ids).tolist(),
            stop=stop_strings(stop),
            seed=seed,
            likeliest=scores,
            prompt_scores=prompt_scores and scores is not None,
            priority=priority,
        )
        check_request(request, self.capacity, self.model.config.vocab_size)
        tokenizer = self.model.tokenizer if self.model.has_tokenizer else None
        handle = Handle(request, Detokenizer(tokenizer, ids, request.stop))
        with self._changed:
            if self._closing or self._fault is not None:
                raise EngineClosed("this engine is closed") from self._fault
            if len(self._waiting) >= self._queue:
                raise EngineFull(f"{len(self._waiting)} requests wait already")
            heapq.heappush(self._waiting, (priority, next(self._numbers), handle))
            self._changed.notify_all()
        return handle

    @property
    def fault(self) -> BaseException | None:
        """What ended the thread that owns the device; None while it is sound."""
        return self._fault

    def stats(self) -> Stats:
        """Count what runs, what waits, and what was done."""
        with self._changed:
            running = sum(handle is not None for handle in self._rows)
            waiting = len(self._waiting) + (self._feeding is not None)
            return Stats(
                running=running,
                waiting=waiting,
                rows=len(self._rows),
                capacity=self.capacity,
                cache_bytes=self._bytes,
                bits=self._bits,
                **self._counts,
            )

    def warm(self) -> None:
        """Compile every program, so that no request waits for it: a request of each width of a chunk, with and without
        scores. They are not counted. Other requests may come meanwhile."""
        room = min(2, self.capacity - 1)
        options = {"max_new_tokens": room, "temperature": 1.0, "eos_ids": (), "beyond_trained": True}
        for width in self._batch.widths:
            ids = [0] * min(width, self.capacity - room)
            for scores in (None, 0):
                answer = self.submit(ids, scores=scores, prompt_scores=True, **options).result()
                reused, fed, new = answer.reused_tokens, answer.prompt_tokens, len(answer.tokens)
                self._count(requests=-1, prompt_tokens=-fed, reused_tokens=-reused, tokens=-new)

    def close(self, *, finish: bool = False) -> None:
        """Refuse further requests, and end.

        Args:
            finish: answer those that run or wait first. Otherwise they end here as aborted, with what they got.
        """
        with self._changed:
            self._closing = True
            if not finish:
                for handle in self._handles():
                    handle.abort()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind, *_) -> None:
        self.close(finish=kind is None)

    # --- The thread that owns the device ---

    def _run(self) -> None:
        try:
            while self._admitted():
                self._feed_some()
                if any(self._rows):
                    self._step()
        except BaseException as fault:  # whatever it is, nobody may wait for ever
            self._end_all(fault)

    def _end_all(self, fault: BaseException) -> None:
        with self._changed:
            self._fault = fault
            for handle in self._handles():
                handle.failed(fault)

    def _admitted(self) -> bool:
        """Wait for work, and choose whose prompt is fed next; False once the engine is to end."""
        with self._changed:
            while True:
                self._drop_aborted()
                self._choose()
                if self._feeding is not None or any(self._rows):
                    return True
                if self._closing:
                    return False
                self._changed.wait()

    def _choose(self) -> None:
        """Choose whose prompt is fed next, where none is and a row is free."""
        if self._feeding is None and self._waiting and None in self._rows:
            self._feeding = _Feeding(heapq.heappop(self._waiting)[2], self._rows.index(None))

    def _handles(self) -> list[Handle]:
        """List the requests that run, whose prompt is fed, or that wait."""
        feeding = [] if self._feeding is None else [self._feeding.handle]
        running = [handle for handle in self._rows if handle is not None]
        return [*running, *feeding, *(handle for _, _, handle in self._waiting)]

    def _count(self, **more: int) -> None:
        """Add to what `stats` says."""
        with self._changed:
            for name, number in more.items():
                self._counts[name] += number

    def _drop_aborted(self) -> None:
        """End the requests that were given up, wherever they are."""
        gone = [entry for entry in self._waiting if entry[2].aborted]
        if gone:
            self._waiting = [entry for entry in self._waiting if not entry[2].aborted]
            heapq.heapify(self._waiting)
        for _, _, handle in gone:
            self._ended(handle, "aborted")
        if self._feeding is not None and self._feeding.handle.aborted:
            self._ended(self._feeding.handle, "aborted")
            self._feeding = None
            self._batch.drop_prompt()
        for row, handle in enumerate(self._rows):
            if handle is not None and handle.aborted:
                self._ended(handle, "aborted")
                self._rows[row] = None

    def _ended(self, handle: Handle, reason: str, piece: ServedPiece | None = None) -> None:
        self._count(requests=1, aborted=int(reason == "aborted"))
        handle.told(piece or ServedPiece("", [], []), reason)

    def _feed_some(self) -> None:
        """Feed prompts until about one chunk is fed, and let those that are complete join the batch."""
        budget = self._batch.chunk
        while self._feeding is not None and budget > 0:
            feeding, request = self._feeding, self._feeding.handle.request
            if not feeding.begun:
                self._begin(feeding)
            count = min(self._batch.chunk, len(request.prompt) - feeding.start)
            logits, scores = self._batch.feed(request.prompt, feeding.start, request.prompt_scores)
            feeding.handle.prompt_scores += _at_most(scores, request.likeliest)
            feeding.start += count
            budget -= count
            self._count(prompt_tokens=count)
            if feeding.start == feeding.keep_at:
                self._prefixes.keep(request.prompt, feeding.start, self._batch.prompt_row())
            if feeding.start == len(request.prompt):
                made = self._batch.join(feeding.row, request, logits)
                self._feeding = None
                self._rows[feeding.row] = feeding.handle
                self._tell(feeding.row, made)
                with self._changed:
                    self._choose()  # a further prompt, while the turn's budget lasts

    def _begin(self, feeding: _Feeding) -> None:
        """Go on from the kept row that the prompt begins with, and choose where to keep one. Where the prompt's tokens
        are to be scored, all of them are read."""
        feeding.begun, request = True, feeding.handle.request
        if request.prompt_scores:
            return
        length, row = self._prefixes.longest(request.prompt)
        if row is not None:
            self._batch.go_on_from(row)
            feeding.start = feeding.handle.reused_tokens = length
            self._count(prompt_tokens=length, reused_tokens=length)
        repeated = self._prefixes.repeated(request.prompt)
        feeding.keep_at = repeated if repeated > length else 0

    def _step(self) -> None:
        running = np.asarray([handle is not None for handle in self._rows])
        scored = any(handle is not None and handle.request.likeliest is not None for handle in self._rows)
        for row, made in enumerate(self._batch.step(running, scored)):
            if running[row]:
                self._tell(row, made)

    def _tell(self, row: int, made: Made) -> None:
        """Hand on what a row got, and free it where the answer ends."""
        handle = self._rows[row]
        assert handle is not None  # a row that ran has a request
        if made.broken:
            why = "a key or value is NaN or infinite; check the model's weights, or try dtype='f32'"
            self._count(requests=1, failed=1)
            self._rows[row] = None
            handle.failed(RequestFailed(why))
            return
        request = handle.request
        text, kept, reason = read_row(handle.detokenizer, made.tokens, made.done, request.max_new_tokens)
        piece = ServedPiece(text, kept, _at_most(made.scores[: len(kept)], request.likeliest))
        self._count(tokens=len(kept))
        if reason is None:
            handle.told(piece, None)
            return
        self._rows[row] = None
        self._ended(handle, reason, piece)


def _at_most(scores: list[TokenScore], likeliest: int | None) -> list[TokenScore]:
    """Give as many likeliest tokens with each score as the request asked for."""
    if likeliest is None:
        return []
    return [score._replace(likeliest=dict(itertools.islice(score.likeliest.items(), likeliest))) for score in scores]


def _capacity_of(model: Model) -> int:
    lengths = (CAPACITY, model.config.trained_length, longest_text(model.config))
    return min(length for length in lengths if length is not None)


def _rows_of(
    model: Model,
    method: MethodLike,
    rows: int | None,
    capacity: int,
    pool_bytes: int | None,
    beside: int,
    kernels: str,
) -> int:
    """Count the rows that are asked for, or that the memory holds with `beside` others that make no tokens.

    Raises:
        UserError: both are given, or the memory does not hold one row more than these.
    """
    if pool_bytes is None:
        return ROWS if rows is None else rows
    if rows is not None:
        raise UserError("rows= and pool_bytes= both say how many rows there are; give one of them")
    row = array_bytes(jax.eval_shape(lambda: init_cache(model, method, 1, capacity, kernels=kernels)))
    if pool_bytes <= beside * row:
        raise UserError(
            f"pool_bytes={pool_bytes} hold {pool_bytes // row} rows of {capacity} tokens ({row} bytes each); wanted "
            f"{beside + 1} at least, of which {beside} take prompts and what several begin with (prefixes=0: 1)"
        )
    return pool_bytes // row - beside
