"""A conversation whose cache stays from turn to turn: each turn feeds what is new and answers piece
by piece."""

import copy
import dataclasses
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np

from kvqjax._arguments import MOST_SEED, check_counts
from kvqjax._errors import UserError, unwritten
from kvqjax._files import path_of
from kvqjax._options import named_options, with_fields
from kvqjax.cache import Cache
from kvqjax.cache.accounting import ledger
from kvqjax.cache.artifacts import read_description, write_folder
from kvqjax.cache.surgery import crop, fork, resize
from kvqjax.generation.driver import Generation, Settings
from kvqjax.generation.loop import fetched, shared
from kvqjax.generation.options import GenerateFields, GenerateOptions
from kvqjax.generation.prompt_ids import (
    PLAIN_CHAT,
    chat_text,
    check_vocabulary,
    continued_ids,
    has_chat_template,
    plain_text,
    require_trained,
    room_of,
    too_long,
)
from kvqjax.generation.text import Detokenizer
from kvqjax.methods import MethodLike, parse, spelled_out
from kvqjax.model.loading import Model
from kvqjax.model.rope import check_length, longest_text
from kvqjax.step.checks import check_model
from kvqjax.step.new_cache import init_cache
from kvqjax.step.persist import load_cache, save_cache

# Tokens; a session without a capacity of its own begins with so many, and doubles them.
LEAST_CAPACITY = 512

Message = Mapping[str, Any]


class Turn(NamedTuple):
    """What the last answer of a session took.

    - `tokens` of the answer, without the end token; `prompt_tokens` that were fed before it, and
      `kept_tokens` that the cache held already.
    - `seconds_to_first_token` includes the prompt and whatever was compiled, `tokens_per_second`
      counts the tokens after the first one.
    - `cache_bytes` of the session's cache, and `bits` that it spends on a number of a key or value.
    - `finish_reason`: "eos", "stop", "length", or "closed" for an answer that was broken off."""

    tokens: int
    prompt_tokens: int
    kept_tokens: int
    seconds_to_first_token: float
    tokens_per_second: float
    cache_bytes: int
    bits: float
    finish_reason: str


class _Part(NamedTuple):
    """A stretch of the conversation as text, and the token ids by which the model has read or made
    it."""

    text: str
    ids: list[int]


class Session:
    """A conversation with `model` through a cache of `method` that is kept from turn to turn.

        session = kvq.Session(model, "kivi:bits=2", system="You are brief.")
        for text in session.send("Hello!"):
            print(text, end="", flush=True)

    Every turn puts the whole conversation through the tokenizer's chat template, keeps what the
    cache holds of it, and feeds the rest. An answer's ids are used as they were made. Without a
    chat template turns are plain text, each on a new line. What a template changes of earlier turns
    (thinking that it leaves out) is cut out of the cache and fed
    anew: `kvqjax.crop` says how far back it then goes.

    `history` are the messages so far and `system` is the system message; `last` says what the last
    answer took, and `cache` is the cache, None before the first turn."""

    @named_options
    @with_fields(GenerateOptions)
    def __init__(
        self,
        model: Model,
        method: MethodLike = "exact",
        *,
        system: str | None = None,
        capacity: int | None = None,
        max_new_tokens: int = 256,
        chunk: int | str | None = None,
        kernels: str = "auto",
        stride: int = 1,
        **options: Unpack[GenerateFields],
    ):
        """Begin a conversation. Nothing is computed before the first turn.

        Args:
            system: The system message. It may be changed between turns.
            capacity: Tokens that the conversation may have; None: the cache doubles when it is
                full.
            max_new_tokens: Of an answer, where `send` is not given another number.
            chunk: Tokens of a turn that enter the cache at a time. None: the first turn prefills
                exactly, and later ones enter as many at a time as suit the chip.
            stride: Tokens between pieces of text.

        The other options are those of `kvqjax.generate`. The penalties of presence and frequency
        count the tokens of the answer under way, the repetition penalty those of the whole
        conversation.

        Raises:
            UserError: A model without a tokenizer, options that do not exist or cannot be."""
        check_model(model)
        check_counts(capacity=capacity, max_new_tokens=max_new_tokens, stride=stride)
        if chunk != "auto":
            check_counts(chunk=chunk)
        if not model.has_tokenizer:
            raise UserError(
                "a session needs a tokenizer, and this model has none; generate takes token ids"
            )
        self.model, self.method, self.system = model, parse(method), system
        checked = GenerateOptions(**options)
        self._options: dict[str, Any] = {
            "capacity": capacity, "max_new_tokens": max_new_tokens, "chunk": chunk, "kernels": kernels,
            "stride": stride,
        } | dataclasses.asdict(checked)  # fmt: skip
        stride = min(stride, max_new_tokens)  # a row's new tokens have room for one stride
        self._settings = Settings.of(model, max_new_tokens, checked, stride, chunk)
        self.last: Turn | None = None
        self._history: list[Message] = []
        self._parts: list[_Part] = []  # the conversation as the model knows it
        self._cache: Cache | None = None
        self._ids: list[int] = []  # what the cache holds
        self._answers = 0
        self._open: Answer | None = None
        self._plain = not has_chat_template(model)
        if self._plain:
            warnings.warn(PLAIN_CHAT, stacklevel=3)

    def __repr__(self) -> str:
        room = (
            f"{len(self._ids)} tokens"
            if self._cache is None
            else f"{len(self._ids)} of {self._capacity} tokens"
        )
        return f"Session({self.method}: {len(self._history)} messages, {room} in the cache)"

    @property
    def history(self) -> list[dict[str, Any]]:
        """The messages so far, without the system message: a copy."""
        self._settle()
        return [dict(message) for message in self._history]

    @property
    def cache(self) -> Cache | None:
        """The cache of one row that holds the conversation. The next turn donates it: `fork` what
        shall live on."""
        self._settle()
        return self._cache

    def send(
        self, message: str | Message | Iterable[Message], *, max_new_tokens: int | None = None
    ) -> "Answer":
        """Say something, and get the answer as an iterator over pieces of its text.

        The turn counts from the first piece on. An answer that is left or closed before its end, or
        interrupted, counts as far as it was made.

        Args:
            message: A text, which is the user's, or messages (dicts with "role" and "content").
            max_new_tokens: The most tokens of this answer.

        Raises:
            UserError: A conversation that does not fit, a message that is none. The session then is
            as it was."""
        self._settle()
        check_counts(max_new_tokens=max_new_tokens)
        history = [*self._history, *_messages(message)]
        parts = self._read(history)
        ids = [token for part in parts for token in part.ids]
        check_vocabulary(self.model, 0, ids)
        new = max_new_tokens or self._settings.max_new_tokens
        capacity, need = self._options["capacity"], len(ids) + new
        if capacity is not None and need > capacity:
            raise too_long(
                len(ids), new, capacity, f"do not fit this session's capacity of {capacity}"
            )
        check_length(self.model.config, need)
        require_trained(self.model, [len(ids)], new, self._settings.options.beyond_trained)
        self._settings.options.ends(self.model, new)
        return Answer(self, history, parts, ids, new)

    def fork(self) -> "Session":
        """The same conversation once more, going its own way from here."""
        self._settle()
        session = copy.copy(self)
        session._history, session._parts, session._ids = copy.deepcopy(
            (self._history, self._parts, self._ids)
        )
        session._cache = None if self._cache is None else fork(self._cache)
        return session

    def save(self, folder: str | os.PathLike) -> None:
        """Write the conversation and its cache as a new folder. Raises UserError where it exists or
        cannot be written."""
        self._settle()
        path = path_of(folder)
        if path.exists():
            raise UserError(f"{path} exists already; choose another folder")
        # What an interrupted save left under this name is replaced, so it is none that a user's own
        # folder has.
        part = path.with_name(f".{path.name}.unfinished")
        text = {
            "kind": "session", "method": spelled_out(self.method), "system": self.system, "history": self._history,
            "options": self._options, "parts": [list(part) for part in self._parts], "ids": self._ids,
            "answers": self._answers,
        }  # fmt: skip
        shutil.rmtree(part, ignore_errors=True)
        try:
            write_folder(part, text, {})
            if self._cache is not None:
                save_cache(part / "cache", self._cache, self.model)
            part.rename(path)
        except OSError as error:
            raise unwritten(path, error) from error
        except TypeError as error:  # messages may hold what JSON cannot
            raise UserError(f"{path}: cannot be written: {error}") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)

    @classmethod
    def load(cls, model: Model, folder: str | os.PathLike) -> "Session":
        """Read a conversation that was saved, for the model that led it. Raises UserError where the
        folder is missing or damaged, or was written for another model."""
        path = path_of(folder)
        text = read_description(path, "session")
        try:
            session = cls(model, text["method"], system=text["system"], **text["options"])
            session._history = _messages(text["history"]) if text["history"] else []
            session._parts = [
                _Part(str(part), [int(token) for token in ids]) for part, ids in text["parts"]
            ]
            session._ids, session._answers = (
                [int(token) for token in text["ids"]],
                int(text["answers"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            reason = error if isinstance(error, UserError) else type(error).__name__
            raise UserError(f"{path}: description.json is damaged: {reason}") from error
        if (path / "cache").exists():
            session._cache = load_cache(path / "cache", model, kernels=session._options["kernels"])
        length = 0 if session._cache is None else int(fetched(session._cache.lengths)[0][0])
        if length != len(session._ids):
            raise UserError(
                f"{path}: the cache holds {length} tokens, description.json names {len(session._ids)}"
            )
        return session

    @property
    def _capacity(self) -> int:
        return 0 if self._cache is None else self._cache.layout.capacity

    def _settle(self) -> None:
        """End an answer that nobody took to its end."""
        if self._open is not None:
            self._open.close()

    def _read(self, history: Sequence[Message]) -> list[_Part]:
        """The conversation up to where the answer begins: what is known of it by its ids of then,
        the rest anew."""
        text = self._text(history)
        parts, place = [], 0
        for part in self._parts:
            if not text.startswith(part.text, place):
                break
            parts.append(part)
            place += len(part.text)
        if remainder := text[place:]:
            most = room_of(
                self.model, self._options["capacity"], self._settings.options.beyond_trained
            )
            if place:
                ids = continued_ids(self.model, remainder, most)
            else:
                ids = self.model.encode(remainder, self._plain, most)
            parts.append(_Part(remainder, ids))
        return parts

    def _text(self, history: Sequence[Message]) -> str:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*system, *history]
        return plain_text(messages) if self._plain else chat_text(self.model, messages)

    def _ready(self, ids: list[int], need: int) -> tuple[Cache, int]:
        """A cache of room for `need` tokens that holds the first of `ids`, and how many: all but
        one at most. The session's cache is used up."""
        prefix = next(
            (n for n, (a, b) in enumerate(zip(self._ids, ids, strict=False)) if a != b),
            len(self._ids),
        )
        prefix = min(prefix, len(ids) - 1)
        capacity = self._options["capacity"] or self._grown(self._capacity, need)
        cache, self._cache, self._ids = self._cache, None, []
        if cache is not None and cache.states and prefix < int(fetched(cache.lengths)[0][0]):
            # Recurrent layers cannot forget: what follows another beginning is read anew.
            prefix = 0
        if cache is not None:
            cache = crop(cache, shared(self.model, np.asarray([prefix], np.int32)))
            if length := int(fetched(cache.lengths)[0][0]):
                return resize(cache, capacity), length
            del cache  # before another one is made
        return init_cache(self.model, self.method, 1, capacity, kernels=self._options["kernels"]), 0

    def _grown(self, capacity: int, need: int) -> int:
        """A capacity for `need` tokens: a doubled one, so that a long conversation is compiled few
        times."""
        size = max(capacity, LEAST_CAPACITY, 1 << (need - 1).bit_length())
        limit = longest_text(self.model.config)
        return size if limit is None else max(min(size, limit), need)


class Answer(Iterator[str]):
    """An answer under way: an iterator over its text, what `Session.send` gives."""

    def __init__(
        self, session: Session, history: list[Message], parts: list[_Part], ids: list[int], new: int
    ):
        self._session, self._history, self._parts, self._ids = session, history, parts, ids
        self._new, self._number = new, session._answers
        self._made: Generation | None = None
        self._kept = 0
        self._over = False

    def __iter__(self) -> "Answer":
        return self

    def __next__(self) -> str:
        if self._made is None and not self._over:
            self._session._settle()
            if self._session._answers != self._number:
                raise UserError("the conversation went on since this was sent; send it again")
        while not self._over:
            try:
                self._made = self._made or self._begun()
                piece = self._made.advance()
            except Exception:  # what is not finite, or has no room in memory: nothing was said, and all is fed anew
                self._end(None, [])
                raise
            if piece is None:
                self.close()
            elif piece.text[0]:
                return piece.text[0]
        raise StopIteration

    def close(self) -> None:
        """End the answer here, with what was made of it."""
        generation = self._made
        if self._over:
            return
        if (
            generation is None
        ):  # nothing was asked for yet, or an interrupt came before the cache was ready
            self._over = True
            if self._session._open is self:
                self._session._open = None
            return
        try:
            generation.close()
            cache = None if generation.lost else generation.cache()
        except Exception:
            self._end(None, [])
            raise
        tokens, reason = generation.tokens[0], generation.reasons[0] or "closed"
        said = bool(tokens) or reason != "closed"
        self._end(cache, [*self._ids, *tokens] if said else self._ids[: self._kept])
        if said:
            self._add(generation, reason)

    def _begun(self) -> Generation:
        session = self._session
        session._open = self
        cache, kept = session._ready(self._ids, len(self._ids) + self._new)
        self._kept = kept
        options = session._settings.options
        seed = (options.seed + self._number) % (MOST_SEED + 1)
        options = dataclasses.replace(options, seed=seed)
        settings = session._settings._replace(max_new_tokens=self._new, options=options)
        lengths = np.asarray([kept], np.int32) if kept else None
        prompt, before = [self._ids[kept:]], [self._ids[:kept]]
        return Generation(session.model, prompt, cache, settings, held=lengths, before=before)

    def _end(self, cache: Cache | None, ids: list[int]) -> None:
        """Give the session its cache back, or none: the next turn then feeds everything anew."""
        session, self._over = self._session, True
        session._cache, session._ids, session._open = cache, [] if cache is None else ids, None

    def _add(self, generation: Generation, reason: str) -> None:
        """Make the turn a part of the conversation."""
        session, text, tokens = self._session, generation.texts[0], generation.tokens[0]
        session._history = [*self._history, {"role": "assistant", "content": text}]
        session._parts = [*self._parts, _answer_part(session.model, self._ids, text, tokens)]
        session._answers += 1
        book = None if session._cache is None else ledger(session._cache)
        session.last = Turn(
            tokens=len(tokens),
            prompt_tokens=len(self._ids) - self._kept,
            kept_tokens=self._kept,
            seconds_to_first_token=generation.seconds_to_first_token,
            tokens_per_second=generation.tokens_per_second,
            cache_bytes=0 if book is None else book.bytes,
            bits=0.0 if book is None else book.bits_stored,
            finish_reason=reason,
        )


def _messages(message: Any) -> list[Message]:
    """What was said as a list of messages of its own."""
    if isinstance(message, str):
        message = {"role": "user", "content": message} if message else ()
    items = [message] if isinstance(message, Mapping) else message
    messages: list[Any] = list(items) if isinstance(items, Iterable) else []
    if not messages or not all(
        isinstance(m, Mapping) and {"role", "content"} <= set(m) for m in messages
    ):
        raise UserError(
            'no message; wanted a text, or messages such as {"role": "user", "content": "Hello"}'
        )
    return [{**m} for m in messages]


def _answer_part(model: Model, before: Sequence[int], text: str, tokens: Sequence[int]) -> _Part:
    """An answer's text and ids; where a stop string ended it, those of the ids that are before
    it."""
    for count in range(len(tokens), 0, -1):
        reader = Detokenizer(model.tokenizer, before)
        reader.extend(tokens[:count])
        reader.finish()
        if text.startswith(reader.text):
            return _Part(reader.text, list(tokens[:count]))
    return _Part("", [])
