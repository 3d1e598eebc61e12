"""Ranges of KVQuant's codes: keys lie within their channel's thresholds, values within their
token's range.

A range is stored as its centre and its half width (the scale). Numbers less the centre, over the
scale, lie within -1 to 1."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.codecs.uniform import round_toward
from kvqjax.ops.xla_workarounds import kept_apart


def divisor(scale: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Replace scales of 0, which channels or tokens of one repeated number have, by 1."""
    return jnp.where(scale > 0, scale, 1.0)


def channel_range(constants) -> tuple[Float[Array, " W"], Float[Array, " W"]]:
    """Give centre and half range of every channel from its thresholds."""
    # Times 0.5 instead of divided by 2: XLA for GPUs would make a kernel of its own of divisions.
    upper, lower = constants["upper"].astype(jnp.float32), constants["lower"].astype(jnp.float32)
    return (upper + lower) * 0.5, (upper - lower) * 0.5


def normalise_keys(constants, x: Float[Array, "u W"]):
    """Normalise keys, and mark outliers.

    Args:
        constants: "upper" and "lower", the channels' thresholds [W].
        x: keys.

    Returns:
        (keys in units of their channel's range [u, W], a mask [u, W] of outliers).
    """
    centre, scale = channel_range(constants)
    # Compared with the thresholds themselves: normalised numbers are rounded, and would not be
    # exact at the edge.
    outside = (x > constants["upper"][None]) | (x < constants["lower"][None])
    return (x - centre[None]) / divisor(scale)[None], outside


def excess(slots: int, constants, x: Float[Array, "u W"]) -> Int[Array, " u"]:
    """Count the outliers of each token's key that find none of `slots` slots, and so saturate."""
    outside = normalise_keys(constants, x.astype(jnp.float32))[1]
    return jnp.maximum(outside.sum(-1) - slots, 0)


def token_range(x: Float[Array, "u W"], side: int):
    """Find the range of each token, and its outliers.

    Args:
        x: values.
        side: n/2, how many outliers a token has at each end.

    Returns:
        (largest entry [u, 1] and smallest entry [u, 1] that are no outliers, channels of the
        outliers [u, n], or None without outliers).
    """
    if not side:
        return x.max(-1, keepdims=True), x.min(-1, keepdims=True), None
    # Without `kept_apart`, XLA on CPU merges the slices below into the sort behind top_k, and then
    # sorts every token in full: measured 970 ms against 16 ms for 4096 x 1024.
    # `x` is a third operand because XLA's partitioner aborts on a barrier whose operands are just
    # what top_k returns.
    top, top_channels, _ = kept_apart((*jax.lax.top_k(x, side + 1), x))
    bottom, bottom_channels, _ = kept_apart((*jax.lax.top_k(-x, side + 1), x))
    channels = jnp.concatenate([top_channels[:, :side], bottom_channels[:, :side]], axis=-1)
    return top[:, side:], -bottom[:, side:], channels


def stored_range(high: Float[Array, "u 1"], low: Float[Array, "u 1"], dtype: str):
    """Round each token's centre and half range to `dtype`. The rounded range still covers `low` to
    `high`."""
    # Halved before they are added: the sum of two large numbers may be infinite.
    centre = (high / 2 + low / 2).astype(dtype)
    stored = centre.astype(jnp.float32)
    return centre, round_toward(jnp.maximum(high - stored, stored - low), dtype, up=True)
