"""Caches that cannot drift: keys and values exact but for noise of one size, wherever the token
stands.

The noise of a channel is the cosine of a random combination of the token's channels, with a random
phase. So it has mean 0 and hardly anything in common between two tokens or channels, yet is a
continuous function of the token: sums in another order change it as little as they change the
token, and a row measured on another processor comes out the same.

The size is relative to the token's root mean square; "of the spread": for keys, to that of what is
left without their mean, which is calibrated as for centre=mean. The two put different shares into
each layer. Qwen2's key bias makes the first kind large at any size.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvqjax.codecs import Exact
from kvqjax.codecs.centring import Centred
from kvqjax.methods import KeysAndValues, Method, parse

# Radians per channel: tokens a hundredth apart have unlike noise at 64 channels, those a rounding
# apart the same.
TURNS = 10.0


@dataclasses.dataclass(frozen=True)
class Noisy:
    """Vectors stored exactly, after noise of `size` times each token's root mean square was
    added."""

    size: float

    def build(self, width: int):
        plain = Exact().build(width)

        def encode(constants, x):
            mixing = TURNS * jax.random.normal(jax.random.key(0), (width, width), x.dtype)
            phases = jnp.broadcast_to(
                10 * jax.random.normal(jax.random.key(1), (width,), x.dtype), x.shape
            )
            spread = jnp.sqrt((x * x).mean(-1, keepdims=True))
            noise = 2**0.5 * jnp.cos(x / jnp.maximum(spread, 1e-6) @ mixing + phases)
            return plain.encode(constants, x + self.size * spread * noise)

        return plain._replace(encode=encode)


def _noisy(size: float, spread: bool) -> Method:
    codec = Noisy(size)
    key = Centred(inner=codec) if spread else codec
    name = f"noise of {size:g}" + " of the spread" * spread
    return Method(name=name, layer=KeysAndValues(key=key, value=codec, rope="pre"))


SIZES = ((0.003, False), (0.03, False), (0.1, False), (0.03, True), (0.1, True))
NOISES = {method.name: method for method in (_noisy(*size) for size in SIZES)}


def method_of(text: str) -> Method:
    """The method of a policy, or one of NOISES by its name."""
    return NOISES[text] if text in NOISES else parse(text)
