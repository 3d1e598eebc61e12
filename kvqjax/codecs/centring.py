"""Keys without their mean: any key codec around a calibrated constant per channel.

    encode(x) = inner(x - m)        decode = inner^-1 + m

Qwen2's key bias gives some channels offsets of dozens of times their spread. What a codec shares between such channels
(a scale per token, a rotation) is then spent on a constant. Before RoPE the mean is that of the keys themselves, so all
of a constant bias is removed. After RoPE it is the mean of the rotated keys: what does not turn within the calibration
text (the slowest pairs, where Qwen2 has its bias) is removed, while the mean of pairs that do turn is near zero and
stays with the codec.

The bias itself is known from the model's weights, and after RoPE from a token's position too, so that it needs no
calibration: centre="auto" caches keys without it where a model has one (kvqjax.methods.keys_values), and leaves the
codec as it is.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvqjax._errors import UserError
from kvqjax.codecs.base import Codec, CodecSpec, Fit, for_heads
from kvqjax.ops.finite import wide

__all__ = ["CENTRES", "Centred", "centred"]

CENTRES = ("auto", "none", "mean")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Centred:
    """`inner` on what is left of a vector when the constant "mean" [W] is taken off; costs no stored bit."""

    inner: CodecSpec

    def for_heads(self, heads: int, head_dim: int) -> "Centred":
        return Centred(inner=for_heads(self.inner, heads, head_dim))

    def build(self, width: int) -> Codec:
        inner = self.inner.build(width)

        def mean(constants, ndim: int) -> Float[Array, "*lead W"]:
            return constants["mean"].astype(jnp.float32).reshape((1,) * (ndim - 1) + (width,))

        def encode(constants, x: Float[Array, "u W"]):
            return inner.encode(constants, wide(x) - mean(constants, x.ndim))

        def decode(constants, tile):
            x = inner.decode(constants, tile).astype(jnp.float32)
            return x + mean(constants, x.ndim)

        fit = inner.fit if inner.needs else Fit("kvqjax.calibrate.centre")
        return inner._replace(encode=encode, decode=decode, needs=inner.needs | {"mean": (width,)}, fit=fit)


def centred(spec: CodecSpec, centre: str) -> CodecSpec:
    """Wrap `spec` in `Centred` for centre="mean"; give it back as it is for "auto" and "none"."""
    if centre not in CENTRES:
        raise UserError(f"centre={centre!r}; known: {', '.join(CENTRES)}")
    return Centred(inner=spec) if centre == "mean" else spec
