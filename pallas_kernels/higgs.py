"""What a kernel on HIGGS bodies is given (arXiv 2411.17525, section 3; AQUA-KV, arXiv 2501.19392).

A group of h channels of a token is x = s H^T y / h. H is the Hadamard matrix of order h in Sylvester's natural order, y
the grid points that the codes of consecutive pairs of entries index, s the scale of the token and group. Groups hold
whole heads; keys are stored before RoPE."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt

from kvqjax.pallas_kernels.packed import Rope

__all__ = ["HiggsBody", "HiggsSpec", "HiggsStored"]


class HiggsStored(NamedTuple):
    """The stored fields of one run of layers: V = K*D/2 codes of a token, in planes (`kvqjax.ops.packing`), one array
    per plane set; a scale per group, as the integer that holds its bits."""

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
    """`key_bits` and `value_bits` are per code, that is per pair of channels. `group` channels share a scale of the
    dtype `scales`. `target` names the chip, as in `PackedSpec`."""

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
