"""HIGGS: Hadamard transform, one scale per group, nearest point of a Gaussian-optimal grid (AQUA-KV, arXiv 2501.19392,
section 3; HIGGS, arXiv 2411.17525).

    s = ||x||_2 of a group of h channels      y = H x / s      code = argmin_j ||y_p - g_j||^2 of p consecutive entries
    x_hat = H^T (s * g[code]) / h

H is unnormalised, so the entries of y have unit second moment and are close to N(0, 1). Bits per value: log2(n)/p +
16/h for a grid of n points in p dimensions. Codes are computed against the scale as stored. Optional fixed random
signs flip channels before H: without them structured inputs (a constant vector) become one-hot.

Vectors that the wiring rotates already (kvqjax.methods.rotation) need no H here: y = x sqrt(h) / s, and nothing turns
when they are read. With one dimension, groups of one head and random signs that is TurboQuant (arXiv 2504.19874).
`norm` says which scale s' of the grid points c is stored:

    plain      s                     least squared error on average; x_hat is shorter than x, so scores shrink
    corrected  s sqrt(h) / |c|       |x_hat| = |x| (vLLM's correction)
    unbiased   s h / (c . y)         x_hat . x = |x|^2: a query along x finds the score that it would have found
"""

import dataclasses
import functools
import importlib.resources
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt

from kvqjax.codecs import higgs_gpu, higgs_tpu
from kvqjax.codecs.base import Codec
from kvqjax.codecs.hadamard import has_hadamard, transform
from kvqjax.codecs.nuq_table import look_up
from kvqjax.ops.finite import wide
from kvqjax.ops.layout import Field

__all__ = ["Higgs", "group_size", "higgs_codec", "nearest", "shipped_grid", "summed_form"]

NORMS = ("plain", "corrected", "unbiased")
LARGEST_GROUP = 1024
SMALLEST_GROUP = 64  # below this a divisor costs more in scales than zero padding costs in codes
FORMS = {"tpu": higgs_tpu, "cuda": higgs_gpu}  # how a platform decodes otherwise
BLOCK = 16  # grid points compared in one unrolled pass: the fastest on CPU among 8 to 64


@functools.cache
def _grids() -> dict[str, np.ndarray]:
    with importlib.resources.files("kvqjax.codecs").joinpath("grids.npz").open("rb") as file:
        return {name: grid.astype(np.float32) for name, grid in np.load(file).items()}


def shipped_grid(bits: int, dim: int) -> np.ndarray:
    """Gaussian-optimal grid float32 [2^(bits*dim), dim], computed by benchmarks/make_grids.py."""
    name = f"p{dim}_n{2 ** (bits * dim)}"
    if name not in _grids():
        known = ", ".join(sorted(_grids()))
        raise ValueError(f"no grid of {bits} bits in {dim} dimensions ({name}); known: {known}")
    return _grids()[name]


def group_size(width: int) -> int:
    """Channels per Hadamard group: the largest divisor of `width` up to 1024 that has a Hadamard matrix; for widths
    without a useful one, the next power of two (the channels are padded with zeros)."""
    divisors = [g for g in range(1, min(LARGEST_GROUP, width) + 1) if width % g == 0 and has_hadamard(g)]
    if divisors[-1] >= min(SMALLEST_GROUP, width):
        return divisors[-1]
    return min(LARGEST_GROUP, 1 << (width - 1).bit_length())


def nearest(grid: Float[Array, "n p"], y: Float[Array, "*B p"]) -> UInt[Array, "*B"]:
    """Index of the grid point nearest to each vector: the first maximum of 2 y.g - |g|^2, float32.

    Products of depth p <= 6 waste a matrix unit, and XLA's argmax over a materialised score table was 3 to 30 times
    slower than this running maximum over unrolled blocks (128 tokens of 1024 channels on CPU).
    """
    count, dim = grid.shape
    block = min(BLOCK, count)
    bias = (grid * grid).sum(1)
    columns = [y[..., i] for i in range(dim)]

    def visit(index, state):
        best, code = state
        start = index * block
        points = jax.lax.dynamic_slice_in_dim(2 * grid, start, block)
        norms = jax.lax.dynamic_slice_in_dim(bias, start, block)
        for j in range(block):
            score = sum(columns[i] * points[j, i] for i in range(dim)) - norms[j]
            better = score > best
            code = jnp.where(better, (start + j).astype(jnp.uint32), code)
            best = jnp.where(better, score, best)
        return best, code

    start = jnp.full(y.shape[:-1], -jnp.inf, jnp.float32), jnp.zeros(y.shape[:-1], jnp.uint32)
    return jax.lax.fori_loop(0, count // block, visit, start)[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Higgs:
    """`bits` per value in vectors of `dim` values; `group` channels per scale (None: `group_size`); `seed` of the
    random signs (None: none, as released); `dtype` of the stored scales. `rotated` vectors are not transformed;
    `norm` "plain", "corrected" or "unbiased"."""

    bits: int = 2
    dim: int = 2
    group: int | None = None
    seed: int | None = None
    dtype: str = "bfloat16"
    rotated: bool = False
    norm: str = "plain"

    def __post_init__(self):
        shipped_grid(self.bits, self.dim)
        if self.norm not in NORMS:
            raise ValueError(f"norm={self.norm!r}; known: {', '.join(NORMS)}")
        if self.rotated and self.seed is not None:
            raise ValueError(f"seed={self.seed}; the rotation has the signs: rotate=signs:{self.seed}")
        if self.group is not None and not (self.rotated or has_hadamard(self.group)):
            raise ValueError(f"group={self.group}; no Hadamard matrix of that order is known, powers of two always are")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype={self.dtype!r}; scales are stored as bfloat16 or float32")

    def build(self, width: int) -> Codec:
        return higgs_codec(self, width, shipped_grid(self.bits, self.dim))


def _signs(seed: int | None, width: int) -> np.ndarray:
    if seed is None:
        return np.ones(width, np.float32)
    return np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), width)


def _pad(x, axis_size: int):
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, axis_size - x.shape[-1])])


def higgs_codec(spec: Higgs, width: int, points: np.ndarray) -> Codec:
    """The codec on `width` channels with the grid `points` float32 [n, p], n a power of two.

    Fields: codes [ceil(h/p) per group], scale [1 per group]. A zero group has scale 0 and decodes to zeros; a group
    with a non-finite value decodes to non-finite values, and only that group.
    """
    count, dim = points.shape
    group = spec.group or group_size(width)
    groups, vectors = -(-width // group), -(-group // dim)
    signs = _signs(spec.seed, groups * group)
    fields = {
        "codes": Field(kind="codes", width=groups * vectors, bits=int(math.log2(count)), role="payload"),
        "scale": Field(kind="token", width=groups, role="scales", dtype=spec.dtype),
    }

    def transformed(x, inverse: bool):
        return x * group**0.5 if spec.rotated else transform(x, inverse)

    def encode(_, x):
        blocks = (_pad(wide(x), groups * group) * signs[None]).reshape(-1, groups, group)
        length = jnp.sqrt((blocks * blocks).sum(-1))
        scale = length.astype(spec.dtype)
        divisor = scale.astype(jnp.float32) if spec.norm == "plain" else length
        y = transformed(blocks, False) / jnp.where(divisor > 0, divisor, 1.0)[..., None]
        y = _pad(y, vectors * dim).reshape(*y.shape[:-1], vectors, dim)
        codes = nearest(jnp.asarray(points), y)
        if spec.norm != "plain":
            found = points_of(codes)[..., :group]
            if spec.norm == "corrected":
                gain = (group / jnp.square(found).sum(-1)) ** 0.5
            else:
                gain = group / jnp.maximum((found * y.reshape(*found.shape[:-1], -1)[..., :group]).sum(-1), group / 4)
            scale = (length * gain).astype(spec.dtype)
        return {"codes": codes.reshape(-1, groups * vectors), "scale": scale.T}

    def points_of(codes):
        """Grid points of codes [.., groups, vectors], side by side."""
        found = look_up(codes, jnp.asarray(points[:, 0])) if dim == 1 else jnp.asarray(points)[codes]
        return found.reshape(*codes.shape[:-1], vectors * dim)

    def gathered(codes):
        lead = codes.shape[:-1]
        y = points_of(codes.reshape(*lead, groups, vectors))
        return transformed(y[..., :group], True).reshape(*lead, groups * group)

    plan = None if spec.rotated else higgs_tpu.plan(points, group, groups)
    forms = {} if plan is None else {name: functools.partial(form.inverse, plan) for name, form in FORMS.items()}

    def decode(_, tile):
        x = jax.lax.platform_dependent(tile["codes"].astype(jnp.uint32), **forms, default=gathered)
        lead = x.shape[:-1]
        scale = jnp.swapaxes(tile["scale"], -1, -2).astype(jnp.float32) / group
        blocks = x.reshape(*lead, groups, group) * scale[..., None]
        return (blocks.reshape(*lead, groups * group) * signs.reshape((1,) * len(lead) + (-1,)))[..., :width]

    return Codec(width, 1, fields, encode, decode)


def summed_form(spec: Higgs, width: int) -> tuple[int, Callable, Callable]:
    """Vectors of `width` channels as they are summed before they are transformed: (N, read, finish).

    read(tile) gives [..., n, N], grid points times their scale; finish takes a weighted sum of them, [..., N], to the
    same sum [..., width] of what `decode` gives, the transform being linear."""
    points = shipped_grid(spec.bits, spec.dim)
    group = spec.group or group_size(width)
    groups, vectors = -(-width // group), -(-group // spec.dim)
    signs = _signs(spec.seed, groups * group)

    def read(tile):
        codes = tile["codes"].reshape(*tile["codes"].shape[:-1], groups, 1, vectors)
        found = jnp.concatenate([jnp.asarray(column)[codes] for column in points.T], axis=-2)
        scale = jnp.swapaxes(tile["scale"], -1, -2).astype(jnp.float32) / group
        return (found * scale[..., None, None]).reshape(*codes.shape[:-3], -1)

    def finish(total):
        y = total.reshape(*total.shape[:-1], groups, spec.dim, vectors)
        y = jnp.swapaxes(y, -1, -2).reshape(*y.shape[:-2], -1)[..., :group]
        x = transform(y, True).reshape(*total.shape[:-1], groups * group)
        return (x * signs.reshape((1,) * (x.ndim - 1) + (-1,)))[..., :width]

    return groups * spec.dim * vectors, read, finish
