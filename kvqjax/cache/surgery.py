"""Operations on whole rows of packed caches, of every method. They are pure, and run inside and
outside jit.

    crop, evict               shorten rows, or empty them
    fork, gather, repeat      copy rows
    insert, adopt             put rows of one cache into another
    resize                    change the capacity
    snapshot                  keeps states of recurrent layers, to which `crop` can go back

None of them decodes or encodes anything. They move arrays and change counts, and know nothing of
what a field means.

Rows are an axis of every array, but not the same one: `row_axes` says which, for tree code of your
own.

What `crop` and `evict` return shares its arrays with the cache that they were given. Donating one
of the two ends the
other: `fork` first where both must live on.

Contract: the tokens below a row's `lengths` are stored as a fresh encode of the same tokens stores
them, if it encodes as many units. What is stored beyond `lengths` is undefined. It is never read,
because words are cleared before tokens are written to them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from kvqjax._arguments import (
    MOST,
    check_integer,
    check_integers,
    check_within,
    clipped,
    is_known,
    named,
    reading,
)
from kvqjax._errors import UserError
from kvqjax.cache.eviction import crop_kept, forget
from kvqjax.cache.layout import CacheLayout, RunLayout
from kvqjax.cache.pages import require_own_bodies, with_bodies_of, without_bodies
from kvqjax.cache.reshape import check_means, excess, with_layout
from kvqjax.cache.runs import runs_of
from kvqjax.cache.state import Cache, Leaf, Run, check_cache, check_mesh, row_axes
from kvqjax.model.rope import check_length

__all__ = [
    "Snapshot",
    "adopt",
    "crop",
    "emptied",
    "evict",
    "fork",
    "gather",
    "insert",
    "repeat",
    "resize",
    "row_axes",
    "snapshot",
    "taken_row",
]


class Snapshot(struct.PyTreeNode):
    """States of a cache's recurrent layers after the tokens that its rows held then: what `crop`
    needs to go back there. It shares no arrays with the cache and is as large as the states,
    whatever the rows hold."""

    lengths: Leaf  # Int[B]
    states: tuple[dict[str, Leaf], ...]


def snapshot(cache: Cache) -> Snapshot:
    """Keep the states of recurrent layers as they are now, so that the cache can be cropped to here
    later on.

    Args:
        cache: any cache; of a model without recurrent layers the snapshot holds its lengths alone,
            and `crop` goes without.

    Returns:
        The snapshot, for `crop(cache, snapshot.lengths, snapshot=snapshot)` of this cache once it
        holds more tokens.

    Raises:
        UserError: for what is no cache.
    """
    check_cache(cache)
    return Snapshot(*jax.tree.map(jnp.copy, (cache.lengths, cache.states)))


def fork(cache: Cache) -> Cache:
    """Copy a cache so that no buffer is shared: either may be donated and the other lives on."""
    check_cache(cache)
    return jax.tree.map(jnp.copy, cache)


def gather(cache: Cache, rows: Int[Array, " N"]) -> Cache:
    """Make a cache whose row i is row `rows[i]` of `cache`, such as for beams.

    A row number that a trace hides is clipped, and the flag `overflow[i]` of the new row i is
    raised.

    Args:
        cache: A cache of B rows.
        rows: The rows to take. A row may be taken several times, or left out.

    Returns:
        A cache of N rows.

    Raises:
        UserError: A row does not exist, or the cache's rows take pages of a pool.
    """
    check_cache(cache)
    require_own_bodies(cache, "gather")
    check_integers("rows", rows, ("N",), "the rows to take")
    check_within("rows", rows, 0, cache.batch - 1, f"from 0 to {cache.batch - 1}, the cache's rows")
    rows, missed = clipped(rows, 0, cache.batch - 1)
    result = _take_rows(cache, rows)
    return result.replace(overflow=result.overflow | missed)


def _take_rows(cache: Cache, rows: Int[Array, " N"]) -> Cache:
    """Do `gather` of rows that exist."""

    def take(cache, rows):
        return jax.tree.map(
            lambda axis, x: jnp.take(x, rows, axis=axis, mode="clip"), row_axes(cache), cache
        )

    return _moved(take, rows.size, cache, rows)


def _moved(function: Callable[..., Cache], rows: int, cache: Cache, *arguments: Any) -> Cache:
    """Call a function that moves rows of a cache, on any mesh.

    Args:
        function: `function(cache, *arguments)` gives the new cache.
        rows: How many rows the new cache has.
        cache: The cache.
        arguments: What else the function is given.

    Returns:
        The new cache. On a mesh it lies as the rules of the cache say.

    Raises:
        UserError: The mesh has Explicit axes, over which so many rows cannot be split."""
    # With Explicit axes, JAX wants to be told where the result of such a function lies.
    rules = cache.layout.rules
    if rules is None or not rules.explicit:
        return function(cache, *arguments)
    if rows % rules.size(rules.batch):
        raise UserError(f"{rows} rows cannot be split over {rules.size(rules.batch)} devices")
    placed: Callable = jax.sharding.auto_axes(function, out_sharding=rules.places(cache))
    return placed(cache, *arguments)


def repeat(cache: Cache, n: int) -> Cache:
    """Repeat every row `n` times, in the order of `jnp.repeat`: rows 0, 1 become 0, 0, 1, 1.

    A prompt that many requests begin with is prefilled once, as one row, and repeated for all of
    them.

    Args:
        cache: A cache of B rows.
        n: How often each row stands in the result, at least 1. Static.

    Returns:
        A cache of B * n rows.

    Raises:
        UserError: `n` is no whole number of at least 1.
    """
    check_cache(cache)
    require_own_bodies(cache, "repeat")
    n = check_integer("n", n)

    def repeated(cache):
        return jax.tree.map(lambda axis, x: jnp.repeat(x, n, axis=axis), row_axes(cache), cache)

    return _moved(repeated, n * cache.batch, cache)


def check_same(cache: Cache, other: Cache) -> None:
    """Raise UserError unless rows of `other` can be put into `cache`: their layouts are equal, but
    for the capacity, which may be less, and for the mesh axis that splits rows."""
    for field in dataclasses.fields(cache.layout):
        expected, actual = getattr(cache.layout, field.name), getattr(other.layout, field.name)
        if field.name == "capacity":
            if actual > expected:
                raise UserError(
                    f"the other cache has a larger capacity, {actual}; its rows fit a cache of {expected} tokens a row "
                    f"after kvqjax.resize(other, {expected})"
                )
            continue
        split_alike = field.name == "rules" and expected is not None and expected.splits_as(actual)
        if expected != actual and not split_alike:
            raise UserError(
                f"the other cache has another {field.name}: {actual}, wanted {expected}"
            )


def _numbers(
    name: str, rows: Any, batch: int, whose: str
) -> tuple[Int[Array, " N"], Bool[Array, " N"]]:
    """Check row numbers, and give them as an array.

    Args:
        name: What the argument is called, for messages.
        rows: One row number, or several.
        batch: How many rows there are.
        whose: Whose rows they are, for messages.

    Returns:
        (the numbers, clipped where a trace hides them; which of them were clipped).

    Raises:
        UserError: No row numbers, or a row that does not exist."""
    rows = rows if isinstance(rows, jax.Array | np.ndarray) else np.asarray(rows)
    if rows.ndim > 1 or not jnp.issubdtype(rows.dtype, jnp.integer) or not rows.size:
        kind = f"{rows.dtype}{list(rows.shape)}"
        raise UserError(f"{name} is of {kind}; wanted a row number, or an array of row numbers [N]")
    check_within(name, rows, 0, batch - 1, f"from 0 to {batch - 1}, {whose} rows")
    return clipped(jnp.asarray(rows).reshape(-1), 0, batch - 1)


def insert(
    cache: Cache,
    rows: Int[Array, " N"] | Int[Array, ""] | Sequence[int] | int,
    other: Cache,
    other_rows: Int[Array, " N"] | Int[Array, ""] | Sequence[int] | int | None = None,
) -> Cache:
    """Replace rows of a cache by rows of another: requests that were prefilled apart join a running
    batch.

    A row number that a trace hides is clipped, and the flag `overflow` of the row that was replaced
    is raised.

    Args:
        cache: The running batch.
        rows: Which rows are replaced: one number, or N of them. Where one is named twice, the last
            one counts.
        other: A cache of equal layout, but for the capacity: it may have less.
        other_rows: Which rows of `other` come there: as many as `rows`, or one for all of them.
            None: all of its rows in their order.

    Returns:
        The cache with row `rows[i]` replaced by row `other_rows[i]` of `other`.

    Raises:
        UserError: The layouts differ, naming the field, but for the mesh axis that splits rows;
            `other` has a larger capacity; the numbers of rows differ; a row does not exist.
    """
    check_cache(cache, other)
    check_mesh(cache)
    require_own_bodies(cache, "insert")
    require_own_bodies(other, "insert")
    check_same(cache, other)
    into, moved = _numbers("rows", rows, cache.batch, "the cache's")
    row_numbers = np.arange(other.batch, dtype=np.int32) if other_rows is None else other_rows
    source, missed = _numbers("other_rows", row_numbers, other.batch, "the other cache's")
    # All rows of `other` are meant without `other_rows`: a single one is not spread over several
    # rows then.
    sizes = (into.size,) if other_rows is None else (1, into.size)
    if source.size not in sizes:
        raise UserError(
            f"{into.size} rows are to be replaced by {source.size} rows of the other cache"
        )
    if dataclasses.replace(other.layout, rules=cache.layout.rules) == cache.layout:
        other = other.replace(layout=cache.layout)  # its rows may be split over fewer devices
    if other.layout != cache.layout:  # it has less capacity
        check_means(other.layout, cache.layout)
        other, source = _take_rows(other, source), jnp.arange(source.size)
        other = with_layout(other, cache.layout)
    source = jnp.broadcast_to(source, into.shape).astype(jnp.int32)
    return _moved(_inserted, cache.batch, cache, into, other, source, moved | missed)


@jax.jit
def _inserted(
    cache: Cache,
    rows: Int[Array, " N"],
    other: Cache,
    other_rows: Int[Array, " N"],
    clipped: Bool[Array, " N"],
) -> Cache:
    """Do `insert` between caches of one layout.

    Rows are put one by one, as slices, which XLA writes in place where the cache is donated.

    Args:
        cache: The cache whose rows are replaced.
        rows: Which rows are replaced.
        other: The cache that their successors come from.
        other_rows: Which row of `other` takes the place of each.
        clipped: Which row numbers a trace hid and were clipped.

    Returns:
        The cache. The overflow flags of rows with clipped numbers are raised."""
    axes = row_axes(cache)

    def put(number, cache):
        def put_row(axis, array, source):
            line = jax.lax.dynamic_slice_in_dim(source, other_rows[number], 1, axis)
            return jax.lax.dynamic_update_slice_in_dim(array, line, rows[number], axis)

        return jax.tree.map(put_row, axes, cache, other)

    joined = put(0, cache) if rows.size == 1 else jax.lax.fori_loop(0, rows.size, put, cache)
    return joined.replace(overflow=joined.overflow.at[rows].max(clipped))


def adopt(cache: Cache, row: Int[Array, ""], other: Cache) -> Cache:
    """Replace a row by the one row of another cache of the same layout, whose pages are in this
    cache's pool.

    Args:
        cache: of many rows.
        row: the row that is replaced.
        other: of one row. The body in pages may be left out of it (`without_bodies`), since pages
            stay where they are.

    Returns:
        The cache, whose pages are as they were, with the row's table.
    """
    # Bodies in pages have no axis of rows, so that row by row everything else is put.
    first = jnp.zeros((1,), jnp.int32)
    rows = _inserted(without_bodies(cache), row[None], without_bodies(other), first, first > 0)
    return with_bodies_of(rows, cache)


def taken_row(cache: Cache, row: Int[Array, ""]) -> Cache:
    """Copy one row without what lies in pages: for `adopt`."""
    return _take_rows(without_bodies(cache), row[None])


def evict(cache: Cache, rows: Bool[Array, " B"]) -> Cache:
    """Empty the marked rows: their length is 0, nothing is encoded, and states of recurrent layers
    are 0. Their flags `overflow[b]` are lowered, and it is forgotten that numbers were not finite.

    The old words stay until they are overwritten. The result shares its arrays with `cache`: `fork`
    first where both must live on.

    Args:
        cache: Any cache.
        rows: True for each row to empty.

    Returns:
        The cache with empty rows.

    Raises:
        UserError: `rows` is no array of B booleans.
    """
    check_cache(cache)
    if getattr(rows, "dtype", None) != np.bool_ or rows.shape != (cache.batch,):
        raise UserError(
            f"rows is {named(rows)}; wanted bool[{cache.batch}]: True for each row to empty"
        )
    return emptied(cache, rows)


def emptied(cache: Cache, rows: Bool[Array, " B"]) -> Cache:
    """Do `evict` after its checks, also of rows whose bodies in pages were left out
    (`without_bodies`)."""

    def empty(count):
        return jnp.where(rows, 0, count)

    runs = tuple(state.replace(flushed=jax.tree.map(empty, state.flushed)) for state in cache.runs)
    kept = forget(cache.kept, rows)
    overflow = cache.overflow & ~rows
    return cache.replace(
        runs=runs,
        lengths=empty(cache.lengths),
        overflow=overflow,
        finite=empty(cache.finite),
        kept=kept,
        states=_blank(cache.states, rows),
    )


def _blank(states: tuple[dict, ...], rows: Bool[Array, " B"]) -> tuple[dict, ...]:
    """Set the states of the marked rows to those before a first token."""
    return _chosen(rows, jax.tree.map(jnp.zeros_like, states), states)


def _chosen(
    rows: Bool[Array, " B"], states: tuple[dict, ...], fallback: tuple[dict, ...]
) -> tuple[dict, ...]:
    """Take the marked rows from `states`, the others from `fallback`."""
    return jax.tree.map(
        lambda a, b: jnp.where(rows.reshape(1, -1, *[1] * (a.ndim - 2)), a, b), states, fallback
    )


@functools.partial(jax.jit, static_argnames="clocks")
def _floor(
    lengths: Int[Array, " B"],
    encoded: tuple[Int[Array, " B"], ...],
    clocks: tuple[tuple[int, bool], ...],
) -> Int[Array, " B"]:
    """Find the most body tokens to which rows can be cropped without decoding anything.

    A crop to at least as many tokens as a clock has encoded leaves its body as it is. A crop below
    that must end on a boundary of its units, since a unit cannot be cut. Lowering the length for
    one clock may put it inside a unit of another, so that all clocks are asked again until none
    lowers it.

    Args:
        lengths: The body tokens to crop to, if possible. Negative where sinks are cut.
        encoded: The body tokens that each clock has encoded.
        clocks: The unit of each clock, and whether its body is a ring.

    Returns:
        The body tokens, at most `lengths`."""

    def lower(length):
        for (unit, wraps), tokens in zip(clocks, encoded, strict=True):
            # A ring has overwritten older tokens that queries of so short a row would see. Only the
            # sinks are left.
            floor = jnp.zeros_like(length) if wraps else length // unit * unit
            length = jnp.where((tokens > length) & (length > 0), floor, length)
        return length

    # The loop's state: the lengths before the last question to all clocks, and after it.
    def changed(pair):
        return (pair[0] != pair[1]).any()

    def step(pair):
        return pair[1], lower(pair[1])

    return jax.lax.while_loop(changed, step, (lengths, lower(lengths)))[1]


def crop(cache: Cache, lengths: Int[Array, " B"], *, snapshot: Snapshot | None = None) -> Cache:
    """Cut every row back to `lengths[b]` tokens, or to fewer where an encoded unit would be cut.

    - Where no encoded token is cut, the crop is exact to the token. That holds for the newest
      `window` tokens at least.
    - A deeper crop goes down to where every source of every layer ends on a whole unit (32 to 128
      tokens). The window is empty then: the newest tokens stay encoded, and nothing is encoded
      twice.
    - In a layer with two clocks (KIVI as published) a token whose key was encoded while its value
      was exact keeps the reconstructed key.
    - Layers whose body is a ring (sliding windows) have overwritten older tokens. A crop into their
      encoded part leaves the sinks only.
    - Where tokens are evicted by policy (`keep`), those that the body evicted before do not come
      back. The row then holds less than a fresh encode of the same tokens.
    - A row whose first token that was not finite is cut is an ordinary row again.
    - What recurrent layers remember cannot be undone. A row of a cache with their states can only
      be cut to 0 tokens, or to what it held when a `snapshot` of the cache was taken. Inside jit
      any other cut empties the row, and raises its flag `overflow[b]`.

    The result shares its arrays with `cache`: `fork` first where both must live on.

    Args:
        cache: Any cache.
        lengths: How many tokens each row keeps. More than a row holds change nothing. A negative
            length that a trace hides counts as 0, and the row's flag `overflow[b]` is raised.
        snapshot: The states of recurrent layers to go back to.

    Returns:
        The cache, whose `lengths` say what was kept.

    Raises:
        UserError: A negative length, a cut to which recurrent layers cannot go back, or a snapshot
            of another cache.
    """
    sinks, runs = cache.layout.method.sinks, runs_of(cache.layout)
    check_cache(cache)
    check_integers("lengths", lengths, (cache.batch,), "the tokens that each row keeps")
    check_within("lengths", lengths, 0, MOST, "at 0 or above")
    lengths, negative = clipped(lengths, 0, MOST)
    # All clocks of all runs, and the units that each has encoded, in one order.
    clocks = tuple((clock.unit, run.wraps) for run in runs for clock in run.wiring.storage.clocks)
    counts = [count for state in cache.runs for count in state.flushed]
    encoded = tuple(count * unit for count, (unit, _) in zip(counts, clocks, strict=True))
    limits = jnp.minimum(lengths, cache.lengths) - sinks
    body_lengths = _floor(limits, encoded, clocks)
    most_encoded = jnp.maximum(body_lengths, 0)

    def cropped(run: RunLayout, state: Run) -> Run:
        """Lower a run's counts of encoded units. Nothing else says how much of its body there
        is."""
        units = zip(run.wiring.storage.clocks, state.flushed, strict=True)
        return state.replace(
            flushed=tuple(jnp.minimum(count, most_encoded // clock.unit) for clock, count in units)
        )

    states = tuple(cropped(run, state) for run, state in zip(runs, cache.runs, strict=True))
    lengths = body_lengths + sinks
    finite = jnp.minimum(cache.finite, lengths)
    overflow = cache.overflow | negative
    result = cache.replace(
        runs=states,
        lengths=lengths,
        finite=finite,
        overflow=overflow,
        kept=crop_kept(cache.kept, lengths),
    )
    return _with_states(cache, result, snapshot) if cache.states else result


def _with_states(cache: Cache, result: Cache, snapshot: Snapshot | None) -> Cache:
    """Give a cropped cache the states of recurrent layers that belong to its rows.

    They are those of `cache` for a row from which nothing was cut, those of the snapshot for a row
    that is as long as it was then, and zeros for an empty row. There are none for any other row.

    Args:
        cache: The cache before the crop.
        result: The cropped cache, still with the states of `cache`.
        snapshot: The states to go back to, if there are any.

    Returns:
        The cropped cache with its states. Rows for which there are none are empty, with their
        overflow flags raised.

    Raises:
        UserError: The snapshot is of another cache, or outside jit there are no states for a
        row."""
    uncut = result.lengths == cache.lengths
    states, restorable = cache.states, jnp.zeros_like(uncut)
    if snapshot is not None:
        _check_snapshot(cache, snapshot)
        restorable = ~uncut & (result.lengths == snapshot.lengths)
        states = _chosen(restorable, snapshot.states, states)
    lost = ~(uncut | restorable | (result.lengths == 0))
    if is_known(lost):
        with reading(True):
            mask = np.asarray(lost)
        if mask.any():
            row = int(mask.argmax())
            before, after = (int(np.asarray(x.lengths)[row]) for x in (cache, result))
            raise UserError(
                f"row {row}: recurrent layers remember all of its {before} tokens and cannot go back to {after}; crop "
                "it to 0 and feed it anew, or to the length of a snapshot (kvqjax.snapshot) that was taken there"
            )
    result = result.replace(states=_blank(states, result.lengths == 0))
    return evict(result, lost).replace(overflow=result.overflow | lost)


def _check_snapshot(cache: Cache, snapshot: Any) -> None:
    """Raise UserError unless `snapshot` is one of a cache with as many rows and the same recurrent
    layers."""
    if not isinstance(snapshot, Snapshot):
        raise UserError(f"snapshot is {named(snapshot)}; wanted what kvqjax.snapshot(cache) gives")
    shapes = [
        jax.tree.map(lambda x: (x.shape, str(x.dtype)), states)
        for states in (snapshot.states, cache.states)
    ]
    if shapes[0] != shapes[1] or snapshot.lengths.shape != cache.lengths.shape:
        rows = snapshot.lengths.shape[0]
        raise UserError(
            f"snapshot is of another cache: of {rows} rows and other recurrent layers than this one's"
        )


def resize(cache: Cache, capacity: int) -> Cache:
    """Make the same cache with room for `capacity` tokens a row: more to go on, or fewer to put it
    away.

    What rows hold keeps its words, counts and window. Runs inside and outside jit, where `capacity`
    is static; every other capacity is another shape and so another program.

    Args:
        cache: Any cache. A body that is dealt over the devices of a mesh can be resized where its
            blocks stay as long as they are.
        capacity: Tokens a row, at least 1.

    Returns:
        The cache with `layout.capacity == capacity`; `cache` itself where it has that capacity
        already.

    Raises:
        UserError: `capacity` is no whole number of at least 1, or more than the model's positions
            allow; a row holds more (inside jit, and on rows of other hosts, it is cropped and its
            overflow flag is raised); a body on a mesh would be dealt otherwise.
    """
    check_cache(cache)
    require_own_bodies(cache, "resize")
    capacity, old = check_integer("capacity", capacity), cache.layout
    if capacity == old.capacity:
        return cache
    check_length(old.shape, capacity)
    layout = dataclasses.replace(old, capacity=capacity)
    check_means(old, layout)
    if capacity < old.capacity:
        cache = _fitting(cache, layout)
    return with_layout(cache, layout)


def _fitting(cache: Cache, layout: CacheLayout) -> Cache:
    """Give a cache whose rows all fit a layout of less capacity.

    Args:
        cache: The cache.
        layout: The smaller layout.

    Returns:
        The cache. Where a trace hides its numbers, rows that do not fit are cropped, and their
        overflow flags raised.

    Raises:
        UserError: A row does not fit, and its numbers are known."""
    if not is_known(
        *jax.tree.leaves((cache.lengths, cache.kept, [state.flushed for state in cache.runs]))
    ):
        most, misfits = excess(cache, layout)
        return crop(cache, jnp.minimum(cache.lengths, most)).replace(
            overflow=cache.overflow | misfits
        )
    with reading(True):
        misfits = np.asarray(excess(cache, layout)[1])
    if misfits.any():
        row = int(misfits.argmax())
        length = int(np.asarray(cache.lengths)[row])
        if length > layout.capacity:
            raise UserError(
                f"row {row} holds {length} tokens; a capacity of {layout.capacity} is too small: crop it first"
            )
        raise UserError(
            f"row {row} has more tokens encoded than a cache of capacity {layout.capacity} ever encodes; "
            "resize to a larger capacity"
        )
    return cache
