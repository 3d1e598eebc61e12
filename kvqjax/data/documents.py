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
FIELDS = ("text", "prompt", "messages", "conversations")
# Characters that are read of data larger than this: 16 million tokens at four characters each,
# which is more than every calibration's recipe takes (at most 2 million) and a minute's work for a
# tokenizer.
MOST_CHARACTERS = 1 << 26
_BORDER = "\n\n"  # between documents where one text is wanted


class Data(NamedTuple):
    """Documents of text, and the facts that a report has of them: name, files, field, number of
    documents and characters, and the SHA-256 of `text`. `ids` are their tokens where these came
    first: a model wrote them."""

    documents: tuple[str, ...]
    about: dict[str, Any]
    ids: Int[np.ndarray, " T"] | None = None

    @property
    def text(self) -> str:
        """All documents as one text, blank lines between them."""
        return _BORDER.join(self.documents)


def digest(text: str) -> str:
    """Return the SHA-256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def described(name: str, documents: Sequence[str], **about: Any) -> Data:
    """Return documents with their description. Half a surrogate pair, which JSON can spell and no
    tokenizer reads, becomes U+FFFD. Raises UserError where there is no text."""
    texts = []
    repaired = 0
    for document in documents:
        # UTF-16 writes such a half as it stands, and reading finds that it has no other half.
        text = document.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        texts.append(text)
        repaired += text != document
    data = Data(tuple(texts), {})
    if not data.text.strip():
        raise UserError(f"{name}: no text")
    facts: dict[str, Any] = {
        "name": name,
        "sha256": digest(data.text),
        "characters": len(data.text),
        "documents": len(texts),
    }
    if repaired:
        facts["repaired documents"] = repaired
    for key, value in about.items():
        if value:
            facts[key] = value
    return data._replace(about=facts)


def _turns(messages: list[dict[str, Any]], where: str) -> list[dict[str, str]]:
    """Read role and content of messages, from either of the common spellings."""
    roles = {"human": "user", "gpt": "assistant"}
    turns = []
    for message in messages:
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if isinstance(content, list):
            content = _joined_parts(content, where)
        if not isinstance(role, str) or not isinstance(content, str | None):
            raise UserError(f"{where}: a message has no usable role and content")
        turns.append({"role": roles.get(role, role), "content": content or ""})
    return turns


def _joined_parts(parts: list[Any], where: str) -> str:
    """Join the parts of a message. Raises UserError where one is no text, such as a picture."""
    kinds = []
    for part in parts:
        is_part = isinstance(part, dict)
        kinds.append(part.get("type", "text") if is_part else type(part).__name__)
    if set(kinds) - {"text"}:
        raise UserError(f"{where}: a message has a part of type {kinds!r}; only text is read")
    return "".join(part.get("text") or "" for part in parts)


def _conversation(messages: list[dict[str, Any]], where: str, model: Model | None) -> str:
    """Write a conversation by the model's chat template; without one, a line "role: content" for
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
    """Return the name of the field that holds the text."""
    columns = list(names)
    if field is not None and field not in columns:
        raise UserError(f"{where}: no field {field!r}; it has {', '.join(columns) or 'none'}")
    if field is not None:
        return field
    for usual in FIELDS:
        if usual in columns:
            return usual
    fields = ", ".join(columns)[:200] or "none"
    cause = f"{where}: has the fields {fields}; none of them is {', '.join(FIELDS)}"
    raise UserError(cause, "name one with {field}", field=None)


def _text_of(value: Any, where: str, model: Model | None) -> str:
    """Return the text of a record's field."""
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
    """Return the text of a record. The name of its field is added to `used`."""
    if not isinstance(record.value, dict):
        return _text_of(record.value, record.where, model)
    name = _chosen(record.value, field, record.where)
    used.add(name)
    return _text_of(record.value[name], f"{record.where}, field {name!r}", model)


def _up_to(documents: Iterable[str], most: int | None) -> tuple[list[str], bool]:
    """Take documents that are not blank, until they have `most` characters in all. Say also whether
    that left any text out."""
    texts: list[str] = []
    size = 0
    for text in documents:
        if not text.strip():
            continue
        room = None if most is None else most - size
        if room is not None and len(text) > room:
            if room:
                texts.append(text[:room])
            return texts, True
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
    """Read the documents of a file, a folder of files, a folder that `datasets` saved, or a data
    set of the hub.

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
    path = path_of(name)
    used = set[str]()  # the fields that hold text

    def choose(names: list[str], where: str) -> list[str]:
        return [_chosen(names, field, where)]

    files = []
    is_on_hub = not path.exists()
    if is_on_hub or is_saved(path):
        records = saved_records(name if is_on_hub else str(path), split, choose)
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
    names = [str(file.relative_to(path)) for file in files] if path.is_dir() else []
    first = f"the first {MOST_CHARACTERS} characters" if cut else ""
    # The documents are read by now, so `used` is complete.
    fields = ", ".join(sorted(used))
    return described(name, texts, files=names, field=fields, split=split, read=first)


def _of_files(
    files: list[Path],
    field: str | None,
    used: set[str],
    model: Model | None,
    choose: Callable[[list[str], str], list[str]],
) -> Iterator[str]:
    """Yield the documents of files: a text file is one, and so is each record of the others."""
    for file in files:
        if kind_of(file) == "text":
            yield open_text(file)
            continue
        for record in read_records(file, choose):
            yield _document(record, field, used, model)
