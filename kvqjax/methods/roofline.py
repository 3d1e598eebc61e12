"""Where a decode step stops hiding its rematerialisation behind memory traffic (arXiv 2508.10395, section 3.4).

One sequence: every step reads the layers' 16-bit weights once and the cache once, and computes what it does not store.
Attention's own products and the head are left out, as the paper leaves them out.
"""

import math
from typing import NamedTuple

from kvqjax.codecs import bits_per_value
from kvqjax.config import ModelConfig
from kvqjax.methods.spec import LayerSpec, Method
from kvqjax.methods.xquant import LayerInput
from kvqjax.methods.xquant_cl import CrossLayer
from kvqjax.methods.xquant_cost import layer_flops

__all__ = ["StepCost", "layer_cost", "longest_memory_bound", "step_cost", "step_seconds"]


Number = int | float


class StepCost(NamedTuple):
    """`flops` and `cache_bytes` per cached token (a multiply-accumulate is two operations; scales count, the
    accumulator of XQuant-CL as stored and loaded once), `weight_bytes` per step."""

    flops: Number
    cache_bytes: Number
    weight_bytes: Number


def layer_cost(spec: LayerSpec, config: ModelConfig) -> StepCost:
    """One layer of one decode step, calibrated constants as 16-bit weights."""
    wiring = spec.build(config)
    bits = sum(bits_per_value(codec) * codec.width for codec in wiring.codecs.values())
    if isinstance(spec, CrossLayer) and not spec.start:
        stored = {"float32": 32, "bfloat16": 16}.get(spec.accumulator) or int(spec.accumulator)
        bits += stored * config.width
    matrices = 2 * config.width * config.query_width + 3 * config.width * config.mlp_width
    matrices += sum(math.prod(shape) for names in wiring.wanted().values() for shape in names.values())
    if not (isinstance(spec, LayerInput) and spec.uses_latents(config)):  # there U takes the place of W_k and W_v
        matrices += 2 * config.width * config.kv_width
    return StepCost(layer_flops(spec, config), bits / 8, 2 * matrices)


def step_cost(method: Method, config: ModelConfig) -> StepCost:
    """All layers of one decode step."""
    costs = [layer_cost(spec, config) for spec in method.layers(config)]
    return StepCost(*(sum(part) for part in zip(*costs, strict=True)))


def longest_memory_bound(cost: StepCost, ridge: Number) -> float:
    """Cached tokens up to which a step is bound by memory traffic, inf where it always is: the paper's equations 3 and
    4 solved for l. ridge: the device's operations per byte, peak over bandwidth."""
    spare = cost.flops - ridge * cost.cache_bytes
    return math.inf if spare <= 0 else ridge * cost.weight_bytes / spare


def step_seconds(cost: StepCost, context: Number, peak: Number, bandwidth: Number) -> tuple[float, float]:
    """Seconds of (rematerialisation, memory traffic) of a step at `context` cached tokens; the larger one binds. peak:
    operations per second; bandwidth: bytes per second."""
    return cost.flops * context / peak, (cost.weight_bytes + cost.cache_bytes * context) / bandwidth
