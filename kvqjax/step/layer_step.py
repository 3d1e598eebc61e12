"""One layer's attention over a cache. Our decoder (kvqjax/step/forward.py) and the functions for other models
(kvqjax/step/layers.py) share it.

    call = begin(cache, counts, length, constants, within)          once for all layers
    flow = first_flow(call)
    partial, new, flow = attend_one(call, run, index, ..., flow)    for every layer, from the first on"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvqjax import cache as caches
from kvqjax._arguments import clipped, is_known
from kvqjax._errors import UserError
from kvqjax.cache.attention import attend_tokens
from kvqjax.cache.cache_layout import LengthBound
from kvqjax.cache.eviction import read_as
from kvqjax.cache.pages import check_pages
from kvqjax.cache.recoding import recoded_units
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import chains, runs_of
from kvqjax.cache.state import Cache, check_alive
from kvqjax.cache.view import LayerView, NewTokens
from kvqjax.model.decoder import Projected, with_read
from kvqjax.ops.attention import Partial, ScoreOptions
from kvqjax.ops.finite import found_finite, spoiled, zeroed
from kvqjax.ops.xla_workarounds import row_major
from kvqjax.step.padding import known_counts

__all__ = [
    "Call",
    "Flow",
    "attend_one",
    "begin",
    "check_capacity",
    "check_within_mode",
    "first_flow",
    "in_step",
    "slab",
]


class Flow(NamedTuple):
    """What one layer hands to the layer above it. It is empty for methods whose layers do not depend on each other.

    Attributes:
        body: The carry of the body's tokens (AQUA-KV, XQuant-CL), [B, slots, W] by name.
        tile: The carry of the tokens that fall due in this call, [B, units, u, W] by name. It is empty unless queries
            see tokens as encoded that fall due (`Call.recode`)."""

    body: dict
    tile: dict


class Call(NamedTuple):
    """What all layers of one call share.

    Attributes:
        cache: The cache before the call.
        runs: The plans of its runs.
        constants: The calibrated constants of each run, with an axis of layers.
        tokens: What all layers know of the new tokens.
        recode: Whether queries see tokens that fall due inside the call as encoded (`within="step"`)."""

    cache: Cache
    runs: tuple[RunLayout, ...]
    constants: tuple[dict, ...]
    tokens: NewTokens
    recode: bool


def _beyond(lengths: Int[Array, " B"], bound: LengthBound) -> Bool[Array, " B"]:
    """Mark rows that break the promise of a length bound: those that are too long, or all rows if their sum is too
    large."""
    together = False if bound.total is None else lengths.sum() > bound.total
    return (lengths > bound.row) | together


def check_capacity(cache: Cache, counts) -> None:
    """Raise UserError outside jit where a row would overflow.

    Inside jit, and for rows of other hosts, numbers are not known. Appending then raises the row's flag
    `Cache.overflow`."""
    check_alive(cache)
    if not is_known(counts, *jax.tree.leaves((cache.lengths, cache.pages))):
        return
    lengths = np.asarray(cache.lengths) + known_counts(counts)  # jnp would be traced inside a user's loop
    longest = int(lengths.max())
    if longest > cache.layout.capacity:
        raise UserError(f"a row would hold {longest} tokens; the cache was made for {cache.layout.capacity}")
    if cache.pages is not None:
        check_pages(cache.layout, np.asarray(cache.pages), lengths)


def slab(runs, rows: tuple[int, ...], dtype) -> dict:
    """Make the carry that enters the first layer: zeros [*rows, W], by the names that any of the runs carries."""
    return {name: jnp.zeros((*rows, width), dtype) for run in runs for name, width in run.wiring.chain.carry.items()}


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
    recode = within == "step" and recoded_units(runs[0].wiring.storage.clocks[0].unit, length) > 0
    return Call(in_step(cache), runs, constants, tokens, recode)


def in_step(cache: Cache) -> Cache:
    """Give all layers that are encoded together one array for their equal counts of flushed units. XLA then computes
    what depends on these counts once, and not in every layer."""
    if not all(run.flushed for run in cache.runs):
        return cache  # one layer's part, which was cut out of a cache in step (kvqjax/step/views.py)
    runs = list(cache.runs)
    for first, *followers in chains(cache.layout):
        for number in followers:
            runs[number] = runs[number].replace(flushed=runs[first].flushed)
    return cache.replace(runs=tuple(runs))


def first_flow(call: Call) -> Flow:
    """Make the flow that enters the first layer of a call: zeros."""
    cache, runs, length = call.cache, call.runs, call.tokens.positions.shape[1]
    dtype, unit = cache.layout.dtype, runs[0].wiring.storage.clocks[0].unit
    flowing = [run for run in runs if run.wiring.chain.flows]  # others need the carry for encoding only
    body = slab(flowing, (cache.batch, max(run.slots_here for run in runs)), dtype)
    tile = slab(runs, (cache.batch, recoded_units(unit, length), unit), dtype) if call.recode else {}
    return Flow(body, tile)


def attend_one(
    call: Call, number: int, index, weights: dict, projected: Projected, flow: Flow, options: ScoreOptions | None = None
) -> tuple[Partial, dict, Flow]:
    """Attend in one layer.

    Args:
        call: What all layers of the call share.
        number: The number of the layer's run.
        index: The layer's number in its run.
        weights: The layer's decoder weights; empty where a model of another package attends.
        projected: What the layer computed of its new tokens. `projected.q` has the queries of all heads that attend on
            this device.
        flow: What the layer below handed on.
        options: The options of the scores. None: those of the model.

    Returns:
        (attention in float32, the new tokens' sources [B, T, W] by name, the flow for the layer above). Attention of a
        row is NaN from the first token on that has a source which is not finite; with a mask of the new tokens, all of
        it is."""
    run, sinks, positions = call.runs[number], call.cache.layout.method.sinks, call.tokens.positions
    options = options or ScoreOptions(run.shape.softcap, weights.get("score_sinks"))
    fixed = caches.at_layer(call.constants[number], index)
    new = run.wiring.maps.capture(weights, fixed, projected, positions)
    dtype = call.cache.layout.dtype
    # Queries whose output is NaN, [B, T].
    broken = call.cache.nonfinite[:, None] | spoiled(found_finite(dtype, new), call.tokens.counts)
    if call.tokens.mask is not None:  # by their mask, earlier tokens may see the one that is not finite
        broken = broken.any(1, keepdims=True)
    bound = call.cache.layout.bound
    if bound is not None:
        broken = broken | _beyond(call.cache.lengths, bound)[:, None]
    state, pages = call.cache.runs[number], call.cache.pages
    view = LayerView(run, state, index, with_read(weights), fixed, zeroed(dtype, new), sinks, bound, pages)
    (out, lse), tile, body = attend_tokens(projected.q, view, call.tokens, options, call.recode, flow.tile, flow.body)
    new = {name: row_major(x) for name, x in new.items()}
    out, lse = (jnp.where(broken.reshape(*broken.shape, *[1] * (x.ndim - 2)), jnp.nan, x) for x in (out, lse))
    return Partial(out, lse), new, Flow(body, tile)
