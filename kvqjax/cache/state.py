"""The cache: an immutable pytree of packed arrays (their static plan: kvqjax/cache/runs.py).

    row b      sinks | body ......... | window |
    position   0     sinks                      lengths[b]

The first `sinks` tokens of a row stay exact. The tokens after them are numbered from 0 ("body
tokens"). Clock c has encoded the first `flushed[c][b] * unit` body tokens into the body. The others
are in the window, a ring of C slots in which body token t is in slot t mod C. With several clocks,
a token stays in the window until each has encoded it.

Neighbouring layers of equal spec and sliding window form a run, and are stacked. What recurrent
layers remember of the same tokens (kvqjax/model/recurrent.py) is their state, of fixed size.

`row_axes` says which axis of every array counts rows. `check_cache` is the check of all public
functions that take a
cache: it looks at shapes and dtypes alone, which are static, so that it takes no device time and
takes tracers and abstract arrays too."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import AxisType
from jaxtyping import Array, Bool, Int

from kvqjax._arguments import clipped, named
from kvqjax._errors import UserError
from kvqjax.cache.layout import CacheLayout, LengthBound, RunLayout
from kvqjax.cache.runs import chains, exact_beside_pages, readers_text, runs_of, table_width
from kvqjax.methods.layer_cache import Clock
from kvqjax.model.recurrent import empty_states
from kvqjax.ops.packing import Stored
from kvqjax.ops.packing.base import array_bytes
from kvqjax.ops.xla_workarounds import floor_divide, modulo


def _array(leaf) -> str:
    """Print dtype and shape, `uint32[2,1,96,64]`. For other values, print the type's name."""
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return type(leaf).__name__
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def arrays_text(tree) -> str:
    """Print how many arrays a pytree has, and their bytes."""
    leaves = []
    for leaf in jax.tree.leaves(tree):
        if hasattr(leaf, "size") and hasattr(leaf, "dtype"):
            leaves.append(leaf)
    return f"{array_bytes(leaves):,} bytes in {len(leaves)} arrays"


def run_text(first: int, count: int, reader: str, parts: dict) -> str:
    """Print one run: `layers 0-2, read by blocks: body.k.codes uint32[..], ...`.

    Args:
        first: The number of the run's first layer.
        count: How many layers the run has.
        reader: What reads its body.
        parts: The run's arrays. Arrays without numbers are left out."""
    layers = f"layers {first}-{first + count - 1}" if count > 1 else f"layer {first}"
    texts = []
    leaves, _ = jax.tree_util.tree_flatten_with_path(parts)
    for path, leaf in leaves:
        if getattr(leaf, "size", 1):
            name = ".".join(_written_key(key) for key in path)
            texts.append(f"{name} {_array(leaf)}")
    return f"{layers}, read by {reader}: {', '.join(texts)}"


def _written_key(key: Any) -> str:
    """Write a key of a pytree's path: a name of a dict, or a place in a tuple."""
    return str(getattr(key, "key", getattr(key, "idx", key)))


def states_text(layers: int, states: tuple[dict, ...]) -> str:
    """Print how many recurrent layers there are, and the first stack's arrays by name:
    `3 recurrent layers: ...`."""
    text = ", ".join(f"{name} {_array(leaf)}" for name, leaf in states[0].items())
    return f"{layers} recurrent layer{'s' * (layers > 1)}: {text}"


NO_PAGE = -1  # in a table: the row has no page there

Leaf = Any  # an array, or whatever a tree map or an abstract evaluation puts in its place


class Run(struct.PyTreeNode):
    """The arrays of one run.

    A part that a cache does not have is an empty dict. No array is of size 0, because Orbax refuses
    to save those.

    Attributes:
        body: The stored arrays of every field of every source, {source: {field: arrays}}. An array
            is [L_run, B, ...], or [L_run, pages, ...] where all rows' bodies lie in pages.
        sinks: The sinks' sources, by name.
        window: The window's sources, by name.
        flushed: How many units each clock has encoded in each row, clock by clock."""

    body: dict[str, dict[str, Stored]]
    sinks: dict[str, Leaf]  # Float[L, B, sinks, W]
    window: dict[str, Leaf]  # Float[L, B, C, W]
    flushed: tuple[Leaf, ...]  # Int[B]


class Cache(struct.PyTreeNode):
    """A compressed KV cache.

    Attributes:
        runs: The arrays of each run, in layer order.
        lengths: How many tokens each row holds.
        overflow: `overflow[b]` turns True when a jitted call gets numbers for row b that cannot be:
            more tokens than `layout.capacity` holds, a count outside the new tokens given, a token
            id outside the vocabulary, a row or length that does not exist. They are clipped: what
            does not fit is not stored. The flag stays until the row is evicted.
        finite: `finite[b]` counts the tokens of row b before its first one with a NaN or infinite
            source. Without any, it equals `lengths[b]`.
        layout: All that is static about the cache.
        kept: Which tokens the body holds where some are evicted (kvqjax.cache.eviction). It is
            empty otherwise.
        states: The states of recurrent layers after `lengths[b]` tokens, float32 [layers, B, ...]:
            of all layers as one stack, or of each by itself, as runs are stored. Models without
            recurrent layers have none.
        pages: The pages that each row's encoded tokens lie in, in the order of the tokens, and -1
            for no page (kvqjax/cache/pages.py). A row that lacks a page holds as many tokens as it
            can without it. None: every row reserves its capacity."""

    runs: tuple[Run, ...]
    lengths: Leaf  # Int[B]
    overflow: Leaf  # Bool[B]
    finite: Leaf  # Int[B]
    layout: CacheLayout = struct.field(pytree_node=False)
    kept: dict[str, Leaf] = struct.field(default_factory=dict)
    states: tuple[dict[str, Leaf], ...] = ()
    pages: Leaf | None = None  # Int[B, N]

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def nonfinite(self) -> Bool[Array, " B"]:
        """Mark rows that hold a token with a NaN or infinite source.

        Such numbers are stored as 0. The row's logits are NaN until a crop cuts the token, or the
        row is evicted."""
        return self.finite < self.lengths

    def __repr__(self) -> str:
        layout = self.layout
        chosen = layout.kernels.text(layout.target)
        head = f"Cache({layout.method}, {layout.dtype}, capacity {layout.capacity}): {arrays_text(self)}; {chosen}"
        parts = [{"body": r.body, "sinks": r.sinks, "window": r.window} for r in self.runs]
        plans = zip(runs_of(layout), readers_text(layout), parts, strict=False)
        lines = [run_text(run.first, run.count, reader, part) for run, reader, part in plans]
        if self.states:
            lines.append(states_text(layout.shape.depth - layout.shape.num_layers, self.states))
        return "\n  ".join([head, *lines])


def blank_body(run: RunLayout, rows: int, slots: int) -> dict:
    """Make the body of a run that has encoded nothing yet, {source: {field: arrays}}.

    Args:
        rows: of the cache, or the pages of its pool.
        slots: tokens of a row, or of a page.

    Returns:
        The body; an empty one where the plan has no slots.
    """
    body: dict[str, dict[str, Stored]] = {}
    if not run.slots:
        return body
    for source, codec in run.wiring.storage.codecs.items():
        fields = {}
        for name, field in codec.fields.items():
            fields[name] = field.packing.allocate((run.count, rows), slots)
        body[source] = fields
    return body


def _allocate_run(run: RunLayout, batch: int, layout: CacheLayout) -> Run:
    """Allocate the arrays of a run for `batch` empty rows."""
    if run.page:
        # A body in pages is stored as if its rows were pages, and its slots a page's tokens.
        assert layout.pool is not None
        body = blank_body(run, layout.pool.pages, run.page)
    else:
        body = blank_body(run, batch, run.slots)

    def exact(tokens: int) -> dict[str, Leaf]:
        """Allocate `tokens` exact tokens of every row, {source: [L, B, tokens, W]}."""
        arrays = {}
        for name, width in run.wiring.storage.sources.items():
            arrays[name] = jnp.zeros((run.count, batch, tokens, width), layout.dtype)
        return arrays

    sinks = exact(layout.method.sinks) if layout.method.sinks else {}
    window = exact(run.ring)
    flushed = tuple(jnp.zeros((batch,), jnp.int32) for _ in run.wiring.storage.clocks)
    return Run(body, sinks, window, flushed)


@jax.enable_x64(False)
def allocate_cache(layout: CacheLayout, batch: int) -> Cache:
    """Allocate an empty cache.

    Args:
        batch: How many rows it has.

    Raises:
        UserError: A capacity or batch below 1, or a layout that cannot be planned (`runs_of`,
        `chains`)."""
    if layout.capacity < 1 or batch < 1:
        raise UserError(
            f"a cache needs capacity and batch of at least 1, got {layout.capacity} and {batch}"
        )
    chains(layout)  # refuses layers that cannot feed each other, before anything is cached
    runs = tuple(_allocate_run(run, batch, layout) for run in runs_of(layout))
    kept = empty_kept(runs_of(layout)[0], batch)  # with eviction, all runs have one budget
    # Two arrays: a call to which the cache is donated takes each array's memory once.
    lengths = jnp.zeros((batch,), jnp.int32)
    finite = jnp.zeros((batch,), jnp.int32)
    states = _allocate_states(layout, batch)
    width = table_width(layout)
    pages = jnp.full((batch, width), NO_PAGE, jnp.int32) if width else None
    overflow = jnp.zeros((batch,), bool)
    return Cache(runs, lengths, overflow, finite, layout, kept, states, pages)


def empty_kept(run: RunLayout, batch: int) -> dict[str, Leaf]:
    """Make the bookkeeping of rows that have evicted nothing yet (kvqjax/cache/eviction.py).

    Args:
        run: the plan of the cache's first run, which stands for all.
        batch: how many rows there are.

    Returns:
        `Cache.kept`: no slot of the body holds a token. It is empty where a body keeps all tokens.
    """
    if not run.budget:
        return {}
    return {"positions": jnp.full((batch, run.budget), -1, jnp.int32)}


def room(cache: Cache) -> Int[Array, " B"] | int:
    """Count the tokens that each row can hold in all: the capacity, or as many as its pages
    allow."""
    layout = cache.layout
    if cache.pages is None:
        return layout.capacity
    assert layout.pool is not None
    # Tokens lie in a row's pages in their order, so that pages behind a missing one do not count.
    pages = jnp.cumprod(cache.pages >= 0, axis=1, dtype=jnp.int32).sum(1)
    return jnp.minimum(layout.capacity, pages * layout.pool.tokens + exact_beside_pages(layout))


def _allocate_states(layout: CacheLayout, batch: int) -> tuple[dict[str, Leaf], ...]:
    """Allocate the states of recurrent layers, as one stack or each by itself."""
    shape = layout.shape.recurrent
    if shape is None:
        return ()
    if layout.layers == "unroll":
        return tuple(empty_states(shape, 1, batch) for _ in shape.layers)
    return (empty_states(shape, len(shape.layers), batch),)


@functools.lru_cache(maxsize=64)
def _can_be_deleted(kind: type) -> bool:
    """Say whether values of a type are arrays with memory of their own."""
    # Cached by type: `isinstance` of every array would take as long as the dispatch of a call on a
    # deep model's cache.
    return issubclass(kind, jax.Array) and not issubclass(kind, jax.core.Tracer)


def check_alive(*values: Any) -> None:
    """Raise UserError when an array of a cache, or of pending sources, was donated: a jitted call
    took its memory."""
    for leaf in jax.tree.leaves(values):
        if _can_be_deleted(type(leaf)) and leaf.is_deleted():
            raise UserError(
                "this cache was donated to an earlier call, or shares arrays with one that was; "
                "go on with what that call returned, or fork the cache before it"
            )


def check_mesh(cache: Cache) -> None:
    """Raise UserError for a cache from outside, where `jax.set_mesh` names a mesh of Explicit axes:
    JAX does not write what is computed there into its arrays."""
    is_explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    if is_explicit and jax.typeof(cache.lengths).sharding.mesh.empty:
        raise UserError(
            "this cache was made outside jax.set_mesh, whose mesh has Explicit axes; "
            "make it inside, or by init_cache(..., mesh=)"
        )


def bounded(cache: Cache, bound: LengthBound | None) -> Cache:
    """Give the same cache whose programs read no further than `bound`; None takes the promise
    back."""
    return cache.replace(layout=dataclasses.replace(cache.layout, bound=bound))


def body_tokens(run: RunLayout, state: Run) -> Int[Array, " B"]:
    """Count the tokens of each row that are encoded in every source, and so attended to in the
    body."""
    clocks = run.wiring.storage.clocks
    tokens = [units * clock.unit for units, clock in zip(state.flushed, clocks, strict=True)]
    return functools.reduce(jnp.minimum, tokens)


def due(
    clock: Clock, body_length: Int[Array, "*#S"], flushed: Int[Array, "*#S"]
) -> Int[Array, "*S"]:
    """Count the units of a clock that are encoded once a row holds some body tokens.

    Args:
        body_length: How many body tokens the row then holds.
        flushed: How many units are encoded already.

    Returns:
        The number of units, at least `flushed`: what is encoded stays so after a crop of the
        window."""
    return jnp.maximum(flushed, floor_divide(body_length - clock.window, clock.unit))


def units_due(
    run: RunLayout, state: Run, body_length: Int[Array, " B"]
) -> tuple[Int[Array, " B"], ...]:
    """Count the `due` units of every clock of a run whose rows hold `body_length` body tokens."""
    clocks = zip(run.wiring.storage.clocks, state.flushed, strict=True)
    return tuple(due(clock, body_length, flushed) for clock, flushed in clocks)


def ring_tokens(ring: int, first: Int[Array, " B"]) -> Int[Array, "B C"]:
    """Say which body token each of the `ring` window slots stands for, if `first` is the oldest
    token of each row's window."""
    first = first[:, None]
    # Slot s stands for the least token t >= first with t = s mod C.
    return first + modulo(jnp.arange(ring)[None] - first, ring)


def admitted(
    cache: Cache, counts: Int[Array, " B"], length: int
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Count the new tokens that each row stores.

    Args:
        cache: The cache before the call.
        counts: How many tokens each row should store.
        length: How many new tokens are given for each row.

    Returns:
        (`counts`, clipped to 0 to `length` and to what still fits the row; the cache's overflow
        flags, raised for rows whose counts were clipped).

    Raises:
        UserError: As `check_mesh`."""
    check_mesh(cache)
    spare = jnp.maximum(room(cache) - cache.lengths, 0)
    fits, overflow = clipped(counts, 0, jnp.minimum(length, spare))
    return fits, cache.overflow | overflow


def finite_tokens(
    cache: Cache, finite: Int[Array, " B"], counts: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Compute `Cache.finite` after new tokens.

    Args:
        cache: The cache before the call.
        finite: How many of the T tokens given come before the first that is not finite, for the
            heads on this device.
        counts: How many of them each row stores.

    Returns:
        The counts of finite tokens."""
    axes = cache.layout.heads_over
    # The devices hold different heads of a token. It is finite where all its heads are.
    finite = jax.lax.pmin(finite, axes) if axes else finite
    return jnp.where(cache.nonfinite, cache.finite, cache.lengths + jnp.minimum(finite, counts))


class _Promise(NamedTuple):
    """What one array of a cache must look like, as follows from its layout and the number of rows.

    Attributes:
        name: The path of the array in the cache, for messages.
        shape: The shape.
        dtype: The dtype.
        row_axis: Which axis counts rows."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    row_axis: int


def row_axes(cache: Cache) -> Cache:
    """Give the row axis of every array of a cache.

    Args:
        cache: Any cache, also a traced or an abstract one. Only its structure is read.

    Returns:
        A pytree of the same structure with an int in place of every array: 1 for arrays [layers,
        rows, ...], 0 for arrays [rows, ...]. Bodies in pages have no axis of rows: their 1 counts
        pages. It is what `jax.vmap` takes as `in_axes`, and what generic tree code must map along:
        `jax.tree.map(lambda x, axis: jnp.flip(x, axis), cache, kvqjax.row_axes(cache))`.

    Raises:
        UserError: for what is no cache.
    """
    _check_kind(cache)

    def axis_of_all(tree, axis: int):
        return jax.tree.map(lambda _: axis, tree)

    def run(state: Run) -> Run:
        return Run(
            body=axis_of_all(state.body, 1),
            sinks=axis_of_all(state.sinks, 1),
            window=axis_of_all(state.window, 1),
            flushed=axis_of_all(state.flushed, 0),
        )

    return cache.replace(
        runs=tuple(run(state) for state in cache.runs),
        lengths=0,
        overflow=0,
        finite=0,
        kept=axis_of_all(cache.kept, 0),
        states=axis_of_all(cache.states, 1),
        pages=axis_of_all(cache.pages, 0),
    )


@functools.lru_cache(maxsize=256)
def _promised(layout: CacheLayout, batch: int) -> tuple[_Promise, ...]:
    """List what the arrays of a cache of this layout look like, in the order of its leaves."""
    cache = jax.eval_shape(functools.partial(allocate_cache, layout, batch))
    leaves, _ = jax.tree_util.tree_flatten_with_path(cache)
    axes = jax.tree.leaves(row_axes(cache))
    promises = []
    for (path, leaf), axis in zip(leaves, axes, strict=True):
        name = jax.tree_util.keystr(path).removeprefix(".")
        promises.append(_Promise(name, leaf.shape, leaf.dtype, axis))
    return tuple(promises)


def check_cache(*caches: Any) -> None:
    """Check values that should be caches.

    Inside a `shard_map` of the caller's own, arrays are parts of what the layout describes: there
    only their layers and rows are compared.

    Raises:
        UserError: A value is no cache, its arrays were donated, or they do not have the shapes and
            dtypes that its layout and its number of rows promise. The line says what probably
            happened, and what to call instead.
    """
    for cache in caches:
        _check_kind(cache)
        check_alive(cache)
        _check_arrays(cache)


def _check_kind(cache: Any) -> None:
    """Raise UserError for what is no Cache."""
    if not isinstance(cache, Cache):
        hint = ""
        if isinstance(cache, tuple):
            hint = "; forward and prefill return (logits, cache)"
        raise UserError(f"cache is {named(cache)}; wanted a Cache, such as init_cache gives{hint}")


def _check_arrays(cache: Cache) -> None:
    """Raise UserError unless all arrays of a Cache look as its layout promises."""
    lengths = getattr(cache.lengths, "shape", None)
    if lengths is None:
        raise UserError(
            f"the cache's lengths are a {type(cache.lengths).__name__}, not an array of its rows' lengths"
        )
    if len(lengths) != 1 or not lengths[0]:
        raise UserError(
            f"the cache's lengths have shape {list(lengths)}, wanted [rows]: every array needs its row axis, "
            "which kvqjax.row_axes(cache) names"
        )
    leaves = jax.tree.leaves(cache)
    promises = _promised(cache.layout, lengths[0])
    if len(leaves) != len(promises):
        raise UserError(f"the cache has {len(leaves)} arrays, its layout promises {len(promises)}")
    inside_shard_map = bool(jax.sharding.get_abstract_mesh().manual_axes)
    for leaf, promise in zip(leaves, promises, strict=True):
        shape = getattr(leaf, "shape", None)
        fits = shape == promise.shape or (inside_shard_map and _is_part(shape, promise))
        if not (fits and leaf.dtype == promise.dtype):
            raise UserError(_broken(leaf, promise, cache.layout.capacity))


def _is_part(shape: tuple[int, ...] | None, promise: _Promise) -> bool:
    """Say whether a device's part of an array has all of its layers and rows."""
    if shape is None or len(shape) != len(promise.shape):
        return False
    rows = promise.row_axis + 1
    return shape[:rows] == promise.shape[:rows]


def _broken(leaf: Any, promise: _Promise, capacity: int) -> str:
    """Say in one line what is wrong with an array, and what to call instead.

    Args:
        leaf: The array, or what stands in its place.
        promise: What it should look like."""
    name = promise.name
    shape = promise.shape
    axis = promise.row_axis
    actual = getattr(leaf, "shape", None)
    if actual is None:
        return f"{name} of the cache is a {type(leaf).__name__}, not an array"
    head = f"{name} of the cache has shape {list(actual)}, wanted {list(shape)}: "
    if len(actual) != len(shape):
        return f"{head}an axis was added or removed; kvqjax.row_axes(cache) gives the row axis of every array"
    if axis and actual[0] != shape[0]:
        return (
            f"{head}its axis 0 counts layers, and tree code along axis 0 changed them; for rows use kvqjax.repeat, "
            "gather or insert, or the axes that kvqjax.row_axes(cache) gives"
        )
    if actual[axis] != shape[axis]:
        return f"{head}its rows are not the {shape[axis]} of cache.lengths; for rows use kvqjax.repeat, gather or insert"  # noqa: E501
    if actual != shape:
        return f"{head}the layout of a capacity of {capacity} promises that; kvqjax.resize makes another capacity"
    return f"{name} of the cache is of type {leaf.dtype}, wanted {jnp.dtype(promise.dtype)}: its bits have that meaning"
