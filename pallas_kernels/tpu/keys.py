"""Turn codes of keys into keys, k = s c + m, inside the TPU decode-attention kernel.

c is a code, s the scale and m the minimum of the code's channel and group of tokens. Tokens lie
along the rows of a register, in lane order (`unpack`), which mixes tokens of several groups. Scales
and minima must be laid out in the same order. How this is done depends on the number format that
the chip's vector unit computes with:

- bfloat16: A register holds 16 tokens, here called a slab. The slabs of a block repeat a few
  patterns of key groups. The scales and minima of every pattern are written once for each block
  (`store_patterns`).
- float32 (`Plan.wide`): A word holds the codes of two tokens. Its lower and upper halves are
  multiplied apart. Each half has tokens of one group in 32 consecutive rows (`halves`)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kvqjax.ops.packing.base import PLANE
from kvqjax.pallas_kernels.tpu.columns import Place, aligned, dot, load_row
from kvqjax.pallas_kernels.tpu.plan import Plan

SLAB = 16  # tokens: the rows of a register of bfloat16


def patterns(plan: Plan) -> Float[Array, "rows N"]:
    """Make the one-hot matrix by which `store_patterns` lays a tile's scales out as slabs.

    Returns:
        1 where the token of a row belongs to a key group, of the N of a tile. Rows are the SLAB
        tokens of the patterns of the first block, then those of the second block, and so on."""
    kinds, _ = _kinds(plan)
    group_in_block = np.concatenate(kinds)  # [kinds * SLAB]
    first_of_block = np.arange(plan.blocks) * (plan.block // plan.group)  # [blocks]
    group_in_tile = (first_of_block[:, None] + group_in_block[None]).reshape(-1)
    # Where keys have one scale for all tokens (`key_rows` = 1), every row takes it: modulo 1 all
    # groups are group 0.
    scale_row = group_in_tile % plan.key_rows
    return jnp.asarray(scale_row[:, None] == np.arange(plan.key_rows)[None], jnp.bfloat16)


def _kinds(plan: Plan) -> tuple[list[np.ndarray], list[int]]:
    """List the different slabs of a block and the number of every slab among them.

    Returns:
        (kinds, slab_kinds). kinds[k] are the key groups of the tokens of slab kind k, [SLAB],
        counted from the block's first group. slab_kinds[n] is the kind of the block's n-th slab."""
    group_of_token = (plan.order // plan.group).reshape(-1, SLAB)  # [slabs of a block, SLAB]
    slabs = [tuple(slab) for slab in group_of_token]
    kinds = sorted(set(slabs))
    slab_kinds = [kinds.index(slab) for slab in slabs]
    return [np.asarray(kind) for kind in kinds], slab_kinds


def store_patterns(refs, scale, zero, lanes) -> None:
    """Write a tile's key scales and minima as slabs.

    Args:
        refs: The kernel's references; `slab_scales` and `slab_zeros` [rows, K*D] bfloat16 are
            written.
        scale: Scales of the tile's N key groups, [N, lanes] float32.
        zero: Minima of the same groups, less the codes' offset, [N, lanes] float32."""
    for ref, x in ((refs.slab_scales, scale), (refs.slab_zeros, zero)):
        # Each row of `patterns` has a single 1, so that the product itself rounds nothing.
        ref[:, lanes] = dot(refs.patterns[...], x.astype(jnp.bfloat16), 0).astype(jnp.bfloat16)


def slab_keys(codes, refs, plan: Plan, place: Place, index, i: int):
    """Turn the codes of a column into keys, in bfloat16.

    Args:
        codes: Codes of the column, [column, W] bfloat16.
        refs: The kernel's references, slabs among them.
        index: Number of the block in its tile.
        i: Number of the column in its block.

    Returns:
        Keys [column, W] bfloat16."""
    scale = _slabs(refs.slab_scales, plan, place, index, i)
    zero = _slabs(refs.slab_zeros, plan, place, index, i)
    return codes * scale + zero


def _slabs(ref, plan: Plan, place: Place, index, i: int):
    """Load the scales, or minima, of every token of a column, [column, W] bfloat16."""
    kinds, slab_kinds = _kinds(plan)
    count = plan.column // SLAB
    kinds_of_column = slab_kinds[i * count : (i + 1) * count]
    # Each block of the tile has its slabs of all kinds one below the other (`patterns`).
    slabs = [aligned(index * len(kinds) + kind, SLAB) for kind in kinds_of_column]
    return jnp.concatenate([ref[slab, place.lanes] for slab in slabs])


def halves(codes, refs, plan: Plan, place: Place, index, i: int) -> list:
    """Turn the codes of a column into keys, in float32.

    Args:
        codes: Codes of the column, [column, W] bfloat16.
        refs: The kernel's references, `factors` and `zeros` among them.
        index: Number of the block in its tile.
        i: Number of the column in its block.

    Returns:
        Keys of the tokens in lower halves of words, then of those in upper halves, [column/2, W]
        float32 each."""
    # The bits of a bfloat16 number are the upper 16 bits of the equal float32 number, whose other
    # bits are 0. So a shift widens the lower halves, a mask the upper ones.
    words = pltpu.bitcast(codes, jnp.uint32)
    lower = words << jnp.uint32(16)
    upper = words & jnp.uint32(0xFFFF0000)
    return [
        _half(lower, refs, plan, place, index, i, 0),
        _half(upper, refs, plan, place, index, i, 1),
    ]


def _half(bits, refs, plan: Plan, place: Place, index, i: int, half: int):
    """Turn the codes in lower (`half` 0) or upper halves (1) of words into keys, [column/2, W]
    float32.

    `bits` [column/2, W] are the bits of the codes as float32 numbers."""
    numbers = jax.lax.bitcast_convert_type(bits, jnp.float32)
    # Two consecutive places share a word, so that a half has every other place of the column.
    tokens = plan.order[i * plan.column : (i + 1) * plan.column][half::2]
    # Every 32 rows of a half have tokens of one key group. The first token stands for all 32.
    groups = [int(token) // plan.group for token in tokens[::PLANE]]
    first_group = plan.groups(index)[0]

    def rows(ref):
        """Load the scale, or minimum, of every token of the half: [column/2, W]."""
        by_group = {}  # each group's row is loaded once, as 8 equal rows
        for group in sorted(set(groups)):
            # Without key groups one row serves all tokens.
            row = first_group + group if plan.spec.key_group else 0
            by_group[group] = load_row(ref, row, plan.key_rows, place.column, plan.lanes)
        pieces = []
        for group in groups:
            # 32 tokens of a group take its 8 equal rows 4 times.
            pieces += [by_group[group]] * (PLANE // 8)
        return jnp.concatenate(pieces)

    return numbers * rows(refs.factors) + rows(refs.zeros)


def packed(low, high):
    """Interleave the rows of two arrays, rounded to bfloat16.

    Args:
        low: The even rows, [n, W] float32.
        high: The odd rows, [n, W] float32.

    Returns:
        Both, [2n, W] bfloat16."""
    words = pltpu.pack_elementwise([low, high], packed_dtype=jnp.bfloat16)
    return pltpu.bitcast(words, jnp.bfloat16)
