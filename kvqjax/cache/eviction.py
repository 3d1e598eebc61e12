"""Token eviction, an option of every method (`keep=`, kvqjax.methods.spec). The body holds at most `budget` tokens of a
row, in groups as long as the clock's unit. The position of every slot's token is kept, and -1 for a slot without one.

    received    what the queries of one call gave each token                              keep=h2o alone
    choose      which tokens of a fresh prompt enter the body, token by token
    enter       where the units go that leave the window, group by group                  chunks and decode steps
    crop_kept, forget                                                                     when rows are cut or emptied

Where there is no room for an arriving group, one group is evicted: its slots are used again. Two rules choose it:

    streaming    the group whose newest token is the oldest
    h2o          the group with the least attention mass, the arriving group being a candidate too

The mass of a token is the sum of the softmax weights that the queries of all heads and layers gave it, float32. It
takes a second pass over the scores, once their log-sum-exp is known.

    cache.kept = {"positions": [B, N]}                                                      streaming
                 {"positions": [B, N], "mass": [B, N/u], "recent": [B, C]}                  h2o; C window slots

N is the budget in tokens, u the clock's unit. `mass` is that of groups, `recent` that of tokens in the window.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvqjax.methods.spec import Keep
from kvqjax.ops.attention import capped

__all__ = ["Chosen", "Moves", "Received", "allocate_kept", "choose", "crop_kept", "enter", "forget", "received"]

Kept = dict  # name -> array, see the module


class Received(NamedTuple):
    """Attention mass of one call: of sinks, window slots and new tokens side by side (M), and of the body's N slots."""

    exact: Float[Array, "B M"]
    body: Float[Array, "B N"]


class Moves(NamedTuple):
    """Where units that leave the window go: `count[b]` of them, number `unit[b, i]` to body slot `slot[b, i]`. There is
    room for U moves; those from `count[b]` on mean nothing."""

    unit: Int[Array, "B U"]
    slot: Int[Array, "B U"]
    count: Int[Array, " B"]


class Chosen(NamedTuple):
    """Tokens of a fresh prompt that enter the body, in order: `token[b, i]` for i below `units[b]` clock units."""

    token: Int[Array, "B R"]
    units: Int[Array, " B"]


def allocate_kept(keep: Keep | None, batch: int, slots: int, unit: int, ring: int) -> Kept:
    """Allocate the bookkeeping of empty rows. It is empty where no token is ever dropped, and where there is no body.

    Args:
        keep: Which tokens the method keeps; None: all.
        batch: B, the rows.
        slots: N, the tokens that the body keeps of a row.
        unit: u, the tokens of a group.
        ring: C, the window's slots.

    Returns:
        `kept` (see the module)."""
    if keep is None or not slots:
        return {}
    kept = {"positions": jnp.full((batch, slots), -1, jnp.int32)}
    if keep.rule == "h2o":
        kept |= {"mass": jnp.zeros((batch, slots // unit)), "recent": jnp.zeros((batch, ring))}
    return kept


def received(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    mask: Bool[Array, "B T S"],
    lse: Float[Array, "B T H"],
    softcap: float | None = None,
) -> Float[Array, "B S"]:
    """Sum the attention probability that all queries and heads together give each key.

    Args:
        q: The queries, with their rotation.
        k: The keys of some tokens, with their rotation.
        mask: Which of these tokens each query sees. Callers let queries that are not valid see none.
        lse: The log-sum-exp of each query's scores over all segments.
        softcap: The cap of scores, if there is one.

    Returns:
        The sums, float32."""
    batch, length, _, dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, length, kv_heads, -1, dim) * jnp.asarray(dim**-0.5, q.dtype)
    # A probability is exp(score - lse). The log-sum-exp is that of all segments, so that tokens may come in parts.
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=jnp.float32)
    scores = capped(scores, softcap) - lse.reshape(batch, length, kv_heads, -1).transpose(0, 2, 3, 1)[..., None]
    share = jnp.exp(scores)  # NaN from queries that see what is not finite
    return jnp.where(mask[:, None, None] & jnp.isfinite(share), share, 0.0).sum((1, 2, 3))


def _take(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index, axis=1)


def _by_group(x: Array, groups: int) -> Array:
    """Split [B, N] into [B, groups, N / groups]."""
    return x.reshape(x.shape[0], groups, -1)


def choose(
    rule: str, kept: Kept, mass: Float[Array, "B T"], leaving: Int[Array, " B"], window: Int[Array, "B C"],
    unit: int, sinks: int,
) -> tuple[Chosen, Kept]:  # fmt: skip
    """Choose which tokens of a fresh prompt enter the body, token by token: the newest (streaming), or those of most
    mass (h2o).

    Args:
        rule: The rule of `keep`.
        kept: The bookkeeping of empty rows.
        mass: What each of the prompt's tokens received. Streaming reads its shape alone.
        leaving: How many tokens after the sinks leave the window, whole units. The choice is among these.
        window: The body tokens that the window's slots stand for after the prompt.
        unit: The clock's unit, in tokens.
        sinks: How many first tokens of a row are sinks.

    Returns:
        (the tokens in the prompt's order, `kept` after the prompt)."""
    length, slots = mass.shape[1], kept["positions"].shape[1]
    # Whole units: of the tokens that the body keeps, and of those that the prompt has.
    room = min(slots, length // unit * unit)
    tokens = jnp.broadcast_to(jnp.arange(length)[None], mass.shape)
    score = mass if rule == "h2o" else tokens.astype(jnp.float32)  # exact below 2**24 tokens
    score = jnp.where((tokens >= sinks) & (tokens < sinks + leaving[:, None]), score, -jnp.inf)
    best, token = jax.lax.top_k(score, room)
    # The best tokens come by their scores, and are sorted by their places. What stands for no token is sorted last.
    token = jnp.sort(jnp.where(jnp.isneginf(best), length, token), axis=1)
    valid = token < length
    token = jnp.where(valid, token, 0)
    pad = ((0, 0), (0, slots - room))  # a short prompt leaves slots empty
    kept = kept | {"positions": jnp.pad(jnp.where(valid, token, -1), pad, constant_values=-1)}
    if rule == "h2o":
        grouped = _by_group(jnp.pad(jnp.where(valid, _take(mass, token), 0.0), pad), slots // unit)
        # Slots that hold no token of the prompt get a number too. It is not read: `_mass_of` asks for held tokens.
        recent = _take(mass, jnp.clip(window + sinks, 0, length - 1))
        kept = kept | {"mass": grouped.sum(-1), "recent": recent}
    return Chosen(token, valid.sum(1) // unit), kept


def _mass_of(
    kept: Kept, call: Received, tokens: Int[Array, "B M"], body_lengths: Int[Array, " B"], sinks: int
) -> Array:
    """Sum the mass of body tokens in the window or among the new ones: what they had, and what this call gave them.

    Args:
        kept: The bookkeeping before the call, `recent` among it.
        call: What this call gave each token.
        tokens: The body tokens that are asked for. Those that a row does not hold yet get a number without a meaning.
        body_lengths: How many body tokens each row held before the call.
        sinks: How many first tokens of a row are sinks.

    Returns:
        The mass, [B, M]."""
    ring = kept["recent"].shape[1]
    old, slot = tokens < body_lengths[:, None], tokens % ring
    # `call.exact` has sinks first, then the window's slots, then new tokens.
    place = jnp.where(old, sinks + slot, sinks + ring + tokens - body_lengths[:, None])
    gain = _take(call.exact, jnp.clip(place, 0, call.exact.shape[1] - 1))
    return gain + jnp.where(old, _take(kept["recent"], slot), 0.0)


def enter(
    rule: str, kept: Kept, call: Received | None, body_lengths: Int[Array, " B"], window: Int[Array, "B C"],
    flushed: Int[Array, " B"], target: Int[Array, " B"], most: int, unit: int, sinks: int,
) -> tuple[Moves, Kept]:  # fmt: skip
    """Give the units that leave the window their place in the body, one after the other.

    Args:
        rule: The rule of `keep`.
        kept: The bookkeeping before the call.
        call: The attention mass of the call that brought the new tokens; None: no attention saw them.
        body_lengths: How many body tokens each row held before the call.
        window: The body tokens that the window's slots stand for after the call.
        flushed: How many units have left each row's window before the call.
        target: How many have left it after the call.
        most: The most units that can leave a window in this call. Static.
        unit: The clock's unit, in tokens.
        sinks: How many first tokens of a row are sinks.

    Returns:
        (the moves of units flushed[b] to target[b] - 1 but for those that lose, `kept` after the call)."""
    batch, slots = kept["positions"].shape
    groups = slots // unit
    arriving = jnp.zeros((batch, most))  # the mass of the units that leave the window
    if rule == "h2o":
        call = call or Received(jnp.zeros((batch, 1)), jnp.zeros((batch, slots)))
        tokens = (flushed * unit)[:, None] + jnp.arange(most * unit)[None]
        arriving = _by_group(_mass_of(kept, call, tokens, body_lengths, sinks), most).sum(-1)
        recent = _mass_of(kept, call, window, body_lengths, sinks)
        mass = kept["mass"] + _by_group(call.body, groups).sum(-1)
        kept = kept | {"mass": mass, "recent": recent}

    def step(i, loop):
        """Place the i-th unit of every row; `loop` is (moves, positions [B, groups, u], mass [B, groups])."""
        moves, positions, mass = loop
        newest = positions.max(-1)  # [B, groups], -1 where the group is free
        # The group of least rank makes room. A free one comes before all others.
        rank = jnp.where(newest < 0, -jnp.inf, mass if rule == "h2o" else newest.astype(jnp.float32))
        victim = rank.argmin(1)  # the group of each row that makes room
        number = flushed + i  # of the unit
        # An H2O unit whose mass is less than that of every group is dropped. Rows with fewer units due place none.
        stays = (number < target) & ((rule != "h2o") | (arriving[:, i] >= rank.min(1)))
        # A unit that is dropped gets a group and an entry beyond the end, where mode="drop" writes nothing.
        rows, target_group = jnp.arange(batch), jnp.where(stays, victim, groups)
        entry = jnp.where(stays, moves.count, most)
        moves = Moves(
            moves.unit.at[rows, entry].set(number, mode="drop"),
            moves.slot.at[rows, entry].set(victim * unit, mode="drop"),
            moves.count + stays.astype(jnp.int32),
        )
        place = sinks + number[:, None] * unit + jnp.arange(unit)[None]
        mass = mass.at[rows, target_group].set(arriving[:, i], mode="drop")
        return moves, positions.at[rows, target_group].set(place, mode="drop"), mass

    blank = jnp.zeros((batch, most), jnp.int32)
    start = Moves(blank, blank, jnp.zeros((batch,), jnp.int32))
    mass = kept.get("mass", jnp.zeros((batch, groups)))  # streaming carries it through the loop and never reads it
    moves, positions, mass = jax.lax.fori_loop(0, most, step, (start, _by_group(kept["positions"], groups), mass))
    kept = kept | {"positions": positions.reshape(batch, slots)}
    return moves, kept | ({"mass": mass} if rule == "h2o" else {})


def crop_kept(kept: Kept, lengths: Int[Array, " B"]) -> Kept:
    """Mask what lies beyond the new lengths. Tokens that were evicted do not come back, and mass stays as measured."""
    if not kept:
        return kept
    return kept | {"positions": jnp.where(kept["positions"] < lengths[:, None], kept["positions"], -1)}


def forget(kept: Kept, rows: Bool[Array, " B"]) -> Kept:
    """Empty the marked rows."""
    return {name: jnp.where(rows[:, None], -1 if name == "positions" else 0, x) for name, x in kept.items()}
