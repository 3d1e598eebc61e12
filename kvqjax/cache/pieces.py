"""Caches are cut in two along their tokens, and joined again. So a prefix is stored once, and what
follows it apart.

    head, tail = kvq.cut(cache, 1000)      the first tokens, up to 1000 of them, and the others
    kvq.join(head, tail)                   holds what `cache` holds, to the bit

A tail can only be joined to the very tokens that it was computed after, at the same place: keys are
stored after RoPE, and the keys and values of later layers depend on all tokens before. That is
enough for a tree of shared prefixes. Another order of texts needs another forward pass.

    cache                  sinks | body ........................ | window
    cut at `start`         sinks | body .... |                              the head: encoded tokens alone
                                   blank sinks | body .......... | window   the tail: a `Piece`

A cut lies where units of all sources of all layers end. So no unit is taken apart, none is encoded
anew, and words are moved as they are. `shift` counts the body tokens before the cut, `start` counts
the sinks too.

A row that cannot be cut or joined is an error where numbers are known. Inside jit they are not: the
row is emptied, and its overflow flag raised."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from kvqjax._arguments import check_integer, is_known, reading
from kvqjax._errors import UserError
from kvqjax.cache.layout import CacheLayout, RunLayout
from kvqjax.cache.reshape import moved_body, moved_window, stored_tile
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, Run, blank_body, check_cache
from kvqjax.cache.surgery import crop, evict
from kvqjax.model.rope import check_length


class Piece(struct.PyTreeNode):
    """The tokens of a cache's rows from token `start` on.

    Attributes:
        cache: The tokens, behind blank sinks, in the form of any cache: `gather`, `repeat`,
            `resize` and `save_cache` take it. It must not be attended to, because its tokens would
            have other positions.
        start: The number of the first token in the cache that it was cut from. Static.
        capacity: The capacity of that cache. Static."""

    cache: Cache
    start: int = struct.field(pytree_node=False)
    capacity: int = struct.field(pytree_node=False)

    @property
    def lengths(self) -> Int[Array, " B"]:
        """Count the tokens of each row of the piece: those from `start` on."""
        return jnp.maximum(self.cache.lengths - self.cache.layout.method.sinks, 0)


def _grain(layout: CacheLayout) -> int:
    """Give the distance, in body tokens, between places where units of all sources of all layers
    end together."""
    units = []
    for run in runs_of(layout):
        units += [clock.unit for clock in run.wiring.storage.clocks]
    return math.lcm(*units)


def _check_means(layout: CacheLayout, operation: str) -> None:
    """Raise UserError for caches whose tokens have no fixed place.

    Args:
        layout: The cache's layout.
        operation: Its name, for messages: "cut" or "join"."""
    if layout.pool is not None:
        raise UserError(
            f"{operation}: the rows of this cache take pages of a pool; rows that share pages share tokens"
        )
    if layout.method.keep is not None:
        raise UserError(
            f"{operation}: {layout.method} evicts tokens, so that its bodies cannot be cut along tokens"
        )
    if layout.shape.recurrent is not None:
        raise UserError(
            f"{operation}: recurrent layers remember all tokens at once, so that tokens have no part of a cache to "
            "themselves; keep a prefix as a row (fork, repeat) or a snapshot"
        )
    if any(run.wraps for run in runs_of(layout)):
        raise UserError(
            f"{operation}: layers with a sliding window overwrite old tokens, so that there is no prefix to share"
        )
    if layout.dealt > 1:
        raise UserError(
            f"{operation}: a body that is dealt over {layout.dealt} devices cannot be cut; one device's can"
        )


def _place(layout: CacheLayout, tokens: Any) -> int:
    """Find the last place, at `tokens` or before it, where units of all sources of all layers end.

    Returns:
        The body tokens before that place."""
    number = check_integer("tokens", tokens, 0)
    sinks = layout.method.sinks
    if number < sinks:
        raise UserError(f"tokens={number}; the {sinks} sinks cannot be cut apart")
    grain = _grain(layout)
    return (number - sinks) // grain * grain


def _encoded(cache: Cache) -> list[tuple[RunLayout, Int[Array, " B"]]]:
    """List how many body tokens each clock of each run has encoded in every row.

    Returns:
        A pair for every clock, run after run: the run's plan, and the tokens."""
    encoded = []
    for run, state in zip(runs_of(cache.layout), cache.runs, strict=True):
        encoded += [(run, tokens) for tokens in _tokens_encoded(run, state.flushed)]
    return encoded


def _tokens_encoded(run: RunLayout, flushed: tuple) -> tuple[Int[Array, " B"], ...]:
    """Turn the units that each clock of a run has encoded in every row into body tokens."""
    clocks = run.wiring.storage.clocks
    return tuple(units * clock.unit for units, clock in zip(flushed, clocks, strict=True))


def _least_encoded(cache: Cache) -> Int[Array, " B"]:
    """Count the body tokens that all clocks of all runs have encoded in each row."""
    return functools.reduce(jnp.minimum, [tokens for _, tokens in _encoded(cache)])


def _are_known(*caches: Cache) -> bool:
    """Say whether the lengths of rows, and their counts of encoded units, are known numbers."""
    counts = []
    for cache in caches:
        counts.append(cache.lengths)
        for state in cache.runs:
            counts += state.flushed
    return is_known(*counts)


def _refuse(rows: Bool[Array, " B"], *caches: Cache) -> int | None:
    """Give the number of the first marked row. None where no row is marked, and where numbers are
    not known."""
    if not _are_known(*caches):
        return None
    marked = np.flatnonzero(np.asarray(rows))
    return int(marked[0]) if marked.size else None


def _emptied(cache: Cache, rows: Bool[Array, " B"]) -> Cache:
    """Empty the marked rows, and raise their overflow flags."""
    return evict(cache, rows).replace(overflow=cache.overflow | rows)


def cut(cache: Cache, tokens: int) -> tuple[Cache, Piece]:
    """Cut every row in two: its first tokens, as a cache, and the others, as a piece to put behind
    them.

    Args:
        cache: Rows that begin alike, or one row. It stays as it is.
        tokens: Where to cut, the same in all rows, at least the number of sinks. Static. The cut is
            made there or a little before, where units of all sources of all layers end (every 1 to
            128 tokens after the sinks). Outside jit it comes no later than the first token that is
            not encoded yet in some row: newest tokens stay exact, and are the piece's.

    Returns:
        (head, piece). The head holds the first `piece.start` tokens, all encoded, in a cache that
        shares its arrays with `cache`. The piece has codes where they were codes, and exact tokens
        where they were exact, in arrays that are shorter by what is left out. The piece of the
        tokens between two places is cut from the head of the later one.

    Raises:
        UserError: A row holds fewer tokens than there are sinks; `tokens` is less; the method
            evicts tokens, a layer's body is a ring (sliding windows), or it is dealt over devices.
            Inside jit, a row that has not encoded everything before the place is emptied, and its
            overflow flag raised.
    """
    check_cache(cache)
    _check_means(cache.layout, "cut")
    sinks = cache.layout.method.sinks
    grain = _grain(cache.layout)
    shift = _place(cache.layout, tokens)
    # A row may not have encoded all tokens before this place. Outside jit, the cut then moves to
    # where all rows have. Inside jit it must be static: the row is emptied.
    readable = _are_known(cache)
    with reading(readable):
        encoded = _least_encoded(cache)
        if readable:
            least = int(np.asarray(encoded).min())
            shift = min(shift, least // grain * grain)
        # The head has all sinks of a row, also where it has no other token.
        row_mask = (encoded < shift) | (cache.lengths < sinks)
    row = _refuse(row_mask, cache)
    if row is not None:
        length = int(np.asarray(cache.lengths)[row])
        raise UserError(
            f"row {row} holds {length} tokens, fewer than the {sinks} sinks, which cannot be cut apart"
        )
    start = shift + sinks
    head = _emptied(crop(cache, jnp.full_like(cache.lengths, start)), row_mask)
    tail = _emptied(_cut(cache, start), row_mask)
    return head, Piece(tail, start, cache.layout.capacity)


@functools.partial(jax.jit, static_argnames="start")
@jax.enable_x64(False)
def _cut(cache: Cache, start: int) -> Cache:
    """Shift every row down by the body tokens before `start`.

    Args:
        cache: The cache, whose rows have encoded these tokens; other rows are emptied by the
            caller.
        start: How many tokens of each row are left out, sinks included. Static.

    Returns:
        The other tokens, as a cache of a smaller capacity holds its first ones."""
    layout = cache.layout
    shift = start - layout.method.sinks
    piece_layout = dataclasses.replace(layout, capacity=_piece_capacity(layout, shift))
    lengths = cache.lengths - shift
    body_lengths = lengths - layout.method.sinks

    def shifted(old: RunLayout, new: RunLayout, state: Run) -> Run:
        """Shift one run, of which `state` is what the cache holds, from its plan `old` to the
        piece's plan `new`."""
        clocks = old.wiring.storage.clocks
        # Whole units: the words of every unit are moved as they are.
        left_out = [shift // clock.unit for clock in clocks]
        flushed = tuple(n - units for n, units in zip(state.flushed, left_out, strict=True))

        def tile(source, name, field, layer, row, token, size):
            """Take body token `token` of the piece from where the cache has it."""
            return stored_tile(old, state, source, name, layer, row, token + shift, size)

        window = _window_moved(old, new, body_lengths, shift, state)
        # A cache without a body has encoded nothing, also where the piece, which has more room, has
        # one.
        if old.slots:
            body = moved_body(new, _tokens_encoded(old, flushed), tile)
        else:
            body = blank_body(new, cache.batch, new.slots)
        # The sinks stay with the head; a piece behind blank ones has the form of any cache.
        sinks = jax.tree.map(jnp.zeros_like, state.sinks)
        return Run(body=body, sinks=sinks, window=window, flushed=flushed)

    states = zip(runs_of(layout), runs_of(piece_layout), cache.runs, strict=True)
    # Every token of a row depends on those before it. If one before the piece is not finite, none
    # of the piece's tokens counts as finite.
    finite = jnp.maximum(cache.finite - shift, layout.method.sinks)
    runs = tuple(shifted(old, new, state) for old, new, state in states)
    return cache.replace(
        runs=runs, lengths=lengths, finite=jnp.minimum(finite, lengths), layout=piece_layout
    )


def _piece_capacity(layout: CacheLayout, shift: int) -> int:
    """Give a capacity, in tokens, for a cache without its first `shift` body tokens.

    A crop may leave a row all of whose tokens are encoded. A body only has slots for as many tokens
    as the capacity leaves beside the window: with room for a window more, it has slots for all of
    them."""
    windows = []
    for run in runs_of(layout):
        windows += [clock.window for clock in run.wiring.storage.clocks]
    return layout.capacity - shift + max(windows)


def _window_moved(
    old: RunLayout, new: RunLayout, body_lengths: Int[Array, " B"], shift: int, state: Run
) -> dict[str, Any]:
    """Move the window of a run into the ring of another plan (`reshape.moved_window`)."""
    window = {}
    for name, ring in state.window.items():
        window[name] = moved_window(old.ring, new.ring, body_lengths, shift, ring)
    return window


def join(head: Cache, tail: Piece, *, capacity: int | None = None) -> Cache:
    """Put a piece behind the first `tail.start` tokens of every row of a cache.

    Row i of `head` and of `tail` belong together; `repeat` or `gather` makes as many of one as of
    the other. `head` must hold the tokens that the piece was computed after: nothing can check
    that. Then the result holds what a cache holds that was filled with all of these tokens: the
    same words, counts and window, to the bit.

    Args:
        head: A cache that has encoded the tokens before `tail.start`, such as `cut` gives; later
            ones are left out.
        tail: What `cut` gave, of a cache of the same layout but for the capacity.
        capacity: Tokens a row of the result; by default those of the cache that `tail` was cut
            from. Static.

    Returns:
        The cache of all these tokens, to go on with.

    Raises:
        UserError: The layouts or the numbers of rows differ; `capacity` is more than the model's
            positions allow; a row of `head` has not encoded everything before the piece, or a row
            does not fit the capacity (inside jit it is empty then, and its overflow flag raised);
            or as `cut`.
    """
    if not isinstance(tail, Piece):
        raise UserError(f"tail is a {type(tail).__name__}; wanted a Piece, which kvqjax.cut gives")
    check_cache(head, tail.cache)
    if capacity is None:
        capacity = tail.capacity
    else:
        capacity = check_integer("capacity", capacity)
    check_length(head.layout.shape, capacity)
    layout = dataclasses.replace(head.layout, capacity=capacity)
    # Words of another method, dtype or form would be read as something else without a word.
    for field in dataclasses.fields(layout):
        expected = getattr(head.layout, field.name)
        actual = getattr(tail.cache.layout, field.name)
        if field.name != "capacity" and expected != actual:
            raise UserError(f"the piece has another {field.name}: {actual}, wanted {expected}")
    _check_means(head.layout, "join")
    if head.batch != tail.cache.batch:
        raise UserError(
            f"{head.batch} rows cannot be joined with {tail.cache.batch}; kvqjax.repeat or gather makes more"
        )
    shift = tail.start - layout.method.sinks
    # What is known is computed at once, inside a trace too, so that it can be refused here.
    with reading(_are_known(head, tail.cache)):
        # The tail's lengths count its blank sinks, which stand for those of the head.
        lengths = tail.cache.lengths + shift
        unready = (_least_encoded(head) < shift) | (head.lengths < tail.start)
        crowded = lengths > capacity
        # The tail may have encoded more tokens of a source than a shorter body has slots for,
        # though all tokens fit.
        for (_, tokens), run in zip(_encoded(tail.cache), _run_of_each_clock(layout), strict=True):
            if not run.wraps:
                crowded = crowded | (tokens + shift > run.slots)
    row = _refuse(unready, head, tail.cache)
    if row is not None:
        raise UserError(
            f"row {row} of the head has not encoded the {tail.start} tokens before the piece; it must be filled "
            "further, or be what kvqjax.cut gives"
        )
    row = _refuse(crowded, head, tail.cache)
    if row is not None:
        length = int(np.asarray(lengths)[row])
        raise UserError(
            f"row {row} would hold {length} tokens, which do not fit a capacity of {capacity}"
        )
    return _emptied(_join(head, tail, layout), unready | crowded)


def _run_of_each_clock(layout: CacheLayout) -> list[RunLayout]:
    """List the run of every clock of a layout, in the order of `_encoded`."""
    runs = []
    for run in runs_of(layout):
        runs += [run] * len(run.wiring.storage.clocks)
    return runs


@functools.partial(jax.jit, static_argnames="layout")
@jax.enable_x64(False)
def _join(head: Cache, tail: Piece, layout: CacheLayout) -> Cache:
    """Shift the piece up to its place behind the head.

    Args:
        head: The cache of the tokens before the piece. Rows may hold more: those are left out.
        tail: The piece.
        layout: The layout of the result, which differs from the head's in the capacity alone.

    Returns:
        The cache of all these tokens."""
    piece = tail.cache
    shift = tail.start - layout.method.sinks
    body_lengths = piece.lengths + shift - layout.method.sinks

    def joined(first: RunLayout, second: RunLayout, new: RunLayout, before: Run, after: Run) -> Run:
        """Join one run: `first` and `before` are the head's plan and state, `second` and `after`
        the piece's."""

        def tile(source, name, field, layer, row, token, size):
            """Take tokens before the piece from the head, others from the piece."""
            if not second.slots:  # too short for a body: what is encoded comes before it
                return stored_tile(first, before, source, name, layer, row, token, size)
            # A tile may lie on both sides of the piece's beginning. It is read on both, and a mask
            # takes the tokens.
            tail_tile = stored_tile(second, after, source, name, layer, row, token - shift, size)
            # A piece from the first body token on has all of it: the head has sinks alone.
            if not shift:
                return tail_tile
            head_tile = stored_tile(first, before, source, name, layer, row, token, size)
            is_head = token + jnp.arange(size) < shift
            return field.choose(is_head, head_tile, tail_tile)

        # The shift is a multiple of every unit: counts of units stay whole.
        of_head = [shift // clock.unit for clock in new.wiring.storage.clocks]
        flushed = tuple(n + units for n, units in zip(after.flushed, of_head, strict=True))
        window = _window_moved(second, new, body_lengths, -shift, after)
        if second.slots or shift:
            body = moved_body(new, _tokens_encoded(new, flushed), tile)
        else:  # neither has encoded anything
            body = blank_body(new, head.batch, new.slots)
        return Run(body=body, sinks=before.sinks, window=window, flushed=flushed)

    plans = (runs_of(head.layout), runs_of(piece.layout), runs_of(layout))
    parts = zip(*plans, head.runs, piece.runs, strict=True)
    runs = tuple(joined(*part) for part in parts)
    lengths = piece.lengths + shift
    # The first token that is not finite may be among the head's. Otherwise it is the piece's first
    # one.
    in_head = head.finite < jnp.minimum(head.lengths, tail.start)
    finite = jnp.where(in_head, head.finite, piece.finite + shift)
    return head.replace(
        runs=runs,
        lengths=lengths,
        overflow=head.overflow | piece.overflow,
        finite=jnp.minimum(finite, lengths),
        layout=layout,
    )
