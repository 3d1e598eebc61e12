"""Exact prefill: a prompt attends to itself exactly, layer by layer, and is encoded into an empty cache.

The order of one layer of attention (`_prefill_run`, `exact_layer` of kvqjax/step/prompt.py):

    recurrent layers before it -> sources, keys and values of all tokens -> encode what goes into the body
    -> the other tokens into sinks and window -> queries attend to the exact keys and values -> hidden states

So later tokens of the prompt see exact keys and values, and never what was encoded. Encoding comes before attention,
so that sources need no memory while queries attend. The prompt is padded to whole chunks; a chunk is what is projected
and attends together.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvqjax import cache as caches
from kvqjax._arguments import is_known
from kvqjax._errors import UserError
from kvqjax.cache.append import flush_layer, remember
from kvqjax.cache.encoding import Pages, in_order
from kvqjax.cache.eviction import Newest, newest_of_prompt
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
from kvqjax.step.prompt import Path, exact_layer, path_of
from kvqjax.step.recurrence import Recurrence

__all__ = ["prefill"]


def prefill(
    model: Model, tokens: Int[Array, "B T"], counts: Int[Array, " B"] | Bool[Array, "B T"], cache: Cache
) -> tuple[Float[Array, "B V"], Cache]:
    """Let prompts attend to themselves exactly and encode them into an empty cache.

    Layers run one after the other. In memory are the hidden states [B, T, E], one layer's keys and values, and the
    method's carry.

    Args:
        model: the model.
        tokens: token ids [B, T].
        counts: how many of each row's tokens are valid, from the first on; or a mask of the valid ones, as in
            `forward`.
        cache: an empty cache of this model.

    Returns:
        The logits of each row's last valid token, float32 [B, V], and the cache that holds the prompts.

    Raises:
        UserError: for a cache that is not empty, and as `forward` does for counts and token ids. What a trace hides is
            clipped, and raises the row's flag `cache.overflow[b]`.
    """
    check_new_tokens(model, tokens, counts, cache)
    check_capacity(cache, counts)
    if is_known(cache.lengths) and int(np.asarray(cache.lengths).max()) > 0:  # jnp would be traced in a user's jit
        raise UserError("exact prefill starts from an empty cache; use forward to extend one")
    return run_step(_prefill, model, cache, tokens, counts, out=("logits", "cache"))


def _prefill(model: Model, cache: Cache, tokens, counts):
    """Do `prefill` after its checks, on one device's part."""
    layout, runs = cache.layout, runs_of(cache.layout)
    constants = run_constants(model.constants, layout)
    padding = padding_of(counts)
    tokens = padding.begun(tokens)
    counts, overflow = admitted(cache, padding.counts, tokens.shape[1])
    tokens, foreign = known_ids(tokens, counts, model.config)
    path = path_of(layout, *tokens.shape, score_sinks=model.config.score_sinks)
    # Whole chunks: loops over a prompt cut pieces of one static size.
    tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % path.chunk)))
    h = decoder.embed(model.params, tokens, model.config)
    recurrence = Recurrence(model, cache, counts, chunk=path.chunk)
    # Where tokens are evicted, only the newest of the prompt enter the body.
    newest = newest_of_prompt(cache, counts, tokens.shape[1]) if cache.kept else None
    encoded_tokens = tokens.shape[1] if newest is None else newest.token.shape[1]
    carry = slab(runs, (len(counts), encoded_tokens), layout.dtype)
    # The third entry is how many tokens of each row come before the first that is not finite. Every layer may lower it.
    states, flow = [], (h, carry, counts, recurrence.first(tokens.shape[1]))
    for run, state, fixed in zip(runs, cache.runs, constants, strict=True):
        flow, state = _prefill_run(recurrence, run, state, fixed, flow, path, layout.method.sinks, newest, cache.pages)
        states.append(state)
    h, _, finite_count, carried = flow
    # Recurrent layers behind the last layer of attention.
    h, carried = recurrence.before(model.config.num_layers, h, carried)
    finite_count = jnp.minimum(finite_count, carried.finite_count)
    finite = finite_tokens(cache, finite_count, counts)
    new_cache = cache.replace(
        runs=tuple(states),
        lengths=cache.lengths + counts,
        overflow=padding.flagged(overflow) | foreign,
        finite=finite,
        kept=cache.kept if newest is None else newest.kept,
        states=carried.kept,
    )
    return last_logits(model, h, counts), new_cache


def _prefill_run(
    recurrence: Recurrence,
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
        recurrence: the recurrent layers of the call, with the model and the rows' counts.
        run: the run's static plan.
        state: the run's arrays in the empty cache.
        constants: the run's calibrated constants.
        flow: what goes from layer to layer: hidden states [B, T, E], the method's carry [B, R, W] by name, how many
            tokens of each row come before the first that is not finite, and what the recurrent layers keep.
        path: how many tokens attend at a time, and by which kernels.
        sinks: the first tokens of a row, stored exactly.
        newest: which R of the T tokens are encoded where tokens are evicted. None: all T that leave the window.
        pages: the pages of each row, or None.

    Returns:
        The flow after the run's layers, and the run's arrays that hold the prompt.
    """
    model, counts = recurrence.model, recurrence.counts
    empty = jnp.zeros_like(counts)
    clocks = run.wiring.storage.clocks
    # `first` is the body token that the first encoded token is. Prompt token 0 is body token -sinks.
    if newest is None:
        encoded_tokens, first, due_units = flow[0].shape[1], empty - sinks, units_due(run, state, counts - sinks)
    else:  # tokens that were picked are numbered from 0, and go to the body's first slots in their order
        encoded_tokens, first, due_units = newest.token.shape[1], empty, (newest.units,)
    schedules = in_order((run,), [empty] * len(clocks), due_units, encoded_tokens)

    def step(index, loop):
        """Run layer `index` of the run; `loop` is (flow, body, sinks and window) of the whole run."""
        (h, carry, finite_count, carried), body, exact = loop
        h, carried = recurrence.before(run.first + index, h, carried)
        fixed = caches.at_layer(constants, index)

        def keep(new, finite):
            """Store the sources of one layer, before any query attends: (body, carry, sinks and window, how many tokens
            come before the first that is not finite)."""
            encoded = body, carry
            if run.slots and encoded_tokens:
                # `new_body` holds the tokens that are due. Where keys are encoded before values, the window keeps the
                # reconstruction of such a key until its value is encoded; `moved` has these keys.
                sources = new if newest is None else newest.pick(new)
                new_body, moved, new_carry = flush_layer(
                    run, body, index, sources, first, schedules, fixed, carry, pages
                )
                encoded = new_body, new_carry
                # With eviction there is one clock, and encoding changes no token that stays exact.
                new = moved if newest is None else new
            # `remember` writes a stack of layers. A stack of this layer alone is written and put into the run's.
            blank = jax.tree.map(lambda a: jnp.zeros_like(a[:1]), (state.sinks, state.window))
            fresh = state.replace(body={}, sinks=blank[0], window=blank[1])
            fresh = remember(run, fresh, {name: x[None] for name, x in new.items()}, empty, counts, sinks)
            put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
            return *encoded, jax.tree.map(put, exact, (fresh.sinks, fresh.window)), leading(finite)

        (body, carry, exact, layer_finite), h = exact_layer(model, run, index, fixed, h, counts, path, keep)
        return (h, carry, jnp.minimum(finite_count, layer_finite), carried), body, exact

    # XLA unrolls a loop of one turn, and copies that layer's weights out of the stack. So the length is hidden from it.
    count = run.count if is_unrolled(model.params) else run.count + unknown_zero(counts)
    loop = flow, state.body, (state.sinks, state.window)
    flow, body, (exact_sinks, window) = decoder.over_layers(model.params, 0, count, step, loop)
    # Without a body nothing is ever encoded.
    flushed = units_due(run, state, counts - sinks) if run.slots else state.flushed
    return flow, Run(body=body, sinks=exact_sinks, window=window, flushed=flushed)
