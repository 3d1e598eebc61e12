"""Turn codes of keys into keys, k = s c + m, inside the TPU decode-attention kernel.

Scales s and minima m belong to groups of tokens, and tokens lie along the rows of a register. They are laid out like
the codes, in one of two ways, by what the chip's vector unit computes with:

- bfloat16: slabs of 16 tokens, a register each. The same few groups alternate throughout what was unpacked together, so
  that a block has few different slabs; each is stored once.
- float32 (`Plan.wide`): lower and upper halves of words apart. Each half holds tokens of one group for 32 rows."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kvqjax.ops.packing.words import PLANE
from kvqjax.pallas_kernels.tpu.columns import Place, aligned, dot, load_row
from kvqjax.pallas_kernels.tpu.plan import Plan

__all__ = ["halves", "packed", "patterns", "slab_keys", "store_patterns"]

SLAB = 16  # rows of a register of bfloat16


def patterns(plan: Plan) -> Float[Array, "rows N"]:
    """Return the one-hot matrix that lays scales out as slabs: row r of slab kind k, block by block, belongs to one of
    a tile's N key groups."""
    kinds = np.concatenate(_kinds(plan)[0])
    group = (np.arange(plan.blocks)[:, None] * (plan.block // plan.group) + kinds[None]).reshape(-1) % plan.key_rows
    return jnp.asarray(group[:, None] == np.arange(plan.key_rows)[None], jnp.bfloat16)


def _kinds(plan: Plan) -> tuple[list[np.ndarray], list[int]]:
    """List the different slabs of a block, as the key groups of their tokens, and for every slab of the block which of
    them it is."""
    slabs = [tuple(slab) for slab in (plan.order // plan.group).reshape(-1, SLAB)]
    kinds = sorted(set(slabs))
    return [np.asarray(kind) for kind in kinds], [kinds.index(slab) for slab in slabs]


def store_patterns(refs, scale, zero, lanes) -> None:
    """Write this tile's scales and minima [N, lanes] as slabs."""
    for ref, x in ((refs.slab_scales, scale), (refs.slab_zeros, zero)):
        ref[:, lanes] = dot(refs.patterns[...], x.astype(jnp.bfloat16), 0).astype(jnp.bfloat16)


def slab_keys(codes, refs, plan: Plan, place: Place, index, i: int):
    """Turn the codes of column `i` of block `index` into keys, [column, W] bfloat16."""
    scale, zero = (_slabs(ref, plan, place, index, i) for ref in (refs.slab_scales, refs.slab_zeros))
    return codes * scale + zero


def _slabs(ref, plan: Plan, place: Place, index, i: int):
    """Load the scales, or minima, of every token of a column, [column, W] bfloat16."""
    kinds, slab_kinds = _kinds(plan)
    count = plan.column // SLAB
    slabs = [aligned(index * len(kinds) + kind, SLAB) for kind in slab_kinds[i * count : (i + 1) * count]]
    stored = [ref[slab, place.lanes] for slab in slabs]
    return jnp.concatenate(stored)


def halves(codes, refs, plan: Plan, place: Place, index, i: int) -> list:
    """Turn the codes of column `i` of block `index` into keys, [column/2, W] float32 for the tokens in the lower halves
    of words and for those in the upper halves."""
    # A code is a bfloat16 number, which is the upper half of a float32 one.
    words = pltpu.bitcast(codes, jnp.uint32)
    parts = words << jnp.uint32(16), words & jnp.uint32(0xFFFF0000)
    return [_half(part, refs, plan, place, index, i, n) for n, part in enumerate(parts)]


def _half(part, refs, plan: Plan, place: Place, index, i: int, n: int):
    """Turn the codes of half `n` (0 lower, 1 upper) into keys. Every 32 rows of words are of one key group."""
    numbers = jax.lax.bitcast_convert_type(part, jnp.float32)
    groups = (plan.order[i * plan.column : (i + 1) * plan.column][n::2] // plan.group).reshape(-1, PLANE)
    first = plan.groups(index)[0]

    # A row is loaded once for every group, and stands on the registers of all of the group's tokens.
    def rows(ref):
        by_group = {
            group: load_row(ref, first + group if plan.spec.key_group else 0, plan.key_rows, place.column, plan.lanes)
            for group in sorted({*map(int, groups[:, 0])})
        }
        return jnp.concatenate([by_group[int(group)] for group in groups[:, 0] for _ in range(PLANE // 8)])

    return numbers * rows(refs.factors) + rows(refs.zeros)


def packed(low, high):
    """Interleave two float32 [n, W] as the rows of one bfloat16 [2n, W]."""
    return pltpu.bitcast(pltpu.pack_elementwise([low, high], packed_dtype=jnp.bfloat16), jnp.bfloat16)
