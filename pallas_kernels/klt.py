"""The arguments of a kernel on bodies of coefficients: transform coding by KV head
(kvqjax.codecs.klt, with `heads=own`), values as what the keys of their layer do not say.

    k_hat = s_k z_k B + mean_k        before RoPE
    v_hat = s_k z_k F + s_v z_v C + mean_v

z are the points of codes, s the scale of a token and head. Attention sums values linearly. So a
kernel sums s_k z_k and s_v z_v under the softmax weights, and `finished` turns the sums to values,
once a query."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from kvqjax.codecs.klt import SCALE_BITS, STEPS, scales_of
from kvqjax.ops.packing.base import unpack
from kvqjax.pallas_kernels.chips import family
from kvqjax.pallas_kernels.packed import Rope

LANE = 8  # a level has a multiple of this many coefficients
Levels = tuple[tuple[int, int], ...]  # (bits, coefficients of a head), most bits first


class KltCoded(NamedTuple):
    """The stored fields of keys, or of values, of one run of layers. A level of n coefficients a
    head has K*n lanes, head by head, in planes (`kvqjax.ops.packing`)."""

    codes: tuple[tuple[UInt[Array, "L B _ W"], ...], ...]  # of each level, of each plane set
    scale: UInt[Array, "L B _ K"]


class KltBody(NamedTuple):
    """The stored fields, one layer's matrices and means, and `positions` as in `PackedBody`."""

    keys: KltCoded
    values: KltCoded
    back: Float[Array, "K Rk D"]  # B
    mean: Float[Array, " W"]  # of keys
    value_back: Float[Array, "K Rk+Rv D"]  # F above C
    value_mean: Float[Array, " W"]
    positions: Int[Array, " stretches"]

    @property
    def slots(self) -> int:
        return self.keys.scale.shape[2] * 32 // SCALE_BITS


@dataclasses.dataclass(frozen=True, kw_only=True)
class KltSpec:
    """Everything static about a call.

    Attributes:
        key_levels: The bits of a head's key coefficients.
        value_levels: Those of its value coefficients.
        kv_heads: KV heads, K.
        head_dim: Channels of a head, D.
        rope: How keys are rotated.
        target: The chip, as in `PackedSpec`."""

    key_levels: Levels
    value_levels: Levels
    kv_heads: int
    head_dim: int
    rope: Rope
    target: str = "cpu"

    def __post_init__(self):
        family(self.target)  # refuses what is no target

    @property
    def levels_text(self) -> str:
        """Name what a compiled kernel depends on beside shapes, such as "8x6 8x4 and 24x3": 8
        coefficients of keys with 6 bits, 8 with 4, 24 of values with 3."""
        both = (self.key_levels, self.value_levels)
        return " and ".join(" ".join(f"{n}x{bits}" for bits, n in levels) for levels in both)


def count(levels: Levels) -> int:
    """Count the coefficients of a head that have bits."""
    return sum(coefficients for _, coefficients in levels)


def steps(levels: Levels) -> Float[Array, " R"]:
    """Give each coefficient's distance between points; 1 where points are not evenly spaced. A
    kernel's evenly spaced coefficients are codes less their middle."""
    spread = [jnp.full((n,), STEPS.get(bits, 1.0), jnp.float32) for bits, n in levels]
    return jnp.concatenate(spread)


def scales(coded: KltCoded, layer: Any) -> Float[Array, "B K S"]:
    """Read the scales of all tokens of one layer."""
    words = lax.dynamic_index_in_dim(coded.scale, layer, 0, keepdims=False)
    return scales_of(unpack(words, SCALE_BITS)).swapaxes(1, 2)


def finished(
    body: KltBody, spec: KltSpec, means: Float[Array, "B T H N"]
) -> Float[Array, "B T H D"]:
    """Turn means of a head's coefficients, those of keys and then those of values, to values.

    The coefficients are the kernel's: codes less their middle where points are evenly spaced."""
    distance = jnp.concatenate([steps(spec.key_levels), steps(spec.value_levels)])
    matrices = body.value_back.astype(jnp.float32) * distance[None, :, None]
    batch, length, heads, numbers = means.shape
    by_head = means.reshape(batch, length, spec.kv_heads, -1, numbers)
    values = jnp.einsum("btkgn,knd->btkgd", by_head, matrices, precision="highest")
    mean = body.value_mean.astype(jnp.float32).reshape(1, 1, spec.kv_heads, 1, spec.head_dim)
    return (values + mean).reshape(batch, length, heads, spec.head_dim)
