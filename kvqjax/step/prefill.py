"""Exact prefill: a prompt attends to itself exactly, layer by layer, then is encoded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvqjax import cache as caches
from kvqjax._arguments import is_known
from kvqjax._errors import UserError
from kvqjax.cache.append import flush_layer, remember
from kvqjax.cache.encoding import Pages
from kvqjax.cache.keeping import Entering, entering
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, Run, admitted, finite_tokens, units_due
from kvqjax.model import decoder
from kvqjax.model.loading import Model
from kvqjax.model.weight_trees import is_unrolled
from kvqjax.ops.finite import leading
from kvqjax.ops.xla_workarounds import unknown_zero
from kvqjax.step.doors import check_new_tokens, run_constants, run_step
from kvqjax.step.forward import known_ids, last_logits
from kvqjax.step.layer_step import check_capacity, slab
from kvqjax.step.padding import padding_of
from kvqjax.step.prompt import Path, exact_layer, path_of, received_by
from kvqjax.step.recurrence import Recurrence

__all__ = ["prefill"]


def prefill(
    model: Model, tokens: Int[Array, "B T"], counts: Int[Array, " B"] | Bool[Array, "B T"], cache: Cache
) -> tuple[Float[Array, "B V"], Cache]:
    """Let prompts attend to themselves exactly and encode them into an empty cache; gives the logits of each row's last
    token, [B, V]. Layers run one after the other: held are the hidden states [B,T,E], one layer's K and V, and the
    method's carry. With `keep=h2o` all layers run twice: first for the attention mass by which tokens are chosen.
    `counts` as in `forward`: numbers, or a mask.

    Raises UserError for a cache that is not empty, and as `forward` does for counts and token ids, or raises the row's
    flag."""
    check_new_tokens(model, tokens, counts, cache)
    check_capacity(cache, counts)
    if is_known(cache.lengths) and int(np.asarray(cache.lengths).max()) > 0:  # jnp would be traced in a user's jit
        raise UserError("exact prefill starts from an empty cache; use forward to extend one")
    return run_step(_prefill, model, cache, tokens, counts, out=("logits", "cache"))


def _prefill(model: Model, cache: Cache, tokens, counts):
    layout, runs = cache.layout, runs_of(cache.layout)
    constants = run_constants(model.constants, layout)
    padding = padding_of(counts)
    tokens = padding.begun(tokens)
    counts, overflow = admitted(cache, padding.counts, tokens.shape[1])
    tokens, foreign = known_ids(tokens, counts, model.config)
    path = path_of(layout, *tokens.shape)
    tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % path.chunk)))
    h = decoder.embed(model.params, tokens, model.config)
    recurrence = Recurrence(model, cache, counts, chunk=path.chunk)
    mass = functools.partial(received_by, model, runs, constants, h, recurrence)
    into = entering(cache, counts, mass, tokens.shape[1])
    carry = slab(runs, (len(counts), into.length), layout.dtype)
    states, flow = [], (h, carry, counts, recurrence.first(tokens.shape[1]))
    for run, state, own in zip(runs, cache.runs, constants, strict=True):
        flow, state = _prefill_run(recurrence, run, state, own, flow, path, layout.method.sinks, into, cache.pages)
        states.append(state)
    h, carried = recurrence.before(model.config.num_layers, flow[0], flow[3])
    finite_count = jnp.minimum(flow[2], carried.finite_count)
    finite = finite_tokens(cache, finite_count, counts)
    done = cache.replace(
        runs=tuple(states),
        lengths=cache.lengths + counts,
        overflow=padding.flagged(overflow) | foreign,
        finite=finite,
        kept=into.kept,
        states=carried.kept,
    )
    return last_logits(model, h, counts), done


def _prefill_run(
    recurrence: Recurrence,
    run: RunLayout,
    state: Run,
    constants,
    flow: tuple,
    path: Path,
    sinks: int,
    into: Entering,
    pages: Pages,
):
    """Run one run of layers over the whole prompt: attention, then encoding of what goes `into` the body, layer by
    layer. `flow` goes from layer to layer: hidden states, the method's carry, how many tokens come before the first
    that is not finite, and what the recurrent layers between keep."""
    model, counts = recurrence.model, recurrence.counts
    empty, schedules = jnp.zeros_like(counts), into.schedules((run,), state)

    def step(index, loop):
        (h, carry, finite_count, carried), body, exact = loop
        h, carried = recurrence.before(run.first + index, h, carried)
        fixed = caches.at_layer(constants, index)

        def keep(new, finite):
            encoded = body, carry
            if run.slots and into.length:
                full, moved, late = flush_layer(
                    run, body, index, into.sources(new), into.held, schedules, fixed, carry, pages
                )
                encoded, new = (full, late), into.rest(new, moved)
            blank = jax.tree.map(lambda a: jnp.zeros_like(a[:1]), (state.sinks, state.window))
            fresh = state.replace(body={}, sinks=blank[0], window=blank[1])
            fresh = remember(run, fresh, {name: x[None] for name, x in new.items()}, empty, counts, sinks)
            put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
            return *encoded, jax.tree.map(put, exact, (fresh.sinks, fresh.window)), leading(finite)

        (body, carry, exact, found), h, _ = exact_layer(model, run, index, fixed, h, counts, path, keep)
        return (h, carry, jnp.minimum(finite_count, found), carried), body, exact

    count = run.count if is_unrolled(model.params) else run.count + unknown_zero(counts)
    loop = flow, state.body, (state.sinks, state.window)
    flow, body, (first, window) = decoder.over_layers(model.params, 0, count, step, loop)
    flushed = units_due(run, state, counts - sinks) if run.slots else state.flushed
    return flow, Run(body=body, sinks=first, window=window, flushed=flushed)
