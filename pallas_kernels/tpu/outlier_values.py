"""Add what outliers of values change in the outputs of the TPU decode-attention kernel (see `outliers`).

Softmax weights times changes, of several lane groups at once, are multiplied by one one-hot matrix per slot that says
which lane each of 128 tokens names: a scatter as a product."""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvqjax.pallas_kernels.tpu.columns import aligned, dot, filled, load_row, loop
from kvqjax.pallas_kernels.tpu.outliers import difference, padded, split
from kvqjax.pallas_kernels.tpu.plan import LANES, SHARE, Plan

__all__ = ["add_values"]


def add_values(refs, plan: Plan) -> None:
    """Add what outliers of values change to the running outputs, once the weights of all lane groups are known."""
    heads = math.gcd(plan.lane_groups, SHARE)
    columns = plan.tile // LANES

    def step(turn):
        first = jax.lax.div(turn, jnp.int32(columns)) * heads
        column = jax.lax.rem(turn, jnp.int32(columns))
        _add_column(refs, plan, first, heads, column)

    loop(plan.lane_groups // heads * columns, step)


def _add_column(refs, plan: Plan, first, heads: int, column) -> None:
    """Add the part of 128 tokens of the tile, column number `column`, for `heads` lane groups from `first` on."""
    rows, total = padded(plan.spec.value_slots), jnp.zeros((heads * plan.rows, LANES))
    lanes = aligned(column, LANES)
    value, _, owner = split(refs.value_slots[:, lanes])
    scale, low = (
        jnp.concatenate([load_row(ref, 0, 1, column, LANES)] * (rows // 8)) for ref in (refs.scales, refs.lows)
    )
    change = difference(value, scale, low, refs.ends, 1)
    for i in range(heads):
        refs.shares[i] = jnp.where(owner == (first + i).astype(jnp.float32), change, 0.0)
    weights = refs.weights.at[pl.ds(first, heads), :, lanes]
    at_once = plan.chip.matrix_lanes // LANES  # fills the matrix unit
    for slot in range(0, plan.spec.value_slots, at_once):
        slots = range(slot, min(slot + at_once, plan.spec.value_slots))
        scaled = jnp.concatenate([_scaled(weights, refs.shares, plan, i) for i in slots], axis=1)
        lane_numbers = [jnp.broadcast_to(refs.value_slots[rows + i : rows + i + 1, lanes], (8, LANES)) for i in slots]
        total = total + dot(scaled, jnp.concatenate([_onehot(lane) for lane in lane_numbers], axis=1), 1)
    for i in range(heads):
        refs.out[0, 0, first + i] += total[i * plan.rows : (i + 1) * plan.rows]


def _scaled(weights, shares, plan: Plan, slot: int):
    """Multiply the weights of n lane groups [n, M, 128] by what a slot changes in each: [n*M, 128] bfloat16."""
    rows = (filled(jnp.broadcast_to(shares[i, slot : slot + 1], (8, LANES)), plan) for i in range(weights.shape[0]))
    return jnp.concatenate([weights[i] * share for i, share in enumerate(rows)]).astype(jnp.bfloat16)


def _onehot(lane):
    """Return [128 lanes, 128 tokens] bfloat16 with 1 where a token's slot names the lane; `lane` is [8, 128] of equal
    rows."""
    row = jax.lax.broadcasted_iota(jnp.int32, lane.shape, 0).astype(jnp.float32)
    ones = [jnp.where(lane - first == row, 1.0, 0.0) for first in range(0, LANES, 8)]
    return jnp.concatenate(ones).astype(jnp.bfloat16)
