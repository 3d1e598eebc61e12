"""The tokenizer of a GGUF file, built of its vocabulary by the `tokenizers` library.

A file has the tokens, their kinds, and merges or scores. How a text is split before tokens are
merged is a name (`tokenizer.ggml.pre`), whose meaning is fixed in llama.cpp. What stands behind
each name here is what the tokenizer of the model itself does, which transformers' reading of the
same file does not always do: it splits no digits for SmolLM's, and does not compose characters for
Qwen's.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvqjax._errors import UserError
from kvqjax.model.gguf_file import Header, read_header

_MODEL = "tokenizer.ggml.model"

# Kinds of tokens by their number in a file.
_CONTROL = 3
_USER_DEFINED = 4

# How a text is split. \p{L} is a letter, \p{N} a digit of any script.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_PATTERN = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"
QWEN35_PATTERN = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FRONT = r"[^\r\n\p{L}\p{N}]?"
TEKKEN_PATTERN = (
    rf"{_FRONT}{_UPPER}*{_LOWER}+|{_FRONT}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K_PATTERN = (
    rf"{_FRONT}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_FRONT}{_UPPER}+{_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Split(NamedTuple):
    """The way in which a pre-tokenizer splits a text.

    Attributes:
        pattern: the pieces of a text; None: those of GPT-2.
        digits: every digit is a piece of its own.
        composed: characters are composed first (NFC).
        whole: a piece that is a token is not merged anew.
        begins: a text begins with the token that begins one, where the file says nothing.
    """

    pattern: str | None = None
    digits: bool = False
    composed: bool = False
    whole: bool = False
    begins: bool = False


_GPT2 = _Split()
_DIGITS = _Split(digits=True)
_LLAMA3 = _Split(LLAMA3_PATTERN, whole=True, begins=True)
_QWEN = _Split(QWEN_PATTERN, composed=True)
_QWEN35 = _Split(QWEN35_PATTERN, composed=True)
_SPLITS = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _Split(LLAMA3_PATTERN),
    "smaug-bpe": _Split(LLAMA3_PATTERN),
    "qwen2": _QWEN,
    "qwen35": _QWEN35,
    "gpt-4o": _Split(O200K_PATTERN, whole=True),
    "deepseek-r1-qwen": _Split(QWEN_PATTERN),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "tekken": _Split(TEKKEN_PATTERN, whole=True, begins=True),
}
# The name that a file has where its writer knew none.
_UNNAMED = ("default", "")

# Special tokens by the names that tokenizers give them, and their keys' names in a file.
_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # sic, in the format
    "pad_token": "padding",
    "mask_token": "mask",
}


def has_tokenizer(file: Path) -> bool:
    """Say whether a file holds a tokenizer. Raises UserError as `read_header` does."""
    return _MODEL in read_header(file).values


def build_tokenizer(file: Path) -> tuple[Any, dict[str, str], str | None]:
    """Build the tokenizer of a file.

    Returns:
        The tokenizer of the `tokenizers` library, special tokens by their names, and the chat
        template or None.

    Raises:
        UserError: for a file without a tokenizer, or with one of a kind that is not known here.
    """
    header = read_header(file)
    if _MODEL not in header.values:
        raise UserError(f"{file}: no tokenizer in this file; pass token ids")
    kind = header.text(_MODEL)
    tokens = header.strings("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama"):
        raise UserError(
            f"{file}: {_MODEL} = {kind[:40]!r} is not read here; read are gpt2 and llama; pass token ids"
        )
    if len(set(tokens)) < len(tokens):
        raise UserError(f"{file}: damaged: tokenizer.ggml.tokens has a token twice")
    build = _byte_level if kind == "gpt2" else _sentencepiece
    try:
        backend, begins = build(header, tokens)
    except UserError:
        raise
    except Exception as error:  # the library raises Exception itself
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file}: the tokenizer cannot be built: {reason}") from error
    named = _named_tokens(header, tokens)
    _add_tokens(backend, header, tokens)
    _add_ends(backend, header, named, begins)
    template = header.values.get("tokenizer.chat_template")
    if not isinstance(template, str):
        template = None
    return backend, named, template


def _byte_level(header: Header, tokens: list[str]) -> tuple[Any, bool]:
    """Build BPE over bytes, as GPT-2 has it. Say also whether a text begins with a token of its
    own by default."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    split = _split_of(header)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [_pair(header, merge, vocabulary) for merge in header.strings("tokenizer.ggml.merges")]
    backend = Tokenizer(BPE(vocabulary, merges, ignore_merges=split.whole))
    if split.composed:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if split.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    # Its own expression is GPT-2's.
    use_regex = split.pattern is None
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, split.begins


def _split_of(header: Header) -> _Split:
    """Find how a file's texts are split. Raises UserError for a name that is not known."""
    name = header.text("tokenizer.ggml.pre", "")
    if name in _UNNAMED:
        # Older files of Qwen's models have no name; GPT-2's splitting is what is left for the
        # others.
        family = header.text("general.architecture", "")
        if family.startswith("qwen35"):
            return _QWEN35
        if family.startswith("qwen"):
            return _QWEN
        return _GPT2
    if name not in _SPLITS:
        names = ", ".join((*_SPLITS, *(unnamed for unnamed in _UNNAMED if unnamed)))
        shown = " ".join(name.split())[:40]
        raise UserError(
            f"{header.file}: tokenizer.ggml.pre = {shown!r} is not known; known: {names}; pass token ids"
        )
    return _SPLITS[name]


def _pair(header: Header, merge: str, vocabulary: dict[str, int]) -> tuple[str, str]:
    """Read a merge, "left right". Raises UserError where one of its tokens is missing."""
    left, space, right = merge.partition(" ")
    # The library does not raise but panic where the token that results is missing.
    parts = (left, right, left + right)
    if not space or not all(part in vocabulary for part in parts):
        raise UserError(
            f"{header.file}: damaged: {merge[:40]!r} in tokenizer.ggml.merges is no pair of its tokens"
        )
    return left, right


def _sentencepiece(header: Header, tokens: list[str]) -> tuple[Any, bool]:
    """Build BPE over characters, as SentencePiece has it: unknown ones become their bytes. A text
    begins with a token of its own by default."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    vocabulary = {token: number for number, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in header.values:
        texts = header.strings("tokenizer.ggml.merges")
        merges = [_pair(header, merge, vocabulary) for merge in texts]
    else:
        scores = header.numbers("tokenizer.ggml.scores", len(tokens))
        merges = _merges_of_scores(vocabulary, scores)
    number = header.integer("tokenizer.ggml.unknown_token_id", 0)
    unknown = tokens[number] if number < len(tokens) else None
    every_byte = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    model = BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=every_byte)
    backend = Tokenizer(model)
    has_prefix = header.flag("tokenizer.ggml.add_space_prefix", True)
    use_metaspace(backend, "first" if has_prefix else "never")
    return backend, True


def _merges_of_scores(vocabulary: dict[str, int], scores: np.ndarray) -> list[tuple[str, str]]:
    """List merges in the order in which SentencePiece makes them: by the score of the token that
    results.

    Each token is the result of every pair of tokens that it can be cut into. Of one token's pairs
    that with the longer left part comes first, as in transformers.
    """
    ranked = []
    for token, score in zip(vocabulary, scores.tolist(), strict=True):
        for cut in range(1, len(token)):
            left = token[:cut]
            right = token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append(((score, len(left), len(right)), left, right))
    ranked.sort(key=lambda item: item[0], reverse=True)
    return [(left, right) for _, left, right in ranked]


def use_metaspace(backend: Any, scheme: str) -> None:
    """Let a tokenizer of SentencePiece's kind write spaces as "▁".

    Args:
        backend: the tokenizer of the `tokenizers` library.
        scheme: where a space is put in front of a text: "first", "always" (after special tokens
            too), or "never".
    """
    from tokenizers import decoders, pre_tokenizers

    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme=scheme, split=False
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if scheme != "never":
        # The space that was put in front is taken away again.
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)


def _named_tokens(header: Header, tokens: list[str]) -> dict[str, str]:
    """Read the special tokens by their names. Raises UserError for a number that no token has."""
    named = {}
    for name, key in _NAMED.items():
        field = f"tokenizer.ggml.{key}_token_id"
        if field in header.values:
            number = header.integer(field)
            if number >= len(tokens):
                raise UserError(
                    f"{header.file}: damaged: {name} is {number} of {len(tokens)} tokens"
                )
            named[name] = tokens[number]
    return named


def _add_tokens(backend: Any, header: Header, tokens: list[str]) -> None:
    """Add the tokens that are looked for in a text before it is split: control tokens are special,
    a user's own are not."""
    from tokenizers import AddedToken

    if "tokenizer.ggml.token_type" not in header.values:
        return
    kinds = header.numbers("tokenizer.ggml.token_type", len(tokens)).tolist()
    special = []
    plain = []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == _CONTROL:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_ends(backend: Any, header: Header, named: dict[str, str], begins: bool) -> None:
    """Add the tokens that every text begins and ends with."""
    from tokenizers.processors import TemplateProcessing

    first = []
    last = []
    if header.flag("tokenizer.ggml.add_bos_token", begins) and "bos_token" in named:
        first = [named["bos_token"]]
    if header.flag("tokenizer.ggml.add_eos_token", False) and "eos_token" in named:
        last = [named["eos_token"]]
    if not first and not last:
        return
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys([*first, *last])]
    single = [*first, "$A", *last]
    second = [f"{piece}:1" for piece in (*first, "$B", *last)]  # the second text of a pair
    backend.post_processor = TemplateProcessing(
        single=single, pair=[*single, *second], special_tokens=ids
    )
