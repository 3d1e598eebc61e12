"""All that is static about a cache, as values, and the choice of who reads it.

    CacheLayout    what a cache was made of: the model's shape, the method, the capacity, the stored form
    Pool           the pages in which the bodies of all rows lie
    LengthBound    a promise of how many tokens rows hold
    RunLayout      the plan of a run of equal layers: the lengths of its arrays, and how many tokens are read at a time
    Deal           which blocks of a body lie on which device
    Ask            what decides which reader attends to a body (`reader_of`)

`kvqjax.cache.runs` plans the runs of a layout.

The choice of a reader. A reader is one of six ways in which attention reads an encoded body; each
has a file in kvqjax/cache/readers/. The first line of this table that takes a body is its reader.
The choice is static.

| reader         | takes                                                   | on                              |
|----------------|---------------------------------------------------------|---------------------------------|
| `kernel`       | packed bodies in the table of kernels, a few new tokens | TPUs; GPUs after a check        |
| `stored`       | uniform codes and exact rows, up to 16 or 64 new tokens | by heads on GPUs, else by words |
| `coefficients` | coefficients in stripes, up to 16 new tokens            | CPUs                            |
| `decoded`      | what else a GPU stores, up to 16 new tokens             | GPUs                            |
| `tiles`        | all of these, 128 new tokens and more                   | GPUs, TPUs                      |
| `blocks`       | any body, any number of new tokens                      | everywhere                      |

Rings (sliding windows) and bodies that evict tokens (`keep=`) are for `blocks` alone. `kernel`
takes no body whose scores have a cap.

`stored` (by words), `coefficients`, `blocks` and a TPU's kernels read bodies in pages where the
pages lie. For the others the pages of one layer are put side by side first."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvqjax._errors import UserError
from kvqjax.methods.direct import FEW_QUERIES
from kvqjax.methods.layer_cache import SharedValues, Wiring
from kvqjax.methods.spec import Method
from kvqjax.model.config import KVShape
from kvqjax.ops.xla_workarounds import floor_divide, modulo
from kvqjax.pallas_kernels.chips import family
from kvqjax.pallas_kernels.dispatch import path, takes_pages
from kvqjax.pallas_kernels.exact import ExactSpec
from kvqjax.pallas_kernels.forms import BY_TABLE, Kernels
from kvqjax.pallas_kernels.packed import PackedSpec

FORMS = ("planes", "heads", "stripes")


class LengthBound(NamedTuple):
    """A promise of how many tokens rows hold. A row that breaks it gets NaN.

    Attributes:
        row: The most tokens of any row.
        total: The most tokens of all rows together. None: as many as `row` allows."""

    row: int
    total: int | None = None


class Pool(NamedTuple):
    """The pages in which the bodies of all rows lie (kvqjax/cache/pages.py).

    Attributes:
        pages: How many pages there are.
        tokens: How many body tokens of a row a page holds, with all fields of all layers."""

    pages: int
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Everything static about a cache.

    Attributes:
        shape: What the cache must know of the model.
        method: What every layer stores, in which codec, with which window.
        capacity: The most tokens that a row can hold.
        dtype: The dtype of sinks and window.
        layers: "scan": neighbouring layers that cache alike are stored as one stack. "unroll": each
            layer is stored by itself.
        form: How bodies are stored. "planes": as planes of words. "heads": head by head where a
            codec can be stored so (kvqjax/ops/packing/heads.py), which GPUs read best. "stripes":
            as planes, but uniform codes of long bodies in lines and stripes
            (kvqjax/ops/packing/planes.py), which CPUs read best.
        target: The chip that programs on the cache are for (`kvqjax.pallas_kernels.chips.TARGETS`).
        kernels: Which of the chip's kernels may read the body.
        dealt: Over how many devices the body's blocks are dealt.
        dealt_over: Inside `shard_map`, the mesh axes of these devices.
        heads_over: Inside `shard_map`, the mesh axes over which heads are split.
        rules: How a cache that belongs to no model of ours lies on a mesh
            (kvqjax/parallel/rules.py).
        bound: A promise of how many tokens rows hold: programs read no further
            (kvqjax/cache/runs.py).
        pool: The pages in which encoded tokens lie, which rows may share. None: every row reserves
        its capacity."""

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
    rules: Any = None
    bound: LengthBound | None = None
    pool: Pool | None = None

    def __post_init__(self):
        if self.layers not in ("scan", "unroll"):
            raise UserError(f"layers={self.layers!r}; known: scan, unroll")
        if self.form not in FORMS:
            raise UserError(f"form={self.form!r}; known: {', '.join(FORMS)}")
        family(self.target)  # refuses what is no target


def stored_form(target: str) -> str:
    """Choose the form that a chip reads best. Raises UserError for a target that is not known."""
    return {"gpu": "heads", "cpu": "stripes", "tpu": "planes"}[family(target)]


# New tokens of a row, at least, whose products are worth decoding large tiles for.
MANY_QUERIES = 128
# Queries of a row, those of all heads, at most, that meet the channels of all heads in one product
MOST_ROWS = 128
# Tokens that a GPU decodes in one turn of a loop: few turns, but not a layer's whole body
AT_ONCE = 16384


class Deal(NamedTuple):
    """How a body's blocks are dealt over devices: in turn, so that short rows use all devices too.

        block     0  1  2  3  4  5  6  7      two devices
        device    0  1  0  1  0  1  0  1
        number    0  0  1  1  2  2  3  3      among the blocks on that device

    Attributes:
        parts: How many devices there are; 1: the body is not dealt.
        block: The tokens of a block.
        axes: The mesh axes that number the devices, inside `shard_map`. Outside there are none, and
            a body that is dealt can be moved, but not written or read."""

    parts: int = 1
    block: int = 1
    axes: tuple[str, ...] = ()

    def _here(self) -> Int[Array, ""]:
        """Give this device's number."""
        if not self.axes:
            raise ValueError("a cache dealt over devices is read and written on its mesh only")
        return jax.lax.axis_index(self.axes)

    def place(
        self, token: Int[Array, "*S"] | int
    ) -> tuple[Bool[Array, "*S"] | None, Int[Array, "*S"] | int]:
        """Find body tokens on the devices.

        Args:
            token: The numbers of body tokens in the sequence.

        Returns:
            (whether each lies on this device, its number among the body tokens of its device). None
            in the place of the first where the body is not dealt."""
        if self.parts == 1:
            return None, token
        block = floor_divide(token, self.block)
        number = floor_divide(block, self.parts) * self.block + modulo(token, self.block)
        return jnp.equal(modulo(block, self.parts), self._here()), number

    def tokens(self, local: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """Give the numbers in the sequence of the `local`-th body tokens on this device."""
        if self.parts == 1:
            return local
        block = floor_divide(local, self.block) * self.parts + self._here()
        return block * self.block + modulo(local, self.block)

    def share(self, tokens: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """Count how many of the first `tokens` body tokens lie on this device."""
        if self.parts == 1:
            return tokens
        blocks, device = floor_divide(tokens, self.block), self._here()
        # Tokens behind the last whole block are the beginning of block number `blocks`, which lies
        # on one device.
        remainder = jnp.where(modulo(blocks, self.parts) == device, modulo(tokens, self.block), 0)
        return floor_divide(blocks - device + self.parts - 1, self.parts) * self.block + remainder

    def most(self, tokens: int) -> int:
        """Bound how many of the first `tokens` body tokens lie on any one device."""
        if self.parts == 1:
            return tokens
        return -(-tokens // (self.block * self.parts)) * self.block


class RunLayout(NamedTuple):
    """The plan of a run: neighbouring layers of equal shape and wiring, stored as one stack.

    Attributes:
        first: The number of the first layer.
        count: How many layers the run has.
        shape: What the cache must know of the model, for each of these layers.
        wiring: How each of these layers caches.
        block: The tokens of a block, the least that is read at a time.
        slots: The body's slots of a row, whole blocks: on all devices together where blocks are
            dealt.
        ring: The window's slots of a row. The window is a ring.
        wraps: Whether the body is a ring of blocks. Layers with a sliding window then keep few more
            tokens than they see.
        deal: How blocks are dealt over devices.
        budget: The most tokens of a row that the body holds where some are evicted; 0: none is.
        static_loops: How many blocks a few queries read is bounded by the slots and not by data.
            That is for GPUs, whose host decides on every turn of a loop that data bounds.
        on_gpu: Whether programs are for a GPU, or a CPU stands in for one.
        lanes: How many tokens a few queries read at a time where they meet the channels of all
            heads in one product;
            0: they meet each head's channels apart.
        carrying: How many tokens of all rows together a few queries read at a time where layers
            feed each other; 0: nothing flows, or there is no limit of its own.
        tiles: How many new tokens meet large tiles of the body (kvqjax/cache/readers/tiles.py).
        page: The slots of a page, where the body lies in pages; 0: every row has slots of its
        own."""

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
    static_loops: bool = False
    on_gpu: bool = False
    lanes: int = 0
    carrying: int = 0
    tiles: str = "off"
    page: int = 0

    @property
    def sliding(self) -> int | None:
        """Say how many tokens a query sees, its own included; None: all before it."""
        return self.shape.window

    @property
    def chunked(self) -> bool:
        """Say whether a query sees the tokens of its own chunk, `sliding` tokens long, instead of
        the newest tokens."""
        return self.sliding is not None and self.shape.common_chunked

    @property
    def slots_here(self) -> int:
        """Count the body's slots of a row on one device."""
        return self.slots // self.deal.parts

    @property
    def reading(self) -> int:
        """Choose how many tokens of a row are read at a time.

        They are as many whole blocks as divide the body, up to what the wiring or a GPU asks for.
        Of a ring it is one block."""
        tokens = max(self.wiring.fast.reading, AT_ONCE if self.static_loops else 1)
        most = 1 if self.wraps else max(1, tokens // self.block)
        count = next(n for n in range(most, 0, -1) if self.slots_here % (n * self.block) == 0)
        return self.within_pages(self.block * count)

    def within_pages(self, size: int) -> int:
        """Choose how many of `size` tokens are read at a time so that no read spans a part of a
        page and another page.

        Args:
            size: Tokens, whole blocks.

        Returns:
            At most `size` tokens, whole blocks: whole pages, or a part that divides a page. All of
            them where the body is not in pages."""
        if not self.page or size % self.page == 0:
            return size
        if size > self.page:
            return size // self.page * self.page
        count = next(
            n for n in range(size // self.block, 0, -1) if self.page % (n * self.block) == 0
        )
        return self.block * count

    @property
    def carried(self) -> int:
        """Count the body tokens of a row whose carry is in memory during a decode step
        (methods.layer_cache.Chain)."""
        return self.slots if self.wiring.chain.read else 0


def few_block(run: RunLayout, batch: int, rows: int) -> int:
    """Choose how many tokens of every row a few queries read at a time.

    They are more than `run.reading` where the small operations between two reads cost much: where
    `RunLayout.carrying` or `RunLayout.lanes` is set.

    Args:
        batch: How many rows the cache has.
        rows: The queries of a row, those of all heads counted together.

    Returns:
        A number of tokens. It need not divide the body: the last read may then begin within the one
        before it."""
    # `most` is the most tokens of a row; 0: no more than `run.reading`.
    if run.carrying:
        most = run.carrying // batch
    elif rows <= MOST_ROWS:
        most = run.lanes // max(1, batch // 2)
    else:
        most = 0
    return run.reading if run.wraps or not most else evenly(run, most)


def evenly(run: RunLayout, most: int) -> int:
    """Choose how many tokens of a row are read at a time: at most `most`, but at least
    `run.reading`, and as evenly as that allows."""
    # The body has `pieces` pieces of `reading` tokens. A read is some of them.
    pieces = run.slots_here // run.reading
    count = -(-pieces // max(1, most // run.reading))
    return run.within_pages(run.reading * -(-pieces // max(1, count)))


# New tokens of a row, at most, whose scores are computed from packed words. Their scores must then
# be put in order. For more tokens that costs more than decoding the keys does.
MOST_BY_WORDS = 64
# Tokens beside a body, at most, that a kernel takes. Their keys and values lie in a TPU's fast
# memory as a whole.
MOST_RECENT = 512


class Ask(NamedTuple):
    """What is known of attention to a body before it is traced. The choice of a reader depends on
    nothing else.

    Attributes:
        run: The layers' plan, with the chip that programs are for.
        length: New tokens of a row.
        evicted: Whether the body evicts tokens. The tokens in its slots are then in no order.
        dtype: The dtype of keys and values as they come, and of the carry."""

    run: RunLayout
    length: int
    evicted: bool = False
    dtype: str = "float32"

    @property
    def group(self) -> int:
        """Count the query heads of a KV head."""
        return self.run.shape.num_heads // self.run.shape.num_kv_heads

    @property
    def softcap(self) -> float | None:
        """Give the cap of the scores, if there is one (`kvqjax.ops.attention.capped`)."""
        return self.run.shape.softcap


def is_linear(ask: Ask) -> bool:
    """Say whether slot i of the body holds body token i, so that all of it can be read at once."""
    return not (ask.evicted or ask.run.wraps)


def reads_by_heads(ask: Ask) -> bool:
    """Say whether XLA reads the whole body in products, from fields that lie head by head."""
    return ask.run.wiring.fast.direct is not None and is_linear(ask) and ask.length <= FEW_QUERIES


def shared_values(ask: Ask) -> SharedValues | None:
    """Choose whether values that heads share are summed first, and the sums mapped to heads.

    Returns:
        How to read and map such values. None: each head's own values are summed."""
    if reads_by_heads(ask) or as_coefficients(ask):
        return None  # they are read as they are stored
    run, fast = ask.run, ask.run.wiring.fast
    few_queries = is_linear(ask) and ask.length <= FEW_QUERIES
    decoded_at_once = run.static_loops and few_queries and not run.wiring.chain.carry
    if fast.summed is not None and (decoded_at_once or run.lanes > 1):
        return None if _by_kernel(ask) else _for_few(fast.summed, ask)
    return _for_few(fast.shared, ask)


def _for_few(shared: SharedValues | None, ask: Ask) -> SharedValues | None:
    """Give `shared` where the queries are few: for more than `most` it is cheaper to map each
    token's values."""
    return shared if shared is not None and ask.length <= shared.most else None


def _kernel_chip(ask: Ask) -> str | None:
    """Name the kind of chip whose kernel reads the body, "tpu" or "gpu"; None where none does."""
    packed = ask.run.wiring.fast.packed
    if packed is None or not packed.straight or packed.spec.target == "cpu":
        return None
    if ask.run.wiring.chain.carry:  # no kernel gives a layer's carry to the one above
        return None
    if not is_linear(ask) or ask.softcap is not None:
        return None
    if _for_few(ask.run.wiring.fast.shared, ask) is not None:  # kernels sum the heads' own values
        return None
    chip = path(packed.spec, ask.group, ask.run.slots_here, ask.length, packed.trusted)
    return None if chip == "reference" else chip


def _by_kernel(ask: Ask) -> bool:
    """Say whether a Pallas kernel reads the body as it is packed."""
    return _kernel_chip(ask) is not None


def _reads_words(ask: Ask) -> bool:
    """Say whether XLA reads packed words by sums that decode as they go."""
    fast = ask.run.wiring.fast
    if fast.packed is None or not (
        isinstance(fast.packed.spec, PackedSpec) and fast.packed.spec.plain
    ):
        return False
    return is_linear(ask) and ask.length <= MOST_BY_WORDS and shared_values(ask) is None


def _as_stored(ask: Ask) -> bool:
    """Say whether XLA computes with the codes where they lie."""
    return reads_by_heads(ask) or _reads_words(ask)


def as_coefficients(ask: Ask) -> bool:
    """Say whether few queries read coefficients. The tokens of a block, or part, must follow each
    other."""
    run = ask.run
    coefficients = run.wiring.fast.coefficients is not None
    return coefficients and is_linear(ask) and run.deal.parts == 1 and ask.length <= FEW_QUERIES


def _decoded(ask: Ask) -> bool:
    """Say whether XLA decodes large parts of the body, in loops of static length, as for bodies on
    GPUs.

    Where layers feed each other, the reader makes keys and values of the carry alone. So the carry
    must be the decoded sources, all of them and number by number."""
    run, chain = ask.run, ask.run.wiring.chain
    exact = chain.read_in is None or ask.dtype in chain.read_in
    all_sources = chain.carry.keys() == run.wiring.storage.sources.keys()
    readable = not chain.carry or (chain.flows and exact and all_sources)
    return run.static_loops and is_linear(ask) and ask.length <= FEW_QUERIES and readable


def _in_tiles(ask: Ask) -> bool:
    """Say whether many queries meet large tiles of decoded tokens."""
    run = ask.run
    return (
        ask.length >= MANY_QUERIES and run.tiles != "off" and is_linear(ask) and run.deal.parts == 1
    )


READERS: dict[str, Callable[[Ask], bool]] = {
    "kernel": _by_kernel,
    "stored": _as_stored,
    "coefficients": lambda ask: as_coefficients(ask) and not ask.run.static_loops,
    "decoded": _decoded,
    "tiles": _in_tiles,
    "blocks": lambda ask: True,
}


def reader_of(ask: Ask) -> str:
    """Name the first reader of the table that takes a body."""
    return next(name for name, takes in READERS.items() if takes(ask))


def reads_pages(reader: str, ask: Ask) -> bool:
    """Say whether a reader of a body in pages goes from page to page. Otherwise it wants a row's
    pages side by side."""
    if reader == "kernel":
        return takes_pages(_kernel_chip(ask), ask.run.page)
    by_blocks = reader in ("blocks", "coefficients")
    return by_blocks or (reader == "stored" and not reads_by_heads(ask))


def reader_without_kernel(ask: Ask) -> str:
    """Name the reader of a body that has a kernel, in programs that are lowered for another
    platform than the kernel's chip."""
    return next(name for name, takes in READERS.items() if name != "kernel" and takes(ask))


def takes_recent(ask: Ask, sinks: int) -> bool:
    """Say whether the kernel also takes the tokens beside the body: sinks, window and new tokens.

    Kernels for exact bodies do. Otherwise XLA runs some thirty small operations a layer on a TPU,
    and about seven on a GPU, for these few tokens and for merging them with the body. Each of them
    takes as long as it takes to read the keys and values of a few hundred tokens.

    Args:
        sinks: How many first tokens of a row are sinks.

    Returns:
        Whether one call of the kernel is all of the layer's attention."""
    run = ask.run
    packed = run.wiring.fast.packed
    if (
        packed is None
        or not isinstance(packed.spec, ExactSpec)
        or run.deal.parts > 1
        or not run.slots
    ):
        return False
    if run.page and not reads_pages("kernel", ask):
        return False
    few_queries = ask.length < MANY_QUERIES and sinks + run.ring + ask.length <= MOST_RECENT
    return few_queries and _by_kernel(ask)
