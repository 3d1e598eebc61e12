"""Outliers of one token as a fixed number n of slots: values and channel numbers, tokens on the lanes.

Slots are set, not added: what the dense codes say at an outlier's channel never reaches the result. An unused slot
carries the channel W of a vector of W channels, which the write below drops.

Both are stored as one array of 16-bit words, [rows, u]: the n values (a float32 one as two words), then the n channels.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

__all__ = ["restore_outliers", "split_outliers", "store_outliers"]


def store_outliers(x: Float[Array, "u W"], channels: Int[Array, "u n"], dtype: str) -> UInt[Array, "rows u"]:
    """Pack the outliers' values and channels into words; a channel of W is an unused slot."""
    values = jnp.take_along_axis(x, channels, axis=-1, mode="clip").astype(dtype)
    words = jax.lax.bitcast_convert_type(values, jnp.uint16).reshape(len(x), -1)
    return jnp.concatenate([words, channels.astype(jnp.uint16)], axis=-1).T


def split_outliers(
    words: UInt[Array, "*B rows u"], count: int, dtype: str
) -> tuple[Float[Array, "*B u n"], Int[Array, "*B u n"]]:
    """Unpack (values, channels) of `count` slots of every token."""
    words, each = jnp.swapaxes(words, -1, -2), jnp.dtype(dtype).itemsize // 2
    values, channels = words[..., : count * each], words[..., count * each : count * (each + 1)]
    values = values if each == 1 else values.reshape(*channels.shape, each)
    return jax.lax.bitcast_convert_type(values, jnp.dtype(dtype)), channels.astype(jnp.int32)


def restore_outliers(
    dense: Float[Array, "*B u W"], words: UInt[Array, "*B rows u"], count: int, dtype: str
) -> Float[Array, "*B u W"]:
    """Put the stored outliers back in place of what the dense codes say there."""
    rows = dense.reshape(-1, dense.shape[-1])
    values, channels = (a.reshape(len(rows), count) for a in split_outliers(words, count, dtype))
    token = jnp.arange(len(rows))[:, None]
    rows = rows.at[token, channels].set(values.astype(jnp.float32), mode="drop")
    return rows.reshape(dense.shape)
