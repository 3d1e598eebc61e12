"""Generating text: prefill, then a decode loop inside one jit; stop strings and streaming by N-step calls of that
loop."""

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from kvqjax._errors import UserError
from kvqjax._options import named_options
from kvqjax.cache import Cache, Leaf
from kvqjax.cache.reach import reach_for
from kvqjax.generation.prompt_chunks import AUTO, chunk_for, free_memory
from kvqjax.generation.prompt_ids import Prompts, bucket, encode_prompts
from kvqjax.generation.sampling import Sampling, make_sampling, sample
from kvqjax.methods import MethodLike
from kvqjax.model.loading import Model
from kvqjax.step.doors import check_counts
from kvqjax.step.forward import forward, init_cache, prefill

__all__ = ["Generated", "decode_steps", "generate", "prefill_chunks", "require_finite", "stream"]

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


class Generated(NamedTuple):
    """`text[b]` and `tokens[b]` (a list of ids, without the end token) of every prompt."""

    text: list[str]
    tokens: list[list[int]]


_prefill = jax.jit(prefill, donate_argnames="cache")
_forward = jax.jit(forward, static_argnames=("last", "reach"), donate_argnames="cache")


def _padded(prompts: Sequence[Sequence[int]], width: int) -> np.ndarray:
    out = np.zeros((len(prompts), width), np.int32)
    for row, tokens in zip(out, prompts, strict=True):
        row[: len(tokens)] = tokens
    return out


def _shared(model: Model, tree):
    """Small arrays for every device of the model's mesh; each host passes the same."""
    if model.rules is None:
        return jax.tree.map(jnp.asarray, tree)
    return jax.device_put(jax.tree.map(np.asarray, tree), model.rules.everywhere)


def _fetched(*arrays) -> list[np.ndarray]:
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
        reach = reach_for(cache.layout, start)
        logits, cache = _forward(model, *_shared(model, (piece, here)), cache, last=True, reach=reach)
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
    reach: int | None = None,
) -> LoopState:
    """Up to `limit` decode steps in one while_loop; ends early when every row is done. `state` is donated. No row may
    come to hold more than `reach` tokens (kvqjax/cache/reach.py)."""

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
    if not _fetched(jnp.isfinite(logits).all())[0]:
        raise UserError("the model's logits are NaN or infinite; check its weights, or try dtype='f32'")


def require_finite(cache: Cache) -> None:
    """Raise UserError where a row holds a token that is not finite: its logits are NaN, so its tokens mean nothing."""
    broken, finite = _fetched(cache.nonfinite, cache.finite)
    if broken.any():
        row = int(broken.argmax())
        cause = f"a key or value of token {finite[row]} is NaN or infinite"
        raise UserError(f"row {row}: {cause}; check the model's weights, or try dtype='f32'")


def _start(
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
    tokens = _padded(prompts, bucket(int(counts.max())))
    if chunk is None:
        logits, cache = _prefill(model, *_shared(model, (tokens, counts)), cache)
    else:
        if isinstance(chunk, str):
            chunk = chunk_for(model.config, cache.layout.target, len(prompts), free_memory())
        logits, cache = prefill_chunks(model, tokens, counts, cache, chunk, progress)
    _require_finite(logits)
    seen = None
    if sampling.penalise:
        marks = np.zeros((len(prompts), model.config.vocab_size), bool)
        for row, prompt in zip(marks, prompts, strict=True):
            row[list(prompt)] = True
        seen = _shared(model, marks)
    rows = len(prompts)
    empty = LoopState(
        cache=cache,
        tokens=_shared(model, np.zeros((rows, new), np.int32)),
        made=_shared(model, np.zeros((rows,), np.int32)),
        done=_shared(model, np.zeros((rows,), bool)),
        seen=seen,
        key=jax.random.wrap_key_data(_shared(model, jax.random.key_data(jax.random.key(seed)))),
    )
    return _first(empty, logits, sampling, eos)


def _cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Text up to the first stop string, and whether there was one."""
    places = [place for place in (text.find(s) for s in stop) if place >= 0]
    return (text[: min(places)], True) if places else (text, False)


def _capacity(prompts, new: int, capacity: int | None) -> int:
    need = max(len(p) for p in prompts) + new
    if capacity is None:
        return -(-need // 256) * 256
    if need > capacity:
        longest = max(len(p) for p in prompts)
        raise UserError(f"a prompt of {longest} tokens and {new} new ones do not fit a capacity of {capacity}")
    return capacity


@named_options
def stream(
    model: Model,
    prompts: Prompts,
    method: MethodLike = "exact",
    *,
    max_new_tokens: int = 64,
    capacity: int | None = None,
    chunk: int | str | None = None,
    kernels: str = "auto",
    chat: bool = False,
    stop: Sequence[str] = (),
    eos_ids: Sequence[int] | None = None,
    seed: int = 0,
    stride: int = STRIDE,
    progress: Progress | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> Iterator[Generated]:
    """Generate, yielding everything made so far after every `stride` tokens. Arguments as `generate`."""
    check_counts(max_new_tokens=max_new_tokens, capacity=capacity, stride=stride)
    if chunk != AUTO:
        check_counts(chunk=chunk)
    ids = encode_prompts(model, prompts, chat)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    parameters = _shared(model, make_sampling(**options, repetition_penalty=repetition_penalty))
    eos = _shared(model, np.asarray(model.config.eos_ids if eos_ids is None else tuple(eos_ids), np.int32).reshape(-1))
    cache = init_cache(model, method, len(ids), _capacity(ids, max_new_tokens, capacity), kernels=kernels)
    state = _start(model, ids, cache, chunk, max_new_tokens, parameters, seed, eos, progress)
    while True:
        require_finite(state.cache)
        made, tokens, done = _fetched(state.made, state.tokens, state.done)
        rows = [row[:count].tolist() for row, count in zip(tokens, made, strict=True)]
        result, stopped = _texts(model, rows, stop)
        yield result
        done = done | np.asarray(stopped)
        if done.all():
            return
        held = max(len(prompt) + int(count) for prompt, count in zip(ids, made, strict=True))
        done, limit = _shared(model, (done, np.int32(stride)))
        reach = reach_for(cache.layout, held + stride)
        state = decode_steps(model, state.replace(done=done), parameters, eos, limit, reach)


def _texts(model: Model, rows: list[list[int]], stop: Sequence[str]) -> tuple[Generated, list[bool]]:
    """Decode rows, cut at stop strings; tokens past the one that completes a stop string are cropped."""
    if not model.folder:
        if stop:
            raise UserError("stop strings need a tokenizer, and this model has no folder")
        return Generated(["" for _ in rows], rows), [False] * len(rows)
    decode = functools.partial(model.tokenizer.decode, skip_special_tokens=True)
    texts, stopped, kept = [], [], []
    for row in rows:
        text, hit = _cut(decode(row), stop)
        if hit:  # the shortest prefix whose text holds a stop string
            row = row[: next(n for n in range(1, len(row) + 1) if _cut(decode(row[:n]), stop)[1])]
        texts.append(text)
        stopped.append(hit)
        kept.append(row)
    return Generated(texts, kept), stopped


@named_options
def generate(
    model: Model,
    prompts: Prompts,
    method: MethodLike = "exact",
    *,
    max_new_tokens: int = 64,
    capacity: int | None = None,
    chunk: int | str | None = None,
    kernels: str = "auto",
    chat: bool = False,
    stop: Sequence[str] = (),
    eos_ids: Sequence[int] | None = None,
    seed: int = 0,
    stride: int = STRIDE,
    progress: Progress | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> Generated:
    """Continue each prompt through a cache of `method`: a method, or a policy such as "kivi:bits=2".

    prompts: a string, or a list of strings, token id lists or (chat=True) message lists; rows may differ in length.
    capacity: tokens per row; default: what is needed. stop: strings that end a row; eos_ids: tokens that do (default:
    the model's). chunk=None prefills exactly, as the papers do; chunk=N feeds the prompt through the cache N tokens at
    a time, chunk="auto" as many as suit the chip and its memory. progress: told after each chunk which part of the
    prompt is done. kernels: as in `init_cache`. stride: tokens between looks at the text. temperature 0 is greedy;
    top_k 0, top_p 1, min_p 0 and repetition_penalty 1 switch each off. A checkpoint's own sampling is used on request
    only: `generate(model, prompts, **model.sampling_defaults())`. Raises UserError for prompts that are empty or do not
    fit, and for options that do not exist."""
    made = stream(
        model,
        prompts,
        method,
        max_new_tokens=max_new_tokens,
        capacity=capacity,
        chunk=chunk,
        kernels=kernels,
        chat=chat,
        stop=stop,
        eos_ids=eos_ids,
        seed=seed,
        stride=stride,
        progress=progress,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    return collections.deque(made, maxlen=1)[0]
