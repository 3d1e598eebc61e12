"""A checkpoint on disk: a folder of safetensors files or a GGUF file, its tensors, their codes, its
fingerprint.

Layout of a safetensors file: 8 bytes little-endian header length, a JSON header (name -> dtype,
shape, data_offsets), the data. Headers are checked before anything is read. Afterwards slices are
read from where they lie.

Weights are plain numbers, or codes:

    FP8   w[o, i] = code[o, i] * scale[o // 128, i // 128]        (or one scale for all)
    GPTQ  w[o, i] = (code[i, o] - zero[g_idx[i], o] - 1) * scale[g_idx[i], o];  a word holds codes of consecutive i
    AWQ   w[o, i] = (code[i, o] - zero[i // group, o]) * scale[i // group, o];  a word holds codes of consecutive o
    MXFP4 w[o, i] = e2m1(code[o, i]) * 2 ^ (scale[o, i // 32] - 127);            a byte holds codes of consecutive i

in the order of Hugging Face's linear layers, [out, in]. GPTQ's second format stores its zeros
without taking off one. AWQ's words hold even outputs before odd ones. Codes are decoded to float32.
Those of a GGUF file are blocks along its rows (kvqjax/model/gguf_file.py).
"""

import dataclasses
import hashlib
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kvqjax._errors import UserError
from kvqjax._files import path_of, read_object
from kvqjax.model.config import ModelConfig
from kvqjax.model.gguf_file import BLOCKS, decode_blocks, is_gguf
from kvqjax.model.gguf_model import find_tensors
from kvqjax.model.hf_config import Scheme
from kvqjax.model.tensor_rows import Order

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I32": np.int32,
    "U8": np.uint8,
}
_FLOATS = ("F64", "F32", "F16", "BF16")
_FP8 = "F8_E4M3"


# --- Headers ---


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The place of one tensor.

    Attributes:
        file: the file.
        name: the name in the file's header.
        dtype: the dtype as safetensors spells it, or the type of a GGUF file's blocks.
        shape: the shape.
        start: the byte of the file at which the data begins.
        nbytes: bytes of the data.
        blocks: the data is blocks of codes along the last axis (`BLOCKS`).
        order: the order of its rows or columns in the file; None: they lie as they are read.
        undo: turns the file's numbers into Hugging Face's, in float32; None: they are the same.
        stored: the shape of the tensor in the file that this one is a part of; (): it is no part.
        cut: which part.
        turned: the part's axes are swapped.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    blocks: bool = False
    order: Order | None = None
    undo: Callable[[np.ndarray], np.ndarray] | None = None
    stored: tuple[int, ...] = ()
    cut: tuple[int | slice, ...] = ()
    turned: bool = False

    def part(self, name: str, cut: tuple[int | slice, ...], turned: bool = False) -> "Tensor":
        """A part of this tensor as a tensor of its own: its bytes stay where they are."""
        spans = zip(cut + (slice(None),) * len(self.shape), self.shape, strict=False)
        shape = tuple(len(range(*at.indices(size))) for at, size in spans if isinstance(at, slice))
        nbytes = self.nbytes // math.prod(self.shape) * math.prod(shape)
        shape = shape[::-1] if turned else shape
        new = {
            "name": name,
            "shape": shape,
            "nbytes": nbytes,
            "stored": self.shape,
            "cut": cut,
            "turned": turned,
        }
        return dataclasses.replace(self, **new)


Checkpoint = dict[str, Tensor]


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Read the headers of a checkpoint.

    Args:
        folder: the folder of model.safetensors, or of model.safetensors.index.json and the shards
            that it names; or a GGUF file, whose tensors have the names that Hugging Face gives
            them.

    Returns:
        Every tensor by its name.

    Raises:
        UserError: for a missing folder, file or tensor, a damaged header, a truncated file, or a
            folder of pickles.
    """
    folder = path_of(folder)
    if is_gguf(folder):
        return {
            name: Tensor(
                folder, name, e.kind, e.shape, e.start, e.nbytes, e.kind in BLOCKS, e.order, e.undo
            )
            for name, e in find_tensors(folder).items()
        }
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    checkpoint = {}
    for file, expected in _shards(folder).items():
        tensors = _tensors(file)
        missing = [name for name in expected or () if name not in tensors]
        if missing:
            raise UserError(
                f"{file}: tensor {missing[0]!r} is missing, though the index places it here"
            )
        checkpoint |= tensors
    return checkpoint


def _shards(folder: Path) -> dict[Path, list[str] | None]:
    """Files to open, each with the tensors that the index expects in it (None: no index)."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        if not single.exists():
            _refuse_pickles(folder)
            raise UserError(
                f"{folder}: no model.safetensors or model.safetensors.index.json in this folder"
            )
        return {single: None}
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{index}: not a safetensors index (no readable weight_map)")
    shards: dict[Path, list[str]] = {}
    for name, file in places.items():
        # Tools that list a folder write "./" in front of its files.
        place = file.removeprefix("./") if isinstance(file, str) else ""
        if not place or Path(place).name != place:
            raise UserError(
                f"{index}: weight_map[{name!r}]={file!r} is not a file name in this folder"
            )
        shards.setdefault(folder / place, []).append(name)
    absent = [file.name for file in shards if not file.is_file()]
    if absent:
        raise UserError(
            f"{index}: {len(absent)} of {len(shards)} files it names are missing: {', '.join(absent)}"
        )
    return dict(shards)


def _refuse_pickles(folder: Path):
    """Refuse a folder of .bin files, which run code when they are read, and say how to convert
    it."""
    pickles = sorted(folder.glob("*.bin"))
    if pickles:
        text = "m = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype='auto'); m.save_pretrained(NEW)"
        reason = "a .bin file can run code and is not read; convert it where you trust it"
        raise UserError(f"{pickles[0]}: {reason}, with torch and transformers: {text}")


def _tensors(file: Path) -> Checkpoint:
    """All tensors of one file. A file shorter than its header says is refused here, not at the
    first read."""
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    header, data = _header(file)
    tensors = {name: _tensor(file, name, entry, data) for name, entry in header.items()}
    described = max((t.start + t.nbytes for t in tensors.values()), default=data)
    size = file.stat().st_size
    if size < described:
        raise UserError(
            f"{file}: truncated: its header describes {described} bytes, the file has {size}"
        )
    return tensors


def _header(file: Path) -> tuple[dict, int]:
    """The JSON header, and the offset of the data behind it."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = struct.unpack("<Q", stream.read(8).ljust(8, b"\0"))[0]
        if not 2 <= length <= size - 8:
            raise UserError(
                f"{file}: not a safetensors file (header of {length} bytes in a file of {size})"
            )
        text = stream.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not a safetensors file (header is not JSON)") from error
    if not isinstance(header, dict):
        raise UserError(f"{file}: not a safetensors file (header is not a JSON object)")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + length


def _tensor(file: Path, name: str, entry: Any, data: int) -> Tensor:
    try:
        name.encode()  # JSON can spell half a surrogate pair, which is no text
        (first, last), shape = entry["data_offsets"], tuple(entry["shape"])
        dtype = entry["dtype"]
        numbers = all(type(number) is int and number >= 0 for number in (first, last, *shape))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: not a safetensors file (bad header entry {name!r})") from error
    # A dtype that is not read here has size 0. Its tensor is refused by name where it is wanted.
    size = -1
    if isinstance(dtype, str):
        size = np.dtype(_DTYPES[dtype]).itemsize if dtype in _DTYPES else 0
    # The product is taken of checked numbers only: a shape may hold anything that JSON can spell.
    wrong = not numbers or first > last or size < 0
    if wrong or (size and last - first != size * math.prod(shape)):
        raise UserError(f"{file}: not a safetensors file (bad header entry {name!r})")
    return Tensor(file, name, dtype, shape, data + first, last - first)


def read_slice(tensor: Tensor, index: tuple[slice, ...]) -> np.ndarray:
    """Read a slice of a tensor without touching the rest of its file.

    Args:
        index: a slice of every axis.

    Returns:
        The slice in the stored dtype; blocks, and numbers that are stored in another form, as
        float32.

    Raises:
        UserError: for a file that cannot be read.
    """
    if 0 in tensor.shape:
        return np.empty(tensor.shape, np.float32 if tensor.blocks else _DTYPES[tensor.dtype])[index]
    numbers = _read_numbers(tensor, index)
    return numbers if tensor.undo is None else tensor.undo(numbers.astype(np.float32))


def _read_numbers(tensor: Tensor, index: tuple[slice, ...]) -> np.ndarray:
    """A slice of a tensor's numbers as the file has them, in the order in which they are read."""
    try:
        if tensor.blocks:
            return _read_blocks(tensor, index)
        mapped = np.memmap(
            tensor.file,
            dtype=np.dtype(_DTYPES[tensor.dtype]),
            mode="r",
            offset=tensor.start,
            shape=tensor.stored or tensor.shape or (1,),
        )
        if tensor.stored:
            mapped = mapped[tensor.cut]
            mapped = mapped.T if tensor.turned else mapped
        return np.array(mapped.reshape(tensor.shape)[_stored_index(tensor, index)])
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split())
        raise UserError(f"{tensor.file}: cannot be read: {reason}") from error


def _stored_index(tensor: Tensor, index: tuple[slice, ...]) -> tuple[slice | np.ndarray, ...]:
    """Find a slice in the file. If the file has an axis in another order, it gives places along
    it."""
    if tensor.order is None:
        return index
    axis = tensor.order.axis
    places = tensor.order.places(np.arange(*index[axis].indices(tensor.shape[axis])))
    return (*index[:axis], places, *index[axis + 1 :])


def _read_blocks(tensor: Tensor, index: tuple[slice, ...]) -> np.ndarray:
    """A slice of a matrix of blocks. In each row, the blocks around the slice are decoded."""
    if len(tensor.shape) != 2:
        raise UserError(f"{tensor.file}: {tensor.name!r} of type {tensor.dtype} is no matrix")
    size, nbytes = BLOCKS[tensor.dtype]
    rows, columns = _stored_index(tensor, index)
    first, last, _ = (
        columns.indices(tensor.shape[1]) if isinstance(columns, slice) else (0, tensor.shape[1], 1)
    )
    blocks = slice(first // size, -(-last // size))
    shape = (tensor.shape[0], tensor.shape[1] // size, nbytes)
    mapped = np.memmap(tensor.file, dtype=np.uint8, mode="r", offset=tensor.start, shape=shape)
    skipped = first - blocks.start * size
    numbers = decode_blocks(tensor.file, tensor.dtype, np.asarray(mapped[rows][:, blocks]))
    numbers = numbers[:, skipped : skipped + last - first]
    return numbers if isinstance(columns, slice) else numbers[:, columns]


# --- Weights: plain numbers, or tensors of codes and scales ---

_PARTS = {
    "qweight": ("I32",),
    "qzeros": ("I32",),
    "scales": _FLOATS,
    "g_idx": ("I32",),
    "weight_scale_inv": _FLOATS,
    "blocks": ("U8",),
    "exponents": ("U8",),
}


class StoredWeight(NamedTuple):
    """One matrix or vector as a checkpoint holds it.

    Attributes:
        name: the name that it has as plain numbers.
        parts: its tensors by their role ("weight", "scales", "qzeros").
        shape: the shape of the decoded weight, in Hugging Face's order.
        scheme: how its codes are packed; None: it is plain numbers.
        rows: which rows of the stored weight it is, in its order; None: it is all of them.
        stored_rows: how many rows the stored weight has, where `rows` picks some of them.
    """

    name: str
    parts: dict[str, Tensor]
    shape: tuple[int, ...]
    scheme: Scheme | None = None
    rows: Any = None
    stored_rows: int = 0

    def picked(self, rows: np.ndarray) -> "StoredWeight":
        """Some rows of this weight, in their order, as a weight of its own."""
        return self._replace(
            rows=rows, stored_rows=self.shape[0], shape=(len(rows), *self.shape[1:])
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def file(self) -> Path:
        """The file to name in a message about this weight."""
        return next(iter(self.parts.values())).file


def find_weight(checkpoint: Checkpoint, name: str, scheme: Scheme | None) -> StoredWeight | None:
    """Find the tensors of a weight.

    Args:
        checkpoint: the tensors of the checkpoint.
        name: the name that the weight has as plain numbers.
        scheme: how codes are packed, None where config.json names no scheme.

    Returns:
        The weight; None where the checkpoint has nothing of this name.

    Raises:
        UserError: for parts that are missing, of another dtype, or of shapes that do not fit each
            other.
    """
    stem = name.removesuffix(".weight")
    if name in checkpoint:
        return _find_floats(checkpoint, name, stem, scheme)
    if scheme is not None and scheme.method == "mxfp4" and f"{stem}.blocks" in checkpoint:
        return _find_mxfp4(checkpoint, name, stem, scheme)
    if scheme is None or f"{stem}.qweight" not in checkpoint:
        return None
    return _find_words(checkpoint, name, stem, scheme)


def _find_floats(
    checkpoint: Checkpoint, name: str, stem: str, scheme: Scheme | None
) -> StoredWeight:
    """A weight of plain numbers or of FP8 codes, which stands under its own name."""
    tensor = checkpoint[name]
    if tensor.dtype != _FP8:
        if tensor.dtype not in _FLOATS and not tensor.blocks:
            names = ", ".join(_FLOATS)
            raise UserError(
                f"{tensor.file}: {name!r} has dtype {tensor.dtype}, wanted one of {names}"
            )
        return StoredWeight(name, {"weight": tensor}, tensor.shape)
    if scheme is None or scheme.method != "fp8":
        raise UserError(
            f"{tensor.file}: {name!r} is FP8, but config.json has no quantization_config of fp8"
        )
    parts = {"weight": tensor} | _find_parts(checkpoint, stem, ("weight_scale_inv",))
    scale = parts["weight_scale_inv"]
    if scheme.block is None:
        # One scale for all may be written with or without axes.
        _check_shape(scale, (1,) * len(tensor.shape), fits=math.prod(scale.shape) == 1)
    else:
        pairs = zip(tensor.shape, scheme.block, strict=True)
        _check_shape(scale, tuple(-(-size // block) for size, block in pairs))
    return StoredWeight(name, parts, tensor.shape, scheme)


def _find_mxfp4(checkpoint: Checkpoint, name: str, stem: str, scheme: Scheme) -> StoredWeight:
    """A matrix of MXFP4: blocks [out, in / 32, 16] and the exponents of their scales [out, in /
    32]."""
    parts = _find_parts(checkpoint, stem, ("blocks", "exponents"))
    shape = parts["blocks"].shape
    if len(shape) != 3 or shape[2] != MX_BLOCK // 2:
        _check_shape(parts["blocks"], (*shape[:2], MX_BLOCK // 2), fits=False)
    _check_shape(parts["exponents"], shape[:2])
    return StoredWeight(name, parts, (shape[0], shape[1] * MX_BLOCK), scheme)


def _find_words(checkpoint: Checkpoint, name: str, stem: str, scheme: Scheme) -> StoredWeight:
    """A matrix of GPTQ or AWQ, its parts' shapes checked against each other."""
    ordered = scheme.method == "gptq" and f"{stem}.g_idx" in checkpoint
    names = ("qweight", "qzeros", "scales", *(["g_idx"] if ordered else []))
    parts = _find_parts(checkpoint, stem, names)
    codes_per_word, shape = 32 // scheme.bits, parts["qweight"].shape
    if len(shape) != 2 or len(parts["scales"].shape) != 2:
        raise UserError(f"{parts['qweight'].file}: {name!r} is no matrix of words")
    if scheme.method == "gptq":
        inputs, outputs = shape[0] * codes_per_word, shape[1]
    else:
        inputs, outputs = shape[0], shape[1] * codes_per_word
    groups = parts["scales"].shape[0]
    _check_shape(parts["scales"], (groups, outputs))
    _check_shape(parts["qzeros"], (groups, outputs // codes_per_word))
    if ordered:
        _check_shape(parts["g_idx"], (inputs,))
    elif not groups or inputs % groups:
        raise UserError(f"{parts['scales'].file}: {name!r} has {groups} groups for {inputs} inputs")
    return StoredWeight(name, parts, (outputs, inputs), scheme)


def _find_parts(checkpoint: Checkpoint, stem: str, names: tuple[str, ...]) -> dict[str, Tensor]:
    for part in names:
        if f"{stem}.{part}" not in checkpoint:
            raise UserError(
                f"tensor '{stem}.{part}' is missing; without it {stem} cannot be decoded"
            )
        tensor = checkpoint[f"{stem}.{part}"]
        if tensor.dtype not in _PARTS[part]:
            dtypes = " or ".join(_PARTS[part])
            raise UserError(
                f"{tensor.file}: {tensor.name!r} has dtype {tensor.dtype}, wanted {dtypes}"
            )
    return {part: checkpoint[f"{stem}.{part}"] for part in names}


def _check_shape(tensor: Tensor, shape: tuple[int, ...], fits: bool | None = None):
    if not (tensor.shape == shape if fits is None else fits):
        raise UserError(
            f"{tensor.file}: {tensor.name!r} has shape {list(tensor.shape)}, wanted {list(shape)}"
        )


# --- Decoding ---

MX_BLOCK = 32  # numbers of MXFP4 that share an exponent
# A sign bit stands above the code of the size.
_E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each nibble of a word, lowest nibble first


def decode_slice(weight: StoredWeight, index: tuple[slice, ...]) -> np.ndarray:
    """Read a slice of a matrix [out, in] or of a vector. For packed codes, the words around the
    slice are read.

    Args:
        index: a slice of every axis of the decoded weight.

    Returns:
        Plain numbers in the stored dtype; codes decoded to float32.

    Raises:
        UserError: for a file that cannot be read, or a group of inputs that does not exist.
    """
    if weight.rows is not None:
        # Scales are shared by rows that lie beside each other, so all rows from the first to the
        # last are decoded.
        row_numbers = weight.rows[index[0]]
        first = int(row_numbers.min()) if len(row_numbers) else 0
        matrix = weight._replace(rows=None, shape=(weight.stored_rows, *weight.shape[1:]))
        block = decode_slice(
            matrix, (slice(first, int(row_numbers.max(initial=first)) + 1), *index[1:])
        )
        return block[row_numbers - first]
    if weight.scheme is None:
        return read_slice(weight.parts["weight"], index)
    pairs = zip(index, weight.shape, strict=True)
    rows, columns = (slice(*span.indices(size)) for span, size in pairs)
    if weight.scheme.method == "mxfp4":
        return _decode_mxfp4(weight, rows, columns)
    if weight.scheme.method == "fp8":
        return _decode_fp8(weight, weight.scheme, rows, columns)
    return _decode_words(weight, weight.scheme, rows, columns)


def _decode_fp8(weight: StoredWeight, scheme: Scheme, rows: slice, columns: slice) -> np.ndarray:
    codes = read_slice(weight.parts["weight"], (rows, columns)).astype(np.float32)
    scale = weight.parts["weight_scale_inv"]
    scales = read_slice(scale, (slice(None),) * len(scale.shape)).astype(np.float32)
    if scheme.block is None:
        return codes * scales.reshape(1, 1)
    outputs = np.arange(rows.start, rows.stop) // scheme.block[0]
    inputs = np.arange(columns.start, columns.stop) // scheme.block[1]
    return codes * scales[outputs][:, inputs]


def _decode_mxfp4(weight: StoredWeight, rows: slice, columns: slice) -> np.ndarray:
    """Blocks of 32 numbers of 4 bits with one power of two (OCP Microscaling Formats 1.0, section
    5.2.1)."""
    blocks = slice(columns.start // MX_BLOCK, -(-columns.stop // MX_BLOCK))
    codes = read_slice(weight.parts["blocks"], (rows, blocks, slice(None)))
    exponents = read_slice(weight.parts["exponents"], (rows, blocks)).astype(np.int32) - 127
    pairs = np.stack([codes & 15, codes >> 4], -1)  # the earlier number of a byte is its lower half
    numbers = np.ldexp(_E2M1[pairs].reshape(*codes.shape[:2], MX_BLOCK), exponents[..., None])
    first = columns.start - blocks.start * MX_BLOCK
    return numbers.reshape(len(codes), -1)[:, first : first + columns.stop - columns.start]


def _decode_words(weight: StoredWeight, scheme: Scheme, rows: slice, columns: slice) -> np.ndarray:
    """Outputs `rows` and inputs `columns` of a matrix of GPTQ or AWQ."""
    parts, bits, awq = weight.parts, scheme.bits, scheme.method == "awq"
    order = _AWQ_ORDER if awq else None
    row_words, row_codes = _words_around(rows, bits)
    if awq:
        words = read_slice(parts["qweight"], (columns, row_words))
        codes = _unpack(words, bits, 1, order)[:, row_codes]
    else:
        column_words, column_codes = _words_around(columns, bits)
        words = read_slice(parts["qweight"], (column_words, rows))
        codes = _unpack(words, bits, 0)[column_codes]
    words = read_slice(parts["qzeros"], (slice(None), row_words))
    zeros = _unpack(words, bits, 1, order)[:, row_codes] + scheme.offset
    scales = read_slice(parts["scales"], (slice(None), rows)).astype(np.float32)
    groups = _groups(weight, columns, len(scales))
    return ((codes - zeros[groups]) * scales[groups]).T


def _words_around(span: slice, bits: int) -> tuple[slice, slice]:
    """The words in which a span of codes lies, and the span among the codes of these words."""
    size = 32 // bits
    words = slice(span.start // size, -(-span.stop // size))
    first = span.start % size
    return words, slice(first, first + span.stop - span.start)


def _unpack(
    words: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None
) -> np.ndarray:
    """Codes of words along `axis`, lowest bits first. `order` says which code each place of a word
    holds."""
    size, mask = 32 // bits, np.uint32(2**bits - 1)
    codes = [(words.view(np.uint32) >> np.uint32(bits * place)) & mask for place in range(size)]
    if order is not None:
        codes = [codes[order.index(place)] for place in range(size)]
    shape = list(words.shape)
    shape[axis] *= size
    return np.stack(codes, axis + 1).reshape(shape).astype(np.int32)


def _groups(weight: StoredWeight, columns: slice, count: int) -> np.ndarray:
    """The group of scales of every input in `columns`."""
    if "g_idx" not in weight.parts:
        return np.arange(columns.start, columns.stop) // (weight.shape[1] // count)
    tensor = weight.parts["g_idx"]
    groups = read_slice(tensor, (columns,))
    if groups.size and not 0 <= groups.min() <= groups.max() < count:
        raise UserError(f"{tensor.file}: {tensor.name!r} names a group that does not exist")
    return groups


# --- The fingerprint: what an artifact says it was calibrated on ---

_SAMPLE_BYTES = 4096  # of a tensor at most, so that a fingerprint of any checkpoint takes little
_SAMPLE_PIECES = 8  # spread evenly over a tensor

# An edited generation config changes nothing that is calibrated. Windows are digested layer by
# layer.
UNCALIBRATED = ("eos_ids", "bos_id", "sliding_window")


def fingerprint(folder: str | Path, config: ModelConfig) -> str:
    """Digest a checkpoint part by part, so that a mismatch can be named by its part.

    Args:
        folder: the folder of the checkpoint.

    Returns:
        "config=...,headers=...,samples=...".

    Raises:
        UserError: as `open_checkpoint` does.
    """
    checkpoint = open_checkpoint(folder)
    fields = _changed_fields(config)
    fields = {name: value for name, value in fields.items() if name not in UNCALIBRATED}
    fields["windows"] = config.windows  # the name in fingerprints that artifacts already carry
    text = json.dumps(fields, sort_keys=True, default=_changed_fields)
    digests = {
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "headers": header_digest(checkpoint),
        "samples": sample_digest(checkpoint),
    }
    return ",".join(f"{name}={digest[:16]}" for name, digest in digests.items())


def fingerprint_parts(text: str) -> dict[str, str]:
    """Split a fingerprint "name=digest,..." into its digests by name."""
    return dict(part.split("=", 1) for part in text.split(",") if "=" in part)


def _changed_fields(record) -> dict:
    """Fields of a dataclass that differ from their defaults, so that a field added later changes no
    digest."""
    fields = {f.name: (getattr(record, f.name), f.default) for f in dataclasses.fields(record)}
    return {name: value for name, (value, default) in fields.items() if value != default}


def sample(tensor: Tensor) -> bytes:
    """Read up to 4 KiB of a tensor's bytes, in pieces spread evenly; all of it when it is that
    small."""
    piece = _SAMPLE_BYTES // _SAMPLE_PIECES
    with tensor.file.open("rb") as stream:
        if tensor.nbytes <= _SAMPLE_BYTES:
            stream.seek(tensor.start)
            return stream.read(tensor.nbytes)
        pieces = []
        for number in range(_SAMPLE_PIECES):
            offset = (tensor.nbytes - piece) * number // (_SAMPLE_PIECES - 1)
            stream.seek(tensor.start + offset)
            pieces.append(stream.read(piece))
    return b"".join(pieces)


def sample_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 over the samples of all tensors by name: the same weights give it however they are
    sharded."""
    digest = hashlib.sha256()
    for name in sorted(checkpoint):
        digest.update(name.encode() + b"\0" + sample(checkpoint[name]))
    return digest.hexdigest()


def header_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 over name, dtype and shape of all tensors."""
    lines = [[name, checkpoint[name].dtype, checkpoint[name].shape] for name in sorted(checkpoint)]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()
