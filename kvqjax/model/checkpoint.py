"""A folder of safetensors files: headers checked before anything is read, slices of tensors, sampled digests.

Layout of a file: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, data_offsets), the data.
"""

import dataclasses
import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvqjax._errors import UserError
from kvqjax._files import read_object

__all__ = ["Checkpoint", "Tensor", "header_digest", "open_checkpoint", "read", "sample", "sample_digest"]

_SAMPLE_BYTES = 4096
_SAMPLE_PIECES = 8
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I32": np.int32,
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: `start` and `nbytes` are byte offsets in `file`; dtype as safetensors spells it."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


Checkpoint = dict[str, Tensor]


def _header(file: Path) -> tuple[dict, int]:
    """JSON header and the offset of the data behind it."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = struct.unpack("<Q", stream.read(8).ljust(8, b"\0"))[0]
        if not 2 <= length <= size - 8:
            raise UserError(f"{file}: not a safetensors file (header of {length} bytes in a file of {size})")
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
        name.encode()  # JSON can spell what is no text
        (first, last), shape, dtype = entry["data_offsets"], tuple(entry["shape"]), entry["dtype"]
        numbers = all(type(number) is int and number >= 0 for number in (first, last, *shape))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: not a safetensors file (bad header entry {name!r})") from error
    # Tensors of other types are refused by name where they are wanted.
    size = (np.dtype(_DTYPES[dtype]).itemsize if dtype in _DTYPES else 0) if isinstance(dtype, str) else -1
    if not numbers or first > last or size < 0 or (size and last - first != size * math.prod(shape)):
        raise UserError(f"{file}: not a safetensors file (bad header entry {name!r})")
    return Tensor(file, name, dtype, shape, data + first, last - first)


def _tensors(file: Path) -> Checkpoint:
    """All tensors of one file. A file shorter than its header says is refused here, not at the first read."""
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    header, data = _header(file)
    tensors = {name: _tensor(file, name, entry, data) for name, entry in header.items()}
    wanted, size = max((t.start + t.nbytes for t in tensors.values()), default=data), file.stat().st_size
    if size < wanted:
        raise UserError(f"{file}: truncated: its header describes {wanted} bytes, the file has {size}")
    return tensors


def _shards(folder: Path) -> dict[Path, list[str] | None]:
    """Files to open, each with the tensors that the index expects in it (None: no index)."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        if not single.exists():
            _refuse_pickles(folder)
            raise UserError(f"{folder}: no model.safetensors or model.safetensors.index.json in this folder")
        return {single: None}
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{index}: not a safetensors index (no readable weight_map)")
    shards: dict[Path, list[str]] = {}
    for name, file in places.items():
        place = file.removeprefix("./") if isinstance(file, str) else ""  # as tools write it that list a folder
        if not place or Path(place).name != place:
            raise UserError(f"{index}: weight_map[{name!r}]={file!r} is not a file name in this folder")
        shards.setdefault(folder / place, []).append(name)
    absent = [file.name for file in shards if not file.is_file()]
    if absent:
        raise UserError(f"{index}: {len(absent)} of {len(shards)} files it names are missing: {', '.join(absent)}")
    return dict(shards)


def _refuse_pickles(folder: Path):
    """Refuse a folder of .bin files, which run code when they are read, and say how to convert it."""
    found = sorted(folder.glob("*.bin"))
    if found:
        text = "m = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype='auto'); m.save_pretrained(NEW)"
        why = "a .bin file can run code and is not read; convert it where you trust it"
        raise UserError(f"{found[0]}: {why}, with torch and transformers: {text}")


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Tensors of model.safetensors, or of the shards its index names. Reads headers only; raises UserError."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    checkpoint = {}
    for file, expected in _shards(folder).items():
        tensors = _tensors(file)
        missing = [name for name in expected or () if name not in tensors]
        if missing:
            raise UserError(f"{file}: tensor {missing[0]!r} is missing, though the index places it here")
        checkpoint |= tensors
    return checkpoint


def read(tensor: Tensor, index: tuple[slice, ...]) -> np.ndarray:
    """The slice `index` of a tensor, read from disk in its stored dtype without touching the rest."""
    if 0 in tensor.shape:
        return np.empty(tensor.shape, _DTYPES[tensor.dtype])[index]
    try:
        stored = np.dtype(_DTYPES[tensor.dtype])
        mapped = np.memmap(tensor.file, dtype=stored, mode="r", offset=tensor.start, shape=tensor.shape or (1,))
        return np.array(mapped.reshape(tensor.shape)[index])
    except (OSError, ValueError) as error:
        raise UserError(f"{tensor.file}: cannot be read: {' '.join(str(error).split())}") from error


def sample(tensor: Tensor) -> bytes:
    """Up to 4 KiB of a tensor's bytes, in 8 pieces spread evenly; all of it when it is that small."""
    piece = _SAMPLE_BYTES // _SAMPLE_PIECES
    with tensor.file.open("rb") as stream:
        if tensor.nbytes <= _SAMPLE_BYTES:
            stream.seek(tensor.start)
            return stream.read(tensor.nbytes)
        pieces = []
        for number in range(_SAMPLE_PIECES):
            stream.seek(tensor.start + (tensor.nbytes - piece) * number // (_SAMPLE_PIECES - 1))
            pieces.append(stream.read(piece))
    return b"".join(pieces)


def sample_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 over the samples of all tensors by name: the same weights give it however they are sharded."""
    digest = hashlib.sha256()
    for name in sorted(checkpoint):
        digest.update(name.encode() + b"\0" + sample(checkpoint[name]))
    return digest.hexdigest()


def header_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 over name, dtype and shape of all tensors."""
    lines = [[name, checkpoint[name].dtype, checkpoint[name].shape] for name in sorted(checkpoint)]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()
