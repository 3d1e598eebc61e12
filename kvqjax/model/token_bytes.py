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
    """Return the byte that each character of byte-level BPE stands for. Printable bytes stand for
    themselves, the others are the characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(256 + number): byte for number, byte in enumerate(others)}
    for byte in printable:
        table[chr(byte)] = byte
    return table


def _backend(tokenizer: Any) -> Any:
    """Return the object of the `tokenizers` library; None for a tokenizer in Python."""
    return getattr(tokenizer, "backend_tokenizer", None)


class TokenBytes:
    """The bytes of a tokenizer's tokens. Each token is decoded once."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._backend = _backend(tokenizer)
        self._kept: dict[int, bytes] = {}
        self._anchor = self._letter()
        self._before = self._decoded(self._anchor)

    def within(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text that has begun. A special token has the
        bytes of its name. An id without an entry has none."""
        if token not in self._kept:
            self._kept[token] = self._read(token)
        return self._kept[token]

    def at_start(self, token: int) -> bytes:
        """Return the bytes of a text's first token: some decoders leave out its blank."""
        raw = self.within(token)
        if not raw.startswith(b" "):
            return raw
        alone = self._decoded([token]).encode()
        return alone if alone == raw[1:] else raw

    def spelling(self, token: int) -> str:
        """Return the token as the vocabulary writes it, such as "▁the"; "" for an id without an
        entry."""
        if self._backend is not None:
            return self._backend.id_to_token(token) or ""
        return self._tokenizer.convert_ids_to_tokens([token])[0] or ""

    def _letter(self) -> list[int]:
        """Find a token that is a letter, or else a word, before which nothing is changed. Return no
        token where there is none."""
        for letter in LETTERS:
            ids = encoded(self._tokenizer, letter, False)[-1:]
            if ids and self._reads(ids[0], letter):
                return ids
        by_id = sorted(self._tokenizer.get_vocab().items(), key=lambda entry: entry[1])
        for word, token in by_id:
            if word.isascii() and word.isalnum() and self._reads(token, word):
                return [token]
        return []

    def _reads(self, token: int, text: str) -> bool:
        """Say whether a token is a text, and not one byte of it."""
        if BYTE_TOKEN.fullmatch(self.spelling(token)):
            return False
        return self._decoded([token]).strip() == text

    def _decoded(self, ids: list[int]) -> str:
        options = {"clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False}
        return decoded(self._tokenizer, ids, False, **options)

    def _read(self, token: int) -> bytes:
        spelling = self.spelling(token)
        if not spelling:
            return b""
        text = self._decoded([*self._anchor, token])
        if text.startswith(self._before):
            text = text[len(self._before) :]
        else:
            # The decoder changed the letter as well: the token must be decoded alone.
            text = self._decoded([token])
        if BROKEN not in text:
            return text.encode()
        byte_token = BYTE_TOKEN.fullmatch(spelling)
        if byte_token:
            return bytes([int(byte_token[1], 16)])
        table = _bytes_by_character()
        if all(character in table for character in spelling):
            return bytes(table[character] for character in spelling)
        return text.encode()


@functools.lru_cache(maxsize=8)
def _table(tokenizer: Any, size: int) -> TokenBytes:
    return TokenBytes(tokenizer)


def token_bytes(tokenizer: Any) -> TokenBytes:
    """Return the table of a tokenizer, which is kept until tokens are added to it."""
    return _table(tokenizer, len(tokenizer))


# --- How many tokens a text has at least ---


def _state(part: Any) -> dict[str, Any] | None:
    """Return a part of a tokenizer as tokenizer.json has it."""
    return None if part is None else json.loads(part.__getstate__())


def _shrinking(normalizer: dict[str, Any] | None) -> int | None:
    """Return how many times fewer bytes a text may have after a normalizer. None: there is no
    limit, or none is known."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind in ("Prepend", "ByteLevel"):
        return 1
    if kind in ("NFC", "NFD"):
        return COMPOSED
    if kind == "Replace" and "String" in normalizer["pattern"]:
        old = normalizer["pattern"]["String"]
        new = normalizer["content"]
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
    """Say whether splitting leaves out nothing of a text."""
    if pre_tokenizer is None or pre_tokenizer["type"] in KEPT_TEXT:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(map(_keeps_all, pre_tokenizer["pretokenizers"]))
    return pre_tokenizer["type"] == "Split" and pre_tokenizer["behavior"] != "Removed"


@functools.lru_cache(maxsize=8)
def _most_bytes(tokenizer: Any, size: int) -> int | None:
    """Return how many bytes of a text a token stands for at most. None where a token may swallow
    any number of them: an unknown word, blanks beside a token that strips them, and what a
    normalizer takes away."""
    backend = _backend(tokenizer)
    if backend is None or type(backend.model).__name__ != "BPE":
        return None
    model = backend.model
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    added = list(backend.get_added_tokens_decoder().values())
    if any(token.lstrip or token.rstrip for token in added):
        return None
    normalizer = _state(backend.normalizer)
    pre_tokenizer = _state(backend.pre_tokenizer)
    factor = _shrinking(normalizer)
    if factor is None or not _keeps_all(pre_tokenizer):
        return None
    # With a token for every byte no word is unknown.
    vocabulary = backend.get_vocab(with_added_tokens=False)
    byte_level = '"ByteLevel"' in json.dumps([normalizer, pre_tokenizer])
    if byte_level:
        byte_tokens = list(_bytes_by_character())
    elif model.byte_fallback:
        byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return None
    if not all(token in vocabulary for token in byte_tokens):
        return None
    longest = 0
    for token in vocabulary:
        # In byte-level BPE a character is a byte.
        longest = max(longest, len(token) if byte_level else len(token.encode()))
    for token in added:
        longest = max(longest, len(token.content.encode()))
    return factor * longest


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
