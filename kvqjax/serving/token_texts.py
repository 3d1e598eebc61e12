"""Facts of single tokens in answers: their names, their bytes, their places in the text, their log
probabilities.

A name is the token's text as it stands within a text, such as " the". A token without a text of its
own is named as OpenAI does: "bytes:\\xe6" is a part of a character. Two tokens of one text in one
place have two names: the second is "token_id:123", which is vLLM's form.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvqjax.generation.text import Detokenizer, silent
from kvqjax.model.loading import Model
from kvqjax.model.token_bytes import TokenBytes, token_bytes
from kvqjax.serving.request import TokenScore

FAR = 64  # bytes of a text that are looked through for a token that does not stand where it should


class Echoed(NamedTuple):
    """A prompt that an answer repeats: its text, its ids, and the scores of its tokens after the
    first."""

    text: str
    ids: Sequence[int]
    scores: Sequence[TokenScore]


def _name(raw: bytes) -> str:
    """Return a token's text, or the bytes of a part of a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def text_places(text: str, tokens: Iterable[tuple[bytes, bool]]) -> list[int]:
    """Find where the tokens of a text begin in it.

    Args:
        text: the text. It may lack special tokens, and the blank before its first word.
        tokens: the bytes of each token, and whether it is a special one.

    Returns:
        The character at which each token begins. Of a text that the tokenizer changed before it
        split it, the nearest place behind the token before.
    """
    raw = text.encode()
    place = 0  # all places are in bytes
    places = []
    for piece, special in tokens:
        places.append(place)
        if raw.startswith(piece, place):
            place += len(piece)
        elif piece[:1] == b" " and raw.startswith(piece[1:], place):
            # The text lacks the blank before its first word.
            place += len(piece) - 1
        elif not special:
            # The tokenizer has changed the text. Without a place to be seen, the token counts as
            # long as it is.
            hit = raw.find(piece, place, place + len(piece) + FAR)
            if hit >= 0:
                places[-1] = hit
            place = min(places[-1] + len(piece), len(raw))
    # Bytes to characters. A token that begins within a character has that character's place.
    return [len(raw[:place].decode(errors="ignore")) for place in places]


class AnswerScores:
    """The log probabilities of one answer, as the protocols have them, piece by piece."""

    def __init__(self, model: Model, prompt: Sequence[int], by_number: bool = False):
        """Begin an answer.

        Args:
            model: of the answer.
            prompt: the ids before it.
            by_number: name every token "token_id:123".
        """
        self._tokenizer = model.tokenizer if model.has_tokenizer else None
        self._table: TokenBytes | None = None
        if self._tokenizer is not None:
            self._table = token_bytes(self._tokenizer)
        self._by_number = by_number
        self._begun = self._has_text(prompt)  # the text has begun: blanks count
        self._reader = Detokenizer(self._tokenizer, prompt)
        self._place = 0

    def completion(
        self, scores: Sequence[TokenScore], echoed: Echoed | None = None
    ) -> dict[str, Any]:
        """Write log probabilities as completions have them.

        Args:
            scores: of the next tokens.
            echoed: the prompt, where the answer's text begins with it.

        Returns:
            Tokens, their log probabilities, the likeliest ones in their places, and where they
            begin in the text.
        """
        entries: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        if echoed is not None:
            self._echo(entries, echoed)
        for score in scores:
            place = self._moved_over(score.token)
            self._add(entries, score, place, self._begun)
            self._begun = self._begun or self._has_text([score.token])
        return entries

    def chat(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        """Write log probabilities as chat answers have them. Bytes of consecutive tokens, joined,
        are the text."""
        content = []
        for score in scores:
            names = self._names([score.token, *score.likeliest], self._begun)
            entries = {}
            for token, logprob in [*score.likeliest.items(), (score.token, score.logprob)]:
                entries[token] = {
                    "token": names[token],
                    "logprob": logprob,
                    "bytes": list(self._in_text(token)),
                }
            likeliest = [dict(entries[token]) for token in score.likeliest]
            content.append(entries[score.token] | {"top_logprobs": likeliest})
            self._begun = self._begun or self._has_text([score.token])
        return {"content": content, "refusal": None}

    def _echo(self, entries: dict[str, list[Any]], echoed: Echoed) -> None:
        """Add the prompt's tokens, of which the first has no score."""
        raws = [self._raw(token, begun=True) for token in echoed.ids]
        are_special = [self._is_silent(token) for token in echoed.ids]
        places = text_places(echoed.text, zip(raws, are_special, strict=True))
        begun = False
        for number, (token, place) in enumerate(zip(echoed.ids, places, strict=True)):
            if number == 0:
                entries["tokens"].append(self._names([token], begun)[token])
                entries["token_logprobs"].append(None)
                entries["top_logprobs"].append(None)
                entries["text_offset"].append(place)
            elif number <= len(echoed.scores):
                self._add(entries, echoed.scores[number - 1], place, begun)
            begun = begun or self._has_text([token])
        self._place = len(echoed.text)

    def _moved_over(self, token: int) -> int:
        """Find where an answer's next token begins in the text, and move behind it. A part of a
        character is held back until a later token completes it, or shows that it is none; that
        token begins behind it."""
        place = self._place
        self._place += len(self._reader.extend([token]))
        if self._is_silent(token):
            return place
        text = self._raw(token, self._begun).decode(errors="ignore")
        return max(place, self._place - len(text)) if text else place

    def _add(
        self, entries: dict[str, list[Any]], score: TokenScore, place: int, begun: bool
    ) -> None:
        """Add a token's entries. The token itself is named first, and stands among the likeliest in
        any case: clients look it up there."""
        names = self._names([score.token, *score.likeliest], begun)
        likeliest = {names[token]: logprob for token, logprob in score.likeliest.items()}
        likeliest.setdefault(names[score.token], score.logprob)
        entries["tokens"].append(names[score.token])
        entries["token_logprobs"].append(score.logprob)
        entries["top_logprobs"].append(likeliest)
        entries["text_offset"].append(place)

    def _names(self, tokens: Iterable[int], begun: bool) -> dict[int, str]:
        """Name tokens, each by a name of its own."""
        names: dict[int, str] = {}
        taken: set[str] = set()
        for token in dict.fromkeys(tokens):
            name = _name(self._raw(token, begun))
            if self._by_number or name in taken:
                name = f"token_id:{token}"
            names[token] = name
            taken.add(name)
        return names

    def _raw(self, token: int, begun: bool) -> bytes:
        """Return a token's bytes, in a text that has begun or as its first."""
        if self._table is None:
            return str(token).encode()
        return self._table.within(token) if begun else self._table.at_start(token)

    def _in_text(self, token: int) -> bytes:
        """Return the bytes that a token adds to the answer's text: a special one none."""
        return b"" if self._is_silent(token) else self._raw(token, self._begun)

    def _is_silent(self, token: int) -> bool:
        return self._tokenizer is not None and silent(self._tokenizer, token)

    def _has_text(self, tokens: Iterable[int]) -> bool:
        """Say whether some tokens have text."""
        if self._tokenizer is None:
            return True
        return any(not silent(self._tokenizer, token) for token in tokens)
