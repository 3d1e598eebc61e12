"""Outliers of one token as a fixed number n of slots: values and channel numbers, tokens on the lanes.

Slots are set, not added: what the dense codes say at an outlier's channel never reaches the result. An unused slot
carries the channel W of a vector of W channels, which the write below drops.

Both are stored as one array of 16-bit words, [rows, u]: the n values (a float32 one as two words), then the n channels.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from kvqjax.ops.xla_workarounds import kept_apart

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
    words, value_words = jnp.swapaxes(words, -1, -2), jnp.dtype(dtype).itemsize // 2
    values, channels = words[..., : count * value_words], words[..., count * value_words : count * (value_words + 1)]
    values = values if value_words == 1 else values.reshape(*channels.shape, value_words)
    return jax.lax.bitcast_convert_type(values, jnp.dtype(dtype)), channels.astype(jnp.int32)


def restore_outliers(
    dense: Float[Array, "*B u W"], words: UInt[Array, "*B rows u"], count: int, dtype: str
) -> Float[Array, "*B u W"]:
    """Put the stored outliers back in place of what the dense codes say there.

    On GPUs every slot is compared with every channel: that costs operations which XLA fuses into whatever made the
    dense numbers, where a scatter would write them all to memory and read them back."""
    values, channels = split_outliers(words, count, dtype)
    return jax.lax.platform_dependent(dense, values, channels, cuda=_compared, default=_scattered)


def _compared(dense, values, channels):
    """Set outliers by one reduction over the slots, each of which has a channel. A chain of selects, one a slot, would
    take XLA half of a step's compilation."""
    lanes = jnp.arange(dense.shape[-1]).reshape((1,) * (dense.ndim - 1) + (-1, 1))
    if values.dtype == jnp.bfloat16:
        # A slot is one number: its channel, and below that the bits of its value. Two operations a slot and channel are
        # enough. The first clears the channel where it is this one. The least difference is then below 2^16 where some
        # slot has this channel.
        bits = jax.lax.bitcast_convert_type(values, jnp.uint16).astype(jnp.uint32)
        slots = kept_apart(channels.astype(jnp.uint32) << 16 | bits)[..., None, :]
        difference = slots ^ (lanes.astype(jnp.uint32) << 16)
        difference = jax.lax.reduce(difference, np.uint32(2**32 - 1), jax.lax.min, (difference.ndim - 1,))
        number = jax.lax.bitcast_convert_type(difference.astype(jnp.uint16), jnp.bfloat16).astype(jnp.float32)
        return jnp.where(difference < 1 << 16, number, dense)
    mask = channels[..., None, :] == lanes
    outliers = jnp.where(mask, values[..., None, :].astype(jnp.float32), 0.0).sum(-1)
    return jnp.where(mask.any(-1), outliers, dense)


def _scattered(dense, values, channels):
    """Set outliers by a scatter, one by one."""
    rows, count = dense.reshape(-1, dense.shape[-1]), channels.shape[-1]
    token = jnp.arange(len(rows))[:, None]
    values, channels = (a.reshape(len(rows), count) for a in (values, channels))
    rows = rows.at[token, channels].set(values.astype(jnp.float32), mode="drop")
    return rows.reshape(dense.shape)
