"""Generating text: prefill and decode loop (kvqjax/generation/loop.py) with stop strings and streaming, by calls of a
few steps each."""

import collections
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvqjax._arguments import check_counts, check_integer
from kvqjax._errors import UserError
from kvqjax._options import named_options
from kvqjax.cache.reach import reach_for
from kvqjax.generation.loop import STRIDE, Progress, decode_steps, fetched, require_finite, shared, start
from kvqjax.generation.prompt_chunks import AUTO
from kvqjax.generation.prompt_ids import Prompts, encode_prompts, end_ids
from kvqjax.generation.sampling import make_sampling
from kvqjax.methods import MethodLike
from kvqjax.model.loading import Model
from kvqjax.step.new_cache import init_cache

__all__ = ["Generated", "generate", "stream"]


class Generated(NamedTuple):
    """`text[b]` and `tokens[b]` (a list of ids, without the end token) of every prompt."""

    text: list[str]
    tokens: list[list[int]]


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
    check_integer("seed", seed, 0)
    ids = encode_prompts(model, prompts, chat)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    parameters = shared(model, make_sampling(**options, repetition_penalty=repetition_penalty))
    eos = shared(model, end_ids(model, eos_ids))
    cache = init_cache(model, method, len(ids), _capacity(ids, max_new_tokens, capacity), kernels=kernels)
    state = start(model, ids, cache, chunk, max_new_tokens, parameters, seed, eos, progress)
    while True:
        require_finite(state.cache)
        made, tokens, done = fetched(state.made, state.tokens, state.done)
        rows = [row[:count].tolist() for row, count in zip(tokens, made, strict=True)]
        result, stopped = _texts(model, rows, stop)
        yield result
        done = done | np.asarray(stopped)
        if done.all():
            return
        held = [len(prompt) + int(count) + stride for prompt, count in zip(ids, made, strict=True)]
        done, limit = shared(model, (done, np.int32(stride)))
        reach = reach_for(cache.layout, held)
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
    return collections.deque(stream(**locals()), maxlen=1)[0]  # before any other local: the arguments and no more
