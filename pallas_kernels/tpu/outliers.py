"""Add to scores and outputs what KVQuant's outliers change in them, in the TPU decode-attention
kernel.

The dense codes decode channel w of a token to s T[c] + m, where c is the code and T the signposts.
The scale s and the centre m belong to the channel for keys, to the token for values. An outlier o
replaces this number. Scores are linear in keys, and outputs are linear in values. So it is enough
to attend to the dense numbers, and to add what the difference d = o - s T[c] - m contributes.

The code c need not be read. An outlier lies outside the range of the signposts, so its code is that
of the first or of the last signpost, whichever lies on its side of the centre m. (The stored centre
of a value is rounded. An outlier may lie inside the range by the rounding error. Its nearest
signpost is still the outermost one.)

A slot holds one outlier of a token: its value o and its channel w. Let h be the lane group of
channel w, l the lane within the group (128 lanes, of one head or several), and t the token, counted
from the first of its block. With y and y~ as in `rope`, and softmax weights p:

    score_h,t += d (cos(t)_l y_l + sin(t)_l y~_l)         y_l is gathered along the lanes, for a slot of 128 tokens
    out_h,l   += sum over t with channel l of p_h,t d     see `outlier_values`

Slots are stored with tokens on the lanes, as scales are, and are brought into lane order like
scales."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from kvqjax.pallas_kernels.tpu.call import memory
from kvqjax.pallas_kernels.tpu.columns import aligned, dot, filled, key_rows, loop, zero_beyond
from kvqjax.pallas_kernels.tpu.plan import LANES, SHARE, Plan
from kvqjax.pallas_kernels.tpu.rope import turned

# Taylor coefficients of sin(2 pi x) / x in powers of x^2. Five terms are 4e-6 off at most for |x|
# <= 1/4.
SINE = [(-1) ** k * (2 * math.pi) ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(5)]


def padded(slots: int) -> int:
    """Round `slots` up to whole registers of 16-bit numbers, which have 16 rows."""
    return -(-slots // 16) * 16


def scratch(plan: Plan) -> dict:
    """Declare working memory for R slots of a token (padded): P lane groups, M query rows, S tokens
    of the tile."""
    spec, scores = plan.spec, (plan.lane_groups, plan.rows, plan.tile)
    keys, values = padded(spec.key_slots), padded(spec.value_slots)
    buffers = {}
    if keys:
        buffers["added"] = memory(*scores)  # [P, M, S]: what outliers of keys add to the scores
        # [3R, S]: values, lanes and lane groups, in lane order
        buffers["key_slots"] = memory(3 * keys, plan.tile)
        # [2R, S]: cos | sin of the slots' lanes and tokens
        buffers["waves"] = memory(2 * keys, plan.tile)
        # [2R, S]: what one lane group's outliers change, times cos | sin
        buffers["changes"] = memory(2 * keys, plan.tile)
    if values:
        buffers["weights"] = memory(*scores)  # [P, M, S]: softmax weights of all lane groups
        buffers["value_slots"] = memory(3 * values, plan.tile)
        # What the outliers of 128 tokens change in each lane group.
        buffers["shares"] = memory(SHARE, values, LANES)
    if buffers:
        # Slots of one period before they are brought into lane order, for keys and for values in
        # turn.
        buffers["staged"] = memory(3 * max(keys, values), plan.period, dtype=jnp.bfloat16)
    return buffers


def prepare(refs, plan: Plan, tile) -> None:
    """Write values, lanes and lane groups of the tile's outliers with tokens in lane order."""
    body = refs.body
    spec = plan.spec
    if body.key_outliers is not None:
        _order_slots(refs, plan, tile, body.key_outliers, refs.key_slots, spec.key_slots)
    if body.value_outliers is not None:
        _order_slots(refs, plan, tile, body.value_outliers, refs.value_slots, spec.value_slots)


def _order_slots(refs, plan: Plan, tile, stored, slots, count: int) -> None:
    """Write the tile's outliers, `count` slots a token in [1, 1, rows, S] u16, to `slots` [3R, S]
    in lane order."""

    def bring(number):
        """Order the slots of one period of tokens: a product with the one-hot matrix permutes its
        lanes."""
        _stage(refs.staged, stored, plan, tile, number, slots.shape[0] // 3, count)
        staged = refs.staged[: slots.shape[0]]
        slots[:, aligned(number, plan.period)] = dot(staged, refs.onehot[...], 0)

    # A loop: all of a tile's words at once would not fit the registers.
    loop(plan.tile // plan.period, bring)


def _stage(staged, stored, plan: Plan, tile, number, rows: int, count: int) -> None:
    """Write values, lanes and lane groups of one period's slots one below the other, `rows` rows
    for each.

    They are written as bfloat16 without loss: values have 16 bits as stored, lanes and lane groups
    are small integers."""
    # Rows of padding would bring stale memory, NaN included, into the product.
    staged[...] = jnp.zeros(staged.shape, staged.dtype)
    # `count` rows of values, as bits of bfloat16 numbers, then `count` rows of channels.
    words = stored[0, 0, :, aligned(number, plan.period)].astype(jnp.int32)
    # The bits of a bfloat16 number are the upper 16 bits of the equal float32 number.
    values = jax.lax.bitcast_convert_type(words[:count] << 16, jnp.float32)
    channels = words[count : 2 * count]
    lanes = channels & (LANES - 1)
    lane_groups = jax.lax.shift_right_logical(channels, jnp.int32(LANES.bit_length() - 1))
    parts = (values, lanes.astype(jnp.float32), lane_groups.astype(jnp.float32))
    first_token = tile * plan.tile + number * plan.period
    for i, part in enumerate(parts):
        numbers = part.astype(jnp.bfloat16)
        if plan.slots % plan.tile:  # the last tile reaches beyond the body
            numbers = zero_beyond(numbers, first_token, plan.slots, 1)
        staged[i * rows : i * rows + numbers.shape[0]] = numbers


def rates(plan: Plan) -> np.ndarray:
    """Return full turns per position on every lane of a lane group, [1, W] float32."""
    radians = np.tile(plan.frequencies, 2 * plan.shared)[None]
    return (radians / (2 * np.pi)).astype(np.float32)


def _cosine(turns):
    """Compute cos(2 pi turns)."""
    # Less its nearest integer, an angle is at most half a turn in size. cos(2 pi a) = sin(2 pi (1/4
    # - |a|)), and 1/4 - |a| lies within the range of `SINE`.
    x = 0.25 - jnp.abs(turns - jnp.floor(turns + 0.5))
    square = x * x
    series = jnp.full(x.shape, SINE[-1])
    for factor in reversed(SINE[:-1]):
        series = series * square + factor
    return x * series


def _take(table, lanes):
    """Gather table[i, lanes[i]] along the lanes, [8, 128] at a time; `table` is [8, 128], `lanes`
    [8n, 128]."""
    rows = [
        jnp.take_along_axis(table, lanes[first : first + 8], axis=1, mode="promise_in_bounds")
        for first in range(0, lanes.shape[0], 8)
    ]
    return jnp.concatenate(rows)


def split(slots):
    """Split slots [3R, n] into values, lanes and lane groups."""
    return jnp.split(slots, 3)


def difference(value, scale, centre, ends, part: int):
    """Return outliers less the numbers that their codes decode to: d of the module's docstring.

    Args:
        value: Outliers.
        scale: Scales of their channels or tokens, of the same shape.
        centre: Centres likewise.
        ends: Reference [2, 2] to the lowest and the highest signpost of keys and of values.
        part: 0 for keys, 1 for values."""
    end = jnp.where(value > centre, ends[part, 1], ends[part, 0])
    return value - scale * end - centre


def add_keys(refs, plan: Plan) -> None:
    """Write to `added` [P, M, S] what the outliers of keys add to the scores of every lane
    group."""
    refs.added[...] = jnp.zeros(refs.added.shape)
    rate = jnp.broadcast_to(refs.rates[...], (8, LANES))
    rows = padded(plan.spec.key_slots)

    def wave(number):
        """Write cos and sin of the slots of 128 tokens. They are the same whichever lane group a
        slot belongs to."""
        tokens = aligned(number, LANES)
        # The places of these tokens in their block. All blocks have the same order.
        places = aligned(jax.lax.rem(number, jnp.int32(plan.block // LANES)), LANES)
        _, lane, _ = split(refs.key_slots[:, tokens])
        index = lane.astype(jnp.int32)
        token = jnp.broadcast_to(refs.order[:, places].astype(jnp.float32), index.shape)
        turns = _take(rate, index) * token
        cos = _cosine(turns)
        sin = _cosine(turns - 0.25)  # a sine is a cosine a quarter turn later
        refs.waves[:rows, tokens] = cos
        refs.waves[rows:, tokens] = sin

    loop(plan.tile // LANES, wave)
    loop(plan.lane_groups, lambda group: _add_group(refs, plan, group))


def _add_group(refs, plan: Plan, group) -> None:
    """Compute `added` for one lane group."""
    rows = padded(plan.spec.key_slots)
    # A channel has one scale and centre for all tokens. Their query rows are equal, and a gather
    # takes 8 of them.
    scale, centre = key_rows(refs, plan, group, 0)
    scale = scale[:8]
    centre = centre[:8]
    for first in range(0, plan.tile, LANES):
        tokens = slice(first, first + LANES)
        value, lane, owner = split(refs.key_slots[:, tokens])
        index = lane.astype(jnp.int32)
        change = difference(value, _take(scale, index), _take(centre, index), refs.ends, 0)
        # Slots of other lane groups, and unused slots, change nothing.
        change = jnp.where(owner == group.astype(jnp.float32), change, 0.0)
        refs.changes[:rows, tokens] = change * refs.waves[:rows, tokens]
        refs.changes[rows:, tokens] = change * refs.waves[rows:, tokens]
    for index in range(plan.blocks):
        # y and y~ as halves of one word: a single gather fetches both.
        y, partner = turned(refs, plan, group, index)
        pairs = pltpu.pack_elementwise([y, partner], packed_dtype=jnp.bfloat16)
        for first in range(index * plan.block, (index + 1) * plan.block, LANES):
            refs.added[group, :, first : first + LANES] += _gathered(refs, plan, pairs, first)


def _gathered(refs, plan: Plan, pairs, first: int):
    """Return what the slots of 128 tokens, from token `first` of the tile on, add to the scores of
    a lane group.

    `pairs` holds y in the lower and y~ in the upper halves of words, [M, 128]. The result is [M,
    128]."""
    rows = padded(plan.spec.key_slots)
    tokens = slice(first, first + LANES)

    def row_of(ref, row: int):
        """Load one row onto the 8 rows of a register, as a gather wants it: [8, 128]."""
        return jnp.broadcast_to(ref[row : row + 1, tokens], (8, LANES))

    total = 0.0
    for slot in range(plan.spec.key_slots):
        # Behind the values of all slots come their lanes.
        lane = row_of(refs.key_slots, rows + slot)
        cos = row_of(refs.changes, slot)  # d cos(t)
        sin = row_of(refs.changes, rows + slot)  # d sin(t)
        words = _take_rows(pairs, lane.astype(jnp.int32))
        y = jax.lax.bitcast_convert_type(words << jnp.uint32(16), jnp.float32)
        partner = jax.lax.bitcast_convert_type(words & jnp.uint32(0xFFFF0000), jnp.float32)  # y~
        total = total + y * filled(cos, plan) + partner * filled(sin, plan)
    return total


def _take_rows(table, index):
    """Gather table[:, index] for a table [M, 128] and an index [8, 128] of equal rows."""
    rows = [
        jnp.take_along_axis(table[first : first + 8], index, axis=1, mode="promise_in_bounds")
        for first in range(0, table.shape[0], 8)
    ]
    return jnp.concatenate(rows)
