"""How models write calls of tools and thoughts: in which form, how a grammar binds an answer to it,
and which calls and thoughts an answer has.

Families of models write calls in different forms. `FORMS` lists them, and a model's chat template
says which one is its own.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvqjax.generation.bound import LARK, json_part
from kvqjax.generation.text import beginning, silent
from kvqjax.model.tokenizer import template_variables

MOST_CALLS = 16  # of a bound answer: small models go on calling for ever where they may
# What begins a thought, and what ends it.
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


# --- The forms of families ---


class Form(NamedTuple):
    """How a family of models writes calls.

    Attributes:
        template: texts that all stand in the family's chat templates.
        begin: what begins a call in an answer.
        end: what ends it; "": the next beginning, or the end of the answer.
        opening: what a bound answer begins with.
        call: a bound call; NAME and ARGUMENTS stand for the tool's.
        between: what stands between two bound calls; "": an answer has one.
        closing: what a bound answer ends with.
        may_lack_mark: an answer that begins as a JSON object is a call too.
    """

    template: tuple[str, ...]
    begin: str
    end: str
    opening: str
    call: str
    between: str
    closing: str
    may_lack_mark: bool = False


HERMES = Form(
    template=("<tool_call>",),
    begin="<tool_call>",
    end="</tool_call>",
    opening="<tool_call>\n",
    call='{"name": "NAME", "arguments": ARGUMENTS}',
    between="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
)
MISTRAL = Form(
    template=("[TOOL_CALLS]",),
    begin="[TOOL_CALLS]",
    end="",
    opening="[TOOL_CALLS][",
    call='{"name": "NAME", "arguments": ARGUMENTS}',
    between=", ",
    closing="]",
)
# The first one that suits a template counts.
FORMS = (
    MISTRAL._replace(
        template=("[TOOL_CALLS]", "[ARGS]"),
        opening="[TOOL_CALLS]",
        call="NAME[ARGS]ARGUMENTS",
        between="[TOOL_CALLS]",
        closing="",
    ),
    MISTRAL._replace(template=("[TOOL_CALLS] [",), opening="[TOOL_CALLS] ["),
    MISTRAL,
    HERMES,
    Form(  # Llama 3
        template=("ipython", '"parameters": '),
        begin="<|python_tag|>",
        end="",
        opening="",
        call='{"name": "NAME", "parameters": ARGUMENTS}',
        between="",
        closing="",
        may_lack_mark=True,
    ),
)
MARKS = ("[ARGS]", "[CALL_ID]")  # within calls of Mistral's models
# A call that is no JSON: its name, and behind it an object.
NAMED_CALL = re.compile(r"([\w-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL)
# A call of Qwen's coding models, and each of its arguments.
FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*?)(?:</function>\s*|$)", re.DOTALL)
PARAMETER = re.compile(
    r"<parameter=([^>\n]*)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.DOTALL
)
BETWEEN_CALLS = re.compile(r"[\s;,]*")


def form_of(template: str) -> Form | None:
    """Find the form of a chat template; None where it reads no tools, or none of these forms is
    its own."""
    if "tools" not in template_variables(template):
        return None
    for form in FORMS:
        if all(text in template for text in form.template):
            return form
    return None


def thoughts_of(template: str) -> tuple[str, str] | None:
    """Find what begins and what ends a thought; None where a chat template knows no thoughts."""
    for begin, end in THOUGHTS:
        if end in template:
            return begin, end
    return None


def marks_of(form: Form | None, thoughts: tuple[str, str] | None) -> tuple[str, ...]:
    """List the marks of answers with calls of a form, and with thoughts."""
    marks: list[str] = []
    if form is not None:
        marks += [form.begin, form.end, *MARKS]
    if thoughts is not None:
        marks += thoughts
    return tuple(mark for mark in marks if mark)


@functools.lru_cache(maxsize=16)
def special_marks(tokenizer: Any, size: int, marks: tuple[str, ...]) -> dict[str, int]:
    """Find the marks that are special tokens, which a text does not show.

    Args:
        size: its number of tokens, which grows when tokens are added.
        marks: what `marks_of` gives.
    """
    vocabulary = tokenizer.get_vocab()
    special = {}
    for mark in marks:
        token = vocabulary.get(mark)
        if token is not None and silent(tokenizer, token):
            special[mark] = token
    return special


# --- Grammars ---


def _literal(text: str, special: Mapping[str, int]) -> str:
    """Write a text as a part of a Lark grammar. Special tokens have no text, and go by number."""
    parts = [text]
    if special:
        pattern = "|".join(map(re.escape, special))
        parts = re.split(f"({pattern})", text)
    written = []
    for part in parts:
        if part in special:
            written.append(f"<[{special[part]}]>")
        elif part:
            written.append(json.dumps(part))
    return " ".join(written)


def _rules(form: Form, schemas: Mapping[str, Any], special: Mapping[str, int]) -> list[str]:
    """Write the rules of a call: one that lists the tools, and one for each tool."""
    before, after = form.call.split("ARGUMENTS")
    names = []
    rules = []
    for number, (tool, schema) in enumerate(schemas.items()):
        begin = _literal(before.replace("NAME", tool), special)
        arguments = json_part(_closed(schema))
        names.append(f"call_{number}")
        rules.append(f"call_{number}: {begin} {arguments} {_literal(after, special)}")
    return [f"call: {' | '.join(names)}", *rules]


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Make a schema one of objects, without properties that it does not name: small models add them
    for ever."""
    closed = {"type": "object", **schema}
    open_keys = ("additionalProperties", "patternProperties", "$ref", "anyOf", "oneOf", "allOf")
    # With these keys the properties are named elsewhere, or the schema says itself what may come.
    if not any(key in schema for key in open_keys):
        closed["additionalProperties"] = False
    return closed


def _thought(end: str, special: Mapping[str, int]) -> list[str]:
    """Write the rules of the rest of a thought, up to its end and the blanks behind it."""
    name = "thought" if end in special else "thought[lazy]"
    return [f"{name}: FREE {_literal(end, special)}", r"BLANK: /[ \n]{0,4}/"]


def calls_grammar(
    form: Form,
    schemas: Mapping[str, Any],
    special: Mapping[str, int],
    *,
    most: int = MOST_CALLS,
    thoughts: tuple[str, str] | None = None,
    in_thought: bool = False,
    alternative: str | None = None,
) -> str:
    """Write the grammar of an answer that is calls.

    Args:
        form: of the calls.
        schemas: the schema of each tool's arguments.
        special: the marks that are special tokens, with their ids.
        most: the most calls.
        thoughts: what begins and what ends a thought, which may come before.
        in_thought: the prompt has begun it.
        alternative: what the answer may be instead of calls, as a part of a grammar; "": any text, also
            between calls.

    Returns:
        The grammar, as `read_grammar` takes it.
    """
    calls = "call"
    if form.between and most > 1:
        calls += f" ({_literal(form.between, special)} call){{0,{most - 1}}}"
    calls += f" {_literal(form.closing, special)}"
    rules = [r"FREE: /(.|\n)*/", *_rules(form, schemas, special)]
    if alternative == "" and form.opening:
        # Text up to the mark of a call, the call, and so on. Only a mark that is text needs a lazy
        # rule: the text could go on over it.
        opening = _literal(form.opening.removeprefix(form.begin), special)
        answer = f"(begin {opening} {calls})* FREE"
        name = "begin" if form.begin in special else "begin[lazy]"
        rules.append(f"{name}: FREE {_literal(form.begin, special)}")
    else:
        answer = f"{_literal(form.opening, special)} {calls}"
        if alternative == "":
            # Calls have no beginning but that of an object, so no text may begin like one.
            rules.append(r"TEXT: /[^{ \n](.|\n)*/")
            answer += " | TEXT?"
        elif alternative is not None:
            rules.append(f"alternative: {alternative}")
            answer += " | alternative"
    start = "answer"
    if thoughts is not None:
        rules += _thought(thoughts[1], special)
        begin_thought = f"{_literal(thoughts[0], special)} thought BLANK"
        start = "thought BLANK answer" if in_thought else f"({begin_thought})? answer"
    return f"{LARK}:" + "\n".join([f"start: {start}", f"answer: {answer}", *rules])


# --- Answers ---


class Part(NamedTuple):
    """A part of an answer: "content", "reasoning" or, where `name` is a tool's, a "call", whose
    text is its arguments."""

    kind: str
    text: str
    name: str = ""


def _values(text: str) -> Iterator[Any]:
    """Read JSON values that follow each other. Raises ValueError for anything else."""
    decoder = json.JSONDecoder()
    place = 0
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        if isinstance(value, list):
            yield from value
        else:
            yield value
        separator = BETWEEN_CALLS.match(text, place)
        if separator:
            place = separator.end()


def _typed(text: str, schema: Any) -> Any:
    """Read an argument that stands as plain text, by its schema."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _tagged(text: str, schemas: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Read calls whose arguments stand in tags. Raises ValueError for anything else."""
    place = 0
    while place < len(text):
        function = FUNCTION.match(text, place)
        if function is None:
            raise ValueError("no call")
        name = function[1].strip()
        properties = schemas.get(name, {}).get("properties")
        if not isinstance(properties, dict):
            properties = {}
        arguments = {}
        for key, value in PARAMETER.findall(function[2]):
            key = key.strip()
            arguments[key] = _typed(value, properties.get(key))
        yield {"name": name, "arguments": arguments}
        place = function.end()


def calls_of(text: str, schemas: Mapping[str, Any]) -> list[Part]:
    """Read the calls of a text, whatever form they have.

    Args:
        text: what stands between the marks of a call.
        schemas: the schema of each tool's arguments.

    Raises:
        ValueError: it is no call of one of these tools.
    """
    text = text.strip()
    named_call = NAMED_CALL.fullmatch(text)
    values: Iterator[Any]
    if named_call is not None:
        values = iter([{"name": named_call[1], "arguments": json.loads(named_call[2])}])
    elif text.startswith("<function="):
        values = _tagged(text, schemas)
    else:
        values = _values(text)
    calls = []
    for value in values:
        fields = value if isinstance(value, dict) else {}
        name = fields.get("name")
        arguments = fields.get("arguments", fields.get("parameters"))
        if arguments is None:
            arguments = {}
        if not isinstance(name, str) or name not in schemas or not isinstance(arguments, dict):
            raise ValueError("no call of a tool")
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        calls.append(Part("call", written, name))
    if not calls:
        raise ValueError("no call")
    return calls


class AnswerReader:
    """Takes an answer apart, piece by piece: thoughts, calls, and the text between them.

    What may be the beginning of a mark is held back until it is decided, and so is a call until it
    is complete. A text between marks that is no call of a tool stays content. Blanks beside thoughts
    and calls are left out."""

    def __init__(
        self,
        form: Form | None = None,
        schemas: Mapping[str, Any] | None = None,
        *,
        most: int | None = None,
        thoughts: tuple[str, str] | None = None,
        in_thought: bool = False,
    ):
        """Begin an answer.

        Args:
            form: of its calls; None: it has none.
            schemas: the schema of each tool's arguments.
            most: calls that are given; further ones are left out. None: all.
            thoughts: what begins and what ends a thought, with which it may begin.
            in_thought: it begins within one.
        """
        self.calls = 0
        self._form = form
        self._schemas = schemas or {}
        self._most = most
        self._think, self._end_of_thought = thoughts or ("", "")
        self._may_think = thoughts is not None and not in_thought
        self._inside = "reasoning" if in_thought else "content"  # or "call"
        self._buffer = ""  # text that is not decided
        self._blank = ""  # blanks at the end of a text, which count if the text goes on
        self._mark = ""  # what began the call
        self._gap = ""  # blanks before the call, which count if it turns out to be content
        self._trim = in_thought  # blanks come next, which are left out
        self._has_content = False  # content has begun
        self.is_plain = form is None and thoughts is None

    def feed(self, text: str) -> list[Part]:
        """Take the next piece of the answer, and return the parts that are decided."""
        return self._read(text, final=False)

    def finish(self) -> list[Part]:
        """End the answer, and return what was held back."""
        parts = self._read("", final=True)
        if self._inside == "content" and self._blank and not self._trim:
            parts.append(Part("content", self._blank))
        return parts

    def _read(self, text: str, final: bool) -> list[Part]:
        if self.is_plain:
            return [Part("content", text)] if text else []
        self._buffer += text
        parts: list[Part] = []
        while self._step(parts, final):
            pass
        return parts

    def _marks(self) -> list[str]:
        """List the marks that change what the text is."""
        if self._inside == "reasoning":
            return [self._end_of_thought]
        marks = []
        if self._thinks():
            marks.append(self._think)
        if self._form is not None and self._inside == "call" and self._form.end:
            marks.append(self._form.end)
        elif self._form is not None:
            marks.append(self._form.begin)
        return marks

    def _step(self, parts: list[Part], final: bool) -> bool:
        """Take off what is decided; say whether there may be more."""
        if self._inside == "content" and self._lacks_mark():
            self._inside = "call"
            self._mark = ""
            self._gap = self._blank
            self._blank = ""
        marks = self._marks()
        places = []
        for mark in marks:
            place = self._buffer.find(mark)
            if place >= 0:
                places.append((place, mark))
        if places:
            place, mark = min(places)
            before = self._buffer[:place]
            self._buffer = self._buffer[place + len(mark) :]
            self._take(parts, before, mark)
            self._turn(mark)
            return True
        if self._inside == "call" and not final:
            return False
        # The end of the buffer may be the beginning of a mark.
        undecided = 0 if final else beginning(self._buffer, marks)
        stop = len(self._buffer) - undecided
        before = self._buffer[:stop]
        self._buffer = self._buffer[stop:]
        self._take(parts, before, "")
        if final and self._inside == "call":
            self._inside = "content"
        return False

    def _thinks(self) -> bool:
        """Say whether a thought may begin: it stands before all content."""
        if not self._may_think or self._inside != "content" or self._has_content:
            return False
        return self._think.startswith(self._buffer.lstrip()[: len(self._think)])

    def _lacks_mark(self) -> bool:
        """Say whether a call without a mark begins."""
        if self._form is None or not self._form.may_lack_mark or self._has_content:
            return False
        return self._buffer.lstrip().startswith("{")

    def _turn(self, mark: str) -> None:
        """Go on behind a mark."""
        if mark == self._think:
            self._inside = "reasoning"
            self._may_think = False
        elif self._form is not None and mark == self._form.begin:
            self._inside = "call"
            self._mark = mark
        else:
            self._inside = "content"

    def _take(self, parts: list[Part], text: str, mark: str) -> None:
        """Add a text that ends with a mark, or goes on where that is empty."""
        if self._inside == "call":
            self._take_call(parts, text, mark)
            return
        text = self._blank + text
        if self._trim:
            text = text.lstrip()
        kept = text.rstrip()
        blank = text[len(kept) :]
        # Before a mark blanks are left out, unless what follows is no call. Without a mark the text
        # may go on, and then they count.
        self._blank = "" if mark else blank
        self._gap = blank if mark else ""
        if kept:
            parts.append(Part(self._inside, kept))
            self._has_content = self._has_content or self._inside == "content"
        self._trim = bool(mark) or (self._trim and not kept)

    def _take_call(self, parts: list[Part], text: str, mark: str) -> None:
        """Add the calls of a text. A text that is no call becomes content again, with its marks."""
        try:
            calls = calls_of(text, self._schemas)
        except (ValueError, RecursionError):
            end = mark if self._form is not None and mark == self._form.end else ""
            parts.append(Part("content", f"{self._gap}{self._mark}{text}{end}"))
            self._has_content = True
            self._trim = False
            self._gap = ""
            return
        if self._most is not None:
            calls = calls[: self._most - self.calls]
        parts += calls
        self.calls += len(calls)
        self._has_content = True
        self._trim = True
