"""Calls of tokenizers and of chat templates. Both are programs of others: whatever they raise
becomes one line."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvqjax._errors import UserError

LONGEST = 200  # characters of another program's message that are shown


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:LONGEST] or type(error).__name__


def encoded(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text. Raises UserError for what the tokenizer does not encode."""
    try:
        return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    except UserError:
        raise
    except Exception as error:  # `tokenizers` raises Exception itself
        raise UserError(f"the tokenizer does not encode this text: {_line(error)}") from error


def decoded(tokenizer: Any, ids: Sequence[int], skip_special_tokens: bool, **options: Any) -> str:
    """The text of token ids. Raises UserError for what the tokenizer does not decode."""
    try:
        return tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, **options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"the tokenizer does not decode these tokens: {_line(error)}") from error


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Put a conversation through a chat template.

    Args:
        tokenizer: one with a chat template.
        messages: the conversation.
        options: of `apply_chat_template`.

    Raises:
        UserError: the template refuses the messages or fails, or there are several and none is the
            default.
    """
    template = tokenizer.chat_template
    if isinstance(template, Mapping) and "default" not in template:
        names = ", ".join(map(str, template))[:LONGEST]
        raise UserError(
            f"the tokenizer has several chat templates ({names}), and none has the name default"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except UserError:
        raise
    except (
        Exception
    ) as error:  # of jinja, of transformers, and whatever the template's expressions raise
        raise UserError(f"the chat template refuses these messages: {_line(error)}") from error
