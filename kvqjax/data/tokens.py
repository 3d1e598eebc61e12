"""Turns the data that Python callers give into token ids: a text, texts, a path, data that was
read, or ids."""

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from kvqjax._errors import UserError
from kvqjax.data.corpora import is_name, read
from kvqjax.data.documents import Data, described
from kvqjax.model.loading import Model

# A text or the name of data, a path, data that was read, texts, or ids: flat, in rows, or a list of
# such lists.
TextLike = str | os.PathLike | Data | Sequence[Any] | Any
_WANTED = "wanted a text, a list of texts, a path, data of kvqjax.data.read, or whole numbers that are token ids"


def _kind(value: Any) -> str:
    """Name a value's type with its package: "a torch Tensor", but "a dict"."""
    package = type(value).__module__.partition(".")[0]
    name = type(value).__name__
    return f"a {name}" if package == "builtins" else f"a {package} {name}"


def _array(source: Any, name: str) -> np.ndarray:
    """Turn ids into one array of any whole type. A list of lists of different lengths is joined."""
    if isinstance(source, list | tuple) and any(isinstance(x, bool) for x in source):
        raise UserError(f"{name} is of type bool; {_WANTED}")
    try:
        rows = _rows(source)
        if rows and all(np.issubdtype(row.dtype, np.integer) and row.ndim == 1 for row in rows):
            return np.concatenate(rows)
        return np.asarray(source)
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{name} is {_kind(source)} that is no array; {_WANTED}") from error


def _rows(source: Any) -> list[np.ndarray]:
    """Turn a list of lists into arrays, without the empty ones; anything else gives none."""
    if not isinstance(source, Sequence) or not source:
        return []
    if not all(isinstance(row, Sequence | np.ndarray) for row in source):
        return []
    return [np.asarray(row) for row in source if len(row)]


def check_ids(model: Model, source: Any, name: str) -> Int[np.ndarray, " T"]:
    """Give token ids as one stream, rows one after the other. Raises UserError for what are none of
    this model's."""
    if isinstance(source, Mapping):
        hint = f"pass {name}['input_ids']" if "input_ids" in source else _WANTED
        raise UserError(f"{name} is {_kind(source)}; {hint}")
    ids = _array(source, name)
    if ids.dtype.kind in "UOV" or ids.ndim == 0:
        raise UserError(f"{name} is {_kind(source)}; {_WANTED}")
    if ids.size == 0:
        raise UserError(f"{name} is empty; {_WANTED}")
    if not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"{name} is of type {ids.dtype}; {_WANTED}")
    if ids.ndim > 2:
        raise UserError(
            f"{name} has shape {list(ids.shape)}; wanted token ids [T], or rows of them [N, T]"
        )
    if not 0 <= ids.min() <= ids.max() < model.config.vocab_size:
        raise UserError(f"{name} has a token id outside 0 .. {model.config.vocab_size - 1}")
    return ids.reshape(-1).astype(np.int32)


def data_or_ids(
    model: Model, source: TextLike, name: str = "texts", tokens: int = 0
) -> Data | Int[np.ndarray, " T"]:
    """Read the texts or token ids that a caller gave.

    Args:
        model: whose vocabulary ids must fit, and whose chat template messages go through.
        source: a text; a list of texts; the name of data, which is a path to what exists or a
            corpus such as "wikitext2"; a path; data of `kvqjax.data.read`; or token ids, flat or in
            rows, as lists or as an array of any library.
        name: what messages call it.
        tokens: about how many are wanted of data by name, as in `kvqjax.data.read`.

    Returns:
        Documents, or the ids as one stream.

    Raises:
        UserError: for anything else, and for ids that are not the model's.
    """
    if isinstance(source, Data):
        return source
    if isinstance(source, os.PathLike):
        return read(source, model=model, tokens=tokens)
    if isinstance(source, str):
        if not is_name(source):
            return described(name, [source])
        return read(source, model=model, tokens=tokens)
    if isinstance(source, bytes):
        raise UserError(f"{name} is a bytes object; decode it first")
    if isinstance(source, Sequence) and source and all(isinstance(part, str) for part in source):
        return described(name, source)
    return check_ids(model, source, name)


def halves(text: str) -> tuple[str, str]:
    """Cut a text at the first blank after its middle: to learn from, and to be scored."""
    cut = len(text) // 2
    blank = re.compile(r"\s").search(text, cut)
    if blank is not None:
        cut = blank.start()
    return text[:cut], text[cut:]


def in_halves(data: Data | Int[np.ndarray, " T"]) -> list[Data | np.ndarray]:
    """Cut data in two halves, to learn from and to be scored: of the text, or of token ids."""
    ids = data
    if isinstance(data, Data):
        ids = data.ids
        if ids is None:
            return [Data((half,), {}) for half in halves(data.text)]
    return [*np.array_split(np.asarray(ids), 2)]


def encoded(model: Model, text: str) -> list[int]:
    """Encode a document, with the special tokens that the tokenizer adds. A begin token that a chat
    template has written already is not added again."""
    begin = getattr(model.tokenizer, "bos_token", None)
    has_begin = bool(begin) and text.startswith(begin)
    return model.encode(text, not has_begin)


def token_ids(model: Model, source: TextLike, name: str = "texts") -> Int[np.ndarray, " T"]:
    """Give one stream of ids for evaluation: documents are joined by blank lines and encoded as one
    text. Arguments and errors are those of `data_or_ids`."""
    texts = data_or_ids(model, source, name)
    if not isinstance(texts, Data):
        return texts
    if texts.ids is not None:
        return check_ids(model, texts.ids, name)
    return np.asarray(encoded(model, texts.text), np.int32)


def document_ids(
    model: Model, source: TextLike, most: int, name: str = "texts"
) -> Int[np.ndarray, " T"]:
    """Give at most `most` ids for calibration: each document is encoded by itself, until there are
    enough. Arguments and errors are those of `data_or_ids`."""
    texts = data_or_ids(model, source, name, most)
    if not isinstance(texts, Data):
        return texts[:most]
    if texts.ids is not None:
        return check_ids(model, texts.ids, name)[:most]
    ids = itertools.chain.from_iterable(encoded(model, text) for text in texts.documents)
    return np.fromiter(itertools.islice(ids, most), np.int32)
