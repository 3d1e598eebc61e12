"""Matrices as checkpoints hold them: plain numbers, FP8 with scales of blocks, GPTQ and AWQ words of 4 or 8 bits.

    FP8   w[o, i] = code[o, i] * scale[o // 128, i // 128]        (or one scale for all)
    GPTQ  w[o, i] = (code[i, o] - zero[g_idx[i], o] - 1) * scale[g_idx[i], o];  a word holds codes of consecutive i
    AWQ   w[o, i] = (code[i, o] - zero[i // group, o]) * scale[i // group, o];  a word holds codes of consecutive o

in the order of Hugging Face's linear layers, [out, in]. GPTQ's second format stores its zeros without taking off one;
AWQ's words hold even outputs before odd ones. What is decoded is float32.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from kvqjax._errors import UserError
from kvqjax.model.checkpoint import Checkpoint, Tensor, read
from kvqjax.model.hf_fields import refuse

__all__ = ["Scheme", "Stored", "decoded", "find", "read_scheme"]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output that each nibble of a word belongs to, lowest nibble first
_BITS = {"gptq": (4, 8), "awq": (4,)}
_FLOATS = ("F64", "F32", "F16", "BF16")
_PARTS = {"qweight": ("I32",), "qzeros": ("I32",), "scales": _FLOATS, "g_idx": ("I32",), "weight_scale_inv": _FLOATS}
FP8 = "F8_E4M3"


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a checkpoint's codes are packed: `method` "fp8", "gptq" or "awq"; `offset` is added to GPTQ's stored zeros;
    `block` are FP8's outputs and inputs per scale, None for one scale."""

    method: str
    bits: int = 8
    offset: int = 0
    block: tuple[int, int] | None = None


def read_scheme(raw: dict) -> Scheme | None:
    """The scheme of a config.json, None for plain numbers. Raises UserError for one that is not decoded here."""
    found = raw.get("quantization_config")
    if found is None:
        return None
    method = str(found.get("quant_method")) if isinstance(found, dict) else ""
    if method not in ("fp8", *_BITS):
        refuse("quantization_config", found, "decoded are quant_method fp8, gptq and awq")
    if method == "fp8":
        block = found.get("weight_block_size")
        whole = isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block)
        if block is not None and not whole:
            refuse("quantization_config.weight_block_size", block, "wanted two positive integers or null")
        return Scheme("fp8", block=(block[0], block[1]) if block is not None else None)
    bits, layout = found.get("bits", 4), found.get("version", "gemm")
    if bits not in _BITS[method]:
        refuse("quantization_config.bits", bits, f"{method} is decoded of {' or '.join(map(str, _BITS[method]))} bits")
    if method == "awq" and str(layout).lower() != "gemm":
        refuse("quantization_config.version", layout, "wanted gemm")
    kind = found.get("checkpoint_format", "gptq")
    if method == "gptq" and kind not in ("gptq", "gptq_v2"):
        refuse("quantization_config.checkpoint_format", kind, "wanted gptq or gptq_v2")
    return Scheme(method, bits, offset=int(method == "gptq" and kind == "gptq"))


class Stored(NamedTuple):
    """One matrix or vector: its tensors by what they are to it, and its shape in Hugging Face's order."""

    name: str
    parts: dict[str, Tensor]
    shape: tuple[int, ...]
    scheme: Scheme | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


def find(checkpoint: Checkpoint, name: str, scheme: Scheme | None) -> Stored | None:
    """What the checkpoint holds under a name, None if nothing. Raises UserError for parts that do not fit."""
    stem = name.removesuffix(".weight")
    if name in checkpoint:
        tensor = checkpoint[name]
        if tensor.dtype != FP8:
            if tensor.dtype not in _FLOATS:
                known = ", ".join(_FLOATS)
                raise UserError(f"{tensor.file}: {name!r} has dtype {tensor.dtype}, wanted one of {known}")
            return Stored(name, {"weight": tensor}, tensor.shape)
        if scheme is None or scheme.method != "fp8":
            raise UserError(f"{tensor.file}: {name!r} is FP8, but config.json has no quantization_config of fp8")
        found = Stored(name, {"weight": tensor} | _parts(checkpoint, stem, ("weight_scale_inv",)), tensor.shape, scheme)
        blocks = [-(-size // block) for size, block in zip(tensor.shape, scheme.block or tensor.shape, strict=True)]
        _wanted(found, "weight_scale_inv", tuple(blocks), alone=scheme.block is None)
        return found
    if scheme is None or f"{stem}.qweight" not in checkpoint:
        return None
    return _packed(checkpoint, name, stem, scheme)


def _packed(checkpoint: Checkpoint, name: str, stem: str, scheme: Scheme) -> Stored:
    """A matrix of GPTQ or AWQ, its parts' shapes checked against each other."""
    order = f"{stem}.g_idx" in checkpoint and scheme.method == "gptq"
    parts = _parts(checkpoint, stem, ("qweight", "qzeros", "scales", *(["g_idx"] if order else [])))
    word, shape = 32 // scheme.bits, parts["qweight"].shape
    if len(shape) != 2 or len(parts["scales"].shape) != 2:
        raise UserError(f"{parts['qweight'].file}: {name!r} is no matrix of words")
    inputs, outputs = (shape[0] * word, shape[1]) if scheme.method == "gptq" else (shape[0], shape[1] * word)
    found, groups = Stored(name, parts, (outputs, inputs), scheme), parts["scales"].shape[0]
    _wanted(found, "scales", (groups, outputs))
    _wanted(found, "qzeros", (groups, outputs // word))
    if order:
        _wanted(found, "g_idx", (inputs,))
    elif not groups or inputs % groups:
        raise UserError(f"{parts['scales'].file}: {name!r} has {groups} groups for {inputs} inputs")
    return found


def _parts(checkpoint: Checkpoint, stem: str, names: tuple[str, ...]) -> dict[str, Tensor]:
    for part in names:
        if f"{stem}.{part}" not in checkpoint:
            raise UserError(f"tensor '{stem}.{part}' is missing; without it {stem} cannot be decoded")
        tensor = checkpoint[f"{stem}.{part}"]
        if tensor.dtype not in _PARTS[part]:
            raise UserError(
                f"{tensor.file}: {tensor.name!r} has dtype {tensor.dtype}, wanted {' or '.join(_PARTS[part])}"
            )
    return {part: checkpoint[f"{stem}.{part}"] for part in names}


def _wanted(found: Stored, part: str, shape: tuple[int, ...], alone: bool = False):
    tensor = found.parts[part]
    if math.prod(tensor.shape) != 1 if alone else tensor.shape != shape:
        raise UserError(f"{tensor.file}: {tensor.name!r} has shape {list(tensor.shape)}, wanted {list(shape)}")


def decoded(stored: Stored, index: tuple[slice, ...]) -> np.ndarray:
    """The slice `index` of a matrix [out, in] or vector: as it is stored, or decoded to float32. Of what is packed,
    whole words are read."""
    if stored.scheme is None:
        return read(stored.parts["weight"], index)
    rows, columns = (slice(*one.indices(size)) for one, size in zip(index, stored.shape, strict=True))
    if stored.scheme.method == "fp8":
        return _fp8(stored, stored.scheme, rows, columns)
    return _words(stored, stored.scheme, rows, columns)


def _fp8(stored: Stored, scheme: Scheme, rows: slice, columns: slice) -> np.ndarray:
    codes, scale = read(stored.parts["weight"], (rows, columns)), stored.parts["weight_scale_inv"]
    scales = read(scale, (slice(None),) * len(scale.shape)).astype(np.float32)
    if scheme.block is None:
        return codes.astype(np.float32) * scales.reshape(1, 1)
    outs, ins = (np.arange(s.start, s.stop) // b for s, b in zip((rows, columns), scheme.block, strict=True))
    return codes.astype(np.float32) * scales[outs][:, ins]


def _codes(words: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Codes of words along `axis`, lowest bits first; `order` says whose the places of a word are."""
    places = np.arange(32 // bits)
    parts = [(words.view(np.uint32) >> np.uint32(bits * place)) & np.uint32(2**bits - 1) for place in places]
    if order is not None:
        parts = [parts[order.index(place)] for place in places]
    shape = list(words.shape)
    shape[axis] *= len(places)
    return np.stack(parts, axis + 1).reshape(shape).astype(np.int32)


def _around(span: slice, word: int) -> slice:
    """The words in which a span of codes lies."""
    return slice(span.start // word, -(-span.stop // word))


def _words(stored: Stored, scheme: Scheme, rows: slice, columns: slice) -> np.ndarray:
    """GPTQ or AWQ: outputs `rows`, inputs `columns`."""
    parts = stored.parts
    word, awq = 32 // scheme.bits, scheme.method == "awq"
    order = _AWQ_ORDER if awq else None
    inside = slice(rows.start % word, rows.start % word + rows.stop - rows.start)
    if awq:
        codes = _codes(read(parts["qweight"], (columns, _around(rows, word))), scheme.bits, 1, order)[:, inside]
    else:
        first = columns.start % word
        codes = _codes(read(parts["qweight"], (_around(columns, word), rows)), scheme.bits, 0)
        codes = codes[first : first + columns.stop - columns.start]
    zeros = _codes(read(parts["qzeros"], (slice(None), _around(rows, word))), scheme.bits, 1, order)[:, inside]
    scales = read(parts["scales"], (slice(None), rows)).astype(np.float32)
    if "g_idx" in parts:
        group = read(parts["g_idx"], (columns,))
        if group.size and not 0 <= group.min() <= group.max() < len(scales):
            raise UserError(f"{parts['g_idx'].file}: {parts['g_idx'].name!r} names a group that does not exist")
    else:
        group = np.arange(columns.start, columns.stop) // (stored.shape[1] // len(scales))
    return ((codes - (zeros + scheme.offset)[group]) * scales[group]).T
