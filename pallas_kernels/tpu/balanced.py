"""Sum up weights and values in the TPU decode-attention kernel where values have factors (KVarN).

A value is f (r e + n), with its code e, the scale r and minimum n of its token, and a factor f for
each channel c of every group g of tokens. With softmax weights p:

    out_c = sum_g f_gc (sum_t p_t r_t e_tc + sum_t p_t n_t)         t over the tokens of group g

A column, the tokens of one matrix product, has tokens of several groups. So the column's weights
are stacked once for every group that it meets, with zeros for the tokens of other groups. The
stacked weights meet the same codes.

Minima are summed lane by lane. Which groups the tokens on 128 lanes belong to, and in which order,
is alike in many columns. Weighted minima of such columns are added up first. Groups are told apart
at the end of a block.

Shapes as in `kernel`: M query rows of a lane group, W its lanes.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp

from kvqjax.pallas_kernels.tpu.call import Refs
from kvqjax.pallas_kernels.tpu.columns import (
    Place,
    columns,
    dot,
    filled,
    groups_met,
    lane_wise,
    load_row,
    owners,
)
from kvqjax.pallas_kernels.tpu.plan import LANES
from kvqjax.pallas_kernels.tpu.sums import own_rows


class Met(NamedTuple):
    """The groups of tokens that one column meets, counted from its block's first group.

    Attributes:
        groups: Their numbers.
        lanes: For every 128 lanes of the column, the groups of the tokens on these lanes.
        own: [groups * M, column] float32: 1 where a token belongs to the group of the row, else
        0."""

    groups: list[int]
    lanes: list[tuple[int, ...]]
    own: Any


def _add(sums: dict, key, x) -> None:
    """Add `x` to the sum of this key."""
    sums[key] = sums[key] + x if key in sums else x


def _met(refs: Refs, plan) -> tuple[list[Met], dict]:
    """Find the groups that each column of a block meets.

    Returns:
        (what each column meets, masks). masks[pattern][group] is a mask [M, 128] of the lanes whose
        tokens belong to the group. `pattern` is the tuple of the groups on 128 lanes. Columns with
        the same pattern share masks."""
    masks: dict[tuple, dict] = {}
    block_columns = []
    zeros = jnp.zeros((plan.rows, LANES))

    def own_rows_of(group: int, patterns: list[tuple]):
        """Make the M rows of `own` for one group, as a list of [M, 128]."""
        return [
            jnp.where(masks[pattern][group], 1.0, zeros) if group in pattern else zeros
            for pattern in patterns
        ]

    group_of_token = (plan.order // plan.group).reshape(-1, plan.column // LANES, LANES)
    for i, numbers in enumerate(group_of_token):
        patterns = [tuple(map(int, x)) for x in numbers]
        met = groups_met(plan, i)
        for n, pattern in enumerate(patterns):
            if pattern not in masks:
                owner = owners(refs, plan, i)[:, n * LANES : (n + 1) * LANES]
                row = jnp.broadcast_to(owner, (plan.rows, LANES))
                masks[pattern] = {group: row == group for group in sorted(set(pattern))}
        members = [own_rows_of(group, patterns) for group in met]
        own = jnp.concatenate([jnp.concatenate(row, axis=1) for row in members])
        block_columns.append(Met(met, patterns, own))
    return block_columns, masks


def _stacked(scaled, plan, met: Met):
    """Stack a column's weights [M, column] once for every group that it meets, with zeros for the
    tokens of other groups: [groups * M, column] bfloat16."""
    rows = jnp.concatenate([scaled] * len(met.groups))
    # Where the vector unit has bfloat16 it multiplies two rows at once.
    if plan.wide:
        return (rows * met.own).astype(jnp.bfloat16)
    return rows.astype(jnp.bfloat16) * met.own.astype(jnp.bfloat16)


def _by_group(products: dict) -> dict:
    """Add up the products of every group.

    Args:
        products: Stacked products [groups * M, W], by the tuple of their groups.

    Returns:
        Sums [M, W], by group."""
    sums = {}
    for groups, stacked in products.items():
        for group, part in zip(groups, jnp.split(stacked, len(groups)), strict=True):
            _add(sums, group, part)
    return sums


def _block_sums(refs: Refs, plan, place: Place, index, products: dict, minima: dict, masks: dict):
    """Yield what each group of a block adds to the output, [M, W]: its channels' factors times the
    sum of its weighted codes and of its weighted minima.

    Args:
        index: Number of the block in its tile.
        products: Stacked products of weights and codes, by the tuple of their groups.
        minima: Weighted minima [M, 128], by the pattern of groups on these lanes.
        masks: As `_met` returns them."""
    sums = _by_group(products)
    for group, number in enumerate(plan.groups(index)):
        terms = [
            jnp.where(masks[pattern][group], low, 0.0)
            for pattern, low in minima.items()
            if group in pattern
        ]
        low = functools.reduce(operator.add, terms).sum(-1, keepdims=True)
        factor = load_row(refs.channel_factors, number, plan.key_rows, place.column, plan.lanes)
        yield filled(factor, plan) * (sums[group] + low)


def add_balanced_sums(refs: Refs, plan, place: Place, weights, blocks, sums):
    """Do what `sums.add_sums` does. What minima add is put into the sum of values, and `lows` stay
    as they are."""
    weights_left = iter(weights)
    block_columns, masks = _met(refs, plan)
    total, lows, product = sums
    for index in blocks:
        products, minima = {}, {}  # of this block, as `_block_sums` wants them
        code_columns = columns(
            refs.body.value_codes, None, plan.spec.value_bits, place, index, plan, plan.mixed
        )
        for met, number, codes in zip(
            block_columns, plan.columns(index), code_columns, strict=True
        ):
            weight = next(weights_left)  # [M, column]
            first = number * (plan.column // LANES)
            total = total + lane_wise(jnp.add, weight)
            scaled, low = (
                weight * own_rows(ref, plan, place, 0, first) for ref in (refs.scales, refs.lows)
            )
            for pattern, part in zip(
                met.lanes, jnp.split(low, len(met.lanes), axis=1), strict=True
            ):
                _add(minima, pattern, part)
            # Columns that meet the same groups share one sum of products.
            _add(products, tuple(met.groups), dot(_stacked(scaled, plan, met), codes, 0))
            # After a block's last column its groups are complete.
            if met is block_columns[-1]:
                terms = _block_sums(refs, plan, place, index, products, minima, masks)
                product = functools.reduce(operator.add, terms, product)
            yield total, lows, product
