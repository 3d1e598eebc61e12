"""Keys and values made anew from a layer's input, at every read: what XQuant and XQuant-CL share (arXiv 2508.10395)."""

from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax._errors import UserError
from kvqjax.codecs import Exact, Fit, Uniform
from kvqjax.codecs.uniform import check_group
from kvqjax.methods.summing import shared_until, through_heads
from kvqjax.methods.wiring import SharedValues
from kvqjax.model.config import KVShape
from kvqjax.model.decoder import Layer, heads, norm
from kvqjax.model.rope import Waves, rotate
from kvqjax.ops.finite import saturated
from kvqjax.ops.packing.words import PLANE
from kvqjax.ops.xla_workarounds import row_major

__all__ = ["FIT", "attended", "input_width", "prefers_latents", "quantiser", "summed_first", "times"]

FIT = Fit("kvqjax.calibrate.xquant", source="weights")


def input_width(shape: KVShape) -> int:
    """Give the width of the layer input that is cached. Raises UserError for a shape that does not know it."""
    if shape.width is None:
        raise UserError("its keys and values are computed from a layer's input and weights; use a kvqjax model")
    return shape.width


def prefers_latents(config: KVShape) -> bool:
    """Say whether two latents of kv_width numbers take no more room than X: true from two query heads per KV head on,
    in the usual models. Widths decide, not head counts: Qwen3-0.6B has GQA, and still 2*kv_width > E."""
    return 2 * config.kv_width <= input_width(config)


def attended(
    k: Float[Array, "B n KD"],
    v: Float[Array, "B n KD"],
    weights: Layer,
    positions: Int[Array, "B n"] | Waves | None,
    config: KVShape,
) -> tuple[Float[Array, "B n K D"], Float[Array, "B n K D"]]:
    """Finish rematerialised products to keys and values as attended: bias, QK-norm, RoPE. Numbers that overflowed
    saturate before a norm or a rotation makes NaN of them."""
    if config.qkv_bias:
        k, v = k + weights["k_bias"][None, None], v + weights["v_bias"][None, None]
    k, v = (heads(saturated(x, x.dtype), config.num_kv_heads) for x in (k, v))
    if config.qk_norm:
        k = norm(k, weights["k_norm"], config.norm_eps)
    return rotate(k, positions, config), v


def times(x: Float[Array, "B n W"], matrix: Float[Array, "W N"], dtype) -> Float[Array, "B n N"]:
    """Multiply x by a matrix in the compute dtype, and keep the product row-major. Otherwise XLA would choose its
    transpose for what follows, and transpose the matrices of all layers for that."""
    return row_major(jnp.einsum("bne,ef->bnf", x.astype(dtype), matrix.astype(dtype)))


def summed_first(width: int, config: KVShape, read, up) -> SharedValues:
    """Sum values as `read` (see SharedValues) gives them, vectors of `width`, then multiply the sum by the matrix
    `up(weights, constants)` [width, KD]. A mean of values has their bias once."""

    def finish(weights, constants, means):
        out = through_heads(means, up(weights, constants).astype(weights["v"].dtype), config)
        if not config.qkv_bias:
            return out
        bias = weights["v_bias"].astype(jnp.float32).reshape(config.num_kv_heads, 1, config.head_dim)
        group = config.num_heads // config.num_kv_heads
        return out + jnp.repeat(bias, group, 0).reshape(1, 1, *out.shape[2:])

    return SharedValues(width, shared_until(width, width * config.kv_width, config), read, finish)


def quantiser(bits: int, along: str, group: int, scales: str, width: int) -> Exact | Uniform:
    """Choose the uniform codec of section 4 for `width` channels; 16 bits mean the compute dtype itself (the
    identity)."""
    if bits == 16:
        return Exact()
    if along == "channels":
        check_group(group, width, least=PLANE)  # as many tokens leave the window at a time
    return Uniform(bits=bits, along=along, group=group, dtype=scales)
