"""Any codec around tokens whose largest numbers are clipped (OSCAR, arXiv 2605.17757, section 3.3).

The bound is an order statistic of the sizes in a part of a token's channels (one KV head): the (ratio D)-th of D. It
costs no stored bit.
"""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvqjax._arguments import check_fields
from kvqjax._errors import UserError
from kvqjax.codecs.base import Codec, CodecSpec, for_heads
from kvqjax.ops.finite import wide

__all__ = ["Clipped", "thresholds"]


def thresholds(parts: Float[Array, "u n D"], ratio: float) -> Float[Array, "u n"]:
    """Find for each part of D numbers the size that the share `ratio` of them does not exceed."""
    place = min(math.floor(ratio * parts.shape[-1]), parts.shape[-1] - 1)
    return jnp.sort(jnp.abs(parts), axis=-1)[..., place]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clipped:
    """`inner` on tokens clipped in each of `parts` equal parts of their channels (0: in each KV head); `ratio` 1 clips
    nothing."""

    inner: CodecSpec
    parts: int
    ratio: float

    def __post_init__(self):
        check_fields(self)
        if not 0.5 <= self.ratio <= 1:
            raise UserError(f"clip={self.ratio}; wanted the share that is not clipped, from 0.5 to 1")

    def for_heads(self, heads: int, head_dim: int) -> "Clipped":
        inner = for_heads(self.inner, heads, head_dim)
        return dataclasses.replace(self, inner=inner, parts=self.parts or heads)

    def build(self, width: int) -> Codec:
        inner = self.inner.build(width)

        def encode(constants, x: Float[Array, "u W"]):
            parts = wide(x).reshape(x.shape[0], self.parts, -1)
            bound = thresholds(parts, self.ratio)[..., None]
            return inner.encode(constants, jnp.clip(parts, -bound, bound).reshape(x.shape))

        return inner._replace(encode=encode)
