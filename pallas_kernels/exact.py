"""What a kernel on exact keys and values is given: vectors as they are cached, all KV heads side by side."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, UInt

__all__ = ["ExactBody", "ExactSpec"]


class ExactBody(NamedTuple):
    """The stored fields of one run of layers: vectors of W = K*D channels in bfloat16, as the integers that hold their
    bits."""

    keys: UInt[Array, "L B S W"]
    values: UInt[Array, "L B S W"]

    @property
    def slots(self) -> int:
        return self.keys.shape[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactSpec:
    """Keys are stored after RoPE. `dtype` is that of what is stored, "compute" until a cache's is known. `target` names
    the chip, as in `PackedSpec`."""

    kv_heads: int
    head_dim: int
    dtype: str = "compute"
    target: str = "cpu"
    rope: None = None

    @property
    def width(self) -> int:
        """Channels of a token's keys: K*D."""
        return self.kv_heads * self.head_dim
