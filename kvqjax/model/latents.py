"""Multi-head latent attention (MLA, arXiv 2405.04434, section 2.1) as attention with one KV head.

    c = norm(x W_v)  [C]      r = R_t x W_k  [R]      a query's channels of head h are n [N] and, turned, s [R]
    scores:  n . (c W_uk[h]) + s . r  =  (n W_uk[h]^T) . c + s . r
    output:  sum_t p_t (c_t W_uv[h])  =  (sum_t p_t c_t) W_uv[h]

So the up-projections W_uk and W_uv meet queries and outputs once a step, and never a cached token.
What is left is ordinary attention: all query heads share one key of C + R channels, which is the
value too. The output's channels of c are read, those of r are dropped. Caches hold c and r,
`KVShape.latent` is C, and `KVShape.head_dim` is C + R.

The channels of a key lie as those of every key whose rope turns a part of it: the turned ones first
in both halves (kvqjax/model/rope.py). Values go through no rope, but no function reads their turned
channels.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def latent_key(turned: Float[Array, "*B R"], latent: Float[Array, "*B C"]) -> Float[Array, "*B D"]:
    """Put the channels of a key, or of a query that meets it, together.

    Args:
        turned: those that the rope turns.
        latent: those of the latent.

    Returns:
        Both, with half of `turned` at the front of each half; D = R + C.
    """
    halves = (jnp.split(x, 2, axis=-1) for x in (turned, latent))
    return jnp.concatenate([part for pair in zip(*halves, strict=True) for part in pair], axis=-1)


def key_parts(
    x: Float[Array, "*B D"], latent: int
) -> tuple[Float[Array, "*B R"], Float[Array, "*B C"]]:
    """Undo `latent_key`. `latent` is C."""
    turned = x.shape[-1] - latent
    parts = jnp.split(x, np.cumsum([turned // 2, latent // 2, turned // 2]).tolist(), axis=-1)
    return jnp.concatenate(parts[::2], axis=-1), jnp.concatenate(parts[1::2], axis=-1)


def absorbed(q: Float[Array, "B T H N"], up: Float[Array, "C HN"]) -> Float[Array, "B T H C"]:
    """Multiply every head of queries by its own columns of W_uk, so that it meets latents instead
    of keys. The result has the dtype of `q`, sums are float32."""
    columns = up.reshape(up.shape[0], q.shape[2], -1)
    return jnp.einsum("bthn,chn->bthc", q, columns, preferred_element_type=jnp.float32).astype(
        q.dtype
    )


def raised(means: Float[Array, "B T H C"], up: Float[Array, "C HV"]) -> Float[Array, "B T H V"]:
    """Multiply every head's weighted mean of latents by its own columns of W_uv, which gives its
    output. The product is taken in the matrix's dtype, with float32 sums."""
    columns = up.reshape(up.shape[0], means.shape[2], -1)
    return jnp.einsum(
        "bthc,chv->bthv", means.astype(up.dtype), columns, preferred_element_type=jnp.float32
    )
