"""Sum packed values under their softmax weights in a Hopper kernel.

With a weight p, scale s and minimum m of each token, and codes that are unpacked to 2^e + c
(`unpack`):

    sum p (s c + m) = sum (p s) (2^e + c) + sum (p m - 2^e p s)

The first sum is a product of weights p s with unpacked codes. The second one is the same for all
channels that share scales (`State.low` of `parts`). The 64 rows of a product are channels. Its
inner dimension is 64 tokens.

Signposts come without 2^e, and without minima the second sum is left out.

Where channels have factors f of their own for each group of tokens (KVarN), the sums of a group are
multiplied by them before they are added to those of other groups:

    sum over groups of f (sum (p s) (2^e + c) - 2^e sum (p s) + sum p m)

All channels need the second and third sum then, at the end of each group. These are products too,
whose left operands have equal numbers: -2^e and 1.

A slice are the channels of a head that share a scale. Slices of 32 channels are two to a product:
the weights of both stand side by side as its columns, and the upper rows take the results of one,
the lower rows those of the other."""

import functools
import itertools
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvqjax.pallas_kernels.gpu import keys as gpu_keys
from kvqjax.pallas_kernels.gpu import lookup as gpu_lookup
from kvqjax.pallas_kernels.gpu import unpack as gpu_unpack
from kvqjax.pallas_kernels.gpu.parts import (
    CHANNELS,
    along,
    numbers_of_rows,
    put_transposed,
    row_halves,
    tiled,
)
from kvqjax.pallas_kernels.gpu.unpack import STEP, STEPS, Quad


class Values(NamedTuple):
    """Shared memory for the values of a tile."""

    codes: tuple  # of [1, 32, D] u32, one per plane set
    # [1, 2 or 1, slices, steps, 64] u16: scales, and minima where there are any, of a tile's tokens
    factors: Any
    # [1, 4, products, R, 64] bf16: softmax weights times scales of a quad's tokens, for every
    # product with scales of its own; [2R, 64] for a product of two slices. With factors of channels
    # the weights times minima are one more.
    weights: Any
    channels: Any  # [1, 1, N, D] u16: factors of channels for the N groups of a tile; None without


def memory(plan) -> Values:
    """Declare the shared memory of `Values`.

    Returns:
        The declarations, in the places of the references."""
    slices, together = plan.slices
    factors = plgpu.SMEM((1, plan.value_numbers, slices, plan.steps, STEP), jnp.uint16)
    entries, channels = slices // together, None
    if plan.spec.value_factors:
        entries += 1
        channels = plgpu.SMEM((1, 1, plan.groups, plan.spec.head_dim), jnp.uint16)
    shape = (1, STEPS, entries, together * plan.rows, STEP)
    return Values(gpu_keys.words(plan), factors, tiled(shape, jnp.bfloat16), channels)


def copies(data, values: Values, plan, indices, tile):
    """List the copies that bring a tile's values to shared memory, as `keys.copies` does those of
    keys."""
    yield from gpu_keys.word_copies(data.value_codes, values.codes, plan, indices, tile)
    # Heads may share a slice.
    first = lax.div(indices[2] * plan.spec.head_dim, plan.spec.value_group)
    slices = pl.ds(first, plan.slices[0])
    sources = (data.value_scale, data.value_low)[: plan.value_numbers]
    yield from gpu_keys.token_copies(sources, values.factors, plan, indices, tile, slices)
    yield from gpu_keys.factor_copies(data.value_factors, values.channels, plan, indices, tile)


def write_weights(values: Values, plan, quad: Quad, scores, peak):
    """Write a quad's softmax weights times the values' scales.

    Args:
        values: References to shared memory; `weights` is written.
        scores: The scores of every step as base-2 logarithms, [64, R] each.
        peak: The running maximum of the scores, [R].

    Returns:
        Two sums over the steps: of the weights p, [64, R], and of p m - 2^e p s, [64, R] for every
        slice; none where `weigh` sums all, and without minima."""
    slices, together = plan.slices
    total = jnp.zeros_like(scores[0])
    low = [total] * plan.low_slices
    for step, score in enumerate(scores):
        weight = jnp.exp2(score - along(peak, score))  # [64, R]
        total = total + weight
        for i in range(slices):
            factors = values.factors.at[:, i, quad.part * STEPS + step]
            scale, *minima = (
                numbers_of_rows(factors.at[j], weight) for j in range(plan.value_numbers)
            )
            scaled_weight = (weight * scale).astype(jnp.bfloat16)
            rows = pl.ds(i % together * plan.rows, plan.rows)
            put_transposed(values.weights.at[step, i // together, rows], scaled_weight)
            if plan.spec.value_factors:
                lowered = (weight * minima[0]).astype(jnp.bfloat16)
                put_transposed(values.weights.at[step, 1], lowered)
            elif plan.spec.minima:
                low[i] = low[i] + weight * minima[0]
                # What 2^e adds is taken off with the rounded numbers that the product has.
                # Signposts come without 2^e.
                if not plan.signposts:
                    base = gpu_unpack.base(step, plan.spec.value_bits)
                    low[i] = low[i] - base * scaled_weight.astype(jnp.float32)
    return total, tuple(low)


def weigh(values: Values, plan, quad: Quad, table) -> tuple:
    """Sum the unpacked codes of a quad, or the signposts that they stand for, under the weights of
    `write_weights`.

    Args:
        table: A reference to the signposts' table (`lookup.table_words`); None for uniform codes.

    Returns:
        The sums, transposed: [64, R] for every 64 channels."""
    bits = plan.spec.value_bits
    slices, together = plan.slices
    products = plan.spec.head_dim // CHANNELS
    # The steps of a sum: those of a group of tokens where channels have factors for it.
    count = plan.spec.key_group // STEP if plan.spec.value_factors else STEPS
    wide = plgpu.ACC((CHANNELS, together * plan.rows), jnp.float32)

    def run(acc, lefts, entry: int):
        for step, left in lefts:
            plgpu.wgmma(acc, left, values.weights.at[step, entry].transpose((1, 0)))
            if plan.spec.value_factors:
                _add_shared(acc, values, plan, step)
            plgpu.wgmma_wait(0)
        return row_halves(acc[...], plan.rows)

    sums = []
    for number in range(products):
        entry, lanes = number * (slices // together) // products, pl.ds(number * CHANNELS, CHANNELS)
        nibbles = gpu_unpack.value_nibbles([x.at[:, lanes] for x in values.codes], bits, quad)
        lefts = enumerate(gpu_lookup.decode(nibbles, table, bits))
        parts = []
        for group in range(STEPS // count):
            steps = itertools.islice(lefts, count)
            part = pl.run_scoped(functools.partial(run, lefts=steps, entry=entry), wide)
            if plan.spec.value_factors:
                place = quad.part * (STEPS // count) + group
                part *= numbers_of_rows(values.channels.at[0, place, lanes], part)
            parts.append(part)
        sums.append(functools.reduce(operator.add, parts))
    return tuple(sums)


def _add_shared(acc, values: Values, plan, step: int) -> None:
    """Add sum p m - 2^e sum (p s) of a step to all channels."""
    numbers = -gpu_unpack.base(step, plan.spec.value_bits), 1.0
    for entry, number in enumerate(numbers):
        equal = jnp.full((CHANNELS, STEP), number, jnp.bfloat16)
        left = plgpu.layout_cast(equal, plgpu.Layout.WGMMA)
        plgpu.wgmma(acc, left, values.weights.at[step, entry].transpose((1, 0)))
