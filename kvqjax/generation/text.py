"""How new token ids become text: piece by piece, as part of the text that the prompt began, up to a
stop string.

What a token says depends on its neighbours. Decoders of the SentencePiece kind take the space off a
text's first word, a character may need several tokens, and some tokenizers take spaces away
afterwards. So new ids are decoded behind a few ids before them, whose text is taken away again. The
ids decoded at a step do not grow with the text.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from kvqjax._errors import UserError
from kvqjax.model.tokenizer_calls import decoded

_BROKEN = "\ufffd"  # a decoder's answer to bytes that are no character, or not yet
# A UTF-8 character has four bytes at most, so that three may wait for the last one.
_MOST_BROKEN = 3
# Ids of the prompt that are decoded before its answer: some words, so that clean-up sees them
_CONTEXT = 8
# Ids decoded at a step before their window moves on. Sixteen take 19 us, and one takes 13 us.
_LONGEST = 16
# Ids that a window of broken characters keeps: three broken ones may stand for nine bytes.
_KEPT = 12
_FARTHEST = 512  # ids of the prompt that are looked through for a first one that is whole


def stop_strings(stop: str | Sequence[Any]) -> tuple[str, ...]:
    """Read the stop strings of an option, which may be a single string.

    Raises UserError for an empty one, and for a value that is no string."""
    if not isinstance(stop, Iterable):
        raise UserError(f"stop={stop!r}; wanted a string, or a list of strings", parameter="stop")
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in texts:
        if not isinstance(text, str):
            cause = f"stop has {text!r}; wanted strings"
            raise UserError(
                cause, "{eos_ids} takes the ids of tokens", parameter="stop", eos_ids=None
            )
        if not text:
            raise UserError(
                "an empty stop string would end every text before its first token", parameter="stop"
            )
    return texts


def _flag(tokenizer) -> bool:
    """Say whether transformers' tokenizer declares that spaces before punctuation are taken out of
    decoded text. Looked up where transformers keeps it: other tokenizers may load transformers for
    an attribute that they lack."""
    return vars(tokenizer).get("clean_up_tokenization_spaces", False) is True


def _cleans_up(tokenizer) -> bool:
    """Say whether text is cleaned up. The flag is meant for WordPiece: BPE keeps the spaces of a
    text as tokens, and transformers 5 passes the flag over there."""
    if not _flag(tokenizer):
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = getattr(backend, "model", None)
    return type(model).__name__ != "BPE"


def _decode(tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Decode ids without clean-up, which is done on the joined text."""
    options = {"clean_up_tokenization_spaces": False} if _flag(tokenizer) else {}
    return decoded(tokenizer, ids, skip_special_tokens, **options)


@functools.lru_cache(maxsize=1 << 16)
def silent(tokenizer, token: int) -> bool:
    """Say whether a token adds no text anywhere: a special token, or an id without an entry."""
    # Two of it are decoded: decoders of the SentencePiece kind leave out a space that a text begins
    # with, so that a space alone would seem silent.
    return not _decode(tokenizer, (token, token))


def agreeing(first: Sequence[int] | str, second: Sequence[int] | str) -> int:
    """Count the ids, or the characters, with which both begin."""
    for number, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return number
    return min(len(first), len(second))


def _settled(text: str) -> int:
    """Count the characters of a text that clean-up treats alike whatever follows.

    Its patterns begin with a space, and the longest, " n't", has three characters behind it. Else
    all is settled up to a space that no pattern reaches: only " n't" and " ' " can go on behind a
    space, which is taken out first."""
    if " " not in text[-3:]:
        return len(text)
    for place in range(len(text) - 1, 0, -1):
        if text[place] == " " and text[place - 1] not in " n'":
            return place
    return 0


class _Window:
    """Text of ids that come one at a time: the last of them are decoded, and what was given out is
    taken away.

    `broken` stands for a character that is not yet whole. `ahead` is the text between what was
    given out and `broken`."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._cleans = _cleans_up(tokenizer)
        self._ids: list[int] = []
        self._given = ""  # the part of the window's text that was given out
        # The window's ids, and its characters, before the character that is not whole.
        self._whole = (0, 0)
        self._unsettled = ""  # text that clean-up may still change
        self.broken = ""
        self.ahead = ""

    def push(self, ids: Sequence[int]) -> str:
        """Take ids and give out the text that no later one changes."""
        ids = [token for token in ids if not silent(self._tokenizer, token)]
        text = self._at_once(ids)
        if text is None:
            text = "".join(self._push_token(token) for token in ids)
        if not self._cleans:
            return text
        text = self._unsettled + text
        place = _settled(text)
        self._unsettled = text[place:]
        self.ahead = self._tokenizer.clean_up_tokenization(self._unsettled)
        return self._tokenizer.clean_up_tokenization(text[:place])

    def _at_once(self, ids: list[int]) -> str | None:
        """Decode several ids by one call, where every character is whole. Return None where one is
        not."""
        if len(ids) < 2:
            return None
        joined = self._ids + ids
        text = _decode(self._tokenizer, joined)
        if _BROKEN in text or not text.startswith(self._given):
            return None
        piece = text[len(self._given) :]
        self._ids = joined
        self._given = text
        self._whole = (len(joined), len(text))
        self.broken = ""
        return piece

    def _push_token(self, token: int) -> str:
        """Take one id and give out the characters that are whole."""
        self._ids.append(token)
        text = _decode(self._tokenizer, self._ids)
        if not text.startswith(self._given):
            # Byte fallback: a byte breaks the characters before it too, until its own character is
            # whole.
            ids, length = self._whole
            self._ids = self._ids[ids:]
            self._given = self._given[length:]
            self._whole = (0, 0)
            text = _decode(self._tokenizer, self._ids)
            self._given = self._given[: agreeing(self._given, text)]
        at_end = len(text) - len(text.rstrip(_BROKEN))
        count = min(_MOST_BROKEN, at_end)  # broken characters that may still become whole
        piece = text[len(self._given) : len(text) - count]
        self._given += piece
        self.broken = text[len(self._given) :]
        if not self.broken:
            self._end_character(text)
        elif len(self._ids) - self._whole[0] > _LONGEST:
            self._shorten_broken()
        return piece

    def _end_character(self, text: str):
        """Note that every id's text is whole. In a long window, ids before the last whole character
        go."""
        newest = self._ids[self._whole[0] :]
        if len(self._ids) > _LONGEST:
            start = _decode(self._tokenizer, newest)
            # The first id must have text, or the next one would be the first of its window, without
            # its space.
            if start:
                self._ids = newest
                text = start
        self._given = text
        self._whole = (len(self._ids), len(text))

    def _shorten_broken(self):
        """Shorten the window of a long run of broken characters to its last ids, where they end in
        the same text."""
        newest = self._ids[-_KEPT:]
        text = _decode(self._tokenizer, newest)
        if text.endswith(self.broken) and len(text) > len(self.broken):
            self._ids = newest
            self._given = text[: -len(self.broken)]
            self._whole = (0, 0)


def _context(tokenizer, prompt: Sequence[int]) -> list[int]:
    """Return the last ids of a prompt that have text. The first of them is no part of a
    character."""
    ids = []
    for token in reversed(prompt[-_FARTHEST:]):
        if not silent(tokenizer, token):
            ids.append(token)
            text = _decode(tokenizer, (token,))
            if len(ids) >= _CONTEXT and text and _BROKEN not in text:
                break
    return ids[::-1]


def _first_stop(text: str, stop: Sequence[str]) -> tuple[int, int] | None:
    """Return (end, start) of the stop string that is complete first, and of these the longest."""
    places = []
    for string in stop:
        start = text.find(string)
        if start >= 0:
            places.append((start + len(string), start))
    return min(places, default=None)


def beginning(text: str, stop: Sequence[str]) -> int:
    """Count the characters at a text's end that may begin one of some strings, none of which the
    text has."""
    longest = 0
    for string in stop:
        most = min(len(text), len(string) - 1)
        for count in range(longest + 1, most + 1):
            if text.endswith(string[:count]):
                longest = count
    return longest


class Detokenizer:
    """The text of one row's answer, piece by piece.

    The pieces joined are `text`, in whatever portions the ids come: what transformers decodes of
    prompt and answer together, without the prompt's part of it. Special tokens have no text, unless
    they are shown by name. A character that the prompt began and the answer completed belongs to
    the answer. Bytes that are no character become U+FFFD; one that may still become a character is
    held back until `finish`. Of a run of byte tokens (byte fallback) that is broken somewhere, the
    characters before the broken place stay, where transformers takes the run for broken as a whole.

    A row stops at the first token with which its answer holds a stop string. `text` ends before it,
    `ids` after that token. A stop string lies within the answer; what the prompt ends with does not
    begin one. It may begin and end within tokens, and may hold special tokens by their text
    ("<|im_end|>"): these are seen by such stop strings alone. The stop string that is complete
    first counts, and of several the longest. What may be the beginning of one is held back.
    """

    def __init__(
        self,
        tokenizer,
        prompt: Sequence[int],
        stop: str | Sequence[Any] = (),
        least: int = 0,
        shown: Sequence[int] = (),
    ):
        """Begin after a prompt's ids.

        Args:
          tokenizer: a Hugging Face tokenizer. None: the answer has ids and no text.
          prompt: the ids before the answer.
          stop: strings that end it.
          least: tokens at the answer's beginning in which no stop string counts.
          shown: special tokens that stand in the text by their names.

        Raises:
          UserError: for an empty stop string, and for stop strings without a tokenizer."""
        self._tokenizer = tokenizer
        self._stop = stop_strings(stop)
        self._least = least
        if tokenizer is None and self._stop:
            raise UserError("stop strings need a tokenizer, and this model has none")
        self._pieces: list[str] = []
        self._held = ""  # text that may begin a stop string
        # Special tokens: their place in the held text and the text after it, and their names.
        self._marks: list[tuple[int, str]] = []
        self.ids: list[int] = []
        self.stopped = False
        self._ended = False
        self._lent = ""  # the prompt's text that ids of the answer may change
        self._shown: dict[int, str] = {}
        if tokenizer is not None:
            for token in shown:
                self._shown[token] = _decode(tokenizer, (token,), False)
            self._window = _Window(tokenizer)
            self._window.push(_context(tokenizer, prompt))
            self._lent = self._window.ahead + self._window.broken

    @property
    def text(self) -> str:
        """All pieces so far, joined."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def extend(self, ids: Sequence[int]) -> str:
        """Take the row's next ids and give out the next piece of text. Ids behind a stop string are
        left out, and so are those after `finish`."""
        if self._ended:
            return ""
        if self._tokenizer is None:
            self.ids += ids
            return ""
        # A stop string is looked for after every token: the answer ends at the first one with it.
        portions = [[token] for token in ids] if self._stop else [ids]
        pieces = []
        for portion in portions:
            if not self._ended:
                self.ids += portion
                pieces.append(self._take(portion))
        self._pieces += pieces
        return "".join(pieces)

    def finish(self) -> str:
        """End the row, and give out what was held back."""
        had_ended = self._ended
        self._ended = True
        if had_ended or self._tokenizer is None:
            return ""
        piece = self._held + self._tail()
        self._pieces.append(piece)
        return piece

    def _tail(self) -> str:
        """Return the text that later ids might still change."""
        tail = self._window.ahead + self._window.broken
        return tail[agreeing(tail, self._lent) :]

    def _read(self, ids: Sequence[int]) -> str:
        """Read the text of the next ids, as far as no later one changes it."""
        pieces = []
        for is_shown, run in itertools.groupby(ids, self._shown.__contains__):
            if not is_shown:
                pieces.append(self._without_prompt(self._window.push(list(run))))
                continue
            # A name ends the characters before it: the text behind it begins anew.
            tail = self._tail()
            if tail:
                pieces.append(tail)
                self._window = _Window(self._tokenizer)
                self._lent = ""
            pieces += [self._shown[token] for token in run]
        return "".join(pieces)

    def _without_prompt(self, text: str) -> str:
        """Take away the text that belongs to the prompt."""
        count = agreeing(text, self._lent)
        self._lent = self._lent[count:] if count == len(text) else ""
        return text[count:]

    def _take(self, ids: Sequence[int]) -> str:
        """Read ids (with stop strings one id), and return the text that no stop string takes
        back."""
        piece = self._held + self._read(ids)
        if not self._stop or len(self.ids) <= self._least:
            return piece
        ahead = self._window.ahead
        preview = piece + ahead[agreeing(ahead, self._lent) :]
        self._mark(ids[0], len(preview))
        end = self._end(preview)
        if end is not None:
            self.stopped = self._ended = True
            return preview[:end]
        keep = len(piece) - self._waiting(piece)
        self._held = piece[keep:]
        self._marks = [(place - keep, name) for place, name in self._marks]
        return piece[:keep]

    def _mark(self, token: int, place: int):
        """Note the place of a special token that a stop string holds."""
        if token in self._shown or not silent(self._tokenizer, token):
            return
        name = _decode(self._tokenizer, (token,), False)
        if name and any(name in string for string in self._stop):
            self._marks.append((place, name))

    def _marked(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """Return the text with its special tokens, and where these stand in it: (place, length)."""
        parts = []
        spans = []
        before = 0  # characters of the text that are in `parts`
        added = 0  # characters of special tokens
        for place, name in self._marks:
            place = min(place, len(text))
            parts += [text[before:place], name]
            spans.append((place + added, len(name)))
            before = place
            added += len(name)
        parts.append(text[before:])
        return "".join(parts), spans

    def _unmarked(self, place: int, spans: list[tuple[int, int]]) -> int:
        """Translate a place in the text with special tokens into one in the text without."""
        added = 0
        for start, length in spans:
            added += min(length, max(0, place - start))
        return place - added

    def _special(self) -> list[str]:
        """List the stop strings that hold one of the special tokens noted."""
        names = [name for _, name in self._marks]
        return [string for string in self._stop if any(name in string for name in names)]

    def _end(self, text: str) -> int | None:
        """Find where the first stop string begins; None where there is none."""
        places = []
        plain = _first_stop(text, self._stop)
        if plain is not None:
            places.append(plain)
        if self._marks:
            marked, spans = self._marked(text)
            special = _first_stop(marked, self._special())
            if special is not None:
                end, start = special
                places.append((self._unmarked(end, spans), self._unmarked(start, spans)))
        if not places:
            return None
        _, start = min(places)
        return start

    def _waiting(self, text: str) -> int:
        """Count the characters at the end that may belong to a stop string that is not complete.
        Special tokens before it are forgotten."""
        count = beginning(text, self._stop)
        if self._marks:
            marked, spans = self._marked(text)
            start = len(marked) - beginning(marked, self._special())
            count = max(count, len(text) - self._unmarked(start, spans))
            marks = zip(self._marks, spans, strict=True)
            self._marks = [mark for mark, (place, _) in marks if place >= start]
        return count
