"""Show the queries of a draft the tokens that fall due within it as they will be encoded (docs/design.md, idea 2)."""

import jax.numpy as jnp

from kvqjax.cache.encoding import Schedule, at_layer, encode_due, gather_tile
from kvqjax.cache.view import LayerView, NewTokens
from kvqjax.methods.layer_cache import Clock
from kvqjax.ops.finite import saturated

__all__ = ["recoded", "recoded_units"]


def recoded_units(unit: int, length: int) -> int:
    """Count the units of a clock that can fall due while `length` new tokens are appended, before the last of them
    attends."""
    return -(-(length - 1) // unit)


def recoded(view: LayerView, tokens: NewTokens, sources: dict, clock: Clock, flushed, carry: dict) -> tuple[dict, dict]:
    """Replace every unit of `sources` that may fall due among the new tokens by what its codes decode to, and give the
    carry [B, units, u, W] per name for the next layer. Units are encoded row by row and one by one, exactly as `commit`
    will encode them."""
    run, units = view.run, recoded_units(clock.unit, tokens.positions.shape[1])
    window = at_layer(view.state.window, view.layer)

    def one(_, row, token, slot, size, loop):
        (sources, carry), held = loop, tokens.held[row]
        unit = token // clock.unit - flushed[row]
        tile = {s: gather_tile(window[s], view.new[s], (), row, token, size, held, size) for s in clock.sources}
        part = {n: c[row, unit] for n, c in carry.items()}
        _, recon, part = run.wiring.maps.encode(view.constants, tile, part)
        index = token + jnp.arange(size)
        place = jnp.where(index < held, view.sinks + index % run.ring, view.sinks + run.ring + index - held)
        for s, x in recon.items():
            sources = {**sources, s: sources[s].at[row, place].set(saturated(x, sources[s].dtype), mode="drop")}
        return sources, {n: c.at[row, unit].set(saturated(part[n], c.dtype)) for n, c in carry.items()}

    # Numbers that XLA knows, so that a GPU's host need not ask for them.
    first = jnp.zeros_like(flushed)
    place = lambda row, number: ((flushed[row] + number) * clock.unit, None)  # noqa: E731
    schedule = Schedule(clock, first, first + units, place)
    return encode_due((schedule,), len(flushed), clock.unit, one, (sources, carry))
