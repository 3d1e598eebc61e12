"""One layer's attention over a cache: what our decoder's step and the door for other models (kvqjax/step/layers.py)
share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvqjax import cache as caches
from kvqjax._arguments import clipped, is_known
from kvqjax._errors import UserError
from kvqjax.cache.at_once import attend_in_one, seen_beside
from kvqjax.cache.chunk_paths import MANY_QUERIES, kernels_of
from kvqjax.cache.eviction import Received
from kvqjax.cache.keeping import no_mass, read_as
from kvqjax.cache.reach import Reach
from kvqjax.cache.recoding import recoded_units
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import chains, runs_of
from kvqjax.cache.segments import attend_parts, weigh
from kvqjax.cache.state import Cache, check_alive
from kvqjax.cache.view import LayerView, NewTokens
from kvqjax.model.decoder import Projected
from kvqjax.ops.attention import merge, total_lse
from kvqjax.ops.finite import found_finite, spoiled, zeroed
from kvqjax.ops.xla import row_major

__all__ = ["Call", "Flow", "attend_one", "begin", "check_capacity", "first_flow", "slab"]


class Flow(NamedTuple):
    """What one layer hands to the layer above it. Empty for methods whose layers do not depend on each other.

    `body` and `tile` are what was reconstructed of the body's tokens and of the tokens that fall due in this call
    (AQUA-KV, XQuant-CL); `mass` is the attention that every token has received so far (keep=h2o)."""

    body: dict
    tile: dict
    mass: Received | None


class Call(NamedTuple):
    """What all layers of one call share. `recode`: tokens that fall due inside the call are shown as encoded.
    `reach` promises how many tokens rows hold (None: the capacity). `beside`: for every run, what queries see
    beside the body (`seen_beside`)."""

    cache: Cache
    runs: tuple[RunLayout, ...]
    constants: tuple[dict, ...]
    tokens: NewTokens
    recode: bool
    reach: Reach | None = None
    beside: tuple[Int[Array, "B T N"] | None, ...] = ()


def _beyond(lengths: Int[Array, " B"], reach: Reach) -> Bool[Array, " B"]:
    """Mark rows that break a promise: one that holds too much, and all if they do together."""
    together = False if reach.total is None else lengths.sum() > reach.total
    return (lengths > reach.row) | together


def check_capacity(cache: Cache, counts) -> None:
    """Raise UserError outside jit where a row would overflow. Inside jit, and on rows of other hosts, appending raises
    the row's sticky flag instead (see `Cache`)."""
    check_alive(cache)
    if not is_known(cache.lengths, counts):
        return
    longest = int((np.asarray(cache.lengths) + np.asarray(counts)).max())  # jnp would be traced inside a user's loop
    if longest > cache.layout.capacity:
        raise UserError(f"a row would hold {longest} tokens; the cache was made for {cache.layout.capacity}")


def slab(runs, rows: tuple[int, ...], dtype) -> dict:
    """Make zeros [*rows, W] for whatever flows from layer to layer."""
    return {name: jnp.zeros((*rows, width), dtype) for run in runs for name, width in run.wiring.chain.carry.items()}


def begin(
    cache: Cache,
    counts: Int[Array, " B"],
    length: int,
    constants: tuple[dict, ...],
    within: str,
    reach: Reach | None = None,
) -> Call:
    """Work out what all layers share of a call with `length` new tokens, `counts[b]` of them valid. `constants` are
    each run's, `within` and `reach` as in `kvqjax.attend`."""
    if within not in ("chunk", "step"):
        raise UserError(f"within={within!r}; known: chunk, step")
    runs, sinks = runs_of(cache.layout), cache.layout.method.sinks
    counts = clipped(counts, 0, length)[0]  # whoever appends them raises the rows' flags
    positions = cache.lengths[:, None] + jnp.arange(length)[None]
    tokens = NewTokens(positions, counts, cache.lengths - sinks, **read_as(cache, positions, within))
    recode = within == "step" and recoded_units(runs[0].wiring.storage.clocks[0].unit, length) > 0
    cache = _in_step(cache)
    beside = tuple(
        seen_beside(LayerView(run, state, jnp.int32(0), {}, {}, {}, sinks), tokens) if run.joint else None
        for run, state in zip(runs, cache.runs, strict=True)
    )
    return Call(cache, runs, constants, tokens, recode, reach, beside)


def _in_step(cache: Cache) -> Cache:
    """Give all layers that are encoded together one array for their equal counts, so that what follows from them is
    computed once and not in every layer."""
    runs = list(cache.runs)
    for first, *others in chains(cache.layout):
        for number in others:
            runs[number] = runs[number].replace(flushed=runs[first].flushed)
    return cache.replace(runs=tuple(runs))


def first_flow(call: Call) -> Flow:
    """Make what enters the first layer: zeros."""
    cache, runs, length = call.cache, call.runs, call.tokens.positions.shape[1]
    dtype, unit = cache.layout.dtype, runs[0].wiring.storage.clocks[0].unit
    body = slab(
        [run for run in runs if run.wiring.chain.held], (cache.batch, max(run.slots_here for run in runs)), dtype
    )
    tile = slab(runs, (cache.batch, recoded_units(unit, length), unit), dtype) if call.recode else {}
    return Flow(body, tile, no_mass(cache.kept, cache.layout.method.sinks, length))


def attend_one(
    call: Call, number: int, index, weights: dict, projected: Projected, flow: Flow
) -> tuple[Float[Array, "B T H D"], dict, Flow]:
    """Attend in layer `index` of run `number`: (output in float32, new sources [B, T, W], what flows on).

    `projected.q` holds the queries of all heads that attend here. From a token on whose source is not finite, the
    output of its row is NaN."""
    run, sinks, positions = call.runs[number], call.cache.layout.method.sinks, call.tokens.positions
    fixed = caches.at_layer(call.constants[number], index)
    new = run.wiring.maps.capture(weights, fixed, projected, positions)
    dtype = call.cache.layout.dtype
    broken = call.cache.nonfinite[:, None] | spoiled(found_finite(dtype, new), call.tokens.counts)
    if call.reach is not None:
        broken = broken | _beyond(call.cache.lengths, call.reach)[:, None]
    below = _below(call, number, index)
    state, many = call.cache.runs[number], positions.shape[1] >= MANY_QUERIES
    chunks = kernels_of(call.cache.layout) if many else "off"
    view = LayerView(run, state, index, weights, fixed, zeroed(dtype, new), sinks, below, chunks, call.reach)
    visible, tile, body = call.beside[number], flow.tile, flow.body
    if visible is None:
        parts, tile, body = attend_parts(projected.q, view, call.tokens, call.recode, tile, body)
    else:
        parts = [attend_in_one(projected.q, view, call.tokens, call.recode, visible)]
    mass = flow.mass
    if mass is not None:
        more = weigh(projected.q, view, call.tokens, total_lse(*parts), flow.body)
        mass = jax.tree.map(jnp.add, mass, more)
    new = {name: row_major(x) for name, x in new.items()}
    out = jnp.where(broken[:, :, None, None], jnp.nan, merge(*parts))
    return out, new, Flow(body, tile, mass)


def _below(call: Call, number: int, index) -> tuple:
    """Collect (run, state, constants, layers) of the runs up to `number`, of which `index` layers lie below the present
    one, where what they carry is computed anew."""
    if not call.runs[number].wiring.chain.rebuilt:
        return ()
    counts = [*(run.count for run in call.runs[:number]), index]
    return tuple(zip(call.runs, call.cache.runs, call.constants, counts, strict=False))
