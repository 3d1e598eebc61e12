"""Reader `blocks`: the body is decoded block by block, in one loop that ends with the longest row.
It reads every body on every chip, and is the last line of the table in kvqjax/cache/layout.py.

`body_blocks` makes the function that reads a block. Other readers use it too, for blocks of other
sizes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvqjax.cache.layout import MANY_QUERIES, MOST_ROWS, few_block
from kvqjax.cache.view import (
    BodyCall,
    Carry,
    LayerView,
    NewTokens,
    body_view,
    expanded,
    payload_of,
    seen,
)
from kvqjax.methods.layer_cache import MixedKeys, SharedValues
from kvqjax.ops.attention import Partial, blockwise_attention
from kvqjax.ops.finite import saturated


def _meets_all_lanes(call: BodyCall) -> bool:
    """Say whether the queries meet the channels of all heads in one product.

    That takes K times the multiplications, K being the number of KV heads. In return, decoded keys
    and values need not be split into heads (`RunLayout.lanes`)."""
    lanes = call.view.run.lanes
    rows = call.q.shape[1] * call.q.shape[2]  # T * H
    return lanes > 0 and (call.shared is None or lanes > 1) and rows <= MOST_ROWS


def attend_by_blocks(call: BodyCall, carry: Carry) -> tuple[Partial, Carry]:
    """Attend to the body block by block.

    Args:
        carry: What flows from layer to layer, as the layer below made it.

    Returns:
        (attention to the body, the carry of this layer)."""
    run = call.view.run
    batch, length, heads, _ = call.q.shape
    size = run.reading
    # Few queries read several blocks at a time where operations between blocks cost much.
    if length < MANY_QUERIES:
        size = few_block(run, batch, length * heads)
    lanes = _meets_all_lanes(call)
    mixed = None
    # Queries that meet the channels of all heads take the keys' transform between heads in the same
    # product.
    if lanes and run.lanes > 1:
        mixed = run.wiring.fast.mixed
    read, first, last = body_blocks(call.view, call.tokens, size, call.shared, mixed)
    return blockwise_attention(
        call.q,
        call.kv_heads,
        read,
        first,
        last,
        carry,
        width=None if call.shared is None else call.shared.width,
        lanes=lanes,
        mix=None if mixed is None else mixed.mix,
        softcap=call.ask.softcap,
    )


def body_blocks(
    view: LayerView,
    tokens: NewTokens,
    size: int,
    shared: SharedValues | None = None,
    mixed: MixedKeys | None = None,
) -> tuple[Callable, jax.Array | int, jax.Array | int]:
    """Make the functions by which `blockwise_attention` reads a body.

    Args:
        size: Tokens of every row that a block has.
        shared: If given, values are read as it says, and the caller maps their sum to heads.
        mixed: If given, keys are read before their heads are mixed, and the caller mixes the
            queries instead.

    Returns:
        (read, first, last). `read(j, carry)` gives keys [B, size, K, D], values [B, size, K, D] (or
        [B, size, 1, N] of `shared`), mask [B, T, size] and the whole carry, of which block j is
        this layer's. Blocks `first` to `last` - 1 hold tokens that some query sees."""
    run = view.run
    body = body_view(view, tokens)
    constants = run.wiring.maps.prepare(view.constants)
    waves = None
    # Of consecutive positions, a CPU makes cosines and sines of a block from those of its first
    # position.
    if run.wiring.fast.waves and body.together:
        waves = run.wiring.fast.waves(size)

    def read(j, carry):
        slot = body.at(j, size)
        payload = payload_of(run, view.state, view.layer, slot, size, view.pages)
        below = {}  # the layer below's carry of the block
        for name, array in carry.items():
            below[name] = jax.lax.dynamic_slice_in_dim(array, slot, size, 1)
        sources, made = run.wiring.maps.decode(constants, payload, below)
        if mixed is not None:
            # Nothing uses the decoded keys then, so that XLA leaves their decoding out.
            sources = sources | {"k": mixed.read(payload["k"])}
        sources = {name: saturated(x, view.new[name].dtype) for name, x in sources.items()}
        # Where the body is not whole blocks of `size`, the last one begins earlier, within the one
        # before it.
        start = j * size if run.slots_here % size else slot
        # This layer's carry of the block takes the place of the layer below's.
        above = {}
        for name, array in carry.items():
            above[name] = put_into_carry(array, made[name], slot, start)
        positions, valid = body.places(j, size)
        places = positions if waves is None else waves(positions)
        k, v = expanded(view, sources, places, body=True)
        if shared is not None:
            # Nothing uses the decoded values then, so that XLA leaves their decoding out.
            vectors = shared.read(view.weights, view.constants, payload, sources)
            v = saturated(vectors[:, :, None], v.dtype)
        return k, v, seen(view, tokens, positions, valid), above

    first, last = body.blocks(size)
    return read, first, last


def put_into_carry(carry, part, slot, start):
    """Put this layer's carry of a block into the carry of all tokens.

    The last block of a body may begin within the one before it. Slots of both already have this
    layer's carry. What is decoded for them again took that for the layer below's carry, and is
    dropped.

    Args:
        carry: The carry of all slots, [B, S, W].
        part: The carry of the block, [B, size, W].
        slot: The block's first slot.
        start: The block's first slot that has not been written yet. It is the very object `slot`
            where that is so of all blocks.

    Returns:
        The carry with the block's."""
    part = saturated(part, carry.dtype)
    size = part.shape[1]
    # Identity, not equality: both may be traced numbers. Bodies of whole blocks need no select.
    if start is not slot:
        stored = jax.lax.dynamic_slice_in_dim(carry, slot, size, 1)
        is_written = slot + jnp.arange(size) < start
        part = jnp.where(is_written[None, :, None], stored, part)
    return jax.lax.dynamic_update_slice_in_dim(carry, part, slot, 1)
