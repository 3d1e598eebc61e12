"""Signposts of KVQuant's datatypes in normalised coordinates [-1, 1], and the two table operations every one of them
shares.

nuqX signposts are calibrated (k-means, `kvqjax.calibrate.kmeans`); nfX and intX are constants that follow from the
width:

- intX: 2^b equally spaced values, the grid of asymmetric uniform quantisation with a float zero point.
- nfX:  quantiles of a normal distribution, asymmetric so that 0 is a signpost, scaled to end at -1 and 1 (NormalFloat
        of QLoRA, arXiv 2305.14314, Appendix E, with its 4-bit tail probability at every width, as KVQuant's baseline
        has it).
"""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt

__all__ = ["DATATYPES", "fixed_signposts", "look_up", "nearest"]

DATATYPES = ("nuq", "nf", "int")
NF_TAIL = 0.5 * (1 / 32 + 1 / 30)  # probability outside the outermost quantiles


def _normal_float(bits: int) -> np.ndarray:
    inverse = statistics.NormalDist().inv_cdf
    half = 2 ** (bits - 1)
    positive = [inverse(p) for p in np.linspace(1 - NF_TAIL, 0.5, half + 1)[:-1]]
    negative = [-inverse(p) for p in np.linspace(1 - NF_TAIL, 0.5, half)[:-1]]
    points = np.sort([*positive, 0.0, *negative])
    return points / points.max()


def fixed_signposts(datatype: str, bits: int) -> Float[np.ndarray, " M"]:
    """Compute the 2^bits sorted signposts of "nf" or "int", float32."""
    points = _normal_float(bits) if datatype == "nf" else np.linspace(-1, 1, 2**bits)
    return points.astype(np.float32)


def nearest(u: Float[Array, "*S"], signposts: Float[Array, " M"]) -> UInt[Array, "*S"]:
    """Find the index of the nearest of M sorted signposts. A mid-point belongs to the lower one, anything outside to
    the ends."""
    middles = (signposts[1:] + signposts[:-1]) / 2
    # At most 15 comparisons, fused into one pass over u: cheaper than a binary search on every backend.
    return sum(((u > middle).astype(jnp.uint32) for middle in middles), jnp.zeros(u.shape, jnp.uint32))


def look_up(codes: UInt[Array, "*S"], signposts: Float[Array, " M"]) -> Float[Array, "*S"]:
    """Look up `signposts[codes]` as a chain of selects: a gather of single numbers is slow on TPUs and vector units. On
    CPUs and GPUs as a tree, one comparison a bit: of M a power of two that takes half the operations."""
    tree = _by_bits if signposts.shape[0] & (signposts.shape[0] - 1) == 0 else _by_value
    return jax.lax.platform_dependent(codes, signposts, cpu=tree, cuda=tree, default=_by_value)


def _by_value(codes: UInt[Array, "*S"], signposts: Float[Array, " M"]) -> Float[Array, "*S"]:
    """Look up by a comparison a signpost."""
    value = jnp.broadcast_to(signposts[0], codes.shape)
    for index in range(1, signposts.shape[0]):
        value = jnp.where(codes == index, signposts[index], value)
    return value


def _by_bits(codes: UInt[Array, "*S"], signposts: Float[Array, " M"]) -> Float[Array, "*S"]:
    """Look up by the bits of a code, the lowest first."""
    values = [jnp.broadcast_to(signposts[index], codes.shape) for index in range(signposts.shape[0])]
    for bit in range(signposts.shape[0].bit_length() - 1):
        odd = (codes >> bit) & 1 == 1
        values = [jnp.where(odd, upper, lower) for lower, upper in zip(values[::2], values[1::2], strict=True)]
    return values[0]
