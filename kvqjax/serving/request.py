"""A request to an engine: what is asked, and the handle by which its answer is read."""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import NamedTuple

from kvqjax._errors import UserError
from kvqjax.generation.bound import BoundRow
from kvqjax.generation.conversation import KEPT_FIRST
from kvqjax.generation.options import GenerateOptions
from kvqjax.generation.text import Detokenizer

MOST_LIKELIEST = 20  # tokens whose log probabilities come with a token, as in the OpenAI protocol


class TokenScore(NamedTuple):
    """How likely a token was: its log probability, and those of the likeliest tokens in its place,
    in falling order. They follow from the model's logits, before bias, penalties and
    temperature."""

    token: int
    logprob: float
    likeliest: dict[int, float]


class ServedPiece(NamedTuple):
    """What a request got since its last piece. `scores` has an entry for each of `tokens` where
    they were asked for."""

    text: str
    tokens: list[int]
    scores: list[TokenScore]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answered:
    """What became of a request.

    - `finish_reason`: "eos" (an end token), "stop" (a stop string), "length" (`max_new_tokens`) or
      "aborted".
    - `reused_tokens` of the prompt were held by a kept row, and not read again.
    - `dropped_tokens` of prompt and answer had left the row by the end (`context_shift`).
    - `scores` of the new tokens and `prompt_scores` of the prompt's tokens after its first, where
      they were asked for.
    - `seconds_to_first_token` and `seconds` count from the moment the request was submitted.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    reused_tokens: int
    dropped_tokens: int
    scores: list[TokenScore]
    prompt_scores: list[TokenScore]
    seconds_to_first_token: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A checked request. `ends` are the tokens that end it, `bound` is its place in a grammar,
    where one binds it. `likeliest` counts the tokens whose log probabilities come with each new
    token (None: no scores). Requests of a smaller `priority` come first. The first `keep_first`
    tokens of the prompt never leave the row."""

    prompt: Sequence[int]
    max_new_tokens: int
    options: GenerateOptions
    ends: Sequence[int]
    bound: BoundRow | None = None
    likeliest: int | None = None
    prompt_scores: bool = False
    priority: int = 0
    keep_first: int = KEPT_FIRST


class Handle:
    """A request under way. Iterate over it for pieces, in a plain loop or with `async for`;
    `result()` waits for the whole answer; `abort()` gives the request up.

        handle = engine.submit("The old house")
        for piece in handle:
            print(piece.text, end="", flush=True)
        print(handle.result().finish_reason)
    """

    def __init__(self, request: Request, detokenizer: Detokenizer):
        self.request = request
        self.prompt_scores: list[TokenScore] = []
        self.reused_tokens = self.dropped_tokens = 0
        # The request that comes first has the least; the engine sets it.
        self.rank = (
            request.priority,
            0,
        )
        self._detokenizer = detokenizer
        self._submitted = time.perf_counter()
        self._first = self._last = 0.0  # seconds after that
        self._changed = threading.Condition()
        self._pieces: list[ServedPiece] = []
        self._reason: str | None = None
        self._error: BaseException | None = None
        self._aborted = False
        self._listeners: list[Callable[[], None]] = []

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def ended(self) -> bool:
        return self._reason is not None or self._error is not None

    @property
    def answer(self) -> Answered | None:
        """The whole answer, where the request has ended without an error; None otherwise."""
        return self.result() if self._reason is not None else None

    @property
    def aborted(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._aborted

    def abort(self) -> None:
        """Give the request up: its row is free after the steps that run now. Nothing happens where
        it has ended."""
        self._aborted = True

    def __iter__(self) -> Iterator[ServedPiece]:
        """Give every piece, from the first on, as it is made.

        Raises:
            UserError: the request failed: its numbers were not finite, or the engine was closed.
        """
        number = 0
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda number=number: number < len(self._pieces) or self.ended
                )
                piece = self._pieces[number] if number < len(self._pieces) else None
            if piece is None:
                break
            yield piece
            number += 1
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[ServedPiece]:
        """Do what iteration does, without a thread that waits."""
        loop, woken, number = asyncio.get_running_loop(), asyncio.Event(), 0

        def wake():
            # A closed loop raises RuntimeError. Nobody waits there any more, and the engine's
            # thread must go on.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(woken.set)

        with self._changed:
            self._listeners.append(wake)
        try:
            while True:
                woken.clear()
                with self._changed:
                    pieces, ended = self._pieces[number:], self.ended
                for piece in pieces:
                    yield piece
                number += len(pieces)
                if ended:
                    break
                await woken.wait()
        finally:
            with self._changed:
                self._listeners.remove(wake)
        if self._error is not None:
            raise self._error

    def result(self, timeout: float | None = None) -> Answered:
        """Wait for the end of the answer.

        Args:
            timeout: seconds to wait at most; None: as long as it takes.

        Returns:
            The whole answer. Of a request that was aborted, what was made by then.

        Raises:
            UserError: the request failed, or is not done in time (it goes on).
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.ended, timeout):
                raise UserError(f"no answer within {timeout} s; the request goes on")
        if self._error is not None:
            raise self._error
        return Answered(
            text="".join(piece.text for piece in self._pieces),
            tokens=[token for piece in self._pieces for token in piece.tokens],
            finish_reason=self._reason or "",
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused_tokens,
            dropped_tokens=self.dropped_tokens,
            scores=[score for piece in self._pieces for score in piece.scores],
            prompt_scores=self.prompt_scores,
            seconds_to_first_token=self._first,
            seconds=self._last,
        )

    # --- For the engine ---

    @property
    def detokenizer(self) -> Detokenizer:
        """The answer's ids and text so far."""
        return self._detokenizer

    def told(self, piece: ServedPiece, reason: str | None) -> None:
        """Hand on a piece; `reason` says why it is the last one."""
        with self._changed:
            self._last = time.perf_counter() - self._submitted
            self._first = self._first or self._last
            if piece.text or piece.tokens:
                self._pieces.append(piece)
            self._reason = reason
            self._wake()

    def failed(self, error: BaseException) -> None:
        """End with an error."""
        with self._changed:
            if not self.ended:
                self._error = error
                self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()
