"""One layer's attention: to the tokens that are held exactly (sinks, window, new ones), to the body by a reader
(kvqjax/cache/readers/), and their merge."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvqjax.cache.eviction import Received, received
from kvqjax.cache.readers.blocks import attend_by_blocks, body_blocks
from kvqjax.cache.readers.decoded import attend_decoded
from kvqjax.cache.readers.kernel import attend_by_kernel, attend_with_recent
from kvqjax.cache.readers.reader import Attend, BodyCall, Carry
from kvqjax.cache.readers.stored import attend_stored
from kvqjax.cache.readers.tiles import SPLASH_KINDS, attend_in_tiles, attend_segment
from kvqjax.cache.reading import Ask, reader_of, reader_without_kernel, reads_pages, shared_values, takes_recent
from kvqjax.cache.recoding import recoded
from kvqjax.cache.run_layout import MANY_QUERIES
from kvqjax.cache.state import due
from kvqjax.cache.view import LayerView, NewTokens, expanded, side_by_side, with_own_body
from kvqjax.ops.attention import Partial, ScoreOptions, merge_over, merged, segment_attention, with_sinks

__all__ = ["attend_body", "attend_exact", "attend_tokens", "received_by_tokens"]


def attend_tokens(
    q: Float[Array, "B T H D"],
    view: LayerView,
    tokens: NewTokens,
    options: ScoreOptions,
    recode: bool,
    tile: Carry,
    body: Carry,
) -> tuple[Partial, Carry, Carry]:
    """Attend to all tokens of a layer.

    Args:
        q: Queries with their rotation, and without the D^-1/2.
        recode: As in `attend_exact`.
        tile, body: What flows in from the layer below: of the tokens that fall due in this call, and of the body's.

    Returns:
        (attention, `tile` and `body` for the layer above)."""
    # The kernel of exact bodies takes new tokens in their order alone.
    if tokens.mask is None and takes_recent(ask_of(q, view, tokens, options.softcap), view.sinks):
        without_kernel = lambda: _attend_parts(q, view, tokens, options.softcap, recode, {}, {})[0]  # noqa: E731
        partial = attend_with_recent(q, view, tokens, without_kernel)
    else:
        partial, tile, body = _attend_parts(q, view, tokens, options.softcap, recode, tile, body)
    return with_sinks(partial, options.sinks), tile, body


def _attend_parts(
    q, view: LayerView, tokens: NewTokens, softcap: float | None, recode: bool, tile: Carry, body: Carry
) -> tuple[Partial, Carry, Carry]:
    """Attend to the exact tokens and to the body, and merge both."""
    parts, tile = attend_exact(q, view, tokens, recode and view.run.slots > 0, tile, softcap)
    if view.run.slots:
        part, body = attend_body(q, view, tokens, body, softcap)
        parts.append(merge_over(part, view.run.deal.axes))
    return merged(*parts), tile, body


def attend_exact(
    q, view: LayerView, tokens: NewTokens, recode: bool, carry: Carry, softcap: float | None = None
) -> tuple[list[Partial], Carry]:
    """Attend to the tokens that are held exactly. With `recode`, a token that decoding one by one would have encoded
    before query t is shown to query t as encoded (docs/design.md, idea 2); `carry` then flows from layer to layer for
    those."""
    run = view.run
    sources, positions, mask = side_by_side(view, tokens)

    def part(sources, mask):
        k, v = expanded(view, sources, positions)
        return segment_attention(q, k, v, mask, softcap)

    # By splash attention a query sees consecutive keys, which a mask of new tokens need not be.
    if not recode and run.tiles in SPLASH_KINDS and q.shape[1] >= MANY_QUERIES and tokens.mask is None:
        k, v = expanded(view, sources, positions)
        old = k.shape[1] - q.shape[1]
        new = attend_segment(q, k[:, old:], v[:, old:], mask[:, :, old:], run.tiles, softcap)
        return [segment_attention(q, k[:, :old], v[:, :old], mask[:, :, :old], softcap), new], carry
    if not recode:
        return [part(sources, mask)], carry
    parts, index = [], (positions - view.sinks)[:, None, :]
    for clock, flushed in zip(run.wiring.storage.clocks, view.state.flushed, strict=True):
        encoded = due(clock, tokens.positions - view.sinks, flushed[:, None]) * clock.unit
        leaving = (index >= 0) & (index < encoded[:, :, None])
        parts.append(part(sources, mask & ~leaving))
        sources, carry = recoded(view, tokens, sources, clock, flushed, carry)
        mask = mask & leaving
    return [*parts, part(sources, mask)], carry


def _attend_by(reader: str, call: BodyCall, carry: Carry) -> tuple[Partial, Carry]:
    """Attend by this reader, from pages that lie side by side where it wants a row's body as a whole."""
    if call.view.run.page and not reads_pages(reader, call.ask):
        view = with_own_body(call.view)
        call = call._replace(view=view, ask=call.ask._replace(run=view.run))
    return ATTEND[reader](call, carry)


def _attend_without_kernel(call: BodyCall, carry: Carry) -> tuple[Partial, Carry]:
    return _attend_by(reader_without_kernel(call.ask), call, carry)


ATTEND: dict[str, Attend] = {
    "kernel": lambda call, carry: attend_by_kernel(call, carry, _attend_without_kernel),
    "stored": attend_stored,
    "decoded": attend_decoded,
    "tiles": attend_in_tiles,
    "blocks": attend_by_blocks,
}


def ask_of(q, view: LayerView, tokens: NewTokens, softcap: float | None = None) -> Ask:
    """Say what is known of a layer's attention to its body."""
    dtype = next(iter(view.new.values())).dtype.name
    return Ask(view.run, q.shape[1], evicted=tokens.stored is not None, softcap=softcap, dtype=dtype)


def attend_body(
    q, view: LayerView, tokens: NewTokens, carry: Carry, softcap: float | None = None
) -> tuple[Partial, Carry]:
    """Attend to the encoded tokens of one layer that lie here.

    Args:
        q: [B, T, H, D] queries with their rotation, and without the D^-1/2.
        carry: What the layer below reconstructed of every body token, [B, slots_here, W] per name; this layer's takes
            its place in what is returned."""
    ask = ask_of(q, view, tokens, softcap)
    shared = shared_values(ask)
    frame = view.run.wiring.maps.frame
    if frame is not None:  # once for all of the body, here and at the end
        q = frame.queries(view.constants, q)
    partial, carry = _attend_by(reader_of(ask), BodyCall(ask, q, view, tokens, shared), carry)
    if shared is not None:
        partial = partial._replace(out=shared.finish(view.weights, view.constants, partial.out))
    if frame is not None:
        partial = partial._replace(out=frame.outputs(view.constants, partial.out))
    return partial, carry


def received_by_tokens(
    q, view: LayerView, tokens: NewTokens, lse, carry: Carry, softcap: float | None = None
) -> Received:
    """Sum the softmax weights that the valid queries gave each token, in a second pass over the scores with the known
    log-sum-exp `lse`. `carry` is what `attend_tokens` was given of the body."""
    valid = (jnp.arange(q.shape[1])[None] < tokens.counts[:, None])[:, :, None]
    sources, positions, mask = side_by_side(view, tokens)
    k, _ = expanded(view, sources, positions)
    exact = received(q, k, mask & valid, lse, softcap)
    read_block, first, last = body_blocks(view, tokens, view.run.reading)
    frame = view.run.wiring.maps.frame
    turned = q if frame is None else frame.queries(view.constants, q)

    def step(j, loop):
        body, carry = loop
        k, _, mask, carry = read_block(j, carry)
        part = received(turned, k, mask & valid, lse, softcap)
        return jax.lax.dynamic_update_slice_in_dim(body, part, j * view.run.reading, 1), carry

    body = jnp.zeros((q.shape[0], view.run.slots))
    body, _ = jax.lax.fori_loop(first, last, step, (body, carry))
    return Received(exact, body[:, : tokens.stored.shape[1]])
