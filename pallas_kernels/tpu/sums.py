"""Sum up softmax weights and values of a lane group in the TPU decode-attention kernel, a block at
a time.

A value is r e + n, with its code e, scale r and minimum n. With softmax weights p the sum of values
is

    sum_t (p_t r_t) e_t + sum_t p_t n_t

The first sum is a matrix product. The second one has no channels within a slice, and is summed lane
by lane.

A value slice is a stretch of a head's channels with a value scale of its own; most forms have one
slice a head. Sums are made for every slice's scales on all lanes, and `fold` picks for every lane
those of its own slice.

Shapes as in `kernel`: M query rows of a lane group, W its lanes, S tokens of the tile. Scores are
base-2 logarithms."""

import jax
import jax.numpy as jnp

from kvqjax.pallas_kernels.tpu.call import Refs
from kvqjax.pallas_kernels.tpu.columns import (
    Place,
    aligned,
    columns,
    dot,
    lane_wise,
    of_heads,
    pick,
    quotient,
)
from kvqjax.pallas_kernels.tpu.plan import LANES


def no_sums(plan):
    """Return empty sums.

    Returns:
        (sums of the weights [M, 128], sums of weights times minima, [M, 128] for every value slice,
        sums of weighted codes [slices*M, W]). `fold` adds up the 128 lanes of the first two."""
    zeros = jnp.zeros((plan.rows, LANES))
    return (
        zeros,
        [zeros] * plan.value_slices,
        jnp.zeros((plan.value_slices * plan.rows, plan.lanes)),
    )


def own_rows(ref, plan, place: Place, part: int, column):
    """Load the value scales, or minima, of a column of tokens, each on the rows of its head's
    queries.

    Args:
        ref: Reference to scales or minima in lane order, [S/128 * C, 128].
        part: Number of the value slice in every head.
        column: Number of the column's first 128 tokens.

    Returns:
        [M, column] float32."""
    spec = plan.spec
    # The number of the lane group's first value group, then the number of each head's counted from
    # it.
    first = jax.lax.div(place.group * plan.lanes, jnp.int32(spec.value_group))
    groups = (
        (head * spec.head_dim + part * spec.value_slice) // spec.value_group
        for head in range(plan.shared)
    )
    return of_heads(ref, plan, (first + number for number in groups), plan.value_rows, column)


def weights_of(refs: Refs, plan, peak, blocks):
    """Yield the softmax weights of the tile's blocks number `blocks`, [M, column] at a time. `peak`
    [M, 1] is the running maximum, this tile's scores included."""
    for index in blocks:
        for number in plan.columns(index):
            yield jnp.exp2(refs.scores[:, aligned(number, plan.column)] - peak)


def add_sums(refs: Refs, plan, place: Place, weights, blocks, sums):
    """Add weights, weighted minima and weighted codes of the tile's blocks number `blocks` to
    `sums`, a column at a time. Yield the sums so far.

    Args:
        weights: Softmax weights as `weights_of` yields them.
        sums: As `no_sums` returns them."""
    weights_left = iter(weights)
    total, lows, product = sums
    slices = range(plan.value_slices)
    bits = plan.spec.value_bits
    for index in blocks:
        code_columns = columns(
            refs.body.value_codes, refs.value_signposts, bits, place, index, plan, plan.mixed
        )
        for number, codes in zip(plan.columns(index), code_columns, strict=True):
            weight = next(weights_left)  # [M, column]
            first = number * (plan.column // LANES)
            if (
                plan.spec.value_slots
            ):  # `outlier_values` reads the weights once all lane groups have theirs
                refs.weights[place.group, :, aligned(number, plan.column)] = weight
            total = total + lane_wise(jnp.add, weight)

            # Each slice has scales and minima of its own, and so weights of its own.
            scaled = [weight * own_rows(refs.scales, plan, place, part, first) for part in slices]
            minima = [weight * own_rows(refs.lows, plan, place, part, first) for part in slices]
            lows = [low + lane_wise(jnp.add, x) for low, x in zip(lows, minima, strict=True)]

            # The scaled weights of all slices meet the same codes: [slices*M, column] @ [column,
            # W].
            product = product + dot(jnp.concatenate(scaled).astype(jnp.bfloat16), codes, 0)
            yield total, lows, product


def fold(refs: Refs, plan, place: Place, peak, sums):
    """Add a tile's sums to the running sums of its lane group, after rescaling the running sums to
    the new running maximum `peak` [M, 1]."""
    total, lows, product = sums
    group = place.group
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, plan.lanes), 1)
    # The number of each lane's value slice within its head, [1, W].
    own_slice = jax.lax.rem(
        quotient(lane, plan.spec.value_slice), jnp.full_like(lane, plan.value_slices)
    )
    slices = list(range(plan.value_slices))
    by_slice = jnp.split(product, plan.value_slices)  # [M, W] each
    codes_sum = pick(by_slice, own_slice, slices)
    minima_sum = pick([low.sum(-1, keepdims=True) for low in lows], own_slice, slices)
    update = codes_sum + minima_sum
    # A row that has seen no token yet adds meaningless sums here: all its scores are NEVER, so that
    # all its weights are 1. Once it sees a token, its rescale factor is 0 and removes them.
    rescale = jnp.exp2(refs.peak[group] - peak)
    refs.peak[group] = peak
    refs.total[group] = refs.total[group] * rescale + total.sum(-1, keepdims=True)
    refs.out[0, 0, group] = refs.out[0, 0, group] * rescale + update
