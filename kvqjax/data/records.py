"""Records of files that others wrote: JSON, JSON lines, Parquet, CSV, and data sets that `datasets`
saved or loads.

A record is one example: mostly an object with fields, sometimes a string or a list of messages.
Files are read record by record, so that a large one need not fit into memory.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvqjax._errors import UserError
from kvqjax._files import open_bytes, open_lines, open_text, parse_json

TEXTS = (".txt", ".md", ".text", ".raw")
SUFFIXES = {
    **dict.fromkeys(TEXTS, "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
}
_PARQUET = b"PAR1"
# Files of `Dataset.save_to_disk`. A DatasetDict has dataset_dict.json.
_SAVED = ("dataset_info.json", "state.json")
_ABOUT = {*_SAVED, "dataset_infos.json", "dataset_dict.json"}  # describe data, and are none
_BATCH = 256  # rows of a Parquet file that are held at a time


class Record(NamedTuple):
    """One record and where it stands, for messages."""

    value: Any
    where: str


def kind_of(path: Path) -> str:
    """Tell "text", "json", "parquet" or "csv" by a file's name, and by what it begins with where
    the name says text or nothing."""
    name = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    kind = SUFFIXES.get(name.suffix.lower(), "text")
    if kind != "text":
        return kind
    try:
        with open_bytes(path) as file:
            if file.read(4) == _PARQUET:
                return "parquet"
        first = next((line for line in open_lines(path) if line.strip()), "")
    except (OSError, ValueError):  # a UserError is one
        return kind  # its reader says why it cannot be read
    # A text may begin with a bracket too.
    is_json = first.lstrip()[:1] in ("{", "[") and _loads(first) is not None
    return "json" if is_json else "text"


def _loads(text: str) -> Any:
    """Read JSON; None for anything else."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def json_lines(path: Path) -> Iterator[Record]:
    """Read a JSON value a line; blank lines are none. Raises UserError, naming the line, for one
    that is not JSON."""
    for number, line in enumerate(open_lines(path), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield Record(json.loads(line), where)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: not JSON: {getattr(error, 'msg', error)}") from error


def is_conversation(value: Any) -> bool:
    """Say whether a value is a list of messages, in either of the spellings that are common."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(part, dict) and ("role" in part or "from" in part) for part in value)


def _inside(value: Any) -> list[Any] | None:
    """Return the records of a list, or of an object that holds one list of objects and nothing
    else; None for one record."""
    if isinstance(value, dict) and len(value) == 1:
        (value,) = value.values()
        if not isinstance(value, list) or not value or not isinstance(value[0], dict):
            return None
    if not isinstance(value, list) or is_conversation(value):
        return None
    return value


def _json_records(path: Path) -> Iterator[Record]:
    """Read the records of a JSON file in any common form, whatever its name: a record a line, one
    list of records, one record over many lines, or one object around one list of records."""
    lines = (line for line in open_lines(path) if line.strip())
    first = _loads(next(lines, ""))
    second = next(lines, None)
    # A first line that is JSON by itself is a record, unless it is all there is, and holds others.
    if first is not None and (second is not None or _inside(first) is None):
        yield from json_lines(path)
        return
    value = parse_json(open_text(path), str(path))
    records = _inside(value)
    if records is None:
        records = [value]
    for number, record in enumerate(records, 1):
        yield Record(record, f"{path}, record {number}")


def _csv_records(path: Path) -> Iterator[Record]:
    """Read the rows of a table with a header."""
    mark = "\t" if ".tsv" in path.suffixes else ","
    lines = (line + "\n" for line in open_lines(path))
    reader = csv.DictReader(lines, delimiter=mark)
    before = csv.field_size_limit(2**31 - 1)  # 128 KiB without it: a document may be larger
    try:
        for row in reader:
            # Cells beyond the header have no name.
            fields = {name: value for name, value in row.items() if name}
            yield Record(fields, f"{path}, line {reader.line_num}")
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not CSV: {error}") from error
    finally:
        csv.field_size_limit(before)


def _parquet_records(
    path: Path, columns_of: Callable[[list[str], str], list[str]]
) -> Iterator[Record]:
    """Read the rows of a Parquet file, only the columns that are wanted."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: Parquet is read by pyarrow: pip install pyarrow") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = columns_of(file.schema_arrow.names, str(path))
            number = 0
            for batch in file.iter_batches(_BATCH, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(row, f"{path}, record {number}")
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{path}: cannot be read as Parquet: {reason}") from error


def read_records(path: Path, columns_of: Callable[[list[str], str], list[str]]) -> Iterator[Record]:
    """Read the records of a file. `columns_of(names, where)` chooses among the columns of a table.
    Raises UserError."""
    kind = kind_of(path)
    if kind == "parquet":
        return _parquet_records(path, columns_of)
    if kind == "csv":
        return _csv_records(path)
    return _json_records(path)


def files_of(folder: Path) -> list[Path]:
    """List the files of a folder and of its subfolders that hold data, by name: those with records,
    or, where there are none, those with text. Hidden files and descriptions of data sets are left
    out. Raises UserError for none."""
    with_records = []
    with_text = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        name = path.with_suffix("") if path.suffix.lower() == ".gz" else path
        kind = SUFFIXES.get(name.suffix.lower())
        if kind and not hidden and path.name not in _ABOUT and path.is_file():
            (with_text if kind == "text" else with_records).append(path)
    files = with_records or with_text
    if not files:
        raise UserError(
            f"{folder}: no data in this folder; read are files that end in {', '.join(SUFFIXES)}, or .gz"
        )
    return files


def is_saved(folder: Path) -> bool:
    """Say whether the library `datasets` has saved a data set, or several splits of one, into this
    folder."""
    if (folder / "dataset_dict.json").is_file():
        return True
    return all((folder / name).is_file() for name in _SAVED)


def _datasets(name: str) -> Any:
    """Import the library `datasets`. Raises UserError where it is missing."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{name}: data sets of the library `datasets` are read by it: pip install datasets"
        ) from error
    return datasets


def _split(splits: Any, name: str, split: str | None) -> Any:
    """Choose one of the splits of a data set. Nothing is guessed: figures of the training split are
    other figures."""
    if not hasattr(splits, "keys"):
        if split is not None:
            raise UserError(f"{name}: has no splits", "leave out {split}", split=split)
        return splits
    names = ", ".join(splits)
    if split is None and len(splits) > 1:
        raise UserError(f"{name}: has the splits {names}", "choose with {split}", split=None)
    if split is not None and split not in splits:
        raise UserError(f"{name}: has no split {split!r}; it has {names}")
    return splits[split or next(iter(splits))]


def saved_records(
    name: str, split: str | None, columns_of: Callable[[list[str], str], list[str]]
) -> Iterator[Record]:
    """Read a data set that `datasets` saved into the folder `name`, or that the hub has under
    `name`, which is "owner/name" or "owner/name:config". Raises UserError."""
    library = _datasets(name)
    local = Path(name).is_dir()
    try:
        if local:
            rows = library.load_from_disk(name)
        else:
            path, _, config = name.partition(":")
            rows = library.load_dataset(path, config or None, streaming=True)
        rows = _split(rows, name, split)
        names: Iterable[str] | None = getattr(rows, "column_names", None)
        if names is not None and hasattr(rows, "select_columns"):
            rows = rows.select_columns(columns_of(list(names), name))
        for number, row in enumerate(rows, 1):
            yield Record(row, f"{name}, record {number}")
    except UserError:
        raise
    # The library raises its own, the hub client's, pyarrow's and the system's errors.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        if local:
            raise UserError(
                f"{name}: the library `datasets` cannot read this folder: {reason}"
            ) from error
        raise UserError(
            f"{name}: no file or folder here, and the hub did not give it ({reason}); "
            "download it where there is a network, and name the file or folder"
        ) from error
