"""The state of a generation under way: a prefilled cache, then decode steps inside one jit."""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int, UInt32

from kvqjax._errors import UserError
from kvqjax.cache import Cache, Leaf
from kvqjax.cache.runs import bound_for
from kvqjax.cache.state import bounded
from kvqjax.generation.bound import BITS, BoundRow, allowed_tokens
from kvqjax.generation.options import GenerateOptions
from kvqjax.generation.prompt_chunks import chunk_for, free_memory
from kvqjax.generation.prompt_ids import bucket, padded
from kvqjax.generation.sampling import History, RowSampling, Sampling, history_of, sample, split_key
from kvqjax.model.loading import Model
from kvqjax.step.forward import forward
from kvqjax.step.prompt import prefill_donated

Progress = Callable[[float], None]
STRIDE = 16  # tokens between looks at the text: stop strings and streaming


class LoopState(struct.PyTreeNode):
    """One generation under way. No array's shape follows how many tokens are wanted:
    `tokens[b, :new_counts[b]]` are the tokens that the latest call gave row b; the caller collects
    them."""

    cache: Cache
    tokens: Leaf  # Int[B, S]
    new_counts: Leaf  # Int[B]
    newest: Leaf  # Int[B], the latest token of every row
    uncached: Leaf  # Bool[B], whether the cache still lacks it
    left: Leaf  # Int[B], how many tokens the row may still get
    done: Leaf  # Bool[B]
    key: Leaf  # one, or one of every row [B]
    history: History | None = None  # None without penalties
    # Int[B], the tokens that a row still gets before an end token may come; None: of no row
    endless: Leaf = None
    scores: "Scores | None" = None  # of `tokens`, where they are wanted


class Scores(struct.PyTreeNode):
    """Log probabilities of the tokens that the latest call made, and of the likeliest ones in their
    places: those of the model's logits, before bias, penalties and temperature."""

    chosen: Leaf  # Float[B, S]
    ids: Leaf  # Int[B, S, N]
    likeliest: Leaf  # Float[B, S, N]


feed = jax.jit(forward, static_argnames=("last",), donate_argnames="cache")


def shared(model: Model, tree):
    """Small arrays for every device of the model's mesh; each host passes the same."""
    if model.rules is None:
        return jax.tree.map(jnp.asarray, tree)
    return jax.device_put(jax.tree.map(np.asarray, tree), model.rules.everywhere)


def fetched(*arrays) -> list[np.ndarray]:
    """Values of small arrays, wherever their parts lie."""
    if all(array.is_fully_addressable for array in arrays):
        return [np.asarray(array) for array in arrays]
    from jax.experimental.multihost_utils import process_allgather

    return [np.asarray(process_allgather(array, tiled=True)) for array in arrays]


def prefill_chunks(
    model: Model,
    tokens: np.ndarray,
    counts: np.ndarray,
    cache: Cache,
    chunk: int,
    progress: Progress | None = None,
    held_counts: np.ndarray | None = None,
):
    """Feed prompts through the cache `chunk` tokens at a time (another mode than exact prefill:
    later chunks see earlier ones compressed). Returns (logits of each row's last token [B, V],
    cache). The cache is donated; `held_counts` says how many tokens its rows hold (None: none).
    `progress(fraction)` is told after each chunk, once it is done."""
    last, longest = None, int(counts.max())
    held_counts = np.zeros_like(counts) if held_counts is None else held_counts
    for start in range(0, longest, chunk):
        chunk_counts = np.clip(counts - start, 0, chunk)
        piece = np.zeros((len(tokens), chunk), np.int32)
        piece[:, : tokens[:, start : start + chunk].shape[1]] = tokens[:, start : start + chunk]
        cache = bounded(
            cache, bound_for(cache.layout, (held_counts + np.minimum(counts, start)).tolist())
        )
        logits, cache = feed(model, *shared(model, (piece, chunk_counts)), cache, last=True)
        last = logits if last is None else jnp.where((chunk_counts > 0)[:, None], logits, last)
        if progress is not None:
            jax.block_until_ready(last)
            progress(min(1.0, (start + chunk) / longest))
    return last, bounded(cache, None)


def unbegun(cache: Cache, room: int = STRIDE, place: Callable = jnp.asarray) -> LoopState:
    """The state before the first token of any row, its small arrays put in their `place`; `room` is
    how many tokens of a row a call may make. Of an abstract cache,
    `jax.eval_shape(unbegun, cache)`."""
    # No two may share a buffer.
    numbers = [place(np.zeros((cache.batch,), np.int32)) for _ in range(3)]
    flags = [place(np.zeros((cache.batch,), bool)) for _ in range(2)]
    new_counts, newest, left = numbers
    uncached, done = flags
    tokens = place(np.zeros((cache.batch, room), np.int32))
    return LoopState(cache, tokens, new_counts, newest, uncached, left, done, key=jax.random.key(0))


def _record(state: LoopState, tokens, logits, eos) -> LoopState:
    """Append one token to every row that is not done; a row that drew an end token is done and does
    not keep it. `eos` [N] are those of all rows, or [B, N] of each."""
    ended = (tokens[:, None] == jnp.atleast_2d(eos)).any(-1)
    alive = ~state.done & ~ended
    rows = jnp.arange(len(tokens))
    place = jnp.where(alive, state.new_counts, state.tokens.shape[1])
    left = state.left - alive.astype(jnp.int32)
    return state.replace(
        tokens=state.tokens.at[rows, place].set(tokens, mode="drop"),
        new_counts=state.new_counts + alive.astype(jnp.int32),
        newest=jnp.where(alive, tokens, state.newest),
        uncached=alive,
        left=left,
        done=state.done | ended | (left <= 0),
        history=None if state.history is None else _noted(state.history, tokens, alive),
        endless=None if state.endless is None else state.endless - alive.astype(jnp.int32),
        scores=None if state.scores is None else _scored(state.scores, logits, tokens, place),
    )


def _noted(history: History, tokens, alive) -> History:
    """Count one more token of every row that is alive."""
    rows = jnp.arange(len(tokens))
    return history.replace(counts=history.counts.at[rows, tokens].add(alive.astype(jnp.int32)))


def _chosen(state: LoopState, key, logits, sampling: Sampling | RowSampling, eos, allowed=None):
    """Choose the next token of every row: none of `eos` where the row goes on in any case. The bits
    of `allowed` say which tokens grammars allow."""
    if allowed is not None:
        places = jnp.arange(BITS, dtype=jnp.uint32)[None, None]
        bits = (allowed[:, :, None] >> places) & 1
        bits = bits.reshape(len(allowed), -1)[:, : logits.shape[1]]
        logits = jnp.where(bits > 0, logits, -jnp.inf)
    if state.endless is not None:
        batch, vocab = logits.shape
        ends = jnp.broadcast_to(jnp.atleast_2d(eos), (batch, eos.shape[-1]))
        # What lies behind the vocabulary is dropped. A negative number would count from its end.
        blocked = jnp.where((state.endless[:, None] > 0) & (ends >= 0), ends, vocab)
        logits = logits.at[jnp.arange(batch)[:, None], blocked].set(-jnp.inf, mode="drop")
    return sample(key, logits, state.history, sampling)


def _scored(scores: Scores, logits, tokens, place) -> Scores:
    """Note the log probabilities of one token of every row at its place."""
    log_probs, rows = jax.nn.log_softmax(logits, axis=-1), jnp.arange(len(tokens))
    likeliest, ids = jax.lax.top_k(log_probs, scores.ids.shape[2])
    chosen = jnp.take_along_axis(log_probs, tokens[:, None], axis=-1)[:, 0]
    return Scores(
        scores.chosen.at[rows, place].set(chosen, mode="drop"),
        scores.ids.at[rows, place].set(ids, mode="drop"),
        scores.likeliest.at[rows, place].set(likeliest, mode="drop"),
    )


@functools.partial(jax.jit, donate_argnames="state")
@jax.enable_x64(False)
def first_token(
    state: LoopState,
    logits,
    sampling: Sampling | RowSampling,
    eos,
    allowed: UInt32[Array, "B W"] | None = None,
) -> LoopState:
    """Draw the first token of every row from the logits of its prompt, or the next one where
    grammars bind rows: `allowed` has a bit for each token. `state` is donated."""
    key, draw = split_key(state.key)
    tokens = _chosen(state, draw, logits, sampling, eos, allowed)
    return _record(state.replace(key=key), tokens, logits, eos)


@functools.partial(jax.jit, donate_argnames="state")
@jax.enable_x64(False)
def next_logits(model: Model, state: LoopState) -> tuple[Array, LoopState]:
    """Feed the newest token of every row whose cache lacks it. `state` is donated."""
    counts = state.uncached.astype(jnp.int32)
    logits, cache = forward(model, state.newest[:, None], counts, state.cache, last=True)
    return logits, state.replace(cache=cache)


@functools.partial(jax.jit, donate_argnames="state")
@jax.enable_x64(False)
def decode_steps(
    model: Model,
    state: LoopState,
    sampling: Sampling | RowSampling,
    eos: Int[Array, " N"] | Int[Array, "B N"],
    limit: Int[Array, ""],
) -> LoopState:
    """Up to `limit` decode steps in one while_loop, at most as many as `state.tokens` has room for.
    A row takes part as long as the cache lacks its newest token: once it is done its last token
    still enters the cache. `state` is donated. A cache that is `bounded` (kvqjax/cache/runs.py) is
    read no further."""

    def step(loop):
        count, state = loop
        counts = state.uncached.astype(jnp.int32)
        logits, cache = forward(model, state.newest[:, None], counts, state.cache, last=True)
        key, draw = split_key(state.key)
        state = state.replace(cache=cache, key=key)
        return count + 1, _record(state, _chosen(state, draw, logits, sampling, eos), logits, eos)

    most = jnp.minimum(limit, state.tokens.shape[1])
    start = (jnp.int32(0), state.replace(new_counts=jnp.zeros_like(state.new_counts)))
    return jax.lax.while_loop(lambda loop: (loop[0] < most) & loop[1].uncached.any(), step, start)[
        1
    ]


def drawn(
    model: Model,
    state: LoopState,
    logits,
    sampling: Sampling | RowSampling,
    eos,
    rows: Sequence[BoundRow | None],
) -> LoopState:
    """Draw a token of every row from logits. `rows` are bound or free (None). What may come next is
    found out while the device still computes the logits. `state` is donated."""
    if not any(rows):
        return first_token(state, logits, sampling, eos)
    allowed = shared(model, allowed_tokens(rows, model.config.vocab_size))
    state = first_token(state, logits, sampling, eos, allowed)
    newest, uncached, done = fetched(state.newest, state.uncached, state.done)
    ended = done.copy()
    for number, row in enumerate(rows):
        if row is not None and uncached[number] and not row.ended:
            row.take(int(newest[number]))
        ended[number] |= row is not None and row.ended
    return state if (ended == done).all() else state.replace(done=shared(model, ended))


def bound_steps(
    model: Model,
    state: LoopState,
    sampling: Sampling | RowSampling,
    eos,
    limit: int,
    rows: Sequence[BoundRow | None],
) -> LoopState:
    """Do what `decode_steps` does where grammars bind some rows. What may come next depends on the
    token before, so that the host is asked at every step. `state` is donated."""
    if not any(rows):
        return decode_steps(model, state, sampling, eos, shared(model, np.int32(limit)))
    state = state.replace(new_counts=shared(model, np.zeros(state.new_counts.shape, np.int32)))
    for _ in range(min(limit, state.tokens.shape[1])):
        logits, state = next_logits(model, state)
        state = drawn(model, state, logits, sampling, eos, rows)
        if not fetched(state.uncached)[0].any():
            break
    return state


def _require_finite(logits, counts) -> None:
    """Raise UserError where the logits of a row that has a prompt are not finite."""
    if not fetched((jnp.isfinite(logits).all(-1) | (counts == 0)).all())[0]:
        raise UserError(
            "the model's logits are NaN or infinite",
            "check its weights, or try {dtype}",
            dtype="f32",
        )


def require_finite(cache: Cache) -> None:
    """Raise UserError where a row holds a token that is not finite: its logits are NaN, so its
    tokens mean nothing."""
    broken, finite = fetched(cache.nonfinite, cache.finite)
    if broken.any():
        row = int(broken.argmax())
        cause = f"a key or value of token {finite[row]} is NaN or infinite"
        raise UserError(
            f"row {row}: {cause}", "check the model's weights, or try {dtype}", dtype="f32"
        )


def start(
    model: Model,
    prompts: Sequence[Sequence[int]],
    cache: Cache,
    chunk: int | str | None,
    new: int,
    sampling: Sampling,
    options: GenerateOptions,
    eos,
    progress: Progress | None = None,
    *,
    room: int = STRIDE,
    held: np.ndarray | None = None,
    before: Sequence[Sequence[int]] = (),
    bound: Sequence[BoundRow | None] = (),
) -> LoopState:
    """Feed the prompts and draw the first token of each. The cache is donated.

    Rows of the cache without a prompt are done from the start. `held` says how many tokens each row
    of the cache holds (None: none; only then `chunk=None` is an exact prefill), and `before` which,
    for the repetition penalty. `room` is how many tokens of a row one call of `decode_steps` may
    make. `sampling` is what `options` say of a draw, and `eos` what they say of end tokens.
    `bound` are the rows' places in their grammars."""
    prompts = [*prompts, *([] for _ in range(cache.batch - len(prompts)))]
    counts = np.asarray([len(p) for p in prompts], np.int32)
    tokens = padded(prompts, bucket(int(counts.max())))
    if chunk is None and held is None:
        logits, cache = prefill_donated(model, *shared(model, (tokens, counts)), cache)
    else:
        if not isinstance(chunk, int):  # "auto"
            chunk = chunk_for(model.config, cache.layout.target, len(prompts), free_memory())
            chunk = chunk if held is None else min(chunk, tokens.shape[1])
        # No prompt is longer; a chunk is computed at its full length.
        chunk = min(chunk, cache.layout.capacity)
        logits, cache = prefill_chunks(model, tokens, counts, cache, chunk, progress, held)
    _require_finite(logits, shared(model, counts))
    history = endless = None
    if options.penalises:
        texts = [
            [*ids, *prompt] for ids, prompt in itertools.zip_longest(before, prompts, fillvalue=())
        ]
        history = shared(model, history_of(texts, model.config.vocab_size))
    if options.min_tokens:
        endless = shared(model, np.full((len(prompts),), options.min_tokens, np.int32))
    state = unbegun(cache, room, functools.partial(shared, model))
    state = state.replace(
        left=shared(model, np.full((len(prompts),), new, np.int32)),
        done=shared(model, counts == 0),
        history=history,
        endless=endless,
        key=jax.random.wrap_key_data(
            shared(model, jax.random.key_data(jax.random.key(options.seed)))
        ),
    )
    return drawn(model, state, logits, sampling, eos, bound)
