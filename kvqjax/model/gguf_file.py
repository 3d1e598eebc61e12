"""A GGUF file: what its header says, and its blocks of codes as numbers.

Layout: "GGUF", version, how many tensors and values; the values (key, type, value); the tensors
(name, shape from the innermost axis on, type, offset); the data behind the next multiple of
`general.alignment`.

The header is walked here and not by the `gguf` package. Its reader makes an array of every string
(SmolLM2's 98,000
strings: 6.8 s on two busy cores, here 0.2 s), and does not end where a damaged header states a huge
count. Blocks are decoded by the package. It is imported only for a file that has blocks.
"""

import dataclasses
import functools
import importlib
import math
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvqjax._errors import UserError
from kvqjax._files import FileState, open_bytes, states_of
from kvqjax.model.tensor_rows import Order

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # the first one counted in 32 bits; no tool writes it any more
ALIGNMENT = 32  # bytes; where the file does not say another one
MOST_AXES = 4  # of a tensor; ggml has no more
# Files of llama.cpp before GGUF begin with one of these.
_OLDER = (b"lmgg", b"fmgg", b"tjgg", b"algg")

# Types of tensors by their number in a file.
_FLOATS = {0: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2)}  # name, bytes of a number
_CODES = {
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    39: "MXFP4",
}
# Numbers and bytes of a block.
BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "MXFP4": (32, 17),
}

# Types of values by their number in a file.
_SCALARS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


class Entry(NamedTuple):
    """The place of one tensor.

    Attributes:
        kind: its type's name, such as "F16" or "Q4_K"; "type 10" for one that is not read here.
        shape: the shape, outermost axis first.
        start: the byte of the file at which the data begins.
        nbytes: bytes of the data; 0 for a type that is not read here.
        order: the order of its rows or columns; None: they lie in Hugging Face's order.
        undo: what makes Hugging Face's numbers of its own, in float32; None: they are the same.
    """

    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    order: Order | None = None
    undo: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def readable(self) -> bool:
        """Say whether the type is one that is read here."""
        return not self.kind.startswith("type ")


@dataclasses.dataclass(frozen=True, eq=False)
class Header:
    """The header of a file.

    Attributes:
        file: the file.
        values: the values by key. A list of strings is a list, one of numbers an array.
        tensors: the tensors by name.
    """

    file: Path
    values: dict[str, Any]
    tensors: dict[str, Entry]

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number that is not negative. Lists of the same number for every layer count as
        the number."""
        value = self.values.get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if type(value) is not int or value < 0:
            self._refuse(key, value, "a whole number, the same for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number. One of 32 bits is the shortest decimal that reads back as it, as
        config.json has it."""
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            self._refuse(key, value, "a number")
        shortest = float(str(np.float32(value)))
        return shortest if np.float32(value) == value else float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            self._refuse(key, value, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self._refuse(key, value, "true or false")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings."""
        value = self.values.get(key)
        if not isinstance(value, list):
            self._refuse(key, value, "a list of texts")
        return value

    def numbers(self, key: str, count: int) -> np.ndarray:
        """A list of `count` numbers."""
        value = self.values.get(key)
        if not isinstance(value, np.ndarray) or len(value) != count:
            self._refuse(key, value, f"a list of {count} numbers")
        return value

    def _refuse(self, key: str, value: Any, requirement: str):
        problem = "is missing" if value is None else f"= {str(value)[:40]!r}"
        raise UserError(" ".join(f"{self.file}: {key} {problem}; wanted {requirement}".split()))


def is_gguf(path: Path) -> bool:
    """Say whether a path is a GGUF file: by its name, or by how it begins."""
    if path.suffix.lower() == ".gguf" and not os.path.isdir(path):
        return True
    try:
        with open_bytes(path) as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):  # a ValueError is a path with a NUL in it
        return False


def read_header(file: Path) -> Header:
    """Read the header of a file.

    Returns:
        Its values and tensors. A file that has not changed is read once.

    Raises:
        UserError: for a file that is absent, foreign, truncated, damaged, big-endian, or one part
            of several.
    """
    try:
        return _read_once(file, states_of([file]))
    except FileNotFoundError:
        raise UserError(f"{file}: no such file") from None
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file}: cannot be read: {' '.join(str(error).split())}") from error


@functools.lru_cache(
    maxsize=4
)  # a load asks for config, tensors, fingerprint and tokenizer of one file
def _read_once(file: Path, states: tuple[FileState, ...]) -> Header:
    with open_bytes(file) as stream:
        start = stream.read(8)
        if not start.startswith(MAGIC):
            is_ggml = start[:4] in _OLDER
            problem = (
                "of llama.cpp's format before GGUF; convert the model anew"
                if is_ggml
                else "not a GGUF file"
            )
            raise UserError(f"{file}: {problem}")
        version = int.from_bytes(start[4:].ljust(4, b"\0"), "little")
        if version and not version & 0xFFFF:
            raise UserError(
                f"{file}: a big-endian GGUF file; convert the model for little-endian machines"
            )
        if version not in VERSIONS:
            versions = " and ".join(map(str, VERSIONS))
            raise UserError(f"{file}: GGUF version {version}; read are {versions}")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _walk(file, _Cursor(data, 8, file))


class _Cursor:
    """A place in the header, which moves on with every read. A header that ends too soon is
    refused."""

    def __init__(self, data: mmap.mmap, at: int, file: Path):
        self.data, self.at, self.file = data, at, file

    def require(self, nbytes: int) -> int:
        """Give the place itself if the file has that many bytes after it."""
        if nbytes > len(self.data) - self.at:
            raise UserError(
                f"{self.file}: truncated: its header goes on beyond the file's {len(self.data)} bytes"
            )
        return self.at

    def integer(self, nbytes: int) -> int:
        at = self.require(nbytes)
        self.at += nbytes
        return int.from_bytes(self.data[at : self.at], "little")

    def array(self, dtype: str, count: int) -> np.ndarray:
        nbytes = np.dtype(dtype).itemsize * count
        at = self.require(nbytes)
        self.at += nbytes
        return np.frombuffer(self.data[at : self.at], dtype)

    def string(self) -> str:
        length = self.integer(8)
        at = self.require(length)
        self.at += length
        return self._decoded(self.data[at : self.at])

    def strings(self, count: int) -> list[str]:
        self.require(8 * count)
        # What `string` does, without its calls: a vocabulary has 100,000 strings and more.
        data, at, size, texts = self.data, self.at, len(self.data), []
        for _ in range(count):
            end = at + 8
            if end <= size:
                end += struct.unpack_from("<Q", data, at)[0]
            if end > size:
                self.require(size + 1)
            texts.append(data[at + 8 : end])
            at = end
        self.at = at
        return [self._decoded(text) for text in texts]

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.array(_SCALARS[kind], 1)[0].item()
        if kind != _ARRAY:
            raise UserError(f"{self.file}: damaged: its header has a value of type {kind}")
        item, count = self.integer(4), self.integer(8)
        if item == _STRING:
            return self.strings(count)
        if item not in _SCALARS:
            raise UserError(
                f"{self.file}: a list of values of type {item} in its header is not read here"
            )
        return self.array(_SCALARS[item], count)

    def _decoded(self, text: bytes) -> str:
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise UserError(f"{self.file}: damaged: a text in its header is not UTF-8") from None


def _walk(file: Path, cursor: _Cursor) -> Header:
    tensor_count, value_count = cursor.integer(8), cursor.integer(8)
    values: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.string()
        if key in values:
            raise UserError(f"{file}: damaged: its header has {key[:80]!r} twice")
        values[key] = cursor.value(cursor.integer(4))
    parts = values.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise UserError(
            f"{file}: one of {parts} parts of a model; join them with llama-gguf-split --merge"
        )
    places: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for _ in range(tensor_count):
        name = cursor.string()
        axes = cursor.integer(4)
        if name in places or not 1 <= axes <= MOST_AXES:
            problem = "is there twice" if name in places else f"has {axes} axes"
            raise UserError(f"{file}: damaged: tensor {name[:80]!r} {problem}")
        shape = tuple(reversed([cursor.integer(8) for _ in range(axes)]))
        places[name] = (cursor.integer(4), shape, cursor.integer(8))
    alignment = values.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise UserError(
            f"{file}: damaged: general.alignment = {alignment}, which is no power of two"
        )
    data = -(-cursor.at // alignment) * alignment
    tensors = {name: _entry(file, name, *place, data) for name, place in places.items()}
    described = max((entry.start + entry.nbytes for entry in tensors.values()), default=data)
    if len(cursor.data) < described:
        size = len(cursor.data)
        raise UserError(
            f"{file}: truncated: its header describes {described} bytes, the file has {size}"
        )
    return Header(file, values, tensors)


def _entry(
    file: Path, name: str, kind: int, shape: tuple[int, ...], offset: int, data: int
) -> Entry:
    count = math.prod(shape)
    if kind in _FLOATS:
        label, size = _FLOATS[kind]
        return Entry(label, shape, data + offset, count * size)
    if kind not in _CODES:
        return Entry(f"type {kind}", shape, data + offset, 0)
    label = _CODES[kind]
    numbers, nbytes = BLOCKS[label]
    if shape[-1] % numbers:
        raise UserError(
            f"{file}: damaged: tensor {name[:80]!r} of {shape[-1]} columns in blocks of {numbers}"
        )
    return Entry(label, shape, data + offset, count // numbers * nbytes)


# --- Blocks of codes ---


def require_decoder(file: Path, kind: str) -> Any:
    """Import the package that decodes blocks.

    Args:
        file: the file that has them.
        kind: their type.

    Returns:
        The package `gguf`.

    Raises:
        UserError: where it is not installed.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise UserError(
            f"{file}: its {kind} weights are decoded by the package gguf: pip install gguf"
        ) from error


def decode_blocks(file: Path, kind: str, blocks: np.ndarray) -> np.ndarray:
    """Decode rows of blocks.

    Args:
        file: the file that they come from.
        kind: their type, one of `BLOCKS`.
        blocks: uint8 [rows, blocks, bytes of a block].

    Returns:
        float32 [rows, blocks * numbers of a block].

    Raises:
        UserError: where the package `gguf` is not installed.
    """
    rows, count, _ = blocks.shape
    if not rows or not count:
        return np.zeros((rows, count * BLOCKS[kind][0]), np.float32)
    package = require_decoder(file, kind)
    with np.errstate(
        all="ignore"
    ):  # a damaged scale is no reason to warn; infinite weights are found by their logits
        return package.quants.dequantize(
            np.ascontiguousarray(blocks).reshape(rows, -1),
            package.GGMLQuantizationType[kind],
        )
