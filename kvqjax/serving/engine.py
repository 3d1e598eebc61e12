"""Continuous batching: requests come and go, and one thread owns the device.

Between two strides of tokens for the rows that run, the thread feeds about one chunk of the prompts
that wait, so that no running request waits for a long prompt. While a quarter of the rows run or
fewer, it feeds up to four chunks. A request's text depends on its own prompt, options and seed
alone.

Rows take pages of one pool as they grow, and share the pages of tokens that their prompts have in
common. Where pages run out, kept prefixes of earlier prompts go first. Then the request that came
last makes way: it moves to the host's memory, and goes on from there once there are pages again.
"""

import atexit
import heapq
import itertools
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Unpack

from kvqjax._arguments import MOST, check_counts, check_integer
from kvqjax._errors import UserError
from kvqjax._options import named_options, with_fields
from kvqjax.cache.layout import CacheLayout
from kvqjax.cache.moves import check_movable, turns_keys
from kvqjax.cache.pages import PagePool
from kvqjax.cache.runs import runs_of
from kvqjax.generation.bound import can_bind
from kvqjax.generation.conversation import KEPT_FIRST, head_of, template_of
from kvqjax.generation.options import GenerateFields, GenerateOptions
from kvqjax.generation.prompt_ids import (
    encode_prompts,
    end_ids,
    has_chat_template,
    require_trained,
)
from kvqjax.generation.text import Detokenizer
from kvqjax.methods import MethodLike, parse
from kvqjax.model.loading import Model
from kvqjax.model.rope import longest_text
from kvqjax.serving.batch import RunningBatch, check_request
from kvqjax.serving.memory import ROWS, memory_for
from kvqjax.serving.prefix_folder import owner_of_engine, read_prefixes, write_prefixes
from kvqjax.serving.prefixes import Prefixes
from kvqjax.serving.request import Handle, Request
from kvqjax.serving.rows import Feeding, RequestFailed, Rows
from kvqjax.step.new_cache import planned_layout

__all__ = ["ROWS", "Engine", "EngineClosed", "EngineFull", "RequestFailed", "Stats"]

Result = TypeVar("Result")

CAPACITY = 4096  # tokens of a row where nobody says; less where the model was trained for less
# Tokens of a prompt between two strides: about what keeps a core or a chip busy for a stride's time
CHUNK = 512
STRIDE = 8  # tokens of a row between two looks at the text: a piece of a stream
MOST_STRIDE = 1024  # tokens; a longer piece costs memory in every row, and no time is gained by it
MOST_BYTES = 2**50  # of the cache
WAITING = "an open kvqjax.Engine ends; it waits for the compiler or the device"
PATIENCE = 1.0  # seconds that the end of a program waits for an open engine before it says so
QUEUE = 1024  # requests that wait
ANY_TEXT = r"regex:(.|\n)*"  # a grammar of every answer, by which `warm` compiles programs
# Rows' memory for what prompts begin with: system prompts, and the newest conversations.
PREFIXES = 2

# What an engine counts from its beginning on: fields of `Stats`.
COUNTED = (
    "requests", "aborted", "failed", "prompt_tokens", "reused_tokens", "tokens", "preempted", "shifts",
    "dropped_tokens",
)  # fmt: skip


class EngineFull(UserError):
    """The queue of waiting requests is full."""


class EngineClosed(UserError):
    """The engine takes no requests any more: it was closed, or its thread has failed."""


class Stats(NamedTuple):
    """What an engine does now, and what it has done since it began."""

    running: int  # rows that make tokens
    waiting: int  # requests that wait for a row, or whose prompt is being fed
    rows: int
    capacity: int  # tokens of a row
    # Of the pages, of what rows and the prompt have beside them, and of kept prefixes.
    cache_bytes: int
    bits: float  # per number of a key or value, with all that a row keeps beside its codes
    requests: int  # ended ones
    aborted: int  # of `requests`, those that were given up
    failed: int  # of `requests`, those that ended with an error
    prompt_tokens: int  # of prompts that were fed
    reused_tokens: int  # of `prompt_tokens`, those that a kept prefix held
    tokens: int  # made
    preempted: int  # how often a request made way for another
    shifts: int  # how often the oldest text of a full row left it
    dropped_tokens: int  # that left full rows for later ones
    pages: int  # of the pool; 0 where rows have none
    pages_free: int
    pages_shared: int  # that several rows or kept prefixes have
    prefixes: int  # kept


_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()  # of this process


# Not `threading._register_atexit`: by the time that functions of `atexit` run, threads of the
# user's that are waited for have had their answers. Those that JAX registered run later, because it
# was imported before.
@atexit.register
def _close_engines() -> None:
    """End the engines that a program leaves open. A thread that is inside XLA while Python ends
    aborts the process, and its exit code is lost. Ctrl-C ends it at once."""
    try:
        for engine in list(_engines):
            engine._refuse(finish=False)
        for engine in list(_engines):
            engine._thread.join(PATIENCE)
            if engine._thread.is_alive():
                print(WAITING, file=sys.stderr, flush=True)
            engine._thread.join()
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(130)


class Engine:
    """Serve requests through one running batch whose rows share the pages of one compressed cache.

        with kvq.Engine(model, "kivi:bits=2", rows=16, capacity=4096) as engine:
            handles = [engine.submit(text, max_new_tokens=64) for text in texts] answers =
            [handle.result().text for handle in handles]

    A row may hold `capacity` tokens, and takes pages as it grows. Prompts enter the cache chunk by
    chunk, so that later chunks see earlier ones compressed: the answer to one is that of
    `kvqjax.generate` with its options and the engine's `chunk` and `capacity`.

    Args:
        model: what `kvqjax.load` gives, with the constants of a calibrated method. On a mesh, one
            without a data axis.
        method: of the cache, such as "kivi:bits=2"; None: exact.
        rows: requests that make tokens at a time; default 8, or as many full rows as `pool_bytes`
            holds. A greater number is allowed: a request for which there is no page makes way for
            the others.
        capacity: tokens of a row, prompt and answer together; default 4096, or what the model was
            trained for.
        pool_bytes: memory for the cache in bytes; default: what `rows` full rows, the prompt and
            `prefixes` take.
        chunk: tokens of a prompt that are fed between two strides.
        stride: tokens of a row between two looks at the text, at most 1024.
        queue: requests that may wait; a further one is refused.
        prefixes: memory for what prompts begin with, in full rows: chunks that are then not read
            again; 0: nothing is kept.
        kernels: as in `kvqjax.init_cache`.
        context_shift: a row that is full goes on: about half of its text leaves by `kvqjax.drop`,
            the oldest first, behind the system message of a chat or the first tokens. A prompt has
            to fit all the same. Keys that are turned for it (`exact`) do not lie in pages then.

    Raises:
        UserError: a method, a capacity or a mesh that cannot be; memory for less than two rows, or
            more memory than there is; a `context_shift` of a cache whose tokens cannot move.
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
        context_shift: bool = False,
    ):
        check_integer("prefixes", prefixes, 0)
        check_integer("stride", stride, 1, MOST_STRIDE)
        check_counts(rows=rows, chunk=chunk, queue=queue)
        if pool_bytes is not None:
            check_integer("pool_bytes", pool_bytes, 1, MOST_BYTES)
        if capacity is not None:
            check_integer("capacity", capacity, 2)  # a token of a prompt, and one of its answer
        if model.rules is not None and (devices := model.rules.size(model.rules.batch)) > 1:
            reason = "requests come and go one by one, so that no rows are shared out among devices"
            raise UserError(
                f"{reason}; this mesh has {devices} along data, wanted 1", parameter="model"
            )
        self.model, self.method = model, parse("exact" if method is None else method)
        self.capacity = capacity or _capacity_of(model)
        chunk = min(chunk, self.capacity)  # no prompt is longer
        self.queue = queue
        self.context_shift, paged = context_shift, True
        if context_shift:
            plan = planned_layout(model, self.method, 1, self.capacity, kernels="off")
            check_movable(plan, "context_shift")
            paged = not turns_keys(plan)  # pages that are turned could not be shared
        sizes = (model, self.method, self.capacity, rows, pool_bytes, prefixes, kernels, paged)
        memory = memory_for(*sizes)
        options = {"chunk": chunk, "stride": stride, "kernels": kernels, "pages": memory.pages}
        self._batch = RunningBatch(
            model, self.method, memory.rows, self.capacity, drops=context_shift, **options
        )
        self._layout = self._batch.cache.layout
        if context_shift:
            _check_shifts(self._layout)
        self._bytes, self._bits = memory.bytes, memory.bits
        self._pool = PagePool(memory.pages) if memory.pages else None
        self._prefixes = Prefixes(chunk, memory.snapshots, self._pool)
        self._rows = Rows(
            self._batch,
            self._prefixes,
            self._pool,
            context_shift=context_shift,
            count=self._count,
            next_prompt=self._choose,
        )
        self._waiting: list[tuple[int, int, Handle]] = []  # a heap: priority, number, handle
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._owner = owner_of_engine(model, self._layout, chunk)
        self._shapes = self._batch.shapes()
        self._jobs: deque[Callable[[], None]] = deque()  # for the thread that owns the device
        self._closing = self._stopped = False
        self._fault: BaseException | None = None
        self._warming = threading.Event()
        self._counts = dict.fromkeys(COUNTED, 0)
        self._thread = threading.Thread(target=self._run, name="kvqjax-engine", daemon=True)
        self._thread.start()
        _engines.add(self)

    # --- For clients, from any thread ---

    @named_options
    @with_fields(GenerateOptions)
    def submit(
        self,
        prompt: str | Sequence[int] | Sequence[dict[str, Any]],
        *,
        max_new_tokens: int = 64,
        chat: bool = False,
        add_special_tokens: bool | None = None,
        scores: int | None = None,
        prompt_scores: bool = False,
        priority: int = 0,
        shown_tokens: Sequence[int] = (),
        keep_first: int | None = None,
        **options: Unpack[GenerateFields],
    ) -> Handle:
        """Hand in a request. From any thread; it returns at once.

        The other options are those of `kvqjax.generate`. A request may have 8 end tokens. Equal
        requests with equal seeds have equal answers, whatever else runs.

        Args:
            prompt: a string, token ids or, with `chat`, messages.
            max_new_tokens: of the answer.
            chat: put the prompt through the tokenizer's chat template.
            add_special_tokens: as in `kvqjax.generate`.
            scores: give the log probability of every new token and of so many likeliest ones, at
                most 20. They follow from the model's logits, before bias, penalties and
                temperature.
            prompt_scores: score the prompt's tokens too (with `scores`).
            priority: a whole number. Requests with a smaller one come first; among equal numbers,
                those submitted first.
            shown_tokens: special tokens that stand in the answer's text by their names.
            keep_first: how many of the prompt's first tokens never leave the row by
                `context_shift`; None: 4, and with `chat` the system message.

        Returns:
            The handle by which the answer is read.

        Raises:
            UserError: options that cannot be, or a prompt that does not fit.
            EngineFull: too many requests wait.
            EngineClosed: the engine takes no requests any more.
        """
        check_counts(max_new_tokens=max_new_tokens)
        check_integer("priority", priority, -MOST)
        checked = GenerateOptions(**options)
        encoding: dict[str, Any] = {"add_special_tokens": add_special_tokens, "most": self.capacity}
        ids = encode_prompts(self.model, [prompt], chat, **encoding)[0]
        if keep_first is None:
            keep_first = self.first_tokens(prompt, ids) if chat else KEPT_FIRST
        check_integer("keep_first", keep_first, 0)
        checked.check_tokenizer(self.model)
        checked.bias(self.model)
        ends = checked.ends(self.model, max_new_tokens).tolist()
        request = Request(
            prompt=ids,
            max_new_tokens=max_new_tokens,
            options=checked,
            ends=ends,
            bound=checked.bound_row(self.model, ends),
            likeliest=scores,
            prompt_scores=prompt_scores and scores is not None,
            priority=priority,
            keep_first=keep_first,
        )
        check_request(request, self.capacity, self.model.config.vocab_size, self.context_shift)
        most = self.capacity - len(ids) if self.context_shift else max_new_tokens
        new = min(max_new_tokens, most)  # tokens that stand in the row with the prompt
        require_trained(self.model, [len(ids)], new, checked.beyond_trained)
        tokenizer = self.model.tokenizer if self.model.has_tokenizer else None
        shown = end_ids(self.model, shown_tokens, "shown_tokens").tolist()
        detokenizer = Detokenizer(tokenizer, ids, checked.stop, checked.min_tokens, shown)
        handle = Handle(request, detokenizer)
        with self._changed:
            if self._closing or self._fault is not None:
                raise EngineClosed("this engine is closed") from self._fault
            if len(self._waiting) >= self.queue:
                raise EngineFull(f"{len(self._waiting)} requests wait already")
            handle.rank = (priority, next(self._numbers))
            heapq.heappush(self._waiting, (*handle.rank, handle))
            self._changed.notify_all()
        return handle

    def first_tokens(self, messages: Any, ids: Sequence[int]) -> int:
        """Count the first of a conversation's ids that never leave its row by `context_shift`: its
        system message, or what its template writes before the first turn."""
        if not self.context_shift:
            return KEPT_FIRST
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        plain = not has_chat_template(self.model)
        return head_of(self.model, template_of(self.model, messages, plain), ids, plain)

    @property
    def fault(self) -> BaseException | None:
        """What ended the thread that owns the device; None while it is sound."""
        return self._fault

    def stats(self) -> Stats:
        """Count what runs, what waits, and what was done."""
        with self._changed:
            rows, pool = self._rows, self._pool
            waiting = len(self._waiting) + len(rows.parked) + (rows.feeding is not None)
            return Stats(
                running=rows.running,
                waiting=waiting,
                rows=len(rows.handles),
                capacity=self.capacity,
                cache_bytes=self._bytes,
                bits=self._bits,
                pages=0 if pool is None else len(pool),
                pages_free=0 if pool is None else pool.free,
                pages_shared=0 if pool is None else pool.shared,
                prefixes=len(self._prefixes),
                **self._counts,
            )

    def save_prefixes(self, path: str | os.PathLike) -> int:
        """Write what is kept of prompts that begin alike, for `load_prefixes` of an engine that
        starts later. Requests go on meanwhile; a closed engine can be asked too.

        Args:
            path: of a new folder, which appears when it is complete.

        Returns:
            How many prefixes it holds.

        Raises:
            UserError: the folder exists or cannot be written.
            EngineClosed: the engine's thread has failed.
        """
        prefixes, contents = self._on_thread(lambda: self._prefixes.saved(self._batch))
        write_prefixes(Path(path), self._owner, prefixes, contents)
        return len(prefixes)

    def load_prefixes(self, path: str | os.PathLike) -> int:
        """Keep the prefixes that another engine has written, as if their prompts had been read
        here.

        Args:
            path: of a folder of `save_prefixes`.

        Returns:
            How many were added. Prefixes that are kept already stay. The saved ones are added from
            the most recently used on, as long as there are pages and `prefixes` leaves room.

        Raises:
            UserError: the folder is missing or damaged; another model, method, `capacity` or
                `chunk` wrote it, or a chip that stores bodies in another form.
            EngineClosed: the engine's thread has failed.
        """
        saved, contents = read_prefixes(Path(path), self.model, self._owner, *self._shapes)
        return self._on_thread(lambda: self._prefixes.keep_saved(saved, contents, self._batch))

    def warm(self) -> None:
        """Compile every program, so that no request waits for it. Requests of each width of a chunk
        run, with and without scores, bound and free, and pages are moved. `stats` does not count them. Other
        requests may come meanwhile."""
        self._warming.set()
        room = min(2, self.capacity - 1)
        options = {
            "max_new_tokens": room,
            "temperature": 1.0,
            "eos_ids": (),
            "beyond_trained": True,
        }
        widths = self._batch.widths
        runs = [(width, scores, None) for width in widths for scores in (None, 0)]
        if can_bind(self.model):
            runs += [(widths[0], scores, ANY_TEXT) for scores in (None, 0)]
        for width, scores, grammar in runs:
            ids = [0] * min(width, self.capacity - room)
            answer = self._submit_patiently(
                ids, scores=scores, prompt_scores=True, grammar=grammar, **options
            ).result()
            reused, fed, new = answer.reused_tokens, answer.prompt_tokens, len(answer.tokens)
            self._count(requests=-1, prompt_tokens=-fed, reused_tokens=-reused, tokens=-new)

    def _submit_patiently(self, prompt: Sequence[int], **options: Any) -> Handle:
        """`submit`, once there is room in the queue."""
        while True:
            try:
                return self.submit(prompt, **options)
            except EngineFull:
                time.sleep(0.05)

    def close(self, *, finish: bool = False) -> None:
        """Refuse further requests, and end.

        Args:
            finish: first answer the requests that run or wait. Otherwise they end as aborted, with
                the tokens so far.
        """
        self._refuse(finish)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _refuse(self, finish: bool) -> None:
        """Take no further requests, and let the thread end once those that it has are answered or
        given up."""
        with self._changed:
            self._closing = True
            if not finish:
                for handle in self._handles():
                    handle.abort()
            self._changed.notify_all()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind, *_) -> None:
        self.close(finish=kind is None)

    # --- The thread that owns the device ---

    def _run(self) -> None:
        try:
            while self._admitted():
                while self._jobs:
                    self._jobs.popleft()()
                if self._warming.is_set() and not self._rows.running:
                    self._warming.clear()
                    self._batch.warm()
                self._rows.bring_back()
                self._rows.feed()
                if self._rows.running:
                    self._rows.step()
        except BaseException as fault:  # whatever it is, nobody may wait for ever
            self._end_all(fault)

    def _end_all(self, fault: BaseException) -> None:
        with self._changed:
            self._fault, self._stopped = fault, True
            for handle in self._handles():
                handle.failed(fault)
            while self._jobs:
                self._jobs.popleft()()

    def _on_thread(self, work: Callable[[], Result]) -> Result:
        """Let the thread that owns the device do something between two strides, and wait for it."""
        future: Future[Result] = Future()

        def job():
            if self._fault is not None:
                future.set_exception(EngineClosed("this engine has failed"))
                return
            try:
                future.set_result(work())
            except Exception as error:  # raised in the caller's thread; requests go on
                future.set_exception(error)

        with self._changed:
            if self._stopped:
                job()  # nobody else uses the device any more
            else:
                self._jobs.append(job)
                self._changed.notify_all()
        return future.result()

    def _admitted(self) -> bool:
        """Wait for work, and choose whose prompt is fed next; False once the engine is to end."""
        with self._changed:
            while True:
                self._drop_aborted()
                self._choose()
                if self._jobs or self._rows.busy:
                    return True
                if self._closing:
                    self._stopped = True
                    return False
                self._changed.wait()

    def _choose(self) -> None:
        """Choose whose prompt is fed next, where none is and a row is free."""
        with self._changed:
            rows, row = self._rows, self._rows.free
            if rows.feeding is not None or not self._waiting or row is None:
                return
            # A request that made way goes on before one that came after it begins.
            first_parked = min((handle.rank for handle, _ in rows.parked), default=None)
            if first_parked is None or self._waiting[0][2].rank < first_parked:
                rows.feeding = Feeding(heapq.heappop(self._waiting)[2], row)

    def _handles(self) -> list[Handle]:
        """List the requests that run, whose prompt is fed, or that wait."""
        return [*self._rows.requests(), *(handle for _, _, handle in self._waiting)]

    def _count(self, **increments: int) -> None:
        """Add to what `stats` says."""
        with self._changed:
            for name, number in increments.items():
                self._counts[name] += number

    def _drop_aborted(self) -> None:
        """End the requests that were given up, wherever they are."""
        entries = [entry for entry in self._waiting if entry[2].aborted]
        if entries:
            self._waiting = [entry for entry in self._waiting if not entry[2].aborted]
            heapq.heapify(self._waiting)
        for _, _, handle in entries:
            self._rows.end(handle, "aborted")
        self._rows.drop_aborted()


def _check_shifts(layout: CacheLayout) -> None:
    """Raise UserError for rows from whose middle nothing could ever leave."""
    runs = [run for run in runs_of(layout) if run.slots]
    units = [run.page or clock.unit for run in runs for clock in run.wiring.storage.clocks]
    wanted = 4 * max(units, default=1)  # one at the beginning, one that leaves, and two that stay
    if layout.capacity < wanted:
        raise UserError(
            f"context_shift: text leaves these rows {wanted // 4} tokens at a time; "
            f"capacity={layout.capacity} is too little, {wanted} is enough"
        )


def _capacity_of(model: Model) -> int:
    lengths = (CAPACITY, model.config.trained_length, longest_text(model.config))
    return min(length for length in lengths if length is not None)
