"""Plan the runs of a cache's layout. A run is some neighbouring layers that cache alike and are stored as one stack.

    runs_of     plans all runs (cached):
      _plan_run   sizes of the arrays and of what is read at a time, run by run
      _paged      bodies are laid into pages, where the layout has a pool
      _dealt      blocks are dealt over devices, on a mesh with an axis of tokens
    chains      groups runs that are encoded together

The plan is a value, `RunLayout` (kvqjax/cache/run_layout.py), which says what each number means."""

import dataclasses
import functools
import itertools
import math

from kvqjax._errors import UserError
from kvqjax.cache.cache_layout import CacheLayout
from kvqjax.cache.fitted import fitted
from kvqjax.cache.run_layout import Deal, RunLayout
from kvqjax.methods.layer_cache import Wiring
from kvqjax.methods.spec import Method
from kvqjax.model.config import KVShape
from kvqjax.ops.layout import block_tokens
from kvqjax.ops.packing.words import PLANE
from kvqjax.pallas_kernels.chips import family
from kvqjax.pallas_kernels.dispatch import least_page
from kvqjax.pallas_kernels.forms import SPLASH

__all__ = ["chains", "page_for", "runs_for", "runs_of", "tiles_of"]

TPU_LANES = 2**14  # tokens of one row that a TPU reads at a time, of bodies whose fields are all plain
CPU_LANES = 2**10  # tokens that a CPU reads at a time: decoded keys and values of a few heads then stay in its caches
# Numbers of the carry that are read at a time. On a TPU they are those of one array, which is held in fast memory.
CARRIED = {"tpu": 2**22, "gpu": 2**27}
LEAST_PAGE = 128  # body tokens of a page, unless blocks are longer: a table's entry is then a small part of a page
# KV heads, at most, for which a CPU multiplies queries by the channels of all heads. That takes as many times the
# products of one head as there are heads.
MOST_HEADS = 4


def _plan_run(layout: CacheLayout, first: int, count: int, spec, shape: KVShape) -> RunLayout:
    """Plan a run of equal layers.

    Only this function knows how eviction limits the arrays. Methods do not know of eviction. Code that writes or reads
    a body asks `RunLayout.budget` and `Cache.kept`.

    Args:
        layout: The cache's layout.
        first: The number of the run's first layer.
        count: How many layers the run has.
        spec: The spec of these layers.
        shape: What the cache must know of the model, for these layers.

    Returns:
        The plan, of a body that is neither in pages nor dealt over devices."""
    wiring, keep = fitted(spec, layout, first, shape), layout.method.keep
    clocks = wiring.storage.clocks
    fields = [field for codec in wiring.storage.codecs.values() for field in codec.fields.values()]
    block = max(block_tokens(fields), *(clock.unit for clock in clocks))
    room = layout.capacity - layout.method.sinks  # tokens of a row in body and window together
    lanes = _lanes(layout, shape, all(field.kind == "plain" for field in fields))
    if lanes == CPU_LANES and (layout.method.keep is not None or wiring.chain.carry):
        lanes //= 2  # the CPU's caches also hold attention masses, or the carry
    # A clock leaves up to `window + unit - 1` tokens in the window. With several clocks a token stays until the slowest
    # clock has encoded it.
    ring = max(1, min(max(clock.window + clock.unit for clock in clocks), room))
    # The most tokens that a body without eviction encodes: whole units, the window left out. It is 0 where the window
    # alone can hold the capacity.
    most = max(0, *((room - clock.window) // clock.unit * clock.unit for clock in clocks))
    budget = 0 if keep is None else min(keep.budget // clocks[0].unit * clocks[0].unit, most)
    body_tokens = most if keep is None else budget
    linear_blocks = -(-body_tokens // block)  # of a body that does not wrap
    blocks = linear_blocks
    if keep is None and shape.window is not None:
        # A ring holds the tokens that a query can see, and more. One block is for the newest tokens, which may not fill
        # it. The slack of `ring` tokens keeps what queries see after a crop to a token of the window.
        blocks = min(linear_blocks, -(-(shape.window + ring) // block) + 1)
    return RunLayout(
        first,
        count,
        shape,
        wiring,
        block,
        slots=blocks * block,
        ring=ring,
        wraps=blocks < linear_blocks,
        budget=budget,
        static_loops=keep is None and layout.form == "heads",
        on_gpu=layout.form == "heads" or family(layout.target) == "gpu",
        lanes=lanes,
        carrying=_carrying(layout, wiring),
        tiles=tiles_of(layout),
    )


def _lanes(layout: CacheLayout, shape: KVShape, plain: bool) -> int:
    """Choose how many tokens a few queries read at a time with the channels of all heads in one product.

    Args:
        layout: The cache's layout.
        shape: What the cache must know of the model, for these layers.
        plain: Whether every field of these layers is of kind "plain".

    Returns:
        `RunLayout.lanes`."""
    kind = family(layout.target)
    if layout.form == "heads" or kind == "gpu":
        return 0
    if kind == "tpu":
        # 1: heads still meet in one product, but no more tokens are read at a time than `RunLayout.reading`.
        return TPU_LANES if plain else 1
    return CPU_LANES if shape.num_kv_heads <= MOST_HEADS else 0


def _carrying(layout: CacheLayout, wiring: Wiring) -> int:
    """Choose how many tokens of all rows are read at a time where layers feed each other (`RunLayout.carrying`)."""
    # A body that is stored head by head is read as on a GPU, also where a CPU stands in for one.
    kind = "gpu" if layout.form == "heads" else family(layout.target)
    has_limit = layout.form == "heads" or kind == "tpu"
    if not (has_limit and wiring.chain.read):
        return 0
    widths = wiring.chain.carry.values()
    return CARRIED[kind] // (max(widths) if kind == "tpu" else sum(widths))


def tiles_of(layout: CacheLayout) -> str:
    """Choose how many new tokens attend.

    Args:
        layout: The cache's layout.

    Returns:
        "tiles": in large tiles of plain products, on GPUs. "splash": by splash attention, on TPUs whose layout lets it
        run. "off": in the same small blocks as few new tokens."""
    kind = family(layout.target)
    if kind == "gpu":
        return "tiles"
    return "splash" if kind == "tpu" and layout.kernels.allow(SPLASH) else "off"


def _plan_runs(layout: CacheLayout) -> list[RunLayout]:
    """Plan the runs in layer order."""
    numbers = range(layout.shape.num_layers)
    shapes = [layout.shape.layer(index) for index in numbers]
    # A number of its own makes every layer a run by itself.
    stack_of = numbers if layout.layers == "unroll" else [0] * len(numbers)
    runs, first = [], 0
    layers = zip(layout.method.layers(layout.shape), shapes, stack_of, strict=True)
    for (spec, shape, _), group in itertools.groupby(layers):
        count = len(list(group))
        runs.append(_plan_run(layout, first, count, spec, shape))
        first += count
    return runs


def runs_of(layout: CacheLayout) -> tuple[RunLayout, ...]:
    """Plan the runs of a layout, in layer order.

    Args:
        layout: The cache's layout.

    Returns:
        The plans. They do not depend on the layout's length bound.

    Raises:
        UserError: The method does not fit the model, or the layout's eviction, pages or mesh do not fit the method."""
    return _runs_of(layout if layout.bound is None else dataclasses.replace(layout, bound=None))


@functools.lru_cache(maxsize=64)
def _runs_of(layout: CacheLayout) -> tuple[RunLayout, ...]:
    """Do `runs_of`. Cached, so that wirings are built once."""
    runs = _plan_runs(layout)
    clocks = {run.wiring.storage.clocks[0][1:] for run in runs}  # (window, unit)
    if layout.method.keep is not None and len(clocks) > 1:
        raise UserError(f"{layout.method}: evicting tokens needs one window and unit for all layers, got {clocks}")
    if layout.pool is not None:
        return _paged(layout, runs)
    return tuple(runs) if layout.dealt == 1 else _dealt(layout, runs)


def page_for(layout: CacheLayout) -> int:
    """Choose how many body tokens a page has, for a layout without a pool.

    Pages are as short as the blocks of all runs and a TPU's kernels allow. A block is read as a whole, so that no page
    ends within one."""
    runs, least = runs_of(layout), LEAST_PAGE
    block = math.lcm(PLANE, *(run.block for run in runs))  # all runs have pages of one length
    if family(layout.target) == "tpu":
        least = max([least, *(least_page(run.wiring.fast.packed.spec) for run in runs if run.wiring.fast.packed)])
    return -(-least // block) * block


def _paged(layout: CacheLayout, runs: list[RunLayout]) -> tuple[RunLayout, ...]:
    """Lay bodies into the pages of the layout's pool.

    That is for bodies that keep all tokens in their order. Rings of sliding windows and bodies that evict tokens have a
    bounded length and are written to everywhere, so that rows could not share their pages. They stay their rows' own.

    Raises:
        UserError: The layout's blocks are dealt over devices, or a page would end within a block."""
    assert layout.pool is not None
    page = layout.pool.tokens
    if layout.dealt > 1:
        raise UserError(f"a body that is dealt over {layout.dealt} devices cannot lie in pages")
    if blocks := [run.block for run in runs if page < 1 or page % math.lcm(PLANE, run.block)]:
        raise UserError(f"pages of {page} tokens; here they hold a multiple of {math.lcm(PLANE, *blocks)}")

    def paged(run: RunLayout) -> RunLayout:
        if run.wraps or run.budget or not run.slots:
            return run
        return run._replace(slots=-(-run.slots // page) * page, page=page)

    return tuple(map(paged, runs))


def runs_for(method: Method, shape: KVShape, dtype: str = "float32") -> tuple[RunLayout, ...]:
    """Plan the runs of a method's caches for a model, for what does not depend on the capacity: wirings and layers."""
    return runs_of(CacheLayout(shape=shape.kv_shape, method=method, capacity=1, dtype=dtype))


def _dealt(layout: CacheLayout, runs: list[RunLayout]) -> tuple[RunLayout, ...]:
    """Deal blocks over devices, so that every device has as many of every run.

    The blocks that are dealt are as long in all runs. A token then lies on the same device in all layers, as it must
    where layers feed each other."""
    deal = Deal(layout.dealt, math.lcm(*(run.block for run in runs)), layout.dealt_over)
    turn = deal.block * deal.parts  # tokens that give each device one block
    return tuple(run._replace(slots=-(-run.slots // turn) * turn, deal=deal) for run in runs)


@functools.lru_cache(maxsize=64)
def chains(layout: CacheLayout) -> tuple[tuple[int, ...], ...]:
    """Group the runs that are encoded together.

    Args:
        layout: The cache's layout.

    Returns:
        The numbers of the runs of each chain. Where layers feed each other, all runs are one chain. Otherwise a chain
        has the runs whose units fall due at the same time, so that this is computed once for all of them.

    Raises:
        UserError: Layers feed each other and differ in their clocks, or in the tokens that they see."""
    runs = runs_of(layout)
    if not any(run.wiring.chain.carry for run in runs):
        # Runs without a body have nothing that is due.
        due_together: dict[tuple, list[int]] = {}
        for number, run in enumerate(runs):
            due_together.setdefault((run.wiring.storage.clocks, run.slots > 0), []).append(number)
        return tuple(map(tuple, due_together.values()))
    clocks = {run.wiring.storage.clocks[0][1:] for run in runs}
    if len(clocks) > 1 or any(len(run.wiring.storage.clocks) > 1 for run in runs):
        raise UserError(f"{layout.method}: layers that feed each other must share one window and unit, got {clocks}")
    # A layer with a sliding window does not keep the tokens that a layer without one keeps, so that their carry cannot
    # flow through it.
    rings = {run.slots for run in runs} if any(run.wraps for run in runs) else set()
    if len({(run.sliding, run.chunked) for run in runs}) > 1 or len(rings) > 1:
        raise UserError(
            f"{layout.method}: layers that feed each other must see the same tokens; sliding windows differ"
        )
    return (tuple(range(len(runs))),)
