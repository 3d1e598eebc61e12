"""The plan of a cache's layout, run by run.

A run is some neighbouring layers that cache alike and are stored as one stack.

    runs_of      plans all runs (cached):
      _plan_run    sizes of the arrays and of what is read at a time, run by run
      fitted       the wiring of these layers, made to fit the layout
      _paged       bodies are laid into pages, where the layout has a pool
      _dealt       blocks are dealt over devices, on a mesh with an axis of tokens
    chains       groups runs that are encoded together
    bound_for    chooses how far programs read, for rows of given lengths
    pages_needed, ...    how many pages rows take

The plan is a value, `RunLayout` (kvqjax/cache/layout.py), which says what each number means.

A layer's spec builds a wiring (one layer's cache as a value) that knows no cache. `fitted` then
goes through these steps, in this order:

    _resolved       "compute" becomes the cache's dtype
    _in_form        fields get the form in which bodies are stored: heads (GPUs), lines and stripes (CPUs), or planes
    _with_kernels   the packed form is told which chip's kernels may read it
    _check_clocks   windows and units that no body can have are refused
    _by_groups      with eviction, there is one clock of at least 32 tokens

A packed form (`Fast.packed`) is a body that something reads as it is stored: a Pallas kernel or,
for uniform codes, the plain sums. A direct form (`Fast.direct`) is one that XLA reads at once,
stored head by head.

A GPU's host decides on every turn of a loop whose bound is data. So no loop of a step has such a
bound there, and a step would cost what the capacity costs. Between strides of steps, the host
therefore promises how long rows are (`LengthBound`). Every promise is a program of its own, so that
only a few lengths are promised:

    the longest row      the capacity, divided by a power of two
    all rows together    a multiple of a sixteenth of what rows of that length hold; where a body is decoded in spans

Only encoded tokens lie in pages. The newest tokens lie in the window: a clock encodes a unit once a
row holds `window + unit` tokens that it has not encoded."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from kvqjax._arguments import check_integer
from kvqjax._errors import UserError
from kvqjax.cache.layout import (
    MANY_QUERIES,
    Ask,
    CacheLayout,
    Deal,
    LengthBound,
    RunLayout,
    reader_of,
)
from kvqjax.codecs.base import Codec
from kvqjax.codecs.uniform import GroupError
from kvqjax.methods import parse
from kvqjax.methods.grammar import read_text
from kvqjax.methods.layer_cache import Clock, Wiring
from kvqjax.methods.spec import LayerSpec, Method, wiring_of
from kvqjax.model.config import KVShape
from kvqjax.model.rope import following
from kvqjax.ops.layout import block_tokens
from kvqjax.ops.packing.base import PLANE, split_bits
from kvqjax.pallas_kernels.adapters import Packed
from kvqjax.pallas_kernels.chips import TILE, family
from kvqjax.pallas_kernels.exact import ExactSpec
from kvqjax.pallas_kernels.forms import SPLASH, form_of
from kvqjax.pallas_kernels.packed import PackedSpec
from kvqjax.pallas_kernels.support import lookup

LEAST_STRIPED = 4096  # slots: of shorter bodies, sums save less time than they take to compile
MOST_TOKENS = 2**30  # sums of two such counts are still int32


def fitted(spec: LayerSpec, layout: CacheLayout, first: int, shape: KVShape) -> Wiring:
    """Build the wiring of layers of one spec for a layout.

    Args:
        spec: The layers' spec.
        first: The number of the first of these layers, for messages.
        shape: What the cache must know of the model, for these layers.

    Raises:
        UserError: The spec does not fit the model, or its clocks do not fit its codecs or the
        layout's eviction."""
    try:
        # The form is chosen first: kernels read planes, so that a body in another form may use
        # none.
        wiring = _in_form(_resolved(wiring_of(spec, shape), layout.dtype), layout, shape)
        if wiring.fast.packed is not None:
            wiring = wiring.having(fast={"packed": _with_kernels(wiring.fast.packed, layout)})
        # A body's block holds consecutive positions, whose cosines a CPU makes from those of the
        # first one.
        if family(layout.target) == "cpu" and wiring.fast.before_rope:
            wiring = wiring.having(fast={"waves": functools.partial(following, config=shape)})
    except ValueError as error:
        hint = _fitting_group(error, layout, first, shape) if isinstance(error, GroupError) else ""
        raise UserError(
            f"{layout.method} does not fit layer {first} of this model: {error}{hint}"
        ) from error
    _check_clocks(wiring, str(layout.method))
    return _by_groups(wiring, layout.method)


def _fitting_group(error: GroupError, layout: CacheLayout, first: int, shape: KVShape) -> str:
    """Name an option of the method with which the layer can be built; "" where none is known."""
    for size in error.fitting:
        for option in ("group", "value_group"):
            with contextlib.suppress(ValueError):
                method = parse(read_text(str(layout.method)) | {option: size})
                _resolved(method.layers(layout.shape)[first].build(shape), layout.dtype)
                return f"; {option}={size} does"
    return ""


def _resolved(wiring: Wiring, dtype: str) -> Wiring:
    """Give fields of dtype "compute", and what a kernel is told of them, the cache's compute
    dtype."""

    codecs = {}
    for source, codec in wiring.storage.codecs.items():
        fields = {}
        for name, field in codec.fields.items():
            of_compute = field.dtype == "compute"
            fields[name] = dataclasses.replace(field, dtype=dtype) if of_compute else field
        codecs[source] = codec._replace(fields=fields)
    wiring = wiring.having(storage={"codecs": codecs})
    packed = wiring.fast.packed
    # The other kernels' specs have no compute dtype.
    if packed is None or not isinstance(packed.spec, ExactSpec):
        return wiring
    spec = dataclasses.replace(packed.spec, dtype=dtype)
    return wiring.having(fast={"packed": packed._replace(spec=spec)})


def _in_form(wiring: Wiring, layout: CacheLayout, shape: KVShape) -> Wiring:
    """Give fields the form that they are stored in, and drop the readers that cannot read it.

    Args:
        wiring: With the cache's dtype.

    Returns:
        The wiring, with a direct form or a packed one, never both."""
    keeps_all = shape.window is None and layout.method.keep is None
    # Rings of sliding windows and evicted bodies are read block by block alone, and sums over
    # short bodies save less time than they take to compile.
    if layout.form == "stripes" and keeps_all and layout.capacity >= LEAST_STRIPED:
        wiring = _striped(wiring, shape)
    elif layout.form != "heads":
        wiring = wiring.having(fast={"coefficients": None})
    # Bodies that XLA cannot read at once keep the packings of their codecs, also in a cache of form
    # "heads".
    if layout.form != "heads" or wiring.fast.direct is None:
        return wiring.having(fast={"direct": None})

    codecs = {}
    for source, codec in wiring.storage.codecs.items():
        fields = {name: field.by_head(shape.num_kv_heads) for name, field in codec.fields.items()}
        codecs[source] = codec._replace(fields=fields)
    # What reads packed words expects planes.
    return wiring.having(storage={"codecs": codecs}, fast={"packed": None})


def _striped(wiring: Wiring, shape: KVShape) -> Wiring:
    """Store a long body that keeps all tokens as a CPU's few queries read it: coefficients in
    stripes; uniform codes, which sums of kvqjax.pallas_kernels.few_queries read, of keys in lines
    and of values in stripes.

    Args:
        wiring: With the cache's dtype.

    Returns:
        The wiring, unchanged where its body is another one."""
    codecs = wiring.storage.codecs
    if wiring.fast.coefficients is not None:
        codecs = {source: _in_stripes(codec) for source, codec in codecs.items()}
        return wiring.having(storage={"codecs": codecs}, fast={"packed": None})
    packed = wiring.fast.packed
    if packed is None or not (isinstance(packed.spec, PackedSpec) and packed.spec.plain):
        return wiring
    # No word of keys may have channels of two heads: they are read head by head, and split over
    # devices by heads.
    whole_words = all(shape.head_dim * bits % 32 == 0 for bits in split_bits(packed.spec.key_bits))
    if not whole_words:
        return wiring
    lines = dataclasses.replace(codecs["k"].fields["codes"], form="lines", heads=shape.num_kv_heads)
    keys = codecs["k"]._replace(fields=codecs["k"].fields | {"codes": lines})
    codecs = codecs | {"k": keys, "v": _in_stripes(codecs["v"])}
    packed = packed._replace(spec=dataclasses.replace(packed.spec, striped=True))
    return wiring.having(storage={"codecs": codecs}, fast={"packed": packed})


def _in_stripes(codec: Codec) -> Codec:
    """Store a codec's codes in stripes."""
    fields = {}
    for name, field in codec.fields.items():
        fields[name] = dataclasses.replace(field, form="stripes") if field.packed else field
    return codec._replace(fields=fields)


def _with_kernels(packed: Packed, layout: CacheLayout) -> Packed:
    """Tell a packed form which chip's kernels may read it; "cpu" stands for none.

    Args:
        packed: The packed form of a body, in the form that it is stored in.

    Returns:
        The packed form, which also says whether the table of kernels need not be asked (`trusted`),
        and whether anything reads the words themselves (`straight`)."""
    striped = isinstance(packed.spec, PackedSpec) and packed.spec.striped
    allowed = not striped and layout.kernels.allow(form_of(packed.spec))
    spec = dataclasses.replace(packed.spec, target=layout.target if allowed else "cpu")
    # Without a kernel, words are read as they are stored where they are plain uniform codes, and
    # else decoded first.
    straight = spec.target != "cpu" or (isinstance(spec, PackedSpec) and spec.plain)
    # Where `forms` lists what may run, the chip checked it or the user forces it. Else the table
    # decides.
    return packed._replace(spec=spec, trusted=layout.kernels.forms is not None, straight=straight)


def _check_clocks(wiring: Wiring, name: str) -> None:
    """Raise UserError for windows and units that no body can have. `name` is the method's, for
    messages.

    A unit of several tokens is a multiple of 32, because its codes are written as whole planes, and
    a multiple of the tokens that each of its codecs encodes at a time."""
    for clock in wiring.storage.clocks:
        if clock.window < 0:
            raise UserError(f"{name}: window={clock.window}; a count of tokens cannot be negative")
        if clock.window > MOST_TOKENS:
            raise UserError(
                f"{name}: window={clock.window}; at most {MOST_TOKENS} tokens are possible"
            )
        if clock.unit != 1 and (clock.unit < 1 or clock.unit % 32):
            raise UserError(
                f"{name}: tokens leave the window {clock.unit} at a time; 1 or a multiple of 32 is possible"
            )
        for source in clock.sources:
            if clock.unit % wiring.storage.codecs[source].unit:
                raise UserError(
                    f"{name}: {source} is encoded {wiring.storage.codecs[source].unit} tokens at a time, "
                    f"but leaves the window {clock.unit} at a time"
                )


def _by_groups(wiring: Wiring, method: Method) -> Wiring:
    """Give the wiring a clock that eviction can work with: one for all sources, of whole planes at
    least. It stays as it is where nothing is evicted.

    Args:
        wiring: The wiring, with clocks that a body can have.
        method: The cache's method, whose `keep` says how many tokens the body keeps.

    Raises:
        UserError: It has several clocks, or a unit is more than the body may keep."""
    if method.keep is None:
        return wiring
    if len(wiring.storage.clocks) > 1:
        raise UserError(
            f"{method}: keys and values leave the window apart, so their tokens cannot be evicted"
        )
    # A unit is the least that can be freed, since the scales of a group and a plane of codes belong
    # to all its tokens.
    clock = wiring.storage.clocks[0]._replace(unit=max(PLANE, wiring.storage.clocks[0].unit))
    if method.keep.budget < clock.unit:
        raise UserError(
            f"{method}: tokens leave the body {clock.unit} at a time; keep that many at least"
        )
    return wiring.having(storage={"clocks": (clock,)})


# Tokens of one row that a TPU reads at a time, of bodies whose fields are all plain.
TPU_LANES = 2**14
# Tokens that a CPU reads at a time: decoded keys and values of a few heads then stay in its caches.
CPU_LANES = 2**10
# Numbers of the carry that are read at a time. On a TPU they are those of one array, which is held
# in fast memory.
CARRIED = {"tpu": 2**22, "gpu": 2**27}
# Body tokens of a page, unless blocks are longer: a table's entry is then a small part of a page
LEAST_PAGE = 128
# KV heads, at most, for which a CPU multiplies queries by the channels of all heads. That takes as
# many times the products of one head as there are heads.
MOST_HEADS = 4


def _plan_run(layout: CacheLayout, first: int, count: int, spec, shape: KVShape) -> RunLayout:
    """Plan a run of equal layers.

    Only this function knows how eviction limits the arrays. Methods do not know of eviction. Code
    that writes or reads a body asks `RunLayout.budget` and `Cache.kept`.

    Args:
        first: The number of the run's first layer.
        count: How many layers the run has.
        spec: The spec of these layers.
        shape: What the cache must know of the model, for these layers.

    Returns:
        The plan, of a body that is neither in pages nor dealt over devices."""
    wiring = fitted(spec, layout, first, shape)
    keep = layout.method.keep
    clocks = wiring.storage.clocks
    fields = [field for codec in wiring.storage.codecs.values() for field in codec.fields.values()]
    block = max(block_tokens(fields), *(clock.unit for clock in clocks))
    room = layout.capacity - layout.method.sinks  # tokens of a row in body and window together
    lanes = _lanes(layout, shape, all(field.kind == "plain" for field in fields))
    if lanes == CPU_LANES and (keep is not None or wiring.chain.carry):
        lanes //= 2  # the CPU's caches also hold attention masses, or the carry
    # A clock leaves up to `window + unit - 1` tokens in the window. With several clocks a token
    # stays until the slowest clock has encoded it.
    longest_stay = max(clock.window + clock.unit for clock in clocks)
    ring = max(1, min(longest_stay, room))
    # The most tokens that a body without eviction encodes: whole units, the window left out. It is
    # 0 where the window alone can hold the capacity.
    most = max(0, *((room - clock.window) // clock.unit * clock.unit for clock in clocks))
    budget = 0
    body_tokens = most
    if keep is not None:
        unit = clocks[0].unit  # of all sources: `_by_groups` left one clock
        budget = min(keep.budget // unit * unit, most)
        body_tokens = budget
    linear_blocks = -(-body_tokens // block)  # of a body that does not wrap
    blocks = linear_blocks
    if keep is None and shape.window is not None:
        # A ring holds the tokens that a query can see, and more. One block is for the newest
        # tokens, which may not fill it. The slack of `ring` tokens keeps what queries see after a
        # crop to a token of the window.
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
    """Choose how many tokens a few queries read at a time with the channels of all heads in one
    product.

    Args:
        shape: What the cache must know of the model, for these layers.
        plain: Whether every field of these layers is of kind "plain".

    Returns:
        `RunLayout.lanes`."""
    kind = family(layout.target)
    if layout.form == "heads" or kind == "gpu":
        return 0
    if kind == "tpu":
        # 1: heads still meet in one product, but no more tokens are read at a time than
        # `RunLayout.reading`.
        return TPU_LANES if plain else 1
    return CPU_LANES if shape.num_kv_heads <= MOST_HEADS else 0


def _carrying(layout: CacheLayout, wiring: Wiring) -> int:
    """Choose how many tokens of all rows are read at a time where layers feed each other
    (`RunLayout.carrying`)."""
    # A body that is stored head by head is read as on a GPU, also where a CPU stands in for one.
    kind = "gpu" if layout.form == "heads" else family(layout.target)
    has_limit = layout.form == "heads" or kind == "tpu"
    if not (has_limit and wiring.chain.read):
        return 0
    widths = wiring.chain.carry.values()
    return CARRIED[kind] // (max(widths) if kind == "tpu" else sum(widths))


def tiles_of(layout: CacheLayout) -> str:
    """Choose how many new tokens attend.

    Returns:
        "tiles": in large tiles of plain products, on GPUs. "splash": by splash attention, on TPUs
        whose layout lets it run. "off": in the same small blocks as few new tokens."""
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
    runs = []
    first = 0
    layers = zip(layout.method.layers(layout.shape), shapes, stack_of, strict=True)
    for (spec, shape, _), group in itertools.groupby(layers):
        count = len(list(group))
        runs.append(_plan_run(layout, first, count, spec, shape))
        first += count
    return runs


def runs_of(layout: CacheLayout) -> tuple[RunLayout, ...]:
    """Plan the runs of a layout, in layer order.

    Returns:
        The plans. They do not depend on the layout's length bound.

    Raises:
        UserError: The method does not fit the model, or the layout's eviction, pages or mesh do not
        fit the method."""
    return _runs_of(layout if layout.bound is None else dataclasses.replace(layout, bound=None))


@functools.lru_cache(maxsize=64)
def _runs_of(layout: CacheLayout) -> tuple[RunLayout, ...]:
    """Do `runs_of`. Cached, so that wirings are built once."""
    runs = _plan_runs(layout)
    clocks = {run.wiring.storage.clocks[0][1:] for run in runs}  # (window, unit)
    if layout.method.keep is not None and len(clocks) > 1:
        raise UserError(
            f"{layout.method}: evicting tokens needs one window and unit for all layers, got {clocks}"
        )
    if layout.pool is not None:
        return _paged(layout, runs)
    return tuple(runs) if layout.dealt == 1 else _dealt(layout, runs)


def page_for(layout: CacheLayout) -> int:
    """Choose how many body tokens a page has, for a layout without a pool.

    Pages are as short as the blocks of all runs and a TPU's kernels allow. A block is read as a
    whole, so that no page ends within one."""
    runs = runs_of(layout)
    least = LEAST_PAGE
    block = math.lcm(PLANE, *(run.block for run in runs))  # all runs have pages of one length
    if family(layout.target) == "tpu" and any(_has_kernel(run, layout.target) for run in runs):
        # A kernel's tile lies in one page. By estimate a grid step has an overhead of a third of a
        # microsecond, in which a v6e's memory brings the codes of 1000 keys and values of 1024
        # channels at 2 bits. Smaller tiles would wait for the grid.
        least = TILE
    return -(-least // block) * block


def _has_kernel(run: RunLayout, target: str) -> bool:
    """Say whether the table has a kernel of a chip for a run's body."""
    packed = run.wiring.fast.packed
    return packed is not None and lookup(form_of(packed.spec), target) is not None


def _paged(layout: CacheLayout, runs: list[RunLayout]) -> tuple[RunLayout, ...]:
    """Lay bodies into the pages of the layout's pool.

    That is for bodies that keep all tokens in their order. Rings of sliding windows and bodies that
    evict tokens have a bounded length and are written to everywhere, so that rows could not share
    their pages. They stay their rows' own.

    Raises:
        UserError: The layout's blocks are dealt over devices, or a page would end within a
        block."""
    assert layout.pool is not None
    page = layout.pool.tokens
    if layout.dealt > 1:
        raise UserError(f"a body that is dealt over {layout.dealt} devices cannot lie in pages")
    if blocks := [run.block for run in runs if page < 1 or page % math.lcm(PLANE, run.block)]:
        raise UserError(
            f"pages of {page} tokens; here they hold a multiple of {math.lcm(PLANE, *blocks)}"
        )

    def paged(run: RunLayout) -> RunLayout:
        if run.wraps or run.budget or not run.slots:
            return run
        return run._replace(slots=-(-run.slots // page) * page, page=page)

    return tuple(map(paged, runs))


def runs_for(method: Method, shape: KVShape, dtype: str = "float32") -> tuple[RunLayout, ...]:
    """Plan the runs of a method's caches for a model, for what does not depend on the capacity:
    wirings and layers."""
    return runs_of(CacheLayout(shape=shape.kv_shape, method=method, capacity=1, dtype=dtype))


def _dealt(layout: CacheLayout, runs: list[RunLayout]) -> tuple[RunLayout, ...]:
    """Deal blocks over devices, so that every device has as many of every run.

    The blocks that are dealt are as long in all runs. A token then lies on the same device in all
    layers, as it must where layers feed each other."""
    deal = Deal(layout.dealt, math.lcm(*(run.block for run in runs)), layout.dealt_over)
    turn = deal.block * deal.parts  # tokens that give each device one block
    return tuple(run._replace(slots=-(-run.slots // turn) * turn, deal=deal) for run in runs)


@functools.lru_cache(maxsize=64)
def chains(layout: CacheLayout) -> tuple[tuple[int, ...], ...]:
    """Group the runs that are encoded together.

    Returns:
        The numbers of the runs of each chain. Where layers feed each other, all runs are one chain.
        Otherwise a chain has the runs whose units fall due at the same time, so that this is
        computed once for all of them.

    Raises:
        UserError: Layers feed each other and differ in their clocks, or in the tokens that they
        see."""
    runs = runs_of(layout)
    if not any(run.wiring.chain.carry for run in runs):
        # Runs without a body have nothing that is due.
        due_together: dict[tuple, list[int]] = {}
        for number, run in enumerate(runs):
            due_together.setdefault((run.wiring.storage.clocks, run.slots > 0), []).append(number)
        return tuple(map(tuple, due_together.values()))
    clocks = {run.wiring.storage.clocks[0][1:] for run in runs}
    if len(clocks) > 1 or any(len(run.wiring.storage.clocks) > 1 for run in runs):
        raise UserError(
            f"{layout.method}: layers that feed each other must share one window and unit, got {clocks}"
        )
    # A layer with a sliding window does not keep the tokens that a layer without one keeps, so that
    # their carry cannot flow through it.
    rings = {run.slots for run in runs} if any(run.wraps for run in runs) else set()
    if len({(run.sliding, run.chunked) for run in runs}) > 1 or len(rings) > 1:
        raise UserError(
            f"{layout.method}: layers that feed each other must see the same tokens; sliding windows differ"
        )
    return (tuple(range(len(runs))),)


# Tokens of the longest row: reading shorter bodies costs less than reading the model's weights
LEAST = 4096
PROMISED_TOTALS = 16  # how many totals of all rows can be promised


def readers_text(layout: CacheLayout) -> list[str]:
    """Print what reads each run's body, in layer order: "stored, blocks from 65 new tokens"."""
    evicted = layout.method.keep is not None
    lines = []
    for run in runs_of(layout):
        if not run.slots:
            lines.append("no body")
            continue
        before = reader_of(Ask(run, 1, evicted, layout.dtype))
        words = [before]
        for length in range(2, MANY_QUERIES + 1):
            reader = reader_of(Ask(run, length, evicted, layout.dtype))
            if reader != before:
                words.append(f"{reader} from {length} new tokens")
                before = reader
        lines.append(", ".join(words))
    return lines


def bound_for(layout: CacheLayout, lengths: Sequence[int]) -> LengthBound | None:
    """Choose the promise for rows of these lengths.

    Args:
        lengths: The most tokens that each row will hold.

    Returns:
        The least promise that such rows keep. None where it would be no less than the capacity, and
        for layouts whose loops are bounded by data."""
    runs = [run for run in runs_of(layout) if run.static_loops]
    if not runs:
        return None
    row = layout.capacity
    batch = len(lengths)
    while row > LEAST and -(-row // 2) >= max(lengths):
        row = -(-row // 2)
    part = -(-batch * row // PROMISED_TOTALS)
    total = -(-sum(lengths) // part) * part
    if total >= batch * row or not any(_by_spans(run) for run in runs):
        total = None
    if row == layout.capacity and total is None:
        return None
    return LengthBound(row, total)


def _by_spans(run: RunLayout) -> bool:
    """Say whether a few queries may read a run's body span by span
    (kvqjax/cache/readers/decoded.py)."""
    wiring = run.wiring
    return (
        wiring.fast.direct is None and not wiring.chain.carry and not run.wraps and not run.budget
    )


def table_width(layout: CacheLayout) -> int:
    """Count the pages that a row of `capacity` tokens takes; 0 where no body lies in pages."""
    return max(run.slots // run.page if run.page else 0 for run in runs_of(layout))


def _clocks(layout: CacheLayout) -> list[Clock]:
    """List the clocks of all bodies in pages."""
    return [clock for run in runs_of(layout) if run.page for clock in run.wiring.storage.clocks]


def _encoded(layout: CacheLayout, tokens: int) -> list[int]:
    """Count the tokens that each of these clocks has encoded of a row that holds `tokens`."""
    body = min(tokens, layout.capacity) - layout.method.sinks
    return [max(0, (body - clock.window) // clock.unit * clock.unit) for clock in _clocks(layout)]


def exact_beside_pages(layout: CacheLayout) -> int:
    """Count the tokens that a row can hold without a further page: sinks, and what the window keeps
    before the first clock has a unit due."""
    return layout.method.sinks + min(clock.window + clock.unit for clock in _clocks(layout)) - 1


def most_tokens(layout: CacheLayout, batch: int) -> int:
    """Count the tokens that `batch` rows can hold together."""
    if layout.pool is None or not table_width(layout):
        return batch * layout.capacity
    in_pages = layout.pool.pages * layout.pool.tokens
    return min(batch * layout.capacity, in_pages + batch * exact_beside_pages(layout))


def pages_needed(layout: CacheLayout, tokens: int) -> int:
    """Count the pages that a row of `tokens` tokens needs.

    Args:
        layout: of a cache whose rows have pages.
        tokens: of the row, sinks and window included. More than the capacity count as the capacity.

    Returns:
        The number of pages. 0 where no body lies in pages.

    Raises:
        UserError: `tokens` is no whole number of at least 0.
    """
    tokens = check_integer("tokens", tokens, 0)
    if layout.pool is None or not table_width(layout):
        return 0
    return -(-max(_encoded(layout, tokens)) // layout.pool.tokens)


def pages_complete(layout: CacheLayout, tokens: int) -> int:
    """Count the pages of a row that are full, so that nothing is written to them any more. Other
    rows may share them while the row goes on.

    Args:
        layout: of a cache whose rows have pages.
        tokens: of the row, appended and not cropped.

    Returns:
        The number of pages, at most `pages_needed(layout, tokens)`.
    """
    if layout.pool is None or not table_width(layout):
        return 0
    # Where keys are encoded before values, a page is complete once both are.
    return min(_encoded(layout, tokens)) // layout.pool.tokens
