"""Initial weights: the library's random ones, with some heads of the first layer already looking a
few tokens back.

Recall needs two steps: a head that carries the previous token, then one that looks for the same
token. Gradients find the second at once when the first is there, and very late when neither is (12
to 14 million tokens at this size).
"""

import jax
import numpy as np

from kvqjax.model.config import ModelConfig
from kvqjax.model.rope import inverse_frequencies
from kvqjax.model.weight_trees import init_params

PAIRS = 8  # fastest rotary pairs: only they tell neighbouring positions apart
CONSTANT = 0.06  # the embedding's channel 0 for every token, 3 x the deviation of the others
SLOW_PAIRS = 4
STRENGTH = 2.0  # gives the wanted position about 2 nats over its neighbours


def starting_params(
    seed: int, config: ModelConfig, offsets: tuple[int, ...], key_bias: float = 0.0
) -> dict:
    """Random float32 params in which query head i of layer 0 prefers the token `offsets[i]` places
    before it.

    A constant channel u in the keys and the same rotated by -offset in the queries: their product
    after RoPE is sum_p cos((t - s - offset) w_p), largest at s = t - offset. `key_bias` is put,
    with either sign, on the slowest pairs of every key bias, as Qwen2.5 has it: all keys of a
    window then share it, and softmax does not see it.
    """
    params = jax.tree.map(np.array, init_params(jax.random.key(seed), config))
    if key_bias:
        slow = (
            np.arange(config.kv_width) % (config.head_dim // 2) >= config.head_dim // 2 - SLOW_PAIRS
        )
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], params["layers"]["k_bias"].shape)
        params["layers"]["k_bias"] = (signs * key_bias * slow).astype(np.float32)
    if (
        config.qk_norm
    ):  # the norm fixes the length of q and k, so their product is scaled here instead
        params["layers"]["q_norm"][0] = params["layers"]["k_norm"][0] = 2.0
    params["embed"][:, 0] = CONSTANT
    half = config.head_dim // 2
    angles = inverse_frequencies(config)[:PAIRS]
    q, k = params["layers"]["q"][0, 0], params["layers"]["k"][0, 0]  # rows of channel 0: views
    for head, offset in enumerate(offsets):
        row = q[head * config.head_dim :][: config.head_dim]
        row[:PAIRS], row[half : half + PAIRS] = (
            STRENGTH * np.cos(offset * angles),
            -STRENGTH * np.sin(offset * angles),
        )
        row = k[head * config.num_kv_heads // config.num_heads * config.head_dim :][
            : config.head_dim
        ]
        row[:PAIRS], row[half : half + PAIRS] = STRENGTH, 0.0
    return params
