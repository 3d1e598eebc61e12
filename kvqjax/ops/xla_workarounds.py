"""What XLA must be told so that it leaves arrays where and as they are: every workaround has a name here.

A docstring says what a function gives. The comment in it says what the compiler did without it.
"""

import functools
import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

__all__ = [
    "all_lanes",
    "cut_along",
    "cut_at",
    "depending_on",
    "entering_after",
    "exp_in_loops",
    "few_rows",
    "filled_by",
    "floor_divide",
    "given_to_gpus",
    "head_lanes",
    "kept_apart",
    "known_after",
    "made_once",
    "modulo",
    "of_two",
    "put_at",
    "rounded",
    "row_major",
    "rows_if",
    "scores_of",
    "sums_of",
    "times_matrix",
    "unknown_zero",
    "zeros_by",
]

Tree = TypeVar("Tree")
Index = Int[Array, "*S"] | int

MOST_HEADS = 4  # KV heads that a CPU leaves side by side; it makes as many times the products
FEW = 64  # rows; the product of so many with a matrix is bound by the matrix's bytes
LN2_HIGH = np.float32(0.693359375)  # log 2 in 9 bits, whose product with a power of up to 2**14 is exact
LN2_LOW = np.float32(math.log(2) - 0.693359375)  # what is missing


# Indices: as few operations as a step needs. Every one is a kernel or a part of one.


def floor_divide(x: Index, by: int) -> Index:
    """Return `x // by`, for `by` > 0."""
    # `//` rounds down for negative numbers too, which takes XLA a dozen operations; by a power of two it is one shift.
    return x // by if by & (by - 1) else x >> by.bit_length() - 1


def modulo(x: Index, by: int) -> Index:
    """Return `x % by`, for `by` > 0."""
    # As for `floor_divide`: by a power of two it is one mask.
    return x % by if by & (by - 1) else x & (by - 1)


def cut_at(array: Shaped[Array, "..."], start: tuple[Index, ...], shape: tuple[int, ...]) -> Shaped[Array, "..."]:
    """Return the part of `shape` that begins at `start`, which is nowhere negative."""
    # `jax.lax` takes negative starts from the end, by three operations an axis.
    return jax.lax.dynamic_slice(array, start, shape, allow_negative_indices=False)


def cut_along(array: Shaped[Array, "..."], start: Index, count: int, axis: int) -> Shaped[Array, "..."]:
    """Return `count` entries of an axis from `start` on, which is not negative."""
    # As for `cut_at`.
    return jax.lax.dynamic_slice_in_dim(array, start, count, axis, allow_negative_indices=False)


def put_at(array: Shaped[Array, "..."], part: Shaped[Array, "..."], start: tuple[Index, ...]) -> Shaped[Array, "..."]:
    """Return `array` with `part` in the place that begins at `start`, which is nowhere negative."""
    # As for `cut_at`.
    return jax.lax.dynamic_update_slice(array, part, start, allow_negative_indices=False)


# Arrays that stay in their order, and parts of a program that stay apart.


def row_major(x: Shaped[Array, "*S"]) -> Shaped[Array, "*S"]:
    """Return `x`, kept in row-major order, as what is cut from or put into a stored array must be."""
    # A user that wants another order (a transpose, a head split) made XLA re-order the whole array, not the piece.
    mesh = jax.sharding.get_abstract_mesh()
    # XLA's partitioner gathers around a layout constraint: under a mesh (`jax.set_mesh`) it only stands in shard_map.
    if not (mesh.empty or mesh.are_all_axes_manual):
        return x
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def kept_apart(tree: Tree) -> Tree:
    """Return `tree`, each part of which is ready before any is used."""
    # XLA merged what comes before with what comes after, or computed what comes before anew for every user.
    return jax.lax.optimization_barrier(tree)


def given_to_gpus(tree: Tree) -> Tree:
    """Return `tree`, which XLA for GPUs takes as given."""
    # Whenever XLA for GPUs fuses one user of an operation it weighs all others anew: of one with users in every layer,
    # compile time grows with the square of the depth.
    return jax.lax.platform_dependent(tree, cuda=kept_apart, default=lambda tree: tree)


def made_once(x: Float[Array, "*B T P"]) -> Float[Array, "*B T P"]:
    """Return `x`, written to memory before it is used."""

    # XLA for CPUs fused what makes it into its user and computed it once for every number of the result. It drops an
    # optimization barrier, but leaves a product's operands and result apart.
    def times_identity(x):
        return jnp.einsum("...p,pq->...q", x, jnp.eye(x.shape[-1], dtype=x.dtype), precision="highest")

    return jax.lax.platform_dependent(x, cpu=times_identity, default=lambda x: x)


def few_rows(x: Float[Array, "*N E"]) -> Float[Array, "*N E"]:
    """Return `x`, what a product has made; of few rows, it is ready before anything uses it on a TPU."""
    # XLA for TPUs makes a product and the one that uses it a single program, which takes a seventh longer than both.
    if math.prod(x.shape[:-1]) > FEW:
        return x
    return jax.lax.platform_dependent(x, tpu=kept_apart, default=lambda x: x)


# Arithmetic in a form that XLA computes well.


def rounded(x: Float[Array, "*S"], dtype: DTypeLike) -> Float[Array, "*S"]:
    """Return `x` rounded to the numbers that `dtype` has, in its own dtype."""
    # XLA may drop a conversion there and back, and an encoder and a decoder would then differ.
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def exp_in_loops(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Compute e^x of float32 numbers that are at most 0, within 2e-7 of it; 0 below -87, where float32 loses digits
    (Cody and Waite, Software Manual for the Elementary Functions, 1980)."""

    # XLA for CPUs takes four times as long for an exponential of what it computes in the same loop, and uses one core.
    def series(x):
        x = jnp.where(x < -87, np.float32(-88), x)
        power = jnp.round(x * np.float32(1 / math.log(2)))
        remainder = (x - power * LN2_HIGH) - power * LN2_LOW  # e^x = 2^power e^remainder, |remainder| < 0.35
        total = jnp.full_like(x, 1 / math.factorial(7))
        for n in reversed(range(7)):
            total = total * remainder + np.float32(1 / math.factorial(n))
        scale = jax.lax.bitcast_convert_type((power.astype(jnp.int32) + 127) << 23, jnp.float32)
        return jnp.where(x < -87, np.float32(0), total * scale)

    return jax.lax.platform_dependent(x, cpu=series, default=jnp.exp)


def times_matrix(
    x: Float[Array, "*N E"], w: Float[Array, "_ _"], dtype: DTypeLike | None = None, turned: bool = False
) -> Float[Array, "*N F"]:
    """Multiply `x` by a matrix.

    Args:
        x: rows.
        w: [E, F], or [F, E] if it is `turned`.
        dtype: of the result, if one is given.
        turned: whether the matrix is.

    Returns:
        The products.
    """
    equation = "...e,fe->...f" if turned else "...e,ef->...f"
    plain = functools.partial(jnp.einsum, equation, preferred_element_type=dtype)
    if x.ndim < 2 or math.prod(x.shape[:-1]) != 1:
        return plain(x, w)

    # XLA for TPUs multiplies a single row on the vector unit, which takes four times what the matrix's bytes do on a
    # v5e or v6e; of two rows it makes a product.
    def two_rows(x, w):
        pad = [(0, 0)] * (x.ndim - 2) + [(0, 1), (0, 0)]
        return plain(jnp.pad(x, pad), w)[..., :1, :]

    # XLA for CPUs takes a third longer than a matrix's bytes do; of the sum's quarters it makes products that both
    # cores read at their full rate.
    def quarters(x, w):
        parts, w = x.reshape(4, -1), w.reshape(4, -1, w.shape[1])
        out = jnp.einsum("pe,pef->pf", parts, w, preferred_element_type=dtype).sum(0)
        return out.reshape(*x.shape[:-1], -1)

    cut = not turned and x.shape[-1] % 4 == 0 and x.dtype == w.dtype == jnp.float32
    return jax.lax.platform_dependent(x, w, tpu=two_rows, cpu=quarters if cut else plain, default=plain)


def of_two(make: Callable[..., Tree], *rows: Shaped[Array, "1 ..."]) -> Tree:
    """Return `make(*rows)` for arrays of one row, computed as the first of two equal ones."""
    # Of a vector times a small matrix XLA for GPUs makes two kernels: one writes all products, the other adds them up.
    # Keys' and values' matrices of an 8B model took 32 us a layer, a tenth of a step, where their bytes take 5 (H100,
    # jax 0.11.2). Of two rows it makes one product with the queries' matrix, 19 us for all three.
    pairs = make(*(jnp.broadcast_to(x, (2, *x.shape[1:])) for x in rows))
    return jax.tree.map(lambda x: x[:1], pairs)


def all_lanes(x: Float[Array, "B K G T D"], mix: np.ndarray | None = None) -> Float[Array, "B K G T K D"]:
    """Put every head's rows on the channels of all heads: in their own head's, zero elsewhere. With `mix` [K, K], they
    stand in every head's, times a row of it."""
    shares = jnp.eye(x.shape[1], dtype=x.dtype) if mix is None else jnp.asarray(mix, x.dtype)
    return x[:, :, :, :, None] * shares[None, :, None, None, :, None]


def head_lanes(x: Float[Array, "B K G T L"]) -> Float[Array, "B K G T D"]:
    """Take every head's own channels of those of all heads."""
    shares = jnp.eye(x.shape[1])[None, :, None, None, :, None]
    return (x.reshape(*x.shape[:4], x.shape[1], -1) * shares).sum(4)


def _are_few(rows: Float[Array, "B K G T _"]) -> bool:
    """Say whether a CPU may multiply these rows by the channels of all heads, of which each needs those of one."""
    return 1 < rows.shape[1] <= MOST_HEADS and math.prod(rows.shape[1:4]) <= FEW


def scores_of(q: Float[Array, "B K G T D"], k: Float[Array, "B S K D"]) -> Float[Array, "B K G T S"]:
    """Multiply queries by keys, float32."""
    plain = functools.partial(jnp.einsum, "bkgtd,bskd->bkgts", preferred_element_type=jnp.float32)
    if q.shape[2] * q.shape[3] > FEW:
        return plain(q, k)

    # XLA for CPUs turns the second operand of a product over its last axis. Of a few queries that costs more than the
    # product, and keys that are decoded for it are then made number by number. Taking a few heads apart costs more
    # than the zeros of queries that meet all of them.
    def keys_first(q, k):
        if _are_few(q):
            k, rows = k.reshape(*k.shape[:2], -1), all_lanes(q).reshape(*q.shape[:4], -1)
            scores = jnp.einsum("bsc,bkgtc->bskgt", k, rows, preferred_element_type=jnp.float32)
            return jnp.moveaxis(scores, 1, -1)
        scores = jnp.einsum("bskd,bkgtd->bksgt", k, q, preferred_element_type=jnp.float32)
        return jnp.moveaxis(scores, 2, -1)

    return jax.lax.platform_dependent(q, k, cpu=keys_first, default=plain)


def sums_of(weights: Float[Array, "B K G T S"], v: Float[Array, "B S K D"]) -> Float[Array, "B K G T D"]:
    """Sum values under their weights, float32."""
    plain = functools.partial(jnp.einsum, "bkgts,bskd->bkgtd", preferred_element_type=jnp.float32)
    if not _are_few(weights):
        return plain(weights, v)

    # As for `scores_of`: taking a few heads apart costs a CPU more than the products that nobody needs.
    def together(weights, v):
        v = v.reshape(*v.shape[:2], -1)
        return head_lanes(jnp.einsum("bkgts,bsc->bkgtc", weights, v, preferred_element_type=jnp.float32))

    return jax.lax.platform_dependent(weights, v, cpu=together, default=plain)


# Values that XLA must not know too early, so that it neither moves nor copies what uses them.


def _never(x: Array) -> Bool[Array, ""]:
    """Return False, made of a number of `x`, so that XLA cannot know it before."""
    number = x.reshape(-1)[0]
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        number = number.astype(jnp.float32)
    return jnp.isposinf(number) & jnp.isneginf(number)


def depending_on(x: Array, new: Tree) -> Tree:
    """Return `new`, made to depend on `x`."""
    # What a layer outside a loop captures is ready before its attention has read the body: XLA copied the body so that
    # `append` may write at the same time. It must be data, since an optimization barrier is gone when XLA's CPU
    # backend places copies.
    never = given_to_gpus(_never(x))
    return jax.tree.map(lambda y: jnp.where(never, jnp.zeros_like(y), y), new)


def entering_after(body: Tree, new: dict[str, Array]) -> dict[str, Array]:
    """Return `new`, which enters the window, not before `body` has what was due of it."""
    # XLA for CPUs copied the window at every step, so that it may be written while what is due is read.
    body = jax.tree.leaves(body)[0]
    return jax.lax.platform_dependent(body, new, cpu=depending_on, default=lambda _, new: new)


def known_after(x: Array, number: Int[Array, ""] | int) -> Int[Array, ""]:
    """Return `number`, which XLA cannot know before it has `x`."""
    # XLA may cut what is cut from a stored array at a known number for all unrolled layers at once. Where the number is
    # part of the kernel that reads, a GPU makes it anew for every number read, with all that `x` comes from.
    return given_to_gpus(jnp.where(_never(x), jnp.int32(number + 1), jnp.int32(number)))


def unknown_zero(counts: Int[Array, " B"]) -> Int[Array, ""]:
    """Return zero, made of counts that are never negative, so that XLA cannot know it."""
    # XLA unrolls a loop of one turn: it copied that layer's weights out of the stack before a decode loop, and compiled
    # a layer's products anew.
    return jnp.minimum(counts[0], 0)


def filled_by(x: Array, shapes: Tree) -> Tree:
    """Make arrays of these shapes and dtypes to be overwritten, filled with one number of `x`."""
    # Zeros are ready at once, and XLA made those of all unrolled layers at the start.
    number = x.reshape(-1)[0]
    return jax.tree.map(lambda like: jnp.full(like.shape, number, like.dtype), shapes)


def zeros_by(x: Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Make zeros, float32, that XLA cannot know before it has `x`."""
    # It made constant ones for all unrolled layers at once.
    return jnp.full(shape, jnp.where(_never(x), 1.0, 0.0), jnp.float32)


def rows_if(condition: Bool[Array, ""], rows: int) -> Int[Array, ""]:
    """Count the rows that a loop goes over: none where the condition is False, instead of a `cond`."""
    # XLA for GPUs copies whatever passes through the branch of a `cond` that leaves it as it is.
    return jnp.where(condition, rows, 0)
