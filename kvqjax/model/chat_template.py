"""Chat templates, rendered as transformers renders them, without importing it."""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvqjax._errors import UserError

__all__ = ["is_plain", "render"]

REASONING = ("reasoning_content", "thinking", "reasoning")  # the names of a message's reasoning, the usual one first


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks what the assistant wrote; the text is what stands inside."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a set of the class)

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str):
    raise jinja2.TemplateError(message)


def _json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes what HTML would misread.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    """Compile a template. A checkpoint's template is a stranger's code: it runs in Jinja's sandbox."""
    extensions = [_Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _json
    now = lambda format: datetime.now().strftime(format)  # noqa: E731
    helpers: dict[str, Any] = {"raise_exception": _raise, "strftime_now": now}
    environment.globals.update(helpers)
    return environment.from_string(source)


def is_plain(value: Any) -> bool:
    """Say whether a value is made of JSON's types alone, so that a template may see it."""
    if type(value) is dict:
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without its empty fields, its reasoning under each name that templates read."""
    fields = {key: value for key, value in message.items() if value is not None}
    reasoning = next((fields[key] for key in REASONING if key in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def render(source: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Render a chat template.

    Args:
        source: the template.
        messages: the conversation, of JSON's types alone (`is_plain`).
        variables: what else the template sees: `add_generation_prompt`, special tokens, its own options.

    Returns:
        The text of the conversation.

    Raises:
        UserError: with the template's own message where it refuses the conversation, or the place of its error.
    """
    context = {"tools": None, "documents": None} | variables
    try:
        return _compiled(source).render(messages=[_message(message) for message in messages], **context)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the chat template cannot be read: line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise UserError(f"the chat template does not take these messages: {error}") from error
