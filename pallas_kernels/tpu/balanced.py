"""Sum up weights and values in the TPU decode-attention kernel where values are multiplied by factors f per channel c
of every group g of tokens (KVarN):

    out_c = sum_g f_gc (sum_t p_t r_t e_tc + sum_t p_t n_t)         t over the tokens of group g

A product of tokens meets several groups. So its weights are stacked once for every group, zero for the tokens of
others, and meet the same codes. Minima are added lane by lane, because the groups of lanes alternate alike in many
columns, and are told apart at the end of a block.

Shapes as in `kernel`: M query rows of a lane group, W its lanes.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp

from kvqjax.pallas_kernels.tpu.call import Refs
from kvqjax.pallas_kernels.tpu.columns import Place, columns, dot, filled, groups_met, lane_wise, load_row, owners
from kvqjax.pallas_kernels.tpu.plan import LANES
from kvqjax.pallas_kernels.tpu.sums import own_rows

__all__ = ["add_balanced_sums"]


class Met(NamedTuple):
    """The groups of tokens that one column meets, counted from its block's first. `lanes` lists the groups of the
    tokens on every 128 lanes. `own` is 1 where a token belongs to the group of a row, else 0: [groups * M, column]."""

    groups: list[int]
    lanes: list[tuple[int, ...]]
    own: Any


def _add(sums: dict, key, x) -> None:
    """Add `x` to the sum of this key."""
    sums[key] = sums[key] + x if key in sums else x


def _met(refs: Refs, plan) -> tuple[list[Met], dict]:
    """List what each column of a block meets. Also return masks [M, 128], by the tuple of groups on 128 lanes and then
    by group: columns whose lanes alternate alike share them."""
    masks: dict[tuple, dict] = {}
    out = []
    zeros = jnp.zeros((plan.rows, LANES))
    for i, numbers in enumerate((plan.order // plan.group).reshape(-1, plan.column // LANES, LANES)):
        lanes, met = [tuple(map(int, x)) for x in numbers], groups_met(plan, i)
        for n, names in enumerate(lanes):
            if names not in masks:
                row = jnp.broadcast_to(owners(refs, plan, i)[:, n * LANES : (n + 1) * LANES], (plan.rows, LANES))
                masks[names] = {group: row == group for group in sorted(set(names))}
        members = [[jnp.where(masks[x][group], 1.0, zeros) if group in x else zeros for x in lanes] for group in met]
        out.append(Met(met, lanes, jnp.concatenate([jnp.concatenate(row, axis=1) for row in members])))
    return out, masks


def _stacked(scaled, plan, met: Met):
    """Stack a column's weights once for every group that it meets, with zeros for tokens of the others: [groups * M,
    column] bfloat16."""
    rows = jnp.concatenate([scaled] * len(met.groups))
    # Where the vector unit has bfloat16 it multiplies two rows at once.
    if plan.wide:
        return (rows * met.own).astype(jnp.bfloat16)
    return rows.astype(jnp.bfloat16) * met.own.astype(jnp.bfloat16)


def _by_group(products: dict) -> dict:
    """Add up, for every group, the parts of stacked products that belong to it. `products` [groups * M, W] come by the
    tuple of their groups; the result is [M, W] by group."""
    sums = {}
    for groups, stacked in products.items():
        for group, part in zip(groups, jnp.split(stacked, len(groups)), strict=True):
            _add(sums, group, part)
    return sums


def _block_sums(refs: Refs, plan, place: Place, index, products: dict, minima: dict, masks: dict):
    """Yield what each group of a block adds to the output, [M, W]: its channels' factors times the sum of its weighted
    codes and of its weighted minima."""
    sums = _by_group(products)
    for group, number in enumerate(plan.groups(index)):
        terms = [jnp.where(masks[names][group], low, 0.0) for names, low in minima.items() if group in names]
        low = functools.reduce(operator.add, terms).sum(-1, keepdims=True)
        factor = load_row(refs.channel_factors, number, plan.key_rows, place.column, plan.lanes)
        yield filled(factor, plan) * (sums[group] + low)


def add_balanced_sums(refs: Refs, plan, place: Place, weights, blocks, sums):
    """Do what `sums.add_sums` does. What minima add is in the product already."""
    waiting, (block_columns, masks) = iter(weights), _met(refs, plan)
    total, lows, product = sums
    for index in blocks:
        products, minima = {}, {}
        code_columns = columns(refs.body.value_codes, None, plan.spec.value_bits, place, index, plan, plan.mixed)
        for met, number, codes in zip(block_columns, plan.columns(index), code_columns, strict=True):
            weight, first = next(waiting), number * (plan.column // LANES)
            total = total + lane_wise(jnp.add, weight)
            scaled, low = (weight * own_rows(ref, plan, place, 0, first) for ref in (refs.scales, refs.lows))
            for names, part in zip(met.lanes, jnp.split(low, len(met.lanes), axis=1), strict=True):
                _add(minima, names, part)
            _add(products, tuple(met.groups), dot(_stacked(scaled, plan, met), codes, 0))
            if met is block_columns[-1]:
                terms = _block_sums(refs, plan, place, index, products, minima, masks)
                product = functools.reduce(operator.add, terms, product)
            yield total, lows, product
