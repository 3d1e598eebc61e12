"""Keys without their mean: any key codec around a number per channel, calibrated or of a block of tokens.

    encode(x) = inner(x - m)        decode = inner^-1 + m

Before RoPE most of a key is the same in every token. In SmolLM2-135M the mean over tokens has 80 % of the keys' energy
(geometric mean over layers; of the values' 16 %). A codec whose error is a share of a vector's energy, such as a
rotation with a grid, spends most of its bits on that constant. `BlockCentred` takes the mean of each block of tokens
off and stores it, 16 bits for `block` numbers: what is left of the energy is 20 % in blocks of 128 (`python -m
benchmarks.spectra`). It needs no calibration. After RoPE the pairs that turn have no mean to speak of.

`Centred` takes off a constant of the model. Qwen2's key bias gives some channels offsets of dozens of times their
spread. What a codec shares between such channels (a scale per token, a rotation) is then spent on a constant. Before
RoPE the mean is that of the keys themselves, so all of a constant bias is removed. After RoPE it is the mean of the
rotated keys: what does not turn within the calibration text (the slowest pairs, where Qwen2 has its bias) is removed,
while the mean of pairs that do turn is near zero and stays with the codec.

The bias itself is known from the model's weights, and after RoPE from a token's position too, so that it needs no
calibration: centre="auto" caches keys without it where a model has one (kvqjax.methods.keys_values), and leaves the
codec as it is.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvqjax._errors import UserError
from kvqjax.codecs.base import BetweenHeads, Codec, CodecSpec, Fit, for_heads
from kvqjax.ops.finite import saturated, wide
from kvqjax.ops.layout import Field

__all__ = ["CENTRES", "BlockCentred", "Centred", "centred"]

CENTRES = ("auto", "none", "mean")
# Tokens with one mean. Blocks of 32, 128 and 1020 leave 18.3, 19.6 and 20.2 % of the energy of SmolLM2's keys
# (`python -m benchmarks.spectra`), for 1/2, 1/8 and 1/64 bit.
BLOCK = 128


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockCentred:
    """`inner` on what is left of a vector when the mean of its block of tokens is taken off, which is stored in
    bfloat16: 16 / `block` bits a number."""

    inner: CodecSpec
    block: int = BLOCK

    def for_heads(self, heads: int, head_dim: int) -> "BlockCentred":
        return dataclasses.replace(self, inner=for_heads(self.inner, heads, head_dim))

    def build(self, width: int) -> Codec:
        inner = self.inner.build(width)
        if self.block % inner.unit:
            raise UserError(f"a block of {self.block} tokens with one mean does not divide into units of {inner.unit}")
        field = Field(kind="group", width=width, group=self.block, role="zeros", dtype="bfloat16")

        def encode(constants, x: Float[Array, "u W"]):
            x = wide(x)
            mean = saturated(self._blocks(x).mean(1), field.dtype)
            # The mean as it is stored comes off, so that the codes take in what rounding it has left.
            deviations = self._blocks(x) - mean[:, None].astype(jnp.float32)
            return inner.encode(constants, deviations.reshape(x.shape)) | {"mean": mean}

        def decode(constants, tile):
            deviations = inner.decode(constants, {name: a for name, a in tile.items() if name != "mean"})
            return self._with_mean(deviations.astype(jnp.float32), tile["mean"].astype(jnp.float32))

        # Tokens leave the window a block at a time, whatever `inner` would be content with.
        return inner._replace(unit=self.block, fields=inner.fields | {"mean": field}, encode=encode, decode=decode)

    def mixed_form(self, heads: int, head_dim: int) -> tuple[np.ndarray, Callable] | None:
        """Describe vectors before heads are mixed (`BetweenHeads`)."""
        form = self.inner.mixed_form(heads, head_dim) if isinstance(self.inner, BetweenHeads) else None
        if form is None:
            return None
        mix, read = form
        # `read` gives the deviations before the matrix, so that the mean must be taken there too: once a block.
        back = np.linalg.inv(mix)

        def with_mean(tile):
            mean = tile["mean"].astype(jnp.float32)
            by_head = mean.reshape(*mean.shape[:-1], heads, head_dim)
            mean = jnp.einsum("jk,...kd->...jd", jnp.asarray(back, jnp.float32), by_head, precision="highest")
            return self._with_mean(read(tile), mean.reshape(tile["mean"].shape))

        return mix, with_mean

    def _blocks(self, x: Float[Array, "*B u W"]) -> Float[Array, "*B n b W"]:
        """Split the tokens' axis alone, whatever axes stand before it."""
        return x.reshape(*x.shape[:-2], -1, self.block, x.shape[-1])

    def _with_mean(self, deviations: Float[Array, "*B u W"], mean: Float[Array, "*B n W"]) -> Float[Array, "*B u W"]:
        """Add every block's mean to its tokens."""
        return (self._blocks(deviations) + mean[..., None, :]).reshape(deviations.shape)


def centred(spec: CodecSpec, centre: str) -> CodecSpec:
    """Wrap `spec` in `Centred` for centre="mean"; give it back as it is for "auto" and "none"."""
    if centre not in CENTRES:
        raise UserError(f"centre={centre!r}; known: {', '.join(CENTRES)}")
    return Centred(inner=spec) if centre == "mean" else spec
