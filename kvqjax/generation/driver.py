"""One generation as the host sees it: calls of a few decode steps each, looks at the text between
them, and a cache that in the end holds exactly the prompts and the tokens that were given out."""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvqjax.cache import Cache, CacheLayout, runs_of
from kvqjax.cache.runs import bound_for
from kvqjax.cache.state import bounded
from kvqjax.cache.surgery import crop, gather
from kvqjax.generation.bound import BoundRow
from kvqjax.generation.loop import (
    STRIDE,
    LoopState,
    Progress,
    bound_steps,
    fetched,
    require_finite,
    shared,
    start,
)
from kvqjax.generation.options import GenerateOptions
from kvqjax.generation.sampling import Sampling, make_sampling
from kvqjax.generation.text import Detokenizer
from kvqjax.model.loading import Model


class Piece(NamedTuple):
    """New output of a generation since its last piece: new text and new token ids of every row.
    Text that a later token may still change, or with which a stop string may begin, comes with a
    later piece."""

    text: list[str]
    tokens: list[list[int]]


class Settings(NamedTuple):
    """Checked settings of a generation: `ends` are the tokens that end a row, `stride` is the
    most tokens between two looks at the text, `chunk` how prompts enter the cache (None: by an
    exact prefill where the cache is empty)."""

    max_new_tokens: int
    options: GenerateOptions
    sampling: Sampling
    ends: Int[np.ndarray, " N"]
    stride: int = STRIDE
    chunk: int | str | None = None
    progress: Progress | None = None

    @classmethod
    def of(
        cls, model: Model, max_new_tokens: int, options: GenerateOptions, *rest: Any
    ) -> "Settings":
        """Lay options out for a model. Raises UserError for tokens that it lacks,
        and for a grammar that no answer can meet."""
        options.check_tokenizer(model)
        sampling = make_sampling(options, options.bias(model))
        ends = options.ends(model, max_new_tokens)
        options.bound_row(model, ends)
        return cls(max_new_tokens, options, sampling, ends, *rest)


def steps_until_encoded(layout: CacheLayout, lengths: Sequence[int]) -> int | None:
    """Count the decode steps of rows that hold `lengths` tokens after which `crop` can still take
    back exactly all but the first step's token; None: any number.

    A crop is exact where nothing was encoded in the meantime. The first step's token is known to
    stay, so it may make a unit due; the steps end before any row's next unit is."""
    if layout.shape.recurrent is not None:
        return 1  # what a state has taken in stays
    least: int | None = None
    for run in runs_of(layout):
        if not run.slots:
            continue  # nothing is encoded
        for clock in run.wiring.storage.clocks:
            if (clock.window, clock.unit) == (0, 1) and not run.wraps and not run.budget:
                continue  # tokens that are encoded one by one as they come can be cut one by one
            exact = layout.method.sinks + clock.window
            for length in lengths:
                units = max(0, length + 1 - exact) // clock.unit
                next_unit = exact + (units + 1) * clock.unit  # tokens that make it due
                steps = next_unit - 1 - length
                least = steps if least is None else min(least, steps)
    return least


def read_row(
    row: Detokenizer,
    new: Sequence[int],
    is_last: bool,
    most: int,
    bound: BoundRow | None = None,
) -> tuple[str, list[int], str | None]:
    """Take in what a call made of one row.

    Args:
        row: the row's text so far.
        new: the ids that the call made.
        is_last: whether the row draws no more tokens.
        most: the tokens that it may have, `max_new_tokens`.
        bound: its place in a grammar, where it has one.

    Returns:
        New text; the ids of `new` that belong to the answer; why the row ends: "stop", "length",
        "eos", or None where it goes on.
    """
    before = len(row.ids)
    text = row.extend(new)
    kept = row.ids[before:]
    if row.stopped:
        return text, kept, "stop"
    if not is_last:
        return text, kept, None
    complete = len(row.ids) < most or (bound is not None and bound.ended)
    return text + row.finish(), kept, "eos" if complete else "length"


@functools.partial(jax.jit, static_argnames="rows")
def _first_rows(cache: Cache, rows: int) -> Cache:
    return gather(cache, jnp.arange(rows))


MakeRoom = Callable[[Cache, int], tuple[Cache, int]]


class Generation:
    """Prompts (token ids) continued through a cache, which is donated; `cache()` is what becomes of
    it.

    A cache that is not empty has `held` tokens in each row, `before` where their ids are known. It
    may have more rows than there are prompts. `advance` gives piece after piece, and `close` ends
    the rows that still go on. `tokens`, `texts` and `reasons` say what every row has made so far,
    as text, and why it ended: "eos" (an end token), "stop" (a stop string), "length"
    (`max_new_tokens`), "closed", or None: not yet.

    `make_room(cache, least)` of a single row is called before the row is full: it gives a cache
    that `least` tokens have left, or more, and how many. A row that then has no room for another
    token ends by "length". Without it, the caller has seen to it that all tokens fit."""

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        cache: Cache,
        settings: Settings,
        *,
        held: np.ndarray | None = None,
        before: Sequence[Sequence[int]] = (),
        make_room: MakeRoom | None = None,
    ):
        options = settings.options
        self.prompts = prompts
        self.reasons: list[str | None] = [None for _ in prompts]
        self.seconds_to_first_token = 0.0
        self._model = model
        self._settings = settings
        self._before = before
        self._make_room = make_room
        self._cache = cache
        self._layout = cache.layout
        self._held = held
        # Tokens of each row before its answer.
        self._fed = np.zeros((cache.batch,), np.int64) if held is None else held.astype(np.int64)
        self._fed[: len(prompts)] += [len(prompt) for prompt in prompts]
        tokenizer = model.tokenizer if model.has_tokenizer else None
        self._texts = []
        for ids, prompt in itertools.zip_longest(before, prompts, fillvalue=()):
            context = [*ids, *prompt]
            row = Detokenizer(tokenizer, context, options.stop, options.min_tokens)
            self._texts.append(row)
        self._bound = [options.bound_row(model, settings.ends) for _ in prompts]
        self._sampling, self._ends = shared(model, (settings.sampling, settings.ends))
        self._state: LoopState | None = None
        self._unread = False  # the latest call's tokens have not been looked at
        # Rows whose cache lacks a token, or has too many.
        self._uncached = self._surplus = np.zeros((cache.batch,), bool)
        # New tokens and seconds of every call after the first tokens.
        self._calls: list[tuple[int, float]] = []

    @property
    def tokens(self) -> list[list[int]]:
        return [row.ids for row in self._texts]

    @property
    def texts(self) -> list[str]:
        return [row.text for row in self._texts]

    @property
    def ended(self) -> bool:
        return None not in self.reasons

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows after their first ones, per second of the steps that made them; 0
        where there are none. The first call of steps may compile them, so it does not count where
        there are others."""
        calls = self._calls[1:] or self._calls
        tokens = sum(count for count, _ in calls)
        seconds = sum(duration for _, duration in calls)
        return tokens / seconds if tokens and seconds else 0.0

    @property
    def lost(self) -> bool:
        """Say whether the cache is gone: an interrupt came between the call that took it and what
        that call returned."""
        # Once there is a state, it has the cache.
        newest = self._cache if self._state is None else self._state
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(newest))

    def advance(self) -> Piece | None:
        """Make the next tokens; None once every row has ended. Raises UserError where numbers are
        not finite."""
        if self.ended:
            return None
        start_time = time.perf_counter()
        first = not any(self.tokens)
        if self._state is not None and not self._unread and not self._has_room(self._state):
            text = self._texts[0].finish()
            self.reasons[0] = "length"
            return Piece([text], [[]])
        if not self._unread:
            if self._state is None:
                self._state = self._started()
            else:
                self._state = self._stepped(self._state)
            # An interrupt after this line loses nothing: the next call reads these tokens.
            self._unread = True
        assert self._state is not None  # unread tokens are of a state
        piece = self._read(self._state)
        self._unread = False
        seconds = time.perf_counter() - start_time
        if first:
            self.seconds_to_first_token = seconds
        else:
            count = sum(len(tokens) for tokens in piece.tokens)
            self._calls.append((count, seconds))
        return piece

    def _room(self) -> int:
        """Count the tokens that still fit a single row, the newest one in it."""
        return self._layout.capacity - int(self._fed[0]) - len(self.tokens[0])

    def _has_room(self, state: LoopState) -> bool:
        """Make room for the next stride, where that is asked for. Say whether there is any."""
        if self._make_room is None:
            return True
        wanted = self._settings.max_new_tokens - len(self.tokens[0])
        least = min(self._settings.stride, wanted)
        if self._room() < least:
            cache, count = self._make_room(state.cache, least)
            self._state = state.replace(cache=cache)
            self._fed[0] -= count
        return self._room() > 0

    def close(self) -> None:
        """End the rows that still go on, with what was made of them."""
        if self._unread:
            self.advance()
        for row, reason in enumerate(self.reasons):
            if reason is None:
                self._texts[row].finish()
                self.reasons[row] = "closed"

    def cache(self) -> Cache:
        """Return the cache of every prompt and all of `tokens`, and nothing else, once all rows
        have ended. A generation that was closed before its first token returns the cache that it
        was given."""
        if self._state is not None and self._uncached.any():
            self._state = self._stepped(self._state)
            self._uncached = np.zeros_like(self._uncached)
        cache = self._cache if self._state is None else self._state.cache
        if self._state is not None and self._surplus.any():
            lengths = self._lengths().astype(np.int32)
            cache = crop(cache, shared(self._model, lengths))
        if cache.batch > len(self.prompts):  # rows without a prompt (`padded_rows`)
            cache = _first_rows(cache, len(self.prompts))
        self._cache = cache
        self._state = None
        return cache

    def _lengths(self) -> Int[np.ndarray, " B"]:
        """Count the tokens of every row: in the cache, and those that it still lacks."""
        lengths = self._fed.copy()
        lengths[: len(self.tokens)] += [len(ids) for ids in self.tokens]
        return lengths

    def _bound_rows(self) -> list[BoundRow | None]:
        """Return the place in its grammar of every row of the cache that goes on; None for a row
        that is free, or has ended, or has no prompt."""
        rows: list[BoundRow | None] = [None] * len(self._fed)
        for number, reason in enumerate(self.reasons):
            if reason is None:
                rows[number] = self._bound[number]
        return rows

    def _started(self) -> LoopState:
        """Feed the prompts and draw the first tokens."""
        settings = self._settings
        # Room for new ids is a power of two, so that different strides share a program.
        room = max(STRIDE, 1 << (settings.stride - 1).bit_length())
        return start(
            self._model, self.prompts, self._cache, settings.chunk, settings.max_new_tokens, self._sampling,
            settings.options, self._ends, settings.progress, room=room, held=self._held, before=self._before,
            bound=self._bound_rows(),
        )  # fmt: skip

    def _stepped(self, state: LoopState) -> LoopState:
        """Call `decode_steps` for a stride, or for fewer steps where a stop string may want tokens
        taken back. Once all rows have ended, this is the one step by which their last tokens enter
        the cache."""
        steps = self._settings.stride
        lengths = self._lengths()
        done = np.ones((len(self._fed),), bool)  # a row without a prompt is done
        done[: len(self.reasons)] = [reason is not None for reason in self.reasons]
        if self._settings.options.stop and not done.all():
            # The newest token is not in the cache yet.
            most = steps_until_encoded(self._layout, (lengths[~done] - 1).tolist())
            if most:
                steps = min(steps, most)
        if self._make_room is not None and not done.all():
            steps = min(steps, self._room())
        bound = bound_for(self._layout, (lengths + self._settings.stride).tolist())
        done, uncached = shared(self._model, (done, self._uncached))
        state = state.replace(done=done, uncached=uncached, cache=bounded(state.cache, bound))
        state = bound_steps(
            self._model, state, self._sampling, self._ends, steps, self._bound_rows()
        )
        return state.replace(cache=bounded(state.cache, None))

    def _read(self, state: LoopState) -> Piece:
        """Look at what the latest call made: new text, and which rows end."""
        require_finite(state.cache)
        for bound in self._bound:
            if bound is not None and bound.error is not None:
                raise bound.error
        counts, tokens, done, uncached = fetched(
            state.new_counts, state.tokens, state.done, state.uncached
        )
        self._uncached = uncached.copy()
        self._surplus = self._surplus.copy()
        most = self._settings.max_new_tokens
        piece = Piece([], [])
        for number, row in enumerate(self._texts):
            new = tokens[number, : counts[number]].tolist()
            is_last = bool(done[number])
            text, kept, reason = read_row(row, new, is_last, most, self._bound[number])
            if self.reasons[number] is None:
                self.reasons[number] = reason
                if len(kept) < len(new):
                    # The cache holds tokens behind the answer's end: they are cut, and the newest
                    # one never enters.
                    self._surplus[number] = True
                    self._uncached[number] = False
            piece.text.append(text)
            piece.tokens.append(kept)
        return piece
