"""The running batch of an engine: its rows on the device, and the few programs that change them.

A prompt is fed to a cache of one row. Its chunks begin at multiples of the chunk's length, whatever
else runs, so that what a row holds, and its text, do not depend on its neighbours. When its first
token is drawn the row joins the batch, which makes some tokens of all its rows per call.

Where rows have pages, all pages lie in one pool, the prompt's too. A row that joins or leaves the
batch is copied without its pages. The host says before every call which pages a row has
(kvqjax/cache/pages.py).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvqjax._arguments import check_integer
from kvqjax._errors import UserError
from kvqjax.cache import Cache
from kvqjax.cache.moves import leaving, without_tokens
from kvqjax.cache.pages import copied_page, read_page, with_bodies_of, without_bodies, write_page
from kvqjax.cache.runs import bound_for
from kvqjax.cache.state import NO_PAGE, bounded
from kvqjax.cache.surgery import adopt, emptied, taken_row
from kvqjax.generation.bound import BoundRow
from kvqjax.generation.conversation import Row, dropped
from kvqjax.generation.loop import (
    LoopState,
    Scores,
    bound_steps,
    drawn,
    feed,
    fetched,
    shared,
    unbegun,
)
from kvqjax.generation.options import GenerateOptions
from kvqjax.generation.prompt_ids import too_long
from kvqjax.generation.sampling import RowSampling, history_of, of_rows
from kvqjax.methods import MethodLike
from kvqjax.model.loading import Model
from kvqjax.serving.request import MOST_LIKELIEST, Request, TokenScore
from kvqjax.step.forward import forward
from kvqjax.step.new_cache import init_cache

MOST_ENDS = 8  # end tokens of a request; models have 4 at most
NO_TOKEN = -1
# Fields of a `LoopState` that have an entry for each row.
OF_ROWS = ("newest", "uncached", "left", "done", "history", "endless", "key")
# A prompt's last chunk is padded to the chunk's length, to a quarter of it, or to a sixteenth
WIDTHS = 4


class RowOutput(NamedTuple):
    """What a call made of one row. `broken`: a number of the row is not finite."""

    tokens: list[int]
    scores: list[TokenScore]
    done: bool
    broken: bool


def _row_key(seeds: Sequence[int]) -> np.ndarray:
    """Make the key of every row as data."""
    keys = []
    for seed in seeds:
        keys.append(np.asarray(jax.random.key_data(jax.random.key(seed))))
    return np.stack(keys)


def _scores_of(rows: int, tokens: int, likeliest: int) -> Scores:
    """Make empty scores of some tokens of every row."""
    chosen = np.zeros((rows, tokens), np.float32)
    ids = np.zeros((rows, tokens, likeliest), np.int32)
    log_probabilities = np.zeros((rows, tokens, likeliest), np.float32)
    return Scores(chosen, ids, log_probabilities)


@functools.partial(jax.jit, donate_argnames=("state", "sampling", "eos"))
@jax.enable_x64(False)
def _joined(
    state: LoopState,
    sampling: RowSampling,
    eos: Int[Array, "B N"],
    row: Int[Array, ""],
    single: LoopState,
    of_single: tuple[RowSampling, Int[Array, "1 N"]],
) -> tuple[LoopState, RowSampling, Int[Array, "B N"]]:
    """Put the row of a state of one row into the batch's state, as number `row`."""

    def put(tree, part):
        return jax.tree.map(lambda a, b: a.at[row].set(b[0]), tree, part)

    changed = {name: put(getattr(state, name), getattr(single, name)) for name in OF_ROWS}
    cache = adopt(state.cache, row, single.cache)
    sampling, eos = put((sampling, eos), of_single)
    return state.replace(cache=cache, **changed), sampling, eos


@jax.jit
@jax.enable_x64(False)
def _copied_row(
    state: LoopState, sampling: RowSampling, eos: Int[Array, "B N"], row: Int[Array, ""]
):
    """Copy a row out of the batch's state, without its pages, as `_joined` takes it."""
    fields = {name: getattr(state, name) for name in OF_ROWS}
    changed, of_single = jax.tree.map(lambda x: x[row][None], (fields, (sampling, eos)))
    return taken_row(state.cache, row), changed, of_single


_read_page = jax.jit(read_page)
_write_page = jax.jit(write_page, donate_argnames="cache")


@functools.partial(jax.jit, donate_argnames="cache")
def _emptied(cache: Cache, rows: Bool[Array, " B"]) -> Cache:
    return emptied(cache, rows)


_taken_row = jax.jit(taken_row)
_adopted = jax.jit(adopt, donate_argnames="cache")


@jax.jit
def _copied(cache: Cache) -> Cache:
    return jax.tree.map(jnp.copy, cache)


@functools.partial(jax.jit, static_argnames="likeliest", donate_argnames="cache")
@jax.enable_x64(False)
def _scored_feed(
    model: Model,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
    following,
    cache: Cache,
    likeliest: int,
) -> tuple[Float[Array, "B V"], tuple[Array, Array, Array], Cache]:
    """Feed a chunk. Give the last logits, and of the token after each of its tokens the log
    probability, with the likeliest tokens in its place. `following` [B, T] are these next
    tokens."""
    logits, cache = forward(model, tokens, counts, cache)
    newest = jnp.maximum(counts - 1, 0)[:, None, None]
    last = jnp.take_along_axis(logits, newest, axis=1)[:, 0]
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(log_probabilities, following[..., None], axis=-1)[..., 0]
    values, ids = jax.lax.top_k(log_probabilities, likeliest)
    return last, (chosen, ids, values), cache


class Parked(NamedTuple):
    """A row that left the batch with its request unfinished. It lies in the host's memory, so that
    nothing has to be computed again."""

    cache: Cache
    changed: dict
    of_single: tuple
    pages: list[tuple]
    places: Any  # where the arrays of `cache` lay
    held: int  # tokens


class RunningBatch:
    """Rows that make tokens together, and one row beside them into which prompts are fed.

    Args:
        method: of the cache.
        rows: requests that make tokens at a time.
        capacity: tokens of a row.
        chunk: tokens of a prompt that are fed at a time.
        stride: tokens of a row that a call makes at most.
        kernels: as in `kvqjax.init_cache`.
        pages: of the pool that all rows and the prompt share; 0: rows have bodies of their own.
        drops: whether tokens leave rows.
    """

    def __init__(
        self,
        model: Model,
        method: MethodLike,
        rows: int,
        capacity: int,
        *,
        chunk: int,
        stride: int,
        kernels: str,
        pages: int = 0,
        drops: bool = False,
    ):
        self.chunk = chunk
        self.stride = stride
        self._drops = drops
        self._model = model
        self._place = functools.partial(shared, model)  # puts arrays on the model's devices
        self._likeliest = min(MOST_LIKELIEST, model.config.vocab_size)
        cache = init_cache(model, method, rows, capacity, kernels=kernels, pages=pages or None)
        # The prompt's row borrows the batch's pages whenever it is fed. The copy also compiles
        # `_copied`, by which rows are kept later.
        single = init_cache(model, method, 1, capacity, kernels=kernels, pages=1 if pages else None)
        self._prompt: Cache = _copied(without_bodies(single.replace(layout=cache.layout)))
        self._state = self._unbegun(cache, [0] * rows)
        self._table = None if cache.pages is None else np.full(cache.pages.shape, NO_PAGE, np.int32)
        self._sampling = self._place(of_rows([GenerateOptions()] * rows, model))
        self._eos = self._place(np.full((rows, MOST_ENDS), NO_TOKEN, np.int32))
        self._lengths = np.zeros((rows,), np.int64)  # tokens of every row

    @property
    def cache(self) -> Cache:
        """The cache of the rows that make tokens. The next call donates it."""
        return self._state.cache

    @property
    def widths(self) -> tuple[int, ...]:
        """The lengths to which a chunk of a prompt is padded. Each compiles a program of its
        own."""
        widths = {max(16, self.chunk // WIDTHS**power) for power in range(3)}
        return tuple(sorted({*widths, self.chunk}))

    def feed(
        self, prompt: Sequence[int], start: int, scored: bool, pages: Sequence[int] = ()
    ) -> tuple[Float[Array, "1 V"], list[TokenScore]]:
        """Feed the chunk of a prompt that begins at `start`.

        Args:
            prompt: token ids of the whole prompt.
            start: a multiple of `chunk`.
            scored: whether the prompt's tokens are to be scored.
            pages: of the prompt's row, as many as it needs with this chunk.

        Returns:
            Logits of the chunk's last token, and the scores of the tokens that follow those of the
            chunk.
        """
        piece = list(prompt[start : start + self.chunk])
        width = next(width for width in self.widths if width >= len(piece))

        def padded(ids):
            return np.asarray([[*ids, *[0] * (width - len(ids))]], np.int32)

        tokens, counts = self._place((padded(piece), np.asarray([len(piece)], np.int32)))
        cache = bounded(self._lent(pages), bound_for(self._prompt.layout, [start]))
        if not scored:
            logits, cache = feed(self._model, tokens, counts, cache, last=True)
            self._returned(bounded(cache, None))
            return logits, []
        following = list(prompt[start + 1 : start + 1 + len(piece)])
        following_ids = self._place(padded(following))
        logits, scores, cache = _scored_feed(
            self._model, tokens, counts, following_ids, cache, self._likeliest
        )
        self._returned(bounded(cache, None))
        chosen, ids, values = fetched(*scores)
        return logits, _token_scores(following, chosen[0], ids[0], values[0])

    def _lent(self, pages: Sequence[int]) -> Cache:
        """Give the prompt's row its pages, and with them the pool. The batch is without the pool
        until `_returned`."""
        if self._table is None:
            return self._prompt
        table = np.full((1, self._table.shape[1]), NO_PAGE, np.int32)
        table[0, : len(pages)] = pages
        return with_bodies_of(self._prompt.replace(pages=self._place(table)), self.cache)

    def _returned(self, cache: Cache) -> None:
        """Take the prompt's row back, and give the pool back to the batch."""
        self._prompt = without_bodies(cache)
        self._state = self._state.replace(cache=with_bodies_of(self.cache, cache))

    def prompt_row(self) -> Cache:
        """Copy the row into which prompts are fed, without its pages."""
        return _copied(self._prompt)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page, so that two rows can go on from it."""
        cache = copied_page(self.cache, *self._place((np.int32(source), np.int32(target))))
        self._state = self._state.replace(cache=cache)

    def page_content(self, page: int) -> tuple[dict, ...]:
        """Copy what a page holds to the host."""
        return jax.device_get(_read_page(self.cache, self._place(np.int32(page))))

    def fill_page(self, page: int, content: tuple[dict, ...]) -> None:
        """Put what `page_content` gave into a page."""
        cache = _write_page(self.cache, self._place(np.int32(page)), content)
        self._state = self._state.replace(cache=cache)

    def row_from_host(self, row: Cache) -> Cache:
        """Bring a row of `prompt_row` from the host to where it lay."""
        return self._brought(row, jax.tree.map(lambda x: x.sharding, self._prompt))

    def shapes(self) -> tuple[Cache, tuple[dict, ...]]:
        """Give the shapes of the results of `prompt_row` and `page_content`."""
        page = () if self._table is None else jax.eval_shape(read_page, self.cache, jnp.int32(0))
        return jax.eval_shape(lambda: self._prompt), page

    def go_on_from(self, row: Cache) -> None:
        """Make the row into which prompts are fed a copy of `row`."""
        self._prompt = _copied(row)

    def drop_prompt(self) -> None:
        """Empty the row into which prompts are fed."""
        self._prompt = _emptied(self._prompt, self._place(np.ones((1,), bool)))

    def give_pages(self, row: int, pages: Sequence[int]) -> None:
        """Say which pages a row has from now on."""
        if self._table is not None:
            self._table[row] = NO_PAGE
            self._table[row, : len(pages)] = pages

    def drop_row(self, row: int) -> None:
        """Empty a row. Its pages may then go to other rows."""
        row_mask = np.arange(len(self._lengths)) == row
        self._state = self._state.replace(cache=_emptied(self.cache, self._place(row_mask)))
        self._lengths[row] = 0
        self.give_pages(row, ())

    def drop(self, row: int, start: int, stops: Sequence[int], least: int) -> tuple[int, list[int]]:
        """Take tokens out of the middle of a row (`kvqjax.drop`).

        Args:
            row: that goes on.
            start: the first token that leaves.
            stops: where what leaves may end, the best place first.
            least: the tokens that should leave, or more.

        Returns:
            How many tokens have left, and the row's pages by now.
        """
        before = self._bare_row(row)
        after, first, last = dropped(self._model, Row(before, []), start, stops, least)
        if last > first:
            self._put_back(row, after.cache)
            self._lengths[row] -= last - first
        if self._table is None:
            return last - first, []
        self._table[row] = fetched(after.cache.pages)[0][0]
        return last - first, [page for page in self._table[row].tolist() if page != NO_PAGE]

    def _bare_row(self, row: int) -> Cache:
        """Copy a row without what lies in its pages."""
        cache = _taken_row(self.cache, self._place(np.int32(row)))
        if self._table is None:
            return cache
        return cache.replace(pages=self._place(self._table[row : row + 1].copy()))

    def _put_back(self, row: int, cache: Cache) -> None:
        """Replace a row by one of `_bare_row`."""
        joined = _adopted(self.cache, self._place(np.int32(row)), cache)
        self._state = self._state.replace(cache=joined)

    def row_length(self, row: int) -> int:
        """Count the tokens of a row."""
        return int(self._lengths[row])

    def leave(self, row: int, pages: Sequence[int]) -> Parked:
        """Move a row to the host's memory, and empty it."""
        cache, changed, of_single = self._row_state(row)
        content = [self.page_content(page) for page in pages]
        places = jax.tree.map(lambda x: x.sharding, cache)
        length = self.row_length(row)
        parked = Parked(jax.device_get(cache), changed, of_single, content, places, length)
        self.drop_row(row)
        return parked

    def _row_state(self, row: int) -> tuple[Cache, dict, tuple]:
        """Copy what a row has beside its pages."""
        state = self._state.replace(scores=None)
        return _copied_row(state, self._sampling, self._eos, self._place(np.int32(row)))

    def _brought(self, row: Cache, places: Any) -> Cache:
        """Bring a row from the host to where its arrays lay."""
        # Without a mesh the array is not committed to a device. A committed one would commit all
        # that is computed from it, and every program would be compiled once more.
        if self._model.rules is None:
            return jax.tree.map(jnp.asarray, row)
        return jax.device_put(row, places)

    def come_back(self, row: int, parked: Parked, pages: Sequence[int]) -> None:
        """Let a row that left the batch go on, as `row` and in other pages."""
        for page, content in zip(pages, parked.pages, strict=False):
            self.fill_page(page, content)
        self._state = self._state.replace(scores=None)
        cache = self._brought(parked.cache, parked.places)
        single = self._unbegun(cache, [0]).replace(**parked.changed)
        self._join(row, single, parked.of_single)
        self._lengths[row] = parked.held
        self.give_pages(row, pages)

    def warm(self) -> None:
        """Compile what moves rows and pages, on an empty batch."""
        self._row_state(0)
        if self._drops:
            row = self._bare_row(0)
            places = self._place((np.zeros((1,), np.int32), np.zeros((1,), np.int32)))
            leaving(row, *places)
            self._put_back(0, without_tokens(row, *places))
        if self._table is not None:
            self.fill_page(0, self.page_content(0))
            self.copy_page(0, 0)

    def join(
        self, row: int, request: Request, logits: Float[Array, "1 V"], pages: Sequence[int] = ()
    ) -> RowOutput:
        """Draw the first token of the prompt that was fed, and let it join the batch as `row`, with
        its pages."""
        options = request.options
        state = self._unbegun(self._prompt, [options.seed])
        ends = np.full((1, MOST_ENDS), NO_TOKEN, np.int32)
        ends[0, : len(request.ends)] = request.ends
        scores = None
        if request.likeliest is not None:
            scores = _scores_of(1, self.stride, self._likeliest)
        changed = {
            "left": np.asarray([request.max_new_tokens], np.int32),
            "done": np.zeros((1,), bool),
            "history": history_of([request.prompt], self._model.config.vocab_size),
            "endless": np.asarray([options.min_tokens], np.int32),
            "scores": scores,
        }
        changed, eos, sampling = self._place((changed, ends, of_rows([options], self._model)))
        state = state.replace(**changed)
        single = drawn(self._model, state, logits, sampling, eos, [request.bound])
        output = self._read(single)[0]
        self._join(row, single.replace(scores=None), (sampling, eos))
        self._prompt = single.cache
        self.drop_prompt()
        self._lengths[row] = len(request.prompt) + 1
        self.give_pages(row, pages)
        return output

    def _join(self, row: int, single: LoopState, of_single: tuple) -> None:
        """Put a state of one row into the batch's."""
        self._state = self._state.replace(scores=None)
        self._state, self._sampling, self._eos = _joined(
            self._state, self._sampling, self._eos, self._place(np.int32(row)), single, of_single
        )

    def step(
        self,
        running: Bool[np.ndarray, " B"],
        scored: bool,
        rows: Sequence[BoundRow | None] = (),
    ) -> list[RowOutput]:
        """Make up to `stride` tokens of every running row.

        One program computes all rows, however few run. A program of fewer rows would take less
        time, but it rounds differently (seen on a CPU with SmolLM2-135M, between 4, 8 and 16 rows).
        Where two tokens are about equally likely, a row's text would then depend on how many
        neighbours it has.

        Args:
            running: the rows that go on. The others stay as they are.
            scored: whether scores are wanted of any row.
            rows: the places of the rows in grammars that bind them; None: a free row.

        Returns:
            What every row got.
        """
        lengths = np.where(running, self._lengths + self.stride, 0)
        bound = bound_for(self.cache.layout, lengths.tolist())
        scores = self._state.scores if scored else None
        if scored and scores is None:
            scores = self._place(_scores_of(len(running), self.stride, self._likeliest))
        # `running` is copied because both arrays are donated.
        idle_rows, uncached = self._place((~running, running.copy()))
        cache = self.cache
        if self._table is not None:
            cache = cache.replace(pages=self._place(self._table.copy()))
        state = self._state.replace(
            done=idle_rows, uncached=uncached, scores=scores, cache=bounded(cache, bound)
        )
        state = bound_steps(self._model, state, self._sampling, self._eos, self.stride, rows)
        self._state = state.replace(cache=bounded(state.cache, None))
        outputs = self._read(self._state)
        self._lengths += [len(output.tokens) for output in outputs]
        return outputs

    def _unbegun(self, cache: Cache, seeds: Sequence[int]) -> LoopState:
        """Make the state of rows without a request, which make no tokens."""
        state = unbegun(cache, self.stride, self._place)
        rows = len(seeds)
        history = history_of([()] * rows, self._model.config.vocab_size)
        endless = np.zeros((rows,), np.int32)
        done = np.ones((rows,), bool)
        history, endless, done, keys = self._place((history, endless, done, _row_key(seeds)))
        key = jax.random.wrap_key_data(keys)
        return state.replace(done=done, history=history, endless=endless, key=key)

    def _read(self, state: LoopState) -> list[RowOutput]:
        """Fetch what a call made of every row."""
        counts, tokens, end_flags, broken = fetched(
            state.new_counts, state.tokens, state.done, state.cache.nonfinite
        )
        rows = [tokens[row, :count].tolist() for row, count in enumerate(counts)]
        scores: list[list[TokenScore]] = [[] for _ in rows]
        if state.scores is not None:
            chosen, ids, values = fetched(
                state.scores.chosen, state.scores.ids, state.scores.likeliest
            )
            for row, row_tokens in enumerate(rows):
                scores[row] = _token_scores(row_tokens, chosen[row], ids[row], values[row])
        parts = zip(rows, scores, end_flags.tolist(), broken.tolist(), strict=True)
        return [RowOutput(*part) for part in parts]


def _token_scores(tokens: Sequence[int], chosen, ids, likeliest) -> list[TokenScore]:
    """Pair tokens with their log probabilities.

    Args:
        tokens: some tokens of a row. The arrays may have more places.
        chosen: the log probability of each, [T].
        ids: the likeliest tokens in its place, [T, N].
        likeliest: their log probabilities, [T, N]."""
    scores = []
    places = zip(tokens, chosen.tolist(), ids.tolist(), likeliest.tolist(), strict=False)
    for token, logprob, top_ids, values in places:
        scores.append(TokenScore(token, logprob, dict(zip(top_ids, values, strict=True))))
    return scores


def check_request(request: Request, capacity: int, vocab_size: int, drops: bool = False) -> None:
    """Raise UserError for a request that a row of `capacity` tokens cannot hold. `drops`: the row
    goes on beyond it, so that the prompt and a first token have to fit."""
    length = len(request.prompt)
    new = 1 if drops else request.max_new_tokens
    if length + new > capacity:
        raise too_long(length, new, capacity, f"do not fit a row of {capacity}")
    if len(request.ends) > MOST_ENDS:
        raise UserError(f"{len(request.ends)} end tokens; a request may have {MOST_ENDS}")
    most = min(MOST_LIKELIEST, vocab_size)
    if request.likeliest is not None and check_integer("scores", request.likeliest, 0) > most:
        cause = f"scores of {request.likeliest} tokens asked for; at most {most} come with a token"
        raise UserError(cause, parameter="scores")
