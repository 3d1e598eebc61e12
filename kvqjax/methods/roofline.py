"""What a decode step costs, and where it stops hiding rematerialisation behind memory traffic (XQuant, arXiv
2508.10395, section 3.4). A multiply-accumulate counts as two operations.

Per layer and cached token, KD = kv_width <= E:  X: 4 E KD;  latents: 4 KD^2;  a difference at full width: 4 E KD + 2 E;
a difference in latents: 8 E KD (up-projection and [W_k|W_v]); AQUA-KV's linear predictors: 6 KD^2. The papers' formulas
are these with KD = d/g. They make keys and values anew; a step of few tokens sums XQuant's stored values first and
multiplies the sum (wiring.SharedValues), and then spends about half of it.

One sequence: every step reads the layers' 16-bit weights once and the cache once, and computes what it does not store.
Attention's own products and the head are left out, as XQuant's paper leaves them out.
"""

import math
from typing import NamedTuple

from kvqjax.codecs import bits_per_value
from kvqjax.methods.aqua_cost import predictor_operations
from kvqjax.methods.aqua_wiring import AquaLayer
from kvqjax.methods.spec import LayerSpec, Method
from kvqjax.methods.xquant_cl_wiring import CrossLayer
from kvqjax.methods.xquant_wiring import LayerInput, input_width
from kvqjax.model.config import KVShape, ModelConfig

__all__ = [
    "StepCost",
    "flops_by_layer",
    "flops_per_token",
    "layer_cost",
    "layer_flops",
    "longest_memory_bound",
    "step_cost",
]

Number = int | float


class StepCost(NamedTuple):
    """`flops` and `cache_bytes` per cached token (a multiply-accumulate is two operations; scales count, the
    accumulator of XQuant-CL as stored and loaded once), `weight_bytes` per step."""

    flops: Number
    cache_bytes: Number
    weight_bytes: Number


def layer_flops(spec: LayerSpec, config: KVShape) -> int:
    """Operations that one layer spends on one cached token per read; 0 where keys and values themselves are stored."""
    if not isinstance(spec, LayerInput | CrossLayer):
        return predictor_operations(spec, config) if isinstance(spec, AquaLayer) else 0
    width = input_width(config)
    full, square = 4 * width * config.kv_width, 4 * min(width, config.kv_width) * config.kv_width
    if isinstance(spec, LayerInput):
        return square if spec.uses_latents(config) else full
    if spec.start:
        return full
    return 2 * full if spec.uses_latents(config) else full + 2 * width


def flops_per_token(method: Method, config: KVShape) -> int:
    """Operations per generated token and cached token, all layers: times the context length, the price of one step."""
    return sum(flops_by_layer(method, config))


def flops_by_layer(method: Method, config: KVShape) -> tuple[int, ...]:
    """`layer_flops` of every layer; AQUA-KV without a copy computes a layer once more for every layer above it."""
    layers = enumerate(method.layers(config))
    anew = lambda spec, i: config.num_layers - i if isinstance(spec, AquaLayer) and spec.copy == "none" else 1  # noqa: E731
    return tuple(anew(spec, i) * layer_flops(spec, config) for i, spec in layers)


def layer_cost(spec: LayerSpec, config: ModelConfig) -> StepCost:
    """One layer of one decode step, calibrated constants as 16-bit weights."""
    wiring = spec.build(config.layer(0))
    bits = sum(bits_per_value(codec) * codec.width for codec in wiring.storage.codecs.values())
    if isinstance(spec, CrossLayer) and not spec.start:
        stored = {"float32": 32, "bfloat16": 16}.get(spec.accumulator) or int(spec.accumulator)
        bits += stored * config.width
    matrices = 2 * config.width * config.query_width + config.mlp_numbers
    matrices += sum(math.prod(shape) for names in wiring.wanted().values() for shape in names.values())
    if not (isinstance(spec, LayerInput) and spec.uses_latents(config)):  # there U takes the place of W_k and W_v
        matrices += 2 * config.width * config.kv_width
    return StepCost(layer_flops(spec, config), bits / 8, 2 * matrices)


def step_cost(method: Method, config: ModelConfig) -> StepCost:
    """All layers of one decode step."""
    costs = [layer_cost(spec, config) for spec in method.layers(config)]
    _, cached, weights = (sum(part) for part in zip(*costs, strict=True))
    return StepCost(flops_per_token(method, config), cached, weights)


def longest_memory_bound(cost: StepCost, ridge: Number) -> float:
    """Cached tokens up to which a step is bound by memory traffic, inf where it always is: the paper's equations 3 and
    4 solved for l. ridge: the device's operations per byte, peak over bandwidth."""
    spare = cost.flops - ridge * cost.cache_bytes
    return math.inf if spare <= 0 else ridge * cost.weight_bytes / spare
