"""Show the queries of a draft the tokens that fall due within it as they will be encoded (docs/design.md, idea 2).

A draft is several new tokens that one call verifies with `within="step"`. Each query must see what it would see if
tokens were decoded one by one. Some tokens would then have been encoded before a query attends, but the cache still
holds them exactly:

    window:  . . . . | draft:  q0  q1  q2  q3       q2 completes a unit: q3 sees the window's oldest unit as encoded

`recoded` encodes every unit that can fall due, and puts its reconstruction where its exact tokens are. The caller
(`attend_exact` in kvqjax/cache/attention.py) attends to the exact tokens and to the recoded ones, and a mask says for
each query which of the two it sees. Nothing is stored: `commit` encodes the same units to the same words."""

import jax.numpy as jnp

from kvqjax.cache.encoding import Schedule, at_layer, encode_due, gather_tile
from kvqjax.cache.view import LayerView, NewTokens
from kvqjax.methods.layer_cache import Clock
from kvqjax.ops.finite import saturated

__all__ = ["recoded", "recoded_units"]


def recoded_units(unit: int, length: int) -> int:
    """Count the units of a clock that can fall due while new tokens are appended, before the last of them attends.

    Args:
        unit: The clock's unit, in tokens.
        length: How many new tokens there are.

    Returns:
        The most units that can fall due. The last token is not counted: no query of the call comes after it."""
    return -(-(length - 1) // unit)


def recoded(view: LayerView, tokens: NewTokens, sources: dict, clock: Clock, flushed, carry: dict) -> tuple[dict, dict]:
    """Replace every unit that may fall due among the new tokens by what its codes decode to.

    Units are encoded row by row and one by one, exactly as `commit` will encode them.

    Args:
        view: The layer, and the sources of its new tokens.
        tokens: What all layers know of the new tokens.
        sources: Sinks, window slots and new tokens side by side, [B, N, W] per source (`side_by_side`).
        clock: The clock whose units are meant.
        flushed: How many units the clock has encoded in each row, [B].
        carry: What the layer below passed on for these units, [B, units, u, W] by name.

    Returns:
        (`sources` with the reconstructed tokens, the carry for the layer above)."""
    run, units = view.run, recoded_units(clock.unit, tokens.positions.shape[1])
    window = at_layer(view.state.window, view.layer)

    def recode_unit(_, row, token, slot, size, loop):
        """Encode the unit that begins with body token `token`; `loop` is (sources, carry)."""
        (sources, carry), body_length = loop, tokens.held[row]
        unit = token // clock.unit - flushed[row]  # among the units of the carry
        tile = {
            source: gather_tile(window[source], view.new[source], (), row, token, size, body_length, size)
            for source in clock.sources
        }
        tile_carry = {name: carried[row, unit] for name, carried in carry.items()}
        _, recon, tile_carry = run.wiring.maps.encode(view.constants, tile, tile_carry)
        index = token + jnp.arange(size)
        # Sinks come first, then the window's slots, then new tokens. A unit that may fall due can reach beyond the last
        # new token: what has no place is dropped.
        place = jnp.where(
            index < body_length, view.sinks + index % run.ring, view.sinks + run.ring + index - body_length
        )
        for source, x in recon.items():
            exact = sources[source]
            sources = {**sources, source: exact.at[row, place].set(saturated(x, exact.dtype), mode="drop")}
        new_carry = {}
        for name, carried in carry.items():
            new_carry[name] = carried.at[row, unit].set(saturated(tile_carry[name], carried.dtype))
        return sources, new_carry

    # Units are numbered from 0 on in every row: XLA then knows the loops' bounds, and a GPU's host need not ask for
    # them.
    first = jnp.zeros_like(flushed)
    # There is no slot: nothing is written to the body.
    place = lambda row, number: ((flushed[row] + number) * clock.unit, None)  # noqa: E731
    schedule = Schedule(clock, first, first + units, place)
    # With a unit as the bound of what is due, every tile is one unit.
    return encode_due((schedule,), len(flushed), clock.unit, recode_unit, (sources, carry))
