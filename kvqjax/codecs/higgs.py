"""HIGGS: Hadamard transform, one scale per group, nearest point of a Gaussian-optimal grid
(AQUA-KV, arXiv 2501.19392, section 3; HIGGS, arXiv 2411.17525).

    s = ||x||_2 of a group of h channels      y = H x / s      code = argmin_j ||y_p - g_j||^2 of p consecutive entries
    x_hat = H^T (s * g[code]) / h

H H^T = h I, so the entries of y have unit second moment and are close to N(0, 1). For a power of
two H is Sylvester's matrix, as released. For other h it is the integer matrix M of
kvqjax.codecs.hadamard times sqrt(h) over the length of M's rows. A grid of n points in p dimensions
takes log2(n)/p + 16/h bits per value. Codes are computed against the scale as stored. With a seed,
fixed random signs flip channels before H. Without them H makes some structured inputs, such as a
constant vector, one-hot.

Vectors that the wiring has rotated (kvqjax.methods.rotation) take no H: y = x sqrt(h) / s, x_hat =
s g[code] / sqrt(h). With a grid of one dimension, groups of one head and random signs that is
TurboQuant (arXiv 2504.19874).

`norm` says which scale is stored. c are the chosen grid points of a group, [h]:

    plain      s                     least squared error on average; x_hat is shorter than x, so scores shrink
    corrected  s sqrt(h) / |c|       |x_hat| = |x| (vLLM's correction)
    unbiased   s h / (c . y)         x_hat . x = |x|^2: a query along x has the score that x itself would give
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvqjax._arguments import check_fields, check_integer
from kvqjax._errors import UserError
from kvqjax.codecs import higgs_gpu, higgs_tpu
from kvqjax.codecs.base import Codec
from kvqjax.codecs.hadamard import has_hadamard, splits, transform, transform_matrix
from kvqjax.codecs.higgs_grid import LARGEST_GROUP, group_size, nearest, points_of, shipped_grid
from kvqjax.codecs.uniform import at_least_one
from kvqjax.ops.finite import wide
from kvqjax.ops.layout import Field

GROUPS = ("head", "width")
NORMS = ("plain", "corrected", "unbiased")
# How these platforms decode. Others look points up and transform them, as `higgs_codec` does by
# default.
FORMS = {"tpu": higgs_tpu, "cuda": higgs_gpu}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Higgs:
    """How vectors are stored as points of a Gaussian grid.

    Attributes:
        bits: Bits of a code per value. There must be a shipped grid of `bits` and `dim`.
        dim: Values that share a code, the grid's dimensions.
        group: Channels that share a scale. None: `group_size` of all channels. "head" or "width":
            those of a head or of all heads, which `for_heads` fills in.
        seed: Seed of the random signs. None: no signs, as released.
        dtype: dtype of the stored scales, "bfloat16" or "float32".
        rotated: Whether the wiring has rotated the vectors, so that they are not transformed here.
        norm: Which scale is stored, "plain", "corrected" or "unbiased" (see the module).

    Raises:
        UserError: No such grid, no Hadamard matrix of `group` channels, signs for rotated vectors,
            or another value than these."""

    bits: int = 2
    dim: int = 2
    group: int | str | None = None
    seed: int | None = None
    dtype: str = "bfloat16"
    rotated: bool = False
    norm: str = "plain"

    def __post_init__(self):
        check_fields(self)
        shipped_grid(self.bits, self.dim)
        if self.seed is not None:
            check_integer("seed", self.seed, 0)
        if self.norm not in NORMS:
            raise UserError(f"norm={self.norm!r}; known: {', '.join(NORMS)}")
        if self.rotated and self.seed is not None:
            raise UserError(
                f"seed={self.seed}; the rotation has the signs: rotate=signs:{self.seed}"
            )
        if isinstance(self.group, str):
            if self.group not in GROUPS:
                raise UserError(f"group={self.group!r}; known: {', '.join(GROUPS)}")
        elif self.group is not None:
            at_least_one(self.group)
            if not (self.rotated or has_hadamard(self.group)):
                raise UserError(
                    f"group={self.group}; no Hadamard matrix of that order is known, powers of two always are"
                )
        if self.dtype not in ("bfloat16", "float32"):
            raise UserError(f"dtype={self.dtype!r}; scales are stored as bfloat16 or float32")

    def for_heads(self, heads: int, head_dim: int) -> "Higgs":
        sizes = {"head": head_dim, "width": heads * head_dim}
        return (
            dataclasses.replace(self, group=sizes[self.group])
            if isinstance(self.group, str)
            else self
        )

    def size(self, width: int) -> int:
        """Count the channels that share a scale.

        Args:
            width: Channels of a vector.

        Raises:
            UserError: The group is "head" or "width" still, or far larger than a vector."""
        if isinstance(self.group, str):
            raise UserError(
                f"group={self.group!r} is open until the model's heads are known (`for_heads`)"
            )
        group = self.group or group_size(width)
        # The transform's matrix has as many rows, and is not always a product of small ones.
        if group >= 2 * max(width, LARGEST_GROUP):
            raise UserError(f"group={group}; a vector has {width} channels")
        return group

    def build(self, width: int) -> Codec:
        return higgs_codec(self, width, shipped_grid(self.bits, self.dim))

    def summed_form(self, width: int) -> tuple[int, Callable, Callable] | None:
        """Describe values before their transform, as `Linear` of kvqjax.codecs.base says.

        Args:
            width: Channels of a vector.

        Returns:
            (N, read, finish). None for rotated vectors, which have no transform."""
        return None if self.rotated else _summed_form(self, width)

    def mixed_form(self, heads: int, head_dim: int) -> tuple[np.ndarray, Callable] | None:
        """Describe vectors before heads are mixed, as `BetweenHeads` of kvqjax.codecs.base says.

        Args:
            heads: Number of KV heads.
            head_dim: Channels of a head.

        Returns:
            (matrix [heads, heads], read). None where the transform is not one within heads and one
            between heads, or where signs come after it."""
        group = self.size(heads * head_dim)
        fits = not self.rotated and self.seed is None and head_dim % self.dim == 0
        if not (fits and splits(group, head_dim) and heads * head_dim % group == 0):
            return None
        # The matrix of a group is (between heads) (x) (within a head). Groups of heads are not
        # mixed with each other.
        between = _gain(group) * transform_matrix(group // head_dim)
        return np.kron(np.eye(heads * head_dim // group), between), functools.partial(
            _within_heads, self, group, heads
        )


def _gain(group: int) -> float:
    """Compute the factor `gain` of M, the integer matrix of a group, for which H = gain M has H H^T
    = h I. It is 1 for a Hadamard matrix."""
    row = transform_matrix(group)[0].astype(int)
    return math.sqrt(group / (row @ row))


def _signs(seed: int | None, width: int) -> np.ndarray:
    """Make the signs of all channels, [width] of +-1; all +1 without a seed."""
    if seed is None:
        return np.ones(width, np.float32)
    return np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), width)


def _pad(x, axis_size: int):
    """Pad the last axis with zeros to `axis_size`."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, axis_size - x.shape[-1])])


def _correction(
    norm: str, numbers: Float[Array, "u n h"], aim: Float[Array, "u n h"]
) -> Float[Array, "u n"]:
    """Compute the factor of the length s in the stored scale, for n groups of u tokens.

    Args:
        norm: "corrected" or "unbiased".
        numbers: The chosen grid points c.
        aim: The normalised group y, of which c is nearest.

    Returns:
        The stored scale over s."""
    group = numbers.shape[-1]
    if norm == "corrected":
        return (group / jnp.square(numbers).sum(-1)) ** 0.5
    # c . y is near h. The bound keeps the factor at 4 at most. A group of zeros has y = 0, and
    # would divide by 0.
    return group / jnp.maximum((numbers * aim).sum(-1), group / 4)


def _fields(spec: Higgs, groups: int, vectors: int, bits: int) -> dict[str, Field]:
    return {
        "codes": Field(kind="codes", width=vectors, bits=bits, role="payload"),
        "scale": Field(kind="token", width=groups, role="scales", dtype=spec.dtype),
    }


def higgs_codec(spec: Higgs, width: int, points: np.ndarray) -> Codec:
    """Build the codec with a grid.

    The fields are codes, ceil(h/p) per token and group, and a scale per token and group. A group of
    zeros has scale 0 and decodes to zeros. A group with a number that is not finite decodes to
    numbers that are not finite. Other groups are not affected.

    Args:
        spec: The spec of the codec. Its `bits` and `dim` are not read.
        width: Channels of a vector. Beyond the last one, groups are padded with zeros.
        points: The grid, float32 [n, p], n a power of two.

    Raises:
        UserError: The spec's group is open (`Higgs.size`)."""
    count, dim = points.shape
    group = spec.size(width)
    groups, vectors = -(-width // group), -(-group // dim)
    signs = _signs(spec.seed, groups * group)
    gain = 1.0 if spec.rotated else _gain(group)

    def turn(x, inverse: bool):
        """Multiply groups by M, or by its transpose. Rotated vectors, which take no H, are only
        scaled by sqrt(h)."""
        return x * group**0.5 if spec.rotated else transform(x, inverse)

    def encode(_, x):
        blocks = (_pad(wide(x), groups * group) * signs[None]).reshape(-1, groups, group)
        length = jnp.sqrt((blocks * blocks).sum(-1))
        scale = length.astype(spec.dtype)
        # Decoding multiplies by the scale as it is stored, in `dtype`, so that encoding divides by
        # that. A corrected scale depends on the codes. These are then chosen by the unrounded
        # length.
        divisor = scale.astype(jnp.float32) if spec.norm == "plain" else length
        # A group of zeros is divided by 1 instead of by its length 0. Its scale is 0, so that it
        # decodes to zeros.
        y = turn(blocks, False) / (jnp.where(divisor > 0, divisor, 1.0) / gain)[..., None]
        y = _pad(y, vectors * dim).reshape(*y.shape[:-1], vectors, dim)
        codes = nearest(jnp.asarray(points), y)
        if spec.norm != "plain":
            numbers = points_of(points, codes)[..., :group]
            aim = y.reshape(*numbers.shape[:-1], -1)[..., :group]
            scale = (length * _correction(spec.norm, numbers, aim)).astype(spec.dtype)
        # Scales are stored with tokens on the last axis: [groups, u].
        return {"codes": codes.reshape(-1, groups * vectors), "scale": scale.T}

    def read_points(codes):
        """Look grid points up and transform them back: M^T c of every group, [..., groups *
        group]."""
        lead = codes.shape[:-1]
        y = points_of(points, codes.reshape(*lead, groups, vectors))
        # The last point of a group reaches beyond it where h is no multiple of p.
        return turn(y[..., :group], True).reshape(*lead, groups * group)

    # `higgs_tpu.plan` gives None for grids and groups that its form does not serve.
    plan = None if spec.rotated else higgs_tpu.plan(points, group, groups)
    forms = (
        {}
        if plan is None
        else {name: functools.partial(form.inverse, plan) for name, form in FORMS.items()}
    )

    def decode(_, tile):
        x = jax.lax.platform_dependent(
            tile["codes"].astype(jnp.uint32), **forms, default=read_points
        )
        lead = x.shape[:-1]
        # x_hat = s H^T c / h = s M^T c / (h / gain).
        scale = jnp.swapaxes(tile["scale"], -1, -2).astype(jnp.float32) / (group / gain)
        blocks = x.reshape(*lead, groups, group) * scale[..., None]
        return (blocks.reshape(*lead, groups * group) * signs.reshape((1,) * len(lead) + (-1,)))[
            ..., :width
        ]

    return Codec(
        width, 1, _fields(spec, groups, groups * vectors, int(math.log2(count))), encode, decode
    )


def _summed_form(spec: Higgs, width: int) -> tuple[int, Callable, Callable]:
    """Describe values as grid points times their scale, which are summed over tokens before the
    transform.

    Returns:
        (N, read, finish), as `Linear` of kvqjax.codecs.base says. N is the number of all grid
        numbers of a token, padding included. `read` and `finish` of one platform agree on the order
        of these numbers; those of two platforms need not."""
    points = shipped_grid(spec.bits, spec.dim)
    group = spec.size(width)
    groups, vectors = -(-width // group), -(-group // spec.dim)
    signs = _signs(spec.seed, groups * group)

    def points_by_place(codes):
        """Look up the first numbers of all points of a group, then the second ones, and so on:
        [..., groups, p * vectors]. So no array has a last axis as short as p."""
        columns = [jnp.asarray(column)[codes] for column in points.T]
        return jnp.concatenate(columns, axis=-1)

    def restore_order(y):
        """Put the numbers of each point of `points_by_place` side by side."""
        return jnp.swapaxes(y.reshape(*y.shape[:-1], spec.dim, vectors), -1, -2).reshape(y.shape)

    def read(tile):
        codes = tile["codes"].reshape(*tile["codes"].shape[:-1], groups, vectors)
        y = jax.lax.platform_dependent(
            codes, cpu=functools.partial(points_of, points), default=points_by_place
        )
        scale = jnp.swapaxes(tile["scale"], -1, -2).astype(jnp.float32) / (group / _gain(group))
        return (y * scale[..., None]).reshape(*codes.shape[:-2], -1)

    def finish(_, total):
        y = total.reshape(*total.shape[:-1], groups, spec.dim * vectors)
        # On a CPU `points_of` has left the numbers in order.
        y = jax.lax.platform_dependent(y, cpu=lambda y: y, default=restore_order)[..., :group]
        x = transform(y, True).reshape(*total.shape[:-1], groups * group)
        return (x * signs.reshape((1,) * (x.ndim - 1) + (-1,)))[..., :width]

    return groups * spec.dim * vectors, read, finish


def _within_heads(spec: Higgs, group: int, heads: int, tile) -> Float[Array, "*B n W"]:
    """Read keys that are transformed back within heads, and not yet between heads.

    `group` is the number of channels of a scale, `tile` the stored codes and scales of n tokens."""
    points, lead = shipped_grid(spec.bits, spec.dim), tile["codes"].shape[:-1]
    codes = tile["codes"].reshape(*lead, heads, -1)
    head_dim = codes.shape[-1] * spec.dim

    def read_heads(codes):
        # Sylvester's matrix of D is that of 2 (x) that of D/2: a product of half the size, then a
        # sum and a difference.
        matrix = jnp.asarray(transform_matrix(head_dim // 2), jnp.float32)
        halves = points_of(points, codes).reshape(*codes.shape[:-1], 2, head_dim // 2)
        first, second = jnp.split(
            jnp.einsum("...v,vc->...c", halves, matrix, precision="highest"), 2, axis=-2
        )
        # A sign, not a concatenation of sum and difference: XLA for CPUs does not vectorise what it
        # fuses with that.
        sign = jnp.asarray([1.0, -1.0], jnp.float32).reshape(*(1,) * (codes.ndim - 1), 2, 1)
        return (first + sign * second).reshape(*codes.shape[:-1], head_dim)

    on_gpu = functools.partial(higgs_gpu.within_heads, points, head_dim)
    x = jax.lax.platform_dependent(codes, cuda=on_gpu, default=read_heads)
    scale = jnp.swapaxes(tile["scale"], -1, -2).astype(jnp.float32) / group
    return (x.reshape(*lead, -1, group) * scale[..., None]).reshape(*lead, -1)
