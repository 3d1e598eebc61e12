"""One layer's attention to its part of a cache and to the new tokens.

attend_tokens       all tokens of a layer, in one of two ways:
  attend_with_recent  one kernel attends to all of them (exact bodies on TPUs and Hopper GPUs)
  _attend_parts       the parts are attended to apart and merged by log-sum-exp (docs/design.md, idea 1):
    attend_exact        sinks, window and new tokens
    attend_body         the encoded tokens, by one of the readers in kvqjax/cache/readers/

Drafts. A draft is several new tokens that one call verifies with `within="step"`. Each query must
see what it would see if tokens were decoded one by one. Some tokens would then have been encoded
before a query attends, but the cache still holds them exactly:

    window:  . . . . | draft:  q0  q1  q2  q3       q2 completes a unit: q3 sees the window's oldest unit as encoded

`encoded_in_draft` encodes every unit that can fall due, and puts its reconstruction where its exact
tokens are. `attend_exact` attends to the exact tokens and to the encoded ones, and a mask says for
each query which of the two it sees. Nothing is stored: `commit` encodes the same units to the same
words."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvqjax.cache.append import Schedule, at_layer, encode_due, gather_tile
from kvqjax.cache.layout import (
    MANY_QUERIES,
    Ask,
    reader_of,
    reader_without_kernel,
    reads_pages,
    shared_values,
    takes_recent,
)
from kvqjax.cache.readers.blocks import attend_by_blocks
from kvqjax.cache.readers.coefficients import attend_by_coefficients
from kvqjax.cache.readers.decoded import attend_decoded
from kvqjax.cache.readers.kernel import attend_by_kernel, attend_with_recent
from kvqjax.cache.readers.stored import attend_stored
from kvqjax.cache.readers.tiles import SPLASH_KINDS, attend_in_tiles, attend_segment
from kvqjax.cache.state import due
from kvqjax.cache.view import (
    Attend,
    BodyCall,
    Carry,
    LayerView,
    NewTokens,
    expanded,
    side_by_side,
    with_own_body,
)
from kvqjax.methods.layer_cache import Clock
from kvqjax.ops.attention import (
    Partial,
    merge_over,
    merged,
    segment_attention,
    with_sinks,
)
from kvqjax.ops.finite import saturated


def attend_tokens(
    q: Float[Array, "B T H D"],
    view: LayerView,
    tokens: NewTokens,
    recode: bool,
    tile: Carry,
    body: Carry,
    sinks: Float[Array, " H"] | None = None,
) -> tuple[Partial, Carry, Carry]:
    """Attend to all tokens of a layer.

    Args:
        q: The queries, rotated by RoPE, and not yet multiplied by D^-1/2.
        recode: As in `attend_exact`.
        tile: The layer below's carry of the tokens that fall due in this call, [B, units, u, W] by
            name.
        body: The layer below's carry of the body's tokens, [B, slots_here, W] by name.
        sinks: A logit of each query head (`with_sinks`); None: there are none.

    Returns:
        (attention, this layer's `tile`, this layer's `body`)."""
    # The kernel of exact bodies knows no masks of new tokens.
    if tokens.mask is None and takes_recent(ask_of(q, view, tokens), view.sinks):
        # Exact bodies pass nothing on to the layer above, so that both carries are empty.
        def without_kernel():
            return _attend_parts(q, view, tokens, recode, {}, {})[0]

        partial = attend_with_recent(q, view, tokens, without_kernel)
    else:
        partial, tile, body = _attend_parts(q, view, tokens, recode, tile, body)
    return with_sinks(partial, sinks), tile, body


def _attend_parts(
    q,
    view: LayerView,
    tokens: NewTokens,
    recode: bool,
    tile: Carry,
    body: Carry,
) -> tuple[Partial, Carry, Carry]:
    """Attend to the exact tokens and to the body, and merge both. Arguments and result are those of
    `attend_tokens`."""
    # Without a body nothing is ever encoded, and so nothing is shown as encoded.
    parts, tile = attend_exact(q, view, tokens, recode and view.run.slots > 0, tile)
    if view.run.slots:
        part, body = attend_body(q, view, tokens, body)
        # Each device has attended to its own blocks of the body.
        parts.append(merge_over(part, view.run.deal.axes))
    return merged(*parts), tile, body


def attend_exact(
    q, view: LayerView, tokens: NewTokens, recode: bool, carry: Carry
) -> tuple[list[Partial], Carry]:
    """Attend to the tokens that the layer holds exactly: sinks, window and new tokens.

    Args:
        q: The queries, as in `attend_tokens`.
        recode: Whether query t sees a token as encoded if decoding one token at a time would have
            encoded it before query t (docs/design.md, idea 2).
        carry: With `recode`, the layer below's carry of the tokens that fall due in this call.

    Returns:
        (attention to disjoint sets of these tokens, which are to be merged; this layer's carry)."""
    run, softcap = view.run, view.run.shape.softcap
    sources, positions, mask = side_by_side(view, tokens)

    def part(sources, mask):
        k, v = expanded(view, sources, positions)
        return segment_attention(q, k, v, mask, softcap)

    # Splash attention shows a query consecutive keys. Those that a mask of new tokens shows need
    # not be consecutive.
    if (
        not recode
        and run.tiles in SPLASH_KINDS
        and q.shape[1] >= MANY_QUERIES
        and tokens.mask is None
    ):
        k, v = expanded(view, sources, positions)
        old_tokens = k.shape[1] - q.shape[1]  # sinks and window slots, which come first
        new = attend_segment(
            q, k[:, old_tokens:], v[:, old_tokens:], mask[:, :, old_tokens:], run.tiles, softcap
        )
        old = segment_attention(
            q, k[:, :old_tokens], v[:, :old_tokens], mask[:, :, :old_tokens], softcap
        )
        return [old, new], carry
    if not recode:
        return [part(sources, mask)], carry
    # Clocks encode one after the other, keys first. In turn n, `mask` has the tokens that the
    # clocks before n have encoded for a query, and `sources` shows these as encoded by those
    # clocks. A query sees a token in the turn of the first clock that has not encoded it for this
    # query.
    parts = []
    index = (positions - view.sinks)[:, None, :]  # numbers of body tokens, [B, 1, N]
    for clock, flushed in zip(run.wiring.storage.clocks, view.state.flushed, strict=True):
        # How many body tokens the clock has encoded when the row holds the tokens before each
        # query, [B, T].
        encoded = due(clock, tokens.positions - view.sinks, flushed[:, None]) * clock.unit
        leaving = (index >= 0) & (index < encoded[:, :, None])
        parts.append(part(sources, mask & ~leaving))
        sources, carry = encoded_in_draft(view, tokens, sources, clock, flushed, carry)
        mask = mask & leaving
    return [*parts, part(sources, mask)], carry


def _attend_by(reader: str, call: BodyCall, carry: Carry) -> tuple[Partial, Carry]:
    """Attend to the body by a reader. Pages are put side by side for readers that take a row's body
    as a whole."""
    if call.view.run.page and not reads_pages(reader, call.ask):
        view = with_own_body(call.view)
        call = call._replace(view=view, ask=call.ask._replace(run=view.run))
    return ATTEND[reader](call, carry)


def _attend_without_kernel(call: BodyCall, carry: Carry) -> tuple[Partial, Carry]:
    """Attend to the body by the reader that stands in for `kernel` (`reader_without_kernel`)."""
    return _attend_by(reader_without_kernel(call.ask), call, carry)


ATTEND: dict[str, Attend] = {
    "kernel": lambda call, carry: attend_by_kernel(call, carry, _attend_without_kernel),
    "stored": attend_stored,
    "coefficients": attend_by_coefficients,
    "decoded": attend_decoded,
    "tiles": attend_in_tiles,
    "blocks": attend_by_blocks,
}


def ask_of(q, view: LayerView, tokens: NewTokens) -> Ask:
    """Collect what decides which reader attends to a layer's body."""
    dtype = next(iter(view.new.values())).dtype.name
    return Ask(view.run, q.shape[1], evicted=tokens.stored is not None, dtype=dtype)


def attend_body(q, view: LayerView, tokens: NewTokens, carry: Carry) -> tuple[Partial, Carry]:
    """Attend to the encoded tokens of one layer that lie on this device.

    Args:
        q: The queries [B, T, H, D], rotated by RoPE, and not yet multiplied by D^-1/2.
        carry: The layer below's carry of every body token, [B, slots_here, W] by name.

    Returns:
        (attention to the body, this layer's carry)."""
    ask = ask_of(q, view, tokens)
    shared = shared_values(ask)
    frame = view.run.wiring.maps.frame
    # A rotated body is never rotated back. Queries go into its frame here, outputs come out of it
    # below.
    if frame is not None:
        q = frame.queries(view.constants, q)
    partial, carry = _attend_by(reader_of(ask), BodyCall(ask, q, view, tokens, shared), carry)
    if shared is not None:
        partial = partial._replace(out=shared.finish(view.weights, view.constants, partial.out))
    if frame is not None:
        partial = partial._replace(out=frame.outputs(view.constants, partial.out))
    return partial, carry


def draft_units(unit: int, length: int) -> int:
    """Count the units of a clock that can fall due while new tokens are appended, before the last
    of them attends.

    Args:
        unit: The clock's unit, in tokens.
        length: How many new tokens there are.

    Returns:
        The most units that can fall due. The last token is not counted: no query of the call comes
        after it."""
    return -(-(length - 1) // unit)


def encoded_in_draft(
    view: LayerView, tokens: NewTokens, sources: dict, clock: Clock, flushed, carry: dict
) -> tuple[dict, dict]:
    """Replace every unit that may fall due among the new tokens by what its codes decode to.

    Units are encoded row by row and one by one, exactly as `commit` will encode them.

    Args:
        sources: Sinks, window slots and new tokens side by side, [B, N, W] per source
            (`side_by_side`).
        clock: The clock whose units are meant.
        flushed: How many units the clock has encoded in each row, [B].
        carry: What the layer below passed on for these units, [B, units, u, W] by name.

    Returns:
        (`sources` with the reconstructed tokens, the carry for the layer above)."""
    run, units = view.run, draft_units(clock.unit, tokens.positions.shape[1])
    window = at_layer(view.state.window, view.layer)

    def recode_unit(_, row, token, slot, size, loop):
        """Encode the unit that begins with body token `token`; `loop` is (sources, carry)."""
        (sources, carry), body_length = loop, tokens.body_lengths[row]
        unit = token // clock.unit - flushed[row]  # among the units of the carry
        tile = {
            source: gather_tile(
                window[source], view.new[source], (), row, token, size, body_length, size
            )
            for source in clock.sources
        }
        tile_carry = {name: carried[row, unit] for name, carried in carry.items()}
        _, recon, tile_carry = run.wiring.maps.encode(view.constants, tile, tile_carry)
        index = token + jnp.arange(size)
        # Sinks come first, then the window's slots, then new tokens. A unit that may fall due can
        # reach beyond the last new token: what has no place is dropped.
        place = jnp.where(
            index < body_length,
            view.sinks + index % run.ring,
            view.sinks + run.ring + index - body_length,
        )
        for source, x in recon.items():
            exact = sources[source]
            sources = {
                **sources,
                source: exact.at[row, place].set(saturated(x, exact.dtype), mode="drop"),
            }
        new_carry = {}
        for name, carried in carry.items():
            new_carry[name] = carried.at[row, unit].set(saturated(tile_carry[name], carried.dtype))
        return sources, new_carry

    # Units are numbered from 0 on in every row: XLA then knows the loops' bounds, and a GPU's host
    # need not ask for them.
    first = jnp.zeros_like(flushed)

    # There is no slot: nothing is written to the body.
    def place(row, number):
        return ((flushed[row] + number) * clock.unit, None)

    schedule = Schedule(clock, first, first + units, place)
    # With a unit as the bound of what is due, every tile is one unit.
    return encode_due((schedule,), len(flushed), clock.unit, recode_unit, (sources, carry))
