"""Vectors of one length: any codec around tokens that were divided by their norm (OScaR, arXiv 2605.19660, section 3).

    n_t = |x_t|        encode(x) = inner(x / n)        decode = n inner^-1

Groups of tokens that share a scale then hold tokens of one size. The norm is divided out as stored, so that rounding
it costs nothing; a token of zeros has norm 0 and decodes to zeros.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvqjax.codecs.base import Codec, CodecSpec
from kvqjax.codecs.kernel_form import Packed, packed_form
from kvqjax.model.config import KVShape
from kvqjax.ops.finite import saturated, wide
from kvqjax.ops.layout import Field
from kvqjax.pallas_kernels.packed import PackedBody, PackedSpec

__all__ = ["Scaled", "over_parts", "times_parts", "with_factors"]


def over_parts(x: Float[Array, "u W"], factor: Float[Array, "u n"]) -> Float[Array, "u W"]:
    """Divide each of n parts of a token's channels by its own factor, or by 1 where that is 0."""
    safe = jnp.where(factor > 0, factor, 1.0)
    return (x.reshape(*factor.shape, -1) / safe[..., None]).reshape(x.shape)


def times_parts(x: Float[Array, "*B u W"], factor: Float[Array, "*B n u"]) -> Float[Array, "*B u W"]:
    """Multiply each of n parts of a token's channels by its own factor, which is stored with tokens on the last
    axis."""
    factor = jnp.swapaxes(factor, -1, -2).astype(jnp.float32)
    return (x.reshape(*factor.shape, -1) * factor[..., None]).reshape(x.shape)


def with_factors(plain: Packed | None, dtype: str, parts: int, values: bool = False) -> Packed | None:
    """Add factors stored in `dtype` to the kernel form of uniform keys after RoPE: `parts` per token of the keys and,
    with `values`, those of values. None for other forms: no kernel reads factors of signposts or grids, or of keys that
    it rotates."""
    if plain is None or not isinstance(plain.spec, PackedSpec):
        return None
    if plain.spec.datatype != "uniform" or plain.spec.rope is not None or plain.spec.scales != dtype:
        return None

    def body(weights, constants, stored, positions) -> PackedBody:
        read = plain.body(weights, constants, stored, positions)._replace(key_factor=stored["k"]["factor"][0])
        return read._replace(value_factor=stored["v"]["factor"][0]) if values else read

    return Packed(dataclasses.replace(plain.spec, key_factors=parts, value_factors=values), body)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled:
    """`inner` on tokens over their norm, which is stored in `dtype`: one of each of `parts` equal parts of the
    channels."""

    inner: CodecSpec
    parts: int = 1
    dtype: str = "bfloat16"

    def build(self, width: int) -> Codec:
        inner = self.inner.build(width)
        field = Field(kind="token", width=self.parts, role="scales", dtype=self.dtype)

        def encode(constants, x: Float[Array, "u W"]):
            x = wide(x)
            parts = x.reshape(x.shape[0], self.parts, -1)
            norm = saturated(jnp.sqrt((parts * parts).sum(-1)), self.dtype)
            return inner.encode(constants, over_parts(x, norm.astype(jnp.float32))) | {"factor": norm.T}

        def decode(constants, tile):
            rest = inner.decode(constants, {name: a for name, a in tile.items() if name != "factor"})
            return times_parts(rest, tile["factor"])

        return inner._replace(fields={**inner.fields, "factor": field}, encode=encode, decode=decode)

    def packed(self, value: CodecSpec, rope: str, shape: KVShape) -> Packed | None:
        """Name the kernel for keys of `inner` beside these values, with the norms as factors of tokens (OScaR)."""
        return with_factors(packed_form(self.inner, value, rope, shape), self.dtype, self.parts)
