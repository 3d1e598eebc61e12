"""HIGGS: Hadamard transform, one scale per group, nearest point of a Gaussian-optimal grid (AQUA-KV, arXiv 2501.19392,
section 3; HIGGS, arXiv 2411.17525).

    s = ||x||_2 of a group of h channels      y = H x / s      code = argmin_j ||y_p - g_j||^2 of p consecutive entries
    x_hat = H^T (s * g[code]) / h

H H^T = h I, so the entries of y have unit second moment and are close to N(0, 1). For a power of two H is Sylvester's
matrix, as released; else the integer matrix M of kvqjax.codecs.hadamard times sqrt(h) over the length of its rows. Bits
per value: log2(n)/p + 16/h for a grid of n points in p dimensions. Codes are computed against the scale as stored.
Optional fixed random signs flip channels before H: without them structured inputs (a constant vector) become one-hot.

Vectors that the wiring rotates already (kvqjax.methods.rotation) need no H here: y = x sqrt(h) / s, and nothing turns
when they are read. With one dimension, groups of one head and random signs that is TurboQuant (arXiv 2504.19874).
`norm` says which scale s' of the grid points c is stored:

    plain      s                     least squared error on average; x_hat is shorter than x, so scores shrink
    corrected  s sqrt(h) / |c|       |x_hat| = |x| (vLLM's correction)
    unbiased   s h / (c . y)         x_hat . x = |x|^2: a query along x finds the score that it would have found
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvqjax._arguments import check_fields
from kvqjax._errors import UserError
from kvqjax.codecs import higgs_gpu, higgs_tpu
from kvqjax.codecs.base import Codec
from kvqjax.codecs.hadamard import has_hadamard, splits, transform, transform_matrix
from kvqjax.codecs.higgs_grid import group_size, nearest, points_of, shipped_grid
from kvqjax.ops.finite import wide
from kvqjax.ops.layout import Field

__all__ = ["Higgs", "higgs_codec"]

GROUPS = ("head", "width")
NORMS = ("plain", "corrected", "unbiased")
FORMS = {"tpu": higgs_tpu, "cuda": higgs_gpu}  # how a platform decodes otherwise


@dataclasses.dataclass(frozen=True, kw_only=True)
class Higgs:
    """`bits` per value in vectors of `dim` values. `group` channels per scale: None for `group_size`, "head" or "width"
    for those of a head or of all heads. `seed` of the random signs (None: none, as released); `dtype` of the stored
    scales. `rotated` vectors are not transformed; `norm` "plain", "corrected" or "unbiased"."""

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
        if self.norm not in NORMS:
            raise UserError(f"norm={self.norm!r}; known: {', '.join(NORMS)}")
        if self.rotated and self.seed is not None:
            raise UserError(f"seed={self.seed}; the rotation has the signs: rotate=signs:{self.seed}")
        if isinstance(self.group, str):
            if self.group not in GROUPS:
                raise UserError(f"group={self.group!r}; known: {', '.join(GROUPS)}")
        elif self.group is not None and not (self.rotated or has_hadamard(self.group)):
            raise UserError(f"group={self.group}; no Hadamard matrix of that order is known, powers of two always are")
        if self.dtype not in ("bfloat16", "float32"):
            raise UserError(f"dtype={self.dtype!r}; scales are stored as bfloat16 or float32")

    def for_heads(self, heads: int, head_dim: int) -> "Higgs":
        sizes = {"head": head_dim, "width": heads * head_dim}
        return dataclasses.replace(self, group=sizes[self.group]) if isinstance(self.group, str) else self

    def size(self, width: int) -> int:
        """Give the channels that share a scale, of vectors of `width` channels."""
        if isinstance(self.group, str):
            raise UserError(f"group={self.group!r} is open until the model's heads are known (`for_heads`)")
        return self.group or group_size(width)

    def build(self, width: int) -> Codec:
        return higgs_codec(self, width, shipped_grid(self.bits, self.dim))

    def summed_form(self, width: int) -> tuple[int, Callable, Callable] | None:
        """Describe values before their transform (`Linear` of kvqjax.codecs.base)."""
        return None if self.rotated else _summed_form(self, width)

    def mixed_form(self, heads: int, head_dim: int) -> tuple[np.ndarray, Callable] | None:
        """Describe vectors before heads are mixed (`BetweenHeads` of kvqjax.codecs.base)."""
        group = self.size(heads * head_dim)
        plain = not self.rotated and self.seed is None and head_dim % self.dim == 0
        if not (plain and splits(group, head_dim) and heads * head_dim % group == 0):
            return None
        between = _gain(group) * transform_matrix(group // head_dim)
        return np.kron(np.eye(heads * head_dim // group), between), functools.partial(_within_heads, self, group, heads)


def _gain(group: int) -> float:
    """Return what the integers of a group's matrix are multiplied by: 1 for a Hadamard matrix."""
    row = transform_matrix(group)[0].astype(int)
    return math.sqrt(group / (row @ row))


def _signs(seed: int | None, width: int) -> np.ndarray:
    if seed is None:
        return np.ones(width, np.float32)
    return np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), width)


def _pad(x, axis_size: int):
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, axis_size - x.shape[-1])])


def _correction(norm: str, numbers: Float[Array, "u n h"], aim: Float[Array, "u n h"]) -> Float[Array, "u n"]:
    """Compute the factor of the stored scale. `numbers` are those of the grid points that stand for the normalised
    group `aim` (`norm`: see the module)."""
    group = numbers.shape[-1]
    if norm == "corrected":
        return (group / jnp.square(numbers).sum(-1)) ** 0.5
    return group / jnp.maximum((numbers * aim).sum(-1), group / 4)


def _fields(spec: Higgs, groups: int, vectors: int, bits: int) -> dict[str, Field]:
    return {
        "codes": Field(kind="codes", width=vectors, bits=bits, role="payload"),
        "scale": Field(kind="token", width=groups, role="scales", dtype=spec.dtype),
    }


def higgs_codec(spec: Higgs, width: int, points: np.ndarray) -> Codec:
    """Build the codec of `width` channels with the grid `points` float32 [n, p], n a power of two.

    Fields: codes [ceil(h/p) per group], scale [1 per group]. A zero group has scale 0 and decodes to zeros; a group
    with a non-finite value decodes to non-finite values, and only that group.
    """
    count, dim = points.shape
    group = spec.size(width)
    groups, vectors = -(-width // group), -(-group // dim)
    signs = _signs(spec.seed, groups * group)
    gain = 1.0 if spec.rotated else _gain(group)

    def transformed(x, inverse: bool):
        return x * group**0.5 if spec.rotated else transform(x, inverse)

    def encode(_, x):
        blocks = (_pad(wide(x), groups * group) * signs[None]).reshape(-1, groups, group)
        length = jnp.sqrt((blocks * blocks).sum(-1))
        scale = length.astype(spec.dtype)
        # Without a correction the stored, rounded scale is what decoding multiplies by, so that encoding divides by it.
        divisor = scale.astype(jnp.float32) if spec.norm == "plain" else length
        # A group of zeros has no length; 1 stands for it, and its codes are multiplied by a scale of 0 later.
        y = transformed(blocks, False) / (jnp.where(divisor > 0, divisor, 1.0) / gain)[..., None]
        y = _pad(y, vectors * dim).reshape(*y.shape[:-1], vectors, dim)
        codes = nearest(jnp.asarray(points), y)
        # The scale takes up what the chosen points are too long or too short.
        if spec.norm != "plain":
            numbers = points_of(points, codes)[..., :group]
            aim = y.reshape(*numbers.shape[:-1], -1)[..., :group]
            scale = (length * _correction(spec.norm, numbers, aim)).astype(spec.dtype)
        return {"codes": codes.reshape(-1, groups * vectors), "scale": scale.T}

    def gathered(codes):
        lead = codes.shape[:-1]
        y = points_of(points, codes.reshape(*lead, groups, vectors))
        return transformed(y[..., :group], True).reshape(*lead, groups * group)

    plan = None if spec.rotated else higgs_tpu.plan(points, group, groups)
    forms = {} if plan is None else {name: functools.partial(form.inverse, plan) for name, form in FORMS.items()}

    def decode(_, tile):
        x = jax.lax.platform_dependent(tile["codes"].astype(jnp.uint32), **forms, default=gathered)
        lead = x.shape[:-1]
        # x_hat = H^T (..) / h, where H is `gain` times the integers that `transformed` has multiplied by.
        scale = jnp.swapaxes(tile["scale"], -1, -2).astype(jnp.float32) / (group / gain)
        blocks = x.reshape(*lead, groups, group) * scale[..., None]
        return (blocks.reshape(*lead, groups * group) * signs.reshape((1,) * len(lead) + (-1,)))[..., :width]

    return Codec(width, 1, _fields(spec, groups, groups * vectors, int(math.log2(count))), encode, decode)


def _summed_form(spec: Higgs, width: int) -> tuple[int, Callable, Callable]:
    """Describe vectors of `width` channels as grid points times their scale, which are summed before they are
    transformed."""
    points = shipped_grid(spec.bits, spec.dim)
    group = spec.size(width)
    groups, vectors = -(-width // group), -(-group // spec.dim)
    signs = _signs(spec.seed, groups * group)

    def by_place(codes):
        """Look up the numbers at each place of the points in turn: no axis as narrow as a point."""
        columns = [jnp.asarray(column)[codes] for column in points.T]
        return jnp.concatenate(columns, axis=-1)

    def in_order(y):
        """Put numbers that `by_place` looked up side by side again, point by point."""
        return jnp.swapaxes(y.reshape(*y.shape[:-1], spec.dim, vectors), -1, -2).reshape(y.shape)

    def read(tile):
        codes = tile["codes"].reshape(*tile["codes"].shape[:-1], groups, vectors)
        y = jax.lax.platform_dependent(codes, cpu=functools.partial(points_of, points), default=by_place)
        scale = jnp.swapaxes(tile["scale"], -1, -2).astype(jnp.float32) / (group / _gain(group))
        return (y * scale[..., None]).reshape(*codes.shape[:-2], -1)

    def finish(_, total):
        y = total.reshape(*total.shape[:-1], groups, spec.dim * vectors)
        y = jax.lax.platform_dependent(y, cpu=lambda y: y, default=in_order)[..., :group]
        x = transform(y, True).reshape(*total.shape[:-1], groups * group)
        return (x * signs.reshape((1,) * (x.ndim - 1) + (-1,)))[..., :width]

    return groups * spec.dim * vectors, read, finish


def _within_heads(spec: Higgs, group: int, heads: int, tile) -> Float[Array, "*B n W"]:
    """Read keys of `heads` heads transformed back within heads only."""
    points, lead = shipped_grid(spec.bits, spec.dim), tile["codes"].shape[:-1]
    codes = tile["codes"].reshape(*lead, heads, -1)
    head_dim = codes.shape[-1] * spec.dim

    def looked_up(codes):
        matrix = jnp.asarray(transform_matrix(head_dim), jnp.float32)
        return jnp.einsum("...v,vc->...c", points_of(points, codes), matrix, precision="highest")

    on_gpu = functools.partial(higgs_gpu.within_heads, points, head_dim)
    x = jax.lax.platform_dependent(codes, cuda=on_gpu, default=looked_up)
    scale = jnp.swapaxes(tile["scale"], -1, -2).astype(jnp.float32) / group
    return (x.reshape(*lead, -1, group) * scale[..., None]).reshape(*lead, -1)
