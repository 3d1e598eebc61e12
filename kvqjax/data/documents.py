"""Documents of data that others wrote: which field of a record is its text, and conversations as
text.

Documents stay apart: calibration encodes each by itself, with the special tokens that the tokenizer
adds; evaluation joins them by blank lines, as the papers join WikiText-2.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from kvqjax._errors import UserError
from kvqjax._files import open_text, path_of
from kvqjax.data.records import (
    Record,
    files_of,
    is_conversation,
    is_saved,
    kind_of,
    read_records,
    saved_records,
)
from kvqjax.model.loading import Model
from kvqjax.model.tokenizer_calls import rendered

# Looked for in this order where no field is named.
FIELDS = (
    "text",
    "prompt",
    "messages",
    "conversations",
)
# Characters that are read of data larger than this: 16 million tokens at four characters each,
# which is more than every calibration's recipe takes (at most 2 million) and a minute's work for a
# tokenizer.
MOST_CHARACTERS = 1 << 26
_BORDER = "\n\n"  # between documents where one text is wanted


class Data(NamedTuple):
    """Documents of text, and what a report says of them: name, files, field, number of documents
    and characters, and the SHA-256 of `text`. `ids` are their tokens where these came first: a model
    wrote them."""

    documents: tuple[str, ...]
    about: dict[str, Any]
    ids: Int[np.ndarray, " T"] | None = None

    @property
    def text(self) -> str:
        """All documents as one text, blank lines between them."""
        return _BORDER.join(self.documents)


def digest(text: str) -> str:
    """SHA-256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def described(name: str, documents: Sequence[str], **about: Any) -> Data:
    """Data with its description. Half a surrogate pair, which JSON can spell and no tokenizer
    reads, becomes U+FFFD. Raises UserError where there is no text."""
    texts = tuple(
        text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in documents
    )
    data = Data(texts, {})
    if not data.text.strip():
        raise UserError(f"{name}: no text")
    facts = {
        "name": name,
        "sha256": digest(data.text),
        "characters": len(data.text),
        "documents": len(texts),
    }
    changed = sum(new != old for new, old in zip(texts, documents, strict=True))
    facts |= {"repaired documents": changed} if changed else {}
    return data._replace(about=facts | {key: value for key, value in about.items() if value})


def _turns(messages: list[dict[str, Any]], where: str) -> list[dict[str, str]]:
    """Messages as role and content, from either of the common spellings."""
    turns = []
    for message in messages:
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if isinstance(content, list):  # parts, of which some may be pictures
            kinds = [
                part.get("type", "text") if isinstance(part, dict) else type(part).__name__
                for part in content
            ]
            if set(kinds) - {"text"}:
                raise UserError(
                    f"{where}: a message has a part of type {kinds!r}; only text is read"
                )
            content = "".join(part.get("text") or "" for part in content)
        if not isinstance(role, str) or not isinstance(content, str | None):
            raise UserError(f"{where}: a message has no usable role and content")
        turns.append(
            {
                "role": {"human": "user", "gpt": "assistant"}.get(role, role),
                "content": content or "",
            }
        )
    return turns


def _conversation(messages: list[dict[str, Any]], where: str, model: Model | None) -> str:
    """A conversation through the model's chat template; without one, a line "role: content" for
    each message."""
    turns = _turns(messages, where)
    tokenizer: Any = model.tokenizer if model is not None and model.folder else None
    if getattr(tokenizer, "chat_template", None) is None:
        return "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)
    try:
        return rendered(tokenizer, turns)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _chosen(names: Iterable[str], field: str | None, where: str) -> str:
    """The field that holds the text."""
    columns = list(names)
    if field is not None and field not in columns:
        raise UserError(f"{where}: no field {field!r}; it has {', '.join(columns) or 'none'}")
    name_of_text = field or next((name for name in FIELDS if name in columns), None)
    if name_of_text is None:
        fields = ", ".join(columns)[:200] or "none"
        cause = f"{where}: has the fields {fields}; none of them is {', '.join(FIELDS)}"
        raise UserError(cause, "name one with {field}", field=None)
    return name_of_text


def _text_of(value: Any, where: str, model: Model | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if is_conversation(value):
        return _conversation(value, where, model)
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return "\n".join(value)
    if isinstance(value, list) and all(isinstance(part, int) for part in value):
        raise UserError(
            f"{where}: token ids, whose tokenizer is not known here; in Python, pass them as they are"
        )
    raise UserError(f"{where}: neither text nor messages, but {type(value).__name__}")


def _document(record: Record, field: str | None, used: set[str], model: Model | None) -> str:
    if not isinstance(record.value, dict):
        return _text_of(record.value, record.where, model)
    name = _chosen(record.value, field, record.where)
    used.add(name)
    return _text_of(record.value[name], f"{record.where}, field {name!r}", model)


def _up_to(documents: Iterable[str], most: int | None) -> tuple[list[str], bool]:
    """Documents that are not blank, until they have `most` characters in all; and whether that left
    any out."""
    texts: list[str] = []
    size = 0
    for text in documents:
        if not text.strip():
            continue
        room = None if most is None else most - size
        if room is not None and len(text) > room:
            return [*texts, text[:room]] if room else texts, True
        texts.append(text)
        size += len(text)
    return texts, False


def read_documents(
    name: str,
    *,
    field: str | None = None,
    split: str | None = None,
    model: Model | None = None,
    unlimited: bool = False,
) -> Data:
    """The documents of a file, a folder of files, a folder that `datasets` saved, or a data set of
    the hub.

    Args:
        name: a path, or "owner/name" or "owner/name:config" on the hub.
        field: which field of records holds text or messages; None: the first of `FIELDS` that there
            is.
        split: which split of a data set; None: the only one.
        model: whose chat template conversations go through.
        unlimited: all of it, instead of the first MOST_CHARACTERS characters.

    Returns:
        The documents in the order of the files' names and of the records in them.

    Raises:
        UserError: for what cannot be read or holds no text.
    """
    path, used = path_of(name), set[str]()

    def choose(names: list[str], where: str) -> list[str]:
        return [_chosen(names, field, where)]

    hub = not path.exists()
    if hub or is_saved(path):
        records, files = saved_records(name if hub else str(path), split, choose), []
        documents: Iterator[str] = (_document(record, field, used, model) for record in records)
    else:
        if split is not None:
            raise UserError(
                f"{name}: files have no splits", "name the file instead of {split}", split=split
            )
        files = files_of(path) if path.is_dir() else [path]
        if field is not None and all(kind_of(file) == "text" for file in files):
            raise UserError(f"{name}: text has no fields", "leave out {field}", field=field)
        documents = _of_files(files, field, used, model, choose)
    texts, cut = _up_to(documents, None if unlimited else MOST_CHARACTERS)
    names = [str(file.relative_to(path)) for file in files if path.is_dir()]
    first = f"the first {MOST_CHARACTERS} characters" if cut else ""
    return described(
        name, texts, files=names, field=", ".join(sorted(used)), split=split, read=first
    )


def _of_files(
    files: list[Path],
    field: str | None,
    used: set[str],
    model: Model | None,
    choose: Callable[[list[str], str], list[str]],
) -> Iterator[str]:
    for file in files:
        if kind_of(file) == "text":
            yield open_text(file)
        else:
            yield from (
                _document(record, field, used, model) for record in read_records(file, choose)
            )
