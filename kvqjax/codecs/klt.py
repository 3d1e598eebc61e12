"""Transform coding: the Karhunen-Loeve transform of calibrated vectors, and more bits for the
coefficients that matter (KVTC, arXiv 2511.01815, for stored caches; bits by energy as in Block-GTQ,
arXiv 2606.24033).

    z = (x - mean) A              A = M^(1/2) U diag(1 / sigma)
    x_hat = mean + z_hat B        B = diag(sigma) U^T M^(-1/2)

M says what an error costs: (x - x_hat)^T M (x - x_hat) (kvqjax.calibrate.klt). U are the
eigenvectors of the covariance of M^(1/2) x, the largest eigenvalue first, and sigma^2 the
eigenvalues. So all coefficients have unit variance, and an error of z_i costs sigma_i^2. Channels
are correlated, coefficients are not: bits go where the variance is, and coefficients with little of
it get none.

Which coefficients have how many bits is the same in every layer, so that layers can be stacked. It
follows from a typical spectrum, log2 sigma_i = -slope * log2(1 + 48 i / W), by giving bits, two
coefficients at a time, to where they take off most of the squared error. A token's coefficients
share a scale, their root mean square.

    encode    x [u, W] -> - mean -> A -> z [u, R] -> / scale -> nearest grid points -> codes of 1 to 8 bits
    decode    codes -> grid points -> * scale -> z_hat [u, R] -> B -> + mean -> x_hat [u, W]

A rank is a coefficient's place in the order of variance. R is how many coefficients have bits. A
grid is the list of points that a code chooses from; a point has one number or two, so a code stands
for one coefficient or two.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvqjax._arguments import check_fields
from kvqjax._errors import UserError
from kvqjax.codecs.base import Codec, Fit
from kvqjax.codecs.higgs_grid import nearest, points_of, shipped_grid
from kvqjax.ops.finite import wide
from kvqjax.ops.layout import Field
from kvqjax.ops.packing.base import PLANE

FIT = Fit("kvqjax.calibrate.klt")
# Bits of a coefficient -> squared error of its grid, of normally distributed numbers of variance 1
# (measured again by tests/codecs/test_klt.py). 5 bits are left out: a grid that reaches as far as
# those of 6 and 8 would err like that of 4.
ERRORS = {0: 1.0, 1: 0.3634, 2: 0.1078, 3: 0.0295, 4: 0.0078, 6: 0.0020, 8: 0.000127}
DIMS = {1: 1, 2: 2, 3: 2, 4: 2, 6: 1, 8: 1}  # numbers that a grid point has
MOST_BITS = 6  # per channel on average: with 8 everywhere there would be nothing to choose
REACH = 16  # deviations, beyond the furthest token seen on SmolLM2-135M (2026-11-27)
# Slopes of the spectra of keys and of values (SmolLM2-135M).
KEY_SLOPE, VALUE_SLOPE = 1.0, 0.5
BEND = 48  # where a spectrum bends, as ranks are counted from 1 to 49: fitted to SmolLM2-135M's (the same command)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Klt:
    """Transform coding of vectors of W channels.

    Attributes:
        bits: of the codes, per channel on average; a token's scale comes on top.
        slope: of the spectrum that bits are given by, in bits for each doubling of 1 + 48 i / W; 0
            for equal bits.
        scale: "token" stores the root mean square of a token's coefficients, "none" stores no
            scale.
        dtype: of the scales.
    """

    bits: float = 2.0
    slope: float = 1.0
    scale: str = "token"
    dtype: str = "bfloat16"

    def __post_init__(self):
        check_fields(self)
        if not 0.125 <= self.bits <= MOST_BITS:
            raise UserError(f"bits={self.bits}; wanted 0.125 to {MOST_BITS} per channel on average")
        if not 0 <= self.slope <= 4:
            raise UserError(f"slope={self.slope}; wanted 0 to 4")
        if self.scale not in ("token", "none"):
            raise UserError(f"scale={self.scale!r}; known: token, none")
        if self.dtype not in ("bfloat16", "float32"):
            raise UserError(f"dtype={self.dtype!r}; scales are stored as bfloat16 or float32")

    def build(self, width: int) -> Codec:
        # Bits are given to two neighbours at a time, since grids of 2 to 4 bits have points of two
        # numbers.
        if width % 2:
            raise UserError(f"klt takes vectors of an even number of channels, not of {width}")
        return _codec(self, width, bits_of_ranks(width, self.bits, self.slope))

    def summed_form(self, width: int) -> tuple[int, Callable, Callable]:
        """Describe how values are summed as coefficients, as `Linear` of kvqjax.codecs.base says.

        Returns:
            (R, the function that reads a tile's coefficients, the function that turns their means
            back to vectors).
        """
        bits = bits_of_ranks(width, self.bits, self.slope)
        return (
            sum(b > 0 for b in bits),
            functools.partial(_coefficients, self, _levels(bits)),
            _turned_back,
        )


@functools.cache
def bits_of_ranks(width: int, bits: float, slope: float) -> tuple[int, ...]:
    """Choose the bits of each coefficient.

    The choice is greedy. In each step two neighbouring coefficients go to the next level of bits:
    those two where the squared error falls most for each bit that is spent.

    Args:
        width: W, how many coefficients there are; even.
        bits: the mean over all coefficients. Together they get at most W times that, rounded to an
            even number.
        slope: of the spectrum, in bits for each doubling of 1 + 48 i / W.

    Returns:
        The bits of the coefficients 0 to W - 1; they never rise.
    """
    # Of every second coefficient: one entry stands for two neighbours. 4^x is the square of a
    # deviation 2^x.
    variance = 4.0 ** (-slope * np.log2(1 + BEND * np.arange(0, width, 2) / width))
    # A level of infinitely many bits ends the list. No budget pays for it, so that no index runs
    # past the end.
    levels, errors = np.array([*ERRORS, np.inf]), np.array([*ERRORS.values(), 0.0])
    gains = -np.diff(errors)  # by how much the error falls from each level to the next one
    steps = np.diff(levels)  # how many bits this takes
    pair_levels = np.zeros(width // 2, int)  # an index into `levels` for each pair
    # Bits that are left, counted once for both coefficients of a pair.
    budget = round(bits * width / 2)
    while True:
        affordable = steps[pair_levels] <= budget
        worth = np.where(affordable, variance * gains[pair_levels] / steps[pair_levels], 0)
        # The first of equal ones, so that bits never rise with the rank.
        chosen = int(np.argmax(worth))
        if worth[chosen] <= 0:
            return tuple(int(levels[number]) for number in np.repeat(pair_levels, 2))
        budget -= int(steps[pair_levels[chosen]])
        pair_levels[chosen] += 1


@functools.cache
def grid_of(bits: int) -> Float[np.ndarray, "n p"]:
    """Make the grid of coefficients with `bits` bits: float32 [2^(bits p), p], of points with p =
    DIMS[bits] numbers."""
    if bits == 1:
        half = (2 / np.pi) ** 0.5  # the mean of a half normal distribution
        return np.array([[-half], [half]], np.float32)
    # Grids of up to 4 bits are the best ones for a normal distribution. Only the first coefficients
    # get more bits, and these have heavy tails: a few tokens far out would make most of the error
    # of a grid that ends at 4 deviations of SmolLM2-135M. So grids of more bits reach to `REACH`,
    # with points evenly spaced in asinh x.
    if bits > 4:
        return np.sinh(np.linspace(-np.arcsinh(REACH), np.arcsinh(REACH), 1 << bits))[
            :, None
        ].astype(np.float32)
    return shipped_grid(bits, DIMS[bits])


def _codes(bits: int, count: int) -> Field:
    """Describe the field of `count` coefficients with `bits` bits each: one code for each grid
    point."""
    return Field(kind="codes", width=count // DIMS[bits], bits=bits * DIMS[bits], role="payload")


def _levels(bits: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """List the coefficients of equal bits: (bits, rank of the first, how many), most bits first."""
    # Bits never rise with the rank, so that equal bits stand side by side.
    return [(b, bits.index(b), bits.count(b)) for b in sorted(set(bits) - {0}, reverse=True)]


def _times(x: Float[Array, "*lead I"], matrix: Float[Array, "I O"]) -> Float[Array, "*lead O"]:
    """Multiply in float32, whatever the platform's default precision."""
    return jnp.einsum("...i,ij->...j", x, matrix.astype(jnp.float32), precision="highest")


def _times_in_bfloat16(
    x: Float[Array, "*lead I"], matrix: Float[Array, "I O"]
) -> Float[Array, "*lead O"]:
    """Multiply in bfloat16 with float32 sums, for GPUs. To round both factors costs a coefficient
    0.0016 of its size on average (2^-9 / 3^(1/2), twice); where it has 8 bits, the most, its own
    error is seven times that (`ERRORS`)."""
    x, matrix = x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16)
    return jnp.einsum("...i,ij->...j", x, matrix, preferred_element_type=jnp.float32)


def _coefficients(
    spec: Klt, levels: list[tuple[int, int, int]], tile: dict
) -> Float[Array, "*lead R"]:
    """Look up the coefficients that a tile's codes stand for, times their token's scale.

    Args:
        spec: says whether tokens have scales.
        levels: as `_levels` lists them.
        tile: the stored fields of u tokens.

    Returns:
        The R coefficients that have bits, in the order of their ranks.
    """
    numbers = [points_of(grid_of(b), tile[f"codes{b}"].astype(jnp.uint32)) for b, _, _ in levels]
    # Levels go from most bits to fewest, so that their coefficients side by side are in the order
    # of ranks.
    z = jnp.concatenate(numbers, -1)
    if spec.scale == "none":
        return z
    return z * jnp.swapaxes(tile["scale"], -1, -2).astype(jnp.float32)


def _turned_back(constants: dict, z: Float[Array, "*lead R"]) -> Float[Array, "*lead W"]:
    """Turn coefficients back to vectors: z B + mean. The map is affine, so that means of
    coefficients give means of vectors."""
    mean = constants["mean"].astype(jnp.float32)
    # For 131072 tokens of 1024 channels an H100 takes 5.1 ms in float32, 0.85 ms in TF32.
    turned = jax.lax.platform_dependent(
        z, constants["back"], cuda=_times_in_bfloat16, default=_times
    )
    return turned + mean.reshape((1,) * (z.ndim - 1) + mean.shape)


def _codec(spec: Klt, width: int, bits: tuple[int, ...]) -> Codec:
    """Build the codec.

    Args:
        spec: what is stored.
        width: W, the channels of a vector.
        bits: of the coefficients, by rank.

    Returns:
        A codec with a field of codes for every number of bits that is used, and a scale for each
        token. Its constants are `mean` [W], `into` [W, R] (A) and `back` [R, W] (B).
    """
    kept = sum(b > 0 for b in bits)
    levels = _levels(bits)
    fields = {f"codes{b}": _codes(b, count) for b, _, count in levels}
    if spec.scale == "token":
        fields["scale"] = Field(kind="token", width=1, role="scales", dtype=spec.dtype)

    def encode(constants, x: Float[Array, "u W"]):
        """Turn vectors into coefficients, divide them by their token's scale, and find the nearest
        grid points."""
        z = _times(wide(x) - constants["mean"].astype(jnp.float32)[None], constants["into"])
        payload = {}
        if spec.scale == "token":
            scale = jnp.sqrt(jnp.square(z).mean(-1)).astype(spec.dtype)
            # Codes are found against the scale as it is stored. A token without deviation from the
            # mean has scale 0.
            divisor = scale.astype(jnp.float32)
            z = z / jnp.where(divisor > 0, divisor, 1.0)[:, None]
            payload["scale"] = scale[None]
        for b, first, count in levels:
            numbers = z[:, first : first + count].reshape(len(z), -1, DIMS[b])
            payload[f"codes{b}"] = nearest(jnp.asarray(grid_of(b)), numbers)
        return payload

    def decode(constants, tile):
        return _turned_back(constants, _coefficients(spec, levels, tile))

    needs: dict[str, tuple[int, ...]] = {
        "mean": (width,),
        "into": (width, kept),
        "back": (kept, width),
    }
    # A unit is a plane: XLA multiplies a single token by a matrix in another order than several,
    # and tiles must decode to the same bits one by one and together.
    return Codec(width, PLANE, fields, encode, decode, needs, FIT)
