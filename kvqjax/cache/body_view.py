"""What an encoded body is to whoever reads it: which tokens its slots hold, and which of its blocks are read.

A body is linear (slot i holds the i-th body token), a ring of blocks (sliding windows) or what eviction left of it; the
tokens of the first two may be dealt over devices, and slots are then those that lie here."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvqjax.cache.chunk_paths import MANY_QUERIES
from kvqjax.cache.state import body_tokens
from kvqjax.cache.view import LayerView, NewTokens, reached
from kvqjax.methods.direct import MOST_QUERIES

__all__ = ["BodyView", "alike", "body_view"]

Places = tuple[Int[Array, "B n"], Bool[Array, "B n"]]
Number = Int[Array, ""] | int


class BodyView(NamedTuple):
    """`at(j, size)` is the first slot of block j of `size` tokens, `places(j, size)` the positions of its tokens and
    which of them are valid, and `blocks(size)` the first block to read and the one after the last. `linear`: it can
    be read as a whole. `together`: the tokens that a query sees lie next to each other."""

    at: Callable[[Number, int], Number]
    places: Callable[[Number, int], Places]
    blocks: Callable[[int], tuple[Number, Number]]
    linear: bool
    together: bool


def body_view(view: LayerView, tokens: NewTokens) -> BodyView:
    """One layer's body as the new tokens' queries read it."""
    if tokens.stored is not None:
        return _evicted(view, tokens.stored)
    return (_ring if view.run.wraps else _linear)(view, tokens)


def _numbered(view: LayerView, slots: Int[Array, " n"], least: Number) -> Places:
    """The places of body tokens numbered as `slots`, of which those before `least` were read before."""
    ends = body_tokens(view.run, view.state)
    index = jnp.broadcast_to(view.run.deal.tokens(slots)[None], (ends.shape[0], len(slots)))
    return index + view.sinks, (index < ends[:, None]) & (slots >= least)[None]


def _pinned(slots: int) -> Callable[[Number, int], Number]:
    """Where block j begins in a body of `slots` tokens: the last one may begin within the one before it."""
    return lambda j, size: jnp.minimum(j * size, slots - size)


def alike(view: LayerView, tokens: NewTokens) -> bool:
    """Whether all new tokens of a row see the same of the body, which is all of it."""
    return view.run.sliding is None and tokens.oldest is None


def _is_static(view: LayerView, tokens: NewTokens) -> bool:
    """Whether the blocks read may not be bounded by data."""
    length = tokens.positions.shape[1]
    tiled = view.chunks == "tiles" and length >= MANY_QUERIES and alike(view, tokens)
    return tiled or (view.run.static and length <= MOST_QUERIES)


def _in_reach(view: LayerView, tokens: NewTokens, size: int) -> tuple[Number, Number]:
    """The blocks that hold tokens, but for those that no query reaches any more."""
    run = view.run
    last = -(-run.deal.share(body_tokens(run, view.state).max()) // size)
    if run.sliding is None:
        return jnp.int32(0), last
    oldest = jnp.maximum((tokens.positions[:, 0] - run.sliding + 1 - view.sinks).min(), 0)
    return jnp.minimum(run.deal.share(oldest) // size, last), last


def _linear(view: LayerView, tokens: NewTokens) -> BodyView:
    run, at = view.run, _pinned(view.run.slots_here)

    def places(j, size):
        return _numbered(view, at(j, size) + jnp.arange(size), j * size)

    def blocks(size):
        if _is_static(view, tokens):
            return 0, -(-min(reached(view), run.slots_here) // size)
        return _in_reach(view, tokens, size)

    return BodyView(at, places, blocks, linear=True, together=run.deal.parts == 1)


def _ring(view: LayerView, tokens: NewTokens) -> BodyView:
    """Block j of the sequence lies in ring block j mod n; where bounds must be static, all n are read as they lie."""
    run, around = view.run, view.run.slots_here

    def places(j, size):
        return _numbered(view, j * size + jnp.arange(size), j * size)

    def newest(j, size):
        """Each row's newest tokens that its slots held; a row that has not filled the ring has none before 0."""
        ends, slots = run.deal.share(body_tokens(run, view.state))[:, None], j * size + jnp.arange(size)[None]
        index = slots + (ends - 1 - slots) // around * around
        return run.deal.tokens(index) + view.sinks, index >= 0

    if _is_static(view, tokens):
        whole = lambda size: (0, around // size)  # noqa: E731
        return BodyView(lambda j, size: j * size, newest, whole, linear=False, together=False)
    blocks = functools.partial(_in_reach, view, tokens)
    return BodyView(lambda j, size: j * size % around, places, blocks, linear=False, together=False)


def _evicted(view: LayerView, stored: Int[Array, "B N"]) -> BodyView:
    slots, at = view.run.slots, _pinned(view.run.slots_here)
    stored = jnp.pad(stored, ((0, 0), (0, slots - stored.shape[1])), constant_values=-1)

    def places(j, size):
        positions = jax.lax.dynamic_slice_in_dim(stored, at(j, size), size, 1)
        return positions, positions >= 0

    def blocks(size):
        filled = jnp.where(stored >= 0, jnp.arange(1, slots + 1)[None], 0).max()
        return jnp.int32(0), -(-filled // size)

    return BodyView(at, places, blocks, linear=False, together=False)
