"""How a chunk of a whole prompt attends to the prompt, exactly.

    by_blocks    block by block, on CPUs and wherever there is nothing else
    far, near    in large tiles, on GPUs: `far` to the keys that all queries of a piece see, `near` to the others
    splashed     by splash attention, on TPUs

Tokens are numbered by their places in the prompt, which are their positions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvqjax.cache.readers.tiles import by_splash
from kvqjax.ops.attention import Partial, blockwise_attention, oldest_seen, segment_attention, visible
from kvqjax.ops.large_tiles import tiled_attention
from kvqjax.pallas_kernels import splash

__all__ = ["SCORES", "Prompt", "by_blocks", "far", "near", "splashed"]

SCORES = 2**31  # bytes of the softmax weights of a large tile, at most
TILES = 8  # large tiles into which the keys of a prompt of as many chunks are cut, at least
PARTS = 8  # pieces of a chunk; a large tile has one mask for all queries of a piece


class Prompt(NamedTuple):
    """What one layer's queries attend to.

    Attributes:
        k: The keys of all T tokens, rotated by RoPE.
        v: Their values.
        counts: How many tokens of each row are valid.
        sliding: How many tokens a query sees, its own included; None: all before it.
        softcap: The cap of the scores, if there is one.
        chunked: Whether a query sees the tokens of its own chunk, `sliding` tokens long, instead of the newest ones."""

    k: Float[Array, "B T K D"]
    v: Float[Array, "B T K D"]
    counts: Int[Array, " B"]
    sliding: int | None
    softcap: float | None = None
    chunked: bool = False

    def mask(self, queries: Int[Array, " t"], keys: Int[Array, " s"]):
        """Mark which keys the queries see, [B, t, s]. Both are given by their places in the prompt."""
        rows = len(self.counts)
        queries, keys = (jnp.broadcast_to(x[None], (rows, len(x))) for x in (queries, keys))
        return visible(queries, keys, keys < self.counts[:, None], self.sliding, self.chunked)

    def block(self, start, count: int):
        """Cut out the keys and values of `count` tokens from `start` on."""
        return (jax.lax.dynamic_slice_in_dim(x, start, count, 1) for x in (self.k, self.v))


def far(q: Float[Array, "B T H D"], prompt: Prompt, chunk: int) -> Partial:
    """Attend, in large tiles, to the keys that all queries of a piece see. `near` attends to the other keys.

    A piece is one PARTS-th of a chunk of queries. It begins at place p and has P tokens. All its queries see the keys
    before p, and under a sliding window of W those from p + P - W on.

    Args:
        q: The queries of the whole prompt.
        prompt: The prompt.
        chunk: The tokens of a chunk.

    Returns:
        Attention to these keys."""
    batch, length, heads = q.shape[:3]
    chunks, part = length // chunk, chunk // PARTS
    # A tile is one chunk of queries and some chunks of keys, whole ones that divide the prompt.
    largest = min(chunks // TILES, SCORES // (q.dtype.itemsize * batch * heads * chunk**2))
    keys = chunk * max(n for n in range(1, max(1, largest) + 1) if chunks % n == 0)
    # By chunk and piece, [chunks, PARTS]: the first key that all queries of the piece see, and one past the last.
    stop = np.arange(0, length, part).reshape(chunks, PARTS)
    start = np.maximum(0, stop + part - (prompt.sliding or length))

    def visible_keys(number, places):
        """Mark which keys each piece of chunk `number` sees, [B, PARTS, keys]."""
        first, last = (jnp.asarray(x, jnp.int32)[number][:, None] for x in (start, stop))
        places = places[None]
        return ((places >= first) & (places < last))[None] & (places < prompt.counts[:, None])[:, None]

    # All pairs (chunk of queries, tile of keys) in which any piece sees a key. A chunk's first piece reaches back
    # furthest, its last piece furthest ahead.
    tiles = []
    for number in range(chunks):
        first_tile, end_tile = start[number, 0] // keys, -(-stop[number, -1] // keys)
        tiles.extend((number, tile) for tile in range(first_tile, end_tile))
    return tiled_attention(q, prompt.k, prompt.v, visible_keys, tiles, (chunk, keys))


def near(q: Float[Array, "B t H D"], start, prompt: Prompt) -> Partial:
    """Attend, for every piece of a chunk, to the keys that only some of its queries see.

    They are the piece's own tokens, and under a sliding window as many tokens at its other end, which it hides from one
    query after the other.

    Args:
        q: The queries of the chunk.
        start: The place of its first token.
        prompt: The prompt.

    Returns:
        Attention to these keys."""
    part = q.shape[1] // PARTS
    first = start + part * jnp.arange(PARTS)[:, None]
    keys = places = first + jnp.arange(part)[None]  # [PARTS, part]
    mask = jax.vmap(prompt.mask, out_axes=1)(places, places)  # [B, PARTS, part, part]
    if prompt.sliding is not None:
        # The oldest key that each query sees. It is left out where it lies before the prompt, among the piece's own
        # tokens, or where `far` has it: the last query's is the first that all queries of the piece see.
        edge = places + 1 - prompt.sliding
        edge_mask = (edge >= 0) & (edge < first) & (edge < first + part - prompt.sliding)
        keys = jnp.concatenate([places, jnp.maximum(edge, 0)], 1)
        mask = jnp.concatenate([mask, jax.vmap(prompt.mask, out_axes=1)(places, edge) & edge_mask[None, :, None]], 3)
    by_part = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    rows = q.reshape(-1, part, *q.shape[2:])
    k, v = (by_part(x[:, keys]) for x in (prompt.k, prompt.v))
    partial = segment_attention(rows, k, v, by_part(mask))
    return Partial(*(x.reshape(q.shape[:2] + x.shape[2:]) for x in partial))


def by_blocks(q, start, prompt: Prompt) -> Partial:
    """Attend with the queries of a chunk to blocks of keys that are as long as the chunk.

    Args:
        q: The queries of the chunk, [B, t, H, D].
        start: The place of its first token, a multiple of t.
        prompt: The prompt.

    Returns:
        Attention to all keys."""
    chunk = q.shape[1]

    def read(j, carry):
        mask = prompt.mask(start + jnp.arange(chunk), j * chunk + jnp.arange(chunk))
        return *prompt.block(j * chunk, chunk), mask, carry

    first = jnp.int32(0)
    if prompt.sliding is not None:
        first = jnp.maximum(oldest_seen(start, prompt.sliding, prompt.chunked), 0) // chunk
    partial, _ = blockwise_attention(q, prompt.k.shape[2], read, first, start // chunk + 1, softcap=prompt.softcap)
    return partial


def splashed(q, start, prompt: Prompt, by_head, kernels: str) -> Partial:
    """Attend as `by_blocks` does, by splash attention on a TPU.

    Args:
        q: The queries of the chunk, [B, t, H, D].
        start: The place of its first token.
        prompt: The prompt.
        by_head: Its keys and values by head, [B * K, T, D] each.
        kernels: "splash" or "interpret", as in `Path`.

    Returns:
        Attention to all keys."""
    places = start + jnp.arange(q.shape[1])
    # Queries that are padding in every row see nothing, so that splash skips their blocks.
    newest = jnp.where(places < prompt.counts.max(), places, -1)

    def kernel(q, newest, k, v, interpret):
        return splash.splash_attention(q, k, v, newest, prompt.sliding, interpret, None, prompt.softcap, prompt.chunked)

    plain = lambda q, *_: by_blocks(q, start, prompt)  # noqa: E731
    return by_splash(kernels, kernel, plain, q, newest, *by_head)
