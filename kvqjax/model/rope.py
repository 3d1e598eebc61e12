"""Rotary position embedding in the half-split layout: pair i of a head is (channel i, channel i +
D/2)."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvqjax._errors import UserError
from kvqjax.model.config import KVShape, RopeConfig
from kvqjax.ops.xla_workarounds import made_once


def _yarn(freq: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Yarn: interpolate slow pairs, keep fast ones, with a linear ramp between the two (arXiv
    2309.00071)."""

    def correction(rotations: float) -> float:
        wavelength_ratio = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength_ratio) / (2 * math.log(rope.theta))

    low, high = correction(rope.beta_fast), correction(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return freq / rope.factor * ramp + freq * (1 - ramp)


def _llama3(freq: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Llama 3.1: wavelengths above the old context are interpolated, short ones kept, a smooth
    blend between."""
    wavelength = 2 * math.pi / freq
    turns = rope.original_max_position / wavelength - rope.low_freq_factor
    span = rope.high_freq_factor - rope.low_freq_factor
    # Llama 4: no span.
    blend = np.clip(turns / span, 0, 1) if span else (turns > 0).astype(freq.dtype)
    return (1 - blend) * freq / rope.factor + blend * freq


def _dynamic(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """NTK by length: the base grows so that the slowest pair turns as far as before over the longer
    text."""
    ratio = max(rope.length, rope.original_max_position) / rope.original_max_position
    theta = rope.theta * (rope.factor * ratio - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    return _plain(theta, head_dim)


def _plain(theta: float, head_dim: int) -> np.ndarray:
    return 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def _limits(config: KVShape) -> list[tuple[int, str]]:
    """(most tokens, kind) of the ropes of a shape whose frequencies are for texts of a certain
    length."""
    return [(rope.limit, rope.kind) for rope in config.ropes if rope.limit is not None]


def longest_text(config: KVShape) -> int | None:
    """Return the most tokens that a shape's frequencies are for; None: any number."""
    return min((limit for limit, _ in _limits(config)), default=None)


def check_length(config: KVShape, length: int):
    """Refuse texts of more tokens than a shape's frequencies are for. Raises UserError."""
    for limit, kind in _limits(config):
        if length > limit:
            raise UserError(
                f"{length} tokens are more than the {limit} that the frequencies of this model's {kind} RoPE are for",
                "load it with {rope_length}",
                rope_length=length,
            )


def inverse_frequencies(config: KVShape) -> np.ndarray:
    """Compute the angle per position of each pair, float32 [D/2], a trace-time constant."""
    rope = config.turning
    if rope is None:
        raise ValueError("a shape without a rope has no frequencies")
    turned = rope.turned_channels(config.head_dim)
    freq = _plain(rope.theta, turned)
    if rope.kind == "none":
        freq = np.zeros_like(freq)
    elif rope.kind == "linear":
        freq = freq / rope.factor
    elif rope.kind == "llama3":
        freq = _llama3(freq, rope)
    elif rope.kind == "yarn":
        freq = _yarn(freq, rope, turned)
    elif rope.kind == "dynamic":
        freq = _dynamic(rope, turned)
    elif rope.kind == "longrope":
        freq = freq / np.asarray(rope.long_factor if rope.length else rope.short_factor)
    return np.pad(freq, (0, config.head_dim // 2 - len(freq))).astype(np.float32)


def pair_factors(config: KVShape) -> float | Float[np.ndarray, " P"]:
    """Return the factor of cos and sin of each pair: the rope's factor, or 1 for pairs that never
    turn."""
    rope = config.turning
    dim = config.head_dim
    if rope is None:
        return 1.0
    turned = rope.turned_channels(dim)
    if rope.attention_factor == 1 or turned == dim:
        return rope.attention_factor
    return np.where(np.arange(dim // 2) < turned // 2, rope.attention_factor, 1).astype(np.float32)


def channel_order(head_dim: int, turned: int, pairs: str) -> Int[np.ndarray, " D"]:
    """List the channels of a head in the order of caches, in which pair i is (i, i + D/2).

    Args:
        head_dim: D, channels of a head.
        turned: how many of them turn, the first ones; an even number.
        pairs: "front" or "neighbours", as in `RopeConfig`.

    Returns:
        The channels. Those that turn come first in both halves.
    """
    front = np.arange(turned)
    if pairs == "neighbours":
        first = front[::2]
        second = front[1::2]
    else:
        first, second = np.split(front, 2)
    # Channels that never turn fill up both halves.
    first_tail, second_tail = np.split(np.arange(turned, head_dim), 2)
    return np.concatenate([first, first_tail, second, second_tail])


def _order_of(config: KVShape) -> Int[np.ndarray, " D"] | None:
    """List the channels that another model's heads have, in the order of caches; None where the
    orders are equal."""
    if config.pairs == "halves":
        return None
    turned = config.ropes[0].turned_channels(config.head_dim)
    return channel_order(config.head_dim, turned, config.pairs)


def in_halves(x: Float[Array, "*B N D"], config: KVShape) -> Float[Array, "*B N D"]:
    """Put the channels of queries or keys in the order of caches, in which pair i is (i, i + D/2).

    Args:
        x: heads in the order that `Rope.pairs` names.
        config: the shape with this rope.

    Returns:
        The heads in the order of caches. Scores stay as they are: queries and keys change alike.
    """
    order = _order_of(config)
    return x if order is None else x[..., order]


def as_given(x: Float[Array, "*B N D"], config: KVShape) -> Float[Array, "*B N D"]:
    """Undo `in_halves`: put the channels of heads in the order that `Rope.pairs` names."""
    order = _order_of(config)
    return x if order is None else x[..., np.argsort(order)]


class Waves(NamedTuple):
    """The cos and sin of every pair's angle at some tokens' positions, which `rotate` takes in
    place of these."""

    cos: Float[Array, "*B T P"]
    sin: Float[Array, "*B T P"]


def _angles(positions: Int[Array, "*B T"], config: KVShape) -> Float[Array, "*B T P"]:
    # An outer product written as einsum: rank promotion stays an error everywhere else.
    return jnp.einsum("...,p->...p", positions.astype(jnp.float32), inverse_frequencies(config))


def _waves(angles: Float[Array, "*B T P"], factor: Any) -> Waves:
    """Compute the waves of angles, times a factor or one for each pair."""
    if jnp.ndim(factor):
        factor = jnp.expand_dims(factor, tuple(range(angles.ndim - 1)))
    return Waves(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def following(
    size: int, config: KVShape
) -> Callable[[Int[Array, "B n"]], Waves | Int[Array, "B n"]]:
    """Make the function from positions [B, size], which follow each other in every row, to what
    `rotate` takes in their place. The waves of position p + i come of those of a row's first
    position p and of a table for i from 0 to size - 1, by the addition formulas: on a CPU a cosine
    takes as long as twenty products."""
    if config.turning is None:
        return lambda positions: positions
    factor = pair_factors(config)
    table = _waves(_angles(jnp.arange(size)[None], config), 1.0)

    def waves(positions):
        first = _waves(_angles(positions[:, :1], config), factor)
        cos = first.cos * table.cos - first.sin * table.sin
        sin = first.sin * table.cos + first.cos * table.sin
        return Waves(cos, sin)

    return waves


def rotate(
    x: Float[Array, "*B T N D"], positions: Int[Array, "*B T"] | Waves, config: KVShape
) -> Float[Array, "*B T N D"]:
    """Rotate N heads of T tokens to their absolute positions; without a rope they stay as they are.
    Angles, cos and sin in float32, the result in x.dtype."""
    if isinstance(positions, Waves):
        return _turned(x, positions)
    rope = config.turning
    if rope is None or rope.kind == "none":
        return x
    return _turned(x, _waves(_angles(positions, config), pair_factors(config)))


def unrotated(
    x: Float[Array, "*B T N D"], positions: Int[Array, "*B T"], config: KVShape
) -> Float[Array, "*B T N D"]:
    """Turn N heads of T tokens back from their positions. The factor that the rope multiplies by
    stays."""
    if config.turning is None or config.turning.kind == "none":
        return x
    return _turned(x, _waves(_angles(-positions, config), 1.0))


def waves_from_first(size: int, config: KVShape) -> Waves:
    """Compute what `rotate` takes in place of positions, to turn `size` tokens that follow each
    other as if the first of them had position 0. A query meets them that is turned back by the
    first one's true position (`unrotated`). All rows and KV heads then share one table, [1, size,
    P]."""
    return _waves(_angles(jnp.arange(size)[None], config), pair_factors(config))


def turned_from_first(x: Float[Array, "*B D S"], config: KVShape) -> Float[Array, "*B D S"]:
    """Turn the heads of S consecutive tokens, tokens on the last axis, as if the first of them had
    position 0. A query meets them that is turned back by the first one's true position
    (`unrotated`): then nothing is computed of positions but a table that no data changes."""
    if config.turning is None or config.turning.kind == "none":
        return x
    # Numbers of the program. Computed by it, a cosine takes a CPU as long as twenty products.
    angles = np.outer(inverse_frequencies(config).astype(np.float64), np.arange(x.shape[-1]))
    factors = np.broadcast_to(pair_factors(config), len(angles))[:, None]
    lead = tuple(range(x.ndim - 2))
    cos = np.expand_dims((np.cos(angles) * factors).astype(np.float32), lead)
    sin = np.expand_dims((np.sin(angles) * factors).astype(np.float32), lead)
    first, second = jnp.split(x, 2, axis=-2)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -2)


def positions_of_layer(
    positions: Int[Array, "B T"], config: KVShape, index: Int[Array, ""] | int | None
) -> Int[Array, "B T"] | Waves:
    """Return the argument that `rotate` takes as positions in layer `index`. Where all layers have
    one rope it is the positions themselves, else the waves of the layer's rope: a loop over stacked
    layers knows `index` as data alone, and cannot choose a rope by it at trace time."""
    if not isinstance(config.rope, tuple):
        return positions
    if index is None:
        raise ValueError("layers have ropes of their own; say which layer this is")
    zeros = np.zeros(config.head_dim // 2, np.float32)  # of a layer without a rope: no pair turns
    frequencies = []
    factors = []
    for number in range(config.num_layers):
        layer = config.layer(number)
        frequencies.append(zeros if layer.rope is None else inverse_frequencies(layer))
        factors.append(np.broadcast_to(pair_factors(layer), zeros.shape))
    float_positions = positions.astype(jnp.float32)
    freq = jnp.asarray(np.stack(frequencies))[index]
    angles = jnp.einsum("bt,p->btp", float_positions, freq)
    factor = jnp.asarray(np.stack(factors).astype(np.float32))[index]
    return _waves(angles, factor)


def _turned(x: Float[Array, "*B T N D"], waves: Waves) -> Float[Array, "*B T N D"]:
    """Turn pair i of a token's heads by wave i (P = D/2) in float32. The result is in x.dtype."""
    cos, sin = (made_once(wave)[..., None, :] for wave in waves)
    # Halves, not pairs of halves on an axis of their own: slower on CPUs, and by XLA's estimates on
    # TPUs.
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
