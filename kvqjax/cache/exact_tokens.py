"""One layer's attention to the tokens that are held exactly: sinks, window and new ones."""

import jax
import jax.numpy as jnp

from kvqjax.cache.append import gather_tile, pick
from kvqjax.cache.chunk_paths import MANY_QUERIES, attend_segment
from kvqjax.cache.state import due
from kvqjax.cache.view import LayerView, NewTokens, expanded, seen, side_by_side
from kvqjax.ops.attention import Partial, segment_attention
from kvqjax.ops.finite import saturated

__all__ = ["attend_exact", "recoded_units"]


def recoded_units(unit: int, length: int) -> int:
    """How many units of a clock can fall due while `length` new tokens are appended, before the last of them
    attends."""
    return -(-(length - 1) // unit)


def _recode(view: LayerView, tokens: NewTokens, sources, clock, flushed, carry):
    """`sources` with every unit of the clock that may fall due inside the new tokens replaced by what a reader will
    see. Tiles are encoded one row and unit at a time, exactly as `commit` will. `carry` is [B, units, u, W] per
    name."""
    run, length = view.run, tokens.positions.shape[1]
    units = recoded_units(clock.unit, length)
    window = pick(view.state.window, view.layer)

    def one(index, loop):
        sources, carry = loop
        row, unit = index // units, index % units
        token = (flushed[row] + unit) * clock.unit
        held = tokens.held[row]
        tile = {s: gather_tile(window[s], view.new[s], (), row, token, clock.unit, held) for s in clock.sources}
        part = {n: c[row, unit] for n, c in carry.items()}
        _, recon, part = run.wiring.maps.encode(view.constants, tile, part)
        index = token + jnp.arange(clock.unit)
        place = jnp.where(index < held, view.sinks + index % run.ring, view.sinks + run.ring + index - held)
        for s, x in recon.items():
            sources = {**sources, s: sources[s].at[row, place].set(saturated(x, sources[s].dtype), mode="drop")}
        return sources, {n: c.at[row, unit].set(saturated(part[n], c.dtype)) for n, c in carry.items()}

    return jax.lax.fori_loop(0, tokens.counts.shape[0] * units, one, (sources, carry))


def attend_exact(q, view: LayerView, tokens: NewTokens, recode: bool, carry: dict) -> tuple[list[Partial], dict]:
    """Attention to the tokens that are held exactly. With `recode`, a token that decoding one by one would have
    encoded before query t is shown to query t as encoded (docs/design.md, idea 2); `carry` then flows from layer to
    layer for those."""
    run = view.run
    sources, positions, valid = side_by_side(view, tokens)
    mask = seen(view, tokens, positions, valid)

    def part(sources, mask):
        k, v = expanded(view, sources, positions)
        return segment_attention(q, k, v, mask)

    if not recode and view.chunks in ("splash", "interpret") and q.shape[1] >= MANY_QUERIES:
        k, v = expanded(view, sources, positions)
        kept = k.shape[1] - q.shape[1]
        new = attend_segment(q, k[:, kept:], v[:, kept:], mask[:, :, kept:], view.chunks)
        return [segment_attention(q, k[:, :kept], v[:, :kept], mask[:, :, :kept]), new], carry
    if not recode:
        return [part(sources, mask)], carry
    parts, index = [], (positions - view.sinks)[:, None, :]
    for clock, flushed in zip(run.wiring.storage.clocks, view.state.flushed, strict=True):
        encoded = due(clock, tokens.positions - view.sinks, flushed[:, None]) * clock.unit
        left = (index >= 0) & (index < encoded[:, :, None])
        parts.append(part(sources, mask & ~left))
        sources, carry = _recode(view, tokens, sources, clock, flushed, carry)
        mask = mask & left
    return [*parts, part(sources, mask)], carry
