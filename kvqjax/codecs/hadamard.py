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
    """Say whether a number is a prime, by trial division: orders are at most thousands."""
    divisors = range(2, int(number**0.5) + 1)
    return number > 1 and all(number % divisor for divisor in divisors)


def _paley_kind(order: int) -> int:
    """Say which of Paley's constructions gives that order, 1 or 2; 0 if neither does."""
    if order % 4:
        return 0
    if _is_prime(order - 1):  # p = 3 mod 4, as 4 divides p + 1
        return 1
    half = order // 2  # p + 1 of the second construction, where p = 1 mod 4
    if half % 4 == 2 and _is_prime(half - 1):
        return 2
    return 0


def _split(order: int) -> tuple[int, int] | None:
    """Write the order as base * 2^k, base being 1 or the smallest Paley order. Gives (base, k), or
    None if no construction is known."""
    odd = order
    twos = 0  # how often 2 divides the order
    while odd % 2 == 0:
        odd //= 2
        twos += 1
    if odd == 1:
        return 1, twos
    # Sylvester's factors are cheaper than Paley's: the base takes as few twos as it can.
    for taken in range(twos + 1):
        base = odd << taken
        if _paley_kind(base):
            return base, twos - taken
    return None


def has_hadamard(order: int) -> bool:
    """Say whether `hadamard(order)` can be built."""
    return order > 0 and _split(order) is not None


def _paley(order: int) -> np.ndarray:
    """Build Paley's Hadamard matrix of an order that has one, int8 [order, order]."""
    is_first_kind = _paley_kind(order) == 1
    prime = order - 1 if is_first_kind else order // 2 - 1
    numbers = np.arange(prime)
    squares = numbers[1:] ** 2 % prime
    # The Legendre symbol: 1 for squares modulo the prime, -1 for other numbers, 0 for 0.
    symbol = np.where(np.isin(numbers, squares), 1, -1)
    symbol[0] = 0
    differences = numbers[None, :] - numbers[:, None]
    # S: the symbols of all differences, with a border of ones.
    core = np.zeros((prime + 1, prime + 1), np.int64)
    core[1:, 1:] = symbol[differences % prime]
    core[0, 1:] = 1
    core[1:, 0] = 1
    identity = np.eye(prime + 1, dtype=np.int64)
    if is_first_kind:  # I + S, where S is skew: so is its border
        core[1:, 0] = -1
        return (identity + core).astype(np.int8)
    # S is symmetric. Its entries +-1 become +-[[1,1],[1,-1]], its zeros become [[1,-1],[-1,-1]].
    entries = np.kron(core, [[1, 1], [1, -1]])
    zeros = np.kron(identity, [[1, -1], [-1, -1]])
    return (entries + zeros).astype(np.int8)


def _sylvester_factors(power: int) -> list[np.ndarray]:
    """Factorise Sylvester's matrix of order 2^power into as few matrices as possible, of orders up
    to 2^FACTOR and as equal as possible."""
    count = -(-power // FACTOR)
    # The powers of the factors differ by at most 1, and add up to `power`.
    powers = [(power + i) // count for i in range(count)]
    return [sylvester(1 << part, np.int8) for part in powers]


def _hadamard_factors(order: int) -> list[np.ndarray]:
    """Give matrices whose Kronecker product is a Hadamard matrix. Raises UserError where none is
    known."""
    parts = _split(order)
    if parts is None:
        raise UserError(
            f"no Hadamard matrix of order {order} is known here; powers of two always are"
        )
    base, power = parts
    factors = _sylvester_factors(power)
    if base == 1:
        return factors
    return [_paley(base), *factors]


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
    quotient = order
    for prime in (5, 3):
        while quotient % prime == 0:
            divisors.append(prime)
            quotient //= prime
    return divisors, quotient


def _is_power_of_two(number: int) -> bool:
    return number.bit_count() == 1


def transform_factors(order: int) -> list[np.ndarray]:
    """Give integer matrices whose Kronecker product, first to last, is the transform's matrix of
    `order` channels. Those of an odd order come first."""
    odd, quotient = _odd_factors(order)
    if not _is_power_of_two(quotient):  # 7, 11 or another odd number is left
        return _hadamard_factors(order)
    # M_p of the module's docstring.
    odd_factors = [(prime * np.eye(prime) - 2).astype(np.int8) for prime in odd]
    power = quotient.bit_length() - 1
    return odd_factors + _sylvester_factors(power)


def has_transform(order: int) -> bool:
    """Say whether `transform_matrix(order)` can be built."""
    _, quotient = _odd_factors(order)
    return _is_power_of_two(quotient) or has_hadamard(order)


@functools.lru_cache(maxsize=32)
def transform_matrix(order: int) -> np.ndarray:
    """Build M int8 [order, order] with M M^T = c I: Sylvester's matrix for powers of two, where c =
    order."""
    return _product(transform_factors(order))


def splits(order: int, head_dim: int) -> bool:
    """Say whether the transform of `order` channels is one between heads of `head_dim` after one
    within each."""
    _, quotient = _odd_factors(order)
    are_powers = _is_power_of_two(quotient) and _is_power_of_two(head_dim)
    return are_powers and order % head_dim == 0


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
    shape = x.shape
    # The axis of W channels is split in three: the factors that are done, this factor, and those
    # that are left.
    outer = 1
    inner = shape[-1]
    for factor in parts:
        size = factor.shape[0]
        inner //= size
        # The inverse of such a matrix is its transpose, but for a factor.
        oriented = factor.T if inverse else factor
        matrix = jnp.asarray(oriented, jnp.float32)
        x = x.reshape(*shape[:-1], outer, size, inner)
        x = jnp.einsum("ij,...djl->...dil", matrix, x, precision=jax.lax.Precision.HIGHEST)
        outer *= size
    return x.reshape(shape)
