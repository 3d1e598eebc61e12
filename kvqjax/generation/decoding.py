"""Generating text: prefill and decode loop (kvqjax/generation/loop.py) with stop strings and streaming, by calls of a
few steps each."""

import collections
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvqjax._errors import UserError
from kvqjax._options import named_options
from kvqjax.cache.reach import reach_for
from kvqjax.generation.loop import STRIDE, Progress, decode_steps, fetched, require_finite, shared, start
from kvqjax.generation.prompt_chunks import AUTO
from kvqjax.generation.prompt_ids import Prompts, encode_prompts, end_ids, require_trained
from kvqjax.generation.sampling import make_sampling
from kvqjax.generation.text import Detokenizer
from kvqjax.methods import MethodLike
from kvqjax.model.loading import Model
from kvqjax.step.doors import check_counts
from kvqjax.step.new_cache import init_cache

__all__ = ["Generated", "generate", "stream"]


class Generated(NamedTuple):
    """`text[b]` and `tokens[b]` (a list of ids, without the end token) of every prompt."""

    text: list[str]
    tokens: list[list[int]]


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
    stop: str | Sequence[str] = (),
    eos_ids: Sequence[int] | None = None,
    seed: int = 0,
    stride: int = STRIDE,
    beyond_trained: bool = False,
    progress: Progress | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> Iterator[Generated]:
    """Generate, yielding everything made so far after every `stride` tokens. Arguments as `generate`.

    Each text begins with the one before. What a later token may change, a character not yet whole and the beginning of
    a stop string, is left out until it cannot."""
    check_counts(max_new_tokens=max_new_tokens, capacity=capacity, stride=stride)
    if chunk != AUTO:
        check_counts(chunk=chunk)
    ids = encode_prompts(model, prompts, chat)
    require_trained(model, ids, max_new_tokens, beyond_trained)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    parameters = shared(model, make_sampling(**options, repetition_penalty=repetition_penalty))
    eos = shared(model, end_ids(model, eos_ids))
    tokenizer = model.tokenizer if model.folder else None
    texts = [Detokenizer(tokenizer, prompt, stop) for prompt in ids]
    taken = np.zeros(len(ids), np.int32)  # new tokens of every row that its text has
    cache = init_cache(model, method, len(ids), _capacity(ids, max_new_tokens, capacity), kernels=kernels)
    state = start(model, ids, cache, chunk, max_new_tokens, parameters, seed, eos, progress)
    while True:
        require_finite(state.cache)
        made, tokens, done = fetched(state.made, state.tokens, state.done)
        for row, text in enumerate(texts):
            text.extend(tokens[row, taken[row] : made[row]].tolist())
            if done[row]:
                text.finish()
        taken, done = made, done | np.asarray([text.stopped for text in texts])
        yield Generated([text.text for text in texts], [list(text.ids) for text in texts])
        if done.all():
            return
        held = [len(prompt) + int(count) + stride for prompt, count in zip(ids, made, strict=True)]
        done, limit = shared(model, (done, np.int32(stride)))
        reach = reach_for(cache.layout, held)
        state = decode_steps(model, state.replace(done=done), parameters, eos, limit, reach)


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
    stop: str | Sequence[str] = (),
    eos_ids: Sequence[int] | None = None,
    seed: int = 0,
    stride: int = STRIDE,
    beyond_trained: bool = False,
    progress: Progress | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> Generated:
    """Continue each prompt through a cache of `method`: a method, or a policy such as "kivi:bits=2".

    prompts: a string, or a list of strings, token id lists or (chat=True) message lists; rows may differ in length.
    capacity: tokens per row; default: what is needed. stop: strings that end a row and are kept out of its text; the
    text of a special token may be one. eos_ids: tokens that end a row (default: the model's). The text is what prompt
    and answer say together, without the prompt's part (kvqjax/generation/text.py). chunk=None prefills exactly, as the
    papers do; chunk=N feeds the prompt through the cache N tokens at a time, chunk="auto" as many as suit the chip and
    its memory. progress: told after each chunk which part of the prompt is done. kernels: as in `init_cache`. stride:
    tokens between looks at the text. beyond_trained: let prompt and new tokens be more than the model was trained for,
    which is refused otherwise; a greater capacity alone is not. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and
    repetition_penalty 1 switch each off; each applies to what the ones before it left, as in transformers. A
    checkpoint's own sampling is used on request only: `generate(model, prompts, **model.sampling_defaults())`. Raises
    UserError for prompts that are empty, too long or do not fit, and for options that do not exist."""
    return collections.deque(stream(**locals()), maxlen=1)[0]  # before any other local: the arguments and no more
