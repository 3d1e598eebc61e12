"""Scores and weighted sums of a few queries on packed codes as plain sums, which XLA for CPUs computes as it decodes.

A product would have codes decoded into memory first, as 32/b times their bytes. Writing and reading those takes longer
than decoding the codes anew for each of a few queries. The sums are written out term by term, because XLA vectorises a
`sum` along the last axis only.

A word has P = 32/b codes, and S tokens are n stretches of 32. Keys come in lines, one array for each of the D/P words
of a token's head; values in stripes, one array for each 32 words of a channel (`kvqjax.ops.packing.stripes`). XLA reads
words of up to 8 codes where they are stored, and copies others array by array. Either way memory is read in the order
in which it lies: a processor fetches ahead what follows, and waits for what it did not expect."""

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt

from kvqjax.ops.packing.words import PLANE, split_bits

__all__ = ["MOST", "scores", "weighted"]

MOST = 8  # queries of a KV head: for more, a product takes less time
SUMS = 8  # that grow side by side: a processor starts several additions before the first is done
FLIP = np.uint32(1 << 31)  # the first bit of a word, before it is read as a signed integer (`_Planes`)


def scores(
    q: Float[Array, "B K M D"],
    words: tuple[Sequence[UInt[Array, "B K n 32"]], ...],
    bits: int,
    scale: Float[Array, "B K g D"],
    low: Float[Array, "B K g D"],
    seen: Bool[Array, "B M n 32"],
) -> Float[Array, "B K M n 32"]:
    """Multiply queries by keys with one scale and minimum, all finite, per channel of every n/g stretches of 32 tokens;
    -inf where a query does not see the token."""
    scaled, terms = q[:, :, :, None] * scale[:, :, None], []  # [B, K, M, g, D]
    for rows, (masks, factors, missing) in zip(words, _planes(bits), strict=True):
        factors, missing = (np.tile(y, (1, 1, 1, len(rows))) for y in (factors, missing))  # for each channel
        # Multiplied before the codes are: large scales times 2**31 would be infinite.
        coefficients = (scaled * factors[None])[..., None, None]
        low = low + scale * missing
        for row, x in enumerate(rows):
            x = (x ^ FLIP).reshape(*x.shape[:2], 1, scale.shape[2], -1, PLANE)
            channels = range(row * len(masks), (row + 1) * len(masks))
            terms += [_floats(x & mask) * coefficients[..., d, :, :] for mask, d in zip(masks, channels, strict=True)]
    base = jnp.repeat(jnp.einsum("bkmd,bkgd->bkmg", q, low), seen.shape[2] // scale.shape[2], axis=3)
    # The last sum is one of arrays that are as large as the scores. XLA would compute anything simpler anew for each
    # of its users, terms and all.
    return _sum([jnp.where(seen[:, None], base[..., None], -jnp.inf), _sum(terms).reshape(*q.shape[:3], -1, PLANE)])


def weighted(
    weights: Float[Array, "B K M n 32"],
    words: tuple[Sequence[UInt[Array, "B K D 32"]], ...],
    bits: int,
    scale: Float[Array, "B K V n 32"],
    low: Float[Array, "B K V n 32"],
) -> Float[Array, "B K M D 32"]:
    """Sum values with one scale and minimum, all finite, per token of every D/V channels under their weights; the sums
    of every 32nd token are left apart."""
    scaled, terms = weights[:, :, :, None] * scale[:, :, None], []  # [B, K, M, V, n, 32]
    for pieces, (masks, factors, missing) in zip(words, _planes(bits), strict=True):
        part = 32 // len(masks)  # pieces of a block, which has `part` stretches in each of a word's places
        factors, missing = (np.expand_dims(y, (0, 1, 2, 3, 5, 6)) for y in (factors, missing))
        coefficients = scaled.reshape(*scaled.shape[:4], -1, len(masks), part, PLANE) * factors[None]
        for number, x in enumerate(pieces):
            block, piece = divmod(number, part)
            x = x.reshape(*x.shape[:2], 1, scale.shape[2], -1, PLANE)
            planes = (_floats((x & mask) ^ (FLIP & mask)) for mask in masks)  # [B, K, 1, V, D/V, 32]
            terms += [codes * coefficients[..., block, place, piece, None, :] for place, codes in enumerate(planes)]
        low = low + (scale.reshape(*scale.shape[:3], -1, len(masks), part, PLANE) * missing).reshape(low.shape)
    # A product, which XLA leaves apart. A sum over an axis it would fuse with the terms, and make many loops of them.
    lows = jnp.einsum("bkmnr,bkvnr->bkmv", weights, low)
    sums = _sum(terms) + lows[..., None, None] / PLANE  # one of 32 shares
    return sums.reshape(*weights.shape[:3], -1, PLANE)


class _Planes(NamedTuple):
    """[P] constants of one plane set: masks that cut a code out of a word where it lies, what the number so found is
    multiplied by, and what is then missing.

    They are of words whose first bit is flipped (`FLIP`). As signed integers, which any processor converts at once, the
    codes of the last plane are then too small by half of their range, and no others change."""

    masks: np.ndarray
    factors: np.ndarray
    missing: np.ndarray


def _planes(bits: int) -> Iterator[_Planes]:
    shift = 0
    for part in split_bits(bits):
        places = np.arange(0, 32, part)
        masks = np.uint32((1 << part) - 1) << places.astype(np.uint32)
        missing = np.where(places == places[-1], np.float32(2 ** (shift + part - 1)), np.float32(0))
        yield _Planes(masks, np.float32(2) ** (shift - places), missing)
        shift += part


def _floats(codes: UInt[Array, "*S"]) -> Float[Array, "*S"]:
    return codes.astype(jnp.int32).astype(jnp.float32)


def _sum(terms: Iterable[Float[Array, "..."]]) -> Float[Array, "..."]:
    sums: list = []
    for number, term in enumerate(terms):
        if number < SUMS:
            sums.append(term)
        else:
            sums[number % SUMS] += term
    return functools.reduce(operator.add, sums)
