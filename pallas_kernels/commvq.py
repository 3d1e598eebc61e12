"""The arguments of a kernel on CommVQ's codes (arXiv 2506.18879, sections 4.1 and 4.2).

Keys before RoPE are k = prescale sum_r (C_r[A_r] + j C_r[B_r]) with one pair of levels (A, B) per
round and KV head (kvqjax.codecs.commvq_keys). Values are stored as N bits a token, shared by all
heads, and a gain. A kernel returns the means of gain * bits, and the caller multiplies them by the
codebook (kvqjax.methods.layer_cache.SharedValues)."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from kvqjax.pallas_kernels.packed import Rope


class CommVQBody(NamedTuple):
    """The stored fields of one run of layers, as `kvqjax.ops.packing` writes them, with S slots.

    Words of key codes lie along the lanes, one array per plane set. Their rows are the levels of a
    token, in the order (round, A or B, head). Words of value bits lie along the rows. bfloat16
    numbers are stored as the integers that hold their bits. `matrix` is from `decoding_matrix`,
    `positions` are as in `PackedBody`."""

    key_codes: tuple[UInt[Array, "L B R2K _"], ...]
    prescale: UInt[Array, "L B _ S"]
    value_bits: UInt[Array, "L B _ N"]
    gain: UInt[Array, "L B _ S"]
    positions: Int[Array, " n"]
    matrix: Float[Array, "KD R2V"]

    @property
    def slots(self) -> int:
        return self.gain.shape[-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommVQSpec:
    """Everything static about a call.

    Attributes:
        rounds: Number of rounds of a key's codes, R.
        levels: Number of levels of a round, V.
        value_width: Bits of a token's value, N.
        kv_heads: KV heads, K.
        head_dim: Channels of a head, D.
        rope: How keys are rotated.
        target: The chip, as in `PackedSpec`."""

    rounds: int
    levels: int
    value_width: int
    kv_heads: int
    head_dim: int
    rope: Rope
    target: str = "cpu"

    @property
    def bits(self) -> int:
        """Bits of a level."""
        return self.levels.bit_length() - 1

    @property
    def codes(self) -> int:
        """Levels of a token for one KV head: 2R."""
        return 2 * self.rounds


def decoding_matrix(codebook: Float[Array, "R K V D"]) -> Float[Array, "KD R2V"]:
    """Make the matrix that turns one-hot columns of a token's levels into its keys, bfloat16.

    Its rows are the channels of every head. Its columns are, round after round, the levels of A and
    then those of B."""
    rounds, heads, levels, dim = codebook.shape
    codebook = codebook.astype(jnp.bfloat16)
    real, imag = jnp.split(codebook, 2, axis=-1)
    # Multiplied by j: a quarter turn.
    parts = jnp.stack([codebook, jnp.concatenate([-imag, real], axis=-1)])
    return parts.transpose(2, 4, 1, 0, 3).reshape(heads * dim, 2 * rounds * levels)
