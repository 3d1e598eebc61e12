"""The cache: an immutable pytree of packed arrays, and the static plan that says what they are.

Row b holds tokens 0 .. lengths[b]-1. Its first `sinks` tokens stay exact; the tokens after them are numbered from 0
here ("body tokens"). Of those, clock c has encoded the first `flushed[c][b] * unit` into the body; the rest are in the
window, a ring in which body token r sits in slot r mod C. Layers of equal spec and sliding window form a run and are
stacked."""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from kvqjax._errors import UserError
from kvqjax.cache.deal import Deal
from kvqjax.cache.eviction import allocate_kept
from kvqjax.cache.show import arrays_text, run_text
from kvqjax.methods.keep import Keep
from kvqjax.methods.spec import Method
from kvqjax.methods.wiring import Clock, Packed, Wiring
from kvqjax.model.config import KVShape
from kvqjax.ops.layout import PLANE, Stored, allocate, block_tokens
from kvqjax.pallas_kernels.choice import BY_TABLE, Kernels
from kvqjax.pallas_kernels.forms import form_of
from kvqjax.pallas_kernels.packed import family

__all__ = [
    "AT_ONCE",
    "Cache",
    "CacheLayout",
    "Run",
    "RunPlan",
    "allocate_cache",
    "body_tokens",
    "chains",
    "check_alive",
    "plan",
]

AT_ONCE = 16384  # tokens of a body that is decoded on a GPU: fewer launches of kernels, and not a layer's whole body
MOST_TOKENS = 2**30  # sums of two such counts are still int32
Leaf = Any  # an array, or whatever a tree map or an abstract evaluation puts in its place


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Everything static about a cache: the model's shape, method, most tokens per row, the dtype of sinks and window,
    whether layers that cache alike are one stack ("scan") or each is stored by itself ("unroll"), whether a body that
    can be is stored head by head ("heads", kvqjax/ops/head_major.py) or as planes of words ("planes"), the chip whose
    kernels read the body (`kvqjax.pallas_kernels.packed.TARGETS`), which `kernels` may, and over how many devices (mesh
    axes, inside `shard_map`) the body's blocks are dealt. `heads_over` are, inside `shard_map`, the axes that share out
    heads."""

    shape: KVShape
    method: Method
    capacity: int
    dtype: str
    layers: str = "scan"
    form: str = "planes"
    target: str = "cpu"
    kernels: Kernels = BY_TABLE
    dealt: int = 1
    dealt_over: tuple[str, ...] = ()
    heads_over: tuple[str, ...] = ()

    def __post_init__(self):
        if self.layers not in ("scan", "unroll"):
            raise UserError(f"layers={self.layers!r}; known: scan, unroll")
        if self.form not in ("planes", "heads"):
            raise UserError(f"form={self.form!r}; known: planes, heads")


class RunPlan(NamedTuple):
    """A run of equal layers: `first` .. `first + count - 1`, `shape` being one layer's. The body has `slots` tokens in
    blocks of `block`, a ring of blocks when it `wraps`: layers that see only `sliding` tokens keep no more. The window
    is a ring of `ring` tokens. `slots` counts all devices' when the blocks are dealt (`deal`), `slots_here` one's.
    With eviction the body never holds more than `kept` tokens (0: no eviction). `static`: what a few new tokens read of
    the body is bounded by its slots and not by data, because a GPU's host decides on every turn of such a loop."""

    first: int
    count: int
    shape: KVShape
    wiring: Wiring
    block: int
    slots: int
    ring: int
    wraps: bool
    deal: Deal = Deal()
    kept: int = 0
    static: bool = False

    @property
    def sliding(self) -> int | None:
        """How many tokens a query sees, itself included; None: all before it."""
        return self.shape.window

    @property
    def slots_here(self) -> int:
        return self.slots // self.deal.parts

    @property
    def reading(self) -> int:
        """Tokens read at a time: as many blocks as divide the body, up to what the wiring or a GPU asks for; one where
        it is a ring."""
        wanted = max(self.wiring.reading, AT_ONCE if self.static else 1)
        most = 1 if self.wraps else max(1, wanted // self.block)
        return self.block * next(n for n in range(most, 0, -1) if self.slots_here % (n * self.block) == 0)

    @property
    def carried(self) -> int:
        """Body tokens of which a reader holds what flows between layers, per row (see `Wiring.copy`)."""
        return {"layer": self.slots, "none": self.block, "all": 0}[self.wiring.copy]


class Run(struct.PyTreeNode):
    """Arrays of one run, [L_run, B, ...]: body[source][field], sinks[source] [.., sinks, W], window[source] [.., C, W];
    flushed[clock] counts the units encoded in each row."""

    body: dict[str, dict[str, Stored]]
    sinks: dict[str, Leaf]  # Float[L, B, sinks, W]
    window: dict[str, Leaf]  # Float[L, B, C, W]
    flushed: tuple[Leaf, ...]  # Int[B]


class Cache(struct.PyTreeNode):
    """A compressed KV cache. `overflow[b]` turns True, and stays so, when a jitted call was asked to hold more tokens
    than `layout.capacity` in row b; what did not fit is not stored. `finite[b]` counts the tokens of row b before its
    first one with a NaN or infinite source: it equals `lengths[b]` unless there is one. `kept` says which tokens the
    body holds where some are evicted (kvqjax.cache.eviction), and is empty otherwise."""

    runs: tuple[Run, ...]
    lengths: Leaf  # Int[B]
    overflow: Leaf  # Bool[B]
    finite: Leaf  # Int[B]
    layout: CacheLayout = struct.field(pytree_node=False)
    kept: dict[str, Leaf] = struct.field(default_factory=dict)

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def nonfinite(self) -> Bool[Array, " B"]:
        """Rows that hold a token with a NaN or infinite source: its numbers are stored as 0, and the row's logits are
        NaN until a crop cuts that token or the row is evicted."""
        return self.finite < self.lengths

    def __repr__(self) -> str:
        layout = self.layout
        chosen = layout.kernels.text(layout.target)
        head = f"Cache({layout.method}, {layout.dtype}, capacity {layout.capacity}): {arrays_text(self)}; {chosen}"
        parts = [{"body": r.body, "sinks": r.sinks, "window": r.window} for r in self.runs]
        lines = [run_text(p.first, p.count, part) for p, part in zip(plan(layout), parts, strict=False)]
        return "\n  ".join([head, *lines])


def stored_form(target: str) -> str:
    """The form that a chip reads best."""
    return "heads" if family(target) == "gpu" else "planes"


def _resolve(wiring: Wiring, dtype: str) -> Wiring:
    """Give fields of dtype "compute" the cache's compute dtype."""

    def fix(codec):
        fields = codec.fields.items()
        return codec._replace(
            fields={n: dataclasses.replace(f, dtype=dtype) if f.dtype == "compute" else f for n, f in fields}
        )

    return wiring._replace(codecs={name: fix(codec) for name, codec in wiring.codecs.items()})


def _in_form(wiring: Wiring, form: str, shape: KVShape) -> Wiring:
    """The wiring with its fields in the form that they are stored in."""
    if form == "planes" or wiring.direct is None:
        return wiring._replace(direct=None)

    def by_head(codec):
        wide = {n: f for n, f in codec.fields.items() if f.kind in ("codes", "plain")}
        heads = {n: dataclasses.replace(f, heads=shape.num_kv_heads) for n, f in wide.items()}
        return codec._replace(fields=codec.fields | heads)

    codecs = {name: by_head(codec) for name, codec in wiring.codecs.items()}
    return wiring._replace(codecs=codecs, packed=None)


def _with_kernels(packed: Packed, layout: CacheLayout) -> Packed:
    """The form with the layout's word on its kernel: a body for "cpu" has none."""
    allowed = layout.kernels.allow(form_of(packed.spec))
    spec = dataclasses.replace(packed.spec, target=layout.target if allowed else "cpu")
    return packed._replace(spec=spec, trusted=layout.kernels.forms is not None)


def _check_clocks(wiring: Wiring, name: str) -> None:
    for clock in wiring.clocks:
        if clock.window < 0:
            raise UserError(f"{name}: window={clock.window}; a count of tokens cannot be negative")
        if clock.window > MOST_TOKENS:
            raise UserError(f"{name}: window={clock.window}; at most {MOST_TOKENS} tokens are possible")
        if clock.unit != 1 and (clock.unit < 1 or clock.unit % 32):
            raise UserError(
                f"{name}: tokens leave the window {clock.unit} at a time; 1 or a multiple of 32 is possible"
            )
        for source in clock.sources:
            if clock.unit % wiring.codecs[source].unit:
                raise UserError(
                    f"{name}: {source} is encoded {wiring.codecs[source].unit} tokens at a time, "
                    f"but leaves the window {clock.unit} at a time"
                )


def _by_groups(wiring: Wiring, layout: CacheLayout, keep: Keep) -> Wiring:
    """The wiring with a clock that eviction can work with: one for all sources, of whole planes at least."""
    if len(wiring.clocks) > 1:
        raise UserError(f"{layout.method}: keys and values leave the window apart, so their tokens cannot be evicted")
    clock = wiring.clocks[0]._replace(unit=max(PLANE, wiring.clocks[0].unit))
    if keep.budget < clock.unit:
        raise UserError(f"{layout.method}: tokens leave the body {clock.unit} at a time; keep that many at least")
    return wiring._replace(clocks=(clock,))


def _plan_run(layout: CacheLayout, first: int, count: int, spec, shape: KVShape, block: int) -> RunPlan:
    try:
        wiring = _in_form(_resolve(spec.build(shape), layout.dtype), layout.form, shape)
        if wiring.packed is not None:
            wiring = wiring._replace(packed=_with_kernels(wiring.packed, layout))
    except ValueError as error:
        raise UserError(f"{layout.method} does not fit layer {first} of this model: {error}") from error
    _check_clocks(wiring, str(layout.method))
    keep = layout.method.keep
    if keep is not None:
        wiring = _by_groups(wiring, layout, keep)
    fields = [field for codec in wiring.codecs.values() for field in codec.fields.values()]
    block = math.lcm(block, max(block_tokens(fields), *(clock.unit for clock in wiring.clocks)))
    room = layout.capacity - layout.method.sinks
    ring = max(clock.window + clock.unit for clock in wiring.clocks)
    # Nothing is ever encoded when the window alone can hold the capacity.
    most = max((room - clock.window) // clock.unit * clock.unit for clock in wiring.clocks)
    ring = max(1, min(ring, room))
    if keep is not None:
        unit = wiring.clocks[0].unit
        kept = max(0, min(keep.budget // unit * unit, most))
        return RunPlan(first, count, shape, wiring, block, -(-kept // block) * block, ring, False, kept=kept)
    whole = blocks = max(0, -(-most // block))
    if shape.window is not None:
        # One block for the newest partial one, and slack so that cropping inside the window loses nothing visible.
        blocks = min(whole, -(-(shape.window + ring) // block) + 1)
    static = layout.form == "heads"
    return RunPlan(first, count, shape, wiring, block, blocks * block, ring, blocks < whole, static=static)


def _plan_runs(layout: CacheLayout, block: int) -> list[RunPlan]:
    """The runs in layer order, their blocks multiples of `block`."""
    numbers = range(layout.shape.num_layers)
    shapes = [layout.shape.layer(index) for index in numbers]
    apart = numbers if layout.layers == "unroll" else [0] * len(numbers)
    runs, first = [], 0
    for (spec, shape, _), group in itertools.groupby(
        zip(layout.method.layers(layout.shape), shapes, apart, strict=True)
    ):
        count = len(list(group))
        runs.append(_plan_run(layout, first, count, spec, shape, block))
        first += count
    return runs


@functools.lru_cache(maxsize=64)
def plan(layout: CacheLayout) -> tuple[RunPlan, ...]:
    """The runs of a layout, in layer order. Cached, so that wirings are built once."""
    runs = _plan_runs(layout, 1)
    if any(run.wiring.copy == "none" for run in runs):  # a block is then read from all layers below at once
        runs = _plan_runs(layout, math.lcm(*(run.block for run in runs)))
    clocks = {run.wiring.clocks[0][1:] for run in runs}
    if layout.method.keep is not None and len(clocks) > 1:
        raise UserError(f"{layout.method}: evicting tokens needs one window and unit for all layers, got {clocks}")
    return tuple(runs) if layout.dealt == 1 else _dealt(layout, runs)


def _dealt(layout: CacheLayout, runs: list[RunPlan]) -> tuple[RunPlan, ...]:
    """The runs with as many whole blocks on every device. A token lies on one device in all layers, because layers may
    feed each other: the blocks dealt are common to all runs."""
    deal = Deal(layout.dealt, math.lcm(*(run.block for run in runs)), layout.dealt_over)
    turn = deal.block * deal.parts
    return tuple(run._replace(slots=-(-run.slots // turn) * turn, deal=deal) for run in runs)


@functools.lru_cache(maxsize=64)
def chains(layout: CacheLayout) -> tuple[tuple[int, ...], ...]:
    """Run numbers that are encoded together: all of them when something flows from layer to layer; else those that
    fall due at the same time, so that one question decides for all."""
    runs = plan(layout)
    if not any(run.wiring.carry for run in runs):
        due_together: dict[tuple, list[int]] = {}
        for number, run in enumerate(runs):
            due_together.setdefault((run.wiring.clocks, run.slots > 0), []).append(number)
        return tuple(map(tuple, due_together.values()))
    clocks = {run.wiring.clocks[0][1:] for run in runs}
    if len(clocks) > 1 or any(len(run.wiring.clocks) > 1 for run in runs):
        raise UserError(f"{layout.method}: layers that feed each other must share one window and unit, got {clocks}")
    # A layer that slides neither reads old tokens nor keeps them where its neighbours do, so nothing can flow past it.
    rings = {run.slots for run in runs} if any(run.wraps for run in runs) else set()
    if len({run.sliding for run in runs}) > 1 or len(rings) > 1:
        raise UserError(
            f"{layout.method}: layers that feed each other must see the same tokens; sliding windows differ"
        )
    return (tuple(range(len(runs))),)


def _allocate_run(run: RunPlan, batch: int, layout: CacheLayout) -> Run:
    lead, dtype, sources = (run.count, batch), layout.dtype, run.wiring.sources
    body = {
        name: {f: allocate(field, lead, run.slots) for f, field in codec.fields.items()}
        for name, codec in run.wiring.codecs.items()
    }
    return Run(
        body=body if run.slots else {},
        sinks={name: jnp.zeros((*lead, layout.method.sinks, width), dtype) for name, width in sources.items()},
        window={name: jnp.zeros((*lead, run.ring, width), dtype) for name, width in sources.items()},
        flushed=tuple(jnp.zeros((batch,), jnp.int32) for _ in run.wiring.clocks),
    )


@jax.enable_x64(False)
def allocate_cache(layout: CacheLayout, batch: int) -> Cache:
    """An empty cache of `batch` rows."""
    if layout.capacity < 1 or batch < 1:
        raise UserError(f"a cache needs capacity and batch of at least 1, got {layout.capacity} and {batch}")
    chains(layout)  # refuses layers that cannot feed each other, before anything is cached
    runs = tuple(_allocate_run(run, batch, layout) for run in plan(layout))
    first, keep = plan(layout)[0], layout.method.keep
    kept = {}
    if keep is not None and first.kept:
        kept = allocate_kept(keep.rule, batch, first.kept, first.wiring.clocks[0].unit, first.ring)
    lengths, finite = (jnp.zeros((batch,), jnp.int32) for _ in range(2))
    return Cache(runs, lengths, jnp.zeros((batch,), bool), finite, layout, kept)


def check_alive(*values: Any) -> None:
    """Raise UserError when an array of a cache, or of pending sources, was donated: a jitted call took its memory."""
    arrays = [x for x in jax.tree.leaves(values) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
    if any(array.is_deleted() for array in arrays):
        raise UserError(
            "this cache was donated to an earlier call, or shares arrays with one that was; "
            "go on with what that call returned, or fork the cache before it"
        )


def body_tokens(run: RunPlan, state: Run) -> Int[Array, " B"]:
    """Tokens of each row that are encoded in every source, and so attended to in the body."""
    units = [f * clock.unit for f, clock in zip(state.flushed, run.wiring.clocks, strict=True)]
    return functools.reduce(jnp.minimum, units)


def due(clock: Clock, body_length: Int[Array, "*#S"], flushed: Int[Array, "*#S"]) -> Int[Array, "*S"]:
    """Units that are encoded once a row holds `body_length` tokens after the sinks (never fewer than `flushed`)."""
    return jnp.maximum(flushed, (body_length - clock.window) // clock.unit)
