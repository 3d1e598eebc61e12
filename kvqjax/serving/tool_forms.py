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
    return next((form for form in FORMS if all(text in template for text in form.template)), None)


def thoughts_of(template: str) -> tuple[str, str] | None:
    """Find what begins and what ends a thought; None where a chat template knows no thoughts."""
    return next((marks for marks in THOUGHTS if marks[1] in template), None)


def marks_of(form: Form | None, thoughts: tuple[str, str] | None) -> tuple[str, ...]:
    """List what stands in answers with calls of a form, and with thoughts."""
    of_calls = () if form is None else (form.begin, form.end, *MARKS)
    return tuple(mark for mark in (*of_calls, *(thoughts or ())) if mark)


@functools.lru_cache(maxsize=16)
def special_marks(tokenizer: Any, size: int, marks: tuple[str, ...]) -> dict[str, int]:
    """Find the marks that are special tokens, which a text does not show.

    Args:
        size: its number of tokens, which grows when tokens are added.
        marks: what `marks_of` gives.
    """
    vocabulary = tokenizer.get_vocab()
    tokens = {mark: vocabulary[mark] for mark in marks if mark in vocabulary}
    return {mark: token for mark, token in tokens.items() if silent(tokenizer, token)}


# --- Grammars ---


def _literal(text: str, special: Mapping[str, int]) -> str:
    """Write a text as a part of a Lark grammar. Special tokens have no text, and go by number."""
    pattern = "|".join(map(re.escape, special))
    parts = re.split(f"({pattern})", text) if special else [text]
    written = (f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts)
    return " ".join(part for part in written if part != '""')


def _rules(form: Form, schemas: Mapping[str, Any], special: Mapping[str, int]) -> list[str]:
    """Write the rule of a call."""
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(schemas)))]
    for number, (name, schema) in enumerate(schemas.items()):
        before, after = form.call.split("ARGUMENTS")
        before, arguments = before.replace("NAME", name), json_part(_closed(schema))
        parts = (_literal(before, special), arguments, _literal(after, special))
        rules.append(f"call_{number}: {' '.join(parts)}")
    return rules


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Make a schema one of objects, without properties that it does not name: small models add them
    for ever."""
    open_keys = ("additionalProperties", "patternProperties", "$ref", "anyOf", "oneOf", "allOf")
    says_more = any(key in schema for key in open_keys)
    more = {} if says_more else {"additionalProperties": False}
    return {"type": "object", **schema, **more}


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
    more = f" ({_literal(form.between, special)} call){{0,{most - 1}}}" if form.between else ""
    calls = f"call{more if most > 1 else ''} {_literal(form.closing, special)}"
    rules = [r"FREE: /(.|\n)*/", *_rules(form, schemas, special)]
    if alternative == "" and form.opening:
        opening = _literal(form.opening.removeprefix(form.begin), special)
        begin = _literal(form.begin, special)
        name = "begin" if form.begin in special else "begin[lazy]"
        answer = f"(begin {opening} {calls})* FREE"
        rules.append(f"{name}: FREE {begin}")
    else:
        answer = f"{_literal(form.opening, special)} {calls}"
        if alternative == "":  # calls have no beginning but that of an object
            rules.append(r"TEXT: /[^{ \n](.|\n)*/")
            answer = f"{answer} | TEXT?"
        elif alternative is not None:
            rules.append(f"alternative: {alternative}")
            answer = f"{answer} | alternative"
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
    decoder, place = json.JSONDecoder(), 0
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        yield from value if isinstance(value, list) else [value]
        blank = BETWEEN_CALLS.match(text, place)
        place = blank.end() if blank else place


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
        name, body = function[1].strip(), function[2]
        properties = schemas.get(name, {}).get("properties")
        properties = properties if isinstance(properties, dict) else {}
        pairs = ((key.strip(), value) for key, value in PARAMETER.findall(body))
        arguments = {key: _typed(value, properties.get(key)) for key, value in pairs}
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
    text, named = text.strip(), NAMED_CALL.fullmatch(text.strip())
    if named is not None:
        values: Iterator[Any] = iter([{"name": named[1], "arguments": json.loads(named[2])}])
    else:
        values = _tagged(text, schemas) if text.startswith("<function=") else _values(text)
    calls = []
    for value in values:
        fields = value if isinstance(value, dict) else {}
        name = fields.get("name")
        arguments = fields.get("arguments", fields.get("parameters"))
        arguments = {} if arguments is None else arguments
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
        self._form, self._schemas, self._most = form, schemas or {}, most
        self._inside = "reasoning" if in_thought else "content"
        self._think, self._end_of_thought = thoughts or ("", "")
        self._may_think = thoughts is not None and not in_thought
        self._buffer = self._blank = self._mark = self._gap = ""
        self._trim = in_thought  # blanks come next, which are left out
        self._has_content = False  # content has begun
        self.is_plain = form is None and thoughts is None

    def feed(self, text: str) -> list[Part]:
        """Take the next piece of the answer, and give the parts that are decided."""
        return self._read(text, final=False)

    def finish(self) -> list[Part]:
        """End the answer, and give what was held back."""
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
        marks = [self._think] if self._thinks() else []
        if self._form is None:
            return marks
        in_call = self._inside == "call" and self._form.end
        return [*marks, self._form.end if in_call else self._form.begin]

    def _step(self, parts: list[Part], final: bool) -> bool:
        """Take off what is decided; say whether there may be more."""
        if self._inside == "content" and self._lacks_mark():
            self._inside, self._mark = "call", ""
            self._gap, self._blank = self._blank, ""
        marks = self._marks()
        places = [(place, mark) for mark in marks if (place := self._buffer.find(mark)) >= 0]
        if places:
            place, mark = min(places)
            before, self._buffer = self._buffer[:place], self._buffer[place + len(mark) :]
            self._take(parts, before, mark)
            self._turn(mark)
            return True
        if self._inside == "call" and not final:
            return False
        keep = 0 if final else beginning(self._buffer, marks)
        before = self._buffer[: len(self._buffer) - keep]
        self._buffer = self._buffer[len(before) :]
        self._take(parts, before, "")
        if final and self._inside == "call":
            self._inside = "content"
        return False

    def _thinks(self) -> bool:
        """Whether a thought may begin: it stands before all content."""
        may = self._may_think and self._inside == "content" and not self._has_content
        return may and self._think.startswith(self._buffer.lstrip()[: len(self._think)])

    def _lacks_mark(self) -> bool:
        """Whether a call without a mark begins."""
        may = self._form is not None and self._form.may_lack_mark and not self._has_content
        return may and self._buffer.lstrip().startswith("{")

    def _turn(self, mark: str) -> None:
        """Go on behind a mark."""
        if mark == self._think:
            self._inside, self._may_think = "reasoning", False
        elif self._form is not None and mark == self._form.begin:
            self._inside, self._mark = "call", mark
        else:
            self._inside = "content"

    def _take(self, parts: list[Part], text: str, mark: str) -> None:
        """Add a text that ends with a mark, or goes on where that is empty."""
        if self._inside == "call":
            self._take_call(parts, text, mark)
            return
        text = self._blank + text
        text = text.lstrip() if self._trim else text
        kept = text.rstrip()
        blank = text[len(kept) :]
        self._blank, self._gap = ("", blank) if mark else (blank, "")
        if kept:
            parts.append(Part(self._inside, kept))
            self._has_content = self._has_content or self._inside == "content"
        self._trim = bool(mark) or (self._trim and not kept)

    def _take_call(self, parts: list[Part], text: str, mark: str) -> None:
        try:
            calls = calls_of(text, self._schemas)
        except (ValueError, RecursionError):
            end = mark if self._form is not None and mark == self._form.end else ""
            parts.append(Part("content", f"{self._gap}{self._mark}{text}{end}"))
            self._has_content, self._trim, self._gap = True, False, ""
            return
        room = len(calls) if self._most is None else self._most - self.calls
        parts += calls[:room]
        self.calls += len(calls[:room])
        self._has_content = self._trim = True
