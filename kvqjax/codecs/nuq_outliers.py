"""Outliers of one token as a fixed number of slots: values and channel numbers, tokens on the lanes.

Slots are set, not added: what the dense codes say at an outlier's channel never reaches the result. An unused slot
carries the channel W of a vector of W channels, which the write below drops.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

__all__ = ["restore_outliers", "store_outliers"]


def store_outliers(x: Float[Array, "u W"], channels: Int[Array, "u n"], dtype: str) -> dict[str, Num[Array, "n u"]]:
    """Values and channels of the outliers, tokens on the lanes; a channel of W is an unused slot."""
    values = jnp.take_along_axis(x, channels, axis=-1, mode="clip")
    return {"outliers": values.astype(dtype).T, "channels": channels.astype(jnp.int16).T}


def restore_outliers(dense: Float[Array, "*B u W"], tile) -> Float[Array, "*B u W"]:
    """Put the stored outliers back in place of what the dense codes say there."""
    if "outliers" not in tile:
        return dense
    values, channels = (jnp.swapaxes(tile[name], -1, -2) for name in ("outliers", "channels"))
    rows = dense.reshape(-1, dense.shape[-1])
    values, channels = (a.reshape(rows.shape[0], -1) for a in (values, channels))
    token = jnp.arange(rows.shape[0])[:, None]
    rows = rows.at[token, channels.astype(jnp.int32)].set(values.astype(jnp.float32), mode="drop")
    return rows.reshape(dense.shape)
