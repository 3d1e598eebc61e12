"""The arguments of a kernel on exact keys and values: vectors as they are cached, all KV heads side
by side."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt

ROOM = 16  # tokens: whole registers of bfloat16


def room(tokens: int) -> int:
    """Count the tokens for which `Recent.seen` has room, for a part of `tokens` tokens."""
    return -(-tokens // ROOM) * ROOM


class ExactBody(NamedTuple):
    """The stored fields of one run of layers: vectors of W = K*D channels in bfloat16, as the
    integers that hold their bits."""

    keys: UInt[Array, "L B S W"]
    values: UInt[Array, "L B S W"]

    @property
    def slots(self) -> int:
        return self.keys.shape[2]


class Recent(NamedTuple):
    """Keys and values of tokens beside a body, in bfloat16.

    Attributes:
        held: (keys, values) of all layers, part by part: sinks, window.
        new: (keys, values) of the layer's new tokens.
        seen: 1 where a query sees a token, else 0. The parts `held` and then `new` follow each
            other along the last axis, each with `room` for its tokens."""

    held: tuple[tuple[Float[Array, "L B n W"], Float[Array, "L B n W"]], ...]
    new: tuple[Float[Array, "B T W"], Float[Array, "B T W"]]
    seen: Int[Array, "B T N"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactSpec:
    """Everything static about a call. Keys are stored after RoPE.

    Attributes:
        kv_heads: KV heads, K.
        head_dim: Channels of a head, D.
        dtype: dtype of the stored vectors; "compute" until the cache's is known.
        target: The chip, as in `PackedSpec`.
        rope: None, as in a `PackedSpec` of keys after RoPE."""

    kv_heads: int
    head_dim: int
    dtype: str = "compute"
    target: str = "cpu"
    rope: None = None

    @property
    def width(self) -> int:
        """Channels of a token's keys: K*D."""
        return self.kv_heads * self.head_dim
