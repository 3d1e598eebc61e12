"""Reader `blocks`: the body is decoded block by block, in one loop that ends with the longest row. It reads every body
on every chip, so it is the last line of the table."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvqjax.cache.readers.reader import BodyCall, Carry
from kvqjax.cache.run_layout import MANY_QUERIES, MOST_ROWS, few_block
from kvqjax.cache.view import LayerView, NewTokens, body_view, expanded, payload_of, seen
from kvqjax.methods.layer_cache import MixedKeys, SharedValues
from kvqjax.ops.attention import Partial, blockwise_attention
from kvqjax.ops.finite import saturated

__all__ = ["attend_by_blocks", "body_blocks", "put_into_carry"]


def _meets_all_lanes(call: BodyCall) -> bool:
    """Say whether the queries meet the channels of all heads in one product. It costs as many products as there are KV
    heads, and takes no head apart from the others (`RunLayout.lanes`)."""
    lanes, rows = call.view.run.lanes, call.q.shape[1] * call.q.shape[2]
    return lanes > 0 and (call.shared is None or lanes > 1) and rows <= MOST_ROWS


def attend_by_blocks(call: BodyCall, carry: Carry) -> tuple[Partial, Carry]:
    """Attend to the body block by block, a few blocks at a time where operations between them cost much."""
    run, (batch, length, heads, _) = call.view.run, call.q.shape
    size = few_block(run, batch, length * heads) if length < MANY_QUERIES else run.reading
    lanes = _meets_all_lanes(call)
    mixed = run.wiring.fast.mixed if lanes and run.lanes > 1 else None
    return blockwise_attention(
        call.q,
        call.kv_heads,
        *body_blocks(call.view, call.tokens, size, call.shared, mixed),
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
    """Make what `blockwise_attention` reads a body by.

    Args:
        size: Tokens of every row that a block has.
        shared: Values are read as they are stored; the caller maps their sum to heads.
        mixed: Keys are read before their heads are mixed; the queries are mixed instead.

    Returns:
        (read, first, last): `read(j, carry)` gives keys, values, mask and the carry of block j; blocks first to
        last - 1 hold tokens that some query sees."""
    run, body, constants = view.run, body_view(view, tokens), view.run.wiring.maps.prepare(view.constants)
    waves = run.wiring.fast.waves(size) if run.wiring.fast.waves and body.together else None

    def read(j, carry):
        at = body.at(j, size)
        payload = payload_of(run, view.state, view.layer, at, size, view.pages)
        part = {n: jax.lax.dynamic_slice_in_dim(c, at, size, 1) for n, c in carry.items()}
        decoded, part = run.wiring.maps.decode(constants, payload, part)
        if mixed is not None:  # keys as decoded then have no user
            decoded = decoded | {"k": mixed.read(payload["k"])}
        decoded = {name: saturated(x, view.new[name].dtype) for name, x in decoded.items()}
        start = j * size if run.slots_here % size else at
        carry = {n: put_into_carry(c, part[n], at, start) for n, c in carry.items()}
        positions, valid = body.places(j, size)
        k, v = expanded(view, decoded, positions if waves is None else waves(positions), body=True)
        if shared is not None:  # the decoded values then have no user and are never computed
            v = saturated(shared.read(view.weights, view.constants, payload, decoded)[:, :, None], v.dtype)
        return k, v, seen(view, tokens, positions, valid), carry

    return read, *body.blocks(size)


def put_into_carry(carry, part, at, start):
    """Put `part` into the carry [B, S, W] from slot `at` on. Slots below `start` hold theirs already and stay: the last
    block of a body may begin within the one before it."""
    part, size = saturated(part, carry.dtype), part.shape[1]
    if start is not at:
        old = jax.lax.dynamic_slice_in_dim(carry, at, size, 1)
        part = jnp.where((at + jnp.arange(size) < start)[None, :, None], old, part)
    return jax.lax.dynamic_update_slice_in_dim(carry, part, at, 1)
