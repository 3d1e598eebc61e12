"""Compute scores of packed keys after RoPE in a Hopper kernel.

With codes c, scales s and minima m of a group's channels, and codes that are unpacked to 2^e + c
(`unpack`):

    q . k = (q s) . (2^e + c) - 2^e sum(q s) + q . m

Every group of tokens has a scaled query q s. A product of 64 tokens lies in a group of 64 or 128
tokens. Groups of 32 tokens are two to a product: the scaled queries of both stand side by side as
its columns, and the upper rows take the results of one, the lower rows those of the other.

The numbers sum(q s) and q . m are the same for all tokens of a group. Each is one product, whose
left operand has equal rows: of ones for the sum, of m for q . m. So the result stands on the rows
of all tokens, and need not be moved there."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvqjax.pallas_kernels.gpu import unpack as gpu_unpack
from kvqjax.pallas_kernels.gpu.parts import (
    COLUMNS,
    ROWS,
    by_half,
    load,
    numbers,
    product,
    put_transposed,
    row_halves,
    tiled,
)
from kvqjax.pallas_kernels.gpu.unpack import STEP, STEPS, Quad
from kvqjax.pallas_kernels.gpu.words import HALF

CHANNELS_AT_ONCE = 64  # channels whose words are loaded at a time


class Keys(NamedTuple):
    """Shared memory for the keys of a tile."""

    codes: tuple  # of [1, 32, D] u32, one per plane set
    factors: Any  # [1, 2, N, D] u16: scales and minima of the N groups of a tile
    raw: Any  # [1, R, D] bf16: the queries
    # [1, products, R, D] bf16: the queries times the scales of a quad's groups. Products of one
    # group share them; a product of two groups has [2R, D].
    scaled: Any


def _groups(plan) -> tuple[int, int]:
    """Count the groups of a quad, and those of one product."""
    return STEPS * STEP // plan.spec.key_group, max(1, STEP // plan.spec.key_group)


def words(plan) -> tuple:
    """Declare shared memory for the words of a tile.

    Returns:
        A declaration [1, 32, D] uint32 per plane set."""
    return tuple(tiled((1, HALF, plan.spec.head_dim), jnp.uint32) for _ in plan.plane_sets)


def memory(plan) -> Keys:
    """Declare the shared memory of `Keys`.

    Returns:
        The declarations, in the places of the references."""
    rows, dim = plan.rows, plan.spec.head_dim
    groups, together = _groups(plan)
    return Keys(
        words(plan),
        plgpu.SMEM((1, 2, plan.groups, dim), jnp.uint16),
        tiled((1, rows, dim), jnp.bfloat16),
        tiled((1, groups // together, together * rows, dim), jnp.bfloat16),
    )


def copies(data, keys: Keys, plan, indices, tile):
    """List the copies that bring a tile's keys to shared memory.

    Args:
        indices: The numbers of layer, row and KV head.

    Yields:
        (source, target) of every copy."""
    yield from word_copies(data.key_codes, keys.codes, plan, indices, tile)
    yield from factor_copies(data, keys, plan, indices, tile)


def word_copies(sources: tuple, targets: tuple, plan, indices, tile):
    """List the copies of a tile's words.

    Args:
        sources: References to the words of every plane set, [L, B, rows, K*D] each.
        targets: References to shared memory, [1, 32, D] each.
        indices: The numbers of layer, row and KV head.

    Yields:
        (source, target) for every plane set."""
    layer, row, head = indices
    lanes = pl.ds(head * plan.spec.head_dim, plan.spec.head_dim)
    for source, target, part in zip(sources, targets, plan.plane_sets, strict=True):
        yield source.at[layer, row, plan.word_rows(tile, part), lanes], target.at[0]


def factor_copies(data, keys, plan, indices, tile):
    """List the copies of scales and minima of a tile's groups.

    Args:
        keys: References to shared memory, which has `factors`.
        indices: The numbers of layer, row and KV head.

    Yields:
        (source, target) of the scales, then of the minima."""
    layer, row, head = indices
    lanes = pl.ds(head * plan.spec.head_dim, plan.spec.head_dim)
    groups = pl.ds(tile * plan.groups, plan.groups)
    for i, source in enumerate((data.key_scale, data.key_low)):
        yield source.at[layer, row, groups, lanes], keys.factors.at[0, i]


def start(data, keys: Keys, plan, indices, queries, barrier) -> None:
    """Write what all tiles share, before the first one: the queries. The parameters are those of
    `rope.start`.

    Args:
        keys: References to shared memory; `raw` is written.
        queries: The queries in registers, [D, R] float32."""
    del data, plan, indices, barrier
    put_transposed(keys.raw.at[0], queries.astype(jnp.bfloat16))


def prepare(keys: Keys, plan, quad: Quad, queries) -> None:
    """Write the queries times the scales of each of a quad's groups, once the keys of its tile have
    arrived.

    Args:
        keys: References to shared memory; `scaled` is written.
        queries: The queries in registers, [D, R] float32."""
    groups, together = _groups(plan)
    for i in range(groups):
        scale = numbers(load(keys.factors.at[0, quad.part * groups + i], ROWS, optimized=False))
        scaled_queries = queries * lax.broadcast_in_dim(scale, queries.shape, [0])
        rows = pl.ds(i % together * plan.rows, plan.rows)
        put_transposed(keys.scaled.at[i // together, rows], scaled_queries.astype(jnp.bfloat16))


def _constants(keys: Keys, plan, quad: Quad, number: int):
    """Compute sum(q s), [64, R] or [64, 2R], and q . m, [64, R], of the product with this `number`
    among those of a quad with groups of their own. Both stand on all rows."""
    shape = (STEP, plan.spec.head_dim)
    groups, together = _groups(plan)
    ones = plgpu.layout_cast(jnp.ones(shape, jnp.bfloat16), plgpu.Layout.WGMMA)
    minima = []
    for i in range(together):
        group = quad.part * groups + number * together + i
        low = load(keys.factors.at[1, group], COLUMNS, optimized=False)
        low = lax.broadcast_in_dim(lax.bitcast_convert_type(low, jnp.bfloat16), shape, [1])
        minima.append(product((low, keys.raw)))
    zero = minima[0] if together == 1 else by_half(*minima)
    return product((ones, keys.scaled.at[number])), zero


def scores(keys: Keys, plan, quad: Quad, table) -> list:
    """Compute the scores of a quad, before the factor D^-1/2.

    Args:
        table: Not used: uniform codes have no signposts.

    Returns:
        q . k of the tokens of every step, [64, R] each."""
    del table
    bits = plan.spec.key_bits
    groups, together = _groups(plan)
    products = groups // together
    constants = [_constants(keys, plan, quad, i) for i in range(products)]
    numbers_of_steps = [step * products // STEPS for step in range(STEPS)]
    wide = [
        -gpu_unpack.base(step, bits) * constants[number][0]
        for step, number in enumerate(numbers_of_steps)
    ]
    for first in range(0, plan.spec.head_dim, CHANNELS_AT_ONCE):
        lanes = pl.ds(first, CHANNELS_AT_ONCE)
        nibbles = gpu_unpack.key_nibbles([x.at[:, lanes] for x in keys.codes], bits, quad)
        for step, number in enumerate(numbers_of_steps):
            queries = keys.scaled.at[number, :, lanes]
            wide[step] += product((gpu_unpack.codes(nibbles, step, bits), queries))
    return [
        row_halves(x, plan.rows) + constants[number][1]
        for x, number in zip(wide, numbers_of_steps, strict=True)
    ]
