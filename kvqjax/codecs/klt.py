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

A vector is cut into G groups of neighbouring KV heads. Every group has a transform of its own, and
all groups have the same bits. G = 1 transforms all heads together.

Which coefficients have how many bits is the same in every layer, so that layers can be stacked. It
follows from a typical spectrum, log2 sigma_i = -slope * log2(1 + 48 i / w), by giving bits to where
they take off most of the squared error. The coefficients of a token and group share a scale, their
root mean square.

    encode    x [u, G w] -> - mean -> A -> z [u, G, R] -> / scale -> nearest points -> codes of 1 to 8 bits
    decode    codes -> points -> * scale -> z_hat [u, G, R] -> B -> + mean -> x_hat [u, G w]

A rank is a coefficient's place in the order of variance. w is a group's channels, R how many of its
coefficients have bits.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt

from kvqjax._arguments import check_fields
from kvqjax._errors import UserError
from kvqjax.codecs.base import Codec, Fit
from kvqjax.ops.finite import wide
from kvqjax.ops.layout import Field
from kvqjax.ops.packing.base import PLANE
from kvqjax.ops.xla_workarounds import made_once

FIT = Fit("kvqjax.calibrate.klt")
# Points of codes of few bits are evenly spaced, so that a code is a number without a table. The
# steps have the least error of normally distributed numbers of variance 1. The step of 4 bits is
# wider: the first coefficients have heavier tails. Against a step of .335 it takes a tenth off
# attention's error at 2.25 bits (SmolLM2-135M, 2026-11-29).
STEPS = {1: 1.596, 2: 0.996, 3: 0.586, 4: 0.42}
# Codes of more bits are evenly spaced in asinh x, and reach this many deviations: beyond the
# furthest token seen on SmolLM2-135M (2026-11-27).
REACH = 16
# Bits of a coefficient -> squared error of its points, of normally distributed numbers of variance
# 1 (measured again by tests/codecs/test_klt.py). 5 bits are left out: points that reach as far as
# those of 6 and 8 would err like those of 4. Without codes of 6 bits a token far out would be
# clipped; without those of 3 bits attention's error is a tenth larger (SmolLM2-135M at 2.25 bits).
ERRORS = {0: 1.0, 1: 0.3634, 2: 0.1188, 3: 0.0374, 4: 0.0148, 6: 0.0020, 8: 0.000127}
MOST_BITS = 6  # per channel on average: with 8 everywhere there would be nothing to choose
# Slopes of the spectra of keys, and of values or what keys do not predict of them. Of .5 to 1.5 and
# .25 to .8 these lose least, within heads and across them (SmolLM2-135M, 2026-11-29).
KEY_SLOPE, VALUE_SLOPE = 1.0, 0.4
# Transforms of a single head of so many channels give bits to so many neighbouring ranks together:
# a GPU's kernel reads registers of 8 neighbours (kvqjax.pallas_kernels.gpu.coefficients).
KERNEL_HEAD, TOGETHER = 128, 8
BEND = 48  # where a spectrum bends, as ranks are counted from 1 to 49: fitted to SmolLM2-135M's
# A scale is 2^((code - 128) / 16): from 2^-8 to 2^8 of a typical token's, in steps of 4.4 %. Codes
# are found against the scale as it is stored, so that its rounding costs next to nothing.
SCALE_BITS, SCALE_STEPS, SCALE_MIDDLE = 8, 16, 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Klt:
    """Transform coding of vectors.

    Attributes:
        bits: of the codes, per channel on average; scales come on top.
        slope: of the spectrum that bits are given by, in bits for each doubling of 1 + 48 i / w; 0
            for equal bits.
        scale: "token" stores the root mean square of the coefficients of each token and group,
            "none" stores no scale.
        heads: neighbouring KV heads that are transformed together; 0 for all of them.
        channels: w, of a group; 0 for the whole vector. `for_heads` fills it in.
    """

    bits: float = 2.0
    slope: float = 1.0
    scale: str = "token"
    heads: int = 0
    channels: int = 0

    def __post_init__(self):
        check_fields(self)
        if not 0.125 <= self.bits <= MOST_BITS:
            raise UserError(f"bits={self.bits}; wanted 0.125 to {MOST_BITS} per channel on average")
        if not 0 <= self.slope <= 4:
            raise UserError(f"slope={self.slope}; wanted 0 to 4")
        if self.scale not in ("token", "none"):
            raise UserError(f"scale={self.scale!r}; known: token, none")
        if self.heads < 0:
            raise UserError(f"heads={self.heads}; wanted 1 or more, or 0 for all")

    def for_heads(self, heads: int, head_dim: int) -> "Klt":
        """Fill in the channels of a group. Raises UserError for heads that groups do not divide."""
        if not self.heads:
            return self
        if heads % self.heads:
            raise UserError(f"heads={self.heads} does not divide the model's {heads} KV heads")
        return dataclasses.replace(self, channels=self.heads * head_dim)

    def groups(self, width: int) -> tuple[int, int]:
        """Count the groups of a vector of `width` channels, and the channels of a group."""
        size = self.channels or width
        return width // size, size

    def ranks(self, width: int) -> tuple[int, ...]:
        """List the bits of a group's coefficients by rank, for vectors of `width` channels."""
        size = self.groups(width)[1]
        together = TOGETHER if self.heads == 1 and size == KERNEL_HEAD else 1
        return bits_of_ranks(size, self.bits, self.slope, together)

    def levels(self, width: int) -> list[tuple[int, int, int]]:
        """List a group's coefficients of equal bits: (bits, rank of the first, how many), most bits
        first."""
        return _levels(self.ranks(width))

    def build(self, width: int) -> Codec:
        return _codec(self, width)

    def coefficients(self, width: int) -> Callable[[dict], Float[Array, "*lead G R"]]:
        """Make the function that reads a tile's coefficients, times their scales, in the order of
        ranks."""
        groups, _ = self.groups(width)
        return functools.partial(_coefficients, self, groups, self.levels(width))

    def coefficients_last(self, width: int) -> Callable[[dict], Float[Array, "B G R S"]]:
        """Make the function that does the same for codes [B, channels, S], tokens last."""
        groups, _ = self.groups(width)
        return functools.partial(_coefficients_last, self, groups, self.levels(width))

    def summed_form(self, width: int) -> tuple[int, Callable, Callable]:
        """Describe how values are summed as coefficients, as `Linear` of kvqjax.codecs.base says.

        Returns:
            (G R, the function that reads a tile's coefficients, the function that turns their means
            back to vectors).
        """
        (groups, _), kept = self.groups(width), kept_of(self.ranks(width))
        read = self.coefficients(width)

        def numbers(tile: dict):
            z = read(tile)
            return z.reshape(*z.shape[:-2], -1)

        def turned(constants: dict, means):
            z = means.reshape(*means.shape[:-1], groups, kept)
            return turned_back(constants["back"], z, constants["mean"])

        return groups * kept, numbers, turned


def kept_of(ranks: tuple[int, ...]) -> int:
    """Count the coefficients that have bits."""
    return sum(bits > 0 for bits in ranks)


@functools.cache
def bits_of_ranks(width: int, bits: float, slope: float, together: int = 1) -> tuple[int, ...]:
    """Choose the bits of each coefficient.

    The choice is greedy. In each step that coefficient goes to the next level of bits where the
    squared error falls most for each bit that is spent.

    Args:
        width: w, how many coefficients there are.
        bits: the mean over all coefficients. Together they get at most w times that.
        slope: of the spectrum, in bits for each doubling of 1 + 48 i / w.
        together: neighbouring coefficients that have the same bits; divides w.

    Returns:
        The bits of the coefficients 0 to w - 1; they never rise.
    """
    # 4^x is the square of a deviation 2^x.
    variance = 4.0 ** (-slope * np.log2(1 + BEND * np.arange(width) / width))
    variance = variance.reshape(-1, together).sum(1)
    # A level of infinitely many bits ends the list. No budget pays for it, so that no index runs
    # past the end.
    levels, errors = np.array([*ERRORS, np.inf]), np.array([*ERRORS.values(), 0.0])
    gains = -np.diff(errors)  # by how much the error falls from each level to the next one
    steps = together * np.diff(levels)  # how many bits this takes
    level = np.zeros(len(variance), int)  # an index into `levels` for each
    budget = round(bits * width)
    while True:
        affordable = steps[level] <= budget
        worth = np.where(affordable, variance * gains[level] / steps[level], 0)
        # The first of equal ones, so that bits never rise with the rank.
        chosen = int(np.argmax(worth))
        if worth[chosen] <= 0:
            return tuple(int(levels[number]) for number in np.repeat(level, together))
        budget -= int(steps[level[chosen]])
        level[chosen] += 1


def codes_of(numbers: Float[Array, "*S"], bits: int) -> UInt[Array, "*S"]:
    """Find the code of the point nearest to each number of variance 1; above 4 bits the nearest in
    asinh x."""
    most = (1 << bits) - 1
    if bits in STEPS:
        place = numbers / STEPS[bits] + most / 2
    else:
        place = (jnp.arcsinh(numbers) / math.asinh(REACH) + 1) * (most / 2)
    return jnp.clip(jnp.round(place), 0, most).astype(jnp.uint32)


def points_of(codes: UInt[Array, "*S"], bits: int) -> Float[Array, "*S"]:
    """Give the numbers that codes of `bits` bits stand for, float32."""
    middle = ((1 << bits) - 1) / 2
    # Converting unsigned integers is slow on x86.
    centred = codes.astype(jnp.int32).astype(jnp.float32) - middle
    if bits in STEPS:
        return centred * STEPS[bits]
    return jnp.sinh(centred * (math.asinh(REACH) / middle))


def _scale_codes(scale: Float[Array, "*S"]) -> UInt[Array, "*S"]:
    """Find the codes of scales; 0 for scales below the least that has a code."""
    # No logarithm is taken of 0.
    steps = SCALE_STEPS * jnp.log2(jnp.maximum(scale, jnp.finfo(jnp.float32).tiny))
    return jnp.clip(jnp.round(steps) + SCALE_MIDDLE, 0, 2**SCALE_BITS - 1).astype(jnp.uint32)


def scales_of(codes: UInt[Array, "*S"]) -> Float[Array, "*S"]:
    """Give the scales that codes stand for, float32. Code 0 stands for 0: such a token is the
    mean."""
    steps = codes.astype(jnp.int32) - SCALE_MIDDLE
    scale = jnp.exp2(steps.astype(jnp.float32) / SCALE_STEPS)
    return jnp.where(codes == 0, 0.0, scale)


def _levels(ranks: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """List the coefficients of equal bits: (bits, rank of the first, how many), most bits first."""
    # Bits never rise with the rank, so that equal bits stand side by side.
    return [(b, ranks.index(b), ranks.count(b)) for b in sorted(set(ranks) - {0}, reverse=True)]


def times(
    x: Float[Array, "*lead G I"], matrices: Float[Array, "G I O"]
) -> Float[Array, "*lead G O"]:
    """Multiply every group by its matrix in float32, whatever the platform's default precision."""
    matrices = matrices.astype(jnp.float32)
    if len(matrices) == 1:
        # A plain product: XLA for CPUs would lay out a product with an axis of groups anew.
        return jnp.einsum("...i,ij->...j", x[..., 0, :], matrices[0], precision="highest")[
            ..., None, :
        ]
    return jnp.einsum("...gi,gij->...gj", x, matrices, precision="highest")


def _times_in_bfloat16(
    x: Float[Array, "*lead G I"], matrices: Float[Array, "G I O"]
) -> Float[Array, "*lead G O"]:
    """Multiply in bfloat16 with float32 sums, for GPUs. To round both factors costs a coefficient
    0.0016 of its size on average (2^-9 / 3^(1/2), twice); where it has 8 bits, the most, its own
    error is seven times that (`ERRORS`)."""
    x, matrices = x.astype(jnp.bfloat16), matrices.astype(jnp.bfloat16)
    return jnp.einsum("...gi,gij->...gj", x, matrices, preferred_element_type=jnp.float32)


def turned_back(
    matrices: Float[Array, "G R w"], z: Float[Array, "*lead G R"], mean: Float[Array, " W"]
) -> Float[Array, "*lead W"]:
    """Turn coefficients back to vectors: z B + mean. The map is affine, so that means of
    coefficients give means of vectors."""
    # For 131072 tokens of 1024 channels an H100 takes 5.1 ms in float32, 0.85 ms in TF32.
    turned = jax.lax.platform_dependent(z, matrices, cuda=_times_in_bfloat16, default=times)
    turned = turned.reshape(*z.shape[:-2], -1)
    mean = mean.astype(jnp.float32)
    return turned + mean.reshape((1,) * (turned.ndim - 1) + mean.shape)


def _coefficients(
    spec: Klt, groups: int, levels: list[tuple[int, int, int]], tile: dict
) -> Float[Array, "*lead G R"]:
    """Read the coefficients that a tile's codes stand for, times the scale of their token and
    group."""
    numbers = []
    # Levels go from most bits to fewest, so that their coefficients side by side are in the order
    # of ranks.
    for bits, _, count in levels:
        codes = tile[f"codes{bits}"]
        points = points_of(codes.astype(jnp.uint32), bits)
        numbers.append(points.reshape(*codes.shape[:-1], groups, count))
    z = jnp.concatenate(numbers, -1)
    if spec.scale == "none":
        return z
    return z * scales_of(tile["scale"].astype(jnp.uint32))[..., None]


def _coefficients_last(
    spec: Klt, groups: int, levels: list[tuple[int, int, int]], codes: dict
) -> Float[Array, "B G R S"]:
    """Read coefficients as `_coefficients` does, of codes with tokens on the last axis."""
    scale: Array | None = None
    if spec.scale == "token":
        scale = scales_of(codes["scale"])
        # In rows, so that the product by which a CPU makes them once is small.
        in_rows = made_once(scale.reshape(*scale.shape[:2], -1, PLANE))
        scale = in_rows.reshape(len(scale), groups, 1, -1)
    numbers = []
    for bits, _, count in levels:
        level = codes[f"codes{bits}"]
        points = points_of(level, bits).reshape(len(level), groups, count, -1)
        numbers.append(points if scale is None else points * scale)
    return jnp.concatenate(numbers, 2)


def _codec(spec: Klt, width: int) -> Codec:
    """Build the codec of vectors of `width` channels.

    It has a field of codes for every number of bits that is used, the coefficients of one group
    behind those of another, and a field of scales. Its constants are `mean` [W], `into` [G, w, R]
    (A) and `back` [G, R, w] (B)."""
    groups, size = spec.groups(width)
    ranks = spec.ranks(width)
    kept, levels = kept_of(ranks), spec.levels(width)
    fields = {}
    for bits, _, count in levels:
        fields[f"codes{bits}"] = Field(
            kind="codes", width=groups * count, bits=bits, role="payload"
        )
    if spec.scale == "token":
        fields["scale"] = Field(kind="codes", width=groups, bits=SCALE_BITS, role="scales")
    read = spec.coefficients(width)

    def encode(constants, x: Float[Array, "u W"]):
        """Turn vectors into coefficients, divide them by the scale of their token and group, and
        find the nearest points."""
        deviation = wide(x) - constants["mean"].astype(jnp.float32)[None]
        z = times(deviation.reshape(-1, groups, size), constants["into"])
        payload = {}
        if spec.scale == "token":
            scale = jnp.sqrt(jnp.square(z).mean(-1))
            payload["scale"] = _scale_codes(scale)
            # Codes are found against the scale as it is stored. Code 0 leaves them as they are.
            divisor = scales_of(payload["scale"])
            z = z / jnp.where(divisor > 0, divisor, 1.0)[..., None]
        for bits, first, count in levels:
            numbers = z[..., first : first + count]
            payload[f"codes{bits}"] = codes_of(numbers, bits).reshape(len(x), -1)
        return payload

    def decode(constants, tile):
        return turned_back(constants["back"], read(tile), constants["mean"])

    needs: dict[str, tuple[int, ...]] = {
        "mean": (width,),
        "into": (groups, size, kept),
        "back": (groups, kept, size),
    }
    # A unit is a plane: XLA multiplies a single token by a matrix in another order than several,
    # and tiles must decode to the same bits one by one and together.
    return Codec(width, PLANE, fields, encode, decode, needs, FIT)
