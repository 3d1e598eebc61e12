"""Add what outliers of values change in the outputs of the TPU decode-attention kernel (see
`outliers`).

A slot of a token names a lane, to which the token's softmax weight times its change is to be added.
This scatter is a matrix product: a one-hot matrix says which lane each of 128 tokens names. Lanes
are counted within a lane group, so that one matrix serves several lane groups. In each of them the
changes of other groups' channels are 0."""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvqjax.pallas_kernels.tpu.columns import aligned, dot, filled, load_row, loop
from kvqjax.pallas_kernels.tpu.outliers import difference, padded, split
from kvqjax.pallas_kernels.tpu.plan import LANES, SHARE, Plan


def add_values(refs, plan: Plan) -> None:
    """Add what outliers of values change to the running outputs, once the weights of all lane
    groups are known."""
    # Lane groups that share the one-hot matrices of a column.
    heads = math.gcd(plan.lane_groups, SHARE)
    columns = plan.tile // LANES

    def step(turn):
        """Work off one column of 128 tokens for `heads` lane groups."""
        first = jax.lax.div(turn, jnp.int32(columns)) * heads
        column = jax.lax.rem(turn, jnp.int32(columns))
        _add_column(refs, plan, first, heads, column)

    loop(plan.lane_groups // heads * columns, step)


def _add_column(refs, plan: Plan, first, heads: int, column) -> None:
    """Add the part of 128 tokens of the tile, column number `column`, for `heads` lane groups from
    `first` on."""
    rows = padded(plan.spec.value_slots)
    total = jnp.zeros((heads * plan.rows, LANES))
    tokens = aligned(column, LANES)

    # What each slot changes, in the lane group of its channel only.
    value, _, owner = split(refs.value_slots[:, tokens])
    # A token has one scale and minimum for all channels, and so for all its slots: [slots, 128].
    scale, low = (
        jnp.concatenate([load_row(ref, 0, 1, column, LANES)] * (rows // 8))
        for ref in (refs.scales, refs.lows)
    )
    change = difference(value, scale, low, refs.ends, 1)
    for i in range(heads):
        refs.shares[i] = jnp.where(owner == (first + i).astype(jnp.float32), change, 0.0)

    weights = refs.weights.at[pl.ds(first, heads), :, tokens]
    # Slots of one product, so many that its depth fills the matrix unit.
    at_once = plan.chip.matrix_lanes // LANES
    for slot in range(0, plan.spec.value_slots, at_once):
        slots = range(slot, min(slot + at_once, plan.spec.value_slots))
        scaled = jnp.concatenate([_scaled(weights, refs.shares, plan, i) for i in slots], axis=1)
        lanes = [
            jnp.broadcast_to(refs.value_slots[rows + i : rows + i + 1, tokens], (8, LANES))
            for i in slots
        ]
        onehot = jnp.concatenate([_onehot(lane) for lane in lanes], axis=1)
        total = total + dot(scaled, onehot, 1)
    for i in range(heads):
        refs.out[0, 0, first + i] += total[i * plan.rows : (i + 1) * plan.rows]


def _scaled(weights, shares, plan: Plan, slot: int):
    """Multiply the weights of n lane groups [n, M, 128] by what a slot changes in each: [n*M, 128]
    bfloat16."""
    rows = (
        filled(jnp.broadcast_to(shares[i, slot : slot + 1], (8, LANES)), plan)
        for i in range(weights.shape[0])
    )
    return jnp.concatenate([weights[i] * share for i, share in enumerate(rows)]).astype(
        jnp.bfloat16
    )


def _onehot(lane):
    """Return [128 lanes, 128 tokens] bfloat16 with 1 where a token's slot names the lane; `lane` is
    [8, 128] of equal rows."""
    row = jax.lax.broadcasted_iota(jnp.int32, lane.shape, 0).astype(jnp.float32)
    # One register of 8 lanes for 128 tokens after the other. All numbers are small integers, which
    # float32 compares.
    ones = [jnp.where(lane - first == row, 1.0, 0.0) for first in range(0, LANES, 8)]
    return jnp.concatenate(ones).astype(jnp.bfloat16)
