"""Attention over one segment of a sequence, and the log-sum-exp merge of segments (docs/design.md, idea 1).

Softmax and accumulation run in float32 whatever the inputs' dtype. A query that sees no key of a segment gets
out = 0 and lse = -inf there, so it merges as nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvqjax.ops.xla import filled_by

__all__ = [
    "Partial",
    "Running",
    "blockwise_attention",
    "finish",
    "grouped",
    "merge",
    "merge_over",
    "segment_attention",
    "tiled_attention",
    "total_lse",
]


class Partial(NamedTuple):
    """Normalised attention output of one segment and the log of its softmax denominator, both float32."""

    out: Float[Array, "B T H D"]
    lse: Float[Array, "B T H"]


class Running(NamedTuple):
    """Online-softmax state: running maximum, denominator and un-normalised output, heads grouped as [K, G]."""

    peak: Float[Array, "B K G T"]
    total: Float[Array, "B K G T"]
    acc: Float[Array, "B K G T D"]


def grouped(q: Float[Array, "B T H D"], kv_heads: int) -> Float[Array, "B K G T D"]:
    """Scale the queries by D^-1/2 and put the KV head in front, so that both products are batched matmuls."""
    batch, length, heads, dim = q.shape
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)
    return q * jnp.asarray(dim**-0.5, q.dtype)


def _accumulate(
    state: Running,
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S J N"],
    mask: Bool[Array, "B T S"],
) -> Running:
    """Fold one block of keys and values into the running softmax; J = 1 is a value that all heads share. A value that
    no query sees may be anything, for 0 x inf would be NaN."""
    v = jnp.where(mask.any(1)[:, :, None, None], v, 0)
    scores = jnp.einsum("bkgtd,bskd->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    peak = jnp.maximum(state.peak, scores.max(-1))
    # A finite stand-in for the peak of an all-masked row keeps exp(-inf - -inf) from becoming NaN.
    safe = jnp.where(jnp.isneginf(peak), 0.0, peak)
    weights = jnp.exp(scores - safe[..., None])
    decay = jnp.exp(state.peak - safe)
    by_value = weights.astype(v.dtype).reshape(v.shape[0], v.shape[2], -1, *weights.shape[3:])
    update = jnp.einsum("bkgts,bskd->bkgtd", by_value, v, preferred_element_type=jnp.float32)
    acc = state.acc * decay[..., None] + update.reshape(state.acc.shape)
    return Running(peak, state.total * decay + weights.sum(-1), acc)


def _start(q: Float[Array, "B K G T D"], width: int) -> Running:
    shape = q.shape[:-1]
    return Running(jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, width), jnp.float32))


def finish(state: Running) -> Partial:
    """Normalise, and put the heads back where they were."""
    batch, kv_heads, group, length, dim = state.acc.shape
    total = jnp.maximum(state.total, jnp.finfo(jnp.float32).tiny)
    out = (state.acc / total[..., None]).transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * group, dim)
    lse = jnp.where(state.total > 0, jnp.log(total) + state.peak, -jnp.inf)
    return Partial(out, lse.transpose(0, 3, 1, 2).reshape(batch, length, kv_heads * group))


def segment_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    mask: Bool[Array, "B T S"],
) -> Partial:
    """Attend to S exact tokens at once. `mask[b, t, s]` is True where query t may see token s."""
    by_head = grouped(q, k.shape[2])
    return finish(_accumulate(_start(by_head, v.shape[-1]), by_head, k, v, mask))


def blockwise_attention(
    q: Float[Array, "B T H D"],
    kv_heads: int,
    read: Callable[[Int[Array, ""], Any], tuple],
    first: Int[Array, ""] | int,
    last: Int[Array, ""] | int,
    carry: Any = None,
    width: int | None = None,
) -> tuple[Partial, Any]:
    """Attend to blocks `first <= j < last` one at a time, so that only one block of K and V ever exists.

    `read(j, carry) -> (k [B,S,K,D], v [B,S,K,D], mask [B,T,S], carry)` materialises block j. With `width`, v is
    [B,S,1,width], shared by all heads, and so wide is the output.
    """
    by_head = grouped(q, kv_heads)

    def step(j, loop):
        state, carry = loop
        k, v, mask, carry = read(j, carry)
        return _accumulate(state, by_head, k, v, mask), carry

    state, carry = jax.lax.fori_loop(first, last, step, (_start(by_head, width or q.shape[-1]), carry))
    return finish(state), carry


def tiled_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    mask: Callable[[Int[Array, " t"], Int[Array, " s"]], Bool[Array, "B t s"]],
    tiles: list[tuple[int, int]],
    size: tuple[int, int],
) -> Float[Array, "B T H D"]:
    """Attend tile by tile, in the queries' dtype: `tiles` are (queries, keys) in units of `size`, those of the same
    queries after each other. `mask(queries, keys)` says which queries see which keys, by their places. The loop is
    one, and its length static: a GPU runs it without asking the host."""
    queries, keys = size
    table = np.asarray(tiles, np.int32)
    fresh = np.diff(table[:, 0], prepend=-1) != 0

    def step(n, loop):
        state, out = loop
        (row, column), new = jnp.asarray(table)[n], jnp.asarray(fresh)[n]
        part = grouped(jax.lax.dynamic_slice_in_dim(q, row * queries, queries, 1), k.shape[2])
        state = jax.tree.map(lambda x, old: jnp.where(new, x, old), _start(part, q.shape[-1]), state)
        own_k, own_v = (jax.lax.dynamic_slice_in_dim(x, column * keys, keys, 1) for x in (k, v))
        seen = mask(row * queries + jnp.arange(queries), column * keys + jnp.arange(keys))
        state = _accumulate(state, part, own_k, own_v, seen)
        done = finish(state).out.astype(out.dtype)
        return state, jax.lax.dynamic_update_slice_in_dim(out, done, row * queries, 1)

    blank = filled_by(q, (_start(grouped(q[:, :queries], k.shape[2]), q.shape[-1]), q))
    return jax.lax.fori_loop(0, len(tiles), step, blank)[1]


def merge_over(part: Partial, axes: tuple[str, ...]) -> Partial:
    """The merge of one segment's parts that lie on the devices along the mesh axes, as a collective: every device gets
    all of it. Inside `shard_map` only; as it is without axes."""
    if not axes:
        return part
    peak = jax.lax.pmax(part.lse, axes)
    safe = jnp.where(jnp.isneginf(peak), 0.0, peak)
    weights = jnp.exp(part.lse - safe)
    out, total = jax.lax.psum((part.out * weights[..., None], weights), axes)
    floor = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    return Partial(out / floor[..., None], jnp.where(total > 0, jnp.log(floor) + safe, -jnp.inf))


def total_lse(*parts: Partial) -> Float[Array, "B T H"]:
    """Log-sum-exp over all segments."""
    return jax.nn.logsumexp(jnp.stack([part.lse for part in parts]), axis=0)


def merge(*parts: Partial) -> Float[Array, "B T H D"]:
    """Combine segments: out = sum_i exp(lse_i - lse) out_i with lse = logsumexp_i(lse_i). Float32."""
    lse = jnp.stack([part.lse for part in parts])
    out = jnp.stack([part.out for part in parts])
    peak = lse.max(0, keepdims=True)
    weights = jnp.exp(lse - jnp.where(jnp.isneginf(peak), 0.0, peak))
    return (weights[..., None] * out).sum(0) / jnp.maximum(weights.sum(0), jnp.finfo(jnp.float32).tiny)[..., None]
