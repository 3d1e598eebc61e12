"""Which tokens a body keeps: all in their order, or those that eviction leaves (kvqjax/cache/eviction.py). Whoever
writes or reads a body asks here."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvqjax._errors import UserError
from kvqjax.cache.encoding import Schedule, in_order
from kvqjax.cache.eviction import Kept, Moves, Received, choose, enter
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, Run, due, units_due, window_tokens

__all__ = ["Entering", "entering", "no_mass", "read_as", "schedules_of"]

Schedules = Callable[[Sequence[RunLayout], Run], tuple[Schedule, ...]]


def schedules_of(cache: Cache, pending: tuple, counts: Int[Array, " B"]) -> tuple[Schedules, Kept]:
    """Schedule what is encoded when `counts[b]` of the pending tokens are appended. Returns a function from a chain's
    runs and state to their schedules, and the bookkeeping of evicted tokens after the call."""
    held = cache.lengths - cache.layout.method.sinks

    length = next(iter(pending[0].values())).shape[2]

    def every(runs: Sequence[RunLayout], state: Run) -> tuple[Schedule, ...]:
        parts = zip(runs[0].wiring.storage.clocks, state.flushed, units_due(runs[0], state, held + counts), strict=True)
        return tuple(in_order(c, first, stop, runs, length) for c, first, stop in parts)

    keep = cache.layout.method.keep
    if keep is None or not cache.kept:
        return every, cache.kept
    moves, kept = _moves(cache, keep.rule, pending, held, counts)

    def moved(runs: Sequence[RunLayout], _: Run) -> tuple[Schedule, ...]:
        clock = runs[0].wiring.storage.clocks[0]
        place = lambda row, i: (moves.unit[row, i] * clock.unit, moves.slot[row, i])  # noqa: E731
        return (Schedule(clock, jnp.zeros_like(moves.count), moves.count, place),)

    return moved, kept


def _moves(cache: Cache, rule: str, pending: tuple, held, counts) -> tuple[Moves, Kept]:
    """Choose the body slots of the units that leave the window. Returns their moves and the bookkeeping afterwards."""
    run, flushed = runs_of(cache.layout)[0], cache.runs[0].flushed[0]
    clock, length = run.wiring.storage.clocks[0], next(iter(pending[0].values())).shape[2]
    most = (length + clock.unit - 1) // clock.unit
    call = pending[-1] if len(pending) > len(cache.runs) else None
    end, sinks = held + counts, cache.layout.method.sinks
    window, target = window_tokens(run.ring, end), due(clock, end, flushed)
    return enter(rule, cache.kept, call, held, window, flushed, target, most, clock.unit, sinks)


class Entering(NamedTuple):
    """Say which tokens of a fresh prompt are encoded, and which stay exact.

    `sources(new)` picks the R tokens that are encoded out of the prompt's T: [B, R, W] of [B, T, W]. The first of them
    is body token `held[b]`, and `schedules(runs, state)` lists their units. `rest(new, encoded)` gives the prompt's
    tokens that sinks and window keep, where `encoded` are `sources(new)` after encoding."""

    held: Int[Array, " B"]
    schedules: Schedules
    sources: Callable[[dict], dict]
    rest: Callable[[dict, dict], dict]
    length: int
    kept: Kept


def entering(cache: Cache, counts: Int[Array, " B"], mass: Callable[[], Float[Array, "B T"]], length: int) -> Entering:
    """Choose the tokens that enter the body, of a prompt of `length` tokens with `counts[b]` valid ones. `mass()` gives
    the softmax weights that each token received, summed; it is called only by rules that choose by them."""
    sinks, empty = cache.layout.method.sinks, jnp.zeros_like(counts)

    def every(runs: Sequence[RunLayout], state: Run) -> tuple[Schedule, ...]:
        parts = zip(runs[0].wiring.storage.clocks, units_due(runs[0], state, counts - sinks), strict=True)
        return tuple(in_order(clock, empty, stop, runs, length) for clock, stop in parts)

    keep = cache.layout.method.keep
    if keep is None or not cache.kept:
        return Entering(empty - sinks, every, lambda new: new, lambda new, encoded: encoded, length, cache.kept)
    run = runs_of(cache.layout)[0]
    clock, window = run.wiring.storage.clocks[0], window_tokens(run.ring, counts - sinks)
    leaving = due(clock, counts - sinks, empty) * clock.unit
    given = mass() if keep.rule == "h2o" else jnp.zeros((len(counts), length))
    chosen, kept = choose(keep.rule, cache.kept, given, leaving, window, clock.unit, sinks)

    def picked(new: dict) -> dict:
        return {name: jnp.take_along_axis(x, chosen.token[:, :, None], 1) for name, x in new.items()}

    def fresh(runs: Sequence[RunLayout], _: Run) -> tuple[Schedule, ...]:
        own = runs[0].wiring.storage.clocks[0]
        return (in_order(own, empty, chosen.units, runs, chosen.token.shape[1]),)

    return Entering(empty, fresh, picked, lambda new, encoded: new, chosen.token.shape[1], kept)


def no_mass(kept: Kept, sinks: int, length: int) -> Received | None:
    """Return zero attention mass for `length` new tokens, or None for rules that need no mass."""
    if "mass" not in kept:
        return None
    batch, ring = kept["recent"].shape
    return Received(jnp.zeros((batch, sinks + ring + length)), jnp.zeros(kept["positions"].shape))


def read_as(cache: Cache, positions: Int[Array, "B T"], within: str) -> dict[str, jax.Array]:
    """Return `stored` and `oldest` of `NewTokens`: the positions in the body, and the first that each query of a draft
    may see."""
    if not cache.kept:
        return {}
    if within == "chunk" or positions.shape[1] == 1:
        return {"stored": cache.kept["positions"]}
    if "mass" in cache.kept:
        raise UserError(
            "keep=h2o drops tokens by what every earlier query attended to, so a draft cannot be verified at once; "
            "with keep=streaming it can"
        )
    run, sinks = runs_of(cache.layout)[0], cache.layout.method.sinks
    clock = run.wiring.storage.clocks[0]
    units = due(clock, positions - sinks, cache.runs[0].flushed[0][:, None])
    return {"stored": cache.kept["positions"], "oldest": units * clock.unit - run.budget + sinks}
