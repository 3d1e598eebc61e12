"""A whole prompt attends to itself exactly, one layer at a time: the layers of exact prefill (kvqjax/step/prefill.py).

    path_of        chooses, once for all layers, how queries attend and how many tokens a chunk has
    exact_layer    runs one layer, in two loops over the chunks of the prompt:
                     1. sources, keys and values of all tokens
                     2. queries of a chunk attend to all keys, and the chunk's hidden states are computed

Only the second loop needs queries. It computes them anew for every chunk, unless a kernel wants those of the whole
prompt at once."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.readers.tiles import SPLASH_KINDS
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import tiles_of
from kvqjax.model import decoder
from kvqjax.model.decoder import Projected
from kvqjax.model.loading import Model
from kvqjax.model.rope import rotate
from kvqjax.model.weight_trees import is_unrolled
from kvqjax.ops.attention import merged, with_sinks
from kvqjax.ops.finite import found_finite, spoiled, zeroed
from kvqjax.ops.whole_prompts import attend_by_cudnn
from kvqjax.ops.xla_workarounds import filled_by, kept_apart, unknown_zero
from kvqjax.pallas_kernels import splash
from kvqjax.pallas_kernels.forms import CUDNN
from kvqjax.step.prompt_attention import SCORES, Prompt, by_blocks, far, near, splashed

__all__ = ["Path", "exact_layer", "path_of"]

# Tokens of a chunk.
CHUNK = 512  # where a CPU does the work
LARGE = 1024  # at most, where a TPU's matrix unit does
LARGEST = 4096  # at most, on GPUs, where every chunk costs kernel launches
AT_ONCE = ("tiles", "cudnn")  # kernels that are given the queries of the whole prompt


class Path(NamedTuple):
    """How a prompt attends to itself.

    Attributes:
        kernels: "off": to blocks of keys as long as a chunk. "tiles": to few large tiles of keys, on GPUs. "cudnn": all
            queries at once by cuDNN's kernel, on GPUs whose check it passed. "splash": by splash attention, on TPUs.
            "interpret": by splash attention in Pallas' interpreter.
        chunk: How many tokens are projected, and attend, at a time."""

    kernels: str
    chunk: int


def path_of(layout: CacheLayout, batch: int, length: int, score_sinks: bool = False) -> Path:
    """Choose how `batch` prompts, padded to `length` tokens, attend to themselves on the chip that a cache is for.

    Args:
        layout: The cache's layout.
        batch: Prompts.
        length: Tokens of each, with padding.
        score_sinks: Whether query heads have logits beside their scores.

    Returns:
        The kernels and the chunk."""
    blocks, kernels = Path("off", min(CHUNK, length)), tiles_of(layout)
    # Large tiles have no place for a cap of scores, and none for layers that attend in chunks: a border between two
    # chunks may lie inside a piece of queries (`far`).
    is_special = layout.shape.softcap is not None or layout.shape.chunked is not False
    if kernels == "off" or length <= CHUNK or (kernels == "tiles" and is_special):
        return blocks
    if kernels == "tiles" and _by_cudnn(layout) and not score_sinks:
        return Path("cudnn", _even(length, LARGEST))
    if kernels == "tiles":
        # A tile of one chunk of queries and as many keys takes no more than SCORES bytes.
        scores_per_head = SCORES // (jnp.dtype(layout.dtype).itemsize * batch * layout.shape.num_heads)
        longest_chunk = min(LARGEST, math.isqrt(scores_per_head))
    else:
        longest_chunk = LARGE
    chunk = _even(length, max(CHUNK, longest_chunk))
    padded_length = -(-length // chunk) * chunk
    is_served = kernels == "tiles" or splash.fits(chunk, padded_length, layout.shape.head_dim)
    return Path(kernels, chunk) if is_served else blocks


def _even(length: int, longest_chunk: int) -> int:
    """Choose the tokens of a chunk for a prompt of `length` tokens.

    There are as few chunks as `longest_chunk` allows. They are as even as multiples of CHUNK can be."""
    count = -(-length // longest_chunk)
    return -(-length // count // CHUNK) * CHUNK


def _by_cudnn(layout: CacheLayout) -> bool:
    """Say whether cuDNN's kernel passed the check on this chip, or is forced."""
    # The table of kernels is not asked: a program that is compiled for a GPU that is not here cannot contain cuDNN's.
    return layout.kernels.forms is not None and CUDNN in layout.kernels.forms


def _by_chunks(make, starts, h: Float[Array, "B T E"]):
    """Call `make(start)` for every chunk, and put its results together.

    Args:
        make: Gives a tree of arrays [B, chunk, ..] for the chunk from `start` on.
        starts: Where the chunks begin.
        h: The hidden states of the prompt. Of them only the shape is needed, and a number to fill arrays with
            (`filled_by`).

    Returns:
        The tree with arrays [B, T, ..]."""

    def step(results, start):
        put = lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, start, 1)  # noqa: E731
        return jax.tree.map(put, results, make(start)), None

    prompt_shape = lambda x: jax.ShapeDtypeStruct((*h.shape[:2], *x.shape[2:]), x.dtype)  # noqa: E731
    blank = filled_by(h, jax.tree.map(prompt_shape, jax.eval_shape(make, starts[0])))
    return jax.lax.scan(step, blank, starts)[0]


def _captured(run: RunLayout, constants, weights, projected: Projected, positions: Int[Array, "B t"], config):
    """Take from a chunk what the cache stores and what queries attend to.

    Args:
        run: The plan of the layer's run.
        constants: The layer's calibrated constants.
        weights: The layer's decoder weights.
        projected: What the layer computed of the chunk's tokens.
        positions: Their positions.
        config: The model's config.

    Returns:
        (sources by name; keys "k", rotated by RoPE, and values "v" [B, t, K, D]; which tokens are finite, [B, t]).
        Numbers that are not finite are 0 in the first two."""
    sources = run.wiring.maps.capture(weights, constants, projected, positions)
    k, v = (decoder.own_heads(x, config, projected.q.shape[2]) for x in (projected.k, projected.v))
    parts, dtype = (sources, {"k": rotate(k, positions, run.shape), "v": v}), projected.q.dtype
    finite = found_finite(dtype, *jax.tree.map(lambda x: x.reshape(*positions.shape, -1), parts))
    return *(zeroed(dtype, x) for x in parts), finite


def exact_layer(
    model: Model,
    run: RunLayout,
    index: Int[Array, ""] | int,
    constants,
    h: Float[Array, "B T E"],
    counts,
    path: Path,
    keep: Callable,
):
    """Run one layer over a whole prompt with exact causal attention, chunk by chunk.

    Args:
        model: The model.
        run: The plan of the layer's run.
        index: The layer's number in its run.
        constants: The layer's calibrated constants.
        h: The hidden states of the prompt, whose length is whole chunks.
        counts: How many tokens of each row are valid.
        path: How queries attend, and the tokens of a chunk.
        keep: `keep(sources, finite)` is given the sources [B, T, W] by name, 0 where a number is not finite, and which
            tokens are finite, [B, T]. It runs before any query attends, so that sources take no memory afterwards.

    Returns:
        (what `keep` returned; the hidden states after the layer, [B, T, E])."""
    config, (batch, length), chunk = model.config, h.shape[:2], path.chunk
    starts = jnp.arange(0, length, chunk)
    cut = lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, chunk, 1)  # noqa: E731

    def weights(start):
        """Give the layer's weights, for the chunk from `start` on."""
        # With stacked weights, XLA for TPUs would keep copies of the layer's matrices beside the stacks during the loop
        # over chunks. A number that depends on the chunk makes it read them again for every chunk.
        is_reread = path.kernels != "off" and not is_unrolled(model.params)
        return decoder.layer(model.params, run.first + index + (unknown_zero(start[None]) if is_reread else 0))

    def project(h, start):
        """Project a chunk: (positions, the layer's weights, what the layer computed)."""
        positions = jnp.broadcast_to((start + jnp.arange(chunk))[None], (batch, chunk))
        layer_weights = weights(start)
        return positions, layer_weights, decoder.project(layer_weights, cut(h, start), positions, config, run.first)

    def keys(start):
        """Do a chunk's part of the first loop: what `_captured` gives, and queries for kernels that want all."""
        positions, layer_weights, projected = project(h, start)
        parts = _captured(run, constants, layer_weights, projected, positions, config)
        return *parts, projected.q if path.kernels in AT_ONCE else ()

    new, attending, finite, q = _by_chunks(keys, starts, h)
    # No query attends before `keep` has run.
    keep_result, attending = kept_apart((keep(new, finite), attending))
    prompt = Prompt(attending["k"], attending["v"], counts, run.sliding, run.shape.softcap, run.chunked)
    sinks = functools.partial(decoder.own_sinks, weights(starts[0]), config)
    attend = _attention(prompt, q, path, sinks)
    broken = spoiled(finite, counts)  # tokens at or behind one that is not finite: their output is NaN

    def attended(h, start):
        """Do a chunk's part of the second loop."""
        # Only this chunk's queries read this part of h, so that the layer's output may take its place.
        out = attend(start, lambda: project(h, start)[2].q)
        out = jnp.where(cut(broken, start)[:, :, None, None], jnp.nan, out)
        next_h = decoder.finish(weights(start), cut(h, start), out, config)
        return jax.lax.dynamic_update_slice_in_dim(h, next_h, start, 1), None

    h, _ = jax.lax.scan(attended, h, starts)
    return keep_result, h


def _attention(prompt: Prompt, queries, path: Path, sinks: Callable) -> Callable:
    """Make the function by which a chunk's queries attend.

    Args:
        prompt: The keys and values of the prompt.
        queries: The queries of the whole prompt, for kernels of `AT_ONCE`; empty for others.
        path: The kernels, and the tokens of a chunk.
        sinks: `sinks(n)` gives the logits of score sinks of n query heads.

    Returns:
        `attend(start, make)`, which gives the output of the chunk from `start` on. Where `queries` is empty, `make()`
        computes the chunk's queries."""
    length = prompt.k.shape[1]
    cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=path.chunk, axis=1)
    if path.kernels == "cudnn":
        output = attend_by_cudnn(queries, prompt.k, prompt.v, prompt.sliding)
        return lambda start, make: cut(output, start)
    far_parts = far(queries, prompt, path.chunk) if path.kernels == "tiles" else None
    # Keys and values as splash attention takes them: [B * K, T, D].
    by_head = tuple(x.swapaxes(1, 2).reshape(-1, length, x.shape[3]) for x in prompt[:2])

    def attend(start, make):
        if path.kernels == "tiles":
            far_part = jax.tree.map(lambda x: cut(x, start), far_parts)
            q = cut(queries, start)
            return with_sinks(merged(near(q, start, prompt), far_part), sinks(q.shape[2])).out
        q = make()
        if path.kernels in SPLASH_KINDS:
            return with_sinks(splashed(q, start, prompt, by_head, path.kernels), sinks(q.shape[2])).out
        return with_sinks(by_blocks(q, start, prompt), sinks(q.shape[2])).out

    return attend
