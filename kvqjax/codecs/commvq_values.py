"""CommVQ values: a learned encoder to additive binary codes, a linear decoder (arXiv 2506.18879,
section 4.1).

One code serves the whole token, all KV heads. v is the token's value, s the scale of its channels,
E the codebook and f the encoder, a small network:

    u = v / (s + eps)      p = |u|      z = f(u / (p + eps))        f = Linear(GELU(Linear(LayerNorm(.))))
    the largest of each 4 logits of z chooses 2 bits: 0 -> 10, 1 -> 01, 2 -> 11, 3 -> 00
    v_hat = (p + eps) * (s + eps) * w / (|w| + eps),    w = bits @ E

The codebook gives a direction only, w / |w|. Decoding is one product all the same, since two
factors are computed in advance. `codebook` is stored as E (s + eps). A token stores gain = (p +
eps) / (|w| + eps). Then v_hat = gain * (bits @ codebook). Training draws the choices from a Gumbel
softmax. Here a choice is the argmax, so that encoding is deterministic.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from kvqjax._arguments import check_fields, check_integer
from kvqjax._errors import UserError
from kvqjax.codecs.base import Codec, Fit
from kvqjax.ops.finite import wide
from kvqjax.ops.layout import Field

EPS = 1e-6  # keeps divisions by scales and norms of 0 finite
CHOICE_BITS = ((1, 0), (0, 1), (1, 1), (0, 0))  # the two bits of each of the 4 choices
HIDDEN_LIMIT = 4096  # the paper's encoders are never wider


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommVQValues:
    """CommVQ's codec for values.

    Attributes:
        bits: stored per channel.
        hidden: units of the encoder's hidden layer; 0: one for each logit, but 4096 at most.
        dtype: of the gain.
    """

    bits: int
    hidden: int = 0
    dtype: str = "bfloat16"

    def __post_init__(self):
        check_fields(self)
        if self.bits not in (1, 2, 3, 4):
            raise UserError(f"bits={self.bits}; value codes have 1 to 4 bits per channel")
        check_integer("hidden", self.hidden, 0)
        if self.dtype not in ("bfloat16", "float32"):
            raise UserError(f"dtype={self.dtype!r}; the gain is stored as bfloat16 or float32")

    def shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Give the shapes of one layer's constants. A token has N = bits * W bits. 4 logits choose
        2 of them, so that there are 2N logits."""
        if width % 2:
            raise UserError(f"width {width} is odd; a choice decides two bits")
        logit_count = 2 * self.bits * width
        hidden = self.hidden or min(HIDDEN_LIMIT, logit_count)
        return {
            "scale": (width,),
            "norm_weight": (width,),
            "norm_bias": (width,),
            "w1": (width, hidden),
            "b1": (hidden,),
            "w2": (hidden, logit_count),
            "b2": (logit_count,),
            "codebook": (self.bits * width, width),
        }

    def build(self, width: int) -> Codec:
        """Build the codec of `width` = K*D channels.

        How a matrix product rounds depends on its shape. Equal values give the same codes, bit for
        bit, only in tiles of one shape. The cache therefore always encodes [unit, W] of one row."""
        fields = {
            "bits": Field(kind="codes", width=self.bits * width, bits=1, role="payload"),
            "gain": Field(kind="token", width=1, role="scales", dtype=self.dtype),
        }

        def encode(constants, x: Float[Array, "u W"]) -> dict[str, Num[Array, "rows lanes"]]:
            unit, norm = normalise(x.astype(jnp.float32), constants["scale"].astype(jnp.float32))
            bits = chosen_bits(logits(constants, unit))
            length = jnp.linalg.norm(direction(constants, bits), axis=-1)
            gain = (norm + EPS) / (length + EPS)
            return {"bits": bits.astype(jnp.uint32), "gain": gain.astype(self.dtype)[None]}

        def decode(constants, tile):
            bits = tile["bits"].astype(jnp.float32)
            gain = jnp.swapaxes(tile["gain"], -1, -2).astype(jnp.float32)
            return gain * _product(bits, constants["codebook"])

        return Codec(
            width, 1, fields, encode, decode, self.shapes(width), Fit("kvqjax.calibrate.commvq")
        )


def _product(x, matrix):
    """Multiply by a matrix along the last axis."""
    # Three passes of bfloat16 on TPUs instead of six: the encoder's products are a third of what
    # compiles for CommVQ.
    return jnp.einsum("...i,ij->...j", x, matrix.astype(jnp.float32), precision="high")


def normalise(
    v: Float[Array, "*n W"], scale: Float[Array, " W"]
) -> tuple[Float[Array, "*n W"], Float[Array, "*n"]]:
    """Divide values by their channels' scale and then by their norm p.

    Args:
        v: values.
        scale: s, of the channels.

    Returns:
        (the direction that the encoder sees, p).
    """
    scaled = wide(wide(v) / (scale + EPS).reshape((1,) * (v.ndim - 1) + scale.shape))
    norm = jnp.linalg.norm(scaled, axis=-1)
    return scaled / (norm[..., None] + EPS), norm


def layer_normed(unit: Float[Array, "*n W"]) -> Float[Array, "*n W"]:
    """Subtract a token's mean and divide by its standard deviation: LayerNorm without its weight
    and bias."""
    centred = unit - unit.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)


def logits(constants: dict, unit: Float[Array, "*n W"]) -> Float[Array, "*n choices 4"]:
    """Run the encoder, in float32: LayerNorm, Linear, GELU (erf), Linear.

    Args:
        constants: those of `CommVQValues.shapes`.
        unit: directions, from `normalise`.

    Returns:
        Four logits for each choice of two bits.
    """

    def row(name):
        """Load a vector of constants with axes of 1 for those of `unit`."""
        return constants[name].astype(jnp.float32).reshape((1,) * (unit.ndim - 1) + (-1,))

    hidden = _product(
        layer_normed(unit) * row("norm_weight") + row("norm_bias"), constants["w1"]
    ) + row("b1")
    out = _product(jax.nn.gelu(hidden, approximate=False), constants["w2"]) + row("b2")
    return out.reshape(*out.shape[:-1], -1, 4)


def choice_bits(one_hot: Float[Array, "*n choices 4"]) -> Float[Array, "*n N"]:
    """Give the bits of each choice. Training passes gradients through this function, so it is a
    linear map and no look-up."""
    pairs = jnp.einsum(
        "...c,cb->...b", one_hot, jnp.asarray(CHOICE_BITS, jnp.float32), precision="highest"
    )
    return pairs.reshape(*one_hot.shape[:-2], -1)


def chosen_bits(z: Float[Array, "*n choices 4"]) -> Float[Array, "*n N"]:
    """Give the bits of the largest logit of each choice."""
    return choice_bits(jax.nn.one_hot(z.argmax(-1), 4, dtype=jnp.float32))


def direction(constants: dict, bits: Float[Array, "*n N"]) -> Float[Array, "*n W"]:
    """Compute w = bits @ E from the stored codebook, which has the channels' scales in it."""
    folded = _product(bits, constants["codebook"])
    return folded / (constants["scale"].astype(jnp.float32) + EPS).reshape(
        (1,) * (bits.ndim - 1) + (-1,)
    )


def fold(codebook: Float[Array, "N W"], scale: Float[Array, " W"]) -> Float[Array, "N W"]:
    """Make the stored codebook E (s + eps)."""
    return codebook * (scale + EPS)[None]
