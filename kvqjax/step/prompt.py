"""A whole prompt attending to itself exactly, one layer at a time: what an exact prefill is made of."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.cache import at_layer
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.chunk_paths import by_splash, kernels_of
from kvqjax.cache.eviction import received
from kvqjax.cache.runs import RunLayout
from kvqjax.cache.view import visible
from kvqjax.model import decoder
from kvqjax.model.loading import Model
from kvqjax.model.rope import rotate
from kvqjax.ops.attention import Partial, blockwise_attention, tiled_attention
from kvqjax.ops.finite import found_finite, spoiled, zeroed
from kvqjax.ops.xla import filled_by
from kvqjax.pallas_kernels import splash

__all__ = ["Path", "exact_layer", "path_of", "received_by"]

SCORES = 2**30  # bytes of a tile's scores in float32
CHUNK, LARGE = 512, 2048  # prompt tokens at a time: where one core does the work, and where there are many


class Path(NamedTuple):
    """How a prompt attends to itself: `chunk` tokens at a time, by which of `kernels`: "off" (blocks of a chunk),
    "tiles" (few large tiles, on GPUs), "splash" (on TPUs), "interpret" (splash in the interpreter)."""

    kernels: str
    chunk: int


def path_of(layout: CacheLayout, length: int) -> Path:
    """How a prompt of `length` tokens, a bucket, attends to itself on the chip that a cache is for."""
    small, kernels = Path("off", min(CHUNK, length)), kernels_of(layout)
    if kernels == "off" or length <= CHUNK:
        return small
    chunk = -(-length // -(-length // LARGE) // CHUNK) * CHUNK  # as even as chunks of CHUNK can be
    whole = -(-length // chunk) * chunk
    there = kernels == "tiles" or splash.fits(chunk, whole, layout.shape.head_dim)
    return Path(kernels, chunk) if there else small


def received_by(model: Model, runs: tuple[RunLayout, ...], constants, h: Float[Array, "B T E"], counts):
    """The attention mass that each of a prompt's tokens receives in all layers, [B, T]."""
    path = Path("off", min(CHUNK, h.shape[1]))  # no kernel gives what each token received

    def step(run, fixed, index, loop):
        h, mass = loop
        weights = decoder.layer(model.params, run.first + index)
        _, h, _, more = exact_layer(model, run, weights, at_layer(fixed, index), h, counts, path, weighing=True)
        return h, mass + more

    loop = h, jnp.zeros(h.shape[:2])
    for run, fixed in zip(runs, constants, strict=True):
        loop = decoder.over_layers(model.params, 0, run.count, functools.partial(step, run, fixed), loop)
    return loop[1]


class _Prompt(NamedTuple):
    """What one layer's queries attend to: keys and values of all T tokens, how many of a row are its own, and the
    sliding window."""

    k: Float[Array, "B T K D"]
    v: Float[Array, "B T K D"]
    counts: Int[Array, " B"]
    sliding: int | None

    def mask(self, queries: Int[Array, " t"], keys: Int[Array, " s"]):
        """[B, t, s], by places."""
        rows = len(self.counts)
        queries, keys = (jnp.broadcast_to(x[None], (rows, len(x))) for x in (queries, keys))
        return visible(queries, keys, keys < self.counts[:, None], self.sliding)

    def block(self, start, count: int):
        return (jax.lax.dynamic_slice_in_dim(x, start, count, 1) for x in (self.k, self.v))


def _tiled(q: Float[Array, "B T H D"], prompt: _Prompt, chunk: int) -> Float[Array, "B T H D"]:
    """Attention of a whole prompt in tiles of `chunk` queries and as many keys as memory allows."""
    batch, length, heads = q.shape[:3]
    most = max(chunk, SCORES // (4 * batch * heads * chunk))
    keys = chunk * max(n for n in range(1, length // chunk + 1) if length // chunk % n == 0 and n * chunk <= most)
    tiles = []
    for row in range(length // chunk):
        oldest = 0 if prompt.sliding is None else max(0, row * chunk - prompt.sliding + 1)
        tiles += [(row, column) for column in range(oldest // keys, row * chunk // keys + 1)]
    return tiled_attention(q, prompt.k, prompt.v, prompt.mask, tiles, (chunk, keys))


def _by_blocks(q, start, prompt: _Prompt) -> tuple[Partial, tuple]:
    """Attention of the queries from `start` on to blocks of as many keys: (found, which blocks were read)."""
    chunk = q.shape[1]

    def read(j, carry):
        return *prompt.block(j * chunk, chunk), _block_mask(prompt, start, j, chunk), carry

    first = jnp.int32(0) if prompt.sliding is None else jnp.maximum(start - prompt.sliding + 1, 0) // chunk
    found, _ = blockwise_attention(q, prompt.k.shape[2], read, first, start // chunk + 1)
    return found, (first, start // chunk + 1)


def _block_mask(prompt: _Prompt, start, j, chunk: int):
    return prompt.mask(start + jnp.arange(chunk), j * chunk + jnp.arange(chunk))


def _received(q, start, prompt: _Prompt, lse, blocks, mass):
    """`mass` and what the queries from `start` on gave each token."""
    chunk = q.shape[1]
    valid = (start + jnp.arange(chunk))[None] < prompt.counts[:, None]

    def add(j, mass):
        part = received(
            q, next(prompt.block(j * chunk, chunk)), _block_mask(prompt, start, j, chunk) & valid[:, :, None], lse
        )
        part = part + jax.lax.dynamic_slice_in_dim(mass, j * chunk, chunk, 1)
        return jax.lax.dynamic_update_slice_in_dim(mass, part, j * chunk, 1)

    first, last = blocks
    return jax.lax.fori_loop(first, last, add, mass)


def _splashed(q, start, prompt: _Prompt, by_head, kernels: str):
    """`_by_blocks`' output by splash attention, on a TPU, with keys and values by head."""
    places = start + jnp.arange(q.shape[1])
    # What is only padding sees nothing: its blocks are left out.
    newest = jnp.where(places < prompt.counts.max(), places, -1)

    def kernel(q, newest, k, v, interpret):
        return splash.splash_attention(q, k, v, newest, prompt.sliding, interpret).out

    plain = lambda q, *_: _by_blocks(q, start, prompt)[0].out  # noqa: E731
    return by_splash(kernels, kernel, plain, q, newest, *by_head)


def _by_chunks(make, starts, h: Float[Array, "B T E"]):
    """What `make(start)` gives, [B, chunk, ..], for all chunks: [B, T, ..]."""

    def step(found, start):
        put = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, start, 1)  # noqa: E731
        return jax.tree.map(put, found, make(start)), None

    whole = lambda x: jax.ShapeDtypeStruct((*h.shape[:2], *x.shape[2:]), x.dtype)  # noqa: E731
    blank = filled_by(h, jax.tree.map(whole, jax.eval_shape(make, starts[0])))
    return jax.lax.scan(step, blank, starts)[0]


def exact_layer(
    model: Model,
    run: RunLayout,
    weights,
    constants,
    h: Float[Array, "B T E"],
    counts,
    path: Path,
    weighing: bool = False,
):
    """One layer of exact causal attention, a chunk of `path` at a time: (sources [B,T,W] with 0 for what is not finite,
    next hidden states [B,T,E], which tokens are finite [B,T], and with `weighing` the attention mass of every token,
    [B,T], else 0)."""
    config, (batch, length), chunk = model.config, h.shape[:2], path.chunk
    starts = jnp.arange(0, length, chunk)

    def project(h, start):
        positions = jnp.broadcast_to((start + jnp.arange(chunk))[None], (batch, chunk))
        return positions, decoder.project(weights, jax.lax.dynamic_slice_in_dim(h, start, chunk, 1), positions, config)

    def keys(start):
        positions, projected = project(h, start)
        sources = run.wiring.maps.capture(weights, constants, projected, positions)
        k, v = (decoder.own_heads(x, config, projected.q.shape[2]) for x in (projected.k, projected.v))
        made = sources, {"k": rotate(k, positions, config), "v": v}
        each = found_finite(h.dtype, *jax.tree.map(lambda x: x.reshape(batch, chunk, -1), made))
        return *(zeroed(h.dtype, x) for x in made), each, projected.q if path.kernels == "tiles" else ()

    new, attending, finite, q = _by_chunks(keys, starts, h)
    broken, prompt = spoiled(finite, counts), _Prompt(attending["k"], attending["v"], counts, run.sliding)
    tiled = _tiled(q, prompt, chunk) if path.kernels == "tiles" else None
    by_head = tuple(x.swapaxes(1, 2).reshape(-1, length, x.shape[3]) for x in prompt[:2])

    def attended(loop, start):
        mass, h = loop  # a chunk of h is read by itself alone, so what comes out takes its place
        if tiled is not None:
            out = jax.lax.dynamic_slice_in_dim(tiled, start, chunk, 1)
        elif path.kernels in ("splash", "interpret"):
            out = _splashed(project(h, start)[1].q, start, prompt, by_head, path.kernels)
        else:
            q = project(h, start)[1].q
            (out, lse), blocks = _by_blocks(q, start, prompt)
            mass = _received(q, start, prompt, lse, blocks, mass) if weighing else mass
        spoilt = jax.lax.dynamic_slice_in_dim(broken, start, chunk, 1)[:, :, None, None]
        out = jnp.where(spoilt, jnp.nan, out)
        done = decoder.finish(weights, jax.lax.dynamic_slice_in_dim(h, start, chunk, 1), out, config)
        return (mass, jax.lax.dynamic_update_slice_in_dim(h, done, start, 1)), None

    empty = jnp.zeros(h.shape[:2]) if weighing else jnp.float32(0)
    (mass, h), _ = jax.lax.scan(attended, (empty, h), starts)
    return new, h, finite, mass
