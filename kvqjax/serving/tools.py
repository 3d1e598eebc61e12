"""Tools in the OpenAI protocol: what requests say of them, how a model reads of them, and the calls
and thoughts that a client gets.

The model's chat template says in which form it writes calls (`kvqjax.serving.tool_forms`). A template
of no known form gets tools and calls as text, in the form of Hermes, so that every chat model can be
asked.
"""

import dataclasses
import hashlib
import json
import re
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from kvqjax._arguments import named
from kvqjax._errors import TooLong, UserError
from kvqjax.generation.bound import JSON, SCHEMA, check_grammar, json_part, read_grammar
from kvqjax.generation.conversation import KEPT_FIRST
from kvqjax.generation.prompt_ids import chat_text, conversation_ids, has_chat_template
from kvqjax.generation.text import agreeing
from kvqjax.model.loading import Model
from kvqjax.model.tokenizer_calls import decoded
from kvqjax.serving.tool_forms import (
    HERMES,
    MISTRAL,
    MOST_CALLS,
    AnswerReader,
    Form,
    Part,
    calls_grammar,
    form_of,
    marks_of,
    special_marks,
    thoughts_of,
)

MOST_TOOLS = 128  # of a request, as in the protocol
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # what the protocol allows
CHOICES = ("none", "auto", "required")
ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # characters of a call's id: templates of Mistral take no other length
# Variables of a template that a request says elsewhere, and options of the function that renders
# it.
RESERVED = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents",
    "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip
# Of a template that takes arguments of calls as the protocol has them.
STRINGS = re.compile(r"arguments\s+is\s+(not\s+)?string")
OTHER_TURNS = ("ZQX", "xqz")  # first turns; no conversation begins as both do
TOOLS_TEXT = """# Tools

These functions can be called. Every line between the tags describes one, with a JSON schema of its arguments:
<tools>
{tools}
</tools>

A call is JSON with the function's name and its arguments, between these tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


# --- Requests ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolUse:
    """What a request says of tools: `tools` are those that may be called, as templates read them.
    `must_call`: the answer is calls. `named_tool`: one call of this tool. `variables` are the template's
    own."""

    tools: Sequence[dict[str, Any]] = ()
    must_call: bool = False
    named_tool: str | None = None
    parallel: bool = True
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def strict_tools(self) -> set[str]:
        """Names of the tools whose calls are bound in any case."""
        names = set()
        for tool in self.tools:
            if tool["function"].get("strict"):
                names.add(tool["function"]["name"])
        return names

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Schemas of the tools' arguments, by name."""
        functions = [tool["function"] for tool in self.tools]
        return {function["name"]: function["parameters"] for function in functions}


def read_tools(
    tools: Sequence[Any], choice: Any, parallel: bool, variables: Mapping[str, Any]
) -> ToolUse:
    """Read the fields tools, tool_choice, parallel_tool_calls and chat_template_kwargs.

    Raises:
        UserError: names, schemas or a choice that cannot be.
    """
    reserved = sorted(RESERVED & variables.keys())
    if reserved:
        cause = f"chat_template_kwargs may not have {reserved[0]!r}"
        raise UserError(cause, parameter="chat_template_kwargs")
    if len(tools) > MOST_TOOLS:
        raise _refused(f"{len(tools)} tools; at most {MOST_TOOLS} are taken")
    checked = [_tool(number, tool) for number, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in checked]
    for name in names:
        if names.count(name) > 1:
            raise _refused(f"two tools have the name {name!r}")
    target = None
    if isinstance(choice, dict) and choice.get("type") == "function":
        target = _chosen(choice)
    elif choice is not None and choice not in CHOICES:
        wanted = 'none, auto, required or {"type": "function", "function": {"name": ...}}'
        raise _refused(f"tool_choice={named(choice)}; wanted {wanted}", "tool_choice")
    must_call = target is not None or choice == "required"
    if must_call and not names:
        raise _refused("tool_choice needs tools", "tool_choice")
    if target is not None and target not in names:
        cause = f"tool_choice names {target[:80]!r}, which is none of the tools"
        raise _refused(cause, "tool_choice")
    return ToolUse(
        tools=() if choice == "none" else tuple(checked),
        must_call=must_call,
        named_tool=target,
        parallel=parallel,
        variables=variables,
    )


def _refused(cause: str, parameter: str = "tools") -> UserError:
    return UserError(cause, parameter=parameter)


def _chosen(choice: Mapping[str, Any]) -> str:
    """Read the name of the one tool that has to be called."""
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _refused("tool_choice lacks function.name, a string", "tool_choice")
    return name


def _tool(number: int, tool: Any) -> dict[str, Any]:
    """Check a tool, and add the fields that templates read."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise _refused(f'tool {number} is no {{"type": "function", "function": {{...}}}}')
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        allowed = "1 to 64 letters, digits, _ or -"
        raise _refused(f"tool {number} has the name {named(name)}; wanted {allowed}")
    description = function.get("description") or ""
    if not isinstance(description, str):
        raise _refused(f"the description of tool {name!r} is no text")
    if not isinstance(function.get("strict"), bool | None):
        raise _refused(f"strict of tool {name!r} is neither true nor false")
    schema = function.get("parameters")
    if schema is None:
        schema = {"type": "object", "properties": {}}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise _refused(f"the parameters of tool {name!r} are no JSON schema of an object")
    try:
        read_grammar(schema)
    except UserError as error:
        raise _refused(f"tool {name!r}: {error.cause}") from None
    function = {**function, "name": name, "description": description, "parameters": schema}
    return {**tool, "function": function}


def with_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check the calls of a conversation and the answers to them.

    Args:
        messages: with text as content.

    Returns:
        The messages. The arguments of calls are objects; an answer has the name of its tool.

    Raises:
        UserError: a call without id, name or arguments, or an answer to none of the calls before.
    """
    names: dict[str, str] = {}  # of the calls so far
    conversation = []
    for number, message in enumerate(messages):
        message = dict(message)
        if message.get("function_call") is not None:
            cause = f"function_call of message {number} is not served here; tool_calls are"
            raise _refused(cause, "messages")
        calls = message.pop("tool_calls", None)
        if calls is not None and not isinstance(calls, list):
            raise _refused(f"the tool_calls of message {number} are no list", "messages")
        if calls:
            message["tool_calls"] = [_earlier_call(number, call) for call in calls]
            for call in message["tool_calls"]:
                names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool":
            target = message.get("tool_call_id")
            if not isinstance(target, str):
                raise _refused(f"message {number} lacks tool_call_id, a string", "messages")
            if target not in names:
                cause = f"message {number} answers the call {target[:80]!r}, which no message before has"
                raise _refused(cause, "messages")
            message["name"] = message.get("name") or names[target]
        conversation.append(message)
    return conversation


def _earlier_call(number: int, call: Any) -> dict[str, Any]:
    """Check a call of message `number`. Its arguments, a string in the protocol, become an
    object."""
    fields = call if isinstance(call, dict) else {}
    function = fields.get("function")
    if not isinstance(function, dict):
        function = {}
    target = fields.get("id")
    name = function.get("name")
    if not isinstance(target, str) or not isinstance(name, str):
        cause = f"a call of message {number} lacks id or function.name, a string each"
        raise _refused(cause, "messages")
    try:
        arguments = _object(function.get("arguments") or "{}")
    except (TypeError, ValueError, RecursionError):
        cause = f"the arguments of call {target[:80]!r} are no JSON object in a string"
        raise _refused(cause, "messages") from None
    function = {"name": name, "arguments": arguments}
    return {"id": target, "type": "function", "function": function}


def _object(text: str) -> dict[str, Any]:
    """Read a JSON object. Raises ValueError for anything else."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


# --- What the model reads ---


def _template(model: Model, use: ToolUse) -> str:
    """Return the chat template that renders a conversation; "" where there is none."""
    if not model.has_tokenizer or not has_chat_template(model):
        return ""
    try:
        return model.tokenizer.get_chat_template(tools=list(use.tools) or None)
    except (AttributeError, ValueError):  # a tokenizer in Python; several templates, none for this
        return ""


def chat_ids(
    model: Model, messages: Sequence[dict[str, Any]], use: ToolUse, end: str, most: int | None
) -> list[int]:
    """Encode a conversation in which tools may be called.

    Args:
        model: that answers.
        messages: what `with_calls` gives.
        use: what the request says of tools.
        end: as in `conversation_ids`.
        most: as in `Model.encode`.

    Returns:
        The token ids.

    Raises:
        UserError: the template refuses these messages, or they do not fit.
    """

    def encoded(conversation: Sequence[dict[str, Any]], variables: Mapping[str, Any]) -> list[int]:
        return conversation_ids(model, conversation, end, most, **variables)

    return _in_first_way(model, messages, use, encoded)


def tools_text(
    model: Model, messages: Sequence[dict[str, Any]], use: ToolUse, end: str = "answer"
) -> str:
    """Write the text whose ids `chat_ids` returns, of a model with a chat template."""

    def written(conversation: Sequence[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        return chat_text(model, conversation, end, **variables)

    return _in_first_way(model, messages, use, written)


Rendered = TypeVar("Rendered")


def _in_first_way(
    model: Model,
    messages: Sequence[dict[str, Any]],
    use: ToolUse,
    render: Callable[[list[dict[str, Any]], Mapping[str, Any]], Rendered],
) -> Rendered:
    """Render a conversation in the first way that the template takes."""
    refusal: UserError | None = None
    try:
        for conversation, variables in _ways(model, messages, use):
            try:
                return render(conversation, {**use.variables, **variables})
            except TooLong:
                raise
            except UserError as error:
                refusal = refusal or error
    except RecursionError:
        raise UserError("the messages or tools are nested too deeply") from None
    raise refusal or UserError("no messages")


def ids_before_turns(
    model: Model, messages: Sequence[dict[str, Any]], use: ToolUse, end: str, ids: Sequence[int]
) -> int:
    """Count the first ids of a conversation that come before its first turn: the system message,
    and tools where the template writes them there.

    Args:
        model, messages, use, end: as in `chat_ids`.
        ids: of the conversation.

    Returns:
        How many ids it has in common with conversations whose first turns begin otherwise; the
        first ones of a text in any case, on which attention rests (`KEPT_FIRST`).
    """
    has_system = messages[:1] and messages[0]["role"] == "system"
    system = messages[:1] if has_system else []
    common = len(ids)
    for words in OTHER_TURNS:
        other = [*system, {"role": "user", "content": words}]
        other_ids = chat_ids(model, other, use, end, None)
        common = min(common, agreeing(ids, other_ids))
    return max(KEPT_FIRST, common)


def _ways(
    model: Model, messages: Sequence[dict[str, Any]], use: ToolUse
) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Yield the ways in which a template may take a conversation, the best one first: messages,
    and variables of the template."""
    with_history = any("tool_calls" in message or message["role"] == "tool" for message in messages)
    if not use.tools and not with_history:
        yield list(messages), {}
        return
    template = _template(model, use)
    form = form_of(template)
    if form is not None:
        variables = {"tools": list(use.tools)} if use.tools else {}
        objects = list(messages)
        if form.begin == MISTRAL.begin:
            objects = [_with_short_ids(message) for message in messages]
        strings = [_with_strings(message) for message in objects]
        # Templates that take both do not always write an object well.
        takes_strings = STRINGS.search(template)
        yield (strings if takes_strings else objects), variables
        yield (objects if takes_strings else strings), variables
        return
    conversation = _as_text(messages)
    if not use.tools:
        yield conversation, {}
        return
    lines = [_dumped(tool) for tool in use.tools]
    text = TOOLS_TEXT.format(tools="\n".join(lines))
    for role in ("system", "user"):  # some templates refuse system messages
        yield _with_text(conversation, role, text), {}


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _changed_calls(message: dict[str, Any], change: Callable[[dict], dict]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if calls is None:
        return message
    return {**message, "tool_calls": [change(call) for call in calls]}


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Replace ids of other servers by ids of the length that Mistral's templates want."""

    def short(given: str) -> str:
        if len(given) == ID_LENGTH and given.isalnum():
            return given
        # A hash, so that a call and the answer to it keep the same id.
        return hashlib.sha256(given.encode()).hexdigest()[:ID_LENGTH]

    def shortened(call: dict[str, Any]) -> dict[str, Any]:
        return {**call, "id": short(call["id"])}

    if message["role"] == "tool":
        message = {**message, "tool_call_id": short(message["tool_call_id"])}
    return _changed_calls(message, shortened)


def _with_strings(message: dict[str, Any]) -> dict[str, Any]:
    """Write the arguments of calls as strings."""

    def written(call: dict[str, Any]) -> dict[str, Any]:
        arguments = _dumped(call["function"]["arguments"])
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return _changed_calls(message, written)


def _as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write calls, and the answers to them, as texts of the assistant and of the user."""
    conversation: list[dict[str, Any]] = []
    joins_before = False  # the message before is a user's, and begins with a tool's answer
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        content = message["content"]
        if calls:
            parts = [f"<tool_call>\n{_dumped(call)}\n</tool_call>" for call in calls]
            if content:
                parts.insert(0, content)
            content = "\n".join(parts)
        role = message["role"]
        is_answer = role == "tool"
        if is_answer:
            role = "user"
            content = f"<tool_response>\n{content}\n</tool_response>"
        # Many templates refuse two messages of one role.
        joins_before = joins_before and role == "user"
        if joins_before:
            content = f"{conversation.pop()['content']}\n{content}"
        kept = {key: value for key, value in message.items() if not key.startswith("tool_call")}
        conversation.append({**kept, "role": role, "content": content})
        joins_before = joins_before or is_answer
    return conversation


def _with_text(messages: Sequence[dict[str, Any]], role: str, text: str) -> list[dict[str, Any]]:
    """Put a text into the first message of a role, by default a new one at the beginning."""
    roles = [message["role"] for message in messages]
    if role not in roles:
        return [{"role": role, "content": text}, *messages]
    first = roles.index(role)
    content = messages[first]["content"]
    # The tools come behind the words of a system message, and before a user's question.
    joined = f"{content}\n\n{text}" if role == "system" else f"{text}\n\n{content}"
    changed = {**messages[first], "content": joined.strip()}
    return [*messages[:first], changed, *messages[first + 1 :]]


# --- What the model answers ---

TAIL = 8  # tokens at a prompt's end in which a thought may begin


class _Ways(NamedTuple):
    """What an answer may have: calls in a form, and thoughts between two marks, of which the prompt
    may have begun one; `special` are marks that are special tokens."""

    form: Form | None
    thoughts: tuple[str, str] | None
    in_thought: bool
    special: Mapping[str, int]


def _ways_of(model: Model, use: ToolUse, bound: bool, ids: Sequence[int]) -> _Ways:
    """Find what an answer may have. `bound`: the client asks for a grammar."""
    template = _template(model, use)
    form = None
    if use.tools:
        form = form_of(template) or HERMES
    thoughts = None
    in_thought = False
    # A form that a client asks for binds the first token already: no thought may come before.
    if form is not None or not bound:
        thoughts = thoughts_of(template)
    if thoughts is not None:
        tail = decoded(model.tokenizer, ids[-TAIL:], False)
        in_thought = tail.rstrip().endswith(thoughts[0])
    marks = marks_of(form, thoughts)
    special = special_marks(model.tokenizer, len(model.tokenizer), marks) if marks else {}
    return _Ways(form, thoughts, in_thought, special)


def answer_options(
    model: Model, use: ToolUse, options: Mapping[str, Any], ids: Sequence[int]
) -> dict[str, Any]:
    """Choose how an answer is made in which tools may be called.

    Args:
        model: that answers.
        use: what the request says of tools.
        options: of `Engine.submit`, as the request says them.
        ids: the prompt.

    Returns:
        Options of `Engine.submit` that come in their place.

    Raises:
        UserError: calls cannot be bound by a tool's schema.
    """
    grammar = options.get("grammar")
    ways = _ways_of(model, use, grammar is not None, ids)
    engine_options: dict[str, Any] = {"shown_tokens": sorted(ways.special.values())}
    is_bound = use.must_call or use.strict_tools or grammar is not None
    if ways.form is None or not is_bound:
        return engine_options
    schemas = use.schemas
    alternative = None  # to calls, as `calls_grammar` takes it
    if use.named_tool is not None:
        schemas = {use.named_tool: schemas[use.named_tool]}
    elif not use.must_call and grammar is not None:
        alternative = json_part({"type": "object"} if grammar == JSON else grammar)
    elif not use.must_call:
        # Only strict tools bind their calls here; the others take any object.
        alternative = ""
        for name in schemas.keys() - use.strict_tools:
            schemas[name] = {"type": "object", "additionalProperties": True}
    for name, schema in schemas.items():
        try:
            check_grammar(model, f"{SCHEMA}:{json.dumps(schema)}")
        except UserError as error:
            raise _refused(f"tool {name!r}: {error.cause}") from None
    has_one_call = use.named_tool is not None or not use.parallel
    engine_options["grammar"] = calls_grammar(
        ways.form,
        schemas,
        ways.special,
        most=1 if has_one_call else MOST_CALLS,
        thoughts=ways.thoughts,
        in_thought=ways.in_thought,
        alternative=alternative,
    )
    return engine_options


def answer_reader(
    model: Model, use: ToolUse, options: Mapping[str, Any], ids: Sequence[int]
) -> AnswerReader:
    """Make the reader that takes an answer apart; the arguments are those of `answer_options`."""
    ways = _ways_of(model, use, options.get("grammar") is not None, ids)
    return AnswerReader(
        ways.form,
        use.schemas,
        most=None if use.parallel else 1,
        thoughts=ways.thoughts,
        in_thought=ways.in_thought,
    )


def _call_object(part: Part) -> dict[str, Any]:
    number = "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
    function = {"name": part.name, "arguments": part.text}
    return {"id": number, "type": "function", "function": function}


def message_of(reader: AnswerReader, text: str) -> dict[str, Any]:
    """Make the message of a whole answer."""
    parts = [*reader.feed(text), *reader.finish()]
    content = "".join(part.text for part in parts if part.kind == "content")
    reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
    calls = [_call_object(part) for part in parts if part.kind == "call"]
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    if not content and (calls or reasoning):
        message["content"] = None
    return message


def deltas_of(reader: AnswerReader, parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
    """Yield the pieces of a stream's message for the parts that a reader has returned last."""
    index = reader.calls - sum(part.kind == "call" for part in parts)
    for part in parts:
        if part.kind == "call":
            yield {"tool_calls": [{"index": index, **_call_object(part)}]}
            index += 1
        elif part.kind == "reasoning":
            yield {"reasoning_content": part.text}
        else:
            yield {"content": part.text}
