"""Answers bound by a grammar: which tokens may come next, as bits, and where a row stands.

A grammar is a text, so that options can be stored: "json" (any JSON object), "schema:{...}" (a JSON
schema), "regex:..." or "lark:..." (a grammar in llguidance's dialect of Lark). llguidance compiles
it for the bytes of a tokenizer's tokens and says at every token which ones may follow. That is work
of the host. Programs of the device take its answer as an array and know no grammars.

A row may draw an end token only where its grammar may end, and it ends where nothing may follow.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt32

from kvqjax._arguments import named
from kvqjax._errors import UserError
from kvqjax.model.loading import Model
from kvqjax.model.token_bytes import token_bytes

JSON, SCHEMA, REGEX, LARK = "json", "schema", "regex", "lark"
KINDS = (SCHEMA, REGEX, LARK)
FORMS = '"json", a JSON schema, or a text that begins with schema:, regex: or lark:'
# Bytes of a grammar. llguidance takes 0.1 s to compile a schema of 100 KB, and masks take longer.
MOST_BYTES = 2**16
# What JSON may have between two of its parts. Small models write blanks for ever where they may.
WHITESPACE = r"[ \t\n\r]{0,16}"
# Keywords of schemas whose values are data, in which a key is no keyword.
DATA = frozenset({"const", "default", "enum", "examples"})
MOST_PARTS = 20_000  # of a schema that are looked at to see whether an answer can end
COMPILED = 64  # grammars that stay compiled
LONGEST = 200  # characters of llguidance's message that are shown
BITS = 32  # of a word of a mask


def read_grammar(grammar: Any) -> str | None:
    """Read a grammar and give it as text. A mapping is a JSON schema.

    Raises:
        UserError: no grammar, one of more than 64 KiB, or a schema that names another document.
    """
    if grammar is None:
        return None
    if isinstance(grammar, Mapping):
        try:
            grammar = f"{SCHEMA}:{json.dumps(grammar)}"
        except (TypeError, ValueError, RecursionError) as error:
            raise _refused(f"the schema is no JSON: {_line(error)}") from None
    if not isinstance(grammar, str) or not (grammar == JSON or grammar.partition(":")[0] in KINDS):
        raise _refused(f"grammar={named(grammar)}; wanted {FORMS}")
    size = len(grammar.encode(errors="replace"))
    if size > MOST_BYTES:
        raise _refused(f"a grammar of {size} bytes; at most {MOST_BYTES} are taken")
    kind, _, text = grammar.partition(":")
    if kind == SCHEMA:
        _check_schema(_schema(text))
    return grammar


def _refused(cause: str) -> UserError:
    return UserError(cause, parameter="grammar")


def _line(error: Any) -> str:
    return " ".join(str(error).split())[:LONGEST] or type(error).__name__


def _schema(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(f"the schema is no JSON: {_line(error)}") from None


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Give every object of a schema that is not data."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += [value for key, value in part.items() if key not in DATA]
        elif isinstance(part, list):
            waiting += part


def _check_schema(schema: Any) -> None:
    """Raise UserError for references out of the schema, and where every answer would be endless:
    llguidance sees neither contradiction before an answer is made."""
    if not isinstance(schema, dict | bool):
        raise _refused("a JSON schema is an object, or true or false")
    for part in _parts(schema):
        target = part.get("$ref")
        if isinstance(target, str) and not target.startswith("#"):
            raise _refused(f"the schema refers to {target[:80]!r}; nothing outside it is fetched")
    try:
        can_end = _Ends(schema).can_end(schema)
    except RecursionError:
        raise _refused("the schema is nested too deeply") from None
    if not can_end:
        raise _refused("no answer can meet this schema: a required part contains itself")


class _Ends:
    """Whether a schema has an answer that ends: one in which no required part contains itself."""

    def __init__(self, root: Any):
        self._root, self._left = root, MOST_PARTS
        self._open: set[str] = set()  # references that are being followed

    def can_end(self, schema: Any) -> bool:
        self._left -= 1
        if not isinstance(schema, dict) or self._left < 0:
            return True
        if not self._follow(schema.get("$ref")):
            return False
        if not all(map(self.can_end, _list(schema, "allOf"))):
            return False
        for name in ("anyOf", "oneOf"):
            choices = _list(schema, name)
            if choices and not any(map(self.can_end, choices)):
                return False
        # Data that is written out ends, and so do numbers and texts.
        if {"enum", "const"} & schema.keys():
            return True
        kinds = schema.get("type")
        if kinds in ("object", ["object"]):
            return self._object(schema)
        return kinds not in ("array", ["array"]) or self._array(schema)

    def _object(self, schema: Mapping[str, Any]) -> bool:
        properties = schema.get("properties")
        parts = properties if isinstance(properties, dict) else {}
        return all(self.can_end(parts.get(str(name))) for name in _list(schema, "required"))

    def _array(self, schema: Mapping[str, Any]) -> bool:
        least = schema.get("minItems")
        if not isinstance(least, int) or least < 1:
            return True
        first = _list(schema, "prefixItems")[:least]
        rest = [schema.get("items")] if least > len(first) else []
        return all(map(self.can_end, [*first, *rest]))

    def _follow(self, reference: Any) -> bool:
        if not isinstance(reference, str):
            return True
        if reference in self._open:
            return False
        self._open.add(reference)
        ends = self.can_end(self._target(reference))
        self._open.discard(reference)
        return ends

    def _target(self, reference: str) -> Any:
        """Give the part that a pointer names; None for one that there is not."""
        part = self._root
        for name in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
            name = name.replace("~1", "/").replace("~0", "~")
            part = part.get(name) if isinstance(part, dict) else None
        return part


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def json_part(schema: Any) -> str:
    """Write a JSON schema as a part of a Lark grammar."""
    options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    return f"%json {json.dumps(schema | options if isinstance(schema, dict) else schema)}"


# --- llguidance ---


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        message = "grammars need a further package (llguidance): pip install '.[grammar]'"
        raise _refused(message) from None
    return llguidance


class _Tokens:
    """A tokenizer as llguidance wants it.

    Where a grammar leaves only one text to come, llguidance asks for its tokens. Those of the
    longest bytes are given, one after the other: parts of a text that a grammar cuts out need not
    be texts of their own, which the model's tokenizer could encode."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, size: int):
        table, known = token_bytes(tokenizer), len(tokenizer)
        self.tokens = [table.within(token) if token < known else b"" for token in range(size)]
        # A further token stands for all end tokens of a row, which may be any.
        self.tokens.append(b"<end>")
        self.eos_token_id = size
        special = _special(tokenizer, size)
        self.special_token_ids = [*special, size]
        spelled = set(range(size)) - set(special)
        self._by_bytes = {self.tokens[token]: token for token in sorted(spelled, reverse=True)}
        self._longest = max(map(len, self._by_bytes))

    def __call__(self, text: bytes | str) -> list[int]:
        rest = text.encode() if isinstance(text, str) else text
        ids = []
        while rest:
            lengths = range(min(len(rest), self._longest), 0, -1)
            length = next((n for n in lengths if rest[:n] in self._by_bytes), None)
            if length is None:
                break  # no token begins so: the mask decides
            ids.append(self._by_bytes[rest[:length]])
            rest = rest[length:]
        return ids


def _special(tokenizer: Any, size: int) -> list[int]:
    """List the tokens that no text has: they are not what their names spell."""
    ids = set(getattr(tokenizer, "all_special_ids", ()))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        added = backend.get_added_tokens_decoder().items()
        ids |= {token for token, entry in added if entry.special}
    return sorted(token for token in ids if token < size)


@functools.lru_cache(maxsize=4)
def _tokens_of(tokenizer: Any, known: int, size: int) -> Any:
    """Build llguidance's tokenizer, which is kept until tokens are added."""
    library = _llguidance()
    try:
        return library.LLTokenizer(
            library.TokenizerWrapper(_Tokens(tokenizer, size)), n_vocab=size + 1
        )
    except Exception as error:  # of another program, about a tokenizer of yet another
        raise _refused(f"this model's tokenizer takes no grammar: {_line(error)}") from None


@functools.lru_cache(maxsize=COMPILED)
def _compiled(tokens: Any, grammar: str) -> Any:
    """Compile a grammar: a matcher at its beginning, to be copied."""
    library = _llguidance()
    kind, _, text = grammar.partition(":")
    if kind == JSON:
        text = f"start: {json_part({'type': 'object'})}"
    elif kind == SCHEMA:
        text = f"start: {json_part(_schema(text))}"
    source = (library.LLMatcher.grammar_from_regex if kind == REGEX else _lark)(text)
    limits = library.LLParserLimits(verbose_errors=False)
    matcher = library.LLMatcher(tokens, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise _refused(f"the grammar is refused: {_line(matcher.get_error())}")
    return matcher


def _lark(text: str) -> str:
    return _llguidance().LLMatcher.grammar_from_lark(text)


def can_bind(model: Model) -> bool:
    """Say whether answers of a model can be bound here."""
    try:
        tokens_of(model)
    except UserError:
        return False
    return True


def tokens_of(model: Model) -> Any:
    """Give llguidance's tokenizer of a model.

    Raises:
        UserError: llguidance is missing, or there is no tokenizer that it takes.
    """
    if not model.has_tokenizer:
        raise _refused("a grammar needs a tokenizer, and this model has none")
    return _tokens_of(model.tokenizer, len(model.tokenizer), model.config.vocab_size)


class BoundRow:
    """Where one row stands in its grammar.

    `ended`: nothing may follow. `error`: why the row cannot go on, where the grammar has turned out
    to be too much."""

    def __init__(self, matcher: Any, ends: Sequence[int] | np.ndarray, vocab_size: int):
        self.ended = False
        self.error: UserError | None = None
        self._matcher, self._end = matcher, vocab_size
        self._ends = np.asarray(ends, np.int64).reshape(-1)
        self._ends = self._ends[self._ends >= 0]  # the rest is padding
        self._words = np.zeros((-(-(vocab_size + 1) // BITS),), np.uint32)

    def allow(self, words: UInt32[np.ndarray, " W"]) -> None:
        """Write which tokens may come next, a bit each."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        may_end = bool(_bits(self._words, np.asarray([self._end]))[0])
        _set_bits(self._words, np.asarray([self._end]), False)
        _set_bits(self._words, self._ends, may_end)
        if self._matcher.is_error():
            self._fail(self._matcher.get_error())
        elif not self._words.any():
            if may_end:  # and no token says so: `ignore_eos`
                self.ended = True
            else:
                self._fail("no token of this model may come next")
        words[:] = self._words[: len(words)]
        if self.ended:
            words[:] = ~np.uint32(0)

    def take(self, token: int) -> None:
        """Go on by a token that was drawn."""
        if not self._matcher.consume_token(token):
            self._fail(self._matcher.get_error())
        elif self._matcher.is_stopped():
            self.ended = True

    def _fail(self, message: str) -> None:
        self.ended = True
        self.error = _refused(f"the grammar cannot go on: {_line(message)}")


def _bits(words: np.ndarray, places: np.ndarray) -> np.ndarray:
    return (words[places // BITS] >> (places % BITS).astype(np.uint32)) & 1 > 0


def _set_bits(words: np.ndarray, places: np.ndarray, value: bool) -> None:
    for place in places.tolist():
        bit = np.uint32(1 << place % BITS)
        words[place // BITS] = words[place // BITS] | bit if value else words[place // BITS] & ~bit


def check_grammar(model: Model, grammar: str) -> None:
    """Raise UserError for a grammar, as `read_grammar` gives it, that answers of a model cannot be
    bound by."""
    _compiled(tokens_of(model), grammar)


def bind(model: Model, grammar: str | None, ends: Sequence[int] | np.ndarray) -> BoundRow | None:
    """Bind a row.

    Args:
        model: of the row.
        grammar: what `read_grammar` gives; None: the row is free.
        ends: the tokens that end it.

    Returns:
        The row at its beginning; None where it is free.

    Raises:
        UserError: llguidance is missing, the grammar is wrong, or no answer can meet it.
    """
    if grammar is None:
        return None
    matcher = _compiled(tokens_of(model), grammar).deep_copy()
    row = BoundRow(matcher, ends, model.config.vocab_size)
    allowed_tokens([row], model.config.vocab_size)
    if row.error is not None:
        raise _refused(f"no answer can meet this grammar: {row.error.cause.partition(': ')[2]}")
    return row


def allowed_tokens(rows: Sequence[BoundRow | None], vocab_size: int) -> UInt32[np.ndarray, "B W"]:
    """Say which tokens may come next in every row, a bit each. Free rows may have any."""
    words = np.full((len(rows), -(-vocab_size // BITS)), ~np.uint32(0))
    for row, row_words in zip(rows, words, strict=True):
        if row is not None and not row.ended:
            row.allow(row_words)
    return words
