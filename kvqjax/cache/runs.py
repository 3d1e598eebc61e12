"""The static plan of a layout: which layers are one run, how large their arrays are, how blocks are dealt over devices,
and which layers are encoded together."""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvqjax._errors import UserError
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.fitted import by_groups, check_clocks, in_form, resolved, with_kernels
from kvqjax.methods.wiring import Wiring
from kvqjax.model.config import KVShape
from kvqjax.ops.layout import block_tokens
from kvqjax.pallas_kernels.packed import family

__all__ = [
    "AT_ONCE",
    "Deal",
    "RunLayout",
    "chains",
    "runs_of",
]


class Deal(NamedTuple):
    """A body's blocks dealt over devices in turn, so that short rows use all of them: of `parts` devices, block j of
    `block` tokens lies on device j mod `parts`, and a device keeps its blocks in order. Outside `shard_map` a dealt
    cache is only moved about; inside, `axes` names the mesh axes that number the devices. Undealt bodies (`parts` = 1)
    pass through."""

    parts: int = 1
    block: int = 1
    axes: tuple[str, ...] = ()

    def _here(self) -> Int[Array, ""]:
        if not self.axes:
            raise ValueError("a cache dealt over devices is read and written on its mesh only")
        return jax.lax.axis_index(self.axes)

    def place(self, token: Int[Array, ""] | int) -> tuple[Bool[Array, ""] | None, Int[Array, ""] | int]:
        """Whether body token `token` lies here (None: everything does), and its number among those that do."""
        if self.parts == 1:
            return None, token
        turn = token // self.block
        return jnp.equal(turn % self.parts, self._here()), turn // self.parts * self.block + token % self.block

    def tokens(self, local: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """The body tokens that the `local`-th ones here are."""
        if self.parts == 1:
            return local
        return (local // self.block * self.parts + self._here()) * self.block + local % self.block

    def share(self, tokens: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """How many of the first `tokens` body tokens lie here."""
        if self.parts == 1:
            return tokens
        whole, here = tokens // self.block, self._here()
        rest = jnp.where(whole % self.parts == here, tokens % self.block, 0)
        return (whole - here + self.parts - 1) // self.parts * self.block + rest

    def most(self, tokens: int) -> int:
        """The most of a row's first `tokens` body tokens that lie on one device."""
        return -(-tokens // (self.block * self.parts)) * self.block if self.parts > 1 else tokens


TPU_LANES = 2**14  # of one row of a plain body
CPU_LANES = 2**9  # keys and values of a few heads, which stay in its caches
MOST_HEADS = 4  # KV heads, as many times as the products of one, for which a CPU has the time
AT_ONCE = 16384  # tokens of a body that is decoded on a GPU: fewer launches of kernels, and not a layer's whole body


class RunLayout(NamedTuple):
    """A run of equal layers: `first` .. `first + count - 1`, `shape` being one layer's. The body has `slots` tokens in
    blocks of `block`, a ring of blocks when it `wraps`: layers that see only `sliding` tokens keep no more. The window
    is a ring of `ring` tokens. `slots` counts all devices' when the blocks are dealt (`deal`), `slots_here` one's. With
    eviction the body never holds more than `budget` tokens (0: no eviction). `static`: how much of the body a few new
    tokens read is bounded by its slots and not by data, because a GPU's host decides on every turn of such a loop.
    `lanes`: as many tokens are read at a time by a few new ones, which are multiplied with all heads' channels at once
    (0: head by head)."""

    first: int
    count: int
    shape: KVShape
    wiring: Wiring
    block: int
    slots: int
    ring: int
    wraps: bool
    deal: Deal = Deal()
    budget: int = 0
    static: bool = False
    lanes: int = 0

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
        wanted = max(self.wiring.fast.reading, AT_ONCE if self.static else 1)
        most = 1 if self.wraps else max(1, wanted // self.block)
        return self.block * next(n for n in range(most, 0, -1) if self.slots_here % (n * self.block) == 0)

    @property
    def carried(self) -> int:
        """Body tokens of which a reader holds what flows between layers, per row (`kvqjax.methods.wiring.Chain`)."""
        return self.wiring.chain.tokens(self.slots, self.block)


def _plan_run(layout: CacheLayout, first: int, count: int, spec, shape: KVShape, block: int) -> RunLayout:
    try:
        wiring = in_form(resolved(spec.build(shape), layout.dtype), layout.form, shape)
        if wiring.fast.packed is not None:
            wiring = wiring.having(fast={"packed": with_kernels(wiring.fast.packed, layout)})
        if family(layout.target) != "cpu":
            wiring = wiring.having(fast={"waves": None})
    except ValueError as error:
        raise UserError(f"{layout.method} does not fit layer {first} of this model: {error}") from error
    check_clocks(wiring, str(layout.method))
    keep = layout.method.keep
    if keep is not None:
        wiring = by_groups(wiring, layout, keep)
    fields = [field for codec in wiring.storage.codecs.values() for field in codec.fields.values()]
    block = math.lcm(block, max(block_tokens(fields), *(clock.unit for clock in wiring.storage.clocks)))
    room = layout.capacity - layout.method.sinks
    lanes = _lanes(layout, shape, all(field.kind == "plain" for field in fields))
    ring = max(clock.window + clock.unit for clock in wiring.storage.clocks)
    # Nothing is ever encoded when the window alone can hold the capacity.
    most = max((room - clock.window) // clock.unit * clock.unit for clock in wiring.storage.clocks)
    ring = max(1, min(ring, room))
    if keep is not None:
        unit = wiring.storage.clocks[0].unit
        budget = max(0, min(keep.budget // unit * unit, most))
        blocks, more = -(-budget // block), {"budget": budget, "lanes": lanes}
        return RunLayout(first, count, shape, wiring, block, blocks * block, ring, False, **more)
    whole = blocks = max(0, -(-most // block))
    if shape.window is not None:
        # One block for the newest partial one, and slack so that cropping inside the window loses nothing visible.
        blocks = min(whole, -(-(shape.window + ring) // block) + 1)
    static = layout.form == "heads"
    wraps = blocks < whole
    return RunLayout(first, count, shape, wiring, block, blocks * block, ring, wraps, static=static, lanes=lanes)


def _lanes(layout: CacheLayout, shape: KVShape, plain: bool) -> int:
    """How many tokens are read at a time where no head is taken apart from the others (`RunLayout.lanes`)."""
    kind = family(layout.target)
    if layout.form != "planes" or kind == "gpu":
        return 0
    if kind == "tpu":
        return TPU_LANES if plain else 1
    return CPU_LANES if shape.num_kv_heads <= MOST_HEADS else 0


def _plan_runs(layout: CacheLayout, block: int) -> list[RunLayout]:
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
def runs_of(layout: CacheLayout) -> tuple[RunLayout, ...]:
    """The runs of a layout, in layer order. Cached, so that wirings are built once."""
    runs = _plan_runs(layout, 1)
    if any(run.wiring.chain.rebuilt for run in runs):  # a block is then read from all layers below at once
        runs = _plan_runs(layout, math.lcm(*(run.block for run in runs)))
    clocks = {run.wiring.storage.clocks[0][1:] for run in runs}
    if layout.method.keep is not None and len(clocks) > 1:
        raise UserError(f"{layout.method}: evicting tokens needs one window and unit for all layers, got {clocks}")
    return tuple(runs) if layout.dealt == 1 else _dealt(layout, runs)


def _dealt(layout: CacheLayout, runs: list[RunLayout]) -> tuple[RunLayout, ...]:
    """The runs with as many whole blocks on every device. A token lies on one device in all layers, because layers may
    feed each other: the blocks dealt are common to all runs."""
    deal = Deal(layout.dealt, math.lcm(*(run.block for run in runs)), layout.dealt_over)
    turn = deal.block * deal.parts
    return tuple(run._replace(slots=-(-run.slots // turn) * turn, deal=deal) for run in runs)


@functools.lru_cache(maxsize=64)
def chains(layout: CacheLayout) -> tuple[tuple[int, ...], ...]:
    """Run numbers that are encoded together: all of them when something flows from layer to layer; else those that
    fall due at the same time, so that one question decides for all."""
    runs = runs_of(layout)
    if not any(run.wiring.chain.carry for run in runs):
        due_together: dict[tuple, list[int]] = {}
        for number, run in enumerate(runs):
            due_together.setdefault((run.wiring.storage.clocks, run.slots > 0), []).append(number)
        return tuple(map(tuple, due_together.values()))
    clocks = {run.wiring.storage.clocks[0][1:] for run in runs}
    if len(clocks) > 1 or any(len(run.wiring.storage.clocks) > 1 for run in runs):
        raise UserError(f"{layout.method}: layers that feed each other must share one window and unit, got {clocks}")
    # A layer that slides neither reads old tokens nor keeps them where its neighbours do, so nothing can flow past it.
    rings = {run.slots for run in runs} if any(run.wraps for run in runs) else set()
    if len({run.sliding for run in runs}) > 1 or len(rings) > 1:
        raise UserError(
            f"{layout.method}: layers that feed each other must see the same tokens; sliding windows differ"
        )
    return (tuple(range(len(runs))),)
