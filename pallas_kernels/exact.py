"""What a kernel on exact keys and values is given: vectors as they are cached, all KV heads side by side."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt

__all__ = ["ExactBody", "ExactSpec", "Recent", "room"]

ROOM = 16  # tokens: whole registers of bfloat16


def room(tokens: int) -> int:
    """Count the tokens for which `Recent.seen` has room where a part has so many."""
    return -(-tokens // ROOM) * ROOM


class ExactBody(NamedTuple):
    """The stored fields of one run of layers: vectors of W = K*D channels in bfloat16, as the integers that hold their
    bits."""

    keys: UInt[Array, "L B S W"]
    values: UInt[Array, "L B S W"]

    @property
    def slots(self) -> int:
        return self.keys.shape[2]


class Recent(NamedTuple):
    """Keys and values beside a body, in bfloat16: what all layers hold, part by part (sinks, window), and the layer's
    new tokens. `seen` is 1 where a query sees a token; the parts follow each other in it, each with `room` for its
    tokens."""

    held: tuple[tuple[Float[Array, "L B n W"], Float[Array, "L B n W"]], ...]
    new: tuple[Float[Array, "B T W"], Float[Array, "B T W"]]
    seen: Int[Array, "B T N"]


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
