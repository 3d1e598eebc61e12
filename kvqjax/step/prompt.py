"""Exact prefill: a prompt attends to itself exactly, layer by layer, and is encoded into an empty
cache.

The order of one layer of attention (`_prefill_run`, `exact_layer` of kvqjax/step/prompt.py):

    recurrent layers before it -> sources, keys and values of all tokens -> encode what goes into
    the body -> the other tokens into sinks and window -> queries attend to the exact keys and
    values -> hidden states

So later tokens of the prompt see exact keys and values, and never what was encoded. Encoding comes
before attention, so that sources need no memory while queries attend. The prompt is padded to whole
chunks; a chunk is what is projected and attends together.

    path_of              chooses, once for all layers, how queries attend and how many tokens a chunk has
    exact_layer          runs one layer, in two loops over the chunks of the prompt:
                           1. sources, keys and values of all tokens
                           2. queries of a chunk attend to all keys, and the chunk's hidden states
                              are computed

Only the second loop needs queries. It computes them anew for every chunk, unless a kernel wants
those of the whole prompt at once. A chunk attends to the prompt in one of these ways:

    by_blocks    block by block, on CPUs and wherever there is nothing else
    far, near    in large tiles, on GPUs: `far` to the keys that all queries of a piece see, `near` to the others
    splashed     by splash attention, on TPUs

Tokens are numbered by their places in the prompt, which are their positions."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvqjax import cache as caches
from kvqjax._arguments import is_known
from kvqjax._errors import UserError
from kvqjax.cache.append import Pages, flush_layer, in_order, remember
from kvqjax.cache.eviction import Newest, newest_of_prompt
from kvqjax.cache.layout import CacheLayout, RunLayout
from kvqjax.cache.readers.tiles import SPLASH_KINDS, by_splash
from kvqjax.cache.runs import runs_of, tiles_of
from kvqjax.cache.state import Cache, Run, admitted, finite_tokens, units_due
from kvqjax.model import decoder
from kvqjax.model.decoder import Projected
from kvqjax.model.loading import Model
from kvqjax.model.rope import rotate
from kvqjax.model.weight_trees import is_unrolled
from kvqjax.ops.attention import (
    Partial,
    blockwise_attention,
    merged,
    oldest_seen,
    segment_attention,
    visible,
    with_sinks,
)
from kvqjax.ops.finite import found_finite, leading, spoiled, zeroed
from kvqjax.ops.large_tiles import tiled_attention
from kvqjax.ops.whole_prompts import attend_by_cudnn
from kvqjax.ops.xla_workarounds import filled_by, kept_apart, unknown_zero
from kvqjax.pallas_kernels import splash
from kvqjax.pallas_kernels.forms import CUDNN
from kvqjax.step.checks import check_new_tokens, padding_of, run_constants, run_step
from kvqjax.step.forward import check_capacity, known_ids, last_logits, slab
from kvqjax.step.recurrence import Recurrence

SCORES = 2**31  # bytes of the softmax weights of a large tile, at most
TILES = 8  # large tiles into which the keys of a prompt of as many chunks are cut, at least
MASK_PIECES = 8  # pieces of a chunk; a large tile has one mask for all queries of a piece


class Prompt(NamedTuple):
    """What one layer's queries attend to.

    Attributes:
        k: The keys of all T tokens, rotated by RoPE.
        v: Their values.
        counts: How many tokens of each row are valid.
        sliding: How many tokens a query sees, its own included; None: all before it.
        softcap: The cap of the scores, if there is one.
        chunked: Whether a query sees the tokens of its own chunk, `sliding` tokens long, instead of
        the newest ones."""

    k: Float[Array, "B T K D"]
    v: Float[Array, "B T K D"]
    counts: Int[Array, " B"]
    sliding: int | None
    softcap: float | None = None
    chunked: bool = False

    def mask(self, queries: Int[Array, " t"], keys: Int[Array, " s"]):
        """Mark which keys the queries see, [B, t, s]. Both are given by their places in the
        prompt."""
        rows = len(self.counts)
        queries = jnp.broadcast_to(queries[None], (rows, len(queries)))
        keys = jnp.broadcast_to(keys[None], (rows, len(keys)))
        return visible(queries, keys, keys < self.counts[:, None], self.sliding, self.chunked)

    def block(self, start, count: int):
        """Cut out the keys and values of `count` tokens from `start` on."""
        k = jax.lax.dynamic_slice_in_dim(self.k, start, count, 1)
        v = jax.lax.dynamic_slice_in_dim(self.v, start, count, 1)
        return k, v


def far(q: Float[Array, "B T H D"], prompt: Prompt, chunk: int) -> Partial:
    """Attend, in large tiles, to the keys that all queries of a piece see. `near` attends to the
    other keys.

    A piece is one MASK_PIECES-th of a chunk of queries. It begins at place p and has P tokens. All its
    queries see the keys before p, and under a sliding window of W those from p + P - W on.

    Args:
        q: The queries of the whole prompt.
        chunk: The tokens of a chunk.

    Returns:
        Attention to these keys."""
    batch, length, heads = q.shape[:3]
    chunks = length // chunk
    part = chunk // MASK_PIECES  # tokens of a piece
    # A tile is one chunk of queries and some chunks of keys, whole ones that divide the prompt.
    bytes_of_chunk = q.dtype.itemsize * batch * heads * chunk**2  # of its weights of a chunk
    largest = max(1, min(chunks // TILES, SCORES // bytes_of_chunk))
    keys = chunk * max(n for n in range(1, largest + 1) if chunks % n == 0)
    # By chunk and piece, [chunks, MASK_PIECES]: the first key that all queries of the piece see,
    # and one past the last.
    stop = np.arange(0, length, part).reshape(chunks, MASK_PIECES)
    start = np.maximum(0, stop + part - (prompt.sliding or length))

    def visible_keys(number, places):
        """Mark which keys each piece of chunk `number` sees, [B, MASK_PIECES, keys]."""
        first = jnp.asarray(start, jnp.int32)[number][:, None]
        last = jnp.asarray(stop, jnp.int32)[number][:, None]
        places = places[None]
        of_piece = ((places >= first) & (places < last))[None]
        is_valid = (places < prompt.counts[:, None])[:, None]
        return of_piece & is_valid

    # All pairs (chunk of queries, tile of keys) in which any piece sees a key. A chunk's first
    # piece reaches back furthest, its last piece furthest ahead.
    tiles = []
    for number in range(chunks):
        first_tile = start[number, 0] // keys
        end_tile = -(-stop[number, -1] // keys)
        tiles.extend((number, tile) for tile in range(first_tile, end_tile))
    return tiled_attention(q, prompt.k, prompt.v, visible_keys, tiles, (chunk, keys))


def near(q: Float[Array, "B t H D"], start, prompt: Prompt) -> Partial:
    """Attend, for every piece of a chunk, to the keys that only some of its queries see.

    They are the piece's own tokens, and under a sliding window as many tokens at its other end,
    which it hides from one query after the other.

    Args:
        q: The queries of the chunk.
        start: The place of its first token.

    Returns:
        Attention to these keys."""
    part = q.shape[1] // MASK_PIECES
    first = start + part * jnp.arange(MASK_PIECES)[:, None]
    keys = places = first + jnp.arange(part)[None]  # [MASK_PIECES, part]
    mask = jax.vmap(prompt.mask, out_axes=1)(places, places)  # [B, MASK_PIECES, part, part]
    if prompt.sliding is not None:
        # The oldest key that each query sees. It is left out where it lies before the prompt, among
        # the piece's own tokens, or where `far` has it: the last query's is the first that all
        # queries of the piece see.
        edge = places + 1 - prompt.sliding
        edge_mask = (edge >= 0) & (edge < first) & (edge < first + part - prompt.sliding)
        keys = jnp.concatenate([places, jnp.maximum(edge, 0)], 1)
        sees_edge = jax.vmap(prompt.mask, out_axes=1)(places, edge) & edge_mask[None, :, None]
        mask = jnp.concatenate([mask, sees_edge], 3)

    def by_part(x):
        """Reshape [B, MASK_PIECES, ..] to [B * MASK_PIECES, ..]: a piece is a row of its own."""
        return x.reshape(-1, *x.shape[2:])

    rows = q.reshape(-1, part, *q.shape[2:])
    k = by_part(prompt.k[:, keys])
    v = by_part(prompt.v[:, keys])
    partial = segment_attention(rows, k, v, by_part(mask))
    return Partial(*(x.reshape(q.shape[:2] + x.shape[2:]) for x in partial))


def by_blocks(q, start, prompt: Prompt) -> Partial:
    """Attend with the queries of a chunk to blocks of keys that are as long as the chunk.

    Args:
        q: The queries of the chunk, [B, t, H, D].
        start: The place of its first token, a multiple of t.

    Returns:
        Attention to all keys."""
    chunk = q.shape[1]

    def read(j, carry):
        mask = prompt.mask(start + jnp.arange(chunk), j * chunk + jnp.arange(chunk))
        k, v = prompt.block(j * chunk, chunk)
        return k, v, mask, carry

    first = jnp.int32(0)
    if prompt.sliding is not None:
        first = jnp.maximum(oldest_seen(start, prompt.sliding, prompt.chunked), 0) // chunk
    partial, _ = blockwise_attention(
        q, prompt.k.shape[2], read, first, start // chunk + 1, softcap=prompt.softcap
    )
    return partial


def splashed(q, start, prompt: Prompt, by_head, kernels: str) -> Partial:
    """Attend as `by_blocks` does, by splash attention on a TPU.

    Args:
        q: The queries of the chunk, [B, t, H, D].
        start: The place of its first token.
        by_head: Its keys and values by head, [B * K, T, D] each.
        kernels: "splash" or "interpret", as in `Path`.

    Returns:
        Attention to all keys."""
    places = start + jnp.arange(q.shape[1])
    # Queries that are padding in every row see nothing, so that splash skips their blocks.
    newest = jnp.where(places < prompt.counts.max(), places, -1)

    def kernel(q, newest, k, v, interpret):
        return splash.splash_attention(
            q, k, v, newest, prompt.sliding, interpret, None, prompt.softcap, prompt.chunked
        )

    def plain(q, *_):
        return by_blocks(q, start, prompt)

    return by_splash(kernels, kernel, plain, q, newest, *by_head)


# Tokens of a chunk.
CHUNK = 512  # where a CPU does the work
LARGE = 1024  # at most, where a TPU's matrix unit does
LARGEST = 4096  # at most, on GPUs, where every chunk costs kernel launches
AT_ONCE = ("tiles", "cudnn")  # kernels that are given the queries of the whole prompt


class Path(NamedTuple):
    """How a prompt attends to itself.

    Attributes:
        kernels: "off": to blocks of keys as long as a chunk. "tiles": to few large tiles of keys,
            on GPUs. "cudnn": all queries at once by cuDNN's kernel, on GPUs whose check it passed.
            "splash": by splash attention, on TPUs. "interpret": by splash attention in Pallas'
            interpreter.
        chunk: How many tokens are projected, and attend, at a time."""

    kernels: str
    chunk: int


def path_of(layout: CacheLayout, batch: int, length: int, score_sinks: bool = False) -> Path:
    """Choose how `batch` prompts, padded to `length` tokens, attend to themselves on the chip that
    a cache is for.

    Args:
        batch: Prompts.
        length: Tokens of each, with padding.
        score_sinks: Whether query heads have logits beside their scores.

    Returns:
        The kernels and the chunk."""
    blocks = Path("off", min(CHUNK, length))
    kernels = tiles_of(layout)
    # Large tiles have no place for a cap of scores, and none for layers that attend in chunks: a
    # border between two chunks may lie inside a piece of queries (`far`).
    is_special = layout.shape.softcap is not None or layout.shape.chunked is not False
    if kernels == "off" or length <= CHUNK or (kernels == "tiles" and is_special):
        return blocks
    if kernels == "tiles" and _by_cudnn(layout) and not score_sinks:
        return Path("cudnn", _even(length, LARGEST))
    if kernels == "tiles":
        # A tile of one chunk of queries and as many keys takes no more than SCORES bytes.
        bytes_of_pair = jnp.dtype(layout.dtype).itemsize * batch * layout.shape.num_heads
        longest_chunk = min(LARGEST, math.isqrt(SCORES // bytes_of_pair))
    else:
        longest_chunk = LARGE
    chunk = _even(length, max(CHUNK, longest_chunk))
    padded_length = -(-length // chunk) * chunk
    if kernels == "tiles" or splash.fits(chunk, padded_length, layout.shape.head_dim):
        return Path(kernels, chunk)
    return blocks


def _even(length: int, longest_chunk: int) -> int:
    """Choose the tokens of a chunk for a prompt of `length` tokens.

    There are as few chunks as `longest_chunk` allows. They are as even as multiples of CHUNK can
    be."""
    count = -(-length // longest_chunk)
    return -(-length // count // CHUNK) * CHUNK


def _by_cudnn(layout: CacheLayout) -> bool:
    """Say whether cuDNN's kernel passed the check on this chip, or is forced."""
    # The table of kernels is not asked: a program that is compiled for a GPU that is not here
    # cannot contain cuDNN's.
    return layout.kernels.forms is not None and CUDNN in layout.kernels.forms


def _by_chunks(make, starts, h: Float[Array, "B T E"]):
    """Call `make(start)` for every chunk, and put its results together.

    Args:
        make: Gives a tree of arrays [B, chunk, ..] for the chunk from `start` on.
        starts: Where the chunks begin.
        h: The hidden states of the prompt. Of them only the shape is needed, and a number to fill
            arrays with (`filled_by`).

    Returns:
        The tree with arrays [B, T, ..]."""

    def step(results, start):
        def put(x, part):
            return jax.lax.dynamic_update_slice_in_dim(x, part, start, 1)

        return jax.tree.map(put, results, make(start)), None

    def prompt_shape(x):
        return jax.ShapeDtypeStruct((*h.shape[:2], *x.shape[2:]), x.dtype)

    chunk_shapes = jax.eval_shape(make, starts[0])
    blank = filled_by(h, jax.tree.map(prompt_shape, chunk_shapes))
    results, _ = jax.lax.scan(step, blank, starts)
    return results


def _captured(
    run: RunLayout, constants, weights, projected: Projected, positions: Int[Array, "B t"], config
):
    """Take from a chunk what the cache stores and what queries attend to.

    Args:
        projected: What the layer computed of the chunk's tokens.

    Returns:
        (sources by name; keys "k", rotated by RoPE, and values "v" [B, t, K, D]; which tokens are
        finite, [B, t]). Numbers that are not finite are 0 in the first two."""
    sources = run.wiring.maps.capture(weights, constants, projected, positions)
    query_heads = projected.q.shape[2]
    k = decoder.own_heads(projected.k, config, query_heads)
    v = decoder.own_heads(projected.v, config, query_heads)
    attending = {"k": rotate(k, positions, run.shape), "v": v}
    dtype = projected.q.dtype
    by_token = jax.tree.map(lambda x: x.reshape(*positions.shape, -1), (sources, attending))
    finite = found_finite(dtype, *by_token)
    return zeroed(dtype, sources), zeroed(dtype, attending), finite


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
        h: The hidden states of the prompt, whose length is whole chunks.
        counts: How many tokens of each row are valid.
        path: How queries attend, and the tokens of a chunk.
        keep: `keep(sources, finite)` is given the sources [B, T, W] by name, 0 where a number is
            not finite, and which tokens are finite, [B, T]. It runs before any query attends, so
            that sources take no memory afterwards.

    Returns:
        (what `keep` returned; the hidden states after the layer, [B, T, E])."""
    config = model.config
    batch, length = h.shape[:2]
    chunk = path.chunk
    starts = jnp.arange(0, length, chunk)

    def cut(x, start):
        return jax.lax.dynamic_slice_in_dim(x, start, chunk, 1)

    def weights(start):
        """Give the layer's weights, for the chunk from `start` on."""
        # With stacked weights, XLA for TPUs would keep copies of the layer's matrices beside the
        # stacks during the loop over chunks. A number that depends on the chunk makes it read them
        # again for every chunk.
        is_reread = path.kernels != "off" and not is_unrolled(model.params)
        number = run.first + index
        zero = unknown_zero(start[None]) if is_reread else 0
        return decoder.layer(model.params, number + zero)

    def project(h, start):
        """Project a chunk: (positions, the layer's weights, what the layer computed)."""
        positions = jnp.broadcast_to((start + jnp.arange(chunk))[None], (batch, chunk))
        layer_weights = weights(start)
        projected = decoder.project(layer_weights, cut(h, start), positions, config, run.first)
        return positions, layer_weights, projected

    def keys(start):
        """Do a chunk's part of the first loop: what `_captured` gives, and queries for kernels that
        want all."""
        positions, layer_weights, projected = project(h, start)
        parts = _captured(run, constants, layer_weights, projected, positions, config)
        q = projected.q if path.kernels in AT_ONCE else ()
        return *parts, q

    new, attending, finite, q = _by_chunks(keys, starts, h)
    # No query attends before `keep` has run.
    keep_result, attending = kept_apart((keep(new, finite), attending))
    prompt = Prompt(
        attending["k"], attending["v"], counts, run.sliding, run.shape.softcap, run.chunked
    )
    sinks = functools.partial(decoder.own_sinks, weights(starts[0]), config)
    attend = _attention(prompt, q, path, sinks)
    # Tokens at or behind one that is not finite: their output is NaN.
    broken = spoiled(finite, counts)

    def attended(h, start):
        """Do a chunk's part of the second loop."""

        def queries():
            _, _, projected = project(h, start)
            return projected.q

        # Only this chunk's queries read this part of h, so that the layer's output may take its
        # place.
        out = attend(start, queries)
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
        `attend(start, make)`, which gives the output of the chunk from `start` on. Where `queries`
        is empty, `make()` computes the chunk's queries."""
    length = prompt.k.shape[1]
    cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=path.chunk, axis=1)
    if path.kernels == "cudnn":
        output = attend_by_cudnn(queries, prompt.k, prompt.v, prompt.sliding)

        def cut_out(start, make):
            return cut(output, start)

        return cut_out
    far_parts = far(queries, prompt, path.chunk) if path.kernels == "tiles" else None
    # Keys and values as splash attention takes them: [B * K, T, D].
    by_head = tuple(x.swapaxes(1, 2).reshape(-1, length, x.shape[3]) for x in prompt[:2])

    def attend(start, make):
        if path.kernels == "tiles":
            far_part = jax.tree.map(lambda x: cut(x, start), far_parts)
            q = cut(queries, start)
            partial = merged(near(q, start, prompt), far_part)
        elif path.kernels in SPLASH_KINDS:
            q = make()
            partial = splashed(q, start, prompt, by_head, path.kernels)
        else:
            q = make()
            partial = by_blocks(q, start, prompt)
        return with_sinks(partial, sinks(q.shape[2])).out

    return attend


def prefill(
    model: Model,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"] | Bool[Array, "B T"],
    cache: Cache,
) -> tuple[Float[Array, "B V"], Cache]:
    """Let prompts attend to themselves exactly and encode them into an empty cache.

    Layers run one after the other. In memory are the hidden states [B, T, E], one layer's keys and
    values, and the method's carry.

    Args:
        model: the model.
        tokens: token ids [B, T].
        counts: how many of each row's tokens are valid, from the first on; or a mask of the valid
            ones, as in `forward`.
        cache: an empty cache of this model.

    Returns:
        The logits of each row's last valid token, float32 [B, V], and the cache that holds the
        prompts.

    Raises:
        UserError: for a cache that is not empty, and as `forward` does for counts and token ids.
            What a trace hides is clipped, and raises the row's flag `cache.overflow[b]`.
    """
    check_new_tokens(model, tokens, counts, cache)
    check_capacity(cache, counts)
    # With numpy, because jnp would be traced in a user's jit.
    if is_known(cache.lengths) and int(np.asarray(cache.lengths).max()) > 0:
        raise UserError("exact prefill starts from an empty cache; use forward to extend one")
    return run_step(_prefill, model, cache, tokens, counts, out=("logits", "cache"))


# For loops that made the cache themselves: one program for all of them.
prefill_donated = jax.jit(prefill, donate_argnames="cache")


def _prefill(model: Model, cache: Cache, tokens, counts):
    """Do `prefill` after its checks, on one device's part."""
    layout = cache.layout
    runs = runs_of(layout)
    constants = run_constants(model.constants, layout)
    padding = padding_of(counts)
    tokens = padding.begun(tokens)
    counts, overflow = admitted(cache, padding.counts, tokens.shape[1])
    tokens, foreign = known_ids(tokens, counts, model.config)
    path = path_of(layout, *tokens.shape, score_sinks=model.config.score_sinks)
    # Whole chunks: loops over a prompt cut pieces of one static size.
    tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % path.chunk)))
    h = decoder.embed(model.params, tokens, model.config)
    length = tokens.shape[1]
    recurrence = None
    carried = None
    if model.config.recurrent is not None:
        recurrence = Recurrence(model, cache, counts, chunk=path.chunk)
        carried = recurrence.first(length)
    newest = None
    encoded_tokens = length
    # Where tokens are evicted, only the newest of the prompt enter the body.
    if cache.kept:
        newest = newest_of_prompt(cache, counts, length)
        encoded_tokens = newest.token.shape[1]
    carry = slab(runs, (len(counts), encoded_tokens), layout.dtype)
    # The third entry is how many tokens of each row come before the first that is not finite. Every
    # layer may lower it.
    flow = (h, carry, counts, carried)
    states = []
    for run, state, fixed in zip(runs, cache.runs, constants, strict=True):
        flow, state = _prefill_run(
            model,
            counts,
            recurrence,
            run,
            state,
            fixed,
            flow,
            path,
            layout.method.sinks,
            newest,
            cache.pages,
        )
        states.append(state)
    h, _, finite_count, carried = flow
    # Recurrent layers behind the last layer of attention.
    if recurrence is not None and carried is not None:
        h, carried = recurrence.before(model.config.num_layers, h, carried)
        finite_count = jnp.minimum(finite_count, carried.finite_count)
    finite = finite_tokens(cache, finite_count, counts)
    new_cache = cache.replace(
        runs=tuple(states),
        lengths=cache.lengths + counts,
        overflow=padding.flagged(overflow) | foreign,
        finite=finite,
        kept=cache.kept if newest is None else newest.kept,
        states=() if carried is None else carried.kept,
    )
    return last_logits(model, h, counts), new_cache


def _prefill_run(
    model: Model,
    counts: Int[Array, " B"],
    recurrence: Recurrence | None,
    run: RunLayout,
    state: Run,
    constants,
    flow: tuple,
    path: Path,
    sinks: int,
    newest: Newest | None,
    pages: Pages,
):
    """Run one run of layers over the whole prompt, layer by layer.

    Args:
        counts: how many tokens of each row are valid.
        recurrence: the recurrent layers of the call. None: the model has none.
        run: the run's static plan.
        state: the run's arrays in the empty cache.
        constants: the run's calibrated constants.
        flow: what goes from layer to layer: hidden states [B, T, E], the method's carry [B, R, W]
            by name, how many tokens of each row come before the first that is not finite, and what
            the recurrent layers keep.
        path: how many tokens attend at a time, and by which kernels.
        sinks: the first tokens of a row, stored exactly.
        newest: which R of the T tokens are encoded where tokens are evicted. None: all T that leave
            the window.
        pages: the pages of each row, or None.

    Returns:
        The flow after the run's layers, and the run's arrays that hold the prompt.
    """
    empty = jnp.zeros_like(counts)
    clocks = run.wiring.storage.clocks
    # `first` is the body token that the first encoded token is. Prompt token 0 is body token
    # -sinks.
    if newest is None:
        encoded_tokens = flow[0].shape[1]
        first = empty - sinks
        due_units = units_due(run, state, counts - sinks)
    else:
        # Tokens that were picked are numbered from 0, and go to the body's first slots in their
        # order.
        encoded_tokens = newest.token.shape[1]
        first = empty
        due_units = (newest.units,)
    schedules = in_order((run,), [empty] * len(clocks), due_units, encoded_tokens)

    def step(index, loop):
        """Run layer `index` of the run; `loop` is (flow, body, sinks and window) of the whole
        run."""
        (h, carry, finite_count, carried), body, exact = loop
        if recurrence is not None:
            h, carried = recurrence.before(run.first + index, h, carried)
        fixed = caches.at_layer(constants, index)

        def keep(new, finite):
            """Store the sources of one layer, before any query attends: (body, carry, sinks and
            window, how many tokens come before the first that is not finite)."""
            new_body = body
            new_carry = carry
            if run.slots and encoded_tokens:
                sources = new if newest is None else newest.pick(new)
                new_body, sources, new_carry = flush_layer(
                    run, body, index, sources, first, schedules, fixed, carry, pages
                )
                # Where keys are encoded before values, the window keeps the reconstruction of such
                # a key until its value is encoded; the sources that come back have these keys. With
                # eviction there is one clock, and encoding changes no token that stays exact.
                if newest is None:
                    new = sources
            # `remember` writes a stack of layers. A stack of this layer alone is written and put
            # into the run's.
            exact_parts = (state.sinks, state.window)
            blank_sinks, blank_window = jax.tree.map(lambda a: jnp.zeros_like(a[:1]), exact_parts)
            fresh = state.replace(body={}, sinks=blank_sinks, window=blank_window)
            new_stack = {name: x[None] for name, x in new.items()}
            fresh = remember(run, fresh, new_stack, empty, counts, sinks)
            put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
            new_exact = jax.tree.map(put, exact, (fresh.sinks, fresh.window))
            return new_body, new_carry, new_exact, leading(finite)

        result, h = exact_layer(model, run, index, fixed, h, counts, path, keep)
        body, carry, exact, layer_finite = result
        finite_count = jnp.minimum(finite_count, layer_finite)
        return (h, carry, finite_count, carried), body, exact

    # XLA unrolls a loop of one turn, and copies that layer's weights out of the stack. So the
    # length is hidden from it.
    count = run.count
    if not is_unrolled(model.params):
        count = count + unknown_zero(counts)
    loop = flow, state.body, (state.sinks, state.window)
    flow, body, (exact_sinks, window) = decoder.over_layers(model.params, 0, count, step, loop)
    # Without a body nothing is ever encoded.
    flushed = units_due(run, state, counts - sinks) if run.slots else state.flushed
    return flow, Run(body=body, sinks=exact_sinks, window=window, flushed=flushed)
