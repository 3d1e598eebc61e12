"""A whole prompt attending to itself exactly, one layer at a time: what an exact prefill is made of."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax.cache import at_layer
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
from kvqjax.step.prompt_attention import SCORES, Prompt, add_received, by_blocks, far, near, splashed
from kvqjax.step.recurrence import Recurrence

__all__ = ["Path", "exact_layer", "path_of", "received_by"]

CHUNK, LARGE = 512, 1024  # prompt tokens at a time: where one core does the work, and where a matrix unit does
LARGEST = 4096  # the same where every chunk costs launches
AT_ONCE = ("tiles", "cudnn")  # kernels that are given the queries of a whole prompt


class Path(NamedTuple):
    """How a prompt attends to itself.

    - `kernels`: "off" (blocks of a chunk), "tiles" (few large tiles, on GPUs), "cudnn" (all queries at once, on GPUs
      whose check it passed), "splash" (on TPUs), "interpret" (splash in the interpreter).
    - `chunk`: the tokens that are projected, and attend, at a time."""

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
    # Large tiles have no place for a cap of scores, and none for a layer's chunk that begins inside a piece.
    is_special = layout.shape.softcap is not None or layout.shape.chunked is not False
    if kernels == "off" or length <= CHUNK or (kernels == "tiles" and is_special):
        return blocks
    if kernels == "tiles" and _by_cudnn(layout) and not score_sinks:
        return Path("cudnn", _even(length, LARGEST))
    numbers = SCORES // (jnp.dtype(layout.dtype).itemsize * batch * layout.shape.num_heads)
    longest_chunk = min(LARGEST, math.isqrt(numbers)) if kernels == "tiles" else LARGE
    chunk = _even(length, max(CHUNK, longest_chunk))
    padded_length = -(-length // chunk) * chunk
    is_served = kernels == "tiles" or splash.fits(chunk, padded_length, layout.shape.head_dim)
    return Path(kernels, chunk) if is_served else blocks


def _even(length: int, longest_chunk: int) -> int:
    """Choose chunks of at most `longest_chunk` tokens, as even as multiples of CHUNK can be."""
    return -(-length // -(-length // longest_chunk) // CHUNK) * CHUNK


def _by_cudnn(layout: CacheLayout) -> bool:
    """Whether cuDNN passed this chip's check, or is forced. The table alone is not enough: a program that is compiled
    for a GPU that is not here cannot contain cuDNN's kernel."""
    return layout.kernels.forms is not None and CUDNN in layout.kernels.forms


def received_by(model: Model, runs: tuple[RunLayout, ...], constants, h: Float[Array, "B T E"], recurrence: Recurrence):
    """Sum the attention mass that each of a prompt's tokens receives in all layers, [B, T]."""
    path = Path("off", min(CHUNK, h.shape[1]))  # no kernel gives what each token received

    def step(run, fixed, index, loop):
        h, mass, carried = loop
        h, carried = recurrence.before(run.first + index, h, carried)
        _, h, layer_mass = exact_layer(
            model, run, index, at_layer(fixed, index), h, recurrence.counts, path, weighing=True
        )
        return h, mass + layer_mass, carried

    loop = h, jnp.zeros(h.shape[:2]), recurrence.first(h.shape[1])
    for run, fixed in zip(runs, constants, strict=True):
        loop = decoder.over_layers(model.params, 0, run.count, functools.partial(step, run, fixed), loop)
    return loop[1]


def _by_chunks(make, starts, h: Float[Array, "B T E"]):
    """Call `make(start)` for every chunk and put its results, [B, chunk, ..], together: [B, T, ..]."""

    def step(results, start):
        put = lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, start, 1)  # noqa: E731
        return jax.tree.map(put, results, make(start)), None

    prompt_shape = lambda x: jax.ShapeDtypeStruct((*h.shape[:2], *x.shape[2:]), x.dtype)  # noqa: E731
    blank = filled_by(h, jax.tree.map(prompt_shape, jax.eval_shape(make, starts[0])))
    return jax.lax.scan(step, blank, starts)[0]


def _captured(run: RunLayout, constants, weights, projected: Projected, positions: Int[Array, "B t"], config):
    """Give (sources, keys and values as they are attended to, which tokens are finite). Numbers that are not finite are
    0."""
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
    keep: Callable = lambda sources, finite: (),
    weighing: bool = False,
):
    """Run layer `index` of a run with exact causal attention, a chunk of `path` at a time.

    `keep(sources, finite)` is called with the sources [B,T,W], 0 where a number is not finite, and which tokens are
    finite, [B,T]. It runs before any query attends, so that sources need no memory then.

    Returns:
        What `keep` gives, the next hidden states [B,T,E], and with `weighing` the attention mass of every token, [B,T],
        else 0."""
    config, (batch, length), chunk = model.config, h.shape[:2], path.chunk
    starts, cut = jnp.arange(0, length, chunk), lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, chunk, 1)

    def weights(start):
        # Read again for every chunk on a TPU, where XLA would otherwise keep copies of a layer's matrices beside the
        # stacks.
        is_reread = path.kernels != "off" and not is_unrolled(model.params)
        return decoder.layer(model.params, run.first + index + (unknown_zero(start[None]) if is_reread else 0))

    def project(h, start):
        positions = jnp.broadcast_to((start + jnp.arange(chunk))[None], (batch, chunk))
        layer_weights = weights(start)
        return positions, layer_weights, decoder.project(layer_weights, cut(h, start), positions, config, run.first)

    def keys(start):
        positions, layer_weights, projected = project(h, start)
        parts = _captured(run, constants, layer_weights, projected, positions, config)
        return *parts, projected.q if path.kernels in AT_ONCE else ()

    new, attending, finite, q = _by_chunks(keys, starts, h)
    keep_result, attending = kept_apart((keep(new, finite), attending))
    prompt = Prompt(attending["k"], attending["v"], counts, run.sliding, run.shape.softcap, run.chunked)
    sinks = functools.partial(decoder.own_sinks, weights(starts[0]), config)
    attend = _attention(prompt, q, path, weighing, sinks)
    broken = spoiled(finite, counts)

    def attended(loop, start):
        mass, h = loop  # only this chunk's queries read this part of h, so the output may take its place
        out, mass = attend(start, lambda: project(h, start)[2].q, mass)
        out = jnp.where(cut(broken, start)[:, :, None, None], jnp.nan, out)
        next_h = decoder.finish(weights(start), cut(h, start), out, config)
        return (mass, jax.lax.dynamic_update_slice_in_dim(h, next_h, start, 1)), None

    empty = jnp.zeros(h.shape[:2]) if weighing else jnp.float32(0)
    (mass, h), _ = jax.lax.scan(attended, (empty, h), starts)
    return keep_result, h, mass


def _attention(prompt: Prompt, queries, path: Path, weighing: bool, sinks: Callable) -> Callable:
    """Make the function `attend(start, make, mass)` of the chunk from `start` on. It gives (output, `mass` with what
    the chunk gave each token). Kernels of `AT_ONCE` cut the chunk's queries out of `queries`; for others `make()` makes
    them. `sinks(n)` gives the logits of score sinks of n query heads."""
    length, cut = prompt.k.shape[1], functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=path.chunk, axis=1)
    if path.kernels == "cudnn":
        output = attend_by_cudnn(queries, prompt.k, prompt.v, prompt.sliding)
        return lambda start, make, mass: (cut(output, start), mass)
    far_parts = far(queries, prompt, path.chunk) if path.kernels == "tiles" else None
    by_head = tuple(x.swapaxes(1, 2).reshape(-1, length, x.shape[3]) for x in prompt[:2])

    def attend(start, make, mass):
        if path.kernels == "tiles":
            far_part = jax.tree.map(lambda x: cut(x, start), far_parts)
            q = cut(queries, start)
            return with_sinks(merged(near(q, start, prompt), far_part), sinks(q.shape[2])).out, mass
        q = make()
        if path.kernels in SPLASH_KINDS:
            return with_sinks(splashed(q, start, prompt, by_head, path.kernels), sinks(q.shape[2])).out, mass
        part, blocks = by_blocks(q, start, prompt)
        out, lse = with_sinks(part, sinks(q.shape[2]))
        return out, add_received(q, start, prompt, lse, blocks, mass) if weighing else mass

    return attend
