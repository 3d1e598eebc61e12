"""Prompts as token ids, and the lengths that they are padded to."""

import operator
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from jaxtyping import Int

from kvqjax._arguments import check_integer, named
from kvqjax._errors import UserError
from kvqjax.model.loading import Model
from kvqjax.step.doors import check_model

__all__ = ["Prompts", "bucket", "encode_prompts", "end_ids", "padded"]

Prompts = str | Iterable[Any]  # strings, lists of token ids, or lists of messages


def bucket(length: int) -> int:
    """Prompt lengths are padded to a power of two from 16 to 512, then to multiples of 512: few programs."""
    return max(16, 1 << (length - 1).bit_length()) if length <= 512 else -(-length // 512) * 512


def padded(prompts: Sequence[Sequence[int]], width: int) -> Int[np.ndarray, "B T"]:
    """Put prompts into rows of `width` token ids, filled up with 0."""
    out = np.zeros((len(prompts), width), np.int32)
    for row, tokens in zip(out, prompts, strict=True):
        row[: len(tokens)] = tokens
    return out


def end_ids(model: Model, given: Sequence[int] | None) -> Int[np.ndarray, " N"]:
    """Choose the tokens that end a row: the given ones, by default the model's. Raises UserError for a given one that
    the vocabulary has not."""
    if given is None:
        return np.asarray(model.config.eos_ids, np.int32).reshape(-1)
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise UserError(f"eos_ids={named(given)}; wanted a list of token ids, such as [2]")
    return np.asarray([check_integer("eos_ids", x, 0, model.config.vocab_size - 1) for x in given], np.int32)


def _chat_ids(model: Model, prompt) -> list[int]:
    if isinstance(prompt, Mapping):
        raise UserError("messages of one conversation are one prompt; wanted a list of such lists: [messages]")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if getattr(model.tokenizer, "chat_template", None) is None:
        raise UserError("this model's tokenizer has no chat template; leave chat off")
    text = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return model.tokenizer(text, add_special_tokens=False)["input_ids"]


def _prompt_ids(number: int, prompt) -> list[int]:
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        wanted = "a string or a list of token ids, and prompts a list of them"
        raise UserError(f"prompt {number} is of type {type(prompt).__name__}; wanted {wanted}") from None


def encode_prompts(model: Model, prompts: Prompts, chat: bool = False) -> list[list[int]]:
    """Token ids of each prompt: a string, a list of ids, or (with `chat`) a string or list of messages put through the
    tokenizer's chat template; a string alone is one prompt. Raises UserError on an empty prompt or an id outside the
    vocabulary."""
    check_model(model)
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(prompts, Iterable) or not (prompts := list(prompts)):
        raise UserError("no prompts; wanted a string, or a list of strings or of lists of token ids")
    encoded = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, Sized) and len(prompt) == 0:
            raise UserError(f"prompt {number} is empty")
        if chat:
            tokens = _chat_ids(model, prompt)
        else:
            tokens = model.encode(prompt) if isinstance(prompt, str) else _prompt_ids(number, prompt)
        if not tokens:
            raise UserError(f"prompt {number} is empty")
        if not 0 <= min(tokens) <= max(tokens) < model.config.vocab_size:
            raise UserError(f"prompt {number} has a token id outside 0 .. {model.config.vocab_size - 1}")
        encoded.append(tokens)
    return encoded
