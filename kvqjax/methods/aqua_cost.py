"""What AQUA-KV costs: bits per value, properly and as the paper counts, predictor bytes, operations."""

import math

from kvqjax.codecs import bits_per_value
from kvqjax.methods.aqua_wiring import AquaLayer
from kvqjax.methods.spec import Method
from kvqjax.model.config import KVShape

__all__ = ["bits_of_table_1", "predictor_bytes", "predictor_operations", "proper_bits"]

STORED = {"codes": 4, "scale": 2, "low": 2}  # bytes per element; everything else is 16-bit as the paper counts it

MULTIPLIED = {"weight": 1, "down": 1, "up": 1, "codes": 8}  # multiply-accumulates per stored element


def _layers(method: Method, config: KVShape) -> list[AquaLayer]:
    layers = [layer for layer in method.layers(config) if isinstance(layer, AquaLayer)]
    if len(layers) != config.num_layers:
        raise ValueError(f"{method}: not AQUA-KV in every layer")
    return layers


def _bits(layer: AquaLayer, config: KVShape) -> float:
    """Mean of keys and values; "compute" dtypes count as 16 bits."""
    codecs = (spec.build(config.kv_width) for spec in (layer.key, layer.value))
    return sum(16.0 if "x" in codec.fields else bits_per_value(codec) for codec in codecs) / 2


def proper_bits(method: Method, config: KVShape) -> float:
    """Bits per value averaged over layers, the first at its own width (the paper's Tables 2 and 6 to 8)."""
    layers = _layers(method, config)
    return sum(_bits(layer, config) for layer in layers) / len(layers)


def bits_of_table_1(method: Method, config: KVShape) -> float:
    """As the paper's Tables 1 and 5 count: every layer at the later layers' width, and the first layer's bits, over L,
    on top. It counts the first layer twice; kept for comparing with those tables."""
    layers = _layers(method, config)
    return _bits(layers[-1], config) + _bits(layers[0], config) / len(layers)


def predictor_bytes(method: Method, config: KVShape) -> int:
    """Bytes of all predictors with 16-bit weights, or as stored where they are quantised."""
    total = 0
    for layer in _layers(method, config):
        for source in ("k", "v"):
            needs = layer.needs(source, config.kv_width)
            total += sum(STORED.get(name, 2) * math.prod(shape) for name, shape in needs.items())
    return total


def predictor_operations(layer: AquaLayer, config: KVShape) -> int:
    """Operations (two per multiply-accumulate) of one layer's predictors for one cached token: times the context
    length, what one generated token costs when one layer's copy is held; 0 with `copy="all"`."""
    sources = ("k", "v") if layer.copy != "all" else ()
    needs = (item for source in sources for item in layer.needs(source, config.kv_width).items())
    return sum(2 * MULTIPLIED.get(name, 0) * math.prod(shape) for name, shape in needs)
