"""Token eviction, an option of every method (`keep=streaming:512`, kvqjax.methods.spec).

The body of a row then holds at most `budget` tokens: the newest that have left the window. They lie
in groups as long as the clock's unit. A group that arrives without room takes the slots of the
group whose tokens are the oldest.

    cache.kept = {"positions": [B, N]}    the position of the token in each of N body slots; -1: an empty slot

    enter                the body slots of the units that leave the window
    newest_of_prompt     the tokens of a fresh prompt that enter the body
    read_as              what queries must know of such a body
    crop_kept, forget    the bookkeeping of rows that are cut or emptied

`kept` is empty where nothing is evicted, and where a cache has no body. Every other module asks for
that first.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, due

Kept = dict  # name -> array, see the module


class Moves(NamedTuple):
    """Where units that leave the window go.

    `count[b]` units of row b move: number `unit[b, i]` to body slot `slot[b, i]`. There is room for
    U moves. Those from `count[b]` on mean nothing."""

    unit: Int[Array, "B U"]
    slot: Int[Array, "B U"]
    count: Int[Array, " B"]


class Newest(NamedTuple):
    """The tokens of a fresh prompt that enter the body.

    `token[b, i]` is the place in the prompt of the i-th token, in the prompt's order. The first
    `units[b]` units of them exist. `kept` is the bookkeeping after the prompt."""

    token: Int[Array, "B R"]
    units: Int[Array, " B"]
    kept: Kept

    def pick(self, sources: dict) -> dict:
        """Pick these tokens, [B, R, W] by name, out of all tokens of the prompt, [B, T, W]."""
        picked = {}
        for name, x in sources.items():
            picked[name] = jnp.take_along_axis(x, self.token[:, :, None], 1)
        return picked


def newest_of_prompt(cache: Cache, counts: Int[Array, " B"], length: int) -> Newest:
    """Choose the tokens of a fresh prompt that enter the body: the newest of those that leave the
    window.

    Args:
        cache: An empty cache that evicts tokens.
        counts: How many of the prompt's tokens are valid in each row.
        length: T, the tokens of the prompt, those that are not valid included."""
    run = runs_of(cache.layout)[0]  # stands for all, as in `enter`
    clock = run.wiring.storage.clocks[0]
    sinks = cache.layout.method.sinks
    slots = cache.kept["positions"].shape[1]
    # The most tokens that enter: whole units, as many as the body keeps and the prompt has.
    most = min(slots, length // clock.unit * clock.unit)
    leaving = due(clock, counts - sinks, jnp.zeros_like(counts)) * clock.unit
    end = (sinks + leaving)[:, None]  # one past the last token that leaves the window
    token = jnp.maximum(end - most, sinks) + jnp.arange(most)[None]
    exists = token < end
    positions = jnp.where(exists, token, -1)
    padding = ((0, 0), (0, slots - most))  # a short prompt leaves slots empty
    kept = {"positions": jnp.pad(positions, padding, constant_values=-1)}
    return Newest(jnp.where(exists, token, 0), exists.sum(1) // clock.unit, kept)


def enter(cache: Cache, counts: Int[Array, " B"], length: int) -> tuple[Moves, Kept]:
    """Give the units that leave the window their place in the body, one after the other.

    Args:
        cache: A cache that evicts tokens, before the call.
        counts: How many of the new tokens each row takes.
        length: How many new tokens are given for each row.

    Returns:
        (the moves of these units, the bookkeeping after the call)."""
    # The first run stands for all: with eviction, all layers have one window and one unit.
    run = runs_of(cache.layout)[0]
    clock = run.wiring.storage.clocks[0]
    unit = clock.unit
    flushed = cache.runs[0].flushed[0]
    sinks = cache.layout.method.sinks
    positions = cache.kept["positions"]
    batch, slots = positions.shape
    groups = slots // unit  # places for a unit in the body
    target = due(clock, cache.lengths - sinks + counts, flushed)
    # The most units that `length` new tokens complete, wherever the first of them stands in its
    # unit.
    most = (length + unit - 1) // unit
    rows = jnp.arange(batch)

    def step(i, loop):
        """Place the i-th unit of every row; `loop` is (moves, positions [B, groups, unit])."""
        moves, positions = loop
        # An empty group has -1 everywhere, so that it comes before all others.
        oldest_group = positions.max(-1).argmin(1)
        number = flushed + i
        is_due = number < target
        # A row with fewer units gets a group and an entry beyond the end, where mode="drop" writes
        # nothing.
        group = jnp.where(is_due, oldest_group, groups)
        entry = jnp.where(is_due, moves.count, most)
        moves = moves._replace(
            unit=moves.unit.at[rows, entry].set(number, mode="drop"),
            slot=moves.slot.at[rows, entry].set(oldest_group * unit, mode="drop"),
            count=moves.count + is_due.astype(jnp.int32),
        )
        place = sinks + number[:, None] * unit + jnp.arange(unit)[None]
        return moves, positions.at[rows, group].set(place, mode="drop")

    blank = jnp.zeros((batch, most), jnp.int32)
    no_moves = Moves(blank, blank, jnp.zeros((batch,), jnp.int32))
    start = (no_moves, positions.reshape(batch, groups, unit))
    moves, by_group = jax.lax.fori_loop(0, most, step, start)
    return moves, {"positions": by_group.reshape(positions.shape)}


def read_as(cache: Cache, positions: Int[Array, "B T"], within: str) -> dict[str, jax.Array]:
    """Say how queries of new tokens must read a body that evicts tokens.

    Args:
        cache: The cache before the call, one that evicts tokens.
        positions: The positions of the new tokens.
        within: What new tokens see of each other, "chunk" or "step".

    Returns:
        Fields of `NewTokens`: `stored`, the position of each body slot's token, and for a draft
        ("step") `oldest`, the first position that each query may see."""
    if within == "chunk" or positions.shape[1] == 1:
        return {"stored": cache.kept["positions"]}
    run = runs_of(cache.layout)[0]
    clock = run.wiring.storage.clocks[0]
    sinks = cache.layout.method.sinks
    # So many units are encoded when the row holds the tokens before the query. Decoding one by one
    # would then have the newest `budget` of their tokens in the body.
    units = due(clock, positions - sinks, cache.runs[0].flushed[0][:, None])
    oldest = units * clock.unit - run.budget + sinks
    return {"stored": cache.kept["positions"], "oldest": oldest}


def crop_kept(kept: Kept, lengths: Int[Array, " B"]) -> Kept:
    """Mask what lies beyond the new lengths. Tokens that were evicted do not come back."""
    if not kept:
        return kept
    positions = kept["positions"]
    return {"positions": jnp.where(positions < lengths[:, None], positions, -1)}


def forget(kept: Kept, rows: Bool[Array, " B"]) -> Kept:
    """Empty the marked rows."""
    return {name: jnp.where(rows[:, None], -1, x) for name, x in kept.items()}
