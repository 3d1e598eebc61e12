"""Where prompts come from: the command itself, a file, standard input, or a file with a prompt a
line."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvqjax._errors import UserError
from kvqjax._files import decode_text, open_text
from kvqjax.data.records import Record, json_lines

STANDARD_INPUT = Path("-")
JSON_NAMES = (".jsonl", ".ndjson", ".json")
GIVE = 'give a prompt: kvqjax generate "Once upon a time", -f FILE for a file\'s text, or text piped in'


class Prompts(NamedTuple):
    """What is to be continued. texts: strings, or lists of messages; chat: they go through the chat
    template."""

    texts: list[Any]
    chat: bool


def _piped() -> str:
    """Read all of standard input; nothing where there is none."""
    if sys.stdin is None:
        return ""
    try:
        raw = sys.stdin.buffer.read()
    except OSError:  # closed, or a test's
        return ""
    return decode_text(raw, "standard input")


def _file_prompt(path: Path) -> str:
    """Read the prompt that a file holds, without the line end that editors and `echo` put at its
    end."""
    if path == STANDARD_INPUT:
        name = "standard input"
        if sys.stdin is not None and sys.stdin.isatty():
            print("type the prompt; Ctrl-D at the beginning of a line ends it", file=sys.stderr)
        text = _piped()
    else:
        name = str(path)
        # A name with spaces that does not exist was meant as the text.
        if not os.path.exists(path) and (" " in name or "\n" in name):
            raise UserError(f"-f {name[:40]!r}: no such file; -p takes the text itself")
        text = open_text(path, pipes=True)
    text = text.removesuffix("\n")
    if not text:
        raise UserError(f"{name}: empty; there is no prompt in it")
    return text


def _prompt_of(record: Record) -> Any:
    """Read the prompt of a record: a string, or a list of messages."""
    value = record.value
    if isinstance(value, dict):
        value = value.get("messages", value.get("prompt"))
    if not isinstance(value, str) and not _are_messages(value):
        expected = 'a JSON string, or an object with a "prompt" or with "messages" of a role and content each'
        raise UserError(f"{record.where}: {str(record.value)[:40]!r} is not {expected}")
    return value


def _are_messages(value: Any) -> bool:
    """Say whether a value of JSON is a list of messages, of at least one."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, dict) and "role" in item for item in value)


def _batch(path: Path) -> list[Any]:
    """Read the prompts of a file: one a line, or in JSON."""
    if any(name in JSON_NAMES for name in path.suffixes):
        prompts = [_prompt_of(record) for record in json_lines(path)]
    else:
        text = _piped() if path == STANDARD_INPUT else open_text(path, pipes=True)
        prompts = [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise UserError(f"{path}: empty; there is no prompt in it")
    return prompts


def read_prompts(
    words: Sequence[str],
    prompts: Sequence[str],
    files: Sequence[Path],
    batch: Path | None,
    chat: bool,
) -> Prompts:
    """Collect the prompts of a command.

    Args:
        words: what stands in the command without an option's name; one text is a prompt.
        prompts: texts.
        files: each holds one prompt; "-" is standard input.
        batch: a file with a prompt a line, or a .jsonl file with a string, or an object with
            "prompt" or "messages", a line; "-" is standard input, a prompt a line.
        chat: whether every prompt goes through the chat template. Messages always do.

    Returns:
        All prompts in this order. Where there is none, standard input is one, unless it is a
        terminal.

    Raises:
        UserError: for prompts that are empty or cannot be read, and where there is none at all.
    """
    if len(words) > 1:
        raise UserError(
            f"{len(words)} words without an option; put a prompt into quotation marks: {' '.join(words)!r}"
        )
    if [*files, batch].count(STANDARD_INPUT) > 1:
        raise UserError("standard input (-) can be read once")
    texts: list[Any] = [*words, *prompts]
    texts += [_file_prompt(file) for file in files]
    if batch:
        texts += _batch(batch)
    if not texts:
        text = ""
        # A terminal would wait for what nobody knows is wanted.
        if sys.stdin is not None and not sys.stdin.isatty():
            text = _piped().removesuffix("\n")
        if not text:
            raise UserError(GIVE)
        texts = [text]
    are_messages = [not isinstance(text, str) for text in texts]
    if any(are_messages) and not all(are_messages) and not chat:
        raise UserError(
            "some prompts are messages and others are text; with --chat all go through the chat template"
        )
    return Prompts(texts, chat or any(are_messages))
