"""Attention over one segment of a sequence, and the log-sum-exp merge of segments (docs/design.md,
idea 1).

Softmax and accumulation run in float32 whatever the inputs' dtype. A query that sees no key of a
segment gets out = 0 and lse = -inf there, so it merges as nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvqjax.ops.xla_workarounds import all_lanes, floor_divide, head_lanes, scores_of, sums_of


class Partial(NamedTuple):
    """Normalised attention output of one segment and the log of its softmax denominator, both
    float32."""

    out: Float[Array, "B T H D"]
    lse: Float[Array, "B T H"]


class Running(NamedTuple):
    """Online-softmax state: running maximum, denominator and un-normalised output, heads grouped as
    [K, G]."""

    peak: Float[Array, "B K G T"]
    total: Float[Array, "B K G T"]
    acc: Float[Array, "B K G T D"]


def capped(scores: Float[Array, "*S"], softcap: float | None) -> Float[Array, "*S"]:
    """Cap scores before they are masked: a score s becomes softcap * tanh(s / softcap) (Gemma 2,
    arXiv 2408.00118, section 2). A masked score, -inf, would become finite."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def with_sinks(part: Partial, sinks: Float[Array, " H"] | None) -> Partial:
    """Add the sink logits to the merged result of all segments.

    A sink logit takes part in the softmax with a value of 0 (gpt-oss). It is one more segment in
    the merge of segments, so that no reader knows of it."""
    if sinks is None:
        return part
    lse = jnp.logaddexp(part.lse, sinks.astype(jnp.float32)[None, None])
    return Partial(part.out * jnp.exp(part.lse - lse)[..., None], lse)


def oldest_seen(query, sliding: int, chunked: bool = False) -> Any:
    """Compute the oldest position that a query sees; it may be below 0.

    Args:
        query: the query's position.
        sliding: tokens of a sliding window, the query's own included, or of a chunk.
        chunked: whether the query sees its chunk, which begins at a multiple of `sliding`, instead
            of a window.
    """
    return floor_divide(query, sliding) * sliding if chunked else query - sliding + 1


def visible(
    queries, keys, valid, sliding: int | None, chunked: bool = False
) -> Bool[Array, "B T S"]:
    """Make the causal, sliding-window or chunk mask by absolute position: queries [B,T], keys
    [B,S], valid [B,S]."""
    query, key = queries[:, :, None], keys[:, None, :]
    seen = (key <= query) & valid[:, None, :]
    return seen if sliding is None else seen & (key >= oldest_seen(query, sliding, chunked))


def grouped(q: Float[Array, "B T H D"], kv_heads: int) -> Float[Array, "B K G T D"]:
    """Scale the queries by D^-1/2 and put the KV head in front, so that both products are batched
    matmuls."""
    batch, length, heads, dim = q.shape
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)
    return q * jnp.asarray(dim**-0.5, q.dtype)


def _accumulate(
    state: Running,
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S J N"],
    mask: Bool[Array, "B T S"],
    softcap: float | None,
) -> Running:
    """Fold one block of keys and values into the running softmax. With J = 1 all heads share the
    values."""
    # A value that no query sees may be infinite, and 0 x inf is NaN.
    v = jnp.where(mask.any(1)[:, :, None, None], v, 0)

    def sums(weights):
        # [B, J, H / J, T, S]
        by_value = weights.astype(v.dtype).reshape(v.shape[0], v.shape[2], -1, *weights.shape[3:])
        return sums_of(by_value, v).reshape(state.acc.shape)

    return folded(state, scores_of(q, k), mask, softcap, sums)


def folded(
    state: Running,
    scores: Float[Array, "B K G T S"],
    mask: Bool[Array, "B T S"],
    softcap: float | None,
    sums: Callable[[Float[Array, "B K G T S"]], Float[Array, "B K G T D"]],
) -> Running:
    """Fold the scores of one block into the running softmax.

    Args:
        state: of the blocks before.
        scores: of the block's keys, not yet capped.
        softcap: caps the scores (`capped`); None: no cap.
        sums: sums the block's values under the weights that it is given.
    """
    scores = jnp.where(mask[:, None, None], capped(scores, softcap), -jnp.inf)
    peak = jnp.maximum(state.peak, scores.max(-1))
    # A finite stand-in for the peak of an all-masked row keeps exp(-inf - -inf) from becoming NaN.
    safe = jnp.where(jnp.isneginf(peak), 0.0, peak)
    weights = jnp.exp(scores - safe[..., None])
    decay = jnp.exp(state.peak - safe)
    acc = state.acc * decay[..., None] + sums(weights)
    return Running(peak, state.total * decay + weights.sum(-1), acc)


def start(q: Float[Array, "B K G T D"], width: int) -> Running:
    """Make the online softmax of queries that have seen nothing, for values of `width` channels."""
    shape = q.shape[:-1]
    return Running(
        jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, width), jnp.float32)
    )


def finish(state: Running) -> Partial:
    """Divide the sums by the softmax denominator, and give them as [B, T, H, D] with their
    log-sum-exp."""
    batch, kv_heads, group, length, dim = state.acc.shape
    total = jnp.maximum(state.total, jnp.finfo(jnp.float32).tiny)
    out = (
        (state.acc / total[..., None])
        .transpose(0, 3, 1, 2, 4)
        .reshape(batch, length, kv_heads * group, dim)
    )
    lse = jnp.where(state.total > 0, jnp.log(total) + state.peak, -jnp.inf)
    return Partial(out, lse.transpose(0, 3, 1, 2).reshape(batch, length, kv_heads * group))


def segment_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    mask: Bool[Array, "B T S"],
    softcap: float | None = None,
) -> Partial:
    """Attend to S exact tokens at once. `mask[b, t, s]` is True where query t may see token s."""
    by_head = grouped(q, k.shape[2])
    return finish(_accumulate(start(by_head, v.shape[-1]), by_head, k, v, mask, softcap))


def blockwise_attention(
    q: Float[Array, "B T H D"],
    kv_heads: int,
    read: Callable[[Int[Array, ""], Any], tuple],
    first: Int[Array, ""] | int,
    last: Int[Array, ""] | int,
    carry: Any = None,
    width: int | None = None,
    lanes: bool = False,
    mix: np.ndarray | None = None,
    softcap: float | None = None,
) -> tuple[Partial, Any]:
    """Attend to blocks one at a time, so that only one block of keys and values exists at any
    moment.

    Args:
        q: queries, not yet scaled.
        kv_heads: K, the number of KV heads.
        read: `read(j, carry)` gives (k [B, S, K, D], v [B, S, K, D], mask [B, T, S], carry) of
            block j.
        first: the first block that is read.
        last: one past the last block.
        carry: what goes from block to block; any pytree.
        width: if given, `read` gives values [B, S, 1, width] that all heads share, and the output
            has this width.
        lanes: treat all KV heads as one head of K*D channels. Queries are zero outside the channels
            of their own head, so the products take K times the operations. In return, the channels
            of what is read need not be separated by head. That pays with few queries, where a
            matrix unit is not busy.
        mix: with `lanes`, [K, K]: the keys' heads are this matrix times the heads that `read`
            gives.
        softcap: caps the scores (`capped`); None: no cap.

    Returns:
        Output and log-sum-exp, float32, and the carry after the last block.
    """
    by_head = grouped(q, kv_heads)
    if lanes:
        by_head = all_lanes(by_head, mix).reshape(
            q.shape[0], 1, -1, q.shape[1], kv_heads * q.shape[3]
        )

    def step(j, loop):
        state, carry = loop
        k, v, mask, carry = read(j, carry)
        if lanes:
            k, v = (x.reshape(*x.shape[:2], 1, -1) for x in (k, v))
        return _accumulate(state, by_head, k, v, mask, softcap), carry

    unseen = start(by_head, width or by_head.shape[-1])
    state, carry = jax.lax.fori_loop(first, last, step, (unseen, carry))
    if lanes:
        state = _own_lanes(state, kv_heads, by_head=width is None)
    return finish(state), carry


def _own_lanes(state: Running, heads: int, by_head: bool) -> Running:
    """Split the state of queries that were multiplied with the channels of all heads (`all_lanes`)
    by KV head.

    Args:
        state: of one head, whose query rows are those of all KV heads, one head after the other.
        heads: K, the number of KV heads.
        by_head: whether values lie head by head, so that a row's output is its own head's channels;
            else all heads share the values.

    Returns:
        The state by KV head.
    """

    def split(x: Array) -> Array:
        """Reshape [B, 1, H, ..] to [B, K, G, ..]."""
        return x.reshape(x.shape[0], heads, -1, *x.shape[3:])

    acc = head_lanes(split(state.acc)) if by_head else split(state.acc)
    return Running(split(state.peak), split(state.total), acc)


def merge_over(part: Partial, axes: tuple[str, ...]) -> Partial:
    """Merge the parts of one segment that are on the devices along the mesh axes `axes`. Every
    device gets the result. It works inside `shard_map` only. Without axes the part is returned as
    it is."""
    if not axes:
        return part
    peak = jax.lax.pmax(part.lse, axes)
    safe = jnp.where(jnp.isneginf(peak), 0.0, peak)
    weights = jnp.exp(part.lse - safe)
    out, total = jax.lax.psum((part.out * weights[..., None], weights), axes)
    denominator = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    lse = jnp.where(total > 0, jnp.log(denominator) + safe, -jnp.inf)
    return Partial(out / denominator[..., None], lse)


def total_lse(*parts: Partial) -> Float[Array, "B T H"]:
    """Compute the log-sum-exp over all segments."""
    return jax.nn.logsumexp(jnp.stack([part.lse for part in parts]), axis=0)


def merge(*parts: Partial) -> Float[Array, "B T H D"]:
    """Combine segments: out = sum_i exp(lse_i - lse) out_i with lse = logsumexp_i(lse_i).
    Float32."""
    if len(parts) == 1:
        return parts[0].out
    return combined(
        jnp.stack([part.lse for part in parts]), jnp.stack([part.out for part in parts])
    )


def merged(*parts: Partial) -> Partial:
    """Combine segments as `merge` does, with their log-sum-exp."""
    return Partial(merge(*parts), total_lse(*parts))


def combined(
    lse: Float[Array, "N B T H"], out: Float[Array, "N B T H D"]
) -> Float[Array, "B T H D"]:
    """Combine N segments as `merge` does. Their results are stacked on the first axis."""
    peak = lse.max(0, keepdims=True)
    # A finite stand-in for a peak of -inf: exp(-inf - -inf) would be NaN.
    weights = jnp.exp(lse - jnp.where(jnp.isneginf(peak), 0.0, peak))
    total = jnp.maximum(weights.sum(0), jnp.finfo(jnp.float32).tiny)
    return (weights[..., None] * out).sum(0) / total[..., None]
