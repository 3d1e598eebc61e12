"""Tiles whose variances are balanced along both axes before uniform codes are taken (KVarN, arXiv
2606.03458, algorithm 1).

A tile is g tokens of one KV head. Its columns, then its rows, are divided by their standard
deviations, again and again, which brings all deviations towards 1 (`balance`). The factor of a
column or row is the product of all its divisors. Uniform codes have scales and minima along one
axis: a key's channel, a value's token. The factors along that axis need not be stored, because
scales and minima take them up. The factors along the other axis are stored:

    keys:   x_hat = (code scale_c + low_c) token_t          values:  x_hat = (code scale_t + low_t) channel_c

    encode    x [u, W] -> tiles [n, K, g, D] -> factors -> x / stored factor -> uniform codes    (kvqjax.codecs.uniform)
    decode    uniform codes -> numbers -> * stored factor

The released code bounds the logarithm of every factor from below by -0.3. Numbers that vary little,
as most models' values do, can then hardly be balanced. `floor` is this bound; None leaves it out.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvqjax._arguments import check_fields
from kvqjax._errors import UserError
from kvqjax.codecs.base import Codec
from kvqjax.codecs.scaled import over_parts, times_parts
from kvqjax.codecs.uniform import Uniform
from kvqjax.ops.finite import saturated, wide
from kvqjax.ops.layout import Field

LEAST, MOST = 1e-3, 1e3  # bounds of a divisor in one round
CEILING = 10.0  # the largest logarithm of a factor
# The smallest one without a floor: the factor of a column of zeros would otherwise underflow.
LOWEST = -40.0

Tile = Float[Array, "*B R C"]


def _deviation(x: Tile, axis: int) -> Float[Array, "*B n"]:
    """Take the unbiased standard deviation along an axis."""
    return jnp.sqrt(jnp.square(x - x.mean(axis, keepdims=True)).sum(axis) / (x.shape[axis] - 1))


def imbalance(x: Tile) -> Float[Array, "*B"]:
    """Measure how unbalanced a tile is: the largest deviation over the smallest one, of columns
    plus of rows. It is 2 for a balanced tile."""

    def ratio(deviation):
        # A column or row of equal numbers has deviation 0, and the ratio stays finite.
        deviation = jnp.maximum(deviation, 1e-8)
        return deviation.max(-1) / deviation.min(-1)

    return ratio(_deviation(x, -2)) + ratio(_deviation(x, -1))


def balance(
    tile: Tile, rounds: int, floor: float | None
) -> tuple[Float[Array, "*B C"], Float[Array, "*B R"]]:
    """Find the factors of columns and rows that balance a tile.

    Args:
        tile: one tile, or any number of them with leading axes, each balanced by itself.
        rounds: how often columns and then rows are divided.
        floor: the smallest logarithm of a factor; None: LOWEST.

    Returns:
        The divisors of columns and rows. They come from the most balanced of all rounds, and of the
        start with factors 1.
    """
    lowest = LOWEST if floor is None else floor

    # Factors are kept as logarithms, where a division is a sum.
    def grown(log, x, axis: int):
        """Add the logarithms of the deviations of `x` to those of the factors so far, within
        bounds."""
        return jnp.clip(log + jnp.log(jnp.clip(_deviation(x, axis), LEAST, MOST)), lowest, CEILING)

    def over(columns, rows):
        """Divide the tile by factors, given as logarithms."""
        return tile / jnp.exp(columns)[..., None, :] / jnp.exp(rows)[..., :, None]

    def step(_, state):
        # Logarithms so far, the least imbalance, and the logarithms that gave it.
        columns, rows, best, kept = state
        # Rows are divided by the deviations that they have after the columns were divided.
        columns = grown(columns, over(columns, rows), -2)
        rows = grown(rows, over(columns, rows), -1)
        current = imbalance(over(columns, rows))
        # A later round may leave a tile less balanced. Each tile keeps its own best one.
        better = (current <= best)[..., None]
        kept = (jnp.where(better, columns, kept[0]), jnp.where(better, rows, kept[1]))
        return columns, rows, jnp.minimum(current, best), kept

    start = (jnp.zeros(tile.shape[:-2] + tile.shape[-1:]), jnp.zeros(tile.shape[:-1]))
    columns, rows = jax.lax.fori_loop(0, rounds, step, (*start, imbalance(tile), start))[3]
    return jnp.exp(columns), jnp.exp(rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Balanced:
    """Uniform codes of balanced tiles.

    Attributes:
        bits: of a code.
        along: as in `Uniform`: "tokens" for keys, "channels" for values.
        heads: equal parts of the channels, each with tiles of its own; 0: the model's KV heads
            (`for_heads`).
        group: tokens of a tile.
        rounds: of balancing.
        floor: bounds the logarithms of factors from below; None: hardly at all.
        dtype: of scales, minima and factors.
    """

    bits: int
    along: str
    heads: int
    group: int = 128
    rounds: int = 8
    floor: float | None = None
    dtype: str = "bfloat16"

    def __post_init__(self):
        check_fields(self)
        if self.bits not in (1, 2, 3, 4, 5, 6, 8):
            raise UserError(f"bits={self.bits}; uniform codes have 1, 2, 3, 4, 5, 6 or 8 bits")
        if self.rounds < 1:
            raise UserError(f"rounds={self.rounds}; at least 1 round of balancing is wanted")
        if self.group not in (32, 64, 128):
            raise UserError(f"group={self.group}; tiles have 32, 64 or 128 tokens")

    def for_heads(self, heads: int, head_dim: int) -> "Balanced":
        """Fill in the model's KV heads, unless `heads` was given."""
        return dataclasses.replace(self, heads=self.heads or heads)

    def inner(self, width: int) -> Uniform:
        """Give the uniform codec's spec for balanced vectors of `width` channels. Its groups lie
        within a tile: the tokens of a key's channel, or the channels of a value's head."""
        group = self.group if self.along == "tokens" else width // self.heads
        return Uniform(bits=self.bits, along=self.along, group=group, dtype=self.dtype)

    def build(self, width: int) -> Codec:
        return _keys(self, width) if self.along == "tokens" else _values(self, width)


def _tiles(spec: Balanced, x: Float[Array, "u W"]) -> Float[Array, "n K g D"]:
    """Cut vectors into tiles, one of each group of tokens and head, in float32."""
    return jnp.swapaxes(
        wide(x).reshape(-1, spec.group, spec.heads, x.shape[-1] // spec.heads), 1, 2
    )


def _keys(spec: Balanced, width: int) -> Codec:
    """Build the codec of keys: a factor for each token and head is stored beside codes with scales
    per channel."""
    inner = spec.inner(width).build(width)
    field = Field(kind="token", width=spec.heads, role="scales", dtype=spec.dtype)

    def encode(_, x: Float[Array, "u W"]):
        # The first result of `balance` is stored: the factors of columns. Keys are transposed, so
        # that their columns are tokens. (The columns of values are channels.)
        tiles = jnp.swapaxes(_tiles(spec, x), -1, -2)
        factor = saturated(balance(tiles, spec.rounds, spec.floor)[0], spec.dtype)  # [n, K, g]
        factor = jnp.swapaxes(factor, 1, 2).reshape(x.shape[0], spec.heads)
        # Divided by the factor as it is stored, so that its rounding costs nothing.
        return inner.encode({}, over_parts(wide(x), factor.astype(jnp.float32))) | {
            "factor": factor.T
        }

    def decode(_, tile):
        balanced = inner.decode({}, {name: a for name, a in tile.items() if name != "factor"})
        return times_parts(balanced, tile["factor"])

    return inner._replace(fields={**inner.fields, "factor": field}, encode=encode, decode=decode)


def _values(spec: Balanced, width: int) -> Codec:
    """Build the codec of values: a factor for each channel and group of tokens is stored beside
    codes with scales per token and head."""
    inner = spec.inner(width).build(width)
    field = Field(kind="group", width=width, group=spec.group, role="scales", dtype=spec.dtype)

    def grouped(x, factor):
        """Reshape tokens to groups [.., n, g, W] and their factors to [.., n, 1, W]."""
        return x.reshape(*x.shape[:-2], -1, spec.group, width), factor[..., None, :].astype(
            jnp.float32
        )

    def encode(_, x: Float[Array, "u W"]):
        # [n, K, D]
        factor = saturated(balance(_tiles(spec, x), spec.rounds, spec.floor)[0], spec.dtype)
        factor = factor.reshape(-1, width)
        tokens, over = grouped(wide(x), factor)
        return inner.encode({}, (tokens / over).reshape(x.shape)) | {"factor": factor}

    def decode(_, tile):
        balanced = inner.decode({}, {name: a for name, a in tile.items() if name != "factor"})
        tokens, times = grouped(balanced, tile["factor"])
        return (tokens * times).reshape(balanced.shape)

    # The inner codec encodes token by token. Balancing needs whole tiles.
    return inner._replace(
        unit=spec.group, fields={**inner.fields, "factor": field}, encode=encode, decode=decode
    )
