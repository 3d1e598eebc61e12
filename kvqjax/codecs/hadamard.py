"""Hadamard matrices and the transform H x, for powers of two (Sylvester's natural order) and for other widths.

An order q * 2^k with odd q > 1 is H_base (x) H_(2^j), with the base by Paley's constructions over a prime p:
I: order p + 1 for p = 3 mod 4; II: order 2(p + 1) for p = 1 mod 4. So 96, 80, 112 and 768 need no zero padding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.linalg import hadamard as sylvester

from kvqjax._errors import UserError

__all__ = ["factors", "hadamard", "has_hadamard", "multiplied", "transform"]

FACTOR = 6  # log2 of the largest Sylvester factor applied as one matrix product


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))


def _paley_kind(order: int) -> int:
    """Say which of Paley's constructions gives that order, 1 or 2; 0 if neither does."""
    if _is_prime(order - 1) and order % 4 == 0:
        return 1
    return 2 if order % 4 == 0 and _is_prime(order // 2 - 1) and order // 2 % 4 == 2 else 0


def _split(order: int) -> tuple[int, int] | None:
    """Write the order as base * 2^k, base being 1 or the smallest Paley order. Gives (base, k), or None if no
    construction is known."""
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
    prime = order - 1 if _paley_kind(order) == 1 else order // 2 - 1
    squares = {i * i % prime for i in range(1, prime)}
    residue = np.array([0] + [1 if i in squares else -1 for i in range(1, prime)])
    core = np.zeros((prime + 1, prime + 1), np.int64)
    core[1:, 1:] = residue[(np.arange(prime)[None, :] - np.arange(prime)[:, None]) % prime]
    identity = np.eye(prime + 1, dtype=np.int64)
    if _paley_kind(order) == 1:  # I + S with S skew
        core[0, 1:], core[1:, 0] = 1, -1
        return (identity + core).astype(np.int8)
    # S is symmetric; its zeros become [[1,-1],[-1,-1]], its entries +-1 become +-[[1,1],[1,-1]].
    core[0, 1:], core[1:, 0] = 1, 1
    return (np.kron(core, [[1, 1], [1, -1]]) + np.kron(identity, [[1, -1], [-1, -1]])).astype(np.int8)


def factors(order: int) -> list[np.ndarray]:
    """Give matrices whose Kronecker product, first to last, is the Hadamard matrix."""
    parts = _split(order)
    if parts is None:
        raise UserError(f"no Hadamard matrix of order {order} is known here; powers of two always are")
    base, power = parts
    factors = [_paley(base)] if base > 1 else []
    count = -(-power // FACTOR)  # as few factors as possible, sizes as equal as possible
    return factors + [sylvester(1 << (power + i) // count, np.int8) for i in range(count)]


@functools.lru_cache(maxsize=32)
def hadamard(order: int) -> np.ndarray:
    """Build H int8 [order, order] of +-1 with H H^T = order * I, in Sylvester's natural order for powers of two."""
    return functools.reduce(np.kron, factors(order), np.ones((1, 1), np.int8))


def transform(x: Float[Array, "*B W"], inverse: bool = False) -> Float[Array, "*B W"]:
    """Multiply by H along the last axis, or by H^T (`inverse`: H^T H = W * I), float32 and unnormalised. There is one
    small product per Kronecker factor (1024 = 32 x 32: two products that fill a matrix unit), in full float32."""
    return multiplied(x.astype(jnp.float32), factors(x.shape[-1]), inverse)


def multiplied(x: Float[Array, "*B W"], parts: list[np.ndarray], inverse: bool) -> Float[Array, "*B W"]:
    """Multiply along the last axis by the Kronecker product of `parts` and an identity, as `transform` does."""
    shape, done, left = x.shape, 1, x.shape[-1]
    for factor in parts:
        size = factor.shape[0]
        left //= size
        matrix = jnp.asarray(factor.T if inverse else factor, jnp.float32)
        x = x.reshape(*shape[:-1], done, size, left)
        x = jnp.einsum("ij,...djl->...dil", matrix, x, precision=jax.lax.Precision.HIGHEST)
        done *= size
    return x.reshape(shape)
