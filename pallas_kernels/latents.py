"""The arguments of a kernel on packed latents (XQuant, arXiv 2508.10395, section 3.3).

A body holds two latents of every token, made from the layer's input X: x = X U_k with a scale per
channel and group of tokens, and y = X U_v with a scale per token. Keys are made from x by the
kernel: k = RoPE(norm(x F + b)), F [R, K*D]. Values are not made. A kernel returns the means of y,
which all heads share, and the caller multiplies the means by a matrix
(kvqjax.methods.layer_cache.SharedValues)."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int

from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec, Rope


class LatentBody(NamedTuple):
    """The stored latents, and what keys are made with.

    Attributes:
        stored: Latents of keys and of values.
        positions: As in `PackedBody`.
        up: F.
        bias: b; None where the model has none.
        gain: The weights of QK-norm; None where the model has none."""

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
    """Everything static about a call.

    Attributes:
        stored: The latents, described as keys and values of one head of R channels.
        kv_heads: The model's KV heads, K.
        head_dim: Channels of a head, D.
        rope: How keys are rotated.
        epsilon: That of the model's QK-norm; 0 without one.
        target: The chip, as in `PackedSpec`."""

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
