"""Prompts as token ids, and the lengths that they are padded to."""

import operator
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from jaxtyping import Int

from kvqjax._arguments import MOST, check_integer, named
from kvqjax._errors import TooLong, UserError
from kvqjax.model.loading import Model
from kvqjax.model.rope import check_length, longest_text
from kvqjax.model.tokenizer_calls import rendered
from kvqjax.step.checks import check_model

# New tokens. Fewer get the same capacity: it is a multiple of 256, so that it is often no larger.
LEAST_NEW = 128
# Tokens of a prompt. A row of padding that is longer costs more than another program may save.
SHORT = 512

NO_TEMPLATE = "this model's tokenizer has no chat template"
PLAIN_CHAT = f"{NO_TEMPLATE}: turns are plain text, one after the other"

Prompts = str | Iterable[Any]  # strings, lists of token ids, or lists of messages


def too_long(
    prompt: int, new: int, most: int, cause: str, hint: str = "", **options: Any
) -> TooLong:
    """Make the error for a prompt and new tokens that are more than `most` together."""
    cause = f"a prompt of {prompt} tokens and {new} new ones {cause}"
    return TooLong(prompt, most, cause, hint, **options)


def bucket(length: int) -> int:
    """Return the length that a prompt is padded to, so that few programs serve all prompts: a power
    of two from 16 to 512, then a multiple of 512."""
    if length <= 512:
        return max(16, 1 << (length - 1).bit_length())
    return -(-length // 512) * 512


def capacity_for(
    model: Model, prompts: Sequence[Sequence[int]], new: int, capacity: int | None
) -> int:
    """Choose the tokens of a row for these prompts and `new` tokens after them, where no capacity
    is given. It is what is needed, rounded up as a function of the buckets of both, so that what
    shares a bucket shares its programs. Raises UserError where a given capacity is too small, and
    where RoPE has no frequencies for as many tokens."""
    longest = max(len(prompt) for prompt in prompts)
    if capacity is not None:
        if longest + new > capacity:
            raise too_long(longest, new, capacity, f"do not fit a capacity of {capacity}")
        return capacity
    check_length(model.config, longest + new)
    limit = longest_text(model.config)
    needed = bucket(longest) + bucket(max(new, LEAST_NEW))
    rounded = -(-needed // 256) * 256
    return rounded if limit is None else min(rounded, limit)


def padded_rows(model: Model, prompts: Sequence[Sequence[int]], capacity: int) -> int:
    """Choose how many rows a new cache for these prompts has. Up to 8 short prompts share the
    programs of the next power of two: a row without a prompt is done from the start. It costs what
    its share of the cache and of the prompts' computation does, so that long prompts, large caches
    and meshes get no such rows."""
    rows = len(prompts)
    longest = max(len(prompt) for prompt in prompts)
    is_cheap = rows < 8 and longest <= SHORT and capacity <= 8 * SHORT
    if is_cheap and model.rules is None:
        return 1 << (rows - 1).bit_length()
    return rows


def padded(prompts: Sequence[Sequence[int]], width: int) -> Int[np.ndarray, "B T"]:
    """Put prompts into rows of `width` token ids, filled up with 0."""
    out = np.zeros((len(prompts), width), np.int32)
    for row, tokens in zip(out, prompts, strict=True):
        row[: len(tokens)] = tokens
    return out


def token_ids(option: str, ids: Any) -> tuple[int, ...]:
    """Read the token ids of an option. Raises UserError for what is no list of whole numbers."""
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise UserError(f"{option}={named(ids)}; wanted a list of token ids, such as [2]")
    return tuple(check_integer(option, token, -MOST) for token in ids)


def end_ids(model: Model, ids: Any, option: str = "eos_ids") -> Int[np.ndarray, " N"]:
    """Choose the tokens that end a row: `ids`, by default the model's. Raises UserError for what is
    no id of the model: no row would ever end by it."""
    if ids is None:
        return np.asarray(model.config.eos_ids, np.int32).reshape(-1)
    last = model.config.vocab_size - 1
    checked = [check_integer(option, token, 0, last) for token in token_ids(option, ids)]
    return np.asarray(checked, np.int32)


def require_trained(model: Model, lengths: Sequence[int], new: int, beyond_trained: bool) -> None:
    """Raise UserError where texts of these lengths and `new` more tokens go beyond what the model
    was trained for, unless that is asked for: its text falls apart there, and nothing else would
    say so."""
    longest = max(lengths)
    most = model.config.trained_length
    if most is not None and longest + new > most and not beyond_trained:
        cause = f"go beyond the {most} that this model was trained for"
        raise too_long(longest, new, most, cause, "{beyond_trained} allows it", beyond_trained=True)


def room_of(model: Model, capacity: int | None, beyond_trained: bool) -> int | None:
    """Return the most tokens that a prompt may have; None: any number. `capacity` and
    `beyond_trained` are those of `generate`."""
    check_model(model)
    trained = None if beyond_trained else model.config.trained_length
    limits = [capacity, trained, longest_text(model.config)]
    return min((limit for limit in limits if limit is not None), default=None)


def with_text(message: Any) -> Any:
    """Add an empty text to an assistant's message without content, as calls of tools have it:
    templates join texts."""
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return message
    if message.get("content") is not None:
        return message
    return {**message, "content": ""}


def has_chat_template(model: Model) -> bool:
    """Say whether a conversation can be put through a template; without one it is `plain_text`."""
    return getattr(model.tokenizer, "chat_template", None) is not None


def plain_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Write a conversation without a template: each message on a new line. An answer follows its
    question at once, since the model went on from there."""
    text = ""
    for number, message in enumerate(map(with_text, messages)):
        if number and message["role"] != "assistant":
            text += "\n"
        text += str(message["content"])
    return text


def chat_text(
    model: Model, messages: Sequence[Mapping[str, Any]], end: str = "answer", **variables: Any
) -> str:
    """Put a conversation through the tokenizer's chat template.

    Args:
        model: that has the template.
        messages: of the conversation.
        end: where the text ends: "answer" where a new answer begins, "message" behind the last
            message, "open" within it, so that an answer goes on with its words.
        variables: the template's own, such as tools and enable_thinking.

    Raises:
        UserError: there is no template, or it refuses these messages.
    """
    if not has_chat_template(model):
        raise UserError(NO_TEMPLATE, "leave {chat} out", chat=True)
    conversation = [with_text(message) for message in messages]
    options = {"add_generation_prompt": end == "answer", **variables}
    text = rendered(model.tokenizer, conversation, **options)
    if end == "open":
        return _open_end(text, messages[-1])
    return text


def _open_end(text: str, message: Mapping[str, Any]) -> str:
    """Cut a conversation's text behind the words of its last message."""
    words = str(message.get("content") or "").strip()
    place = text.rfind(words)
    if not words or place < 0:
        raise UserError(
            "an answer cannot go on with the last message: the chat template leaves its words out"
        )
    # Templates may take blanks off the end of a message.
    with_blanks = str(message["content"]).lstrip()
    if text.startswith(with_blanks, place):
        words = with_blanks
    return text[: place + len(words)]


def conversation_ids(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    end: str = "answer",
    most: int | None = None,
    **variables: Any,
) -> list[int]:
    """Encode a conversation, also for a model without a chat template.

    Args:
        model: that answers.
        messages: of the conversation.
        end: where its text ends, as in `chat_text`. Plain text ends with the last message in any
            case.
        most: as in `Model.encode`.
        variables: as in `chat_text`. Plain text has none.

    Raises:
        UserError: the template refuses these messages, or they are empty.
    """
    if has_chat_template(model):
        text = chat_text(model, messages, end, **variables)
        ids = model.encode(text, add_special_tokens=False, most=most)
    else:
        ids = model.encode(plain_text(messages), most=most)
    check_vocabulary(model, 0, ids)
    return ids


def _chat_ids(model: Model, prompt, most: int | None) -> list[int]:
    if isinstance(prompt, Mapping):
        raise UserError(
            "messages of one conversation are one prompt; wanted a list of such lists: [messages]"
        )
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return model.encode(chat_text(model, messages), add_special_tokens=False, most=most)


def _prompt_ids(number: int, prompt) -> list[int]:
    if isinstance(prompt, bytes | bytearray):  # whose bytes would be ids
        raise UserError(f"prompt {number} is of type {type(prompt).__name__}; decode it first")
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        expected = "a string or a list of token ids, and prompts a list of them"
        raise UserError(
            f"prompt {number} is of type {type(prompt).__name__}; wanted {expected}"
        ) from None


def continued_ids(model: Model, text: str, most: int | None = None) -> list[int]:
    """Encode a text that goes on from another one: without the tokens that begin a text, and
    without the space that tokenizers of the SentencePiece kind put before a text's first word.
    `most` as in `Model.encode`."""
    anchor = "\n"
    before = model.encode(anchor, add_special_tokens=False)
    with_anchor = None if most is None else most + 1
    joined = model.encode(anchor + text, add_special_tokens=False, most=with_anchor)
    if joined[: len(before)] == before:
        return joined[len(before) :]
    # The anchor and the text's beginning became one token: the tokenizer is of another kind, which
    # adds no space.
    return model.encode(text, add_special_tokens=False)


def _text_ids(
    model: Model, text: str, prefix: int, special: bool | None, most: int | None
) -> list[int]:
    if special is None:
        special = not prefix
    if prefix and not special:
        return continued_ids(model, text, most)
    return model.encode(text, special, most)


def check_vocabulary(model: Model, number: int, tokens: Sequence[int]) -> None:
    """Raise UserError for a prompt without tokens, or with an id that the model lacks."""
    if not tokens:
        raise UserError(f"prompt {number} is empty")
    if not 0 <= min(tokens) <= max(tokens) < model.config.vocab_size:
        raise UserError(
            f"prompt {number} has a token id outside 0 .. {model.config.vocab_size - 1}"
        )


def encode_prompts(
    model: Model,
    prompts: Prompts,
    chat: bool = False,
    *,
    held: Sequence[int] | Int[np.ndarray, " B"] = (),
    add_special_tokens: bool | None = None,
    most: int | None = None,
) -> list[list[int]]:
    """Encode each prompt: a string, a list of ids, or (with `chat`) a string or list of
    messages put through the tokenizer's chat template; a string alone is one prompt. `held[b]`
    tokens come before prompt b (none by default): a string then goes on from them.
    `add_special_tokens` says whether strings get the tokens that begin a text; None: those do that
    begin one. `most` is as in `Model.encode`: tokens that a prompt may have. Raises UserError on an
    empty prompt or an id outside the vocabulary."""
    check_model(model)
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, Mapping):  # its keys would be prompts
        hint = "; pass prompts['input_ids']" if "input_ids" in prompts else ""
        raise UserError(
            f"prompts are of type {type(prompts).__name__}; wanted a string or a list of prompts{hint}"
        )
    if not isinstance(prompts, Iterable) or not (prompts := list(prompts)):
        raise UserError(
            "no prompts; wanted a string, or a list of strings or of lists of token ids"
        )
    encoded = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, Sized) and len(prompt) == 0:
            raise UserError(f"prompt {number} is empty")
        if chat:
            tokens = _chat_ids(model, prompt, most)
        elif isinstance(prompt, str):
            prefix = int(held[number]) if number < len(held) else 0
            tokens = _text_ids(model, prompt, prefix, add_special_tokens, most)
        else:
            tokens = _prompt_ids(number, prompt)
        check_vocabulary(model, number, tokens)
        encoded.append(tokens)
    return encoded
