"""Sum up softmax weights and values of a lane group in the TPU decode-attention kernel, a block at a time.

Shapes as in `kernel`: M query rows of a lane group, W its lanes, S tokens of the tile. Scores are base-2 logarithms. A
value slice is a stretch of a head's channels with a value scale of its own; most forms have one."""

import jax
import jax.numpy as jnp

from kvqjax.pallas_kernels.tpu.call import Refs
from kvqjax.pallas_kernels.tpu.columns import Place, aligned, columns, dot, lane_wise, of_heads, pick, quotient
from kvqjax.pallas_kernels.tpu.plan import LANES

__all__ = ["add_sums", "fold", "no_sums", "own_rows", "weights_of"]


def no_sums(plan):
    """Return empty sums: of the weights [M, 128]; of weights times minima, [M, 128] for every value slice; of weighted
    values [slices*M, W]."""
    zeros = jnp.zeros((plan.rows, LANES))
    return zeros, [zeros] * plan.value_slices, jnp.zeros((plan.value_slices * plan.rows, plan.lanes))


def own_rows(ref, plan, place: Place, part: int, column):
    """Load the value scales, or minima, of slice `part` of every head of the lane group, each on the rows of its head's
    queries: [M, column]. `column` is the number of the first 128 tokens."""
    spec = plan.spec
    first = jax.lax.div(place.group * plan.lanes, jnp.int32(spec.value_group))
    groups = ((head * spec.head_dim + part * spec.value_slice) // spec.value_group for head in range(plan.shared))
    return of_heads(ref, plan, (first + number for number in groups), plan.value_rows, column)


def weights_of(refs: Refs, plan, peak, blocks):
    """Yield the softmax weights of these blocks, [M, column] at a time. `peak` is the running maximum, this tile's
    included."""
    for index in blocks:
        for number in plan.columns(index):
            yield jnp.exp2(refs.scores[:, aligned(number, plan.column)] - peak)


def add_sums(refs: Refs, plan, place: Place, weights, blocks, sums):
    """Add weights, weighted minima and weighted values of these blocks to `sums`, a column at a time. Yield the sums so
    far."""
    waiting = iter(weights)
    total, lows, product = sums
    parts, bits = range(plan.value_slices), plan.spec.value_bits
    for index in blocks:
        code_columns = columns(refs.body.value_codes, refs.value_signposts, bits, place, index, plan, plan.mixed)
        for number, codes in zip(plan.columns(index), code_columns, strict=True):
            weight, first = next(waiting), number * (plan.column // LANES)
            if plan.spec.value_slots:
                refs.weights[place.group, :, aligned(number, plan.column)] = weight
            total = total + lane_wise(jnp.add, weight)
            scaled = [weight * own_rows(refs.scales, plan, place, part, first) for part in parts]
            minima = [weight * own_rows(refs.lows, plan, place, part, first) for part in parts]
            lows = [low + lane_wise(jnp.add, x) for low, x in zip(lows, minima, strict=True)]
            product = product + dot(jnp.concatenate(scaled).astype(jnp.bfloat16), codes, 0)
            yield total, lows, product


def fold(refs: Refs, plan, place: Place, peak, sums):
    """Add a tile's sums to the running ones of its lane group, after rescaling those to the new running maximum
    `peak`."""
    total, lows, product = sums
    group = place.group
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, plan.lanes), 1)
    part = jax.lax.rem(quotient(lane, plan.spec.value_slice), jnp.full_like(lane, plan.value_slices))
    parts, names = jnp.split(product, plan.value_slices), list(range(plan.value_slices))
    update = pick(parts, part, names) + pick([low.sum(-1, keepdims=True) for low in lows], part, names)
    # A row that has seen nothing yet adds rubbish here; its rescale factor is 0 once it sees a token.
    rescale = jnp.exp2(refs.peak[group] - peak)
    refs.peak[group] = peak
    refs.total[group] = refs.total[group] * rescale + total.sum(-1, keepdims=True)
    refs.out[0, 0, group] = refs.out[0, 0, group] * rescale + update
