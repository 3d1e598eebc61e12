"""How a chunk of a whole prompt attends to the prompt, exactly: in blocks, in large tiles on GPUs, by a kernel."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvqjax.cache.eviction import received
from kvqjax.cache.readers.tiles import by_splash
from kvqjax.ops.attention import Partial, blockwise_attention, oldest_seen, segment_attention, visible
from kvqjax.ops.large_tiles import tiled_attention
from kvqjax.pallas_kernels import splash

__all__ = ["SCORES", "Prompt", "add_received", "by_blocks", "far", "near", "splashed"]

SCORES, TILES = 2**31, 8  # bytes of a large tile's numbers; how many of them a prompt's keys are at least
PARTS = 8  # of a chunk, among which a large tile's keys are masked


class Prompt(NamedTuple):
    """What one layer's queries attend to: keys and values of all T tokens, how many tokens of each row are valid, the
    sliding window, the cap of the scores, and whether the window is a chunk."""

    k: Float[Array, "B T K D"]
    v: Float[Array, "B T K D"]
    counts: Int[Array, " B"]
    sliding: int | None
    softcap: float | None = None
    chunked: bool = False

    def mask(self, queries: Int[Array, " t"], keys: Int[Array, " s"]):
        """Mark which keys the queries see, [B, t, s]; both are numbered by their places in the prompt."""
        rows = len(self.counts)
        queries, keys = (jnp.broadcast_to(x[None], (rows, len(x))) for x in (queries, keys))
        return visible(queries, keys, keys < self.counts[:, None], self.sliding, self.chunked)

    def block(self, start, count: int):
        return (jax.lax.dynamic_slice_in_dim(x, start, count, 1) for x in (self.k, self.v))


def far(q: Float[Array, "B T H D"], prompt: Prompt, chunk: int) -> Partial:
    """Attend, in large tiles, to the keys that all queries of a piece see. A piece is one PARTS-th of a chunk of
    queries. `near` attends to the other keys."""
    batch, length, heads = q.shape[:3]
    chunks, part = length // chunk, chunk // PARTS
    largest = min(chunks // TILES, SCORES // (q.dtype.itemsize * batch * heads * chunk**2))
    keys = chunk * max(n for n in range(1, max(1, largest) + 1) if chunks % n == 0)
    newest = np.arange(0, length, part).reshape(chunks, PARTS)  # one past it
    oldest = np.maximum(0, newest + part - (prompt.sliding or length))

    def visible_keys(number, places):
        first, last = (jnp.asarray(x, jnp.int32)[number][:, None] for x in (oldest, newest))
        places = places[None]
        return ((places >= first) & (places < last))[None] & (places < prompt.counts[:, None])[:, None]

    reach = zip(oldest[:, 0] // keys, -(-newest[:, -1] // keys), strict=True)
    tiles = [(row, tile) for row, (first, last) in enumerate(reach) for tile in range(first, last)]
    return tiled_attention(q, prompt.k, prompt.v, visible_keys, tiles, (chunk, keys))


def near(q: Float[Array, "B t H D"], start, prompt: Prompt) -> Partial:
    """Attend, for every piece of the chunk from `start` on, to the keys that only some of its queries see: the piece's
    own tokens, and the tokens that a sliding window hides from one query after the other."""
    part = q.shape[1] // PARTS
    first = start + part * jnp.arange(PARTS)[:, None]
    keys = places = first + jnp.arange(part)[None]
    mask = jax.vmap(prompt.mask, out_axes=1)(places, places)
    if prompt.sliding is not None:
        edge = places + 1 - prompt.sliding
        edge_mask = (edge >= 0) & (edge < first) & (edge < first + part - prompt.sliding)
        keys = jnp.concatenate([places, jnp.maximum(edge, 0)], 1)
        mask = jnp.concatenate([mask, jax.vmap(prompt.mask, out_axes=1)(places, edge) & edge_mask[None, :, None]], 3)
    by_part = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    rows = q.reshape(-1, part, *q.shape[2:])
    k, v = (by_part(x[:, keys]) for x in (prompt.k, prompt.v))
    partial = segment_attention(rows, k, v, by_part(mask))
    return Partial(*(x.reshape(q.shape[:2] + x.shape[2:]) for x in partial))


def by_blocks(q, start, prompt: Prompt) -> tuple[Partial, tuple]:
    """Attend with the queries from `start` on, block by block of as many keys: (attention, which blocks were read)."""
    chunk = q.shape[1]

    def read(j, carry):
        return *prompt.block(j * chunk, chunk), _block_mask(prompt, start, j, chunk), carry

    first = jnp.int32(0)
    if prompt.sliding is not None:
        first = jnp.maximum(oldest_seen(start, prompt.sliding, prompt.chunked), 0) // chunk
    partial, _ = blockwise_attention(q, prompt.k.shape[2], read, first, start // chunk + 1, softcap=prompt.softcap)
    return partial, (first, start // chunk + 1)


def _block_mask(prompt: Prompt, start, j, chunk: int):
    return prompt.mask(start + jnp.arange(chunk), j * chunk + jnp.arange(chunk))


def add_received(q, start, prompt: Prompt, lse, blocks, mass):
    """Add to `mass` what the queries from `start` on gave each token."""
    chunk = q.shape[1]
    valid = (start + jnp.arange(chunk))[None] < prompt.counts[:, None]

    def add(j, mass):
        part = received(
            q,
            next(prompt.block(j * chunk, chunk)),
            _block_mask(prompt, start, j, chunk) & valid[:, :, None],
            lse,
            prompt.softcap,
        )
        part = part + jax.lax.dynamic_slice_in_dim(mass, j * chunk, chunk, 1)
        return jax.lax.dynamic_update_slice_in_dim(mass, part, j * chunk, 1)

    first, last = blocks
    return jax.lax.fori_loop(first, last, add, mass)


def splashed(q, start, prompt: Prompt, by_head, kernels: str) -> Partial:
    """Attend as `by_blocks` does, by splash attention on a TPU, with keys and values by head."""
    places = start + jnp.arange(q.shape[1])
    # Queries that are padding in every row see nothing, so that splash skips their blocks.
    newest = jnp.where(places < prompt.counts.max(), places, -1)

    def kernel(q, newest, k, v, interpret):
        return splash.splash_attention(q, k, v, newest, prompt.sliding, interpret, None, prompt.softcap, prompt.chunked)

    plain = lambda q, *_: by_blocks(q, start, prompt)[0]  # noqa: E731
    return by_splash(kernels, kernel, plain, q, newest, *by_head)
