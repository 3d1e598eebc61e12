"""Put stress into a model's weights that large models have by nature and small ones lack; the function stays.

    keys     W_k, b_k of a rotary pair times a, W_q, b_q of the same pair over a       scores are sums of products q k
             (with QK-norm: the two norm weights instead, the same pairs in every head)
    bias     the same vector added to every key's slowest rotary pair                  softmax ignores a common shift

The first is exact: both channels of a pair take one factor, so it commutes with RoPE, and powers of two change no bit
of the logits. The second is exact for a pair that does not rotate; a pair of frequency w lets the shift differ by at
most |q_p| |b_p| w T / sqrt(D) between keys T tokens apart, so only a slow pair of a large rotary base serves. With
QK-norm a bias would pass through the norm, so it is refused.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvqjax._errors import UserError
from kvqjax.model.config import ModelConfig
from kvqjax.model.loading import Model
from kvqjax.model.weight_trees import Params, stacked

__all__ = ["add_key_bias", "outlier_factors", "scale_key_pairs", "stressed", "under"]

BIAS = 20.0  # length of what every key's slowest pair gets


def scale_key_pairs(params: Params, config: ModelConfig, factor: Float[Array, "L K P"]) -> Params:
    """Multiply keys' rotary pairs by `factor` (P = D/2 pairs a head), and divide queries' by it. Raises UserError where
    a model with QK-norm, which has one norm weight for all heads, is given factors that differ by head."""
    channel_factor = jnp.concatenate([factor, factor], axis=-1)
    flat = channel_factor.reshape(len(channel_factor), -1)
    shared = jnp.repeat(
        channel_factor, config.num_heads // config.num_kv_heads, axis=1
    )  # a KV head's, for its query heads
    inverse = (1 / shared).reshape(len(channel_factor), -1)
    if config.qk_norm:
        if not bool((factor == factor[:, :1]).all()):
            raise UserError("with QK-norm all heads share one weight: factors that differ by head cannot be put in")
        factors = {"k_norm": channel_factor[:, 0], "q_norm": 1 / channel_factor[:, 0]}
    else:
        factors = {"k": flat[:, None], "k_bias": flat, "q": inverse[:, None], "q_bias": inverse}
    layers = params["layers"]
    return params | {
        "layers": layers | {n: layers[n] * f.astype(layers[n].dtype) for n, f in factors.items() if n in layers}
    }


def add_key_bias(params: Params, config: ModelConfig, size: float, pairs: int = 1) -> Params:
    """Give keys a bias of length `size` on each of every head's `pairs` slowest rotary pairs, in a direction drawn at
    random. Raises UserError where the model has no biases (Qwen2 has)."""
    if not config.qkv_bias or config.qk_norm:
        raise UserError(f"{config.architecture}: only a model with key biases and without QK-norm can take a key bias")
    half, (count, _) = config.head_dim // 2, params["layers"]["k_bias"].shape
    angle = np.random.default_rng(0).uniform(0, 2 * np.pi, (count, config.num_kv_heads, pairs))
    extra = np.zeros((count, config.num_kv_heads, 2, half), np.float32)
    extra[..., 0, half - pairs :], extra[..., 1, half - pairs :] = size * np.cos(angle), size * np.sin(angle)
    bias = params["layers"]["k_bias"]
    bias = bias + jnp.asarray(extra.reshape(count, -1), bias.dtype)
    return params | {"layers": params["layers"] | {"k_bias": bias}}


def outlier_factors(config: ModelConfig, *, count: int, factor: float, shared: bool = False) -> Float[Array, "L K P"]:
    """Make ones, and `factor` at `count` of every head's rotary pairs, drawn at random; `shared`: the same ones in
    every head."""
    rng, shape = np.random.default_rng(0), (config.num_layers, config.num_kv_heads, 1)
    order = rng.permuted(np.tile(np.arange(config.head_dim // 2), shape), axis=-1)
    order = np.tile(order[:, :1], (1, config.num_kv_heads, 1)) if shared else order
    return jnp.asarray(np.where(order < count, factor, 1.0), jnp.float32)


def stressed(model: Model, keys: float = 8.0) -> Model:
    """Return the same function with two rotary pairs of every head's keys `keys` times as large. Its fingerprint
    differs: constants calibrated for one do not fit the other."""
    pairs = outlier_factors(model.config, count=2, factor=keys, shared=model.config.qk_norm)
    params = scale_key_pairs(stacked(model.params), model.config, pairs)
    return model.replace(params=params, constants=None, fingerprint=f"{model.fingerprint},stress=keys{keys:g}")


def under(model: Model, stress: str) -> Model:
    """Put a model under a stress: "none", "keys x8", or "key bias", for which one without biases gets some of zero."""
    if stress != "key bias":
        return model if stress == "none" else stressed(model)
    if not model.config.qkv_bias:
        config = dataclasses.replace(model.config, qkv_bias=True)
        sizes = {"q_bias": config.query_width, "k_bias": config.kv_width, "v_bias": config.kv_width}
        zeros = {
            name: jnp.zeros((config.num_layers, size), model.params["embed"].dtype) for name, size in sizes.items()
        }
        layers = stacked(model.params)["layers"] | zeros
        model = model.replace(config=config, params=model.params | {"layers": layers})
    return model.replace(params=add_key_bias(model.params, model.config, BIAS))
