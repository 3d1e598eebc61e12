"""The decoder over a compressed cache, in two phases (docs/design.md, idea 2).

    attend     computes logits of the new tokens, and returns their sources; the cache stays as it is
    commit     appends these sources to the cache
    forward    does both

A public function checks its arguments. `run_step` then compiles the function of the same name with
an underscore, and on a mesh runs it on every device's part. The functions `..._begun` take tokens
that begin at place 0 of their rows (`Padding`).

One layer's attention over a cache is shared with the functions for other models
(kvqjax/step/layers.py):

    call = begin(cache, counts, length, constants, within)          once for all layers
    flow = first_flow(call)
    partial, new, flow = attend_one(call, run, index, ..., flow)    for every layer, from the first on"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvqjax import cache as caches
from kvqjax._arguments import clipped, is_known
from kvqjax._errors import UserError
from kvqjax.cache.attention import attend_tokens, draft_units
from kvqjax.cache.eviction import read_as
from kvqjax.cache.layout import LengthBound, RunLayout
from kvqjax.cache.pages import check_pages
from kvqjax.cache.runs import chains, runs_of
from kvqjax.cache.state import Cache, admitted, check_alive, finite_tokens
from kvqjax.cache.view import LayerView, NewTokens
from kvqjax.model import decoder
from kvqjax.model.config import ModelConfig
from kvqjax.model.decoder import Projected, with_read
from kvqjax.model.loading import Model
from kvqjax.model.weight_trees import is_unrolled
from kvqjax.ops.attention import Partial
from kvqjax.ops.finite import found_finite, saturated, spoiled, zeroed
from kvqjax.ops.xla_workarounds import depending_on, of_two, row_major, unknown_zero
from kvqjax.step.checks import (
    Padding,
    check_new_tokens,
    check_pending,
    known_counts,
    padding_of,
    run_constants,
    run_step,
)
from kvqjax.step.recurrence import Recurrence, after_commit


class Flow(NamedTuple):
    """What one layer hands to the layer above it. It is empty for methods whose layers do not
    depend on each other.

    Attributes:
        body: The carry of the body's tokens (AQUA-KV, XQuant-CL), [B, slots, W] by name.
        tile: The carry of the tokens that fall due in this call, [B, units, u, W] by name. It is
            empty unless queries see tokens as encoded that fall due (`Call.recode`)."""

    body: dict
    tile: dict


class Call(NamedTuple):
    """What all layers of one call share.

    Attributes:
        cache: The cache before the call.
        runs: The plans of its runs.
        constants: The calibrated constants of each run, with an axis of layers.
        tokens: What all layers know of the new tokens.
        recode: Whether queries see tokens that fall due inside the call as encoded
        (`within="step"`)."""

    cache: Cache
    runs: tuple[RunLayout, ...]
    constants: tuple[dict, ...]
    tokens: NewTokens
    recode: bool


def _beyond(lengths: Int[Array, " B"], bound: LengthBound) -> Bool[Array, " B"]:
    """Mark rows that break the promise of a length bound: those that are too long, or all rows if
    their sum is too large."""
    together = False if bound.total is None else lengths.sum() > bound.total
    return (lengths > bound.row) | together


def check_capacity(cache: Cache, counts) -> None:
    """Raise UserError outside jit where a row would overflow.

    Inside jit, and for rows of other hosts, numbers are not known. Appending then raises the row's
    flag `Cache.overflow`."""
    check_alive(cache)
    if not is_known(counts, *jax.tree.leaves((cache.lengths, cache.pages))):
        return
    # jnp would be traced inside a user's loop.
    lengths = np.asarray(cache.lengths) + known_counts(counts)
    longest = int(lengths.max())
    if longest > cache.layout.capacity:
        raise UserError(
            f"a row would hold {longest} tokens; the cache was made for {cache.layout.capacity}"
        )
    if cache.pages is not None:
        check_pages(cache.layout, np.asarray(cache.pages), lengths)


def slab(runs, rows: tuple[int, ...], dtype) -> dict:
    """Make the carry that enters the first layer: zeros [*rows, W], by the names that any of the
    runs carries."""
    return {
        name: jnp.zeros((*rows, width), dtype)
        for run in runs
        for name, width in run.wiring.chain.carry.items()
    }


def check_within_mode(within: Any) -> None:
    """Raise UserError for a mode of new tokens that does not exist."""
    if within not in ("chunk", "step"):
        raise UserError(f"within={within!r}; known: chunk, step")


def begin(
    cache: Cache,
    counts: Int[Array, " B"],
    length: int,
    constants: tuple[dict, ...],
    within: str,
    mask: Bool[Array, "B T T"] | None = None,
) -> Call:
    """Compute what all layers share of a call.

    Args:
        cache: The cache before the call.
        counts: How many of the new tokens of each row are valid.
        length: T, how many new tokens there are.
        constants: The calibrated constants of each run.
        within: What new tokens see of each other, "chunk" or "step" as in `kvqjax.attend`.
        mask: Which new tokens each new token sees, in place of those up to itself.

    Returns:
        The call.

    Raises:
        UserError: `within` is another word."""
    check_within_mode(within)
    runs, sinks = runs_of(cache.layout), cache.layout.method.sinks
    counts = clipped(counts, 0, length)[0]  # whoever appends them raises the rows' flags
    positions = cache.lengths[:, None] + jnp.arange(length)[None]
    evicted = read_as(cache, positions, within) if cache.kept else {}
    tokens = NewTokens(positions, counts, cache.lengths - sinks, **evicted, mask=mask)
    # A single new token is its own last query: nothing falls due before it attends.
    recode = within == "step" and draft_units(runs[0].wiring.storage.clocks[0].unit, length) > 0
    return Call(in_step(cache), runs, constants, tokens, recode)


def in_step(cache: Cache) -> Cache:
    """Give all layers that are encoded together one array for their equal counts of flushed units.
    XLA then computes what depends on these counts once, and not in every layer."""
    if not all(run.flushed for run in cache.runs):
        return (
            cache  # one layer's part, which was cut out of a cache in step (kvqjax/step/views.py)
        )
    runs = list(cache.runs)
    for first, *followers in chains(cache.layout):
        for number in followers:
            runs[number] = runs[number].replace(flushed=runs[first].flushed)
    return cache.replace(runs=tuple(runs))


def first_flow(call: Call) -> Flow:
    """Make the flow that enters the first layer of a call: zeros."""
    cache, runs, length = call.cache, call.runs, call.tokens.positions.shape[1]
    dtype, unit = cache.layout.dtype, runs[0].wiring.storage.clocks[0].unit
    # Others need the carry for encoding only.
    flowing = [run for run in runs if run.wiring.chain.flows]
    body = slab(flowing, (cache.batch, max(run.slots_here for run in runs)), dtype)
    tile = slab(runs, (cache.batch, draft_units(unit, length), unit), dtype) if call.recode else {}
    return Flow(body, tile)


def attend_one(
    call: Call,
    number: int,
    index,
    weights: dict,
    projected: Projected,
    flow: Flow,
    sinks: Float[Array, " H"] | None = None,
) -> tuple[Partial, dict, Flow]:
    """Attend in one layer.

    Args:
        call: What all layers of the call share.
        number: The number of the layer's run.
        index: The layer's number in its run.
        weights: The layer's decoder weights; empty where a model of another package attends.
        projected: What the layer computed of its new tokens. `projected.q` has the queries of all
            heads that attend on this device.
        flow: What the layer below handed on.
        sinks: Logits of score sinks, one for each query head. None: those of the model, if any.

    Returns:
        (attention in float32, the new tokens' sources [B, T, W] by name, the flow for the layer
        above). Attention of a row is NaN from the first token on that has a source which is not
        finite; with a mask of the new tokens, all of it is."""
    run, positions = call.runs[number], call.tokens.positions
    sinks = weights.get("score_sinks") if sinks is None else sinks
    fixed = caches.at_layer(call.constants[number], index)
    new = run.wiring.maps.capture(weights, fixed, projected, positions)
    dtype = call.cache.layout.dtype
    # Queries whose output is NaN, [B, T].
    broken = call.cache.nonfinite[:, None] | spoiled(found_finite(dtype, new), call.tokens.counts)
    if (
        call.tokens.mask is not None
    ):  # by their mask, earlier tokens may see the one that is not finite
        broken = broken.any(1, keepdims=True)
    bound = call.cache.layout.bound
    if bound is not None:
        broken = broken | _beyond(call.cache.lengths, bound)[:, None]
    state, pages = call.cache.runs[number], call.cache.pages
    first_tokens = call.cache.layout.method.sinks
    view = LayerView(
        run, state, index, with_read(weights), fixed, zeroed(dtype, new), first_tokens, bound, pages
    )
    (out, lse), tile, body = attend_tokens(
        projected.q, view, call.tokens, call.recode, flow.tile, flow.body, sinks
    )
    new = {name: row_major(x) for name, x in new.items()}
    out, lse = (
        jnp.where(broken.reshape(*broken.shape, *[1] * (x.ndim - 2)), jnp.nan, x)
        for x in (out, lse)
    )
    return Partial(out, lse), new, Flow(body, tile)


Pending = tuple  # one {source: [L, B, T, W]} per run, then per stack of recurrent layers


def attend(
    model: Model,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"] | Bool[Array, "B T"],
    cache: Cache,
    *,
    within: str = "chunk",
    last: bool = False,
) -> tuple[Float[Array, "B V"] | Float[Array, "B T V"], Pending]:
    """Compute logits of T new tokens of each row, and their sources for `commit`; the cache stays
    as it is.

    Args:
        model: the model.
        tokens: token ids [B, T].
        counts: how many of each row's tokens are valid, from the first on; or a mask of the valid
            ones, as in `forward`.
        cache: the cache, one of this model.
        within: "chunk": new tokens attend to each other exactly. "step": each new token sees what
            decoding one token at a time would have shown it, so a verified draft equals plain
            decoding.
        last: gives only the logits of each row's last valid token.

    Returns:
        Logits, float32 [B, T, V], or [B, V] with `last`; those of tokens that are not valid mean
        nothing. From a token on whose key, value or other source is not finite they are NaN, also
        in later calls. Then what `commit` stores: a run's sources each, and those of recurrent
        layers.

    Raises:
        UserError: for counts outside 0 to T, a row of a mask with several runs, or token ids
            outside the vocabulary. Those that a trace hides are clipped; `commit`, for token ids
            `forward`, then raises the row's flag `cache.overflow[b]`.
    """
    check_new_tokens(model, tokens, counts, cache)
    out = ("logits" if last else "chunk", "pending")
    return run_step(_attend, model, cache, tokens, counts, out=out, within=within, last=last)


def _attend(model: Model, cache: Cache, tokens, counts, *, within: str, last: bool):
    """Do `attend` after its checks, on one device's part."""
    padding = padding_of(counts)
    recurrence = None
    if model.config.recurrent is not None:
        recurrence = Recurrence(
            model, cache, clipped(padding.counts, 0, tokens.shape[1])[0], sources=True
        )
    out, (runs, carried) = _attend_begun(
        model, cache, padding.begun(tokens), padding, recurrence, within=within, last=last
    )
    return out, runs if carried is None else (*runs, *carried.kept)


def _attend_begun(
    model: Model,
    cache: Cache,
    tokens,
    padding: Padding,
    recurrence: Recurrence | None,
    *,
    within: str,
    last: bool,
):
    """Do `_attend` for tokens that begin at place 0 of their rows.

    Args:
        model: the model.
        cache: the cache.
        tokens: token ids [B, T], rolled by `padding`.
        padding: where the caller's tokens stand.
        recurrence: the recurrent layers of the call. None: the model has none.
        within: as in `attend`.
        last: as in `attend`.

    Returns:
        Logits, where the caller's tokens stand. Then (sources of every run, what the recurrent
        layers keep, or None).
    """
    constants = run_constants(model.constants, cache.layout)
    call = begin(cache, padding.counts, tokens.shape[1], constants, within)
    positions, config = call.tokens.positions, model.config
    # `forward` alone returns a cache, and so raises its flag
    tokens = known_ids(tokens, padding.counts, config)[0]
    # XLA for GPUs makes a slow kernel of a product of one row, which this is in a step of one row
    # (`of_two`).
    is_single_token = positions.size == 1 and call.runs[0].on_gpu

    def project(weights, h, first):
        """Make queries, keys and values. All layers of a run rotate and normalise as its `first`
        layer does."""
        make = functools.partial(decoder.project, weights, config=config, index=first)
        return of_two(make, h, positions) if is_single_token else make(h, positions)

    def step(number, loop, index):
        """Run layer `index` of run `number`, with the recurrent layers before it."""
        h, flow, carried = loop
        if recurrence is not None:
            h, carried = recurrence.before(call.runs[number].first + index, h, carried)
        weights = decoder.layer(model.params, call.runs[number].first + index)
        projected = project(weights, h, call.runs[number].first)
        # Where devices share the tokens of a KV head, each attends with the queries of all of them.
        all_heads = projected._replace(q=decoder.whole_heads(projected.q, config))
        partial, new, flow = attend_one(call, number, index, weights, all_heads, flow)
        attended = saturated(decoder.own_heads(partial.out, config, projected.q.shape[2]), h.dtype)
        return (decoder.finish(weights, h, attended, config), flow, carried), new

    carried = None if recurrence is None else recurrence.first(tokens.shape[1])
    loop = decoder.embed(model.params, tokens, config), first_flow(call), carried
    loop_over = _unrolled if is_unrolled(model.params) else _scanned
    pending = []
    for number, run in enumerate(call.runs):
        loop, new = loop_over(functools.partial(step, number), loop, run.count, cache)
        pending.append(new)
    h, _, carried = loop
    if (
        recurrence is not None and carried is not None
    ):  # recurrent layers behind the last layer of attention
        h, carried = recurrence.before(config.num_layers, h, carried)
    # Sources of a layer outside a loop are ready before its attention has read the body, which XLA
    # would then copy.
    pending = [
        depending_on(h, new) if run.count == 1 else new
        for run, new in zip(call.runs, pending, strict=True)
    ]
    if last:
        out = last_logits(model, h, padding.counts)
    else:  # hidden states are rolled back, not logits, which are wider
        out = decoder.unembed(model.params, padding.as_given(h), config)
    return out, (tuple(pending), carried)


def known_ids(
    tokens: Int[Array, "B T"], counts: Int[Array, " B"], config: ModelConfig
) -> tuple[Int[Array, "B T"], Bool[Array, " B"]]:
    """Clip token ids into the vocabulary.

    Args:
        tokens: token ids.
        counts: how many of each row's ids are valid, from the first on.
        config: the model's config.

    Returns:
        (ids in the vocabulary, which rows had a valid id outside it).
    """
    fits, foreign = clipped(tokens, 0, config.vocab_size - 1)
    return fits, (foreign & (jnp.arange(tokens.shape[1])[None] < counts[:, None])).any(1)


def _scanned(step, loop, count: int, cache: Cache):
    """Run `step` over the layers of a run, whose weights are stacked: (loop, new sources [count, B,
    T, W])."""
    # XLA must not know the first number, or it would unroll a loop of one turn (`unknown_zero`).
    return jax.lax.scan(step, loop, unknown_zero(cache.lengths) + jnp.arange(count))


def _unrolled(step, loop, count: int, cache: Cache):
    """Do as `_scanned` in straight code, for weights that are a list of layers."""
    new = []
    for index in range(count):
        loop, sources = step(loop, index)
        new.append(sources)
    return loop, jax.tree.map(lambda *x: jnp.stack(x), *new)


def last_logits(
    model: Model, h: Float[Array, "B T E"], counts: Int[Array, " B"]
) -> Float[Array, "B V"]:
    """Compute the logits of each row's last valid token."""
    h = jnp.take_along_axis(h, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)
    return decoder.unembed(model.params, h, model.config)[:, 0]


def commit(
    model: Model, cache: Cache, pending: Pending, counts: Int[Array, " B"] | Bool[Array, "B T"]
) -> Cache:
    """Append pending tokens of each row and encode what is due.

    Args:
        model: the model.
        cache: the cache that `attend` was given.
        pending: what `attend` returned. Its tokens begin with a row's first valid one, however
            `attend` was given them.
        counts: how many pending tokens of each row are stored, from the first on. Of a mask only
            their number counts.

    Returns:
        The cache that holds them.

    Raises:
        UserError: outside jit, for counts outside 0 to T and where a row would exceed the capacity.
            Inside jit such counts are clipped, the excess is not stored, and the row's flag
            `cache.overflow[b]` is raised.
    """
    check_pending(model, cache, pending, counts)
    check_capacity(cache, counts)
    return run_step(_commit, model, cache, pending, counts, out=("cache",))


def _commit(model: Model, cache: Cache, pending: Pending, counts) -> Cache:
    """Do `commit` after its checks, on one device's part."""
    # `pending` has the sources of all runs, then those of recurrent layers.
    first_recurrent = len(cache.runs)
    new_cache = _commit_begun(model, cache, pending[:first_recurrent], padding_of(counts))
    if model.config.recurrent is None:
        return new_cache
    return after_commit(model, cache, new_cache, pending[first_recurrent:])


def _commit_begun(model: Model, cache: Cache, pending: Pending, padding: Padding) -> Cache:
    """Do `_commit` for layers of attention. `pending` has nothing of recurrent layers here."""
    new_cache = caches.commit(
        cache, pending, padding.counts, run_constants(model.constants, cache.layout)
    )
    return new_cache.replace(overflow=padding.flagged(new_cache.overflow))


def forward(
    model: Model,
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"] | Bool[Array, "B T"],
    cache: Cache,
    *,
    last: bool = False,
) -> tuple[Float[Array, "B V"] | Float[Array, "B T V"], Cache]:
    """Compute logits of T new tokens, and the cache that holds them: `attend`, then `commit`. Pure;
    works inside and outside jit.

    Positions beyond those that the model was trained for (`model.config.trained_length`) are
    computed like any others, without a word: how many tokens a row holds is known inside jit alone.
    Logits mean less and less there. `generate` and its like refuse such texts unless told
    otherwise.

    Args:
        model: the model.
        tokens: token ids [B, T].
        counts: how many of each row's tokens are valid, from the first on. A mask Bool[B, T] in its
            place says which are: any single run of each row, so that prompts padded on the left, or
            on both sides, come as they are. A row without valid tokens stays as it is.
        cache: the cache, one of this model.
        last: gives only the logits of each row's last valid token.

    Returns:
        Logits, float32 [B, T, V], or [B, V] with `last`, where the caller's tokens stand; those of
        tokens that are not valid mean nothing. Then the cache, which is to the bit that of tokens
        padded on the right: positions follow what a row holds.

    Raises:
        UserError: for counts outside 0 to T, a row of a mask with several runs, token ids outside
            the vocabulary and where a row would exceed the capacity. Inside jit such numbers are
            clipped, of several runs the first counts, the excess is not stored, and the row's flag
            `cache.overflow[b]` is raised.
    """
    check_new_tokens(model, tokens, counts, cache)
    check_capacity(cache, counts)
    out = ("logits" if last else "chunk", "cache")
    return run_step(_forward, model, cache, tokens, counts, out=out, last=last)


def _forward(model: Model, cache: Cache, tokens, counts, *, last: bool):
    """Do `forward` after its checks, on one device's part."""
    padding = padding_of(counts)
    tokens = padding.begun(tokens)
    # States take in only the tokens that the cache has room for, so the logits of later ones mean
    # nothing.
    stored = admitted(cache, padding.counts, tokens.shape[1])[0]
    recurrence = None if model.config.recurrent is None else Recurrence(model, cache, stored)
    out, (runs, carried) = _attend_begun(
        model, cache, tokens, padding, recurrence, within="chunk", last=last
    )
    new_cache = _commit_begun(model, cache, runs, padding)
    if carried is not None:
        finite = jnp.minimum(new_cache.finite, finite_tokens(cache, carried.finite_count, stored))
        new_cache = new_cache.replace(states=carried.kept, finite=finite)
    return out, new_cache.replace(
        overflow=new_cache.overflow | known_ids(tokens, padding.counts, model.config)[1]
    )
