"""Put stress into a model's weights that large models have by nature and small ones lack; the
function stays.

    keys     W_k, b_k of a rotary pair times a, W_q, b_q of the same pair over a       scores are sums of products q k
             (with QK-norm: the two norm weights instead, the same pairs in every head)

This is exact: both channels of a pair take one factor, so it commutes with RoPE, and powers of two
change no bit of the logits.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvqjax._errors import UserError
from kvqjax.model.config import ModelConfig
from kvqjax.model.loading import Model
from kvqjax.model.weight_trees import Params, stacked


def scale_key_pairs(params: Params, config: ModelConfig, factor: Float[Array, "L K P"]) -> Params:
    """Multiply keys' rotary pairs by factors, and divide queries' pairs by them. Scores stay as
    they are.

    Args:
        params: weights, with an axis of layers.
        config: the model's.
        factor: of every layer's KV heads, for each of the P = D/2 pairs of channels.

    Returns:
        The weights with the factors in them.

    Raises:
        UserError: the factors differ by head, and the model has QK-norm: one norm weight for all
        heads."""
    # Channels i and i + D/2 are a pair, and take one factor.
    channel_factor = jnp.concatenate([factor, factor], axis=-1)
    flat = channel_factor.reshape(len(channel_factor), -1)
    # A KV head's factors are those of all query heads that read it.
    query_factor = jnp.repeat(channel_factor, config.num_heads // config.num_kv_heads, axis=1)
    inverse = (1 / query_factor).reshape(len(channel_factor), -1)
    if config.qk_norm:
        # The norm divides out a factor of the matrix. Its own weight comes after it.
        if not bool((factor == factor[:, :1]).all()):
            raise UserError(
                "with QK-norm all heads share one weight: factors that differ by head cannot be put in"
            )
        factors = {"k_norm": channel_factor[:, 0], "q_norm": 1 / channel_factor[:, 0]}
    else:
        factors = {"k": flat[:, None], "k_bias": flat, "q": inverse[:, None], "q_bias": inverse}
    layers = params["layers"]
    # A model without biases has no such weights, and needs none.
    scaled = {
        name: layers[name] * x.astype(layers[name].dtype)
        for name, x in factors.items()
        if name in layers
    }
    return params | {"layers": layers | scaled}


def outlier_factors(
    config: ModelConfig, *, count: int, factor: float, shared: bool = False
) -> Float[Array, "L K P"]:
    """Make the factors of `scale_key_pairs`: one for most pairs, `factor` for a few that are drawn
    at random.

    Args:
        config: the model's.
        count: how many pairs of a head get `factor`.
        factor: of these pairs.
        shared: whether all heads of a layer have the same pairs.

    Returns:
        The factors of every layer's KV heads."""
    rng, shape = np.random.default_rng(0), (config.num_layers, config.num_kv_heads, 1)
    # A head's pairs in random order: those with the numbers below `count` are drawn.
    order = rng.permuted(np.tile(np.arange(config.head_dim // 2), shape), axis=-1)
    if shared:
        order = np.tile(order[:, :1], (1, config.num_kv_heads, 1))
    return jnp.asarray(np.where(order < count, factor, 1.0), jnp.float32)


def stressed(model: Model, keys: float = 8.0) -> Model:
    """Return the same function with two rotary pairs of every head's keys `keys` times as large.
    Its fingerprint
    differs: constants calibrated for one do not fit the other."""
    pairs = outlier_factors(model.config, count=2, factor=keys, shared=model.config.qk_norm)
    params = scale_key_pairs(stacked(model.params), model.config, pairs)
    return model.replace(
        params=params, constants=None, fingerprint=f"{model.fingerprint},stress=keys{keys:g}"
    )


def under(model: Model, stress: str) -> Model:
    """Put a model under a stress: "none" or "keys x8"."""
    return model if stress == "none" else stressed(model)
