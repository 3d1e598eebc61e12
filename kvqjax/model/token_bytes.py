"""What each token of a vocabulary adds to a text, in bytes, and how many tokens a text has at
least.

`decode([token])` is no token's text. Decoders of the SentencePiece kind take the blank off a text's
first word, so that "▁the" and "the" would be one. A part of a character becomes U+FFFD, whichever
part it is. Here a token is decoded behind a letter, whose text is taken away again. A token with a
part of a character has the bytes that its vocabulary's spelling stands for: "<0xE0>" is a byte, and
of byte-level BPE every character is one.
"""

import functools
import json
import re
from typing import Any

from kvqjax.model.tokenizer_calls import decoded, encoded

BROKEN = "\ufffd"  # a decoder's answer to bytes that are no character
LETTERS = ("a", "A", "e", "1")  # any of them may stand before a token; a vocabulary may lack some
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Composition makes three bytes of nine (Hangul) and one of three (the sign of Kelvin); four leave
# some room.
COMPOSED = 4
# Ways to split a text that leave out nothing of it.
KEPT_TEXT = {
    "Metaspace",
    "ByteLevel",
    "Digits",
}


@functools.cache
def _bytes_by_character() -> dict[str, int]:
    """The byte that each character of byte-level BPE stands for: printable bytes themselves, then
    256 and on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    pairs = {chr(256 + number): byte for number, byte in enumerate(others)}
    return pairs | {chr(byte): byte for byte in printable}


def _backend(tokenizer: Any) -> Any:
    """The object of the `tokenizers` library; None for a tokenizer in Python."""
    return getattr(tokenizer, "backend_tokenizer", None)


class TokenBytes:
    """The bytes of a tokenizer's tokens. Each is found out once."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._backend = tokenizer, _backend(tokenizer)
        self._kept: dict[int, bytes] = {}
        self._anchor = self._letter()
        self._before = self._decoded(self._anchor)

    def within(self, token: int) -> bytes:
        """What a token adds to a text that has begun. A special token has its name's bytes; b"" is
        an id without an entry."""
        if token not in self._kept:
            self._kept[token] = self._read(token)
        return self._kept[token]

    def at_start(self, token: int) -> bytes:
        """What a token is as a text's first one: some decoders leave out its blank."""
        raw = self.within(token)
        alone = self._decoded([token]).encode() if raw[:1] == b" " else raw
        return raw[1:] if alone == raw[1:] else raw

    def spelling(self, token: int) -> str:
        """How the vocabulary writes a token, such as "▁the"; "" for an id without an entry."""
        if self._backend is not None:
            return self._backend.id_to_token(token) or ""
        return self._tokenizer.convert_ids_to_tokens([token])[0] or ""

    def _letter(self) -> list[int]:
        """A token that is a letter, or else a word, before which nothing is changed; none where
        there is no such token."""
        for letter in LETTERS:
            ids = encoded(self._tokenizer, letter, False)[-1:]
            if ids and self._reads(ids[0], letter):
                return ids
        by_id = sorted(self._tokenizer.get_vocab().items(), key=lambda entry: entry[1])
        words = ((token, word) for word, token in by_id if word.isascii() and word.isalnum())
        return next(([token] for token, word in words if self._reads(token, word)), [])

    def _reads(self, token: int, text: str) -> bool:
        """Whether a token is a text, and no byte of it."""
        return self._decoded([token]).strip() == text and not BYTE_TOKEN.fullmatch(
            self.spelling(token)
        )

    def _decoded(self, ids: list[int]) -> str:
        options = {"clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False}
        return decoded(self._tokenizer, ids, False, **options)

    def _read(self, token: int) -> bytes:
        spelling = self.spelling(token)
        if not spelling:
            return b""
        text = self._decoded([*self._anchor, token])
        text = (
            text[len(self._before) :] if text.startswith(self._before) else self._decoded([token])
        )
        if BROKEN not in text:
            return text.encode()
        if byte := BYTE_TOKEN.fullmatch(spelling):
            return bytes([int(byte[1], 16)])
        table = _bytes_by_character()
        return (
            bytes(table[c] for c in spelling)
            if all(c in table for c in spelling)
            else text.encode()
        )


@functools.lru_cache(maxsize=8)
def _table(tokenizer: Any, size: int) -> TokenBytes:
    return TokenBytes(tokenizer)


def token_bytes(tokenizer: Any) -> TokenBytes:
    """The table of a tokenizer, which is kept until tokens are added to it."""
    return _table(tokenizer, len(tokenizer))


# --- How many tokens a text has at least ---


def _state(part: Any) -> dict[str, Any] | None:
    """A part of a tokenizer as tokenizer.json has it."""
    return None if part is None else json.loads(part.__getstate__())


def _shrinking(normalizer: dict[str, Any] | None) -> int | None:
    """How many times fewer bytes a text may have after a normalizer; None: there is no limit, or
    none is known."""
    kind = None if normalizer is None else normalizer["type"]
    if normalizer is None or kind in ("Prepend", "ByteLevel"):
        return 1
    if kind in ("NFC", "NFD"):
        return COMPOSED
    if kind == "Replace" and "String" in normalizer["pattern"]:
        old, new = normalizer["pattern"]["String"], normalizer["content"]
        return 1 if len(new.encode()) >= len(old.encode()) else None
    if kind == "Sequence":
        factor = 1
        for step in normalizer["normalizers"]:
            step_factor = _shrinking(step)
            if step_factor is None:
                return None
            factor *= step_factor
        return factor
    return None


def _keeps_all(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether splitting leaves out nothing of a text."""
    if pre_tokenizer is None or pre_tokenizer["type"] in KEPT_TEXT:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(map(_keeps_all, pre_tokenizer["pretokenizers"]))
    return pre_tokenizer["type"] == "Split" and pre_tokenizer["behavior"] != "Removed"


@functools.lru_cache(maxsize=8)
def _most_bytes(tokenizer: Any, size: int) -> int | None:
    """How many bytes of a text a token stands for at most. None where a token may swallow any
    number of them: an unknown word, blanks beside a token that strips them, and what a normalizer
    takes away."""
    backend = _backend(tokenizer)
    if backend is None or type(backend.model).__name__ != "BPE":
        return None
    model, added = backend.model, backend.get_added_tokens_decoder().values()
    normalizer, pre_tokenizer = _state(backend.normalizer), _state(backend.pre_tokenizer)
    factor = _shrinking(normalizer)
    affixes = model.continuing_subword_prefix or model.end_of_word_suffix
    if (
        factor is None
        or affixes
        or not _keeps_all(pre_tokenizer)
        or any(t.lstrip or t.rstrip for t in added)
    ):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    byte_level = '"ByteLevel"' in json.dumps([normalizer, pre_tokenizer])
    every_byte = _bytes_by_character() if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    if not all(token in vocabulary for token in every_byte) or not (
        byte_level or model.byte_fallback
    ):
        return None
    names = [len(token.content.encode()) for token in added]
    lengths = map(len, vocabulary) if byte_level else (len(token.encode()) for token in vocabulary)
    return factor * max([*names, *lengths])


def least_tokens(tokenizer: Any, size: int) -> int:
    """Count the tokens that a text has at least.

    Args:
        tokenizer: of the text.
        size: bytes of the text.

    Returns:
        The count; 0 where the tokenizer's parts give none.
    """
    most = _most_bytes(tokenizer, len(tokenizer))
    return 0 if most is None else -(-size // most)
