"""Any codec around tokens that were divided by their norm (OScaR, arXiv 2605.19660, section 3).

    n_t = |x_t|        encode: inner.encode(x_t / n_t), n_t        decode: n_t inner.decode(..)

Tokens that share a scale in the inner codec then have the same size, and none of them is coded
coarsely because of a larger one. Vectors are divided by the norm as it is stored, so that rounding
the norm adds no error. A token of zeros has norm 0 and decodes to zeros.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvqjax.codecs.base import Codec, CodecSpec, for_heads
from kvqjax.ops.finite import saturated, wide
from kvqjax.ops.layout import Field


def over_parts(x: Float[Array, "u W"], factor: Float[Array, "u n"]) -> Float[Array, "u W"]:
    """Divide each of n parts of a token's channels by its own factor, or by 1 where that is 0."""
    safe = jnp.where(factor > 0, factor, 1.0)
    return (x.reshape(*factor.shape, -1) / safe[..., None]).reshape(x.shape)


def times_parts(
    x: Float[Array, "*B u W"], factor: Float[Array, "*B n u"]
) -> Float[Array, "*B u W"]:
    """Multiply each of n parts of a token's channels by its own factor, which is stored with tokens
    on the last axis."""
    factor = jnp.swapaxes(factor, -1, -2).astype(jnp.float32)
    return (x.reshape(*factor.shape, -1) * factor[..., None]).reshape(x.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled:
    """The codec `inner` of tokens over their norms.

    Attributes:
        inner: the spec of that codec.
        parts: equal parts of the channels, each of which has a norm of its own; 0: the KV heads.
        dtype: of the stored norms.
    """

    inner: CodecSpec
    parts: int = 1
    dtype: str = "bfloat16"

    def for_heads(self, heads: int, head_dim: int) -> "Scaled":
        inner = for_heads(self.inner, heads, head_dim)
        return dataclasses.replace(self, inner=inner, parts=self.parts or heads)

    def build(self, width: int) -> Codec:
        inner = self.inner.build(width)
        field = Field(kind="token", width=self.parts, role="scales", dtype=self.dtype)

        def encode(constants, x: Float[Array, "u W"]):
            x = wide(x)
            parts = x.reshape(x.shape[0], self.parts, -1)
            norm = saturated(jnp.sqrt((parts * parts).sum(-1)), self.dtype)  # [u, parts]
            return inner.encode(constants, over_parts(x, norm.astype(jnp.float32))) | {
                "factor": norm.T
            }

        def decode(constants, tile):
            numbers = inner.decode(
                constants, {name: a for name, a in tile.items() if name != "factor"}
            )
            return times_parts(numbers, tile["factor"])

        return inner._replace(
            fields={**inner.fields, "factor": field}, encode=encode, decode=decode
        )
