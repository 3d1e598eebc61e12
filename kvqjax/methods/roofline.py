"""Counts the cost of a decode step, and the context at which rematerialisation no longer hides
behind memory traffic (XQuant, arXiv 2508.10395, section 3.4). A multiply-accumulate counts as two
operations.

Per layer and cached token, with KD = kv_width <= E (the papers' d/g):

    XQuant, X                          4 E KD
    XQuant, latents                    4 KD^2
    XQuant-CL, at full width           4 E KD + 2 E
    XQuant-CL, in latents              8 E KD            up-projection and [W_k|W_v]
    AQUA-KV, linear predictors         6 KD^2

These make keys and values anew. A step of few tokens sums XQuant's stored values first and
multiplies the sum (layer_cache.SharedValues), which takes about half of that.

What is counted is one sequence: every step reads the layers' 16-bit weights once and the cache
once, and computes what it does not store. Attention's own products and the head are left out, as
XQuant's paper leaves them out.
"""

import math
from typing import NamedTuple

from kvqjax.codecs import bits_per_value
from kvqjax.methods.layer_cache import Wiring
from kvqjax.methods.spec import LayerSpec, Method, wiring_of
from kvqjax.model.config import KVShape, ModelConfig

Number = int | float


class StepCost(NamedTuple):
    """The cost of a step."""

    flops: Number  # per cached token
    # Per cached token, scales included. XQuant-CL's accumulator is stored and loaded once.
    cache_bytes: Number
    weight_bytes: Number  # per step


def _wirings(method: Method, config: KVShape) -> list[Wiring]:
    """Build the wiring of every layer."""
    shape = config.layer(0)
    return [wiring_of(spec, shape) for spec in method.layers(config)]


def flops_per_token(method: Method, config: KVShape) -> int:
    """Count the operations of all layers per generated token and cached token. Times the context
    length they are those of one step."""
    return sum(flops_by_layer(method, config))


def flops_by_layer(method: Method, config: KVShape) -> tuple[int, ...]:
    """Count the operations that every layer spends on one cached token per read. They are 0 where
    keys and values themselves are stored."""
    return tuple(wiring.cost.operations for wiring in _wirings(method, config))


def bits_by_layer(method: Method, config: KVShape) -> tuple[float, ...]:
    """Return each layer's stored bits per number of its sources. Numbers in the compute dtype count
    as 16 bits."""
    bits = []
    for wiring in _wirings(method, config):
        numbers = sum(codec.width for codec in wiring.storage.codecs.values())
        bits.append(_stored_bits(wiring) / numbers)
    return tuple(bits)


def _stored_bits(wiring: Wiring) -> Number:
    """Count the bits that one token takes in a layer, scales included."""
    return sum(bits_per_value(codec) * codec.width for codec in wiring.storage.codecs.values())


def layer_cost(spec: LayerSpec, config: ModelConfig) -> StepCost:
    """Sum one layer of one decode step, calibrated constants as 16-bit weights."""
    wiring = wiring_of(spec, config.layer(0))
    # Constants are read beside the layer's weights, or in place of some of them (`spared`).
    matrices = config.attention_numbers + config.mlp_numbers - wiring.cost.spared
    for shapes in wiring.wanted().values():
        matrices += sum(math.prod(shape) for shape in shapes.values())
    cache_bits = _stored_bits(wiring) + wiring.cost.bits
    return StepCost(wiring.cost.operations, cache_bits / 8, 2 * matrices)


def step_cost(method: Method, config: ModelConfig) -> StepCost:
    """Sum all layers of one decode step."""
    specs = method.layers(config)
    # Layers of one spec cost the same.
    costs = {spec: layer_cost(spec, config) for spec in dict.fromkeys(specs)}
    cache_bytes = sum(costs[spec].cache_bytes for spec in specs)
    weight_bytes = sum(costs[spec].weight_bytes for spec in specs)
    return StepCost(flops_per_token(method, config), cache_bytes, weight_bytes)


def longest_memory_bound(cost: StepCost, ridge: Number) -> float:
    """Solve the paper's equations 3 and 4 for l, the cached tokens up to which memory traffic
    bounds a step.

    Args:
        cost: of the step.
        ridge: the device's operations per byte, its peak over its bandwidth.

    Returns:
        The number of tokens; infinity where memory traffic always bounds the step.
    """
    spare = cost.flops - ridge * cost.cache_bytes
    if spare <= 0:
        return math.inf
    return ridge * cost.weight_bytes / spare
