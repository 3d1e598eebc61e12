"""Sum up packed values under their softmax weights in a Hopper kernel. One scale and minimum per token fold into the
weights. The 64 rows of a product are channels, its inner dimension is 64 tokens."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvqjax.pallas_kernels.gpu import keys as gpu_keys
from kvqjax.pallas_kernels.gpu import lookup as gpu_lookup
from kvqjax.pallas_kernels.gpu import unpack as gpu_unpack
from kvqjax.pallas_kernels.gpu.parts import CHANNELS, ROWS, along, load, numbers, put_transposed, tiled
from kvqjax.pallas_kernels.gpu.unpack import STEP, STEPS, Quad

__all__ = ["Values", "copies", "memory", "weigh", "write_weights"]


class Values(NamedTuple):
    """Shared memory for the values of a tile."""

    codes: tuple  # of [1, 32, D] u32, one per plane set
    factors: Any  # [1, 2, steps, 64] u16: scales and minima of a tile
    weights: Any  # [1, 4, R, 64] bf16: of a quad


def memory(plan) -> Values:
    """Declare the shared memory of `Values`."""
    factors = plgpu.SMEM((1, 2, plan.tile // STEP, STEP), jnp.uint16)
    return Values(gpu_keys.words(plan), factors, tiled((1, STEPS, plan.rows, STEP), jnp.bfloat16))


def copies(data, values: Values, plan, indices, tile):
    """Yield (source, target) of everything that a tile's values need."""
    yield from gpu_keys.word_copies(data.value_codes, values.codes, plan, indices, tile)
    layer, row, head = indices
    steps, owner = plan.tile // STEP, head if plan.own_scales else 0
    for i, source in enumerate((data.value_scale, data.value_low)):
        yield source.at[layer, row, owner, pl.ds(tile * steps, steps)], values.factors.at[0, i]


def write_weights(values: Values, plan, quad: Quad, scores, peak):
    """Write a quad's softmax weights times the values' scales; `peak` is the running maximum. Return two sums over the
    steps, [64, R] each: of the weights, and of what every channel gets (weight times minimum, less what the codes' 2^e
    adds)."""
    total = low = jnp.zeros_like(scores[0])
    for step, score in enumerate(scores):
        weight = jnp.exp2(score - along(peak, score))
        factors = (values.factors.at[i, quad.part * STEPS + step] for i in range(2))
        scale, zero = (numbers(load(x, ROWS, optimized=False)) for x in factors)
        scale, zero = (lax.broadcast_in_dim(x, weight.shape, [0]) for x in (scale, zero))
        rounded = (weight * scale).astype(jnp.bfloat16)
        put_transposed(values.weights.at[step], rounded)
        total, low = total + weight, low + weight * zero
        if not plan.signposts:
            low = low - gpu_unpack.base(step, plan.spec.value_bits) * rounded.astype(jnp.float32)
    return total, low


def weigh(values: Values, plan, quad: Quad, table) -> tuple:
    """Sum the codes of a quad, or the signposts they index, under their weights: [64, R] for every 64 channels."""
    bits = plan.spec.value_bits

    def run(acc, first):
        words = [x.at[:, pl.ds(first, CHANNELS)] for x in values.codes]
        nibbles = gpu_unpack.value_nibbles(words, bits, quad)
        if plan.signposts:
            lefts = gpu_lookup.look_up(nibbles, table, bits)
        else:  # one after the other, not all at once: they take registers
            lefts = (gpu_unpack.codes(nibbles, step, bits) for step in range(STEPS))
        for step, left in enumerate(lefts):
            plgpu.wgmma(acc, left, values.weights.at[step].transpose((1, 0)))
            plgpu.wgmma_wait(0)
        return acc[...]

    shape = plgpu.ACC((CHANNELS, plan.rows), jnp.float32)
    starts = range(0, plan.spec.head_dim, CHANNELS)
    return tuple(pl.run_scoped(lambda acc, first=first: run(acc, first), shape) for first in starts)
