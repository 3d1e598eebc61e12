"""Which tokens a body keeps: all in their order, or those that eviction leaves (kvqjax/cache/eviction.py). Whoever
writes or reads a body asks here.

    before a body is written    schedules_of     tokens are appended to a cache
                                entering         an exact prefill fills an empty cache
    before a body is read       read_as          what queries must know of an evicting body
                                no_mass          the attention mass with which a call begins: zero

A schedule lists the units that are encoded and the body slots that they are written to. `kept` is the bookkeeping of
evicted tokens (`Cache.kept`): the position of each body slot's token and, with keep=h2o, attention masses (what all
queries so far gave a group or a window slot). It is empty where nothing is evicted, and where there is no body."""

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
    """Schedule what is encoded when pending tokens are appended.

    Args:
        cache: The cache before the call.
        pending: The new tokens [L, B, T, W] per source, for each run; after them the attention mass of the call, where
            tokens are kept by it.
        counts: How many of the T tokens each row takes.

    Returns:
        A function from the runs of a chain and the state of one of them to their schedules, one for each clock. Then
        `kept` after the call."""
    body_lengths = cache.lengths - cache.layout.method.sinks
    length = next(iter(pending[0].values())).shape[2]

    def all_units(runs: Sequence[RunLayout], state: Run) -> tuple[Schedule, ...]:
        due_units = zip(
            runs[0].wiring.storage.clocks, state.flushed, units_due(runs[0], state, body_lengths + counts), strict=True
        )
        return tuple(in_order(clock, first, stop, runs, length) for clock, first, stop in due_units)

    keep = cache.layout.method.keep
    if keep is None or not cache.kept:
        return all_units, cache.kept
    # A row keeps the same tokens in all layers, so that one choice is the schedule of every chain.
    moves, kept = _moves(cache, keep.rule, pending, body_lengths, counts)

    def moved_units(runs: Sequence[RunLayout], _: Run) -> tuple[Schedule, ...]:
        clock = runs[0].wiring.storage.clocks[0]
        # The schedule numbers the moves, not the units: a unit that loses against the body's is never encoded.
        place = lambda row, move: (moves.unit[row, move] * clock.unit, moves.slot[row, move])  # noqa: E731
        return (Schedule(clock, jnp.zeros_like(moves.count), moves.count, place),)

    return moved_units, kept


def _moves(cache: Cache, rule: str, pending: tuple, body_lengths, counts) -> tuple[Moves, Kept]:
    """Choose the body slots of the units that leave the window.

    Args:
        cache: The cache before the call.
        rule: The rule of `keep`.
        pending: As in `schedules_of`.
        body_lengths: How many body tokens each row held before the call, [B].
        counts: How many of the new tokens each row takes, [B].

    Returns:
        (the moves of these units, `kept` after the call)."""
    # The first run stands for all: with eviction all layers have one window and one unit.
    run, flushed = runs_of(cache.layout)[0], cache.runs[0].flushed[0]
    clock, length = run.wiring.storage.clocks[0], next(iter(pending[0].values())).shape[2]
    # So many units at most are completed by `length` new tokens, wherever the first of them stands in its unit.
    most = (length + clock.unit - 1) // clock.unit
    # After the sources of all runs comes the mass, unless the caller has none.
    call = pending[-1] if len(pending) > len(cache.runs) else None
    end, sinks = body_lengths + counts, cache.layout.method.sinks
    window, target = window_tokens(run.ring, end), due(clock, end, flushed)
    return enter(rule, cache.kept, call, body_lengths, window, flushed, target, most, clock.unit, sinks)


class Entering(NamedTuple):
    """Say which tokens of a fresh prompt are encoded, and which stay exact.

    Attributes:
        held: Which body token the first of the picked tokens is, [B].
        schedules: `schedules(runs, state)` lists the units of the picked tokens.
        sources: `sources(new)` picks R of the prompt's T tokens, among them all that are encoded: [B, R, W] of
            [B, T, W].
        rest: `rest(new, encoded)` gives the prompt's tokens [B, T, W] that sinks and window take theirs from.
            `encoded` are the picked tokens as they are after encoding.
        length: R.
        kept: The bookkeeping of evicted tokens after the prompt."""

    held: Int[Array, " B"]
    schedules: Schedules
    sources: Callable[[dict], dict]
    rest: Callable[[dict, dict], dict]
    length: int
    kept: Kept


def entering(cache: Cache, counts: Int[Array, " B"], mass: Callable[[], Float[Array, "B T"]], length: int) -> Entering:
    """Choose the tokens of a fresh prompt that enter the body.

    Args:
        cache: An empty cache.
        counts: How many of the prompt's tokens are valid in each row.
        mass: Gives the softmax weights that each token received, summed. It runs all layers, and is called only by
            rules that choose by these weights.
        length: T, how many tokens the prompt has, those that are not valid included.

    Returns:
        The choice."""
    sinks, empty = cache.layout.method.sinks, jnp.zeros_like(counts)

    def all_units(runs: Sequence[RunLayout], state: Run) -> tuple[Schedule, ...]:
        parts = zip(runs[0].wiring.storage.clocks, units_due(runs[0], state, counts - sinks), strict=True)
        return tuple(in_order(clock, empty, stop, runs, length) for clock, stop in parts)

    keep = cache.layout.method.keep
    if keep is None or not cache.kept:
        # Prompt token 0 is body token -sinks. Sinks and window come from the tokens after encoding, because a key that
        # is encoded before its value stays in the window as it was reconstructed.
        return Entering(empty - sinks, all_units, lambda new: new, lambda new, encoded: encoded, length, cache.kept)
    run = runs_of(cache.layout)[0]
    clock, window = run.wiring.storage.clocks[0], window_tokens(run.ring, counts - sinks)
    leaving = due(clock, counts - sinks, empty) * clock.unit
    # Streaming reads the shape of the mass alone.
    masses = mass() if keep.rule == "h2o" else jnp.zeros((len(counts), length))
    chosen, kept = choose(keep.rule, cache.kept, masses, leaving, window, clock.unit, sinks)

    def pick(new: dict) -> dict:
        return {name: jnp.take_along_axis(x, chosen.token[:, :, None], 1) for name, x in new.items()}

    def fresh(runs: Sequence[RunLayout], _: Run) -> tuple[Schedule, ...]:
        run_clock = runs[0].wiring.storage.clocks[0]
        return (in_order(run_clock, empty, chosen.units, runs, chosen.token.shape[1]),)

    # The picked tokens are numbered from 0 and go to the body's first slots in their order. Sinks and window take the
    # prompt's own tokens: with eviction there is one clock, and encoding changes none of them.
    return Entering(empty, fresh, pick, lambda new, encoded: new, chosen.token.shape[1], kept)


def no_mass(kept: Kept, sinks: int, length: int) -> Received | None:
    """Return zero attention mass for `length` new tokens, or None for rules that need no mass."""
    if "mass" not in kept:
        return None
    batch, ring = kept["recent"].shape
    return Received(jnp.zeros((batch, sinks + ring + length)), jnp.zeros(kept["positions"].shape))


def read_as(cache: Cache, positions: Int[Array, "B T"], within: str) -> dict[str, jax.Array]:
    """Say how queries of new tokens must read an evicting body.

    Args:
        cache: The cache before the call.
        positions: The positions of the new tokens.
        within: What new tokens see of each other, "chunk" or "step".

    Returns:
        Fields of `NewTokens`: `stored`, the position of each body slot's token, and for a draft ("step") `oldest`, the
        first position that each query may see. Empty where nothing is evicted.

    Raises:
        UserError: A draft whose tokens are kept by their attention mass."""
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
    # So many units are encoded when the row holds the tokens before the query. Decoding one by one would then have the
    # newest `budget` of their tokens in the body.
    units = due(clock, positions - sinks, cache.runs[0].flushed[0][:, None])
    return {"stored": cache.kept["positions"], "oldest": units * clock.unit - run.budget + sinks}
