"""Hadamard matrices, and the matrix M of the transform M x that HIGGS takes.

A Hadamard matrix of order q * 2^k with odd q > 1 is a Kronecker product H_base (x) H_(2^j). The
base is one of Paley's matrices, which exist for a prime p: of order p + 1 for p = 3 mod 4, of order
2(p + 1) for p = 1 mod 4. So the orders 96, 80, 112 and 768 need no zero padding.

For most models M is one matrix between heads times one within each head. Then queries can take the
part between heads (`Fast.mixed` of kvqjax.methods.layer_cache). This does not hold for Paley's
matrices. With three heads of 64 channels (192 = 12 * 16), the base of order 12 spans the heads and
four parts of each. HIGGS therefore takes other matrices for the odd orders 3 and 5, and for their
products:

    M_p = p I - 2 J        M_p M_p^T = p^2 I        J all ones

Their integers are not all of one size: 1 and 2 for three heads, 3 and 2 for five. For order 7 they
would be 5 and 2, which differ too much, so that order 7 keeps Paley's matrix.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.linalg import hadamard as sylvester

from kvqjax._errors import UserError

FACTOR = 6  # log2 of the largest Sylvester factor applied as one matrix product


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))


def _paley_kind(order: int) -> int:
    """Say which of Paley's constructions gives that order, 1 or 2; 0 if neither does."""
    if _is_prime(order - 1) and order % 4 == 0:
        return 1
    return 2 if order % 4 == 0 and _is_prime(order // 2 - 1) and order // 2 % 4 == 2 else 0


def _split(order: int) -> tuple[int, int] | None:
    """Write the order as base * 2^k, base being 1 or the smallest Paley order. Gives (base, k), or
    None if no construction is known."""
    odd, twos = order, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    if odd == 1:
        return 1, twos
    known = (t for t in range(twos + 1) if _paley_kind(odd << t))
    first = next(known, None)
    return None if first is None else (odd << first, twos - first)


def has_hadamard(order: int) -> bool:
    """Say whether `hadamard(order)` can be built."""
    return order > 0 and _split(order) is not None


def _paley(order: int) -> np.ndarray:
    """Build Paley's Hadamard matrix of an order that has one."""
    prime = order - 1 if _paley_kind(order) == 1 else order // 2 - 1
    squares = {i * i % prime for i in range(1, prime)}
    # The Legendre symbol: 1 for squares modulo the prime, -1 for other numbers, 0 for 0.
    residue = np.array([0] + [1 if i in squares else -1 for i in range(1, prime)])
    core = np.zeros((prime + 1, prime + 1), np.int64)
    core[1:, 1:] = residue[(np.arange(prime)[None, :] - np.arange(prime)[:, None]) % prime]
    identity = np.eye(prime + 1, dtype=np.int64)
    if _paley_kind(order) == 1:  # I + S with S skew
        core[0, 1:], core[1:, 0] = 1, -1
        return (identity + core).astype(np.int8)
    # S is symmetric; its zeros become [[1,-1],[-1,-1]], its entries +-1 become +-[[1,1],[1,-1]].
    core[0, 1:], core[1:, 0] = 1, 1
    return (np.kron(core, [[1, 1], [1, -1]]) + np.kron(identity, [[1, -1], [-1, -1]])).astype(
        np.int8
    )


def _sylvester_factors(power: int) -> list[np.ndarray]:
    """Factorise Sylvester's matrix of order 2^power into as few matrices as possible, of orders up
    to 2^FACTOR and as equal as possible."""
    count = -(-power // FACTOR)
    return [sylvester(1 << (power + i) // count, np.int8) for i in range(count)]


def _hadamard_factors(order: int) -> list[np.ndarray]:
    """Give matrices whose Kronecker product is a Hadamard matrix. Raises UserError where none is
    known."""
    parts = _split(order)
    if parts is None:
        raise UserError(
            f"no Hadamard matrix of order {order} is known here; powers of two always are"
        )
    base, power = parts
    return ([_paley(base)] if base > 1 else []) + _sylvester_factors(power)


def _product(factors: list[np.ndarray]) -> np.ndarray:
    """Build the Kronecker product, first factor to last."""
    return functools.reduce(np.kron, factors, np.ones((1, 1), np.int8))


@functools.lru_cache(maxsize=32)
def hadamard(order: int) -> np.ndarray:
    """Build H int8 [order, order] of +-1 with H H^T = order * I, in Sylvester's natural order for
    powers of two."""
    return _product(_hadamard_factors(order))


def _odd_factors(order: int) -> tuple[list[int], int]:
    """Divide `order` >= 1 by 5 and 3 as often as they go. Gives the divisors and the quotient."""
    divisors = []
    for prime in (5, 3):
        while order % prime == 0:
            divisors.append(prime)
            order //= prime
    return divisors, order


def transform_factors(order: int) -> list[np.ndarray]:
    """Give integer matrices whose Kronecker product, first to last, is the transform's matrix of
    `order` channels. Those of an odd order come first."""
    odd, quotient = _odd_factors(order)
    if quotient.bit_count() > 1:  # 7, 11 or another odd number is left
        return _hadamard_factors(order)
    # M_p of the module's docstring.
    between = [(size * np.eye(size) - 2).astype(np.int8) for size in odd]
    return between + _sylvester_factors(quotient.bit_length() - 1)


def has_transform(order: int) -> bool:
    """Say whether `transform_matrix(order)` can be built."""
    return _odd_factors(order)[1].bit_count() == 1 or has_hadamard(order)


@functools.lru_cache(maxsize=32)
def transform_matrix(order: int) -> np.ndarray:
    """Build M int8 [order, order] with M M^T = c I: Sylvester's matrix for powers of two, where c =
    order."""
    return _product(transform_factors(order))


def splits(order: int, head_dim: int) -> bool:
    """Say whether the transform of `order` channels is one between heads of `head_dim` after one
    within each."""
    quotient = _odd_factors(order)[1]
    return quotient.bit_count() == head_dim.bit_count() == 1 and order % head_dim == 0


def transform(x: Float[Array, "*B W"], inverse: bool = False) -> Float[Array, "*B W"]:
    """Multiply by M (`transform_matrix`) along the last axis, or by M^T (`inverse`), float32 and
    unnormalised. There is one small product per Kronecker factor (1024 = 32 x 32: two products that
    fill a matrix unit), in full float32."""
    return multiplied(x.astype(jnp.float32), transform_factors(x.shape[-1]), inverse)


def multiplied(
    x: Float[Array, "*B W"], parts: list[np.ndarray], inverse: bool
) -> Float[Array, "*B W"]:
    """Multiply along the last axis by the Kronecker product of `parts` and an identity.

    Args:
        x: vectors.
        parts: the factors, first to last. The identity fills what their orders leave of W.
        inverse: multiplies by the transpose.

    Returns:
        The products, float32.
    """
    # The axis of W channels is split in three: the factors that are done, this factor, and those
    # that are left.
    shape, outer, inner = x.shape, 1, x.shape[-1]
    for factor in parts:
        size = factor.shape[0]
        inner //= size
        matrix = jnp.asarray(factor.T if inverse else factor, jnp.float32)
        x = x.reshape(*shape[:-1], outer, size, inner)
        x = jnp.einsum("ij,...djl->...dil", matrix, x, precision=jax.lax.Precision.HIGHEST)
        outer *= size
    return x.reshape(shape)
