"""Scores and weighted sums of a few queries on packed codes as plain sums, which XLA for CPUs computes as it decodes.

A product would have codes decoded into memory first, as 32/b times their bytes; to write and read those takes longer
than to decode the codes anew for each of a few queries. The sums are written out term by term: XLA vectorises no `sum`
along another axis than the last.

Words are in stripes (`kvqjax.ops.layout`), [B, N, K, D, 32] for N blocks. A word has P = 32/b codes, and S tokens are
n = N*P stretches of 32."""

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt

from kvqjax.ops.layout import PLANE, split_bits

__all__ = ["MOST", "scores", "weighted"]

MOST = 8  # queries of a KV head: for more, a product takes less time
SUMS = 8  # that grow side by side: a processor starts several additions before the first is done
FLIP = np.uint32(1 << 31)  # the first bit of a word, before it is read as a signed integer (`_Planes`)


def scores(
    q: Float[Array, "B K M D"],
    words: tuple[UInt[Array, "B _ K D 32"], ...],
    bits: int,
    scale: Float[Array, "B K g D"],
    low: Float[Array, "B K g D"],
    seen: Bool[Array, "B M n 32"],
) -> Float[Array, "B K M n 32"]:
    """Multiply queries by keys with one scale and minimum, all finite, per channel of every n/g stretches of 32 tokens;
    -inf where a query does not see the token."""
    scaled, found = q[:, :, :, None] * scale[:, :, None], []  # [B, K, M, g, D]
    rest = jnp.repeat(jnp.einsum("bkmd,bkgd->bkmg", q, low), seen.shape[2] // scale.shape[2], axis=3)
    small = scaled * 2.0**-31  # masked words go up to 2**31: their products with large scales would be infinite
    for x, (masks, factors, missing) in zip(words, _planes(bits), strict=True):
        x = x ^ FLIP
        # A block's P planes are those of its groups: arrays are [B, K, M, N, groups, planes, D or 32].
        whole, own = (y.reshape(*q.shape[:3], x.shape[1], -1, 1, q.shape[3]) for y in (scaled, small))
        masks, factors, missing = (y.reshape(1, 1, 1, 1, own.shape[4], -1, 1) for y in (masks, factors, missing))
        channels = (x[:, :, :, d].swapaxes(1, 2)[:, :, None, :, None, None] for d in range(q.shape[3]))
        terms = (_floats(y & masks) * own[..., d, None] for d, y in enumerate(channels))
        found.append((_sum(terms) * (factors * np.float32(2**31))).reshape(*q.shape[:3], -1, PLANE))
        rest = rest + (whole.sum(-1, keepdims=True) * missing).reshape(rest.shape)
    # Scores are a sum of arrays of their own size: anything simpler XLA computes anew, terms and all, for each user.
    return _sum([jnp.where(seen[:, None], rest[..., None], -jnp.inf), *found])


def weighted(
    weights: Float[Array, "B K M n 32"],
    words: tuple[Sequence[UInt[Array, "B K D 32"]], ...],
    bits: int,
    scale: Float[Array, "B K V n 32"],
    low: Float[Array, "B K V n 32"],
) -> Float[Array, "B K M D 32"]:
    """Sum values with one scale and minimum, all finite, per token of every D/V channels under their weights; the sums
    of every 32nd token are left apart. The words come block by block: XLA reads those of up to 8 codes where they are
    stored, and copies others one block at a time."""
    scaled, found = weights[:, :, :, None] * scale[:, :, None], []  # [B, K, M, V, n, 32]
    for blocks, (masks, factors, missing) in zip(words, _planes(bits), strict=True):
        factors, missing = (np.expand_dims(y, (0, 1, 2, 3, 5)) for y in (factors, missing))
        own = scaled.reshape(*scaled.shape[:4], -1, len(masks), PLANE) * factors[None]  # [B, K, M, V, N, P, 32]
        for block, x in enumerate(blocks):
            x = x.reshape(*x.shape[:2], 1, scale.shape[2], -1, PLANE)
            each = (_floats((x & mask) ^ (FLIP & mask)) for mask in masks)  # [B, K, 1, V, D/V, 32]
            found += [codes * own[..., block, plane, None, :] for plane, codes in enumerate(each)]
        low = low + (scale.reshape(*scale.shape[:3], -1, len(masks), PLANE) * missing).reshape(low.shape)
    # A product, which XLA leaves apart; a sum over an axis it would take together with the terms, and make many loops.
    lows = jnp.einsum("bkmnr,bkvnr->bkmv", weights, low)
    each = _sum(found) + lows[..., None, None] / PLANE  # one of 32 shares
    return each.reshape(*weights.shape[:3], -1, PLANE)


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
