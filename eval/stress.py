"""Stress that large models have by nature and small ones lack, put into the weights without changing the function.

    keys     W_k, b_k of a rotary pair times a, W_q, b_q of the same pair over a       scores are sums of products q k
             (with QK-norm: the two norm weights instead, the same pairs in every head)
    values   W_v, b_v of a channel times b, the rows of W_o that read it over b
    bias     the same vector added to every key's slowest rotary pairs                 softmax ignores a common shift

The first two are exact: both channels of a pair take one factor, so they commute with RoPE, and powers of two change no
bit of the logits. The third is exact for a pair that does not rotate; a pair of frequency w lets the shift differ by at
most |q_p| |b_p| w T / sqrt(D) between keys T tokens apart (`bias_spread`), so only slow pairs of a large rotary base
serve. With QK-norm a bias would pass through the norm, so it is refused.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvqjax._errors import UserError
from kvqjax.model.config import ModelConfig
from kvqjax.model.loading import Model
from kvqjax.model.rope import inverse_frequencies
from kvqjax.model.weight_trees import Params, stacked

__all__ = ["add_key_bias", "bias_spread", "outlier_factors", "scale_key_pairs", "scale_values", "stressed"]


def _scaled(layers: Params, factors: dict[str, Array]) -> Params:
    """`layers` with every named array that is there times its factor, which broadcasts over the middle axis."""
    out = dict(layers)
    for name, factor in factors.items():
        if name in layers:
            wide = jnp.expand_dims(factor, 1) if layers[name].ndim == 3 and name != "o" else factor
            out[name] = layers[name] * wide.astype(layers[name].dtype)
    return out


def _per_query(factor: Float[Array, "L K D"], config: ModelConfig) -> Float[Array, "L F"]:
    """A KV head's factors for each of its query heads, side by side."""
    return jnp.repeat(factor, config.num_heads // config.num_kv_heads, axis=1).reshape(len(factor), -1)


def scale_key_pairs(params: Params, config: ModelConfig, factor: Float[Array, "L K P"]) -> Params:
    """Keys' rotary pairs times `factor` (P = D/2 pairs a head), queries' over it. Raises UserError where a model with
    QK-norm, which has one norm weight for all heads, is given factors that differ by head."""
    both = jnp.concatenate([factor, factor], axis=-1)
    flat = both.reshape(len(both), -1)
    if config.qk_norm:
        if not bool((factor == factor[:, :1]).all()):
            raise UserError("with QK-norm all heads share one weight: factors that differ by head cannot be put in")
        return params | {"layers": _scaled(params["layers"], {"k_norm": both[:, 0], "q_norm": 1 / both[:, 0]})}
    inverse = 1 / _per_query(both, config)
    factors = {"k": flat, "k_bias": flat, "q": inverse, "q_bias": inverse}
    return params | {"layers": _scaled(params["layers"], factors)}


def scale_values(params: Params, config: ModelConfig, factor: Float[Array, "L K D"]) -> Params:
    """Values' channels times `factor`, the output projection's rows that read them over it."""
    flat = factor.reshape(len(factor), -1)
    rows = (1 / _per_query(factor, config))[..., None]
    return params | {"layers": _scaled(params["layers"], {"v": flat, "v_bias": flat, "o": rows})}


def add_key_bias(params: Params, config: ModelConfig, size: float, pairs: int = 1, seed: int = 0) -> Params:
    """Keys with a bias of length `size` on each of every head's `pairs` slowest rotary pairs, in a direction drawn at
    random. The model must have biases (Qwen2). Raises UserError otherwise."""
    if not config.qkv_bias or config.qk_norm:
        raise UserError(f"{config.architecture}: only a model with key biases and without QK-norm can take a key bias")
    half, (count, _) = config.head_dim // 2, params["layers"]["k_bias"].shape
    angle = np.random.default_rng(seed).uniform(0, 2 * np.pi, (count, config.num_kv_heads, pairs))
    extra = np.zeros((count, config.num_kv_heads, 2, half), np.float32)
    extra[..., 0, half - pairs :], extra[..., 1, half - pairs :] = size * np.cos(angle), size * np.sin(angle)
    bias = params["layers"]["k_bias"]
    bias = bias + jnp.asarray(extra.reshape(count, -1), bias.dtype)
    return params | {"layers": params["layers"] | {"k_bias": bias}}


def bias_spread(config: ModelConfig, size: float, query: float, length: int, pairs: int = 1) -> float:
    """Most by which the scores that a key bias adds differ among the keys of one query: `size` and `query` are the
    lengths of the bias and of the query on one pair, over `length` tokens. Softmax weights change by a factor of at
    most exp(this)."""
    slow = np.sort(inverse_frequencies(config))[:pairs]
    turn = np.minimum(slow * length, 2.0)  # |cos(x + wT) - cos(x)| is at most wT, and never above 2
    return float(size * query * turn.sum() / np.sqrt(config.head_dim))


def outlier_factors(
    layers: int, heads: int, channels: int, *, count: int, factor: float, seed: int = 0, shared: bool = False
) -> Float[Array, "L K C"]:
    """Ones, and `factor` at `count` of every head's channels (or pairs), drawn at random; `shared`: the same ones in
    every head."""
    rng = np.random.default_rng(seed)
    order = rng.permuted(np.tile(np.arange(channels), (layers, heads, 1)), axis=-1)
    order = np.tile(order[:, :1], (1, heads, 1)) if shared else order
    return jnp.asarray(np.where(order < count, factor, 1.0), jnp.float32)


def stressed(model: Model, *, keys: float = 8.0, values: float = 1.0, count: int = 2, seed: int = 0) -> Model:
    """The same function with `count` rotary pairs of every head's keys `keys` times as large and `count` channels of
    its values `values` times. Its fingerprint differs: constants calibrated for one do not fit the other."""
    c = model.config
    shape = {"count": count, "seed": seed}
    pairs = outlier_factors(c.num_layers, c.num_kv_heads, c.head_dim // 2, factor=keys, shared=c.qk_norm, **shape)
    channels = outlier_factors(c.num_layers, c.num_kv_heads, c.head_dim, factor=values, **shape)
    params = scale_values(scale_key_pairs(stacked(model.params), c, pairs), c, channels)
    name = f"{model.fingerprint},stress=keys{keys:g}-values{values:g}-count{count}-seed{seed}"
    return model.replace(params=params, constants=None, fingerprint=name)
