"""What one layer's attention reads: the layer's part of a cache, the new tokens, and the encoded
body.

    LayerView, NewTokens    what attention is given: one layer of a run, and the new tokens of the call
    side_by_side            sinks, window slots and new tokens on one axis, with the mask of each query
    body_view               positions and bounds of the body, block by block
    payload_of              the stored fields of some body tokens
    packed_view             the body as kernels take it
    BodyCall                what a reader (kvqjax/cache/readers/) is given: a layer's queries on its body

A body lies in one of three orders:

    linear     slot i holds body token i
    ring       of blocks, for sliding windows: block j of the sequence lies in ring block j mod n
    evicted    a slot holds whichever token eviction left there; `NewTokens.stored` has its position

The blocks of linear bodies and of rings may be dealt over devices (`Deal`). Slots are then numbered
on each device by itself, and `Deal.tokens` gives the body token in a slot."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvqjax.cache.append import Pages, at_layer
from kvqjax.cache.layout import MANY_QUERIES, Ask, LengthBound, RunLayout
from kvqjax.cache.pages import joined_pages
from kvqjax.cache.state import Run, body_tokens, ring_tokens
from kvqjax.methods.direct import FEW_QUERIES
from kvqjax.methods.layer_cache import SharedValues
from kvqjax.ops.attention import Partial, oldest_seen, visible
from kvqjax.ops.finite import saturated
from kvqjax.ops.xla_workarounds import floor_divide, modulo
from kvqjax.pallas_kernels.adapters import Packed


class NewTokens(NamedTuple):
    """What every layer knows of the T new tokens of a call.

    Attributes:
        positions: The positions of the new tokens in their rows, sinks included.
        counts: How many of the new tokens of each row are valid.
        body_lengths: How many body tokens (tokens after the sinks) each row held before the call.
            They are negative while the sinks fill.
        stored: The position of the token in each body slot, -1 for an empty slot. None: no token is
            evicted.
        oldest: The first position after the sinks that each query may see. None: no such limit.
        mask: Query t sees new token s where `mask[b, t, s]` is True. None: it sees the new tokens
        up to itself."""

    positions: Int[Array, "B T"]
    counts: Int[Array, " B"]
    body_lengths: Int[Array, " B"]
    stored: Int[Array, "B N"] | None = None
    oldest: Int[Array, "B T"] | None = None
    mask: Bool[Array, "B T T"] | None = None


class LayerView(NamedTuple):
    """One layer of a cache, and the sources of its new tokens.

    Attributes:
        run: The plan of the layer's run.
        state: The arrays of the whole run, with an axis of layers in front.
        layer: The layer's number in the run.
        weights: The layer's decoder weights; empty where a model of another package attends.
        constants: The layer's calibrated constants.
        new: The sources of the new tokens, [B, T, W] by name.
        sinks: How many first tokens of a row are sinks.
        bound: A promise of how many tokens rows hold; None: up to the capacity.
        pages: The pages of every row (`Cache.pages`), where the body lies in pages."""

    run: RunLayout
    state: Run
    layer: Int[Array, ""]
    weights: dict
    constants: dict
    new: dict
    sinks: int
    bound: LengthBound | None = None
    pages: Pages = None


# The positions of n tokens, and which of them are valid.
Places = tuple[Int[Array, "B n"], Bool[Array, "B n"]]


def seen(view: LayerView, tokens: NewTokens, positions, valid) -> Bool[Array, "B T S"]:
    """Mark which tokens each query sees by their positions. Masks of new tokens (`NewTokens.mask`)
    are not looked at.

    Args:
        tokens: The new tokens, whose queries attend.
        positions: The positions of S tokens, [B, S].
        valid: Which of these tokens exist, [B, S]."""
    mask = visible(tokens.positions, positions, valid, view.run.sliding, view.run.chunked)
    if tokens.oldest is None:
        return mask
    # Sinks are never evicted.
    return mask & (
        (positions[:, None] >= tokens.oldest[:, :, None]) | (positions < view.sinks)[:, None]
    )


def beside(view: LayerView, tokens: NewTokens) -> list[Places]:
    """Give the places of the sinks, of the window's slots and of the new tokens, in this order."""
    batch, length = tokens.positions.shape
    # The window's oldest token is the first that is not encoded in every source.
    ring = ring_tokens(view.run.ring, body_tokens(view.run, view.state))
    sink = jnp.broadcast_to(jnp.arange(view.sinks)[None], (batch, view.sinks))
    fresh = jnp.arange(length)[None] < tokens.counts[:, None]
    body_lengths = tokens.body_lengths[:, None]
    # `ring` numbers tokens from the first one after the sinks, positions count the sinks too.
    return [
        (sink, sink < body_lengths + view.sinks),
        (ring + view.sinks, ring < body_lengths),
        (tokens.positions, fresh),
    ]


def side_by_side(view: LayerView, tokens: NewTokens):
    """Put sinks, window slots and new tokens on one axis of N tokens, in this order.

    Returns:
        (sources, [B, N, W] by name; their positions [B, N]; which of them each query sees, [B, T,
        N])."""
    places = beside(view, tokens)
    positions, valid = (jnp.concatenate(arrays, axis=1) for arrays in zip(*places, strict=True))
    mask = seen(view, tokens, positions, valid)
    if tokens.mask is not None:
        old_tokens = positions.shape[1] - tokens.mask.shape[1]  # sinks and window slots
        mask = jnp.concatenate(
            [mask[:, :, :old_tokens], _masked(view, tokens.mask, places[-1])], axis=2
        )
    exact = [at_layer(part, view.layer) for part in (view.state.sinks, view.state.window) if part]
    parts = *exact, view.new
    sources = {}
    for name, new in view.new.items():
        sources[name] = jnp.concatenate([part[name].astype(new.dtype) for part in parts], 1)
    return sources, positions, mask


def _masked(view: LayerView, mask: Bool[Array, "B T T"], fresh: Places) -> Bool[Array, "B T T"]:
    """Mark which new tokens each query sees by their mask [B, queries, tokens]. `fresh` has their
    places."""
    positions, valid = fresh
    mask = mask & valid[:, None]
    if view.run.sliding is None:
        return mask
    # A mask may show a query later tokens too, so that a sliding window must hide tokens on both
    # sides.
    return mask & (jnp.abs(positions[:, :, None] - positions[:, None]) < view.run.sliding)


def expanded(view: LayerView, sources: dict, positions, body: bool = False):
    """Make keys and values of sources.

    Args:
        sources: The sources of N tokens, [B, N, W] by name.
        positions: The positions of these tokens, [B, N], or what the layer takes in their place
            (`Fast.waves`).
        body: Whether the sources are decoded from the body. They are then in the body's frame, and
            so are the keys and values.

    Returns:
        (keys, values), [B, N, K, D]. Numbers beyond the range of their dtype become its largest
        number."""
    maps = view.run.wiring.maps
    expand = maps.expand_body if body and maps.expand_body is not None else maps.expand
    k, v = expand(view.weights, view.constants, sources, positions)
    return saturated(k, k.dtype), saturated(v, v.dtype)


def payload_of(run: RunLayout, state: Run, layer, at, size: int, pages: Pages = None) -> dict:
    """Read and unpack some body tokens of every row of one layer.

    Args:
        state: The arrays of the run.
        at: The first slot that is read.
        size: How many slots are read of every row: whole blocks. Of a body in pages, a part of a
            page or whole pages (`RunLayout.within_pages`).
        pages: The pages of every row, where the body lies in pages.

    Returns:
        What the codecs decode, {source: {field: [B, size, ..]}}."""
    return _fields_of(run, state, layer, at, size, pages, lambda packing: packing.read)


def codes_last(run: RunLayout, state: Run, layer, at, size: int, pages: Pages = None) -> dict:
    """Read and unpack the codes of some body tokens of stripes, tokens on the last axis: {source:
    {field: [B, W, size]}}. The arguments are those of `payload_of`."""
    return _fields_of(run, state, layer, at, size, pages, lambda packing: packing.read_last)


def _fields_of(run, state, layer, at, size: int, pages: Pages, reading: Callable) -> dict:
    """Read every field by the function that `reading` names of its packing."""
    if run.page:
        assert pages is not None
        # The body becomes one of this layer and of these slots alone, which is read from its
        # beginning.
        state = state.replace(body=joined_pages(run, state.body, layer, pages, at, size))
        layer = at = 0
    payload = {}
    for source, codec in run.wiring.storage.codecs.items():
        stored = state.body[source]
        payload[source] = {
            name: reading(field.packing)(stored[name], layer, at, size)
            for name, field in codec.fields.items()
        }
    return payload


def with_own_body(view: LayerView) -> LayerView:
    """View a layer whose body lies in pages as one whose rows have bodies of their own.

    This is for readers that take a row's body as a whole. It copies the codes of this one layer, of
    as many slots as any row may have filled."""
    run = view.run
    # The carry has as many slots as the layer's body, whatever a bound promises.
    tokens = run.slots if run.wiring.chain.carry else reached(view)
    slots = min(run.slots, -(-tokens // run.page) * run.page)
    assert view.pages is not None
    body = joined_pages(run, view.state.body, view.layer, view.pages, 0, slots)
    state, run = view.state.replace(body=body), run._replace(slots=slots, page=0)
    return view._replace(run=run, state=state, layer=jnp.int32(0), pages=None)


def reached(view: LayerView) -> int:
    """Give a static bound of how many body tokens any row has on this device."""
    run = view.run
    return run.slots_here if view.bound is None else run.deal.most(min(view.bound.row, run.slots))


class PackedView(NamedTuple):
    """A body as kernels on packed words take it.

    Attributes:
        packed: What is static about the body, and how its arrays are named.
        body: The body's arrays, of the class that the kernel's spec asks for.
        start: The first body token that query t of row b sees, numbered among those on this device.
        stop: One past the last body token that it sees, numbered likewise."""

    packed: Packed
    body: Any
    start: Int[Array, "B T"]
    stop: Int[Array, "B T"]


def packed_view(view: LayerView, tokens: NewTokens) -> PackedView:
    """View a linear body as it is packed. The layer must have a form that kernels read
    (`Fast.packed`)."""
    run, packed = view.run, view.run.wiring.fast.packed
    assert packed is not None
    # Kernels rotate keys that are stored before RoPE by the positions at which blocks begin.
    first = run.deal.tokens(jnp.arange(0, run.slots_here, run.block)) + view.sinks
    body = packed.body(view.constants, view.state.body, first)
    stop = jnp.broadcast_to(body_tokens(run, view.state)[:, None], tokens.positions.shape)
    if run.sliding is None:
        start = jnp.zeros_like(stop)
    else:
        oldest = oldest_seen(tokens.positions, run.sliding, run.chunked)
        start = run.deal.share(jnp.maximum(oldest - view.sinks, 0))
    return PackedView(packed, body, start, run.deal.share(stop))


Number = Int[Array, ""] | int


class BodyView(NamedTuple):
    """How a layer's queries read a body, in blocks of `size` tokens.

    Attributes:
        at: `at(j, size)` is the first slot of block j.
        places: `places(j, size)` gives the positions of the tokens of block j, and which of them
            are valid. A token that two blocks share is valid in the first of them only.
        blocks: `blocks(size)` gives the first block to read, and one past the last.
        together: The tokens of a block have consecutive positions."""

    at: Callable[[Number, int], Number]
    places: Callable[[Number, int], Places]
    blocks: Callable[[int], tuple[Number, Number]]
    together: bool


def body_view(view: LayerView, tokens: NewTokens) -> BodyView:
    """Make the view of one layer's body that the new tokens' queries read."""
    if tokens.stored is not None:
        return _evicted(view, tokens.stored)
    if view.run.wraps:
        return _ring(view, tokens)
    return _linear(view, tokens)


def _numbered(view: LayerView, slots: Int[Array, " n"], least: Number) -> Places:
    """Give the places of body tokens that lie in their order.

    Args:
        slots: The slots of a block. In a ring, the numbers that its slots would have if the ring
            did not wrap.
        least: The block's first slot that no block before it has. Tokens in lower slots are not
            valid here.

    Returns:
        Their places. Slots that a row has not filled are not valid."""
    ends = body_tokens(view.run, view.state)
    index = jnp.broadcast_to(view.run.deal.tokens(slots)[None], (ends.shape[0], len(slots)))
    return index + view.sinks, (index < ends[:, None]) & (slots >= least)[None]


def _pinned(slots: int) -> Callable[[Number, int], Number]:
    """Make the `BodyView.at` of a body with `slots` slots.

    All blocks have the same size. Where that does not divide the slots, the last block ends with
    the body and begins within the block before it."""
    return lambda j, size: jnp.minimum(j * size, slots - size)


def sees_all(view: LayerView, tokens: NewTokens) -> bool:
    """Say whether every new token of a row sees all tokens of the row's body."""
    return view.run.sliding is None and tokens.oldest is None


def _is_static(view: LayerView, tokens: NewTokens) -> bool:
    """Say whether the number of blocks that are read must be known when the program is traced.

    That is so for the reader `tiles` with many queries, and for few queries on a GPU
    (`RunLayout.static_loops`)."""
    length = tokens.positions.shape[1]
    tiled = view.run.tiles == "tiles" and length >= MANY_QUERIES and sees_all(view, tokens)
    return tiled or (view.run.static_loops and length <= FEW_QUERIES)


def _in_reach(view: LayerView, tokens: NewTokens, size: int) -> tuple[Number, Number]:
    """Find the blocks of a body in order that hold any token which any query sees: the first, and
    one past the last."""
    run = view.run
    last = floor_divide(run.deal.share(body_tokens(run, view.state).max()) + size - 1, size)
    if run.sliding is None:
        return jnp.int32(0), last
    # Of a row's new tokens the first one sees furthest back.
    oldest = oldest_seen(tokens.positions[:, 0], run.sliding, run.chunked)
    oldest = jnp.maximum((oldest - view.sinks).min(), 0)
    return jnp.minimum(floor_divide(run.deal.share(oldest), size), last), last


def _linear(view: LayerView, tokens: NewTokens) -> BodyView:
    """View a body whose slot i holds body token i."""
    run, at = view.run, _pinned(view.run.slots_here)

    def places(j, size):
        return _numbered(view, at(j, size) + jnp.arange(size), j * size)

    def blocks(size):
        if _is_static(view, tokens):
            return 0, -(-min(reached(view), run.slots_here) // size)
        return _in_reach(view, tokens, size)

    return BodyView(at, places, blocks, together=run.deal.parts == 1)


def _ring(view: LayerView, tokens: NewTokens) -> BodyView:
    """View a ring: block j of the sequence lies in ring block j mod n.

    Where data may bound a loop, j counts blocks of the sequence, from the first that any query
    sees. Otherwise j counts the ring's n blocks in the order in which they lie, and all are
    read."""
    run, around = view.run, view.run.slots_here

    def places(j, size):
        """Give the places of block j of the sequence."""
        return _numbered(view, j * size + jnp.arange(size), j * size)

    def newest(j, size):
        """Give the places of ring block j: each slot holds the newest token that was written to
        it."""
        ends, slots = (
            run.deal.share(body_tokens(run, view.state))[:, None],
            j * size + jnp.arange(size)[None],
        )
        # The largest number below `ends` that is `slots` modulo the ring. It is negative for a slot
        # that a row has not filled yet.
        index = slots + floor_divide(ends - 1 - slots, around) * around
        return run.deal.tokens(index) + view.sinks, index >= 0

    if _is_static(view, tokens):

        def all_blocks(size):
            return (0, around // size)

        return BodyView(lambda j, size: j * size, newest, all_blocks, together=False)
    blocks = functools.partial(_in_reach, view, tokens)
    return BodyView(lambda j, size: modulo(j * size, around), places, blocks, together=False)


def _evicted(view: LayerView, stored: Int[Array, "B N"]) -> BodyView:
    """View a body whose slots hold the tokens at the positions `stored`, or none (-1)."""
    slots, at = view.run.slots, _pinned(view.run.slots_here)
    # The budget need not be whole blocks, the body is.
    stored = jnp.pad(stored, ((0, 0), (0, slots - stored.shape[1])), constant_values=-1)

    def places(j, size):
        first = at(j, size)
        positions = jax.lax.dynamic_slice_in_dim(stored, first, size, 1)
        return positions, (positions >= 0) & (first + jnp.arange(size) >= j * size)[None]

    def blocks(size):
        filled = jnp.where(stored >= 0, jnp.arange(1, slots + 1)[None], 0).max()
        return jnp.int32(0), -(-filled // size)

    return BodyView(at, places, blocks, together=False)


# What flows from layer to layer, [B, slots, W] per name; empty for layers that stand alone.
Carry = dict[str, Array]


class BodyCall(NamedTuple):
    """One layer's queries on its body.

    Attributes:
        ask: What decided which reader is called.
        q: The queries, rotated by RoPE and into the body's frame, and not yet multiplied by D^-1/2.
        view: The layer.
        tokens: What all layers know of the new tokens.
        shared: Where given, the reader sums values that all heads share, and the caller maps the
            sums to heads (`kvqjax.cache.layout.shared_values`). None: the reader sums the heads'
            own values."""

    ask: Ask
    q: Float[Array, "B T H D"]
    view: LayerView
    tokens: NewTokens
    shared: SharedValues | None

    @property
    def kv_heads(self) -> int:
        return self.view.run.shape.num_kv_heads


# A reader: from its call and the layer below's carry to (attention to the body, this layer's
# carry).
Attend = Callable[[BodyCall, Carry], tuple[Partial, Carry]]
