"""The recurrent layers of one call, which run between the layers of attention, and their states.

    attend           keeps the new tokens' sources, and leaves the states as they are
    commit           takes the states over the tokens that are stored, from these sources (`after_commit`)
    forward          keeps the states after the new tokens: it knows beforehand which of them are stored
    exact prefill    does as `forward`, a chunk of the prompt at a time

Sources of a recurrent layer are the vectors of a token that its rule takes in
(kvqjax/model/recurrent.py, `GIVEN`). No cache stores them."""

import operator
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

# Arrays [layers, B, ...] of all recurrent layers, or of each by itself.
Stacks = tuple[dict[str, Any], ...]


class Carried(NamedTuple):
    """What goes from layer to layer.

    Attributes:
        kept: The states of all recurrent layers, or the sources of the new tokens. Those of layers
            that have run are new.
        finite_count: How many tokens of each row come before the first that is not finite in any of
            these layers."""

    kept: Stacks
    finite_count: Int[Array, " B"]


class Recurrence(NamedTuple):
    """The arguments that the recurrent layers of one call share.

    Attributes:
        model: The model.
        cache: The cache before the call, with the states.
        counts: How many of each row's new tokens are taken in.
        sources: Whether the new tokens' sources are kept, instead of the states after them.
        chunk: How many tokens of a prompt are computed at a time; 0: all."""

    model: Model
    cache: Cache
    counts: Int[Array, " B"]
    sources: bool = False
    chunk: int = 0

    def first(self, length: int) -> Carried:
        """Make the arrays that enter the first layer of a call with `length` new tokens."""
        finite_count = jnp.full_like(self.counts, length)
        shape = self.model.config.recurrent
        if shape is None or not self.sources:
            return Carried(self.cache.states, finite_count)
        widths = {**shape.widths, "decay": shape.value_heads, "beta": shape.value_heads}

        def blank(state: dict) -> dict:
            """Make room for the sources of the layers whose state this is: [layers, B, T, width] by
            name."""
            lead = (*state["delta"].shape[:2], length)
            return {name: jnp.zeros((*lead, widths[name]), jnp.float32) for name in GIVEN}

        sources = tuple(blank(state) for state in self.cache.states)
        return Carried(sources, finite_count)

    def before(
        self, index: Int[Array, ""] | int, h: Float[Array, "B T E"], carried: Carried
    ) -> tuple[Float[Array, "B T E"], Carried]:
        """Run the recurrent layers that stand directly before a layer of attention.

        Args:
            index: The number of that layer among the layers of attention. Their count stands for
                the end of the model: the recurrent layers behind the last one.
            h: The hidden states.
            carried: What earlier recurrent layers gave.

        Returns:
            (the hidden states after these layers, what is carried on)."""
        params = self.model.params
        config = self.model.config
        run = self._by_chunks if self.chunk else self._at_once

        def step(number, loop):
            h, (kept, finite_count) = loop
            weights = decoder.layer(params, number, "recurrent")
            # `kept` holds the states before the call too, as long as it does not hold sources.
            state = _read(self.cache.states if self.sources else kept, number)
            h, new, finite = run(weights, h, state)
            kept = _written(kept, number, new)
            return h, Carried(kept, jnp.minimum(finite_count, leading(finite)))

        return decoder.over_recurrent(params, config, index, step, (h, carried))

    def _at_once(
        self, weights, h: Float[Array, "B T E"], state
    ) -> tuple[Float[Array, "B T E"], dict, Bool[Array, "B T"]]:
        """Run one layer over all new tokens: (its output, what is kept, which tokens are
        finite)."""
        result = decoder.recur(weights, h, state, self.counts, self.model.config)
        kept = result.new if self.sources else result.state
        return result.h, kept, result.finite

    def _by_chunks(
        self, weights, h: Float[Array, "B T E"], state
    ) -> tuple[Float[Array, "B T E"], dict, Bool[Array, "B T"]]:
        """Run one layer over a prompt, a chunk after the other. A chunk's output takes the place of
        its input."""
        size = self.chunk
        length = h.shape[1]

        def step(loop, start):
            h, state, broken = loop
            part = jax.lax.dynamic_slice_in_dim(h, start, size, 1)
            counts = jnp.clip(self.counts - start, 0, size)  # valid tokens of the chunk
            # `broken` marks the rows that had a token which is not finite in an earlier chunk.
            result = decoder.recur(weights, part, state, counts, self.model.config, broken)
            broken = broken | (~result.finite & (jnp.arange(size)[None] < counts[:, None])).any(1)
            h = jax.lax.dynamic_update_slice_in_dim(h, result.h, start, 1)
            return (h, result.state, broken), result.finite

        loop = (h, state, jnp.zeros_like(self.counts, bool))
        (h, state, _), finite = jax.lax.scan(step, loop, jnp.arange(0, length, size))
        # `finite` is [chunks, B, size].
        return h, state, jnp.moveaxis(finite, 0, 1).reshape(h.shape[0], length)


def _read(stacks: Stacks, number: Int[Array, ""] | int) -> dict:
    """Cut the arrays of recurrent layer `number` out of those of all such layers."""
    if len(stacks) > 1 and not isinstance(number, jax.core.Tracer):
        return jax.tree.map(operator.itemgetter(0), stacks[number])
    # A traced number and several stacks: weights are stacked, and the cache's layers are not. That
    # copies all states. A user has to ask for such a cache.
    stack = stacks[0]
    if len(stacks) > 1:
        stack = jax.tree.map(lambda *parts: jnp.concatenate(parts), *stacks)

    def cut(x):
        return jax.lax.dynamic_index_in_dim(x, number, keepdims=False)

    return jax.tree.map(cut, stack)


def _written(stacks: Stacks, number: Int[Array, ""] | int, new: dict) -> Stacks:
    """Put the arrays of recurrent layer `number` into those of all such layers."""
    if len(stacks) == 1:

        def put(x, part):
            return jax.lax.dynamic_update_index_in_dim(x, part, number, 0)

        return (jax.tree.map(put, stacks[0], new),)
    if not isinstance(number, jax.core.Tracer):
        single = jax.tree.map(lambda x: x[None], new)
        return tuple(single if index == number else stack for index, stack in enumerate(stacks))

    def chosen(index: int, stack: dict) -> dict:
        """Choose the new arrays where `index` is the layer, else the old ones."""

        def choose(x, part):
            return jnp.where(index == number, part[None], x)

        return jax.tree.map(choose, stack, new)

    return tuple(chosen(index, stack) for index, stack in enumerate(stacks))


def after_commit(model: Model, cache: Cache, new_cache: Cache, pending: Stacks) -> Cache:
    """Take the states of recurrent layers over the tokens that layers of attention have just
    stored.

    Args:
        cache: the cache before them.
        new_cache: the cache after them, still with the states before.
        pending: the tokens' sources, of all recurrent layers.

    Returns:
        `new_cache` with the states, and `finite`, after the tokens that it holds beyond those of
        `cache`.
    """
    shape = model.config.recurrent
    counts = new_cache.lengths - cache.lengths
    if shape is None or not cache.states:
        return new_cache
    finite_count = leading(found_finite(jnp.float32, *pending))

    def step(number, states):
        weights = decoder.layer(model.params, number, "recurrent")
        new = zeroed(jnp.float32, _read(pending, number))
        _, state = advance(weights, _read(states, number), new, counts, shape)
        return _written(states, number, state)

    states = cache.states
    layers = len(shape.layers)
    if is_unrolled(model.params):
        for number in range(layers):
            states = step(number, states)
    else:
        states = jax.lax.fori_loop(0, layers, step, states)
    finite = jnp.minimum(new_cache.finite, finite_tokens(cache, finite_count, counts))
    return new_cache.replace(states=states, finite=finite)
