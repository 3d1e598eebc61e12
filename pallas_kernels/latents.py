"""What a kernel on packed latents is given (XQuant, arXiv 2508.10395, section 3.3).

A body holds two latents of every token: x = X U_k with a scale per channel of a group of tokens, and y = X U_v with a
scale per token. Keys are rematerialised from x: k = RoPE(norm(x F + b)), F [R, K*D]. Values are not: a kernel returns
the means of y, which all heads share, and the caller multiplies them (kvqjax.methods.layer_cache.SharedValues)."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int

from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec, Rope

__all__ = ["LatentBody", "LatentSpec"]


class LatentBody(NamedTuple):
    """The stored latents of keys and of values, and what keys are made with: `up` is F, `bias` b, `gain` that of
    QK-norm (None where the model has none). `positions` as in `PackedBody`."""

    stored: PackedBody
    positions: Int[Array, " n"]
    up: Float[Array, "R KD"]
    bias: Float[Array, " KD"] | None = None
    gain: Float[Array, " D"] | None = None

    @property
    def slots(self) -> int:
        return self.stored.slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """`stored` describes the latents as keys and values of one head of R channels. `kv_heads` and `head_dim` are the
    model's; `epsilon` is that of its QK-norm, 0 without one. `target` names the chip, as in `PackedSpec`."""

    stored: PackedSpec
    kv_heads: int
    head_dim: int
    rope: Rope
    epsilon: float = 0.0
    target: str = "cpu"

    @property
    def key_bits(self) -> int:
        return self.stored.key_bits

    @property
    def rank(self) -> int:
        return self.stored.width

    @property
    def width(self) -> int:
        """Channels of the keys: K*D."""
        return self.kv_heads * self.head_dim
