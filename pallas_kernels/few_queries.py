"""Scores and weighted sums of a few queries on packed codes, for CPUs, as plain sums instead of
matrix products.

For a matrix product XLA would decode the codes into memory first, where they take 32/b times the
bytes of the codes. Writing and reading these bytes takes longer than decoding the codes anew for
each of a few queries. XLA for CPUs computes a plain sum in the same loop that decodes its terms.
The sums are written out term by term, because XLA vectorises a `sum` along the last axis only.

Notation in shapes: B rows, K KV heads of D channels, M queries of a KV head, S tokens in n = S/32
stretches of 32. A word holds P = 32/b codes.

Keys come in lines: one array for each of the D/P words of a token's head. Values come in stripes:
one array for each 32 words of a channel (`kvqjax.ops.packing.base`). XLA reads words of up to 8
codes where they are stored, and copies others array by array. Either way memory is read in the
order in which it lies, so that the processor can fetch ahead.

Decoding is folded into the sums. A code is not shifted to the lowest bits of its word. It is masked
where it lies, and the number that is found there is too large by a power of two, which goes into
its coefficient (`_Planes`)."""

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt

from kvqjax.ops.packing.base import PLANE, split_bits

MOST = 8  # queries of a KV head: for more, a product takes less time
# Partial sums side by side: a processor starts several additions before the first one is done
SUMS = 8
# The highest bit of a word, which is flipped before codes are cut out of it (`_Planes`).
FLIP = np.uint32(1 << 31)


def scores(
    q: Float[Array, "B K M D"],
    words: tuple[Sequence[UInt[Array, "B K n 32"]], ...],
    bits: int,
    scale: Float[Array, "B K g D"],
    low: Float[Array, "B K g D"],
    seen: Bool[Array, "B M n 32"],
) -> Float[Array, "B K M n 32"]:
    """Multiply queries by keys.

    Args:
        q: scaled queries.
        words: for each plane set, the words of a token's head.
        scale: of every channel in each of g groups of tokens; finite.
        low: minima likewise.

    Returns:
        The scores; -inf where a query does not see the token.
    """
    # q . (scale * code + low) is a sum over channels of (q * scale) code, plus q . low, one number
    # for a group.
    scaled, terms = q[:, :, :, None] * scale[:, :, None], []  # [B, K, M, g, D]
    for rows, (masks, factors, missing) in zip(words, _planes(bits), strict=True):
        # Channel d is in place d % P of word d // P, so that the constants of a word's places
        # repeat for every word.
        # [1, 1, 1, D]
        factors, missing = (np.tile(y, (1, 1, 1, len(rows))) for y in (factors, missing))
        # Factors go to the queries and not to the codes: codes of up to 2^31 times large scales
        # would be infinite.
        coefficients = (scaled * factors[None])[..., None, None]  # [B, K, M, g, D, 1, 1]
        low = low + scale * missing
        for row, x in enumerate(rows):
            # [B, K, 1, g, n/g, 32]
            x = (x ^ FLIP).reshape(*x.shape[:2], 1, scale.shape[2], -1, PLANE)
            channels = range(row * len(masks), (row + 1) * len(masks))
            terms += [
                _floats(x & mask) * coefficients[..., d, :, :]
                for mask, d in zip(masks, channels, strict=True)
            ]
    stretches = seen.shape[2] // scale.shape[2]  # of a group
    base = jnp.repeat(jnp.einsum("bkmd,bkgd->bkmg", q, low), stretches, axis=3)  # [B, K, M, n]
    masked_base = jnp.where(seen[:, None], base[..., None], -jnp.inf)
    products = _sum(terms).reshape(*q.shape[:3], -1, PLANE)
    # The last step is a sum of arrays that are as large as the scores. XLA would fuse a simpler
    # step into each of its users, and compute all terms anew for each.
    return _sum([masked_base, products])


def weighted(
    weights: Float[Array, "B K M n 32"],
    words: tuple[Sequence[UInt[Array, "B K D 32"]], ...],
    bits: int,
    scale: Float[Array, "B K V n 32"],
    low: Float[Array, "B K V n 32"],
) -> Float[Array, "B K M D 32"]:
    """Sum values under their softmax weights.

    Args:
        weights: of every query and token.
        words: for each plane set, 32 words of every channel at a time, in the order of tokens.
        scale: of every token in each of the V slices of a head's channels; finite.
        low: minima likewise.

    Returns:
        The sums. Those of every 32nd token are left apart: the caller adds up the last axis.
    """
    # sum over tokens of weight * (scale * code + low) has terms (weight * scale) code, and weight *
    # low for all channels of a slice.
    scaled, terms = weights[:, :, :, None] * scale[:, :, None], []  # [B, K, M, V, n, 32]
    for pieces, (masks, factors, missing) in zip(words, _planes(bits), strict=True):
        # A block of stripes has P planes of `part` stretches of 32 tokens. Its words come in `part`
        # pieces. Piece i has stretch i of every plane, one plane in each of a word's P places.
        part = 32 // len(masks)
        # [1, 1, 1, 1, P, 1, 1]
        factors, missing = (np.expand_dims(y, (0, 1, 2, 3, 5, 6)) for y in (factors, missing))
        # [B, K, M, V, blocks, P, part, 32]
        coefficients = (
            scaled.reshape(*scaled.shape[:4], -1, len(masks), part, PLANE) * factors[None]
        )
        for number, x in enumerate(pieces):
            block, piece = divmod(number, part)
            x = x.reshape(*x.shape[:2], 1, scale.shape[2], -1, PLANE)  # [B, K, 1, V, D/V, 32]
            # Only the last place has the highest bit: FLIP & mask is 0 for the others.
            # [B, K, 1, V, D/V, 32]
            planes = (_floats((x & mask) ^ (FLIP & mask)) for mask in masks)
            terms += [
                codes * coefficients[..., block, place, piece, None, :]
                for place, codes in enumerate(planes)
            ]
        low = low + (
            scale.reshape(*scale.shape[:3], -1, len(masks), part, PLANE) * missing
        ).reshape(low.shape)
    # XLA leaves a product apart. It would fuse a sum over an axis with the terms, and make many
    # loops of them.
    lows = jnp.einsum("bkmnr,bkvnr->bkmv", weights, low)
    sums = _sum(terms) + lows[..., None, None] / PLANE  # each of the 32 sums gets an equal share
    return sums.reshape(*weights.shape[:3], -1, PLANE)


class _Planes(NamedTuple):
    """Constants [P] for the P places of a code in the words of one plane set.

    A code's part is (word & mask) * factor + missing, where the masked word is read as a signed
    integer: any processor converts signed integers to floats in one instruction. For this the
    word's highest bit was flipped (`FLIP`). So the code in the last place, which has that bit as
    its sign, comes out too small by half of its range. No other changes.

    Attributes:
        masks: cut a code out of a word where it lies.
        factors: what the masked number is multiplied by: the value of a code's lowest bit, over
            2^(its place).
        missing: what is to be added then; 0 but for the last place.
    """

    masks: np.ndarray
    factors: np.ndarray
    missing: np.ndarray


def _planes(bits: int) -> Iterator[_Planes]:
    """Make the constants of every plane set of codes of `bits` bits."""
    shift = 0  # the lowest bit of a code that the plane set holds
    for part in split_bits(bits):
        places = np.arange(0, 32, part)
        masks = np.uint32((1 << part) - 1) << places.astype(np.uint32)
        missing = np.where(places == places[-1], np.float32(2 ** (shift + part - 1)), np.float32(0))
        yield _Planes(masks, np.float32(2) ** (shift - places), missing)
        shift += part


def _floats(codes: UInt[Array, "*S"]) -> Float[Array, "*S"]:
    return codes.astype(jnp.int32).astype(jnp.float32)


def _sum(terms: Iterable[Float[Array, "..."]]) -> Float[Array, "..."]:
    """Add up arrays by `SUMS` partial sums."""
    sums: list = []
    for number, term in enumerate(terms):
        if number < SUMS:
            sums.append(term)
        else:
            sums[number % SUMS] += term
    return functools.reduce(operator.add, sums)
