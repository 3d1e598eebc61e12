"""Key codecs that store the difference between a key and a mean m, which is one number per channel.

    encode(x) = inner.encode(x - m)        decode(tile) = inner.decode(tile) + m

`BlockCentred`: m is the mean of a block of tokens, and is stored with the block. It needs no
calibration. Before RoPE most of a key is the same in every token. In SmolLM2-135M the mean over
tokens has 80 % of the keys' energy (geometric mean over layers), and 16 % of the values'. A codec
whose error is a share of a vector's energy, such as a rotation with a grid, spends most of its bits
on that constant. The means of blocks of 128 tokens leave 20 % of the energy (measured on
2026-11-27), and take 16 bits for 128 numbers. After RoPE the mean of the pairs of channels that
turn is near zero, so that little is gained.

`Centred`: m is a calibrated constant of the layer, and takes no stored bit. Qwen2's key bias gives
some channels offsets of dozens of times their spread. What a codec shares between channels (a scale
per token, a rotation) is then spent on the offsets. Before RoPE m is the mean of the keys
themselves, so that subtracting it removes all of a constant bias. After RoPE m is the mean of the
rotated keys. It has the bias of the slowest pairs of channels, which hardly turn within the
calibration text; Qwen2 has its bias there. The mean of faster pairs is near zero, so that their
bias stays in what the codec encodes.

A third way needs no codec of this file. The bias is known from the model's weights, and after RoPE
from a token's position too. centre="auto" caches keys without the bias where a model has one
(kvqjax.methods.keys_values), and leaves the codec as it is.
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

# What is subtracted from keys: the model's bias, nothing, a calibrated mean.
CENTRES = (
    "auto",
    "none",
    "mean",
)
# Tokens that share a mean. Blocks of 32, 128 and 1020 leave 18.3, 19.6 and 20.2 % of the energy of
# SmolLM2's keys (measured on 2026-11-27). Their means take 1/2, 1/8 and 1/64 bit per number.
BLOCK = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Centred:
    """The codec `inner` of vectors less the calibrated constant "mean" [W]."""

    inner: CodecSpec

    def for_heads(self, heads: int, head_dim: int) -> "Centred":
        return Centred(inner=for_heads(self.inner, heads, head_dim))

    def build(self, width: int) -> Codec:
        inner = self.inner.build(width)

        def mean(constants, ndim: int) -> Float[Array, "*lead W"]:
            # Arrays of different ranks may be refused (jax_numpy_rank_promotion), so that axes of 1
            # are written out.
            return constants["mean"].astype(jnp.float32).reshape((1,) * (ndim - 1) + (width,))

        def encode(constants, x: Float[Array, "u W"]):
            return inner.encode(constants, wide(x) - mean(constants, x.ndim))

        def decode(constants, tile):
            x = inner.decode(constants, tile).astype(jnp.float32)
            return x + mean(constants, x.ndim)

        # Where `inner` needs constants of its own, what calibrates them must find the mean as well.
        fit = inner.fit if inner.needs else Fit("kvqjax.calibrate.centre")
        return inner._replace(
            encode=encode, decode=decode, needs=inner.needs | {"mean": (width,)}, fit=fit
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockCentred:
    """The codec `inner` of vectors less the mean of their block of `block` tokens. The mean is
    stored in bfloat16, which takes 16 / `block` bits per number."""

    inner: CodecSpec
    block: int = BLOCK

    def for_heads(self, heads: int, head_dim: int) -> "BlockCentred":
        return dataclasses.replace(self, inner=for_heads(self.inner, heads, head_dim))

    def build(self, width: int) -> Codec:
        inner = self.inner.build(width)
        if self.block % inner.unit:
            raise UserError(
                f"a block of {self.block} tokens with one mean does not divide into units of {inner.unit}"
            )
        field = Field(kind="group", width=width, group=self.block, role="zeros", dtype="bfloat16")

        def encode(constants, x: Float[Array, "u W"]):
            x = wide(x)
            mean = saturated(self._blocks(x).mean(1), field.dtype)
            # The mean is subtracted as it is stored, in bfloat16. So its rounding error is in the
            # deviations, which `inner` encodes, and not in what decoding adds.
            deviations = self._blocks(x) - mean[:, None].astype(jnp.float32)
            return inner.encode(constants, deviations.reshape(x.shape)) | {"mean": mean}

        def decode(constants, tile):
            deviations = inner.decode(
                constants, {name: a for name, a in tile.items() if name != "mean"}
            )
            return self._with_mean(deviations.astype(jnp.float32), tile["mean"].astype(jnp.float32))

        # A mean takes all tokens of a block, so that tokens leave the window a block at a time,
        # although `inner` may encode fewer at once.
        return inner._replace(
            unit=self.block, fields=inner.fields | {"mean": field}, encode=encode, decode=decode
        )

    def mixed_form(self, heads: int, head_dim: int) -> tuple[np.ndarray, Callable] | None:
        """Describe vectors before heads are mixed, as `BetweenHeads` of kvqjax.codecs.base says.

        Args:
            heads: Number of KV heads.
            head_dim: Channels of a head.

        Returns:
            (mix [heads, heads], read). None where `inner` has no such form."""
        form = (
            self.inner.mixed_form(heads, head_dim) if isinstance(self.inner, BetweenHeads) else None
        )
        if form is None:
            return None
        mix, read = form
        # A key is mix (d + mix^-1 m), d being the deviations that `read` gives, before the matrix.
        # So the inverse is applied to the mean, once a block, and queries meet the sum.
        inverse = np.linalg.inv(mix)

        def with_mean(tile):
            mean = tile["mean"].astype(jnp.float32)
            by_head = mean.reshape(*mean.shape[:-1], heads, head_dim)
            mean = jnp.einsum(
                "jk,...kd->...jd", jnp.asarray(inverse, jnp.float32), by_head, precision="highest"
            )
            return self._with_mean(read(tile), mean.reshape(tile["mean"].shape))

        return mix, with_mean

    def _blocks(self, x: Float[Array, "*B u W"]) -> Float[Array, "*B n b W"]:
        """Split the axis of u tokens into n blocks of b tokens. The axes before it stay."""
        return x.reshape(*x.shape[:-2], -1, self.block, x.shape[-1])

    def _with_mean(
        self, deviations: Float[Array, "*B u W"], mean: Float[Array, "*B n W"]
    ) -> Float[Array, "*B u W"]:
        """Add the mean of each of n blocks to its tokens."""
        return (self._blocks(deviations) + mean[..., None, :]).reshape(deviations.shape)


def centred(spec: CodecSpec, centre: str) -> CodecSpec:
    """Wrap a key codec as `centre` says.

    Args:
        spec: The spec of the codec.
        centre: What is subtracted from keys, one of `CENTRES`.

    Returns:
        `Centred` around `spec` for "mean". `spec` itself for "none", and for "auto", which is not
        the codec's work.

    Raises:
        UserError: Another `centre`."""
    if centre not in CENTRES:
        raise UserError(f"centre={centre!r}; known: {', '.join(CENTRES)}")
    return Centred(inner=spec) if centre == "mean" else spec
