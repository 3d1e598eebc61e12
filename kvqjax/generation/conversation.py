"""The record of a conversation: its text in parts, each with the token ids by which a cache's row
holds it.

    text   system, turn 1 | answer 1 | turn 2 | ...
    ids    system, t .... | ....... .| urn 2  | ...     the oldest turn has left the row

Every turn of a conversation puts all of its messages through a chat template. What the result has
in common with the text of the parts is not read again. Ids that leave the row by `kvqjax.drop`
leave their part, whose text stays. Text that a template leaves out leaves with its ids, and those
that `drop` has to leave at a seam stand in a part without text. So the ids of all parts are those
of the row, one after the other."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvqjax._errors import UserError
from kvqjax.cache import Cache
from kvqjax.cache.moves import leaving, without_tokens
from kvqjax.generation.loop import fetched, shared
from kvqjax.generation.prompt_ids import chat_text, continued_ids, plain_text
from kvqjax.generation.text import Detokenizer, agreeing
from kvqjax.model.loading import Model

# Characters at the end of a text by which its place in a later one is looked for.
LEAST_AGREEING = 16
# Attention rests on the first tokens of a text, whatever they say (StreamingLLM, arXiv 2309.17453).
KEPT_FIRST = 4
PROBE = "ZQX"  # a message's words, to see what a template writes around them


class Part(NamedTuple):
    """A stretch of the conversation as text, and the token ids by which the model has read or made
    it, as far as the row holds them."""

    text: str
    ids: list[int]


class LeftOut(NamedTuple):
    """Ids that lay before part `number` of a conversation, and whose text a template has left
    out."""

    number: int
    ids: list[int]


def ids_of(parts: Sequence[Part]) -> list[int]:
    """Join the ids of all parts."""
    return [token for part in parts for token in part.ids]


def without(parts: Sequence[Part], start: int, stop: int) -> list[Part]:
    """Take the ids from number `start` to `stop - 1` of all parts out of them."""
    rest = []
    place = 0  # ids of the parts before
    for part in parts:
        first = min(max(start - place, 0), len(part.ids))
        last = min(max(stop - place, 0), len(part.ids))
        place += len(part.ids)
        rest.append(Part(part.text, part.ids[:first] + part.ids[last:]))
    return rest


def answer_part(model: Model, before: Sequence[int], text: str, tokens: Sequence[int]) -> Part:
    """Make the part of an answer. Where a stop string ended it, ids from the string on are left
    out."""
    for count in range(len(tokens), 0, -1):
        reader = Detokenizer(model.tokenizer, before)
        reader.extend(tokens[:count])
        reader.finish()
        if text.startswith(reader.text):
            return Part(reader.text, list(tokens[:count]))
    return Part("", [])


def behind_answers(text: str, history: Sequence[Mapping[str, Any]]) -> list[int]:
    """Find where the answers of a conversation end in its text, as far as it has their words."""
    ends = []
    place = 0
    for message in history:
        words = str(message["content"] or "").strip()
        if message["role"] != "assistant" or not words:
            continue
        start = text.find(words, place)
        if start >= 0:
            place = start + len(words)
            ends.append(place)
    return ends


def left_out(
    model: Model, parts: Sequence[Part], text: str, special: bool, least: int
) -> tuple[list[Part], LeftOut] | None:
    """Find one stretch of a conversation that a later text of it lacks.

    Args:
        model: whose tokenizer has written the ids.
        parts: of the conversation.
        text: the later text, which begins otherwise.
        least: the characters with which both have to begin.
        special: whether the first part has the tokens that begin a text.

    Returns:
        (the parts that the text begins with; what it has left out). None where the text differs in
        another way, or a place at which it differs lies within a token."""
    before = "".join(part.text for part in parts)
    start = agreeing(before, text)
    end = before[-LEAST_AGREEING:]
    if start < least:
        return None
    place = text.rfind(end)  # the last place: as little as possible was left out
    while place >= 0:
        count = place + len(end) - start  # characters behind what was left out
        if count <= 0:
            return None
        if text.startswith(before[len(before) - count :], start):
            break
        place = text.rfind(end, 0, place + len(end) - 1)
    else:
        return None
    stop = len(before) - count
    # before = [0, start) kept, [start, stop) left out, [stop, ..) kept
    head = _first_parts(model, parts, start, special)
    tail = _last_parts(model, parts, len(before) - stop)
    if head is None or tail is None:
        return None
    ids = ids_of(parts)
    between = ids[len(ids_of(head)) : len(ids) - len(ids_of(tail))]
    return [*head, *tail], LeftOut(len(head), between)


def _first_parts(
    model: Model, parts: Sequence[Part], count: int, special: bool
) -> list[Part] | None:
    """Cut parts behind their first `count` characters; None: that is within a token."""
    first = []
    for number, part in enumerate(parts):
        if count < len(part.text):
            text = part.text[:count]
            ids = continued_ids(model, text) if number else model.encode(text, special)
            fits = part.ids[: len(ids)] == ids
            return [*first, Part(text, ids)] if fits else None
        first.append(part)
        count -= len(part.text)
    return first


def _last_parts(model: Model, parts: Sequence[Part], count: int) -> list[Part] | None:
    """Cut parts before their last `count` characters; None: that is within a token."""
    last: list[Part] = []
    for part in reversed(parts):
        if not count:
            break
        if count < len(part.text):
            text = part.text[-count:]
            ids = continued_ids(model, text)
            fits = part.ids[len(part.ids) - len(ids) :] == ids
            return [Part(text, ids), *last] if fits else None
        last.insert(0, part)
        count -= len(part.text)
    return last


# --- What leaves where a conversation is longer than its row


class Template(NamedTuple):
    """What is written around messages: `head` before the first turn, which never leaves, and
    `close` between an answer and the turn behind it."""

    head: str
    close: str


def template_of(model: Model, messages: Sequence[Any], plain: bool) -> Template:
    """Find the text that a template writes around the messages of a conversation. `plain`: there is
    no template."""

    system = [message for message in messages[:1] if message.get("role") == "system"]

    def written(*roles: str, words: str = PROBE) -> str:
        conversation = [*system, *({"role": role, "content": words} for role in roles)]
        if plain:
            return plain_text(conversation)
        return chat_text(model, conversation, "message")

    # Two questions differ from their words on. Where there is no system message, a template may
    # write one of its own.
    question = written("user")
    other = written("user", words=PROBE[::-1])
    head = question[: agreeing(question, other)]
    if system:
        with contextlib.suppress(UserError):  # a template that wants a turn behind it
            head = written()
    if plain:
        return Template(head, "\n")
    exchange = written("user", "assistant")
    behind_answer = exchange.rindex(PROBE) + len(PROBE)
    return Template(head, exchange[behind_answer:])


def head_of(model: Model, template: Template, ids: Sequence[int], special: bool) -> int:
    """Count the first of a conversation's ids that never leave. `special`: it has the tokens that
    begin a text."""
    return max(KEPT_FIRST, agreeing(model.encode(template.head, special), ids))


class Places(NamedTuple):
    """Where the ids of a conversation may be taken apart: how many of them never leave, and the
    first one of every later turn, in rising order."""

    head: int
    turns: list[int]


def places_of(model: Model, parts: Sequence[Part], template: Template, special: bool) -> Places:
    """Find the places of a conversation. `special`: the first part has the tokens that begin a
    text."""
    head = head_of(model, template, ids_of(parts), special)
    close = continued_ids(model, template.close) if template.close.strip() else []
    turns = []
    place = 0  # ids of the parts before
    for number, part in enumerate(parts):
        # A part that begins by closing an answer has the next turn behind that.
        closes_turn = part.text.startswith(template.close) and part.ids[: len(close)] == close
        turn = place + len(close)
        if number and template.close and closes_turn and turn > head:
            turns.append(turn)
        place += len(part.ids)
    return Places(head, turns)


def stops_of(places: Places, length: int, least: int) -> list[int]:
    """Choose where what leaves of a row of `length` tokens may end, the best place first, so that
    `least` tokens leave or more.

    It begins behind the head. About half of what follows leaves, so that a shift is rare, up to
    where a turn begins."""
    half = places.head + max((length - places.head + 1) // 2, least)
    behind_half = [turn for turn in places.turns if turn >= half]
    enough = [turn for turn in places.turns if turn >= places.head + least]
    return [*behind_half[:1], *enough[-1:], half]


class Row(NamedTuple):
    """A cache of one row, whose tokens can move, and the ids that it holds. A body in pages may be
    left out."""

    cache: Cache
    ids: list[int]


def dropped(
    model: Model, row: Row, start: int, stops: Sequence[int], least: int
) -> tuple[Row, int, int]:
    """Take tokens from `start` on out of a row: up to the first of `stops` with which `least`
    tokens leave or more, or to that with which most leave.

    Returns:
        (the row, the first token that left, the one behind the last); equal numbers where none
        could leave."""

    def bounds(stop: int) -> tuple:
        return shared(model, (np.asarray([start], np.int32), np.asarray([stop], np.int32)))

    best = first = last = start
    for stop in stops:
        # Tokens that can leave may be fewer than those up to `stop`: a body gives up whole units.
        low, high = fetched(*leaving(row.cache, *bounds(max(start, stop))))
        if int(high[0]) - int(low[0]) > last - first:
            best = stop
            first = int(low[0])
            last = int(high[0])
        if last - first >= least:
            break
    if last == first:
        return row, first, last
    ids = row.ids[:first] + row.ids[last:]
    return Row(without_tokens(row.cache, *bounds(best)), ids), first, last


def closed_up(
    model: Model, row: Row, parts: Sequence[Part], gap: LeftOut
) -> tuple[Row, list[Part], int]:
    """Take what a template has left out of a conversation out of its row. What stays at the seam
    becomes a part without text.

    Returns:
        (the row, the parts, how many tokens have left)."""
    start = len(ids_of(parts[: gap.number]))
    stop = start + len(gap.ids)
    if row.ids[start:stop] != gap.ids:
        return row, list(parts), 0
    closed, first, last = dropped(model, row, start, [stop], 1)
    if last == first:  # as a part of the conversation it would stay for good
        return row, list(parts), 0
    seam = Part("", row.ids[start:first] + row.ids[last:stop])
    return closed, [*parts[: gap.number], seam, *parts[gap.number :]], last - first


def shortened(
    model: Model, row: Row | None, parts: Sequence[Part], places: Places, excess: int
) -> tuple[Row | None, list[Part]]:
    """Let the oldest turns leave a conversation, `excess` tokens or more, and its row. The newest
    turn stays.

    Returns:
        (the row, the parts)."""
    ids = ids_of(parts)
    newest = places.turns[-1] if places.turns else places.head
    stop = min(stops_of(places, len(ids), excess)[0], newest)
    prefix = 0 if row is None else agreeing(row.ids, ids)
    if row is None or prefix <= places.head:
        return row, without(parts, places.head, stop)
    # What the row holds of it leaves up to where units end.
    end = min(stop, prefix)
    closed, first, last = dropped(model, row, places.head, [end], excess)
    if last - first + stop - end >= excess:
        return closed, without(without(parts, end, stop), first, last)
    return row, without(parts, places.head, stop)  # what follows is read anew
