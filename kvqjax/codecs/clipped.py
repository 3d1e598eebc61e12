"""Any codec around tokens whose largest numbers are clipped (OSCAR, arXiv 2605.17757, section 3.3).

Each part of a token's channels, usually one KV head, has a bound of its own: the size that a share
`ratio` of its D numbers does not exceed. The bound is not stored, because decoding does not need
it.
"""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvqjax._arguments import check_fields
from kvqjax._errors import UserError
from kvqjax.codecs.base import Codec, CodecSpec, for_heads
from kvqjax.ops.finite import wide


def thresholds(parts: Float[Array, "u n D"], ratio: float) -> Float[Array, "u n"]:
    """Find for each part of D numbers the size that the share `ratio` of them does not exceed."""
    dim = parts.shape[-1]
    place = min(math.floor(ratio * dim), dim - 1)  # in the order of sizes
    return jnp.sort(jnp.abs(parts), axis=-1)[..., place]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clipped:
    """The codec `inner` of tokens whose largest numbers are clipped.

    Attributes:
        inner: the spec of that codec.
        parts: equal parts of the channels, each clipped by a bound of its own; 0: the KV heads.
        ratio: the share of numbers that is not clipped; 1 clips nothing.
    """

    inner: CodecSpec
    parts: int
    ratio: float

    def __post_init__(self):
        check_fields(self)
        if not 0.5 <= self.ratio <= 1:
            raise UserError(
                f"clip={self.ratio}; wanted the share that is not clipped, from 0.5 to 1"
            )

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
