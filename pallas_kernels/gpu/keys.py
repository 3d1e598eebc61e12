"""Compute scores of packed keys after RoPE in a Hopper kernel.

With codes c, scales s and minima m of a group's channels, and codes that are unpacked to 2^e + c
(`unpack`):

    q . k = (q s) . (2^e + c) - 2^e sum(q s) + q . m

Keys may be multiplied by a factor f of their token (OScaR, KVarN). Or they have a scale s and a
minimum m of their token instead of their channels (OSCAR). Both are numbers of the rows of a
product, so that they are applied to its result:

    q . k = f ((q s) . (2^e + c) - 2^e sum(q s) + q . m)
    q . k = s (q . (2^e + c) - 2^e sum(q)) + m sum(q)

Or codes stand for signposts v (`lookup`), and keys have a scale of their token alone (TurboQuant):

    q . k = s (q . v)

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

from kvqjax.pallas_kernels.gpu import lookup as gpu_lookup
from kvqjax.pallas_kernels.gpu import unpack as gpu_unpack
from kvqjax.pallas_kernels.gpu.parts import (
    COLUMNS,
    load,
    numbers_of_rows,
    product,
    put_transposed,
    row_halves,
    tiled,
)
from kvqjax.pallas_kernels.gpu.unpack import STEP, STEPS, Quad
from kvqjax.pallas_kernels.gpu.words import HALF, beside

CHANNELS_AT_ONCE = 64  # channels whose words are loaded at a time


class Keys(NamedTuple):
    """Shared memory for the keys of a tile."""

    codes: tuple  # of [1, 32, D] u32, one per plane set
    # [1, 2, N, D] u16: scales and minima of the N groups of a tile; None where tokens have them
    factors: Any
    raw: Any  # [1, 1, R, D] bf16: the queries
    # [1, products, R, D] bf16: the queries times the scales of a quad's groups. Products of one
    # group share them; a product of two groups has [2R, D]. None as above.
    scaled: Any
    # [1, n, 1, steps, 64] u16: the n numbers of each of a tile's tokens; None where there are none
    tokens: Any


def _groups(plan) -> tuple[int, int]:
    """Count the groups of a quad, and those of one product. Where keys have scales per token, a
    quad is one group, whose queries have no scales."""
    if not plan.spec.key_group:
        return 1, 1
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
    factors = scaled = tokens = None
    if plan.spec.key_group:
        groups, together = _groups(plan)
        factors = plgpu.SMEM((1, 2, plan.groups, dim), jnp.uint16)
        scaled = tiled((1, groups // together, together * rows, dim), jnp.bfloat16)
    if plan.key_numbers:
        tokens = plgpu.SMEM((1, plan.key_numbers, 1, plan.steps, STEP), jnp.uint16)
    raw = tiled((1, 1, rows, dim), jnp.bfloat16)
    return Keys(words(plan), factors, raw, scaled, tokens)


def copies(data, keys: Keys, plan, indices, tile):
    """List the copies that bring a tile's keys to shared memory.

    Args:
        indices: The numbers of layer, row and KV head.

    Yields:
        (source, target) of every copy."""
    yield from word_copies(data.key_codes, keys.codes, plan, indices, tile)
    if plan.spec.key_group:
        sources = data.key_scale, data.key_low
        yield from factor_copies(sources, keys.factors, plan, indices, tile)
    # Heads may share the numbers of a token.
    first = indices[2] if plan.head_numbers else 0
    yield from token_copies(data.key_tokens, keys.tokens, plan, indices, tile, pl.ds(first, 1))


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


def factor_copies(sources: tuple, target, plan, indices, tile):
    """List the copies of numbers that each channel has for a group of a tile's tokens.

    Args:
        sources: References to numbers, [L, B, S/group, K*D] each.
        target: A reference to shared memory, [n, N, D], with a place for each source.
        indices: The numbers of layer, row and KV head.

    Yields:
        (source, target) for every source."""
    layer, row, head = indices
    lanes = pl.ds(head * plan.spec.head_dim, plan.spec.head_dim)
    groups = pl.ds(tile * plan.groups, plan.groups)
    for i, source in enumerate(sources):
        yield source.at[layer, row, groups, lanes], target.at[0, i]


def token_copies(sources: tuple, target, plan, indices, tile, slices):
    """List the copies of numbers that each of a tile's tokens has.

    Args:
        sources: References to numbers, [L, B, all slices, S/64, 64] each.
        target: A reference to shared memory, [n, slices, steps, 64], with a place for each source.
        indices: The numbers of layer, row and KV head.
        slices: The slices that are copied.

    Yields:
        (source, target) for every source."""
    layer, row, _ = indices
    steps = pl.ds(tile * plan.steps, plan.steps)
    for i, source in enumerate(sources):
        yield source.at[layer, row, slices, steps], target.at[0, i]


def start(data, keys: Keys, plan, indices, queries, barrier) -> None:
    """Write what all tiles share, before the first one: the queries. The parameters are those of
    `rope.start`.

    Args:
        keys: References to shared memory; `raw` is written.
        queries: The queries in registers, [D, R] float32."""
    del data, plan, indices, barrier
    put_transposed(keys.raw.at[0, 0], queries.astype(jnp.bfloat16))


def prepare(keys: Keys, plan, quad: Quad, queries) -> None:
    """Write the queries times the scales of each of a quad's groups, once the keys of its tile have
    arrived.

    Args:
        keys: References to shared memory; `scaled` is written.
        queries: The queries in registers, [D, R] float32."""
    if not plan.spec.key_group:
        return
    groups, together = _groups(plan)
    for i in range(groups):
        scale = numbers_of_rows(keys.factors.at[0, quad.part * groups + i], queries)
        scaled_queries = queries * scale
        rows = pl.ds(i % together * plan.rows, plan.rows)
        put_transposed(keys.scaled.at[i // together, rows], scaled_queries.astype(jnp.bfloat16))


def _constants(keys: Keys, plan, quad: Quad, number: int) -> tuple:
    """Compute what is the same for all tokens of a group.

    Args:
        number: That of the product, among those of a quad with groups of their own.

    Returns:
        sum(q s) and q . m on all rows, [64, R] or [64, 2R] each. Where keys have scales per token,
        these are sum(q) and 0."""
    shape = (STEP, plan.spec.head_dim)
    groups, together = _groups(plan)
    ones = plgpu.layout_cast(jnp.ones(shape, jnp.bfloat16), plgpu.Layout.WGMMA)
    if not plan.spec.key_group:
        return product((ones, keys.raw.at[0])), 0.0
    minima = []
    for i in range(together):
        group = quad.part * groups + number * together + i
        low = load(keys.factors.at[1, group], COLUMNS, optimized=False)
        low = lax.broadcast_in_dim(lax.bitcast_convert_type(low, jnp.bfloat16), shape, [1])
        minima.append(product((low, keys.raw.at[0])))
    zero = minima[0] if together == 1 else beside(*minima)
    return product((ones, keys.scaled.at[number])), zero


def scores(keys: Keys, plan, quad: Quad, table) -> list:
    """Compute the scores of a quad, before the factor D^-1/2.

    Args:
        table: A reference to the signposts' table (`lookup.table_words`); None for uniform codes.

    Returns:
        q . k of the tokens of every step, [64, R] each."""
    bits = plan.spec.key_bits
    groups, together = _groups(plan)
    products = groups // together
    scaled = keys.scaled if plan.spec.key_group else keys.raw
    numbers_of_steps = [step * products // STEPS for step in range(STEPS)]
    out: list[Any] = [0.0] * STEPS
    totals = (None,) * STEPS
    if not plan.signposts:  # these come without 2^e and without minima
        constants = [_constants(keys, plan, quad, i) for i in range(products)]
        totals, zeros = zip(*(constants[number] for number in numbers_of_steps), strict=True)
        out = [zeros[i] - gpu_unpack.base(i, bits) * totals[i] for i in range(STEPS)]
    for first in range(0, plan.spec.head_dim, CHANNELS_AT_ONCE):
        lanes = pl.ds(first, CHANNELS_AT_ONCE)
        nibbles = gpu_unpack.key_nibbles([x.at[:, lanes] for x in keys.codes], bits, quad)
        lefts = gpu_lookup.decode(nibbles, table, bits)
        for step, (number, left) in enumerate(zip(numbers_of_steps, lefts, strict=True)):
            out[step] += product((left, scaled.at[number, :, lanes]))
            # A step is finished before the codes of the next one are unpacked: with all steps
            # unfinished, the kernel for groups of 32 spills registers.
            if first + CHANNELS_AT_ONCE == plan.spec.head_dim:
                out[step] = _finish(keys, plan, quad, step, out[step], totals[step])
    return out


def _finish(keys: Keys, plan, quad: Quad, step: int, wide, total):
    """Apply the numbers of a step's tokens to their scores.

    Args:
        wide: q . k without these numbers, [64, R], or [64, 2R] for two groups.
        total: sum(q) on all rows, where keys have scales per token.

    Returns:
        q . k, [64, R]."""
    score = row_halves(wide, plan.rows)
    place = quad.part * STEPS + step
    if plan.key_numbers:
        score *= numbers_of_rows(keys.tokens.at[0, 0, place], score)
    if plan.key_numbers == 2:
        score += numbers_of_rows(keys.tokens.at[1, 0, place], score) * total
    return score
