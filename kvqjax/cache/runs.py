"""Plan a layout's runs: which layers are one run, how large their arrays are, how blocks are dealt over devices, how
many tokens are read at a time, and which layers are encoded together."""

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

TPU_LANES = 2**14  # of one row of a plain body
CPU_LANES = 2**10  # keys and values of a few heads, which stay in its caches
CARRIED = {"tpu": 2**22, "gpu": 2**27}  # numbers that flow between layers; on a TPU of one array, held in fast memory
LEAST_PAGE = 128  # body tokens of a page, unless blocks are longer: a table's entry is then a small part of a page
MOST_HEADS = 4  # KV heads, as many times as the products of one, for which a CPU has the time


def _plan_run(layout: CacheLayout, first: int, count: int, spec, shape: KVShape) -> RunLayout:
    """Plan a run of equal layers. Here alone eviction decides how large arrays are: whoever writes or reads them asks
    `RunLayout` and `Cache.kept`, and no method knows of it."""
    wiring, keep = fitted(spec, layout, first, shape), layout.method.keep
    clocks = wiring.storage.clocks
    fields = [field for codec in wiring.storage.codecs.values() for field in codec.fields.values()]
    block = max(block_tokens(fields), *(clock.unit for clock in clocks))
    room = layout.capacity - layout.method.sinks
    lanes = _lanes(layout, shape, all(field.kind == "plain" for field in fields))
    if lanes == CPU_LANES and (layout.method.keep is not None or wiring.chain.carry):
        lanes //= 2  # masses, or what flows between layers, share these caches
    ring = max(1, min(max(clock.window + clock.unit for clock in clocks), room))
    # Nothing is ever encoded when the window alone can hold the capacity.
    most = max(0, *((room - clock.window) // clock.unit * clock.unit for clock in clocks))
    budget = 0 if keep is None else min(keep.budget // clocks[0].unit * clocks[0].unit, most)
    linear_blocks = blocks = -(-(most if keep is None else budget) // block)
    if keep is None and shape.window is not None:
        # One block for the newest partial one, and slack so that cropping inside the window loses nothing visible.
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
    """Choose how many tokens are read at a time where no head is taken apart from the others (`RunLayout.lanes`)."""
    kind = family(layout.target)
    if layout.form == "heads" or kind == "gpu":
        return 0
    if kind == "tpu":
        return TPU_LANES if plain else 1
    return CPU_LANES if shape.num_kv_heads <= MOST_HEADS else 0


def _carrying(layout: CacheLayout, wiring: Wiring) -> int:
    """Choose how many tokens of all rows are read at a time where layers feed each other (`RunLayout.carrying`)."""
    kind = "gpu" if layout.form == "heads" else family(layout.target)
    has_limit = layout.form == "heads" or kind == "tpu"
    if not (has_limit and wiring.chain.read):
        return 0
    return CARRIED[kind] // (max if kind == "tpu" else sum)(wiring.chain.carry.values())


def tiles_of(layout: CacheLayout) -> str:
    """Choose how many new tokens attend: "off" (in blocks as small as for few), "tiles" (large blocks of plain
    products, on GPUs) or "splash" (on TPUs, where the layout lets it run)."""
    kind = family(layout.target)
    if kind == "gpu":
        return "tiles"
    return "splash" if kind == "tpu" and layout.kernels.allow(SPLASH) else "off"


def _plan_runs(layout: CacheLayout) -> list[RunLayout]:
    """Plan the runs in layer order."""
    numbers = range(layout.shape.num_layers)
    shapes = [layout.shape.layer(index) for index in numbers]
    stack_of = numbers if layout.layers == "unroll" else [0] * len(numbers)
    runs, first = [], 0
    for (spec, shape, _), group in itertools.groupby(
        zip(layout.method.layers(layout.shape), shapes, stack_of, strict=True)
    ):
        count = len(list(group))
        runs.append(_plan_run(layout, first, count, spec, shape))
        first += count
    return runs


def runs_of(layout: CacheLayout) -> tuple[RunLayout, ...]:
    """Plan the runs of a layout, in layer order. They do not depend on the bound of its rows' lengths."""
    return _runs_of(layout if layout.bound is None else dataclasses.replace(layout, bound=None))


@functools.lru_cache(maxsize=64)
def _runs_of(layout: CacheLayout) -> tuple[RunLayout, ...]:
    """Do `runs_of`. Cached, so that wirings are built once."""
    runs = _plan_runs(layout)
    clocks = {run.wiring.storage.clocks[0][1:] for run in runs}
    if layout.method.keep is not None and len(clocks) > 1:
        raise UserError(f"{layout.method}: evicting tokens needs one window and unit for all layers, got {clocks}")
    if layout.pool is not None:
        return _paged(layout, runs)
    return tuple(runs) if layout.dealt == 1 else _dealt(layout, runs)


def page_for(layout: CacheLayout) -> int:
    """Choose the tokens of a page for a layout without a pool: as few as its blocks, and a TPU's kernels, allow.

    A block is read as a whole, so that no page ends within one."""
    runs, least = runs_of(layout), LEAST_PAGE
    block = math.lcm(PLANE, *(run.block for run in runs))
    if family(layout.target) == "tpu":
        least = max([least, *(least_page(run.wiring.fast.packed.spec) for run in runs if run.wiring.fast.packed)])
    return -(-least // block) * block


def _paged(layout: CacheLayout, runs: list[RunLayout]) -> tuple[RunLayout, ...]:
    """Lay the bodies that keep all tokens in their order into pages. Rings of sliding windows, and bodies that lose
    tokens, are bounded and change everywhere: they stay their rows' own."""
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
    """Plan the runs of a method's caches for a model, whatever their capacity."""
    return runs_of(CacheLayout(shape=shape.kv_shape, method=method, capacity=1, dtype=dtype))


def _dealt(layout: CacheLayout, runs: list[RunLayout]) -> tuple[RunLayout, ...]:
    """Give every device as many whole blocks of every run. A token lies on one device in all layers, because layers may
    feed each other: the blocks dealt are common to all runs."""
    deal = Deal(layout.dealt, math.lcm(*(run.block for run in runs)), layout.dealt_over)
    turn = deal.block * deal.parts
    return tuple(run._replace(slots=-(-run.slots // turn) * turn, deal=deal) for run in runs)


@functools.lru_cache(maxsize=64)
def chains(layout: CacheLayout) -> tuple[tuple[int, ...], ...]:
    """Group the numbers of runs that are encoded together: all of them when something flows from layer to layer; else
    those that fall due at the same time, so that one question decides for all."""
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
    if len({(run.sliding, run.chunked) for run in runs}) > 1 or len(rings) > 1:
        raise UserError(
            f"{layout.method}: layers that feed each other must see the same tokens; sliding windows differ"
        )
    return (tuple(range(len(runs))),)
