"""Compute the scores of a lane group in the TPU decode-attention kernel, a block of the tile at a
time.

`packed` has the formulas of keys after RoPE, `rope` those of keys before RoPE. Every generator here
yields the scores of the block's columns, [M, column] float32 each: M query rows, tokens in lane
order. Scores are base-2 logarithms. The caller cuts them to limits, which masks what a row does not
see."""

import jax.numpy as jnp

from kvqjax.pallas_kernels.tpu.columns import (
    Place,
    aligned,
    columns,
    dot,
    groups_met,
    key_rows,
    of_heads,
    owners,
    pick,
)
from kvqjax.pallas_kernels.tpu.keys import halves, packed, slab_keys
from kvqjax.pallas_kernels.tpu.plan import LANES, Plan
from kvqjax.pallas_kernels.tpu.rope import rotated, turned


def _scaled_queries(refs, plan: Plan, place: Place, index):
    """Yield for each key group of a block the queries times its scales, [M, W] bf16, and what its
    minima add to every score, [M, 1] f32."""
    q = refs.queries[0, place.group].astype(jnp.float32)
    for group in plan.groups(index):
        factor, zero = key_rows(refs, plan, place.group, group)
        yield (q * factor).astype(jnp.bfloat16), (q * zero).sum(-1, keepdims=True)


def rotated_scores(refs, plan: Plan, place: Place, index):
    """Yield the scores of a block's columns, for keys stored after RoPE."""
    if plan.multiplied:
        yield from _multiplied_scores(refs, plan, place, index)
        return
    if plan.spec.key_channels:
        yield from _token_scores(refs, plan, place, index)
        return
    # One entry for each key group.
    queries, zeros = zip(*_scaled_queries(refs, plan, place, index), strict=True)
    code_columns = columns(
        refs.body.key_codes, None, plan.spec.key_bits, place, index, plan, plan.mixed
    )
    for i, codes in enumerate(code_columns):
        met, owner = groups_met(plan, i), owners(refs, plan, i)
        # A column has tokens of several key groups. The scaled queries of all of them meet all its
        # tokens in one product, [groups * M, column]. Each token then keeps the M rows of its own
        # group.
        stacked = dot(jnp.concatenate([queries[group] for group in met]), codes, 1)
        by_group = [stacked[n * plan.rows : (n + 1) * plan.rows] for n in range(len(met))]
        scores = pick(by_group, owner, met)
        yield scores + pick([zeros[group] for group in met], owner, met)


def _multiplied_scores(refs, plan: Plan, place: Place, index):
    """Yield the same scores where scales multiply the codes, not the queries."""
    code_columns = columns(refs.body.key_codes, None, plan.spec.key_bits, place, index, plan, False)
    for i, codes in enumerate(code_columns):
        if plan.wide:
            keys = packed(*halves(codes, refs, plan, place, index, i))
        else:
            keys = slab_keys(codes, refs, plan, place, index, i)
        yield dot(refs.queries[0, place.group], keys, 1) * plan.spread


def token_factors(ref, plan: Plan, place: Place, number, count: int):
    """Load a number of every token of a column, on the rows of its head's queries: [M, column].

    Args:
        ref: Reference to the numbers in lane order, [S/128 * count, 128] float32.
        number: Number of the column in the tile.
        count: Numbers that a token has: one for each KV head, or one for all of them."""
    if count > 1:
        heads = [place.group * plan.shared + head for head in range(plan.shared)]
    else:
        heads = [0]
    return of_heads(ref, plan, heads, count, number * (plan.column // LANES))


def _token_scores(refs, plan: Plan, place: Place, index):
    """Yield the scores of a block's columns for keys that have scales and minima per token."""
    queries = refs.queries[0, place.group]
    # A token's minimum is the same for all channels of a head: it adds the minimum times the sum of
    # the query.
    total = queries.astype(jnp.float32).sum(-1, keepdims=True)
    code_columns = columns(
        refs.body.key_codes, None, plan.spec.key_bits, place, index, plan, plan.mixed
    )
    for number, codes in zip(plan.columns(index), code_columns, strict=True):
        scale = token_factors(refs.key_scales, plan, place, number, plan.spec.kv_heads)
        low = token_factors(refs.key_lows, plan, place, number, plan.spec.kv_heads)
        yield dot(queries, codes, 1) * scale + total * low


def unrotated_scores(refs, plan: Plan, place: Place, index):
    """Yield the scores of a block's columns, for keys stored before RoPE."""
    # Y | y~, [M, 2W]
    queries = jnp.concatenate(turned(refs, plan, place.group, index), axis=1).astype(jnp.bfloat16)
    code_columns = columns(
        refs.body.key_codes, refs.key_signposts, plan.spec.key_bits, place, index, plan, False
    )
    for i, (number, codes) in enumerate(zip(plan.columns(index), code_columns, strict=True)):
        scores = dot(queries, rotated(codes, refs, plan, place, index, i), 1)
        tokens = aligned(number, plan.column)
        if plan.spec.key_slots:  # what outliers change in the scores
            scores = scores + refs.added[place.group, :, tokens]
        yield scores
