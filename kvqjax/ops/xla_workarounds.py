"""Workarounds for XLA, each under a name: hints that keep it from copying, re-ordering or merging
arrays.

The docstring of a function says what the function returns. The comment in it says what XLA did
without it.
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

Tree = TypeVar("Tree")
Index = Int[Array, "*S"] | int

# Most KV heads whose channels a CPU multiplies together (`all_lanes`). With K heads it computes K
# times as many products.
MOST_HEADS = 4
# Most rows of a product with a matrix whose time is that of reading the matrix.
FEW = 64
# log 2 as the sum of two float32 numbers. The first has 9 bits: its product with a whole number up
# to 2**14 is exact.
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(math.log(2) - 0.693359375)


# Indices: as few operations as a step needs. Every one is a kernel or a part of one.


def floor_divide(x: Index, by: int) -> Index:
    """Return `x // by`, for `by` > 0."""
    # `//` rounds down for negative numbers too, which takes XLA a dozen operations. By a power of
    # two it is one shift.
    is_power_of_two = not by & (by - 1)
    return x >> by.bit_length() - 1 if is_power_of_two else x // by


def modulo(x: Index, by: int) -> Index:
    """Return `x % by`, for `by` > 0."""
    # As for `floor_divide`. By a power of two it is one mask.
    is_power_of_two = not by & (by - 1)
    return x & (by - 1) if is_power_of_two else x % by


def cut_at(
    array: Shaped[Array, "..."], start: tuple[Index, ...], shape: tuple[int, ...]
) -> Shaped[Array, "..."]:
    """Return the part of `shape` that begins at `start`. No start may be negative."""
    # `jax.lax` counts negative starts from the end, which takes three operations an axis.
    return jax.lax.dynamic_slice(array, start, shape, allow_negative_indices=False)


def cut_along(
    array: Shaped[Array, "..."], start: Index, count: int, axis: int
) -> Shaped[Array, "..."]:
    """Return `count` entries of an axis from `start` on, which may not be negative."""
    # As for `cut_at`.
    return jax.lax.dynamic_slice_in_dim(array, start, count, axis, allow_negative_indices=False)


def put_at(
    array: Shaped[Array, "..."], part: Shaped[Array, "..."], start: tuple[Index, ...]
) -> Shaped[Array, "..."]:
    """Return `array` with `part` in the place that begins at `start`. No start may be negative."""
    # As for `cut_at`.
    return jax.lax.dynamic_update_slice(array, part, start, allow_negative_indices=False)


# Arrays that stay in their order, and parts of a program that stay apart.


def row_major(x: Shaped[Array, "*S"]) -> Shaped[Array, "*S"]:
    """Return `x`, kept in row-major order in memory. Pieces that are cut from or put into a stored
    array need this."""
    # An operation that wants a piece in another order (a transpose, a head split) made XLA re-order
    # the whole array instead of the piece.
    mesh = jax.sharding.get_abstract_mesh()
    # XLA's partitioner gathers an array for a layout constraint. So under a mesh (`jax.set_mesh`)
    # there is none, except inside shard_map.
    if not (mesh.empty or mesh.are_all_axes_manual):
        return x
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def kept_apart(tree: Tree) -> Tree:
    """Return `tree`. All its arrays are computed before any of them is used."""
    # XLA merged the operations before with those after, or computed the operations before anew for
    # every user.
    return jax.lax.optimization_barrier(tree)


def given_to_gpus(tree: Tree) -> Tree:
    """Return `tree`. XLA for GPUs does not fuse the operations that compute it into their users."""
    # Whenever XLA for GPUs fuses an operation into one user, it considers all its other users anew.
    # For an operation with users in every layer, compile time grows with the square of the number
    # of layers.
    return jax.lax.platform_dependent(tree, cuda=kept_apart, default=lambda tree: tree)


def made_once(x: Float[Array, "*B T P"]) -> Float[Array, "*B T P"]:
    """Return `x`, written to memory before it is used."""

    # XLA for CPUs fused the operations that compute `x` into its user, and repeated them for every
    # number of the user's result. It removes an optimization barrier, but does not fuse through a
    # matrix product.
    def times_identity(x):
        return jnp.einsum(
            "...p,pq->...q", x, jnp.eye(x.shape[-1], dtype=x.dtype), precision="highest"
        )

    return jax.lax.platform_dependent(x, cpu=times_identity, default=lambda x: x)


def few_rows(x: Float[Array, "*N E"]) -> Float[Array, "*N E"]:
    """Return `x`, the result of a matrix product. If it has few rows, a TPU computes it before
    anything uses it."""
    # XLA for TPUs fuses a product and a second product that uses the first. That takes a seventh
    # longer than both apart.
    if math.prod(x.shape[:-1]) > FEW:
        return x
    return jax.lax.platform_dependent(x, tpu=kept_apart, default=lambda x: x)


# Arithmetic in a form that XLA computes well.


def rounded(x: Float[Array, "*S"], dtype: DTypeLike) -> Float[Array, "*S"]:
    """Round `x` to numbers of `dtype`, and return them in the dtype of `x`."""
    # XLA may remove a conversion to `dtype` and back. An encoder and a decoder would then differ.
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def exp_in_loops(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Compute e^x of float32 numbers x <= 0, with an error of at most 2e-7. Below -87, where e^x is
    nearly too small for float32, it is 0 (method: Cody and Waite, Software Manual for the
    Elementary Functions, 1980)."""

    # Where XLA for CPUs fuses an exponential into the loop that computes its argument, the loop
    # takes four times as long and uses one core.
    def series(x):
        x = jnp.where(x < -87, np.float32(-88), x)
        power = jnp.round(x * np.float32(1 / math.log(2)))
        remainder = (
            x - power * LN2_HIGH
        ) - power * LN2_LOW  # e^x = 2^power e^remainder, |remainder| < 0.35
        # Taylor's series of e^remainder up to the 7th power, by Horner's rule.
        total = jnp.full_like(x, 1 / math.factorial(7))
        for n in reversed(range(7)):
            total = total * remainder + np.float32(1 / math.factorial(n))
        # The bits of the float32 number 2^power: the exponent, plus 127, above 23 bits of mantissa.
        scale = jax.lax.bitcast_convert_type((power.astype(jnp.int32) + 127) << 23, jnp.float32)
        return jnp.where(x < -87, np.float32(0), total * scale)

    return jax.lax.platform_dependent(x, cpu=series, default=jnp.exp)


def times_matrix(
    x: Float[Array, "*N E"],
    w: Float[Array, "_ _"],
    dtype: DTypeLike | None = None,
    turned: bool = False,
) -> Float[Array, "*N F"]:
    """Multiply `x` by a matrix.

    Args:
        x: rows.
        w: the matrix [E, F], or its transpose [F, E].
        dtype: of the result; None: that of the operands.
        turned: whether `w` is the transpose.
    """
    equation = "...e,fe->...f" if turned else "...e,ef->...f"
    plain = functools.partial(jnp.einsum, equation, preferred_element_type=dtype)
    if x.ndim < 2 or math.prod(x.shape[:-1]) != 1:
        return plain(x, w)

    # XLA for TPUs multiplies a single row on the vector unit. On a v5e or v6e that takes four times
    # as long as reading the matrix. Two rows are multiplied on the matrix unit.
    def two_rows(x, w):
        pad = [(0, 0)] * (x.ndim - 2) + [(0, 1), (0, 0)]
        return plain(jnp.pad(x, pad), w)[..., :1, :]

    # XLA for CPUs takes a third longer than reading the matrix takes. Four products, each over a
    # quarter of E, are computed by both cores at the full rate of their memory.
    def quarters(x, w):
        parts, w = x.reshape(4, -1), w.reshape(4, -1, w.shape[1])
        out = jnp.einsum("pe,pef->pf", parts, w, preferred_element_type=dtype).sum(0)
        return out.reshape(*x.shape[:-1], -1)

    has_quarters = not turned and x.shape[-1] % 4 == 0 and x.dtype == w.dtype == jnp.float32
    on_cpu = quarters if has_quarters else plain
    return jax.lax.platform_dependent(x, w, tpu=two_rows, cpu=on_cpu, default=plain)


def of_two(make: Callable[..., Tree], *rows: Shaped[Array, "1 ..."]) -> Tree:
    """Return `make(*rows)` for arrays of one row. The row is computed twice, and the first result
    is returned."""
    # XLA for GPUs computes a vector times a small matrix in two kernels: one writes all products,
    # the other sums them. The matrices of keys and values of an 8B model took 32 us a layer, a
    # tenth of a step, where reading them takes 5 (H100, jax 0.11.2). Two rows are multiplied by
    # these and the queries' matrix in one kernel of 19 us.
    pairs = make(*(jnp.broadcast_to(x, (2, *x.shape[1:])) for x in rows))
    return jax.tree.map(lambda x: x[:1], pairs)


def all_lanes(
    x: Float[Array, "B K G T D"], mix: np.ndarray | None = None
) -> Float[Array, "B K G T K D"]:
    """Extend the rows of every head to the channels of all heads.

    Args:
        x: rows by KV head.
        mix: [K, K] or None.

    Returns:
        The row of head k has x in the channels of head k, and 0 in those of other heads. With `mix`
        it has mix[k, j] x in the channels of every head j.
    """
    shares = jnp.eye(x.shape[1], dtype=x.dtype) if mix is None else jnp.asarray(mix, x.dtype)
    return x[:, :, :, :, None] * shares[None, :, None, None, :, None]


def head_lanes(x: Float[Array, "B K G T L"]) -> Float[Array, "B K G T D"]:
    """Undo `all_lanes`: of the channels L = K * D of all heads, take the channels of each row's own
    head."""
    shares = jnp.eye(x.shape[1])[None, :, None, None, :, None]
    return (x.reshape(*x.shape[:4], x.shape[1], -1) * shares).sum(4)


def _are_few(rows: Float[Array, "B K G T _"]) -> bool:
    """Say whether a CPU multiplies these rows by the channels of all heads, although each needs
    those of one head."""
    return 1 < rows.shape[1] <= MOST_HEADS and math.prod(rows.shape[1:4]) <= FEW


def scores_of(
    q: Float[Array, "B K G T D"], k: Float[Array, "B S K D"]
) -> Float[Array, "B K G T S"]:
    """Multiply queries by keys, float32."""
    plain = functools.partial(jnp.einsum, "bkgtd,bskd->bkgts", preferred_element_type=jnp.float32)
    if q.shape[2] * q.shape[3] > FEW:
        return plain(q, k)

    # XLA for CPUs transposes the second operand of a product over its last axis. With few queries
    # that costs more than the product, and keys that are decoded for the product are then computed
    # number by number. So keys are the first operand. Separating the channels of a few heads costs
    # more than multiplying by zeros in other heads' channels.
    def keys_first(q, k):
        if _are_few(q):
            k = k.reshape(*k.shape[:2], -1)
            rows = all_lanes(q).reshape(*q.shape[:4], -1)
            scores = jnp.einsum("bsc,bkgtc->bskgt", k, rows, preferred_element_type=jnp.float32)
            return jnp.moveaxis(scores, 1, -1)
        scores = jnp.einsum("bskd,bkgtd->bksgt", k, q, preferred_element_type=jnp.float32)
        return jnp.moveaxis(scores, 2, -1)

    return jax.lax.platform_dependent(q, k, cpu=keys_first, default=plain)


def sums_of(
    weights: Float[Array, "B K G T S"], v: Float[Array, "B S K D"]
) -> Float[Array, "B K G T D"]:
    """Compute weighted sums of values, float32."""
    plain = functools.partial(jnp.einsum, "bkgts,bskd->bkgtd", preferred_element_type=jnp.float32)
    if not _are_few(weights):
        return plain(weights, v)

    # As for `scores_of`: separating the channels of a few heads costs a CPU more than products that
    # are not needed.
    def together(weights, v):
        v = v.reshape(*v.shape[:2], -1)
        return head_lanes(
            jnp.einsum("bkgts,bsc->bkgtc", weights, v, preferred_element_type=jnp.float32)
        )

    return jax.lax.platform_dependent(weights, v, cpu=together, default=plain)


# Values that XLA must not know too early, so that it neither moves nor copies what uses them.


def _never(x: Array) -> Bool[Array, ""]:
    """Return False, computed from a number of `x`, so that XLA cannot know it before `x`."""
    number = x.reshape(-1)[0]
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        number = number.astype(jnp.float32)
    return jnp.isposinf(number) & jnp.isneginf(number)  # no number is both infinities


def depending_on(x: Array, new: Tree) -> Tree:
    """Return `new`, made to depend on `x`."""
    # In a layer outside a loop, new sources are ready before attention has read the body. XLA
    # copied the body, so that `append` could write at the same time. The dependence is made of
    # data, since XLA for CPUs removes optimization barriers before it decides on copies.
    never = given_to_gpus(_never(x))
    return jax.tree.map(lambda y: jnp.where(never, jnp.zeros_like(y), y), new)


def entering_after(body: Tree, new: dict[str, Array]) -> dict[str, Array]:
    """Return `new` tokens for the window. They are ready only after the tokens that leave the
    window are in `body`."""
    # XLA for CPUs copied the window at every step, so that it could be written while due tokens
    # were read from it.
    body = jax.tree.leaves(body)[0]
    return jax.lax.platform_dependent(body, new, cpu=depending_on, default=lambda _, new: new)


def known_after(x: Array, number: Int[Array, ""] | int) -> Int[Array, ""]:
    """Return `number`, made to depend on `x`."""
    # If XLA knows the number at which a piece is cut from a stored array, it may cut the pieces of
    # all unrolled layers at once. GPUs take the number as given: fused into the kernel that reads
    # the piece, it would be computed for every number read, together with the operations that
    # compute `x`.
    return given_to_gpus(jnp.where(_never(x), jnp.int32(number + 1), jnp.int32(number)))


def unknown_zero(counts: Int[Array, " B"]) -> Int[Array, ""]:
    """Return zero, computed from counts that are never negative, so that XLA cannot know it."""
    # Added to a layer's number or to the number of layers, it hides that a loop over layers has one
    # turn. XLA unrolled that loop: it copied the layer's weights out of the stack before a decode
    # loop, and compiled its products again.
    return jnp.minimum(counts[0], 0)


def filled_by(x: Array, shapes: Tree) -> Tree:
    """Make arrays of these shapes and dtypes, filled with one number of `x`. All of them are
    overwritten later."""
    # Zeros depend on nothing, so XLA made the arrays of all unrolled layers at the start.
    number = x.reshape(-1)[0]
    return jax.tree.map(lambda like: jnp.full(like.shape, number, like.dtype), shapes)


def zeros_by(x: Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Make float32 zeros that depend on `x`."""
    # Constant zeros depend on nothing, so XLA made those of all unrolled layers at once.
    return jnp.full(shape, jnp.where(_never(x), 1.0, 0.0), jnp.float32)


def rows_if(condition: Bool[Array, ""], rows: int) -> Int[Array, ""]:
    """Return `rows` where the condition is True, else 0: the length of a loop that takes the place
    of a `cond`."""
    # XLA for GPUs copies every array that a branch of a `cond` returns unchanged.
    return jnp.where(condition, rows, 0)
