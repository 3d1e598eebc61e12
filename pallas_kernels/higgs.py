"""The arguments of a kernel on HIGGS bodies (arXiv 2411.17525, section 3).

A group of h channels of a token is x = s H^T y / h. H is the Hadamard matrix of order h in
Sylvester's natural order, and s the scale of the token and group. y are h numbers: each code names
a grid point, which is two of them in a row. Groups hold whole heads. Keys are stored before
RoPE."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt

from kvqjax.pallas_kernels.packed import Rope


class HiggsStored(NamedTuple):
    """The stored fields of one run of layers. A token has V = K*D/2 codes in planes
    (`kvqjax.ops.packing`), one array per plane set. Each group has a scale, stored as the integer
    that holds its bits."""

    key_codes: tuple[UInt[Array, "L B _ V"], ...]
    key_scale: UInt[Array, "L B groups S"]
    value_codes: tuple[UInt[Array, "L B _ V"], ...]
    value_scale: UInt[Array, "L B groups S"]

    @property
    def slots(self) -> int:
        return self.value_scale.shape[-1]


class HiggsBody(NamedTuple):
    """The stored fields, the grids of points of two numbers, and `positions` as in `PackedBody`."""

    stored: HiggsStored
    key_grid: Float[Array, "n 2"]
    value_grid: Float[Array, "m 2"]
    positions: Int[Array, " stretches"]

    @property
    def slots(self) -> int:
        return self.stored.slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiggsSpec:
    """Everything static about a call.

    Attributes:
        key_bits: Bits of a key's code, for two channels.
        value_bits: Bits of a value's code, for two channels.
        group: Channels that share a scale, h.
        kv_heads: KV heads, K.
        head_dim: Channels of a head, D.
        rope: How keys are rotated.
        scales: Dtype of the scales.
        target: The chip, as in `PackedSpec`."""

    key_bits: int
    value_bits: int
    group: int
    kv_heads: int
    head_dim: int
    rope: Rope
    scales: str = "bfloat16"
    target: str = "cpu"

    @property
    def width(self) -> int:
        """Channels of a token's keys: K*D."""
        return self.kv_heads * self.head_dim

    @property
    def groups(self) -> int:
        """Scales of a token's keys, or values."""
        return self.width // self.group
