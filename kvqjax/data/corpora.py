"""Data by name: files and folders, our own sentences, what the model itself writes, or WikiText-2,
C4 and GSM8K as the papers join them."""

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvqjax._errors import UserError, suggest
from kvqjax._files import open_text, path_of
from kvqjax._timing import Bar, silent
from kvqjax.data.documents import Data, described, read_documents
from kvqjax.data.records import SUFFIXES, read_records
from kvqjax.data.sentences import filler
from kvqjax.data.written import written
from kvqjax.model.loading import Model

# --- Published data sets: a folder in their official format, or the hub, through `datasets`


class Source(NamedTuple):
    """Describe one file of a data set. name: what messages call it; files: names under which a
    local folder may hold it; where: how to get it, for the message when it is missing; hub:
    arguments of `datasets.load_dataset`."""

    name: str
    files: tuple[str, ...]
    where: str
    hub: dict[str, Any]


def find(source: Source, folder: Path | None) -> Path | None:
    """Find the file in `folder` or in the subfolder of it that bears the data set's name; None
    where it is not."""
    if folder is None:
        return None
    folder = path_of(folder)
    for place in (folder, folder / source.name):
        for name in source.files:
            if (place / name).is_file():
                return place / name
    return None


def _from_hub(source: Source) -> Iterator[dict[str, Any]]:
    """Read a data set of the hub. Raises UserError where the library or the data are missing."""
    hint = f"put {source.files[0]} into a folder and name it with {{folder}} ({source.where})"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(
            f"{source.name}: needs the hub", f"pip install datasets, or {hint}", folder=None
        ) from error
    try:
        return iter(load_dataset(**source.hub))
    # The library raises its own, the hub client's and the system's errors; all of them mean that
    # the data cannot be read.
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"{source.name}: the hub did not give it ({reason})", hint, folder=None
        ) from error


def records(source: Source, folder: Path | None) -> Iterator[dict[str, Any]]:
    """Read the records of the local file if `folder` is given, else of the hub. Raises UserError
    with what to download and where to put it."""
    if folder is None:
        yield from _from_hub(source)
        return
    path = find(source, folder)
    if path is None:
        names = " or ".join(source.files)
        raise UserError(
            f"{folder}: {names} is not there; get it from {source.where} and put it there"
        )

    def all_columns(names: list[str], where: str) -> list[str]:
        return names

    for record in read_records(path, all_columns):
        yield record.value


_C4 = "c4-validation.00000-of-00008.json"
_C4_DOCUMENTS = 1100  # of the first validation shard, as GPTQ joins them

WIKITEXT2 = Source(
    "wikitext2",
    ("wiki.test.raw", "wikitext-2-raw/wiki.test.raw", "wikitext2_test_raw.txt"),
    "the WikiText-2 raw archive, or Salesforce/wikitext on the Hugging Face hub",
    {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1", "split": "test"},
)
C4 = Source(
    "c4",
    (_C4 + ".gz", _C4, f"en/{_C4}.gz"),
    "allenai/c4 on the Hugging Face hub, folder en",
    {"path": "allenai/c4", "data_files": {"validation": f"en/{_C4}.gz"}, "split": "validation"},
)
GSM8K = Source(
    "gsm8k",
    ("test.jsonl", "gsm8k_test.jsonl"),
    "openai/grade-school-math on GitHub, or openai/gsm8k on the Hugging Face hub",
    {"path": "openai/gsm8k", "name": "main", "split": "test"},
)


def _texts(source: Source, folder: Path | None, *fields: str) -> Iterator[list[str]]:
    """Yield the texts of every record. Raises UserError where a field is missing: a local file may
    be another of the same name."""
    for number, row in enumerate(records(source, folder), 1):
        values = [row.get(field) for field in fields] if isinstance(row, dict) else []
        texts = [text for text in values if isinstance(text, str)]
        if len(texts) < len(fields):
            field_names = " and ".join(fields)
            raise UserError(
                f"{source.name}: record {number} has no text under {field_names}; get it from {source.where}"
            )
        yield texts


def _wikitext(folder: Path | None) -> str:
    """Join rows (lines of the raw file, blank ones empty) by blank lines, as GPTQ's script does."""
    path = find(WIKITEXT2, folder)
    if path is None:
        return "\n\n".join(text for (text,) in _texts(WIKITEXT2, folder, "text"))
    # Not `splitlines`, which also cuts at characters inside lines, such as U+2028.
    lines = open_text(path).removesuffix("\n").split("\n")
    return "\n\n".join(f"{line}\n" if line.strip() else "" for line in lines)


def _c4(folder: Path | None) -> str:
    documents = itertools.islice(_texts(C4, folder, "text"), _C4_DOCUMENTS)
    return " ".join(text for (text,) in documents)


def _gsm8k(folder: Path | None) -> str:
    problems = ["\n".join(texts) for texts in _texts(GSM8K, folder, "question", "answer")]
    return "\n\n".join(problems)


CORPORA = {"wikitext2": _wikitext, "c4": _c4, "gsm8k": _gsm8k}


# --- Data by name

NAMES = ("self", "synthetic", *CORPORA)
HABITS = {
    **dict.fromkeys(
        ("wikitext", "wikitext-2", "wikitext-2-raw-v1", "wikitext2-raw", "wiki"), "wikitext2"
    ),
    **dict.fromkeys(("c4-en", "allenai"), "c4"),
}
_MADE = 8192  # words or tokens of what is made here, where no number is given
_HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


def _is_path(name: str) -> bool:
    """Say whether there is a file or a folder of this name; a text is none, however long."""
    try:
        return os.path.exists(os.path.expanduser(name))
    except ValueError:  # a NUL
        return False


def _looks_like_path(name: str) -> bool:
    if re.search(r"\s", name):
        return False  # a text may end so, too
    return name.lower().removesuffix(".gz").endswith((*SUFFIXES, "/"))


def is_name(text: str) -> bool:
    """Say whether a string names data (a corpus, something that exists here, or a file that one
    would expect here) rather than being a text itself."""
    return text in NAMES or _is_path(text) or _looks_like_path(text)


def read(
    name: str | os.PathLike,
    *,
    field: str | None = None,
    split: str | None = None,
    folder: Path | None = None,
    model: Model | None = None,
    tokens: int = 0,
    seed: int = 0,
    bar: Bar = silent,
) -> Data:
    """Read data by name.

    Args:
        name: a file (text, JSON, JSON lines, Parquet, CSV, packed by gzip or not), a folder of
            these, a folder that the library `datasets` saved, "wikitext2", "c4", "gsm8k",
            "self" for what `model` writes, "synthetic" for sentences of our own, or "owner/name" or
            "owner/name:config" on the Hugging Face hub.
        field: which field of records holds text or messages; None: text, prompt, messages or
            conversations.
        split: which split of a data set; None: the only one.
        folder: holds wikitext2, c4 or gsm8k; None: they come from the hub.
        model: whose chat template messages go through, and that writes "self".
        tokens: about how many are wanted; 0: all. Synthetic text has at least that number of words,
            and a model writes at least that number of tokens; 0 stands for 8192 of these. Of larger
            data than 64 Mi characters the beginning is read unless all is wanted.
        seed: of synthetic text, and of what the model writes.
        bar: `bar(label)` is called before "self" is written, and gives a function that is told which
            part of it is done.

    Returns:
        Its documents and their description.

    Raises:
        UserError: for what cannot be read or holds no text, in one line.
    """
    source = str(os.fspath(name))
    given = {}
    if field is not None:
        given["field"] = field
    if split is not None:
        given["split"] = split
    if source in NAMES and given:
        hint = "leave out " + " and ".join(f"{{{option}}}" for option in given)
        raise UserError(f"{source}: its field and split are fixed", hint, **given)
    if source == "synthetic":
        return described(source, [filler(np.random.default_rng(seed), tokens or _MADE)])
    if source == "self":
        if model is None:
            raise UserError(
                "self: what the model writes needs the model", "pass {model}", model=None
            )
        return written(model, tokens or _MADE, seed, bar)
    if source in CORPORA:
        return described(source, [CORPORA[source](folder)])
    if not _is_path(source):
        corpus = HABITS.get(source.lower().rpartition("/")[2])
        if corpus and "/" not in source:
            raise UserError(f"{source}: no such file or folder; did you mean {corpus!r}?")
        if _looks_like_path(source) or not _HUB.fullmatch(source):
            hint = suggest(source, NAMES) if "/" not in source and "." not in source else ""
            excerpt = source
            if len(source) >= 200:
                excerpt = f"{source[:60]}... ({len(source)} characters)"
            raise UserError(f"{excerpt}: No such file or directory{hint}")
    return read_documents(source, field=field, split=split, model=model, unlimited=not tokens)


def read_text(
    data: str, tokens: int, seed: int, folder: Path | None = None
) -> tuple[str, dict[str, Any]]:
    """Read data as one text, with its name, hash and number of characters. The arguments are those
    of `read`."""
    texts = read(data, tokens=tokens, seed=seed, folder=folder)
    return texts.text, {key: texts.about[key] for key in ("name", "sha256", "characters")}
