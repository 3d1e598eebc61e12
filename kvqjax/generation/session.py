"""A conversation whose cache stays from turn to turn: each turn feeds what is new and answers piece
by piece."""

import copy
import dataclasses
import itertools
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
from kvqjax.cache.moves import check_movable
from kvqjax.cache.surgery import crop, fork, resize
from kvqjax.generation.conversation import (
    LeftOut,
    Part,
    Places,
    Row,
    Template,
    answer_part,
    behind_answers,
    closed_up,
    dropped,
    ids_of,
    left_out,
    places_of,
    shortened,
    stops_of,
    template_of,
    without,
)
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
from kvqjax.generation.text import agreeing
from kvqjax.methods import MethodLike, parse, spelled_out
from kvqjax.model.loading import Model
from kvqjax.model.rope import check_length, longest_text
from kvqjax.step.checks import check_model
from kvqjax.step.new_cache import init_cache, planned_layout
from kvqjax.step.persist import load_cache, save_cache

# Tokens. The cache of a session without a capacity begins with this one, and doubles it.
LEAST_CAPACITY = 512

SHIFT = "context_shift"
Message = Mapping[str, Any]


class Turn(NamedTuple):
    """The cost of a session's last answer.

    - `tokens` of the answer, without the end token; `prompt_tokens` that were fed before it, and
      `kept_tokens` that the cache held already.
    - `seconds_to_first_token` includes the prompt and whatever was compiled, `tokens_per_second`
      counts the tokens after the first one.
    - `cache_bytes` of the session's cache, and `bits` that it spends on a number of a key or value.
    - `finish_reason`: "eos", "stop", "length", or "closed" for an answer that was broken off.
    - `dropped_tokens` of the conversation left the cache in this turn: text that a chat template
      leaves out by now, and with `context_shift` the oldest text."""

    tokens: int
    prompt_tokens: int
    kept_tokens: int
    seconds_to_first_token: float
    tokens_per_second: float
    cache_bytes: int
    bits: float
    finish_reason: str
    dropped_tokens: int = 0


class _Ready(NamedTuple):
    """A cache before an answer: the conversation that it will hold, how many of its tokens it
    holds, and how many have left it for that."""

    cache: Cache
    parts: list[Part]
    kept: int
    dropped: int


class Session:
    """A conversation with `model` through a cache of `method` that is kept from turn to turn.

        session = kvq.Session(model, "kivi:bits=2", system="You are brief.")
        for text in session.send("Hello!"):
            print(text, end="", flush=True)

    Every turn puts the whole conversation through the tokenizer's chat template, keeps what the
    cache holds of it, and feeds the rest. An answer's ids are used as they were made. Without a
    chat template turns are plain text, each on a new line. What a template leaves out of earlier
    turns (thinking) is taken out of the cache by `kvqjax.drop` where the method allows it. Otherwise,
    and where it changes earlier turns in another way, what follows is fed anew: `kvqjax.crop` says
    how far back the cache then goes.

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
        context_shift: bool = False,
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
            context_shift: Where the conversation is longer than `capacity`, or than what the model
                was trained for, its oldest turns leave the cache by `kvqjax.drop`, and it goes on.
                The system message stays. `history` keeps all.

        The other options are those of `kvqjax.generate`. The penalties of presence and frequency
        count the tokens of the answer under way, the repetition penalty those of the whole
        conversation.

        Raises:
            UserError: A model without a tokenizer, options that do not exist or cannot be; a
            `context_shift` of a cache whose tokens cannot move."""
        check_model(model)
        check_counts(capacity=capacity, max_new_tokens=max_new_tokens, stride=stride)
        if chunk != "auto":
            check_counts(chunk=chunk)
        if not model.has_tokenizer:
            raise UserError(
                "a session needs a tokenizer, and this model has none; generate takes token ids"
            )
        self.model = model
        self.method = parse(method)
        self.system = system
        checked = GenerateOptions(**options)
        self._options: dict[str, Any] = {
            "capacity": capacity, "max_new_tokens": max_new_tokens, "chunk": chunk, "kernels": kernels,
            "stride": stride, "context_shift": context_shift,
        } | dataclasses.asdict(checked)  # fmt: skip
        stride = min(stride, max_new_tokens)  # a row's new tokens have room for one stride
        self._settings = Settings.of(model, max_new_tokens, checked, stride, chunk)
        self._most = room_of(model, capacity, checked.beyond_trained)  # tokens of the conversation
        if context_shift:
            length = self._most or LEAST_CAPACITY
            check_movable(planned_layout(model, self.method, 1, length, kernels="off"), SHIFT)
        self.last: Turn | None = None
        self._history: list[Message] = []
        self._parts: list[Part] = []  # the conversation as the model knows it
        self._cache: Cache | None = None
        self._ids: list[int] = []  # what the cache holds
        self._answers = 0
        self._open: Answer | None = None
        self._plain = not has_chat_template(model)
        if self._plain:
            warnings.warn(PLAIN_CHAT, stacklevel=3)

    def __repr__(self) -> str:
        room = f"{len(self._ids)}"
        if self._cache is not None:
            room += f" of {self._capacity}"
        return f"Session({self.method}: {len(self._history)} messages, {room} tokens in the cache)"

    @property
    def history(self) -> list[dict[str, Any]]:
        """The messages so far, without the system message: a copy."""
        self._settle()
        return [dict(message) for message in self._history]

    @property
    def cache(self) -> Cache | None:
        """The cache of one row that holds the conversation. The next turn donates it: `fork`
        what you want to keep."""
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
        parts, gap = self._read(history)
        ids = ids_of(parts)
        check_vocabulary(self.model, 0, ids)
        new = max_new_tokens or self._settings.max_new_tokens
        if not self._options[SHIFT]:
            self._check_room(len(ids), new)
        elif self._excess(len(ids), new):
            # What cannot leave: the system message, this turn, and a token of the answer.
            places = self._places(parts, history)
            newest = places.turns[-1] if places.turns else places.head
            self._check_room(places.head + len(ids) - newest, 1)
        self._settings.options.ends(self.model, new)
        return Answer(self, history, parts, gap, new)

    def _check_room(self, length: int, new: int) -> None:
        """Raise UserError where a conversation of `length` tokens and `new` more do not fit."""
        capacity = self._options["capacity"]
        if capacity is not None and length + new > capacity:
            cause = f"do not fit this session's capacity of {capacity}"
            raise too_long(length, new, capacity, cause)
        check_length(self.model.config, length + new)
        require_trained(self.model, [length], new, self._settings.options.beyond_trained)

    def fork(self) -> "Session":
        """Copy the conversation: both go their own ways from here."""
        self._settle()
        session = copy.copy(self)
        session._history = copy.deepcopy(self._history)
        session._parts = copy.deepcopy(self._parts)
        session._ids = list(self._ids)
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
            session._parts = []
            for part, ids in text["parts"]:
                session._parts.append(Part(str(part), [int(token) for token in ids]))
            session._ids = [int(token) for token in text["ids"]]
            session._answers = int(text["answers"])
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
        """End an answer whose iterator was left before its end."""
        if self._open is not None:
            self._open.close()

    def _read(self, history: Sequence[Message]) -> tuple[list[Part], LeftOut | None]:
        """Read the conversation up to where the answer begins.

        Returns:
            Its parts: those that the session knows already keep their ids, the rest is encoded. And
            what its template has left out since the last turn."""
        text = self._text(history)
        parts: list[Part] = []
        gap = None
        place = 0  # characters of the text that are in `parts`
        for part in self._parts:
            if not text.startswith(part.text, place):
                break
            parts.append(part)
            place += len(part.text)
        if len(parts) < len(self._parts) and self._can_move():
            # Nothing of a system message that was taken back may stay at a seam.
            least = len(self._template(history).head)
            lacking = left_out(self.model, self._parts, text, self._plain, least)
            if lacking is not None:
                parts, gap = lacking
                place = sum(len(part.text) for part in parts)
        bounds = [place]
        most = self._most
        if self._options[SHIFT]:
            # What leaves a row takes no room in it, and it leaves by turns.
            most = None
            bounds += [end for end in behind_answers(text, history) if end > place]
        bounds.append(len(text))
        for start, stop in itertools.pairwise(bounds):
            if start == stop:
                continue
            if start:
                ids = continued_ids(self.model, text[start:stop], most)
            else:
                ids = self.model.encode(text[start:stop], self._plain, most)
            parts.append(Part(text[start:stop], ids))
        return parts, gap

    def _can_move(self) -> bool:
        """Say whether tokens can leave the middle of the cache."""
        if self._cache is None:
            return False
        try:
            check_movable(self._cache.layout)
        except UserError:
            return False
        return True

    def _excess(self, length: int, new: int) -> int:
        """Count the tokens, of `length`, that have to leave before an answer of `new` tokens
        begins."""
        if self._most is None:
            return 0
        return max(0, length + min(new, self._settings.stride) - self._most)

    def _places(self, parts: Sequence[Part], history: Sequence[Message]) -> Places:
        """Find where a conversation may be taken apart before its answer. Its last part may
        stay."""
        places = places_of(self.model, parts, self._template(history), self._plain)
        start = len(ids_of(parts[:-1]))
        newest = places.turns[-1] if places.turns else places.head
        if start > newest:
            places.turns.append(start)
        return places

    def _template(self, history: Sequence[Message]) -> Template:
        return template_of(self.model, self._messages(history), self._plain)

    def _messages(self, history: Sequence[Message]) -> list[Message]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *history]

    def _text(self, history: Sequence[Message]) -> str:
        messages = self._messages(history)
        return plain_text(messages) if self._plain else chat_text(self.model, messages)

    def _ready(self, answer: "Answer") -> _Ready:
        """Make a cache with room for an answer that holds at most all but one token of its
        conversation. The session's cache is used up."""
        row = None if self._cache is None else Row(self._cache, self._ids)
        self._cache = None
        self._ids = []
        row, parts, gap_tokens = self._with_gap_closed(row, answer)
        row, parts, oldest_tokens = self._with_room(row, parts, answer)
        left = gap_tokens + oldest_tokens  # tokens that have left the cache
        ids = ids_of(parts)
        present = 0 if row is None else row.cache.layout.capacity
        capacity = self._capacity_for(len(ids) + answer._new, present)
        if row is not None:
            cache = self._cropped(row, ids)
            kept = int(fetched(cache.lengths)[0][0])
            if kept:
                return _Ready(resize(cache, capacity), parts, kept, left)
            del cache, row  # before another one is made
        kernels = self._options["kernels"]
        cache = init_cache(self.model, self.method, 1, capacity, kernels=kernels)
        return _Ready(cache, parts, 0, left)

    def _with_gap_closed(
        self, row: Row | None, answer: "Answer"
    ) -> tuple[Row | None, list[Part], int]:
        """Take out of a row what the template has left out of earlier turns.

        Returns:
            (the row, the parts of the conversation, how many tokens have left)."""
        parts = answer._parts
        if row is None or answer._gap is None:
            return row, parts, 0
        new_row, with_seam, count = closed_up(self.model, row, parts, answer._gap)
        # Tokens that have to stay at the seam take room, which the conversation may not have.
        # Without them what follows the gap is read anew.
        length = len(ids_of(with_seam)) + answer._new
        if self._most is not None and length > self._most and not self._options[SHIFT]:
            return row, parts, 0
        return new_row, with_seam, count

    def _with_room(
        self, row: Row | None, parts: list[Part], answer: "Answer"
    ) -> tuple[Row | None, list[Part], int]:
        """Let the oldest turns leave where an answer would not fit otherwise, with `context_shift`.

        Returns:
            (the row, the parts of the conversation, how many tokens have left)."""
        length = len(ids_of(parts))
        excess = self._excess(length, answer._new)
        if not excess or not self._options[SHIFT]:
            return row, parts, 0
        places = self._places(parts, answer._history)
        row, rest = shortened(self.model, row, parts, places, excess)
        return row, rest, length - len(ids_of(rest))

    def _cropped(self, row: Row, ids: list[int]) -> Cache:
        """Crop a row's cache to the tokens that it shares with a conversation of `ids`."""
        cache = row.cache
        # The model must read one token at least: the answer's first comes from its logits.
        prefix = min(agreeing(row.ids, ids), len(ids) - 1)
        if cache.states and prefix < len(row.ids):
            # Recurrent layers cannot forget: what follows another beginning is read anew.
            prefix = 0
        return crop(cache, shared(self.model, np.asarray([prefix], np.int32)))

    def _capacity_for(self, need: int, present: int) -> int:
        """Choose the capacity of a cache for `need` tokens.

        Args:
            present: The capacity of the cache so far, which may grow; 0 without one."""
        # Oldest turns leave before the cache grows beyond this.
        most = self._most if self._options[SHIFT] else None
        if most is not None:
            need = min(need, most)
        capacity = self._options["capacity"] or self._grown(present, need)
        if most is not None:
            capacity = min(capacity, most)
        return capacity

    def _grown(self, capacity: int, need: int) -> int:
        """Choose a capacity for `need` tokens. It doubles, so that a long conversation is compiled
        few times."""
        size = max(capacity, LEAST_CAPACITY, 1 << (need - 1).bit_length())
        limit = longest_text(self.model.config)
        if limit is None:
            return size
        return max(min(size, limit), need)


class Answer(Iterator[str]):
    """An answer under way: an iterator over its text, which `Session.send` returns."""

    def __init__(
        self,
        session: Session,
        history: list[Message],
        parts: list[Part],
        gap: LeftOut | None,
        new: int,
    ):
        self._session = session
        self._number = session._answers
        self._history = history
        self._parts = parts
        self._gap = gap
        self._new = new
        self._generation: Generation | None = None
        self._kept = 0
        self._dropped = 0
        self._cuts: list[tuple[int, int]] = []  # what has left the row since the answer began
        self._over = False

    def __iter__(self) -> "Answer":
        return self

    def __next__(self) -> str:
        if self._generation is None and not self._over:
            self._session._settle()
            if self._session._answers != self._number:
                raise UserError("the conversation went on since this was sent; send it again")
        while not self._over:
            try:
                self._generation = self._generation or self._begun()
                piece = self._generation.advance()
            except Exception:
                # Numbers that are not finite, or no room in memory: nothing was said, and the next
                # turn feeds everything anew.
                self._end(None, [])
                raise
            if piece is None:
                self.close()
            elif piece.text[0]:
                return piece.text[0]
        raise StopIteration

    def close(self) -> None:
        """End the answer here, with what was made of it."""
        generation = self._generation
        if self._over:
            return
        if generation is None:
            # Nothing was asked for yet, or an interrupt came before the cache was ready.
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
        tokens = generation.tokens[0]
        reason = generation.reasons[0] or "closed"
        has_answer = bool(tokens) or reason != "closed"
        ids = ids_of(self._parts)
        in_row = [*ids, *tokens] if has_answer else ids[: self._kept]
        ids = ids_of(self._cut([Part("", in_row)]))
        if cache is not None and int(fetched(cache.lengths)[0][0]) != len(ids):
            cache = None  # an interrupt came while tokens left it
        self._end(cache, ids)
        if has_answer:
            self._add(generation, reason)

    def _begun(self) -> Generation:
        """Take the session's cache, and begin to make the answer in it."""
        session = self._session
        session._open = self
        cache, self._parts, self._kept, self._dropped = session._ready(self)
        kept = self._kept
        ids = ids_of(self._parts)
        options = session._settings.options
        # Every answer has random numbers of its own.
        seed = (options.seed + self._number) % (MOST_SEED + 1)
        options = dataclasses.replace(options, seed=seed)
        settings = session._settings._replace(max_new_tokens=self._new, options=options)
        lengths = np.asarray([kept], np.int32) if kept else None
        make_room = self._make_room if session._options[SHIFT] else None
        return Generation(
            session.model, [ids[kept:]], cache, settings, held=lengths, before=[ids[:kept]],
            make_room=make_room,
        )  # fmt: skip

    def _cut(self, parts: Sequence[Part]) -> list[Part]:
        """Cut out of the conversation and its answer what has left the row meanwhile."""
        rest = list(parts)
        for first, last in self._cuts:
            rest = without(rest, first, last)
        return rest

    def _make_room(self, cache: Cache, least: int) -> tuple[Cache, int]:
        """Let the oldest text leave while the answer is being made."""
        assert self._generation is not None
        session = self._session
        parts = self._cut([*self._parts, Part("", self._generation.tokens[0])])
        places = places_of(session.model, parts, session._template(self._history), session._plain)
        row = Row(cache, ids_of(parts))
        stops = stops_of(places, len(row.ids), least)
        row, first, last = dropped(session.model, row, places.head, stops, least)
        if last > first:
            self._cuts.append((first, last))
        return row.cache, last - first

    def _end(self, cache: Cache | None, ids: list[int]) -> None:
        """Return the cache to the session. Without one, the next turn feeds everything anew."""
        self._over = True
        session = self._session
        session._cache = cache
        session._ids = [] if cache is None else ids
        session._open = None

    def _add(self, generation: Generation, reason: str) -> None:
        """Make the turn a part of the conversation."""
        session = self._session
        text = generation.texts[0]
        tokens = generation.tokens[0]
        ids = ids_of(self._parts)
        session._history = [*self._history, {"role": "assistant", "content": text}]
        answer = answer_part(session.model, ids, text, tokens)
        session._parts = self._cut([*self._parts, answer])
        session._answers += 1
        book = None if session._cache is None else ledger(session._cache)
        session.last = Turn(
            tokens=len(tokens),
            prompt_tokens=len(ids) - self._kept,
            kept_tokens=self._kept,
            seconds_to_first_token=generation.seconds_to_first_token,
            tokens_per_second=generation.tokens_per_second,
            cache_bytes=0 if book is None else book.bytes,
            bits=0.0 if book is None else book.bits_stored,
            finish_reason=reason,
            dropped_tokens=self._dropped + sum(last - first for first, last in self._cuts),
        )


def _messages(message: Any) -> list[Message]:
    """Copy a text, a message or several messages into a list of messages."""
    if isinstance(message, str):
        message = {"role": "user", "content": message} if message else ()
    if isinstance(message, Mapping):
        message = [message]
    messages: list[Any] = list(message) if isinstance(message, Iterable) else []
    if not messages or not all(map(_is_message, messages)):
        raise UserError(
            'no message; wanted a text, or messages such as {"role": "user", "content": "Hello"}'
        )
    return [dict(message) for message in messages]


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value and "content" in value
