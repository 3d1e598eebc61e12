"""Sum values before they are mapped to heads (`SharedValues` of kvqjax.methods.wiring): when that is cheaper, and the
product after the sum."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvqjax.model.config import KVShape

__all__ = ["shared_until", "through_heads"]


def shared_until(width: int, decoding: int, config: KVShape) -> int:
    """Find the most new tokens T at which summing first is cheaper. In multiply-accumulates per cached token it costs T
    H N, N = `width`, against `decoding` and then T H D."""
    saved = config.num_heads * (width - config.head_dim)
    return (decoding - 1) // saved if saved > 0 else 2**31


def through_heads(
    means: Float[Array, "B T H N"], matrix: Float[Array, "N KD"], config: KVShape, precision: str | None = None
) -> Float[Array, "B T H D"]:
    """Multiply every query head's vector by the columns of its KV head, in the matrix's dtype with float32 sums."""
    grouped = means.astype(matrix.dtype).reshape(*means.shape[:2], config.num_kv_heads, -1, means.shape[-1])
    columns = matrix.reshape(-1, config.num_kv_heads, config.head_dim)
    out = jnp.einsum("btkgn,nkd->btkgd", grouped, columns, precision=precision, preferred_element_type=jnp.float32)
    return out.reshape(*means.shape[:3], config.head_dim)
