"""What an error becomes over HTTP: a status, and a body in the OpenAI protocol's words.

Clients look at the fields. litellm and langchain turn to another model where `code` is
"context_length_exceeded" and the message names the model's maximum context length.
"""

import json
from typing import Any, NamedTuple

from kvqjax._errors import TooLong, UserError
from kvqjax.serving.engine import EngineClosed, EngineFull, RequestFailed
from kvqjax.serving.protocol import CHAT_FIELDS, COMPLETION_FIELDS, NotFound, error_object

BUSY = 1  # seconds after which a client that was refused may ask again
# Option of `Engine.submit` -> field of a body, where that has another name.
FIELD_OF = {"max_new_tokens": "max_tokens", "scores": "logprobs"}


class Refused(Exception):
    """A request that is answered with an error of the protocol, not of the library."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


class Refusal(NamedTuple):
    """An answer that is an error."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


def _spelled(option: str, value: Any) -> str | None:
    """Write an option as a field, for `UserError.said`; None where no request has it."""
    field = FIELD_OF.get(option, option)
    if field not in CHAT_FIELDS | COMPLETION_FIELDS:
        return None
    if value is None:
        return field
    return f"{field}={json.dumps(value)}"


def refusal_of(error: Exception) -> Refusal:
    """Say an error over HTTP, in a stream and without one.

    Args:
        error: `Refused`, a UserError, which a client can mend, or any other, which is the server's
            fault.

    Returns:
        The answer: its status, its body and further headers.
    """
    message = f"the server failed: {type(error).__name__}"
    param = None
    if isinstance(error, UserError):
        message = error.said(_spelled)
        param = FIELD_OF.get(error.parameter or "", error.parameter)
    status = 400
    kind = "invalid_request_error"
    headers = {}
    if isinstance(error, Refused):
        status = error.status
        kind = error.kind
        message = str(error)
        param = error.param
    elif isinstance(error, NotFound):
        status = 404
    elif isinstance(error, EngineFull):
        status = 429
        kind = "rate_limit_error"
        headers = {"Retry-After": str(BUSY)}
    elif isinstance(error, EngineClosed):
        status = 503
        kind = "server_error"
    elif isinstance(error, RequestFailed) or not isinstance(error, UserError):
        status = 500
        kind = "server_error"
    code: int | str = status
    if isinstance(error, TooLong):
        message = f"This model's maximum context length is {error.most} tokens: {message}"
        code = "context_length_exceeded"
        # openai 3 shows programs the message alone, in which langchain looks for the code.
        message = f"{message} ({code})"
    return Refusal(status, error_object(message, kind, code, param), headers)
