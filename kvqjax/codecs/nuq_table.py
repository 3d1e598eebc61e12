"""Signposts of KVQuant's datatypes in normalised coordinates [-1, 1], and the two operations on
them: finding the nearest signpost, and looking one up.

With b bits a datatype has M = 2^b signposts:

- nuq: calibrated by k-means (`kvqjax.calibrate.kmeans`).
- int: M equally spaced values, the grid of asymmetric uniform quantisation with a float zero point.
- nf:  quantiles of a normal distribution, scaled to end at -1 and 1. One more lies above 0 than below, so that 0 is a
       signpost (NormalFloat of QLoRA, arXiv 2305.14314, Appendix E, with its 4-bit tail probability
       at every number of bits, as KVQuant's baseline has it).
"""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt

DATATYPES = ("nuq", "nf", "int")
# Probability of numbers above the largest quantile, and of those below the smallest.
NF_TAIL = 0.5 * (1 / 32 + 1 / 30)


def _normal_float(bits: int) -> np.ndarray:
    """Compute the 2^bits sorted signposts of "nf"."""
    inverse = statistics.NormalDist().inv_cdf
    half = 2 ** (bits - 1)
    # Evenly spaced probabilities from the tail down to 0.5, whose quantile 0 is added once.
    positive = [inverse(p) for p in np.linspace(1 - NF_TAIL, 0.5, half + 1)[:-1]]
    negative = [-inverse(p) for p in np.linspace(1 - NF_TAIL, 0.5, half)[:-1]]
    points = np.sort([*positive, 0.0, *negative])
    return points / points.max()


def fixed_signposts(datatype: str, bits: int) -> Float[np.ndarray, " M"]:
    """Compute the 2^bits sorted signposts of "nf" or "int", float32."""
    points = _normal_float(bits) if datatype == "nf" else np.linspace(-1, 1, 2**bits)
    return points.astype(np.float32)


def nearest(u: Float[Array, "*S"], signposts: Float[Array, " M"]) -> UInt[Array, "*S"]:
    """Find the index of the nearest of M sorted signposts.

    A number halfway between two signposts belongs to the lower one. Numbers outside all of them
    belong to the outermost one on their side."""
    middles = (signposts[1:] + signposts[:-1]) / 2
    # The index is how many middles lie below the number. These are at most 15 comparisons, fused
    # into one pass over u: cheaper than a binary search on every backend.
    return sum(
        ((u > middle).astype(jnp.uint32) for middle in middles), jnp.zeros(u.shape, jnp.uint32)
    )


def look_up(codes: UInt[Array, "*S"], signposts: Float[Array, " M"]) -> Float[Array, "*S"]:
    """Look up `signposts[codes]` by selects: a gather of single numbers is slow on TPUs and on
    vector units."""
    # On CPUs and GPUs a tree of selects takes half the operations of a chain. It needs M to be a
    # power of two.
    tree = _by_bits if signposts.shape[0] & (signposts.shape[0] - 1) == 0 else _by_value
    return jax.lax.platform_dependent(codes, signposts, cpu=tree, cuda=tree, default=_by_value)


def _by_value(codes: UInt[Array, "*S"], signposts: Float[Array, " M"]) -> Float[Array, "*S"]:
    """Look up by a chain of selects: one comparison and one select for each signpost."""
    value = jnp.broadcast_to(signposts[0], codes.shape)
    for index in range(1, signposts.shape[0]):
        value = jnp.where(codes == index, signposts[index], value)
    return value


def _by_bits(codes: UInt[Array, "*S"], signposts: Float[Array, " M"]) -> Float[Array, "*S"]:
    """Look up by a tree of selects: one comparison for each bit of a code, the lowest bit first."""
    values = [
        jnp.broadcast_to(signposts[index], codes.shape) for index in range(signposts.shape[0])
    ]
    for bit in range(signposts.shape[0].bit_length() - 1):
        # Each bit halves the candidates: the lowest bit decides between neighbours.
        is_set = (codes >> bit) & 1 == 1
        values = [
            jnp.where(is_set, upper, lower)
            for lower, upper in zip(values[::2], values[1::2], strict=True)
        ]
    return values[0]
