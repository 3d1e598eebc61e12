"""What one layer's attention knows and sees: the layer's part of a cache, the new tokens, and the encoded body.

A body is linear (slot i holds the i-th body token), a ring of blocks (sliding windows) or what eviction left of it. The
tokens of the first two may be dealt over devices. Slots are then those of this device."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvqjax.cache.cache_layout import LengthBound
from kvqjax.cache.encoding import Pages, at_layer
from kvqjax.cache.pages import joined_pages
from kvqjax.cache.run_layout import MANY_QUERIES, RunLayout
from kvqjax.cache.state import Run, body_tokens, ring_tokens
from kvqjax.methods.direct import FEW_QUERIES
from kvqjax.ops.attention import oldest_seen, visible
from kvqjax.ops.finite import saturated
from kvqjax.ops.xla_workarounds import floor_divide, modulo
from kvqjax.pallas_kernels.adapters import Packed

__all__ = [
    "BodyView",
    "LayerView",
    "NewTokens",
    "PackedView",
    "beside",
    "body_view",
    "expanded",
    "packed_view",
    "payload_of",
    "reached",
    "seen",
    "sees_all",
    "side_by_side",
    "with_own_body",
]


class NewTokens(NamedTuple):
    """What every layer knows of the T new tokens.

    - `positions` are absolute. `counts` says how many tokens of each row are valid.
    - `held` is how many body tokens (tokens after the sinks) each row held before; negative while the sinks fill.
    - `stored`, where tokens are evicted, are the positions of the body's slots (-1: none). `oldest` is the first
      position that each query may see, if not all of them.
    - With a `mask`, query t sees new token s where `mask[b, t, s]` says so, instead of those up to itself."""

    positions: Int[Array, "B T"]
    counts: Int[Array, " B"]
    held: Int[Array, " B"]
    stored: Int[Array, "B N"] | None = None
    oldest: Int[Array, "B T"] | None = None
    mask: Bool[Array, "B T T"] | None = None


class LayerView(NamedTuple):
    """One layer of a run: its arrays by number, its weights and constants, and the new tokens' sources [B, T, W].

    Rows hold no more than `bound` promises. A body in pages lies as `pages` say (`Cache.pages`)."""

    run: RunLayout
    state: Run
    layer: Int[Array, ""]
    weights: dict
    constants: dict
    new: dict
    sinks: int
    bound: LengthBound | None = None
    pages: Pages = None


Places = tuple[Int[Array, "B n"], Bool[Array, "B n"]]


def seen(view: LayerView, tokens: NewTokens, positions, valid) -> Bool[Array, "B T S"]:
    """Mark which of the tokens at `positions` each query sees."""
    mask = visible(tokens.positions, positions, valid, view.run.sliding, view.run.chunked)
    if tokens.oldest is None:
        return mask
    return mask & ((positions[:, None] >= tokens.oldest[:, :, None]) | (positions < view.sinks)[:, None])


def beside(view: LayerView, tokens: NewTokens) -> list[Places]:
    """Give the places of sinks, window slots and new tokens, one after the other."""
    batch, length = tokens.positions.shape
    ring = ring_tokens(view.run.ring, body_tokens(view.run, view.state))
    sink = jnp.broadcast_to(jnp.arange(view.sinks)[None], (batch, view.sinks))
    fresh = jnp.arange(length)[None] < tokens.counts[:, None]
    body_lengths = tokens.held[:, None]
    return [
        (sink, sink < body_lengths + view.sinks),
        (ring + view.sinks, ring < body_lengths),
        (tokens.positions, fresh),
    ]


def side_by_side(view: LayerView, tokens: NewTokens):
    """Put sinks, window slots and new tokens on one axis. Return (sources {name: [B, N, W]}, positions [B, N], which of
    them each query sees [B, T, N])."""
    places = beside(view, tokens)
    positions, valid = (jnp.concatenate(arrays, axis=1) for arrays in zip(*places, strict=True))
    mask = seen(view, tokens, positions, valid)
    if tokens.mask is not None:
        old = positions.shape[1] - tokens.mask.shape[1]
        mask = jnp.concatenate([mask[:, :, :old], _masked(view, tokens.mask, places[-1])], axis=2)
    exact = [at_layer(part, view.layer) for part in (view.state.sinks, view.state.window) if part]
    parts = *exact, view.new
    sources = {name: jnp.concatenate([part[name].astype(x.dtype) for part in parts], 1) for name, x in view.new.items()}
    return sources, positions, mask


def _masked(view: LayerView, mask: Bool[Array, "B T T"], fresh: Places) -> Bool[Array, "B T T"]:
    """Mark which new tokens each query sees by their mask. A sliding window hides tokens on both sides."""
    positions, valid = fresh
    mask = mask & valid[:, None]
    if view.run.sliding is None:
        return mask
    return mask & (jnp.abs(positions[:, :, None] - positions[:, None]) < view.run.sliding)


def expanded(view: LayerView, sources: dict, positions, body: bool = False):
    """Make keys and values [B, N, K, D] of exact sources, or of those of the `body`, in its frame; what overflows on
    the way saturates."""
    maps = view.run.wiring.maps
    expand = maps.expand if maps.expand_body is None or not body else maps.expand_body
    k, v = expand(view.weights, view.constants, sources, positions)
    return saturated(k, k.dtype), saturated(v, v.dtype)


def payload_of(run: RunLayout, state: Run, layer, at, size: int, pages: Pages = None) -> dict:
    """Read and unpack `size` tokens of every row of one layer, whole blocks; of a body in pages, a part of a page or
    whole pages."""
    if run.page:
        assert pages is not None
        state = state.replace(body=joined_pages(run, state.body, layer, pages, at, size))
        layer = at = 0
    return {
        source: {name: f.packing.read(state.body[source][name], layer, at, size) for name, f in codec.fields.items()}
        for source, codec in run.wiring.storage.codecs.items()
    }


def with_own_body(view: LayerView) -> LayerView:
    """View a layer whose body lies in pages as one whose rows have bodies of their own, as long as rows may be. For
    readers that want all of a body: codes are copied, of one layer at a time."""
    run = view.run
    # What flows between layers is as long as the body of every layer, whatever a bound promises.
    tokens = run.slots if run.wiring.chain.carry else reached(view)
    slots = min(run.slots, -(-tokens // run.page) * run.page)
    assert view.pages is not None
    body = joined_pages(run, view.state.body, view.layer, view.pages, 0, slots)
    state, run = view.state.replace(body=body), run._replace(slots=slots, page=0)
    return view._replace(run=run, state=state, layer=jnp.int32(0), pages=None)


def reached(view: LayerView) -> int:
    """Bound the body tokens that any row may have here, by what is static."""
    run = view.run
    return run.slots_here if view.bound is None else run.deal.most(min(view.bound.row, run.slots))


class PackedView(NamedTuple):
    """A body as kernels on packed words take it. Query t of row b sees its tokens `start[b, t]` to `stop[b, t]` - 1,
    numbered as they lie here."""

    packed: Packed
    body: Any
    start: Int[Array, "B T"]
    stop: Int[Array, "B T"]


def packed_view(view: LayerView, tokens: NewTokens) -> PackedView:
    """View a body as it is packed. There must be a kernel form of it."""
    run, packed = view.run, view.run.wiring.fast.packed
    assert packed is not None
    first = run.deal.tokens(jnp.arange(0, run.slots_here, run.block)) + view.sinks
    body = packed.body(view.weights, view.constants, view.state.body, first)
    stop = jnp.broadcast_to(body_tokens(run, view.state)[:, None], tokens.positions.shape)
    if run.sliding is None:
        start = jnp.zeros_like(stop)
    else:
        oldest = oldest_seen(tokens.positions, run.sliding, run.chunked)
        start = run.deal.share(jnp.maximum(oldest - view.sinks, 0))
    return PackedView(packed, body, start, run.deal.share(stop))


Number = Int[Array, ""] | int


class BodyView(NamedTuple):
    """How a layer's queries read a body, in blocks.

    - `at(j, size)` is the first slot of block j of `size` tokens.
    - `places(j, size)` are the positions of the block's tokens, and which of them are valid.
    - `blocks(size)` are the first block to read and the one after the last.
    - `linear`: the body can be read as a whole.
    - `together`: the tokens that a query sees lie next to each other."""

    at: Callable[[Number, int], Number]
    places: Callable[[Number, int], Places]
    blocks: Callable[[int], tuple[Number, Number]]
    linear: bool
    together: bool


def body_view(view: LayerView, tokens: NewTokens) -> BodyView:
    """Make the view of one layer's body that the new tokens' queries read."""
    if tokens.stored is not None:
        return _evicted(view, tokens.stored)
    return (_ring if view.run.wraps else _linear)(view, tokens)


def _numbered(view: LayerView, slots: Int[Array, " n"], least: Number) -> Places:
    """Give the places of the body tokens in `slots`, of which those before `least` belong to another block."""
    ends = body_tokens(view.run, view.state)
    index = jnp.broadcast_to(view.run.deal.tokens(slots)[None], (ends.shape[0], len(slots)))
    return index + view.sinks, (index < ends[:, None]) & (slots >= least)[None]


def _pinned(slots: int) -> Callable[[Number, int], Number]:
    """Say where block j begins in a body of `slots` tokens: the last one may begin within the one before it."""
    return lambda j, size: jnp.minimum(j * size, slots - size)


def sees_all(view: LayerView, tokens: NewTokens) -> bool:
    """Say whether all new tokens of a row see the same of the body, which is all of it."""
    return view.run.sliding is None and tokens.oldest is None


def _is_static(view: LayerView, tokens: NewTokens) -> bool:
    """Say whether data may not bound how many blocks are read."""
    length = tokens.positions.shape[1]
    tiled = view.run.tiles == "tiles" and length >= MANY_QUERIES and sees_all(view, tokens)
    return tiled or (view.run.static_loops and length <= FEW_QUERIES)


def _in_reach(view: LayerView, tokens: NewTokens, size: int) -> tuple[Number, Number]:
    """Find the blocks that hold tokens which some query still sees: the first, and one past the last."""
    run = view.run
    last = floor_divide(run.deal.share(body_tokens(run, view.state).max()) + size - 1, size)
    if run.sliding is None:
        return jnp.int32(0), last
    oldest = oldest_seen(tokens.positions[:, 0], run.sliding, run.chunked)
    oldest = jnp.maximum((oldest - view.sinks).min(), 0)
    return jnp.minimum(floor_divide(run.deal.share(oldest), size), last), last


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
    """View a ring: block j of the sequence lies in ring block j mod n. Where bounds must be static, all n blocks are
    read in the order in which they lie."""
    run, around = view.run, view.run.slots_here

    def places(j, size):
        return _numbered(view, j * size + jnp.arange(size), j * size)

    def newest(j, size):
        """Give each slot's newest token; in a row that has not filled the ring, some slots have none."""
        ends, slots = run.deal.share(body_tokens(run, view.state))[:, None], j * size + jnp.arange(size)[None]
        index = slots + floor_divide(ends - 1 - slots, around) * around
        return run.deal.tokens(index) + view.sinks, index >= 0

    if _is_static(view, tokens):
        all_blocks = lambda size: (0, around // size)  # noqa: E731
        return BodyView(lambda j, size: j * size, newest, all_blocks, linear=False, together=False)
    blocks = functools.partial(_in_reach, view, tokens)
    return BodyView(lambda j, size: modulo(j * size, around), places, blocks, linear=False, together=False)


def _evicted(view: LayerView, stored: Int[Array, "B N"]) -> BodyView:
    slots, at = view.run.slots, _pinned(view.run.slots_here)
    stored = jnp.pad(stored, ((0, 0), (0, slots - stored.shape[1])), constant_values=-1)

    def places(j, size):
        first = at(j, size)
        positions = jax.lax.dynamic_slice_in_dim(stored, first, size, 1)
        return positions, (positions >= 0) & (first + jnp.arange(size) >= j * size)[None]

    def blocks(size):
        filled = jnp.where(stored >= 0, jnp.arange(1, slots + 1)[None], 0).max()
        return jnp.int32(0), -(-filled // size)

    return BodyView(at, places, blocks, linear=False, together=False)
