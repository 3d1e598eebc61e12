"""The state of a generation under way: a prefilled cache, then decode steps inside one jit."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from kvqjax._errors import UserError
from kvqjax.cache import Cache, Leaf
from kvqjax.cache.reach import Reach, reach_for
from kvqjax.generation.prompt_chunks import chunk_for, free_memory
from kvqjax.generation.prompt_ids import bucket, padded
from kvqjax.generation.sampling import Sampling, sample
from kvqjax.model.loading import Model
from kvqjax.step.forward import forward
from kvqjax.step.prefill import prefill

__all__ = ["decode_steps", "fetched", "prefill_chunks", "require_finite", "shared", "start"]

Progress = Callable[[float], None]
STRIDE = 16  # tokens between looks at the text: stop strings and streaming


class LoopState(struct.PyTreeNode):
    """One generation under way. `tokens[b, :made[b]]` are the new tokens of row b; its last one is not in the cache
    yet."""

    cache: Cache
    tokens: Leaf  # Int[B, N]
    made: Leaf  # Int[B]
    done: Leaf  # Bool[B]
    seen: Leaf  # Bool[B, V], or None without a repetition penalty
    key: Leaf


_prefill = jax.jit(prefill, donate_argnames="cache")
_forward = jax.jit(forward, static_argnames=("last", "reach"), donate_argnames="cache")


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
    model: Model, tokens: np.ndarray, counts: np.ndarray, cache: Cache, chunk: int, progress: Progress | None = None
):
    """Feed prompts through the cache `chunk` tokens at a time (another mode than exact prefill: later chunks see
    earlier ones compressed). Returns (logits of each row's last token [B, V], cache). The cache is donated.
    `progress(fraction)` is told after each chunk, once it is done."""
    last, longest = None, int(counts.max())
    for start in range(0, longest, chunk):
        here = np.clip(counts - start, 0, chunk)
        piece = np.zeros((len(tokens), chunk), np.int32)
        piece[:, : tokens[:, start : start + chunk].shape[1]] = tokens[:, start : start + chunk]
        reach = reach_for(cache.layout, [start])
        logits, cache = _forward(model, *shared(model, (piece, here)), cache, last=True, reach=reach)
        last = logits if last is None else jnp.where((here > 0)[:, None], logits, last)
        if progress is not None:
            jax.block_until_ready(last)
            progress(min(1.0, (start + chunk) / longest))
    return last, cache


def _record(state: LoopState, tokens, eos) -> LoopState:
    """Append one token to every row that is not done; a row that drew an end token is done and does not keep it."""
    ended = (tokens[:, None] == eos[None]).any(-1)
    alive = ~state.done & ~ended
    rows = jnp.arange(len(tokens))
    made = state.made + alive.astype(jnp.int32)
    place = jnp.where(alive, state.made, state.tokens.shape[1])
    seen = None if state.seen is None else state.seen.at[rows, tokens].max(alive)
    return state.replace(
        tokens=state.tokens.at[rows, place].set(tokens, mode="drop"),
        made=made,
        done=state.done | ended | (made >= state.tokens.shape[1]),
        seen=seen,
    )


@functools.partial(jax.jit, donate_argnames="state")
@jax.enable_x64(False)
def _first(state: LoopState, logits, sampling: Sampling, eos) -> LoopState:
    key, draw = jax.random.split(state.key)
    return _record(state.replace(key=key), sample(draw, logits, state.seen, sampling), eos)


@functools.partial(jax.jit, donate_argnames="state", static_argnames="reach")
@jax.enable_x64(False)
def decode_steps(
    model: Model,
    state: LoopState,
    sampling: Sampling,
    eos: Int[Array, " N"],
    limit: Int[Array, ""],
    reach: Reach | None = None,
) -> LoopState:
    """Up to `limit` decode steps in one while_loop; ends early when every row is done. `state` is donated. Rows may
    not come to hold more than `reach` promises (kvqjax/cache/reach.py)."""

    def step(loop):
        count, state = loop
        newest = jnp.take_along_axis(state.tokens, jnp.maximum(state.made - 1, 0)[:, None], axis=1)
        logits, cache = forward(model, newest, (~state.done).astype(jnp.int32), state.cache, last=True, reach=reach)
        key, draw = jax.random.split(state.key)
        state = state.replace(cache=cache, key=key)
        return count + 1, _record(state, sample(draw, logits, state.seen, sampling), eos)

    start = (jnp.int32(0), state)
    return jax.lax.while_loop(lambda loop: (loop[0] < limit) & ~loop[1].done.all(), step, start)[1]


def _require_finite(logits) -> None:
    if not fetched(jnp.isfinite(logits).all())[0]:
        raise UserError("the model's logits are NaN or infinite; check its weights, or try dtype='f32'")


def require_finite(cache: Cache) -> None:
    """Raise UserError where a row holds a token that is not finite: its logits are NaN, so its tokens mean nothing."""
    broken, finite = fetched(cache.nonfinite, cache.finite)
    if broken.any():
        row = int(broken.argmax())
        cause = f"a key or value of token {finite[row]} is NaN or infinite"
        raise UserError(f"row {row}: {cause}; check the model's weights, or try dtype='f32'")


def start(
    model: Model,
    prompts,
    cache: Cache,
    chunk: int | str | None,
    new: int,
    sampling: Sampling,
    seed: int,
    eos,
    progress: Progress | None,
) -> LoopState:
    """Prefill the prompts and draw the first token of each."""
    counts = np.asarray([len(p) for p in prompts], np.int32)
    tokens = padded(prompts, bucket(int(counts.max())))
    if chunk is None:
        logits, cache = _prefill(model, *shared(model, (tokens, counts)), cache)
    else:
        if isinstance(chunk, str):  # "auto"
            chunk = chunk_for(model.config, cache.layout.target, len(prompts), free_memory())
        logits, cache = prefill_chunks(model, tokens, counts, cache, chunk, progress)
    _require_finite(logits)
    seen = None
    if sampling.penalise:
        marks = np.zeros((len(prompts), model.config.vocab_size), bool)
        for row, prompt in zip(marks, prompts, strict=True):
            row[list(prompt)] = True
        seen = shared(model, marks)
    rows = len(prompts)
    empty = LoopState(
        cache=cache,
        tokens=shared(model, np.zeros((rows, new), np.int32)),
        made=shared(model, np.zeros((rows,), np.int32)),
        done=shared(model, np.zeros((rows,), bool)),
        seen=seen,
        key=jax.random.wrap_key_data(shared(model, jax.random.key_data(jax.random.key(seed)))),
    )
    return _first(empty, logits, sampling, eos)
