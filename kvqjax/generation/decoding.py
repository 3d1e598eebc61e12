"""Generating text: `generate` gives everything at once, `stream` piece by piece. Both continue new
prompts or a cache (the work is done in kvqjax/generation/driver.py)."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Unpack

import numpy as np

from kvqjax._arguments import check_counts
from kvqjax._errors import UserError
from kvqjax._options import named_options, with_fields
from kvqjax.cache import Cache
from kvqjax.cache.accounting import ledger
from kvqjax.cache.surgery import fork
from kvqjax.generation.driver import Generation, Piece, Settings
from kvqjax.generation.loop import STRIDE, Progress, fetched, require_finite
from kvqjax.generation.options import GenerateFields, GenerateOptions
from kvqjax.generation.prompt_chunks import AUTO
from kvqjax.generation.prompt_ids import (
    Prompts,
    capacity_for,
    encode_prompts,
    padded_rows,
    require_trained,
    room_of,
)
from kvqjax.methods import MethodLike, parse
from kvqjax.model.loading import Model
from kvqjax.step.checks import check_new_tokens
from kvqjax.step.new_cache import init_cache

__all__ = ["Generated", "Piece", "Stream", "generate", "stream"]


@dataclasses.dataclass(frozen=True, eq=False)
class Generated:
    """What a generation made.

    - `text[b]` and `tokens[b]` of every prompt: new text, and its token ids without the end token.
      Text is empty where the model has no tokenizer. A stop string is not in the text; its tokens
      are in `tokens`.
    - `finish_reasons[b]`: "eos" (an end token, or one of `stop_token_ids`), "stop" (a stop string),
      "length" (`max_new_tokens`), or "closed" (the stream was closed before).
    - `cache` holds every prompt and all of `tokens`: `generate(model, more, cache=out.cache)` goes
      on from there.
    - `prompt_tokens[b]` counts the tokens of every prompt. `seconds_to_first_token` includes the
      prompts and whatever was compiled. `tokens_per_second` counts the tokens of all rows after
      their first ones; 0 where there are none. The first call of decode steps may compile them, so
      it is left out where there are others.
    - `cache_bytes` are those of `cache`, and `bits` what it spends on a number of a key or value,
      with all it keeps beside the codes (`kvqjax.ledger(cache).bits_stored`)."""

    text: list[str]
    tokens: list[list[int]]
    finish_reasons: list[str]
    cache: Cache = dataclasses.field(repr=False)
    prompt_tokens: list[int]
    seconds_to_first_token: float
    tokens_per_second: float
    cache_bytes: int
    bits: float


class Stream(Iterator[Piece]):
    """Pieces of a generation under way; what `stream` returns. Nothing is computed before the first
    one is asked for.

    `close()` ends it early, and what was made by then is the result."""

    def __init__(self, generation: Generation):
        self._generation = generation
        self._result: Generated | None = None

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Piece:
        piece = self._generation.advance()
        if piece is None:
            raise StopIteration
        return piece

    def close(self) -> None:
        """End the generation here; rows that still went on have the finish reason "closed"."""
        self._generation.close()

    @property
    def result(self) -> Generated:
        """Everything that was made. Raises UserError before the last piece was taken, unless the
        stream was closed."""
        if not self._generation.ended:
            raise UserError("this stream has no result yet; take all of its pieces, or close() it")
        if self._result is None:
            self._result = _generated(self._generation)
        return self._result


def _generated(generation: Generation) -> Generated:
    cache = generation.cache()
    book = ledger(cache)
    return Generated(
        text=generation.texts,
        tokens=generation.tokens,
        finish_reasons=[reason or "" for reason in generation.reasons],
        cache=cache,
        prompt_tokens=[len(prompt) for prompt in generation.prompts],
        seconds_to_first_token=generation.seconds_to_first_token,
        tokens_per_second=generation.tokens_per_second,
        cache_bytes=book.bytes,
        bits=book.bits_stored,
    )


def _check_continues(
    model: Model, cache: Cache, method: MethodLike | None, capacity, kernels: str, chat: bool
) -> None:
    """Raise UserError unless `cache` can be continued, and where an option says something else than
    it is."""
    rows = np.zeros((getattr(cache, "batch", 1),), np.int32)
    check_new_tokens(model, rows[:, None], rows, cache)
    layout = cache.layout
    if method is not None and parse(method) != layout.method:
        raise UserError(
            f"cache= is one of {layout.method}, not of {parse(method)}; leave method out"
        )
    if capacity is not None and capacity != layout.capacity:
        raise UserError(
            f"cache= has a capacity of {layout.capacity} tokens a row, not {capacity}; leave capacity out"
        )
    if kernels != "auto":
        raise UserError(
            f"kernels={kernels!r} is said where a cache is made; leave it out beside cache="
        )
    if chat:
        raise UserError("chat=True begins a conversation; kvqjax.Session goes on with one")
    if (full := fetched(cache.overflow)[0].nonzero()[0]).size:
        raise UserError(
            f"row {full[0]} of cache= was given more tokens than fit, and lacks what did not"
        )
    require_finite(cache)


def _check_room(
    cache: Cache, before: Sequence[int], prompts: Sequence[Sequence[int]], new: int
) -> None:
    capacity = cache.layout.capacity
    for row, (count, prompt) in enumerate(zip(before, prompts, strict=True)):
        if count + len(prompt) + new > capacity:
            need = f"row {row} holds {count} tokens; {len(prompt)} more and {new} new ones"
            raise UserError(
                f"{need} do not fit the cache's capacity of {capacity}; kvqjax.resize makes room"
            )


@named_options
@with_fields(GenerateOptions)
def stream(
    model: Model,
    prompts: Prompts,
    method: MethodLike | None = None,
    *,
    cache: Cache | None = None,
    max_new_tokens: int = 64,
    capacity: int | None = None,
    chunk: int | str | None = None,
    kernels: str = "auto",
    chat: bool = False,
    add_special_tokens: bool | None = None,
    stride: int = STRIDE,
    progress: Progress | None = None,
    **options: Unpack[GenerateFields],
) -> Stream:
    """Generate piece by piece: an iterator over what is new after every `stride` tokens, whose
    `result` is what `generate` returns. Arguments are those of `generate`.

        parts = stream(model, "The old house", "kivi:bits=2")
        for piece in parts:
            print(piece.text[0], end="")
        print(parts.result.finish_reasons)

    Raises:
        UserError: What is wrong with the arguments, at once: nothing is compiled before all of it
        is fine."""
    check_counts(max_new_tokens=max_new_tokens, capacity=capacity, stride=stride)
    if chunk != AUTO:
        check_counts(chunk=chunk)
    checked = GenerateOptions(**options)
    lengths = None  # of the rows of a cache that is continued
    if cache is not None:
        _check_continues(model, cache, method, capacity, kernels, chat)
        lengths = fetched(cache.lengths)[0]
    ids = encode_prompts(
        model,
        prompts,
        chat,
        held=() if lengths is None else lengths,
        add_special_tokens=add_special_tokens,
        most=room_of(model, capacity, checked.beyond_trained),
    )
    before = [0] * len(ids) if lengths is None else lengths.tolist()
    with_prompts = [count + len(prompt) for count, prompt in zip(before, ids, strict=False)]
    stride = min(stride, max_new_tokens)  # a row's new tokens have room for one stride
    require_trained(model, with_prompts, max_new_tokens, checked.beyond_trained)
    settings = Settings.of(model, max_new_tokens, checked, stride, chunk, progress)
    if cache is None:
        method, capacity = (
            "exact" if method is None else method,
            capacity_for(model, ids, max_new_tokens, capacity),
        )
        cache = init_cache(
            model, method, padded_rows(model, ids, capacity), capacity, kernels=kernels
        )
        return Stream(Generation(model, ids, cache, settings))
    if len(ids) != cache.batch:
        raise UserError(
            f"{len(ids)} prompts for the {cache.batch} rows of cache=; wanted one for each"
        )
    _check_room(cache, before, ids, max_new_tokens)
    return Stream(
        Generation(model, ids, fork(cache), settings, held=lengths if any(before) else None)
    )


@named_options
@with_fields(GenerateOptions)
def generate(
    model: Model,
    prompts: Prompts,
    method: MethodLike | None = None,
    *,
    cache: Cache | None = None,
    max_new_tokens: int = 64,
    capacity: int | None = None,
    chunk: int | str | None = None,
    kernels: str = "auto",
    chat: bool = False,
    add_special_tokens: bool | None = None,
    stride: int = STRIDE,
    progress: Progress | None = None,
    **options: Unpack[GenerateFields],
) -> Generated:
    """Continue each prompt through a cache of `method`: a method, or a policy such as "kivi:bits=2"
    (None: exact).

    A token is chosen in this order: `logit_bias`, penalties, `temperature`, `top_k`, `top_p`,
    `min_p`. Each applies to what the ones before it left, as in transformers and vLLM. A
    checkpoint's own sampling is used on request only:
    `generate(model, prompts, **model.sampling_defaults())`.

    Args:
        prompts: A string, or a list of strings, token id lists or (chat=True) message lists; rows
            may differ in length. Token ids need no tokenizer.
        cache: Go on from this cache instead of making one: row b of it is followed by prompt b. It
            is copied, so it stays as it is. Its method, capacity and kernels are given by it. A
            prompt enters it `chunk` tokens at a time (None: as many as suit the chip), and the
            repetition penalty counts the tokens of this call alone.
        max_new_tokens: Of every row.
        capacity: Tokens per row. By default what is needed, rounded up so that few programs are
            compiled.
        chunk: None prefills exactly, as the papers do; N feeds the prompt through the cache N
            tokens at a time, "auto" as many as suit the chip and its memory.
        kernels: As in `init_cache`.
        chat: Put the prompts through the tokenizer's chat template.
        add_special_tokens: Whether strings get the tokens with which the tokenizer begins a text;
            None: those do that begin one, and not those that go on from a row of `cache`.
        stride: Tokens between looks at the text.
        progress: Told after each chunk which part of the prompt is done.
        stop: Strings that end a row and are kept out of its text; the text of a special token may
            be one. The text is what prompt and answer say together, without the prompt's part
            (kvqjax/generation/text.py).
        eos_ids: Tokens that end a row and do not belong to it; default: the model's.
        stop_token_ids: Further tokens that end a row.
        ignore_eos: Go on after the model's end tokens, which then belong to the row.
            `stop_token_ids` end it all the same.
        min_tokens: Tokens that a row has at least. Before them no end token is drawn and no stop
            string counts.
        beyond_trained: Let prompt and new tokens be more than the model was trained for, which is
            refused otherwise. A greater capacity alone is not.
        seed: Of the draws; -1 chooses one at random.
        temperature: 0 is greedy.
        top_k: Draw from the `top_k` likeliest tokens; 0 or -1: from all.
        top_p: Draw from the likeliest tokens that together have this probability.
        min_p: Leave out tokens less likely than this share of the likeliest.
        repetition_penalty: Above 1, tokens of prompt and answer become less likely; 1 switches it
            off.
        presence_penalty: Subtracted from the logits of the tokens that the answer has; from -2 to
            2.
        frequency_penalty: Subtracted from a token's logit once for each time that the answer has
            it; from -2 to 2.
        logit_bias: Numbers from -100 to 100 by token id, which are added to the logits.
        grammar: What every text has to be: "json" (any JSON object), a JSON schema as a mapping or
            as "schema:{...}", "regex:..." or "lark:..." (docs/howto/serve.md). An end token is
            drawn only where the text may end. Needs the package llguidance. Each token is then a
            call of the device of its own.

    Raises:
        UserError: Prompts that are empty, too long or do not fit, options that do not exist or
        exclude each other."""
    pieces = stream(
        model, prompts, method, cache=cache, max_new_tokens=max_new_tokens, capacity=capacity, chunk=chunk,
        kernels=kernels, chat=chat, add_special_tokens=add_special_tokens, stride=stride, progress=progress, **options,
    )  # fmt: skip
    for _ in pieces:
        pass
    return pieces.result
