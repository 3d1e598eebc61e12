"""Optional methods by which a codec's spec names faster ways to read its bodies than decoding them block by block.

packed(value, rope, shape) -> Packed | None     of keys: a kernel that reads them beside values of the spec `value`
scores(shape) -> function | None                of keys: products with all keys at once, stored head by head
values(shape) -> function | None                of values: weighted sums of all values at once, likewise
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from kvqjax.codecs.base import CodecSpec
from kvqjax.model.config import KVShape
from kvqjax.model.rope import inverse_frequencies
from kvqjax.pallas_kernels.dispatch import Spec
from kvqjax.pallas_kernels.packed import PackedSpec, Rope

__all__ = ["BLOCK", "Packable", "Packed", "ReadAtOnce", "key_value_spec", "packed_form", "rope_of"]

# Tokens that the plain path reads at a time: whole planes of any width, and few enough for a CPU's cache.
BLOCK = 1024


class Packed(NamedTuple):
    """A body that a kernel can read as it is stored: what is static about it, and its arrays as kernels take them,

        body(weights, constants, stored, positions) -> PackedBody, LatentBody, HiggsBody or CommVQBody

    from `stored` {source: {field: arrays}} and where each stretch of its tokens begins in the sequence [n]. `trusted`:
    the chip itself checked the kernel, or the user forces it, so that the table of kernels is not asked. `straight`:
    something reads the words themselves, a kernel of the cache's chip or the plain form of uniform codes."""

    spec: Spec
    body: Callable
    trusted: bool = False
    straight: bool = True


@runtime_checkable
class Packable(Protocol):
    """A spec of keys that names a kernel for some specs of values."""

    def packed(self, value: CodecSpec, rope: str, shape: KVShape) -> Packed | None:
        """Say how kernels read keys of this spec and values of `value`; None for values that no kernel reads beside
        them. `rope` is "pre" for keys stored before RoPE, "post" for keys stored after it."""
        ...


@runtime_checkable
class ReadAtOnce(Protocol):
    """A spec whose body XLA reads as a whole, stored head by head (kvqjax.methods.direct has those of ours)."""

    def scores(self, shape: KVShape) -> Callable | None:
        """Give the function of keys, scores(q, fields); None for shapes without one."""
        ...

    def values(self, shape: KVShape) -> Callable | None:
        """Give the function of values, values(weights, fields, dtype, piece); None for shapes without one."""
        ...


def packed_form(key: CodecSpec, value: CodecSpec, rope: str, shape: KVShape) -> Packed | None:
    """Ask the spec of the keys for the kernel form of both; None where it names none."""
    return key.packed(value, rope, shape) if isinstance(key, Packable) else None


def rope_of(shape: KVShape) -> Rope:
    """Make the kernels' description of a shape's RoPE."""
    factor = 1.0 if shape.turning is None else shape.turning.attention_factor
    return Rope(tuple(map(float, inverse_frequencies(shape))), factor)


def key_value_spec(key: Any, value: Any, rope: str, shape: KVShape, **more) -> PackedSpec:
    """Make the kernel spec of keys and values that have `bits` each and values' scales of `value.dtype`; `more` are
    fields of `PackedSpec` that differ from codec to codec."""
    heads = {"kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "block": BLOCK}
    before = rope_of(shape) if rope == "pre" else None
    return PackedSpec(key_bits=key.bits, value_bits=value.bits, scales=value.dtype, rope=before, **heads, **more)
