"""The cache: an immutable pytree of packed arrays (their static plan: kvqjax/cache/runs.py).

Row b holds tokens 0 .. lengths[b]-1. Its first `sinks` tokens stay exact; the tokens after them are numbered from 0
here ("body tokens"). Of those, clock c has encoded the first `flushed[c][b] * unit` into the body; the rest are in the
window, a ring in which body token r sits in slot r mod C. Layers of equal spec and sliding window form a run and are
stacked. What recurrent layers remember of the same tokens (kvqjax/model/recurrent.py) is their state, of fixed size."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import AxisType
from jaxtyping import Array, Bool, Int

from kvqjax._arguments import clipped
from kvqjax._errors import UserError
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.eviction import allocate_kept
from kvqjax.cache.page_counts import exact_beside_pages, table_width
from kvqjax.cache.reading import readers_text
from kvqjax.cache.run_layout import RunLayout
from kvqjax.cache.runs import chains, runs_of
from kvqjax.cache.show import arrays_text, run_text, states_text
from kvqjax.methods.layer_cache import Clock
from kvqjax.model.recurrent import empty_states
from kvqjax.ops.packing import Stored
from kvqjax.ops.xla_workarounds import floor_divide, modulo

__all__ = [
    "NO_PAGE",
    "Cache",
    "Run",
    "admitted",
    "allocate_cache",
    "blank_body",
    "body_tokens",
    "check_alive",
    "check_mesh",
    "due",
    "finite_tokens",
    "ring_tokens",
    "room",
    "units_due",
    "window_tokens",
]

NO_PAGE = -1  # in a table: the row has no page there

Leaf = Any  # an array, or whatever a tree map or an abstract evaluation puts in its place


class Run(struct.PyTreeNode):
    """Arrays of one run, [L_run, B, ...]: body[source][field], sinks[source] [.., sinks, W], window[source] [.., C, W];
    flushed[clock] counts the units encoded in each row. What a cache has not is an empty dict: no array is of size 0,
    because Orbax refuses to save such. A body in pages is [L_run, pages, ...], for all rows together."""

    body: dict[str, dict[str, Stored]]
    sinks: dict[str, Leaf]  # Float[L, B, sinks, W]
    window: dict[str, Leaf]  # Float[L, B, C, W]
    flushed: tuple[Leaf, ...]  # Int[B]


class Cache(struct.PyTreeNode):
    """A compressed KV cache.

    - `overflow[b]` turns True when a jitted call gets numbers for row b that cannot be: more tokens than
      `layout.capacity` holds, a count outside the new tokens given, a token id outside the vocabulary, a row or length
      that is not there. They are clipped: what does not fit is not stored. The flag stays until the row is evicted.
    - `finite[b]` counts the tokens of row b before its first one with a NaN or infinite source. It equals `lengths[b]`
      unless there is one.
    - `kept` says which tokens the body holds where some are evicted (kvqjax.cache.eviction). It is empty otherwise.
    - `states` are those of recurrent layers after `lengths[b]` tokens, float32 [layers, B, ...]: of all layers as one
      stack, or of each by itself, as runs are stored. Models without such layers have none.
    - `pages[b]` are the pages that row b's encoded tokens lie in, in the order of the tokens, and -1 where it has none
      (kvqjax/cache/pages.py). They are None where every row reserves its capacity. A row that lacks a page holds as
      many tokens as it can without."""

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
        """Mark rows that hold a token with a NaN or infinite source. Its numbers are stored as 0, and the row's logits
        are NaN until a crop cuts that token or the row is evicted."""
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
        run: the run's plan.
        rows: of the cache, or the pages of its pool.
        slots: tokens of a row, or of a page.

    Returns:
        The body; an empty one where the plan has no slots.
    """
    return {
        source: {name: field.packing.allocate((run.count, rows), slots) for name, field in codec.fields.items()}
        for source, codec in (run.wiring.storage.codecs.items() if run.slots else ())
    }


def _allocate_run(run: RunLayout, batch: int, layout: CacheLayout) -> Run:
    lead, dtype, sources = (run.count, batch), layout.dtype, run.wiring.storage.sources
    sinks = layout.method.sinks
    rows, slots = batch, run.slots
    if run.page:  # stored as if rows were pages
        assert layout.pool is not None
        rows, slots = layout.pool.pages, run.page
    return Run(
        body=blank_body(run, rows, slots),
        sinks={name: jnp.zeros((*lead, sinks, width), dtype) for name, width in sources.items()} if sinks else {},
        window={name: jnp.zeros((*lead, run.ring, width), dtype) for name, width in sources.items()},
        flushed=tuple(jnp.zeros((batch,), jnp.int32) for _ in run.wiring.storage.clocks),
    )


@jax.enable_x64(False)
def allocate_cache(layout: CacheLayout, batch: int) -> Cache:
    """Allocate an empty cache of `batch` rows."""
    if layout.capacity < 1 or batch < 1:
        raise UserError(f"a cache needs capacity and batch of at least 1, got {layout.capacity} and {batch}")
    chains(layout)  # refuses layers that cannot feed each other, before anything is cached
    runs = tuple(_allocate_run(run, batch, layout) for run in runs_of(layout))
    first = runs_of(layout)[0]
    kept = allocate_kept(layout.method.keep, batch, first.budget, first.wiring.storage.clocks[0].unit, first.ring)
    lengths, finite = (jnp.zeros((batch,), jnp.int32) for _ in range(2))
    states = _allocate_states(layout, batch)
    width = table_width(layout)
    pages = jnp.full((batch, width), NO_PAGE, jnp.int32) if width else None
    return Cache(runs, lengths, jnp.zeros((batch,), bool), finite, layout, kept, states, pages)


def room(cache: Cache) -> Int[Array, " B"] | int:
    """Count the tokens that each row can hold: the capacity, or as many as its pages allow."""
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
    unrolled = layout.layers == "unroll"
    return tuple(
        empty_states(shape, 1 if unrolled else len(shape.layers), batch)
        for _ in shape.layers[: None if unrolled else 1]
    )


@functools.lru_cache(maxsize=64)
def _can_be_deleted(kind: type) -> bool:
    """Say whether values of a type are arrays with memory of their own. By type: `isinstance` of every array would cost
    a call of a deep model's cache as much time as its dispatch."""
    return issubclass(kind, jax.Array) and not issubclass(kind, jax.core.Tracer)


def check_alive(*values: Any) -> None:
    """Raise UserError when an array of a cache, or of pending sources, was donated: a jitted call took its memory."""
    if any(_can_be_deleted(type(x)) and x.is_deleted() for x in jax.tree.leaves(values)):
        raise UserError(
            "this cache was donated to an earlier call, or shares arrays with one that was; "
            "go on with what that call returned, or fork the cache before it"
        )


def check_mesh(cache: Cache) -> None:
    """Raise UserError for a cache from outside, where `jax.set_mesh` names a mesh of Explicit axes: JAX does not write
    what is computed there into its arrays."""
    is_explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    if is_explicit and jax.typeof(cache.lengths).sharding.mesh.empty:
        raise UserError(
            "this cache was made outside jax.set_mesh, whose mesh has Explicit axes; "
            "make it inside, or by init_cache(..., mesh=)"
        )


def body_tokens(run: RunLayout, state: Run) -> Int[Array, " B"]:
    """Count the tokens of each row that are encoded in every source, and so attended to in the body."""
    units = [f * clock.unit for f, clock in zip(state.flushed, run.wiring.storage.clocks, strict=True)]
    return functools.reduce(jnp.minimum, units)


def due(clock: Clock, body_length: Int[Array, "*#S"], flushed: Int[Array, "*#S"]) -> Int[Array, "*S"]:
    """Count the units that are encoded once a row holds `body_length` tokens after the sinks, never fewer than
    `flushed`."""
    return jnp.maximum(flushed, floor_divide(body_length - clock.window, clock.unit))


def units_due(run: RunLayout, state: Run, body_length: Int[Array, " B"]) -> tuple[Int[Array, " B"], ...]:
    """Count the `due` units of every clock of a run whose rows hold `body_length` tokens after the sinks."""
    return tuple(due(clock, body_length, f) for clock, f in zip(run.wiring.storage.clocks, state.flushed, strict=True))


def ring_tokens(ring: int, first: Int[Array, " B"]) -> Int[Array, "B C"]:
    """Say which body token each window slot stands for, when `first` is the oldest one held."""
    first = first[:, None]
    return first + modulo(jnp.arange(ring)[None] - first, ring)


def window_tokens(ring: int, end: Int[Array, " B"]) -> Int[Array, "B C"]:
    """Say which body token each window slot stands for once a row has held `end` of them."""
    return ring_tokens(ring, jnp.maximum(end - ring, 0))


def admitted(cache: Cache, counts: Int[Array, " B"], length: int) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Count the new tokens that each row stores: `counts[b]`, but none where it is negative, at most the `length`
    tokens given, and at most those that still fit. Also give the overflow flags: raised where that is another number
    than `counts[b]`. Raises UserError as `check_mesh`."""
    check_mesh(cache)
    fits, overflow = clipped(counts, 0, jnp.minimum(length, jnp.maximum(room(cache) - cache.lengths, 0)))
    return fits, cache.overflow | overflow


def finite_tokens(cache: Cache, finite: Int[Array, " B"], counts: Int[Array, " B"]) -> Int[Array, " B"]:
    """Give the cache's `finite` after `counts` new tokens of each row, of which `finite` come before the first that is
    not finite. Devices that hold other heads may count more of them: the least number is the row's."""
    axes = cache.layout.heads_over
    finite = jax.lax.pmin(finite, axes) if axes else finite
    return jnp.where(cache.nonfinite, cache.finite, cache.lengths + jnp.minimum(finite, counts))
