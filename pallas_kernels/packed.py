"""What a decode-attention kernel on packed keys and values is given: a body's arrays and a static description.

Keys are uniform codes with one scale and minimum per channel for `key_group` consecutive tokens, values with one per
token for `value_group` consecutive channels (KIVI, arXiv 2402.02750): x_hat = code * scale + low. The arrays are laid
out as `kvqjax.layout` writes them: all KV heads side by side on the lanes, head h in lanes h*D to (h+1)*D - 1.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
from jaxtyping import Array, Shaped, UInt

from kvqjax.layout import split_bits

__all__ = ["TARGETS", "PackedBody", "PackedSpec", "check", "target_of"]

TARGETS = ("cpu", "v5e", "v5p", "v6e", "v7x", "sm75", "sm80", "sm90")
# How the chips' names begin (`device_kind`), longer ones first; any other gets the path that runs everywhere.
KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "v7x",
    "Tesla T4": "sm75",
    "NVIDIA A100": "sm80",
    "NVIDIA H100": "sm90",
    "NVIDIA H200": "sm90",
}


def target_of(array) -> str:
    """The target of the chip an array lies on; "cpu" for abstract arrays and tracers, which lie nowhere."""
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return "cpu"
    kind = next(iter(array.devices())).device_kind
    return next((target for name, target in KINDS.items() if kind.startswith(name)), "cpu")


class PackedBody(NamedTuple):
    """The stored fields of one run of layers. W = K*D lanes, S slots; codes of b bits have S*b/32 rows of words, one
    array per plane set (`kvqjax.layout.split_bits`). Scales and minima are numbers of the spec's `scales`, 16-bit ones
    as the integers that hold their bits."""

    key_codes: tuple[UInt[Array, "L B _ W"], ...]
    key_scale: Shaped[Array, "L B S/key_group W"]
    key_low: Shaped[Array, "L B S/key_group W"]
    value_codes: tuple[UInt[Array, "L B _ W"], ...]
    value_scale: Shaped[Array, "L B W/value_group S"]
    value_low: Shaped[Array, "L B W/value_group S"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedSpec:
    """Everything static about a call. `block` tokens are read at a time: a multiple of the layout's block, not
    necessarily a divisor of the slots. `target` names the chip the program is compiled for."""

    key_bits: int
    value_bits: int
    key_group: int
    value_group: int
    kv_heads: int
    head_dim: int
    scales: str = "bfloat16"
    block: int = 512
    target: str = "cpu"

    def __post_init__(self):
        if self.target not in TARGETS:
            raise ValueError(f"target={self.target!r}; known: {', '.join(TARGETS)}")
        unit = self.unit
        if self.block < 1 or self.block % unit:
            raise ValueError(f"block={self.block}; blocks of this layout are multiples of {unit} tokens")
        if self.width % self.value_group:
            raise ValueError(f"value_group={self.value_group} does not divide the width {self.width}")

    @property
    def width(self) -> int:
        """Lanes of a row: K*D."""
        return self.kv_heads * self.head_dim

    @property
    def unit(self) -> int:
        """Tokens after which every array starts a fresh block."""
        parts = (*split_bits(self.key_bits), *split_bits(self.value_bits))
        return math.lcm(*(1024 // part for part in parts), self.key_group)

    @property
    def value_slice(self) -> int:
        """Channels that share both a KV head and a value scale: the width of one product with the values."""
        return math.gcd(self.head_dim, self.value_group)


def _wanted(body: PackedBody, spec: PackedSpec):
    """(name, array, wanted trailing shape) of every array, from the slots of the value scales."""
    slots = body.value_scale.shape[-1]
    for name, codes, bits in (("key", body.key_codes, spec.key_bits), ("value", body.value_codes, spec.value_bits)):
        parts = split_bits(bits)
        if len(codes) != len(parts):
            raise ValueError(f"{name}_codes: got {len(codes)} arrays, want {len(parts)} for {bits} bits")
        for words, part in zip(codes, parts, strict=True):
            yield f"{name}_codes", words, (slots * part // 32, spec.width)
    for name in ("key_scale", "key_low"):
        yield name, getattr(body, name), (slots // spec.key_group, spec.width)
    yield "value_low", body.value_low, (spec.width // spec.value_group, slots)
    yield "value_scale", body.value_scale, (spec.width // spec.value_group, slots)


def check(q: jax.Array, body: PackedBody, spec: PackedSpec) -> None:
    """Raise ValueError at trace time unless the query and every array have the shapes `spec` says."""
    heads, dim = q.shape[2:]
    if dim != spec.head_dim or heads % spec.kv_heads:
        raise ValueError(f"q: got {q.shape}, want [B, T, a multiple of {spec.kv_heads}, {spec.head_dim}]")
    if body.value_scale.shape[-1] % spec.unit:
        raise ValueError(f"a body of {body.value_scale.shape[-1]} slots; want a multiple of {spec.unit}")
    lead = body.value_scale.shape[:1] + q.shape[:1]
    for name, array, shape in _wanted(body, spec):
        if array.shape != lead + shape:
            raise ValueError(f"{name}: got {array.shape}, want {lead + shape}")
