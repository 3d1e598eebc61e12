"""Outliers of a token, stored in a fixed number n of slots: a value and a channel number each.

Reading replaces the dense number at an outlier's channel by the outlier. What the dense codes say
there never reaches the result. An unused slot carries the channel W of a vector of W channels,
which does not exist and is not written.

Values and channels are stored as one array of 16-bit words, [rows, u], with u tokens on the lanes:
first the n values (a float32 value takes two words), then the n channels.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from kvqjax.ops.xla_workarounds import kept_apart


def store_outliers(
    x: Float[Array, "u W"], channels: Int[Array, "u n"], dtype: str
) -> UInt[Array, "rows u"]:
    """Pack the outliers' values and channels into words.

    Args:
        x: vectors.
        channels: of the n slots of every token; W in an unused slot.
        dtype: of the stored values, "bfloat16" or "float32".

    Returns:
        The words; `rows` is 2n for bfloat16, 3n for float32.
    """
    # The mode "clip" gives an unused slot the value of the last channel, which no reader looks at.
    values = jnp.take_along_axis(x, channels, axis=-1, mode="clip").astype(dtype)
    words = jax.lax.bitcast_convert_type(values, jnp.uint16).reshape(len(x), -1)
    return jnp.concatenate([words, channels.astype(jnp.uint16)], axis=-1).T


def split_outliers(
    words: UInt[Array, "*B rows u"], count: int, dtype: str
) -> tuple[Float[Array, "*B u n"], Int[Array, "*B u n"]]:
    """Unpack (values, channels) of `count` slots of every token. `dtype` is that of the values."""
    words = jnp.swapaxes(words, -1, -2)
    value_words = jnp.dtype(dtype).itemsize // 2  # of one value
    split = count * value_words
    values, channels = words[..., :split], words[..., split : split + count]
    if value_words > 1:  # a bitcast to a wider dtype joins the numbers of a last axis
        values = values.reshape(*channels.shape, value_words)
    return jax.lax.bitcast_convert_type(values, jnp.dtype(dtype)), channels.astype(jnp.int32)


def restore_outliers(
    dense: Float[Array, "*B u W"], words: UInt[Array, "*B rows u"], count: int, dtype: str
) -> Float[Array, "*B u W"]:
    """Put the stored outliers back in place of what the dense codes say there.

    Args:
        dense: vectors decoded from codes.
        words: as `store_outliers` makes them.
        count: slots of a token.
        dtype: of the stored values.

    Returns:
        The vectors with their outliers.
    """
    # On GPUs every slot is compared with every channel. XLA fuses these operations into whatever
    # made the dense numbers. A scatter would write the dense numbers to memory and read them back.
    values, channels = split_outliers(words, count, dtype)
    return jax.lax.platform_dependent(dense, values, channels, cuda=_compared, default=_scattered)


def _compared(dense, values, channels):
    """Set outliers by comparing every slot with every channel, and by one reduction over the slots.

    A chain of selects, one for each slot, would take half of the time in which XLA compiles a
    step."""
    lanes = jnp.arange(dense.shape[-1]).reshape((1,) * (dense.ndim - 1) + (-1, 1))
    if values.dtype == jnp.bfloat16:
        # A slot becomes one integer: its channel in the upper 16 bits, the bits of its value in the
        # lower ones. Then two operations for every slot and channel are enough. Where the slot has
        # a channel, an exclusive or with the channel's number leaves the value alone, which is less
        # than 2^16. The minimum over the slots finds it.
        bits = jax.lax.bitcast_convert_type(values, jnp.uint16).astype(jnp.uint32)
        slots = kept_apart(channels.astype(jnp.uint32) << 16 | bits)[..., None, :]
        difference = slots ^ (lanes.astype(jnp.uint32) << 16)  # [.., u, W, n]
        difference = jax.lax.reduce(
            difference, np.uint32(2**32 - 1), jax.lax.min, (difference.ndim - 1,)
        )
        number = jax.lax.bitcast_convert_type(difference.astype(jnp.uint16), jnp.bfloat16).astype(
            jnp.float32
        )
        return jnp.where(difference < 1 << 16, number, dense)
    mask = channels[..., None, :] == lanes
    outliers = jnp.where(mask, values[..., None, :].astype(jnp.float32), 0.0).sum(-1)
    return jnp.where(mask.any(-1), outliers, dense)


def _scattered(dense, values, channels):
    """Set outliers by a scatter, one by one. The mode "drop" leaves out unused slots, whose channel
    is W."""
    rows, count = dense.reshape(-1, dense.shape[-1]), channels.shape[-1]
    token = jnp.arange(len(rows))[:, None]
    values, channels = (a.reshape(len(rows), count) for a in (values, channels))
    rows = rows.at[token, channels].set(values.astype(jnp.float32), mode="drop")
    return rows.reshape(dense.shape)
