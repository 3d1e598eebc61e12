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
# A UTF-8 character has four bytes at most, so that so many may wait for its last one.
_MOST_BROKEN = 3
_CONTEXT = 8  # ids of the prompt that are decoded before its answer: some words, so that clean-up sees them
# Ids decoded at a step before their window moves on; so many take 19 us, and one 13 us.
_LONGEST = 16
# Ids that a window of broken characters keeps: three broken ones may stand for nine bytes.
_KEPT = 12
_FARTHEST = 512  # ids of the prompt that are looked through for a first one that is whole


def stop_strings(stop: str | Sequence[Any]) -> tuple[str, ...]:
    """The stop strings of an option: one string is one of them.

    Raises UserError for an empty one, and for what is no string."""
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
    """Whether transformers' tokenizer says that spaces before punctuation are taken out of decoded
    text. Looked up where transformers keeps it: other tokenizers may load transformers for an
    attribute that they lack."""
    return vars(tokenizer).get("clean_up_tokenization_spaces", False) is True


def _cleans_up(tokenizer) -> bool:
    """Whether text is cleaned up. The flag is meant for WordPiece: BPE keeps the spaces of a text
    as tokens, and transformers 5 passes the flag over there."""
    if not _flag(tokenizer):
        return False
    return (
        type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__
        != "BPE"
    )


def _decode(tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """The text of ids without clean-up, which is done on the joined text."""
    options = {"clean_up_tokenization_spaces": False} if _flag(tokenizer) else {}
    return decoded(tokenizer, ids, skip_special_tokens, **options)


@functools.lru_cache(maxsize=1 << 16)
def silent(tokenizer, token: int) -> bool:
    """Whether a token adds no text anywhere: a special token, or an id without an entry. Asked for
    two of it, since a space alone is the beginning of a text, which decoders of the SentencePiece
    kind leave out."""
    return not _decode(tokenizer, (token, token))


def agreeing(first: Sequence[int] | str, second: Sequence[int] | str) -> int:
    """Count the ids, or the characters, with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(first), len(second)))


def _settled(text: str) -> int:
    """How much of a text clean-up treats alike whatever follows. Its patterns begin with a space,
    and the longest, " n't", has three characters behind it. Else all is settled up to a space that
    no pattern reaches: only " n't" and " ' " can go on behind a space, which is taken out first."""
    if " " not in text[-3:]:
        return len(text)
    return next(
        (i for i in range(len(text) - 1, 0, -1) if text[i] == " " and text[i - 1] not in " n'"), 0
    )


class _Window:
    """Text of ids that come one at a time: the last of them are decoded, and what was given out is
    taken away.

    `given`: the part of the window's text that was given out. `whole`: how many of the window's
    ids, and of its characters, came before the character that is not whole."""

    def __init__(self, tokenizer):
        self._tokenizer, self._cleans = tokenizer, _cleans_up(tokenizer)
        self._ids, self._given, self._whole = [], "", (0, 0)
        self._unsettled = ""
        self.broken = ""  # what stands for a character not yet whole
        self.ahead = ""  # the text between what was given out and `broken`

    def push(self, ids: Sequence[int]) -> str:
        """Take ids and give out the text that no later one changes."""
        ids = [token for token in ids if not silent(self._tokenizer, token)]
        text = self._at_once(ids)
        text = "".join(map(self._push_token, ids)) if text is None else text
        if not self._cleans:
            return text
        text = self._unsettled + text
        place = _settled(text)
        self._unsettled = text[place:]
        self.ahead = self._tokenizer.clean_up_tokenization(self._unsettled)
        return self._tokenizer.clean_up_tokenization(text[:place])

    def _at_once(self, ids: list[int]) -> str | None:
        """The text of several ids by one call, where every character is whole; None where one is
        not."""
        if len(ids) < 2:
            return None
        text = _decode(self._tokenizer, self._ids + ids)
        if _BROKEN in text or not text.startswith(self._given):
            return None
        piece = text[len(self._given) :]
        self._ids, self._given, self.broken = self._ids + ids, text, ""
        self._whole = len(self._ids), len(text)
        return piece

    def _push_token(self, token: int) -> str:
        self._ids.append(token)
        text = _decode(self._tokenizer, self._ids)
        if not text.startswith(self._given):
            # Byte fallback: a byte breaks the characters before it too, until its own character is
            # whole.
            ids, length = self._whole
            self._ids, self._given, self._whole = self._ids[ids:], self._given[length:], (0, 0)
            text = _decode(self._tokenizer, self._ids)
            self._given = self._given[: agreeing(self._given, text)]
        count = min(_MOST_BROKEN, len(text) - len(text.rstrip(_BROKEN)))
        piece = text[len(self._given) : len(text) - count]
        self._given += piece
        self.broken = text[len(self._given) :]
        if not self.broken:
            self._end_character(text)
        elif len(self._ids) - self._whole[0] > _LONGEST:
            self._shorten_broken()
        return piece

    def _end_character(self, text: str):
        """Every id's text is whole: those before the last whole character can go."""
        newest = self._ids[self._whole[0] :]
        # The first id must have text, or the next one would be the first of its window, without its
        # space.
        if len(self._ids) > _LONGEST and (start := _decode(self._tokenizer, newest)):
            self._ids, text = newest, start
        self._given, self._whole = text, (len(self._ids), len(text))

    def _shorten_broken(self):
        """A long run of broken characters: go on from its last ids, where they end in the same
        text."""
        text = _decode(self._tokenizer, self._ids[-_KEPT:])
        if text.endswith(self.broken) and len(text) > len(self.broken):
            self._ids, self._given, self._whole = (
                self._ids[-_KEPT:],
                text[: -len(self.broken)],
                (0, 0),
            )


def _context(tokenizer, prompt: Sequence[int]) -> list[int]:
    """The last ids of a prompt that say something, from one on that is not part of a character."""
    ids = []
    for token in reversed(prompt[-_FARTHEST:]):
        if not silent(tokenizer, token):
            ids.append(token)
            text = _decode(tokenizer, (token,))
            if len(ids) >= _CONTEXT and text and _BROKEN not in text:
                break
    return ids[::-1]


def _first_stop(text: str, stop: Sequence[str]) -> tuple[int, int] | None:
    """(end, start) of the stop string that is complete first, and of these the longest."""
    places = [(place + len(s), place) for s in stop if (place := text.find(s)) >= 0]
    return min(places, default=None)


def beginning(text: str, stop: Sequence[str]) -> int:
    """How many characters at a text's end may be the beginning of one of some strings, of which it
    has none."""
    return max(
        (n for s in stop for n in range(1, min(len(text), len(s) - 1) + 1) if text.endswith(s[:n])),
        default=0,
    )


class Detokenizer:
    """The text of one row's answer, piece by piece.

    The pieces joined are `text`, in whatever portions the ids come: what transformers decodes of
    prompt and answer together, without the prompt's part of it. Special tokens have no text, unless
    they are shown by name. A character that the prompt began and the answer completed belongs to
    the answer. Bytes that are
    no character become U+FFFD; one that may still become a character is held back until `finish`.
    Of a run of byte tokens (byte fallback) that is broken somewhere, the characters before the
    broken place stay, where transformers takes the run for broken as a whole.

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
        self._tokenizer, self._stop, self._least = tokenizer, stop_strings(stop), least
        if tokenizer is None and self._stop:
            raise UserError("stop strings need a tokenizer, and this model has none")
        self._pieces, self._held = [], ""
        self._marks: list[
            tuple[int, str]
        ] = []  # special tokens: (place in held text and what follows it, text)
        self.ids: list[int] = []
        self.stopped = False
        self._ended = False
        self._lent = ""  # the prompt's text that ids of the answer may change
        self._shown: dict[int, str] = {}
        if tokenizer is not None:
            self._shown = {token: _decode(tokenizer, (token,), False) for token in shown}
            self._window = _Window(tokenizer)
            self._window.push(_context(tokenizer, prompt))
            self._lent = self._window.ahead + self._window.broken

    @property
    def text(self) -> str:
        """Every piece so far, joined."""
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
        pieces, portions = [], [[token] for token in ids] if self._stop else [ids]
        for portion in portions:
            if not self._ended:
                self.ids += portion
                pieces.append(self._take(portion))
        self._pieces += pieces
        return "".join(pieces)

    def finish(self) -> str:
        """End the row, and give out what was held back."""
        if self._ended or self._tokenizer is None:
            self._ended = True
            return ""
        self._ended = True
        piece = self._held + self._tail()
        self._pieces.append(piece)
        return piece

    def _tail(self) -> str:
        """The text that later ids might still change."""
        tail = self._window.ahead + self._window.broken
        return tail[agreeing(tail, self._lent) :]

    def _read(self, ids: Sequence[int]) -> str:
        """The text of the next ids, as far as no later one changes it."""
        pieces = []
        for is_shown, run in itertools.groupby(ids, self._shown.__contains__):
            if not is_shown:
                pieces.append(self._without_prompt(self._window.push(list(run))))
                continue
            if tail := self._tail():
                pieces.append(tail)
                self._window, self._lent = _Window(self._tokenizer), ""
            pieces += [self._shown[token] for token in run]
        return "".join(pieces)

    def _without_prompt(self, text: str) -> str:
        """Take away what the prompt lent."""
        count = agreeing(text, self._lent)
        self._lent = self._lent[count:] if count == len(text) else ""
        return text[count:]

    def _take(self, ids: Sequence[int]) -> str:
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
        self._marks = [(place - keep, text) for place, text in self._marks]
        return piece[:keep]

    def _mark(self, token: int, place: int):
        """Note the place of a special token that a stop string holds."""
        if token not in self._shown and silent(self._tokenizer, token):
            text = _decode(self._tokenizer, (token,), False)
            if text and any(text in s for s in self._stop):
                self._marks.append((place, text))

    def _marked(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """Text with its special tokens, and where these stand in it: (place, length)."""
        parts, spans, before, added = [], [], 0, 0
        for place, mark in self._marks:
            place = min(place, len(text))
            parts += [text[before:place], mark]
            spans.append((place + added, len(mark)))
            before, added = place, added + len(mark)
        return "".join([*parts, text[before:]]), spans

    def _unmarked(self, place: int, spans: list[tuple[int, int]]) -> int:
        """Where a place of the text with special tokens is in the text without."""
        return place - sum(min(length, max(0, place - start)) for start, length in spans)

    def _special(self) -> list[str]:
        """The stop strings that hold one of the special tokens noted."""
        return [s for s in self._stop if any(text in s for _, text in self._marks)]

    def _end(self, text: str) -> int | None:
        """Where the first stop string begins."""
        places = [_first_stop(text, self._stop)]
        if self._marks:
            marked, spans = self._marked(text)
            hit = _first_stop(marked, self._special())
            places.append(hit and (self._unmarked(hit[0], spans), self._unmarked(hit[1], spans)))
        return min((hit for hit in places if hit is not None), default=(0, None))[1]

    def _waiting(self, text: str) -> int:
        """How many characters at the end may belong to a stop string that is not complete. Special
        tokens before it are forgotten."""
        count = beginning(text, self._stop)
        if self._marks:
            marked, spans = self._marked(text)
            start = len(marked) - beginning(marked, self._special())
            count = max(count, len(text) - self._unmarked(start, spans))
            self._marks = [
                mark for mark, span in zip(self._marks, spans, strict=True) if span[0] >= start
            ]
        return count
