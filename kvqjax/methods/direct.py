"""Attention to a whole body at once, stored head by head: no loop over blocks, so that XLA for GPUs reads every array
once, in a handful of products. kvqjax.methods.direct_forms says how each codec's body is read.

Where a stored number holds two tokens' codes, scores and weights stay apart by plane, [.., S / planes] each:
putting them in order would write and read them once more.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kvqjax.ops.attention import Partial, capped
from kvqjax.ops.packing.heads import HALF
from kvqjax.ops.xla_workarounds import kept_apart

__all__ = [
    "FEW_QUERIES",
    "PIECE",
    "Direct",
    "Stored",
    "attend_whole",
    "by_plane",
    "filled",
    "in_planes",
    "scaled",
    "scored",
    "scored_part",
    "slots_read",
    "summed",
]

FEW_QUERIES = 16  # new tokens a row, at most: of more, the scores of a whole body, [B, H, T, S] float32, are too large
# Stored rows that are summed in one product: a sum over tokens is cut, so that a GPU has work for all its cores. Always
# after as many rows, so that sums over more tokens are the same where what is added has no weight.
PIECE = 512

Stored = dict  # field name -> arrays of one layer, [1, B, ...]


class Direct(NamedTuple):
    """Read a whole body, both functions from one layer's stored fields:

    scores(q [B, K, X, D], fields) -> planes of [B, K, X, S] float32
    values(planes of weights [B, K, X, S] float32, fields, dtype, piece) -> [B, K, X, D] float32

    Sums over tokens are made of partial sums of at most `piece` stored rows. `part` takes the place of `scores` where
    only the first of a body's keys are read, and those in another way than all."""

    scores: Callable
    values: Callable
    part: Callable | None = None


def by_plane(x: Array, planes: int) -> list[Array]:
    """Split [.., S] into `planes` arrays [.., S / planes], one for each plane of kvqjax/ops/packing/heads.py."""
    if planes == 1:
        return [x]
    x = x.reshape(*x.shape[:-1], -1, planes, HALF)
    return [x[..., plane, :].reshape(*x.shape[:-3], -1) for plane in range(planes)]


def in_planes(pieces: list[Array], planes: int) -> list[Array]:
    """Rearrange numbers per token, given plane by plane, into `planes` planes."""
    if len(pieces) == planes:
        return pieces
    if planes > 1:
        return by_plane(pieces[0], planes)
    split = [x.reshape(*x.shape[:-1], -1, HALF) for x in pieces]
    return [jnp.stack(split, -2).reshape(*pieces[0].shape[:-1], -1)]


def filled(weights: Float[Array, "B K X s"], slots: int) -> Float[Array, "B K X S"]:
    """Append zero weights until there are `slots`."""
    return jnp.pad(weights, ((0, 0), (0, 0), (0, 0), (0, slots - weights.shape[3])))


def scored_part(q: Float[Array, "B K X D"], k: Float[Array, "B K s D"]) -> Float[Array, "B K X s"]:
    """Multiply queries with the first keys of a body. One product, so that XLA reads the keys in place."""
    return jnp.einsum("bkxd,bksd->bkxs", q, k, preferred_element_type=jnp.float32)


def scored(q: Float[Array, "B K X D"], k: Float[Array, "B K S D"]) -> Float[Array, "B K X S"]:
    """Multiply queries with keys, in pieces of tokens. XLA for GPUs then writes scores in the order in which values are
    summed, and makes the softmax weights and their total in one kernel instead of two."""
    k = k.reshape(*k.shape[:2], -1, math.gcd(4 * PIECE, k.shape[2]), k.shape[3])
    rows = jnp.broadcast_to(q[:, :, :, None], (*q.shape[:3], k.shape[2], q.shape[3]))
    scores = jnp.einsum("bkxpd,bkpsd->bkxps", rows, k, preferred_element_type=jnp.float32)
    return scores.reshape(*q.shape[:3], -1)


def summed(weights: Float[Array, "B K X S"], v: Array, piece: int) -> Float[Array, "B K X D"]:
    """Compute sum_s weights_s v_s by partial sums of gcd(`piece`, S) tokens."""
    size, dtype = math.gcd(piece, weights.shape[3]), weights.dtype
    weights = weights.reshape(*weights.shape[:3], -1, size)
    v = v.reshape(*v.shape[:2], -1, size, v.shape[3]).astype(dtype)
    return jnp.einsum("bkxps,bkpsd->bkpxd", weights, v, preferred_element_type=jnp.float32).sum(2)


def slots_read(tokens: int, block: int, slots: int) -> tuple[int, bool]:
    """Return how many of a body's slots are read where no row holds more than `tokens`, and whether values are cut to
    them too. XLA for GPUs reads the first keys in place, but copies the first values, which costs three times their
    bytes: more than a third of the values is read as a whole."""
    step = math.lcm(block, 4 * PIECE)
    few = min(-(-tokens // step) * step, slots)
    return few, 3 * few <= slots


def scaled(q: Float[Array, "B T H D"]) -> Float[Array, "B T H D"]:
    """Scale the queries by D^-1/2."""
    return q * jnp.asarray(q.shape[3] ** -0.5, q.dtype)


def attend_whole(
    q: Float[Array, "B T H D"],
    body: dict[str, Stored],
    mask: Bool[Array, "B T S"],
    direct: Direct,
    kv_heads: int,
    piece: int = PIECE,
    cut: Callable[[Stored], Stored] | None = None,
    softcap: float | None = None,
) -> Partial:
    """Attend with few new tokens, `scaled`, to S slots of one layer's body; query t of row b sees the slots in
    `mask[b, t]`. Where values have more slots than keys, `cut` returns the first S of them. `piece` as in `Direct`."""
    batch, length, heads, dim = q.shape
    rows = q.reshape(batch, length, kv_heads, -1, dim).transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, dim)
    scores = [capped(x, softcap) for x in direct.scores(rows, body["k"])]
    seen = by_plane(jnp.repeat(mask, heads // kv_heads, axis=1)[:, None], len(scores))
    scores = [jnp.where(m, x, -jnp.inf) for x, m in zip(scores, seen, strict=True)]
    # Finite even where nothing is seen: exp(-inf - -inf) would be NaN.
    least = np.finfo(np.float32).min
    peak = functools.reduce(jnp.maximum, [jax.lax.reduce(x, least, jax.lax.max, (3,)) for x in scores])
    weights = [jnp.exp(x - peak[..., None]) for x in scores]
    total = functools.reduce(jnp.add, [x.sum(-1) for x in weights])
    floor = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    stored = body["v"]
    if cut is not None:  # not before it is needed, or XLA copies that part of all layers at once
        weights, stored = kept_apart((weights, stored))
        stored = cut(stored)
    out = direct.values(weights, stored, q.dtype, piece) / floor[..., None]
    lse = jnp.where(total > 0, jnp.log(floor) + peak, -jnp.inf)

    def by_token(x):
        x = x.reshape(batch, kv_heads, length, heads // kv_heads, *x.shape[3:])
        return jnp.moveaxis(x, 2, 1).reshape(batch, length, heads, *x.shape[4:])

    return Partial(by_token(out), by_token(lse))
