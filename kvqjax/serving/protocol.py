"""The OpenAI protocol: what bodies of requests may say, and the objects that answers are.

Fields follow https://platform.openai.com/docs/api-reference (completions, chat). A field that would
change an answer and is not served is refused by name. A field that cannot change it is ignored.
"""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvqjax._arguments import MOST, named
from kvqjax._errors import UserError, suggest
from kvqjax.generation.bound import JSON, read_grammar
from kvqjax.generation.options import RANDOM
from kvqjax.generation.prompt_ids import with_text
from kvqjax.serving.request import MOST_LIKELIEST, Answered
from kvqjax.serving.token_texts import AnswerScores, Echoed
from kvqjax.serving.tool_forms import AnswerReader
from kvqjax.serving.tools import ToolUse, message_of, read_tools, with_calls

# Ignored: they say who asks, or ask for what happens in any case.
HARMLESS = {
    "metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user",
}  # fmt: skip
# Refused unless they have one of these values.
UNSERVED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "suffix": (None, ""),
    "truncate_prompt_tokens": (None,),
    "web_search_options": (None,),
}
# Fields that completions and chat share: options of `Engine.submit` of the same names, and their
# types in JSON.
NUMBER = (int, float)
SHARED: dict[str, type | tuple[type, ...]] = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": int,
    "min_p": NUMBER,
    "repetition_penalty": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "logit_bias": dict,
    "seed": int,
    "stop": (str, list),
    "stop_token_ids": list,
    "ignore_eos": bool,
    "min_tokens": int,
    "priority": int,
    "grammar": (str, dict),
}
TEMPERATURE = 1.0  # of a request that says none, as in the protocol
# Refused in `stream_options` unless false.
UNSERVED_OF_STREAMS = ("include_obfuscation", "continuous_usage_stats")
ANSWER_TOKENS = 16  # of a completion that says no number, as in the protocol
MOST_CHOICES = 128  # answers of one request
MOST_STOPS = 16  # stop strings of one request
MOST_SEED = 2**63  # seeds are whole numbers below that


class NotFound(UserError):
    """A request names a model that is not served here."""


def not_served(name: str, served: str) -> NotFound:
    """Make the error for a model's name that is not the served one's."""
    return NotFound(
        f"model {name!r} is not served here; this server has {served!r}", parameter="model"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestBody:
    """A checked body. Each of `prompts` (strings, token ids or conversations) is answered `choices`
    times, with `options` of `Engine.submit`. `new_tokens` None: as many as fit."""

    prompts: list[Any]
    choices: int
    new_tokens: int | None
    options: dict[str, Any]  # seed None: every answer draws with a seed of its own
    prompt_field: str  # what the body calls the prompt
    length_field: str  # and the number of new tokens
    stream: bool
    usage: bool  # a stream ends with what it used
    chat: bool = False
    echo: bool = False
    scores: bool = False
    end: str = "answer"  # where the text of a conversation ends, as in `conversation_ids`
    use: ToolUse = dataclasses.field(default_factory=ToolUse)
    tokens_by_number: bool = False  # tokens are named "token_id:123"


def _body(raw: bytes) -> dict[str, Any]:
    """Read a body as a JSON object. Raises UserError for anything else."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        # No UTF-8, no JSON, a number of more digits than Python reads, or lists in lists in lists.
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the body is no JSON: {reason}") from None
    if not isinstance(body, dict):
        raise UserError(f"the body is {json_kind(body)}; wanted an object")
    return body


def check_api_key(key: str | None) -> None:
    """Raise UserError for a key that no client can send in a header: it would refuse every request.
    None passes."""
    if key is None:
        return
    is_plain = key.isascii() and key.isprintable()
    has_blanks = key != key.strip()
    if not key or not is_plain or has_blanks:
        raise UserError(
            "the API key must be printable ASCII characters, without blanks at its ends"
        )


# Types that JSON gives -> how messages call them.
WORDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def json_kind(value: Any) -> str:
    """Say what a JSON value is."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        return "a number with a fraction"
    return WORDS[type(value)]


def _field(body: Mapping[str, Any], name: str, types: type | tuple[type, ...], default: Any) -> Any:
    """Read a field. null counts as a missing field."""
    value = body.get(name)
    if value is None:
        return default
    kinds = types if isinstance(types, tuple) else (types,)
    # In Python True is a number.
    is_number_by_chance = isinstance(value, bool) and bool not in kinds
    if isinstance(value, kinds) and not is_number_by_chance:
        return value
    # "a number" names whole ones too.
    named_kinds = [kind for kind in kinds if kind is not int or float not in kinds]
    words = " or ".join(WORDS[kind] for kind in named_kinds)
    raise UserError(f"{name} is {json_kind(value)}; wanted {words}", parameter=name)


def _count(
    body: Mapping[str, Any], name: str, default: int | None, least: int, most: int = MOST
) -> int | None:
    """Read a whole number from `least` to `most`."""
    value = _field(body, name, int, default)
    if value is not None and not least <= value <= most:
        raise UserError(f"{name}={value}; wanted {least} to {most}", parameter=name)
    return value


def _check_names(body: Mapping[str, Any], fields: set[str]) -> None:
    """Raise UserError for a field that does not exist, or that would change what is not served."""
    for name, value in body.items():
        if name in UNSERVED:
            if not _has_default(value, UNSERVED[name]):
                raise UserError(f"{name} is not served here; leave it out", parameter=name)
        elif name not in fields | HARMLESS:
            raise UserError(
                f"unknown field {name!r}{suggest(name, sorted(fields))}", parameter=name
            )


def _has_default(value: Any, defaults: tuple[Any, ...]) -> bool:
    """Say whether a value is one of the defaults, to which the field changes nothing."""
    if value == 0 and 0 in defaults:
        return True  # 0.0 too
    # In Python True equals 1.
    return any(value == default and type(value) is type(default) for default in defaults)


def _check_model(body: Mapping[str, Any], model: str) -> None:
    """Raise NotFound where another model is asked for."""
    model_name = _field(body, "model", str, model)
    if model_name != model:
        raise not_served(model_name, model)


def _common(body: Mapping[str, Any], model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what both protocols have.

    Returns:
        (fields of `RequestBody`, options of `Engine.submit`)."""
    _check_model(body, model)
    options: dict[str, Any] = {"temperature": TEMPERATURE, "seed": RANDOM, "stop": ()}
    for name, types in SHARED.items():
        value = _field(body, name, types, None)
        if value is not None:
            options[name] = _real(name, value) if types is NUMBER else value
    options["stop"] = _stops(options["stop"])
    form = _form(_field(body, "response_format", dict, None))
    if form is not None:
        if "grammar" in options:
            cause = "grammar and response_format exclude each other"
            raise UserError(cause, parameter="response_format")
        options["grammar"] = form
    if not all(type(token) is int for token in options.get("stop_token_ids", ())):
        raise UserError(
            "stop_token_ids mixes types; wanted a list of token ids", parameter="stop_token_ids"
        )
    for token, bias in options.get("logit_bias", {}).items():
        if type(bias) not in NUMBER:
            raise UserError(
                f"logit_bias of token {token[:20]} is no number", parameter="logit_bias"
            )
    if options["seed"] == RANDOM:
        options["seed"] = None  # every answer draws by a seed of its own
    elif not 0 <= options["seed"] < MOST_SEED:
        raise UserError(
            f"seed={options['seed']}; wanted -1 (a random one), or 0 or more, below 2**63",
            parameter="seed",
        )
    choices = _field(body, "n", int, 1)
    if not 1 <= choices <= MOST_CHOICES:
        raise UserError(f"n={choices}; wanted 1 to {MOST_CHOICES}", parameter="n")
    stream = _field(body, "stream", bool, False)
    fields = {
        "choices": choices,
        "stream": stream,
        "usage": _with_usage(body, stream),
        "tokens_by_number": _field(body, "return_tokens_as_token_ids", bool, False),
    }
    return fields, options


def _form(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | str | None:
    """Read `response_format` as a grammar; None where any text will do."""
    if response_format is None:
        return None
    name = "response_format"
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return JSON
    if kind != "json_schema":
        cause = f"{name} has the type {named(kind)}; known: text, json_object, json_schema"
        raise UserError(cause, parameter=name)
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise UserError(f"{name} lacks json_schema.schema, an object", parameter=name)
    try:
        read_grammar(schema)
    except UserError as error:
        raise UserError(error.cause, parameter=name) from None
    return schema


def _with_usage(body: Mapping[str, Any], stream: bool) -> bool:
    """Read from `stream_options` whether a stream ends with what it used."""
    name = "stream_options"
    options = _field(body, name, dict, None)
    if options is None:
        return False
    if not stream:
        raise UserError(
            f"{name} is for streams; leave it out, or write stream=true", parameter=name
        )
    for key in options:
        if key not in ("include_usage", *UNSERVED_OF_STREAMS):
            raise UserError(
                f"unknown field {key!r} of {name}; known: include_usage", parameter=name
            )
    values = {key: _field(options, key, bool, False) for key in options}
    for key in UNSERVED_OF_STREAMS:
        if values.get(key):
            raise UserError(f"{key} of {name} is not served here; leave it out", parameter=name)
    return values.get("include_usage", False)


def _real(name: str, value: int | float) -> float:
    """Turn a number into a float. JSON's whole numbers may be too large for one."""
    try:
        return float(value)
    except OverflowError:
        raise UserError(f"{name} is a number of {len(str(value))} digits", parameter=name) from None


def _stops(stop: str | Sequence[Any]) -> tuple[str, ...]:
    """Read the stop strings: one, or a list of them."""
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(texts) > MOST_STOPS:
        raise UserError(f"{len(texts)} stop strings; wanted {MOST_STOPS} at most", parameter="stop")
    if not all(isinstance(text, str) for text in texts):
        raise UserError("stop mixes types; wanted a string or a list of strings", parameter="stop")
    return texts


FIELDS = {
    *SHARED,
    "model",
    "n",
    "response_format",
    "return_tokens_as_token_ids",
    "stream",
    "stream_options",
}
COMPLETION_FIELDS = FIELDS | {"prompt", "max_tokens", "logprobs", "echo"}
CHAT_FIELDS = FIELDS | {
    "messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "add_generation_prompt",
    "continue_final_message", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs",
}  # fmt: skip


def read_completion(raw: bytes, model: str) -> RequestBody:
    """Read the body of /v1/completions.

    Args:
        model: the name of the model that is served.

    Raises:
        UserError: no JSON, a field that is unknown, not served or of another type.
        NotFound: another model is asked for.
    """
    body = _body(raw)
    _check_names(body, COMPLETION_FIELDS)
    choice_fields, options = _common(body, model)
    scores = _count(body, "logprobs", None, 0, MOST_LIKELIEST)
    echo = _field(body, "echo", bool, False)
    options |= {"scores": scores, "prompt_scores": echo}
    new = _count(body, "max_tokens", ANSWER_TOKENS, 0)
    prompts = _completion_prompts(body.get("prompt"))
    names = {"prompt_field": "prompt", "length_field": "max_tokens"}
    scored = scores is not None
    return RequestBody(
        prompts=prompts,
        new_tokens=new,
        options=options,
        echo=echo,
        scores=scored,
        **names,
        **choice_fields,
    )


def _completion_prompts(prompt: Any) -> list[Any]:
    """Give the prompts: one string, one list of ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    forms = "wanted a string, token ids, or a list of strings or of lists of token ids"
    if prompt is None:
        raise UserError(f"prompt is missing; {forms}", parameter="prompt")
    if not isinstance(prompt, list) or not prompt:
        kind = "an empty list" if prompt == [] else json_kind(prompt)
        raise UserError(f"prompt is {kind}; {forms}", parameter="prompt")
    if all(type(part) is int for part in prompt):
        return [prompt]
    if all(isinstance(part, str) for part in prompt):
        return prompt
    if all(_are_ids(part) for part in prompt):
        return prompt
    raise UserError(f"prompt mixes types; {forms}", parameter="prompt")


def _are_ids(part: Any) -> bool:
    """Say whether a part of a prompt is a list of token ids, of at least one."""
    return isinstance(part, list) and bool(part) and all(type(token) is int for token in part)


def read_chat(raw: bytes, model: str) -> RequestBody:
    """Read the body of /v1/chat/completions: as `read_completion`."""
    body = _body(raw)
    _check_names(body, CHAT_FIELDS)
    choice_fields, options = _common(body, model)
    scored = _field(body, "logprobs", bool, False)
    likeliest = _count(body, "top_logprobs", 0, 0, MOST_LIKELIEST)
    if likeliest and not scored:
        raise UserError("top_logprobs needs logprobs=true", parameter="top_logprobs")
    options |= {"scores": likeliest if scored else None}
    # The newer name counts where both are given.
    new = _count(body, "max_completion_tokens", _count(body, "max_tokens", None, 1), 1)
    length_field = "max_completion_tokens"
    if body.get(length_field) is None:
        length_field = "max_tokens"
    names = {"prompt_field": "messages", "length_field": length_field}
    choice_fields |= {"chat": True, "scores": scored, "end": _end_of_chat(body)}
    choice_fields["use"] = _tool_use(body)
    return RequestBody(
        prompts=[_messages(body)], new_tokens=new, options=options, **names, **choice_fields
    )


def _tool_use(body: Mapping[str, Any]) -> ToolUse:
    """Read what a request says of tools."""
    parallel = _field(body, "parallel_tool_calls", bool, True)
    variables = _field(body, "chat_template_kwargs", dict, {})
    tools = _field(body, "tools", list, [])
    use = read_tools(tools, body.get("tool_choice"), parallel, variables)
    if use.tools and body.get("grammar") is not None:
        cause = "grammar and tools exclude each other; response_format goes with tools"
        raise UserError(cause, parameter="grammar")
    return use


def _end_of_chat(body: Mapping[str, Any]) -> str:
    """Read where the conversation's text ends, in vLLM's words."""
    open_end = _field(body, "continue_final_message", bool, False)
    answer = _field(body, "add_generation_prompt", bool, not open_end)
    if open_end and answer:
        cause = "continue_final_message and add_generation_prompt exclude each other; leave one of them out"
        raise UserError(cause, parameter="continue_final_message")
    if open_end:
        return "open"
    return "answer" if answer else "message"


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Read a conversation. Raises UserError for what is none, and for content that is no text."""
    messages = _field(body, "messages", list, [])
    if not messages:
        raise UserError(
            "messages is missing; wanted a list of objects with role and content",
            parameter="messages",
        )
    return with_calls([_message(number, message) for number, message in enumerate(messages)])


def _message(number: int, message: Any) -> dict[str, Any]:
    """Give a message whose content is text: parts of text are joined."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(
            f"message {number} has no role; wanted an object with role and content",
            parameter="messages",
        )
    message = with_text(message)
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            fields = part if isinstance(part, dict) else {}
            kind = fields.get("type")
            if kind != "text" or not isinstance(fields.get("text"), str):
                description = f"of type {kind!r}" if isinstance(kind, str) else "of no type"
                raise UserError(
                    f"message {number} has content {description}; only text is served",
                    parameter="messages",
                )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise UserError(
            f"the content of message {number} is {json_kind(content)}; wanted text",
            parameter="messages",
        )
    return {**message, "content": content}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextBody:
    """A checked body of /tokenize: a text, or a conversation with or without what begins an
    answer."""

    prompt: str | None
    messages: list[dict[str, Any]] | None
    add_special_tokens: bool
    add_generation_prompt: bool
    use: ToolUse
    with_strings: bool  # the vocabulary's spellings of the tokens are asked for


def read_tokenize(raw: bytes, model: str) -> TextBody:
    """Read the body of /tokenize: as `read_completion`. Its fields are vLLM's; the protocol has no
    such request."""
    body = _body(raw)
    chat = body.get("messages") is not None
    of_chat = {"messages", "add_generation_prompt", "tools", "chat_template_kwargs"}
    kind = of_chat if chat else {"prompt"}
    _check_names(body, kind | {"model", "add_special_tokens", "return_token_strs"})
    _check_model(body, model)
    prompt = None
    messages = None
    if chat:
        messages = _messages(body)
    else:
        prompt = _field(body, "prompt", str, None)
        if prompt is None:
            raise UserError("prompt is missing; wanted a string, or messages", parameter="prompt")
    return TextBody(
        prompt=prompt,
        messages=messages,
        # A template writes its own special tokens.
        add_special_tokens=_field(body, "add_special_tokens", bool, not chat),
        add_generation_prompt=_field(body, "add_generation_prompt", bool, True),
        use=_tool_use(body),
        with_strings=_field(body, "return_token_strs", bool, False),
    )


def read_detokenize(raw: bytes, model: str) -> list[int]:
    """Read the token ids of the body of /detokenize: as `read_tokenize`."""
    body = _body(raw)
    _check_names(body, {"model", "tokens"})
    _check_model(body, model)
    tokens = _field(body, "tokens", list, None)
    if tokens is None or not all(type(token) is int for token in tokens):
        raise UserError("tokens are missing; wanted a list of token ids", parameter="tokens")
    return tokens


# --- Answers ---

# Of an answer that a shutdown cut, "stop" would say that it is complete. The protocol has no word
# for it, and typed clients take no further words; "length" is the one that says an answer is
# incomplete.
REASONS = {"eos": "stop", "stop": "stop", "length": "length", "aborted": "length"}


def _head(kind: str, number: str, model: str) -> dict[str, Any]:
    """Make the fields with which every answer begins."""
    return {"id": number, "object": kind, "created": int(time.time()), "model": model}


def usage_of(answers: Sequence[Answered], choices: int = 1) -> dict[str, Any]:
    """Count the tokens of answers. `choices` of them, one after the other, have the same prompt,
    which counts once."""
    firsts = answers[::choices]
    prompt = sum(answer.prompt_tokens for answer in firsts)
    new_tokens = sum(len(answer.tokens) for answer in answers)
    reused = {"cached_tokens": sum(answer.reused_tokens for answer in firsts)}
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": new_tokens,
        "total_tokens": prompt + new_tokens,
    }
    return {**counts, "prompt_tokens_details": reused}


def completion_object(
    number: str,
    model: str,
    body: RequestBody,
    answers: Sequence[Answered],
    prompts: Sequence[tuple[str, Sequence[int]]],
    tellers: Sequence[AnswerScores],
) -> dict[str, Any]:
    """Make the answer of /v1/completions. `prompts` are the text and the ids of every answer's
    prompt, `tellers` say what its tokens are."""
    choices = []
    parts = zip(answers, prompts, tellers, strict=True)
    for index, (answer, (prompt, ids), teller) in enumerate(parts):
        text = answer.text
        echoed = None
        if body.echo:
            text = prompt + text
            echoed = Echoed(prompt, ids, answer.prompt_scores)
        choices.append(
            {
                "index": index,
                "text": text,
                "logprobs": teller.completion(answer.scores, echoed) if body.scores else None,
                "finish_reason": REASONS[answer.finish_reason],
            }
        )
    return _head("text_completion", number, model) | {
        "choices": choices,
        "usage": usage_of(answers, body.choices),
    }


def completion_chunk(
    number: str,
    model: str,
    index: int,
    text: str,
    reason: str | None = None,
    scores: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Make a piece of a streamed completion. `scores` None: they were not asked for."""
    choice = {
        "index": index,
        "text": text,
        "logprobs": scores,
        "finish_reason": None if reason is None else REASONS[reason],
    }
    return _head("text_completion", number, model) | {"choices": [choice]}


def chat_object(
    number: str,
    model: str,
    body: RequestBody,
    answers: Sequence[Answered],
    tellers: Sequence[AnswerScores],
    readers: Sequence[AnswerReader],
) -> dict[str, Any]:
    """Make the answer of /v1/chat/completions. `tellers` say what the tokens of every answer are,
    `readers` take its text apart."""
    choices = []
    for index, (answer, teller, reader) in enumerate(zip(answers, tellers, readers, strict=True)):
        choices.append(
            {
                "index": index,
                "message": message_of(reader, answer.text),
                "logprobs": teller.chat(answer.scores) if body.scores else None,
                "finish_reason": chat_reason(reader, answer.finish_reason),
            }
        )
    return _head("chat.completion", number, model) | {
        "choices": choices,
        "usage": usage_of(answers, body.choices),
    }


def chat_reason(reader: AnswerReader, reason: str) -> str:
    """Say why a chat answer ended that a reader has taken apart."""
    word = REASONS[reason]
    if reader.calls and word == "stop":
        return "tool_calls"
    return word


def chat_chunk(
    number: str,
    model: str,
    index: int,
    delta: dict[str, Any],
    reason: str | None = None,
    scores: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Make a piece of a streamed chat answer. `reason` is what `chat_reason` gives. `scores` None:
    they were not asked for."""
    choice = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": reason}
    return _head("chat.completion.chunk", number, model) | {"choices": [choice]}


def models_object(model: str, created: int, capacity: int) -> dict[str, Any]:
    """List the one model that is served, and how many tokens a request may have."""
    entry = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "kvqjax",
        "max_model_len": capacity,
    }
    return {"object": "list", "data": [entry]}


def error_object(
    message: str, kind: str, code: int | str, param: str | None = None
) -> dict[str, Any]:
    """Make the body of a refusal. `param` is the field that is wrong, where it is one."""
    line = " ".join(message.split())
    return {"error": {"message": line, "type": kind, "param": param, "code": code}}
