"""Codes of keys to keys, k = s c + m, inside the TPU decode-attention kernel.

Scales and minima of keys belong to groups of tokens, and a register holds tokens along its rows. Two ways of laying
them out like the codes, by what the chip's vector unit computes with:

- bfloat16: as the rows of slabs of 16 tokens, a register each. A block has few different ones: as the fields of a word
  come out next to each other, the same few groups alternate throughout what was unpacked together.
- float32 (`Plan.wide`): the halves of words apart, each of which holds tokens of one group for 32 rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kvqjax.ops.layout import PLANE
from kvqjax.pallas_kernels.tpu.columns import Place, dot, load_row, some
from kvqjax.pallas_kernels.tpu.plan import Plan

__all__ = ["halves", "packed", "patterns", "slab_keys", "store_patterns"]

SLAB = 16  # rows of a register of bfloat16


def patterns(plan: Plan) -> Float[Array, "rows N"]:
    """Which of a tile's N key groups each row of each kind of slab of 16 tokens belongs to, one-hot: a product with it
    lays scales out as `slab_keys` wants them, the kinds of the first block first."""
    kinds = np.concatenate(_kinds(plan)[0])
    group = (np.arange(plan.blocks)[:, None] * (plan.block // plan.group) + kinds[None]).reshape(-1) % plan.key_rows
    return jnp.asarray(group[:, None] == np.arange(plan.key_rows)[None], jnp.bfloat16)


def _kinds(plan: Plan) -> tuple[list[np.ndarray], list[int]]:
    """The different slabs of a block, as groups of their tokens, and which of them each slab is."""
    slabs = [tuple(slab) for slab in (plan.order // plan.group).reshape(-1, SLAB)]
    kinds = sorted(set(slabs))
    return [np.asarray(kind) for kind in kinds], [kinds.index(slab) for slab in slabs]


def store_patterns(refs, scale, zero, lanes) -> None:
    """Write this tile's scales and minima [N, lanes] as the rows of slabs."""
    for ref, x in ((refs.slab_scales, scale), (refs.slab_zeros, zero)):
        ref[:, lanes] = dot(refs.patterns[...], x.astype(jnp.bfloat16), 0).astype(jnp.bfloat16)


def slab_keys(codes, refs, plan: Plan, place: Place, index, i: int):
    """Keys of column `i` of a block, [column, W] bfloat16."""
    scale, zero = (_slabs(ref, plan, place, index, i) for ref in (refs.slab_scales, refs.slab_zeros))
    return codes * scale + zero


def _slabs(ref, plan: Plan, place: Place, index, i: int):
    """Scales or minima of every token of a column, [column, W] bfloat16: few different slabs, repeated."""
    kinds, which = _kinds(plan)
    each = plan.column // SLAB
    slabs = [some(index * len(kinds) + kind, SLAB) for kind in which[i * each : (i + 1) * each]]
    stored = [ref[slab, place.lanes] for slab in slabs]
    return jnp.concatenate(stored)


def halves(codes, refs, plan: Plan, place: Place, index, i: int) -> list:
    """Keys of the tokens in the lower and in the upper halves of a column's words, [column/2, W] float32 each."""
    words = pltpu.bitcast(codes, jnp.uint32)
    parts = words << jnp.uint32(16), words & jnp.uint32(0xFFFF0000)
    return [_half(part, refs, plan, place, index, i, n) for n, part in enumerate(parts)]


def _half(part, refs, plan: Plan, place: Place, index, i: int, n: int):
    """The keys of half `n`: every 32 rows of words are of one group."""
    numbers = jax.lax.bitcast_convert_type(part, jnp.float32)
    groups = (plan.order[i * plan.column : (i + 1) * plan.column][n::2] // plan.group).reshape(-1, PLANE)
    first = plan.groups(index)[0]

    def rows(ref):
        known = {
            group: load_row(ref, first + group if plan.spec.key_group else 0, plan.key_rows, place.column, plan.lanes)
            for group in sorted({*map(int, groups[:, 0])})
        }
        return jnp.concatenate([known[int(group)] for group in groups[:, 0] for _ in range(PLANE // 8)])

    return numbers * rows(refs.factors) + rows(refs.zeros)


def packed(low, high):
    """[n, W] float32 twice to bfloat16 [2n, W], the rows of `low` and `high` in turn."""
    return pltpu.bitcast(pltpu.pack_elementwise([low, high], packed_dtype=jnp.bfloat16), jnp.bfloat16)
