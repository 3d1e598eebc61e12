"""Text and JSON that others wrote: what editors, exporters and other systems leave in such files is
taken away here.

Every reader of the library goes through this module. Byte-order marks (UTF-8, UTF-16, UTF-32)
choose the encoding and are no part of the text; without one the text is UTF-8. Every kind of line
end is "\\n". Gzip is known by its first bytes, whatever the file's name ends in. A file that cannot
be read gives one line.
"""

import codecs
import contextlib
import errno
import gzip
import io
import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvqjax._errors import UserError, unwritten

MARK = "\ufeff"  # also in the middle of files that were joined from several
_GZIP = b"\x1f\x8b"
# UTF-32 stands first: its little-endian mark begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_PACKED = "packed by {}, which is not read here; unpack it, or pack it by gzip"
# What other files begin with, and what to say of them.
_OTHERS = {
    b"\x28\xb5\x2f\xfd": _PACKED.format("zstd"),
    b"BZh": _PACKED.format("bzip2"),
    b"\xfd7zXZ": _PACKED.format("xz"),
    b"PK\x03\x04": _PACKED.format("zip"),
    b"%PDF": "a PDF is not read here; save its text",
}


def path_of(name: str | os.PathLike[str]) -> Path:
    """Read the path that a user names; ~ is the home folder.

    Args:
        name: the path, which need not exist.

    Returns:
        The path. `exists`, `is_dir` and `is_file` of it raise nothing.

    Raises:
        UserError: the home folder is not known, the name is too long, or a folder above the path
            may not be entered.
    """
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise UserError(f"{name}: the home folder is not known") from error
    try:
        path.stat()
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.EACCES):
            text = str(path)  # a text in the place of a name may be long
            shown = text if len(text) < 200 else f"{text[:60]!r}... ({len(text)} characters)"
            raise UserError(f"{shown}: {error.strerror}") from error
    except ValueError:  # a NUL, which no file has in its name
        pass
    return path


class FileState(NamedTuple):
    """What tells a file from what stood under its name before. What is remembered of files is kept
    under their states.

    Attributes:
        name: its path.
        changed: nanoseconds at which its contents were written.
        moved: nanoseconds at which it was put there, which copies that keep the first time do not
            hide.
        size: bytes.
    """

    name: str
    changed: int
    moved: int
    size: int


def states_of(files: Iterable[Path]) -> tuple[FileState, ...]:
    """The states of files. Raises OSError for one that is absent."""
    pairs = [(str(file), file.stat()) for file in files]
    return tuple(
        FileState(name, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size) for name, stat in pairs
    )


def made_folder(folder: str | os.PathLike[str]) -> Path:
    """Make a folder that a user names, unless it is there.

    Args:
        folder: the path, whose parents are made too.

    Returns:
        The path.

    Raises:
        UserError: it cannot be made or written, or as `path_of`.
    """
    path = path_of(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritten(path, error) from error
    if not os.access(path, os.W_OK):
        raise UserError(f"{path}: cannot be written")
    return path


def _encoding(head: bytes) -> str:
    return next((name for mark, name in _MARKS.items() if head.startswith(mark)), "utf-8")


def _check_kind(head: bytes, name: str) -> None:
    for mark, why in _OTHERS.items():
        if head.startswith(mark):
            raise UserError(f"{name}: {why}")


def _undecoded(error: UnicodeDecodeError, name: str, where: str) -> UserError:
    encoding = error.encoding.removesuffix("-sig").upper()
    hint = "convert it, for example with iconv -f latin1 -t utf-8" if encoding == "UTF-8" else ""
    return UserError(f"{name}: not {encoding} text ({where})", hint)


def _without_nul(text: str, name: str, where: str) -> str:
    if "\0" in text:
        why = "UTF-16 without a byte-order mark, or no text at all"
        raise UserError(f"{name}: not text: a NUL character {where} ({why})")
    return text


def decode_text(raw: bytes, name: str) -> str:
    """Decode the bytes of a text.

    Args:
        raw: what a file or a pipe holds, packed by gzip or not.
        name: what messages call it.

    Returns:
        The text, without byte-order marks at its beginning and with "\\n" as its line end.

    Raises:
        UserError: for what is no text, with the first byte or character that is not.
    """
    try:
        raw = gzip.decompress(raw) if raw.startswith(_GZIP) else raw
        _check_kind(raw[:8], name)
        text = raw.decode(_encoding(raw[:4]))
    except UnicodeDecodeError as error:
        raise _undecoded(error, name, f"byte {error.start}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{name}: damaged gzip: {error}") from error
    text = _without_nul(text, name, f"at place {text.find(chr(0))}")
    return text.lstrip(MARK).replace("\r\n", "\n").replace("\r", "\n")


def open_bytes(path: Path, pipes: bool = False) -> io.BufferedReader:
    """Open a file to read its bytes.

    Args:
        path: of the file. A device is refused, because it may have no end.
        pipes: whether a pipe will do. It gives its bytes once, and most files are looked into
            before they are read.

    Raises:
        OSError: what the system says.
        UserError: a device, or a pipe.
    """
    mode = path.stat().st_mode
    # Of a folder the system says that it is one.
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (pipes and stat.S_ISFIFO(mode))):
        raise UserError(f"{path}: a pipe or a device, not a file; write what it gives into a file")
    return path.open("rb")


def open_text(path: Path, pipes: bool = False) -> str:
    """The text of a file, as `decode_text` gives it; with `pipes` of a pipe too. Raises
    UserError."""
    try:
        with open_bytes(path, pipes) as file:
            raw = file.read()
    except UserError:
        raise
    except (OSError, ValueError) as error:  # a ValueError is a path with a NUL in it
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return decode_text(raw, str(path))


def open_lines(path: Path) -> Iterator[str]:
    """The lines of a file without their ends, read one after the other: a file may be larger than
    memory.

    A byte-order mark at the beginning of any line is taken away. Raises UserError as `open_text`
    does, at the line.
    """
    number = 0
    try:
        with contextlib.ExitStack() as stack:
            stream = stack.enter_context(open_bytes(path))
            if stream.peek(2).startswith(_GZIP):
                stream = stack.enter_context(gzip.GzipFile(fileobj=stream))
            head = stream.peek(8)[:8]
            _check_kind(head, str(path))
            lines = stack.enter_context(io.TextIOWrapper(stream, _encoding(head)))
            for number, line in enumerate(lines, 1):
                yield _without_nul(line, str(path), f"in line {number}").lstrip(MARK).rstrip("\n")
    except UnicodeDecodeError as error:
        raise _undecoded(error, str(path), f"after line {number}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip after line {number}: {error}") from error
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def parse_json(text: str, name: str) -> Any:
    """The value of a JSON text. Raises UserError with `name` and the place of a syntax error."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        why = "the file is empty" if not text.strip() else error.msg
        raise UserError(
            f"{name}: not readable as JSON: line {error.lineno}, column {error.colno}: {why}"
        ) from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of thousands of digits, values nested without end
        raise UserError(f"{name}: not readable as JSON: {error}") from error


def read_json(path: Path) -> Any:
    """The value of a JSON file. Raises UserError."""
    try:
        text = open_text(path)
    except UserError as error:  # programs write such files: advice for texts is of no use
        raise UserError(error.cause) from error
    return parse_json(text, str(path))


def read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises UserError."""
    contents = read_json(path)
    if not isinstance(contents, dict):
        raise UserError(f"{path}: wanted a JSON object, got {type(contents).__name__}")
    return contents
