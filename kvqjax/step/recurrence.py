"""Recurrent layers of one call: what runs between the layers of attention, and what becomes of the states.

Three calls run the same layers and keep different results. `attend` leaves the states as they are and keeps the new
tokens' sources; `commit` then takes the states over the tokens that are stored. `forward` knows beforehand which tokens
these are and keeps the states after them, so that the rule is computed once. An exact prefill does that a chunk of the
prompt at a time."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvqjax.cache.state import Cache, finite_tokens
from kvqjax.model import decoder
from kvqjax.model.loading import Model
from kvqjax.model.recurrent import GIVEN, advance
from kvqjax.model.weight_trees import is_unrolled
from kvqjax.ops.finite import found_finite, leading, zeroed

__all__ = ["Carried", "Recurrence", "after_commit"]

Stacks = tuple[dict[str, Any], ...]  # arrays [layers, B, ...] of all recurrent layers, or of each by itself


class Carried(NamedTuple):
    """What goes from layer to layer: new states or sources of all recurrent layers, and how many tokens of each row
    come before the first that is not finite."""

    kept: Stacks
    finite_count: Int[Array, " B"]


class Recurrence(NamedTuple):
    """What the recurrent layers of one call share.

    - `cache`: the states before the call.
    - `counts`: how many of each row's new tokens are taken in.
    - `sources`: keeps the tokens' sources, and not the states after them.
    - `chunk`: tokens of a prompt that are computed at a time; 0: all."""

    model: Model
    cache: Cache
    counts: Int[Array, " B"]
    sources: bool = False
    chunk: int = 0

    def first(self, length: int) -> Carried:
        """Make what enters the first layer of a call with `length` new tokens."""
        finite_count, shape = jnp.full_like(self.counts, length), self.model.config.recurrent
        if shape is None or not self.sources:
            return Carried(self.cache.states, finite_count)
        widths = shape.widths | dict.fromkeys(("decay", "beta"), shape.value_heads)

        def blank(state: dict) -> dict:
            lead = (*state["delta"].shape[:2], length)
            return {name: jnp.zeros((*lead, widths[name]), jnp.float32) for name in GIVEN}

        return Carried(tuple(map(blank, self.cache.states)), finite_count)

    def before(
        self, index: Int[Array, ""] | int, h: Float[Array, "B T E"], carried: Carried
    ) -> tuple[Float[Array, "B T E"], Carried]:
        """Run the recurrent layers directly before the layer of attention `index`. The number of layers of attention as
        `index` stands for those behind the last one."""
        params, config = self.model.params, self.model.config
        run = self._by_chunks if self.chunk else self._at_once

        def step(number, loop):
            h, (kept, finite_count) = loop
            weights = decoder.layer(params, number, "recurrent")
            h, new, finite = run(weights, h, _read(self.cache.states if self.sources else kept, number))
            return h, Carried(_written(kept, number, new), jnp.minimum(finite_count, leading(finite)))

        return decoder.over_recurrent(params, config, index, step, (h, carried))

    def _at_once(
        self, weights, h: Float[Array, "B T E"], state
    ) -> tuple[Float[Array, "B T E"], dict, Bool[Array, "B T"]]:
        """Run one layer over all new tokens: (its output, what is kept, which tokens are finite)."""
        result = decoder.recur(weights, h, state, self.counts, self.model.config)
        return result.h, result.new if self.sources else result.state, result.finite

    def _by_chunks(
        self, weights, h: Float[Array, "B T E"], state
    ) -> tuple[Float[Array, "B T E"], dict, Bool[Array, "B T"]]:
        """Run one layer over a prompt, a chunk after the other. A chunk's output takes the place of its input."""
        size, length = self.chunk, h.shape[1]

        def step(loop, start):
            h, state, broken = loop
            part = jax.lax.dynamic_slice_in_dim(h, start, size, 1)
            counts = jnp.clip(self.counts - start, 0, size)
            result = decoder.recur(weights, part, state, counts, self.model.config, broken)
            broken = broken | (~result.finite & (jnp.arange(size)[None] < counts[:, None])).any(1)
            return (jax.lax.dynamic_update_slice_in_dim(h, result.h, start, 1), result.state, broken), result.finite

        loop = h, state, jnp.zeros_like(self.counts, bool)
        (h, state, _), finite = jax.lax.scan(step, loop, jnp.arange(0, length, size))
        return h, state, jnp.moveaxis(finite, 0, 1).reshape(h.shape[0], length)


def _read(stacks: Stacks, number: Int[Array, ""] | int) -> dict:
    """Cut out what one layer has."""
    if len(stacks) > 1 and not isinstance(number, jax.core.Tracer):
        return jax.tree.map(lambda x: x[0], stacks[number])
    # Weights are stacked and the cache's layers are not. Only a user who asked for that pays for a copy of all states.
    stack = stacks[0] if len(stacks) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *stacks)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), stack)


def _written(stacks: Stacks, number: Int[Array, ""] | int, new: dict) -> Stacks:
    """Put in place what one layer has."""
    if len(stacks) == 1:
        put = lambda x, part: jax.lax.dynamic_update_index_in_dim(x, part, number, 0)  # noqa: E731
        return (jax.tree.map(put, stacks[0], new),)
    if not isinstance(number, jax.core.Tracer):
        single = jax.tree.map(lambda x: x[None], new)
        return tuple(single if index == number else stack for index, stack in enumerate(stacks))
    chosen = lambda index, stack: jax.tree.map(lambda x, part: jnp.where(index == number, part[None], x), stack, new)  # noqa: E731
    return tuple(chosen(index, stack) for index, stack in enumerate(stacks))


def after_commit(model: Model, cache: Cache, new_cache: Cache, pending: Stacks) -> Cache:
    """Give a cache whose layers of attention have taken in tokens the states after the same tokens.

    Args:
        model: the model.
        cache: the cache before them.
        new_cache: the cache after them, still with the states before.
        pending: the tokens' sources, of all recurrent layers.

    Returns:
        `new_cache` with the states, and `finite`, after the tokens that it holds beyond those of `cache`.
    """
    shape, counts = model.config.recurrent, new_cache.lengths - cache.lengths
    if shape is None or not cache.states:
        return new_cache
    finite_count = leading(found_finite(jnp.float32, *pending))

    def step(number, states):
        weights, new = decoder.layer(model.params, number, "recurrent"), zeroed(jnp.float32, _read(pending, number))
        return _written(states, number, advance(weights, _read(states, number), new, counts, shape)[1])

    states, layers = cache.states, len(shape.layers)
    if is_unrolled(model.params):
        for number in range(layers):
            states = step(number, states)
    else:
        states = jax.lax.fori_loop(0, layers, step, states)
    return new_cache.replace(
        states=states, finite=jnp.minimum(new_cache.finite, finite_tokens(cache, finite_count, counts))
    )
